"""Which models cannot be served, and why: a sentence each, with what to do instead.

Knows: what in a configuration gets in the way of rows that are rolled back. Does not know: how models are loaded.
"""

from __future__ import annotations

from typing import Any

from ...errors import ModelRefused
from ..runner import attention_kinds

__all__ = ["model_class", "refusals", "refuse"]

_SERVED_KINDS = {"full_attention", "sliding_attention", "chunked_attention"}
_RECURRENT_KINDS = {"linear_attention", "conv", "hybrid", "hybrid_sliding", "mamba", "recurrent"}
_INSTEAD = "use a decoder-only model with rotary or learned positions, such as Llama, Qwen, Mistral, Gemma or SmolLM"


def refuse(reasons: tuple[str, ...]) -> None:
    if reasons:
        raise ModelRefused("; ".join(reasons))


def model_class(config: Any) -> type | None:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    try:
        found: type | None = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    except (ImportError, AttributeError):  # the family needs a package that is not here
        return None
    return found


def refusals(config: Any, kind: type | None) -> tuple[str, ...]:
    """Why a model of this config cannot be served: a sentence each, with what to do."""
    name = kind.__name__ if kind is not None else str(config.model_type)
    text = config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False):
        return (
            f"{name} is an encoder-decoder: it reads the prompt with one network and answers with another, and only "
            f"the continuation of one text can be drafted here; {_INSTEAD}",
        )
    if getattr(text, "num_hidden_layers", None) == 0:
        return (f"{name} has no layers (num_hidden_layers is 0), so it is damaged, or no model at all",)
    own_code = bool(getattr(config, "auto_map", None))
    written = [str(each) for each in getattr(config, "architectures", None) or ()]
    masked = written and all("MaskedLM" in each for each in written)
    if masked or (kind is None and not own_code):
        return (f"{name} has no causal language model head: it cannot continue a text; {_INSTEAD}",)
    if kind is not None and not hasattr(kind, "get_output_embeddings"):
        return (f"{name} has no output head over a vocabulary; {_INSTEAD}",)
    odd = sorted(sort for sort in attention_kinds(text) if sort not in _SERVED_KINDS)
    if getattr(kind, "_is_stateful", False) or _RECURRENT_KINDS.intersection(odd):
        return (
            f"{name} has recurrent layers, whose running state cannot be rolled back to before a rejected draft; "
            f"{_INSTEAD}",
        )
    if odd:
        return (
            f"{name} has layers ({', '.join(odd)}) that remember more than keys and values, which this cache does not "
            f"hold; {_INSTEAD}",
        )
    if "local" in (getattr(text, "attention_layers", None) or ()) or getattr(text, "keep_window_size", None):
        # GPT-Neo and Doge. Not left to the probe, which is shorter than their windows.
        return (
            f"{name} cuts its own windows by the length of the cache instead of following the mask it is given, so "
            f"rows of different lengths cannot be run together; {_INSTEAD}",
        )
    attention = getattr(text, "attn_config", None)
    alibi = (
        getattr(text, "alibi", False)
        or getattr(attention, "alibi", False)
        or getattr(text, "position_embedding_type", None) == "alibi"
        or text.model_type in ("bloom", "mpt")
    )
    if alibi:
        return (
            f"{name} uses ALiBi, which reads positions off the cache's layout and ignores the ones it is given, so "
            f"rows of different lengths cannot be run together; {_INSTEAD}",
        )
    return ()
