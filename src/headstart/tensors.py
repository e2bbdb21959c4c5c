"""Speculative decoding on plain Hugging Face models and tensors, for those who come from the tutorials.

Knows: tensors in, tensors out. Does not know: anything but ``LLM``, which does the work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .api import LLM
from .errors import GenerationFailed, InvalidParameter
from .machine.progress import silent
from .types import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["SpeculativeOutput", "speculative_decode"]


class SpeculativeOutput(NamedTuple):
    """What ``speculative_decode`` returns."""

    ids: torch.Tensor  # [B, T] prompt and answer, short rows padded at the end
    acceptance_rate: float


def speculative_decode(
    target_model: PreTrainedModel,
    draft_model: PreTrainedModel,
    input_ids: torch.Tensor,
    gamma: int = 5,
    max_tokens: int = 100,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    *,
    seed: int | None = None,
    pad_token_id: int = 0,
    **params: Any,
) -> SpeculativeOutput:
    """Speculative decoding of plain Hugging Face models on plain tensors. ``input_ids``: [T] or [B, T], unpadded.

    Takes every other field of ``SamplingParams`` by name too. For more than one call build an ``LLM`` instead: it keeps
    its caches.
    """
    settings = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, max_tokens=max_tokens, seed=seed, **params
    )
    if input_ids.dim() not in (1, 2) or not input_ids.numel():
        raise InvalidParameter("input_ids", f"must be [T] or [B, T] and not empty, not {tuple(input_ids.shape)}")
    prompts = input_ids.reshape(-1, input_ids.shape[-1]).tolist()
    longest = len(prompts[0]) + max_tokens
    llm = LLM(
        target_model,
        draft_model,
        gamma=gamma,
        max_rows=len(prompts),
        max_model_len=max(2, longest),
        check=False,
        progress=silent,
    )
    answers = llm.generate(prompts, settings)
    for answer in answers:
        if answer.error:
            raise GenerationFailed(answer.error)
    lines = [[*answer.prompt_token_ids, *answer.token_ids] for answer in answers]
    width = max(map(len, lines))
    ids = torch.tensor([line + [pad_token_id] * (width - len(line)) for line in lines], device=input_ids.device)
    return SpeculativeOutput(ids, llm.stats.acceptance_rate)
