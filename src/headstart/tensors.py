"""Speculative decoding on plain Hugging Face models and tensors, for those who come from the tutorials.

Knows: tensors in, tensors out, and what padding is. Does not know: anything but ``LLM``, which does the work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .api import LLM
from .errors import GenerationFailed, InvalidParameter
from .progress import silent
from .types import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["SpeculativeOutput", "speculative_decode"]


class SpeculativeOutput(NamedTuple):
    """What ``speculative_decode`` returns."""

    ids: torch.Tensor  # [B, T] prompt (without its padding) and answer, short rows padded at the end
    acceptance_rate: float


def speculative_decode(
    target_model: PreTrainedModel,
    draft_model: PreTrainedModel,
    input_ids: torch.Tensor,
    gamma: int = 5,
    max_tokens: int | None = 100,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    *,
    attention_mask: torch.Tensor | None = None,
    seed: int | None = None,
    pad_token_id: int | None = None,
    **params: Any,
) -> SpeculativeOutput:
    """Speculative decoding of plain Hugging Face models on plain tensors. ``input_ids``: [T] or [B, T].

    ``attention_mask``, of the same shape, is 0 where a row is padded, on its left or its right; without one there must
    be no padding. A row of the result is its prompt without padding, then the answer, then ``pad_token_id`` (the
    model's own if it is None, or 0) up to the longest row: prompts of different lengths end at different places.

    Takes every other field of ``SamplingParams`` by name too. For more than one call build an ``LLM`` instead: it keeps
    its caches.
    """
    settings = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, max_tokens=max_tokens, seed=seed, **params
    )
    if settings.n != 1:
        raise InvalidParameter("n", f"must be 1 here, not {settings.n}: repeat rows of input_ids, or use LLM")
    given = torch.as_tensor(input_ids)
    pads = [pad for pad in (pad_token_id, *_own(target_model, "pad_token_id")) if pad is not None]
    prompts = _prompts(given, attention_mask, set(pads), set(_own(target_model, "bos_token_id")))
    longest = max(map(len, prompts))
    llm = LLM(
        target_model,
        draft_model,
        gamma=gamma,
        max_rows=len(prompts),
        max_model_len=None if max_tokens is None else max(2, longest + max_tokens),
        check=False,
        progress=silent,
    )
    answers = llm.generate(prompts, settings)
    for answer in answers:
        if answer.error:
            raise GenerationFailed(answer.error)
    lines = [[*answer.prompt_token_ids, *answer.token_ids] for answer in answers]
    width = max(map(len, lines))
    fill = pads[0] if pads else 0
    ids = torch.tensor([line + [fill] * (width - len(line)) for line in lines], device=given.device)
    return SpeculativeOutput(ids, llm.stats.acceptance_rate)


def _own(model: PreTrainedModel, name: str) -> list[Any]:
    """What the model's two configs say of a token; either may be silent."""
    found = [getattr(config, name, None) for config in (model.config, model.generation_config)]
    return [token for token in found if token is not None]


def _prompts(
    input_ids: torch.Tensor, attention_mask: torch.Tensor | None, pads: set[int], bos: set[int]
) -> list[list[int]]:
    """The rows without their padding, which is one of ``pads``."""
    if input_ids.dim() not in (1, 2) or not input_ids.numel():
        raise InvalidParameter("input_ids", f"must be [T] or [B, T] and not empty, not {tuple(input_ids.shape)}")
    if input_ids.is_floating_point() or input_ids.dtype == torch.bool:
        raise InvalidParameter("input_ids", f"must be token ids (whole numbers), not {input_ids.dtype}")
    rows: list[list[int]] = input_ids.reshape(-1, input_ids.shape[-1]).tolist()
    if attention_mask is None:
        _refuse_padding(rows, pads, bos)
        return rows
    mask = torch.as_tensor(attention_mask)
    if mask.shape != input_ids.shape:
        raise InvalidParameter(
            "attention_mask", f"must have the shape of input_ids, {tuple(input_ids.shape)}, not {tuple(mask.shape)}"
        )
    lines = mask.reshape(-1, mask.shape[-1]).tolist()
    return [_unpadded(index, row, line) for index, (row, line) in enumerate(zip(rows, lines, strict=True))]


def _unpadded(index: int, row: list[int], mask: list[float]) -> list[int]:
    if not set(mask) <= {0, 1}:
        raise InvalidParameter("attention_mask", f"must be 0 or 1 everywhere (row {index})")
    real = [place for place, seen in enumerate(mask) if seen]
    if not real:
        raise InvalidParameter("attention_mask", f"leaves nothing of row {index}")
    if real[-1] - real[0] + 1 != len(real):
        raise InvalidParameter("attention_mask", f"has a hole in row {index}: only its ends may be padding")
    return row[real[0] : real[-1] + 1]


def _refuse_padding(rows: list[list[int]], pads: set[int], bos: set[int]) -> None:
    """Rows of different lengths are padded to one; whoever says nothing of it would have the padding read as text."""
    if len(rows) == 1 or len(rows[0]) == 1:
        return
    for index, row in enumerate(rows):
        # Where padding and the beginning of a text are one token, one of it says nothing.
        first = row[1] if row[0] in bos else row[0]
        for pad in pads & {first, row[-1]}:
            raise InvalidParameter(
                "input_ids",
                f"looks padded: row {index} begins or ends with token {pad}, the model's padding. Pass attention_mask "
                "(the tokenizer makes it; all ones if nothing is padded)",
            )
