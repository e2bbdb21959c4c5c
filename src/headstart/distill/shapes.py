"""How a draft is cut: a shallow copy of a donor's layers, or a head for a target.

Knows: which parts of a model a draft can start from. Does not know: data, training.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from ..errors import InvalidParameter
from ..machine.head import HeadConfig, HeadNet
from ..machine.hidden_states import decoder_layers

__all__ = ["draft_vocabulary", "head_for", "narrow_copy", "shallow_copy", "watched_layers"]

_FIRST_SPREAD = 2.0


def draft_vocabulary(counts: Tensor, size: int, always: Sequence[int] = ()) -> Tensor:
    """The ``size`` tokens a head may say: ``always`` (end marks), then the most frequent; rising ids.

    Of tokens that are equally frequent (never seen, most of them) the lower ids are taken: in the vocabularies of
    byte-pair encodings they were merged first, so they are the more common ones.
    """
    size = min(size, len(counts))
    rank = counts.double().clone()
    rank[list(always)] = float("inf")
    return rank.sort(descending=True, stable=True).indices[:size].sort().values


def watched_layers(count: int) -> tuple[int, ...]:
    """A low, a middle and a high one of ``count`` layers."""
    return tuple(sorted({min(2, count - 1), count // 2, max(count - 2, 0)}))


def head_for(
    target: PreTrainedModel,
    ids: Tensor,
    *,
    width: int | None = None,
    ffn: int | None = None,
    head_dim: int | None = None,
    window: int = 512,
) -> HeadNet:
    """A fresh head for ``target`` that says the tokens ``ids``. Sizes default to the target's own.

    Where the widths agree, its output rows start as the target's own, which spares it much of the beginning.
    """
    config = target.config.get_text_config(decoder=True)
    hidden = int(target.get_input_embeddings().weight.shape[1])
    output = target.get_output_embeddings().weight
    layers = len(decoder_layers(target))
    width = width or hidden
    head_dim = head_dim or int(getattr(config, "head_dim", None) or hidden // config.num_attention_heads)
    heads = max(1, width // head_dim)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    shape = HeadConfig(
        target_hidden=hidden,
        target_layers=layers,
        target_vocab=int(output.shape[0]),
        watch=watched_layers(layers),
        width=width,
        heads=heads,
        kv_heads=max(n for n in range(1, min(kv_heads, heads) + 1) if heads % n == 0),
        head_dim=head_dim,
        ffn=ffn or int(getattr(config, "intermediate_size", None) or 4 * hidden),
        vocab=len(ids),
        window=window,
    )
    net = HeadNet(shape, ids.cpu())
    if width == output.shape[1]:
        rows = output.detach()[ids.to(output.device)].float().cpu()
        gain = _last_gain(target, hidden)
        rows = rows * gain if gain is not None else rows
        with torch.no_grad():  # y has entries of size 1, so before it means anything logits spread by a row's length
            net.head.copy_(rows * (_FIRST_SPREAD / rows.norm(dim=1).mean()))
    return net


def _last_gain(target: PreTrainedModel, hidden: int) -> Tensor | None:
    """The weight of the norm before the output head, if the target has one where most have it."""
    for name in ("norm", "final_layernorm", "final_layer_norm", "ln_f"):
        weight = getattr(getattr(target.base_model, name, None), "weight", None)
        if isinstance(weight, Tensor) and weight.shape == (hidden,):
            return weight.detach().float().cpu()
    return None


def shallow_copy(donor: PreTrainedModel, layers: Sequence[int] | int, **overrides: Any) -> PreTrainedModel:
    """A model of the donor's family with only some of its layers, and everything else copied.

    ``layers``: which ones, or how many (spread from the first to the last). ``overrides``: other values of the config,
    for a narrower model: its embeddings start as the donor's in the directions in which they spread most, and what else
    no longer fits starts from chance.
    """
    stack = decoder_layers(donor)
    if isinstance(layers, int):
        if not 1 <= layers <= len(stack):
            raise InvalidParameter("layers", f"must lie in 1 .. {len(stack)}, not {layers}")
        last = len(stack) - 1
        layers = [round(i * last / max(1, layers - 1)) for i in range(layers)]
    config = copy.deepcopy(donor.config)
    text = config.get_text_config(decoder=True)
    text.num_hidden_layers = len(layers)
    if getattr(text, "layer_types", None):
        text.layer_types = [text.layer_types[layer] for layer in layers]
    for name, value in overrides.items():
        if not hasattr(text, name):
            raise InvalidParameter(name, f"is not a setting of {type(text).__name__}")
        setattr(text, name, value)
    draft: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    prefix = next(name for name, module in donor.named_modules() if module is stack)
    mine = draft.state_dict()
    with torch.no_grad():
        for name, value in donor.state_dict().items():
            if name.startswith(prefix + "."):
                number, _, rest = name[len(prefix) + 1 :].partition(".")
                places = [i for i, layer in enumerate(layers) if layer == int(number)]
                names = [f"{prefix}.{place}.{rest}" for place in places]
            else:
                names = [name]
            for own in names:
                if own in mine and mine[own].shape == value.shape:
                    mine[own].copy_(value)
        for get in ("get_input_embeddings", "get_output_embeddings"):
            own_table, table = getattr(draft, get)().weight, getattr(donor, get)().weight
            if own_table.shape[1] < table.shape[1] and own_table.shape[0] == table.shape[0]:
                own_table.copy_(_narrowed(table, own_table.shape[1]))
    draft.tie_weights()
    if donor.generation_config is not None:
        draft.generation_config = copy.deepcopy(donor.generation_config)
    return draft


def narrow_copy(donor: PreTrainedModel, layers: int, width: int, ffn: int | None = None) -> PreTrainedModel:
    """A shallow copy that is narrower too, with as many heads of the donor's size as fit. ``ffn``: without it 8/3 of
    the width, rounded up to a multiple of 64.

    Most weights of a small model with a large vocabulary are its output rows, so its width is what a step costs.
    """
    config = donor.config.get_text_config(decoder=True)
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    if width % head_dim:
        raise InvalidParameter("width", f"must be a multiple of {head_dim}, the size of the donor's heads, not {width}")
    heads = width // head_dim
    overrides: dict[str, Any] = {
        "hidden_size": width,
        "intermediate_size": ffn or -(-width * 8 // 3 // 64) * 64,
        "num_attention_heads": heads,
    }
    if hasattr(config, "num_key_value_heads"):
        overrides["num_key_value_heads"] = heads
    if getattr(config, "head_dim", None) is not None:
        overrides["head_dim"] = head_dim
    return shallow_copy(donor, layers, **overrides)


def _narrowed(table: Tensor, width: int) -> Tensor:
    """Rows [V, H] seen in the ``width`` directions in which they spread most, as long in the mean as before."""
    rows = table.detach().float()
    _, directions = torch.linalg.eigh(rows.T @ rows)  # rising
    found: Tensor = rows @ directions[:, -width:].flip(1)
    scale: Tensor = rows.norm(dim=1).mean() / found.norm(dim=1).mean()
    return found * scale
