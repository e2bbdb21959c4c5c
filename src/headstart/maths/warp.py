"""What a request asks of its distribution, for a whole batch, as tensors on the device.

Knows: sampling parameters row by row (``Warp``) and the tokens that penalties count (``History``).
Does not know: logits. ``distribution`` applies both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..types import SamplingParams
from .asks import DRAWING, PENALTIES, PROCESSING, RULES, TENSORS_ONLY, Asks, Served, asks_of
from .limits import NO_TOP_K

__all__ = ["LIKELIEST", "UNTOUCHED", "History", "Warp", "temperature_of"]

#: the likeliest token of logits that nothing is done to
UNTOUCHED = Served(
    "untouched logits", frozenset({"logprobs"}), DRAWING | PROCESSING | RULES | TENSORS_ONLY | {"structured"}
)
#: the same, of those that a grammar allows
LIKELIEST = Served("likeliest that is allowed", UNTOUCHED.serves | {"structured"}, UNTOUCHED.declines - {"structured"})

_COLD = 0.01  # below this temperature the largest logit is subtracted first, so that the quotient cannot overflow


@dataclass(frozen=True)
class Warp:
    """Sampling parameters of R rows as tensors on the device; None where no row uses the feature."""

    asks: Asks  # what any of the rows asks for
    vocab_size: int  # ids from here on are padding and never get mass
    greedy: Tensor  # [R] bool
    all_greedy: bool
    any_greedy: bool
    temperature: Tensor | None  # [R]; 1 for greedy rows
    cold: bool  # some temperature is close to 0
    min_p: Tensor | None  # [R]
    top_k: Tensor | None  # [R] int64; a huge number for rows without
    most_k: int  # the largest top_k in use
    top_p: Tensor | None  # [R]
    bias: tuple[Tensor, Tensor] | None  # [R, B] token ids, and [R, B] what to add to their logits
    early_eos: tuple[Tensor, Tensor, Tensor] | None  # [R] min_tokens, [R, E] token ids, [R, E] bool: not padding
    repetition: Tensor | None  # [R]
    frequency: Tensor | None  # [R]
    presence: Tensor | None  # [R]
    allowed: Tensor | None = None  # [R, N, V] bool: what grammars let each node go on with

    @staticmethod
    def of(
        params: Sequence[SamplingParams],
        *,
        vocab_size: int,
        eos: Sequence[Sequence[int]] | None,
        device: torch.device | str,
        dtype: torch.dtype = torch.float32,
    ) -> Warp:
        """``eos[r]``: the ids row r may not draw until its min_tokens are out; None: a guess, which disregards them.
        ``dtype``: float64 for exact tests."""
        asks = frozenset[str]().union(*map(asks_of, params)) - (set() if eos is not None else {"min_tokens"})
        greedy = [p.greedy for p in params]

        def column(name: str, if_greedy: float | None = None) -> Tensor | None:
            if name not in asks:
                return None
            values = [if_greedy if cold and if_greedy is not None else getattr(p, name) for p, cold in rows]
            return torch.tensor(values, dtype=dtype, device=device)

        # Greedy rows need none of the warpers: none of them can move the argmax.
        rows = list(zip(params, greedy, strict=True))
        warm = [1.0 if cold else p.temperature for p, cold in rows]
        ks = [0 if cold or p.top_k >= vocab_size else p.top_k for p, cold in rows]
        return Warp(
            asks=asks,
            vocab_size=vocab_size,
            greedy=torch.tensor(greedy, dtype=torch.bool, device=device),
            all_greedy=all(greedy),
            any_greedy=any(greedy),
            temperature=torch.tensor(warm, dtype=dtype, device=device) if any(t != 1 for t in warm) else None,
            cold=min(warm, default=1.0) < _COLD,
            min_p=column("min_p", 0.0),
            top_k=torch.tensor([k or NO_TOP_K for k in ks], device=device) if any(ks) else None,
            most_k=max(ks, default=0),
            top_p=column("top_p", 1.0),
            bias=_bias(params, vocab_size, device, dtype) if "logit_bias" in asks else None,
            early_eos=_early_eos(params, eos or [], vocab_size, device) if "min_tokens" in asks else None,
            repetition=column("repetition_penalty"),
            frequency=column("frequency_penalty"),
            presence=column("presence_penalty"),
        )

    @property
    def needs_history(self) -> bool:
        """Some row uses a penalty."""
        return not self.asks.isdisjoint(PENALTIES)

    @property
    def untouched(self) -> bool:
        """Every row is greedy, and none asks for anything that could change which logit is the largest."""
        return self.allowed is None and UNTOUCHED.takes([self.asks])


def temperature_of(params: SamplingParams) -> float:
    """What logits are divided by: 1 for a greedy row, which has no use for its temperature."""
    return 1.0 if params.greedy else params.temperature


def _padded(rows: Sequence[Sequence[float]], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Lists of different lengths as one tensor, zeros at the end."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], dtype=dtype, device=device)


def _bias(
    params: Sequence[SamplingParams], vocab_size: int, device: torch.device | str, dtype: torch.dtype
) -> tuple[Tensor, Tensor] | None:
    pairs = [{i: v for i, v in (p.logit_bias or {}).items() if i < vocab_size} for p in params]
    if not any(pairs):
        return None
    ids = _padded([list(row) for row in pairs], torch.int64, device)
    return ids, _padded([list(row.values()) for row in pairs], dtype, device)


def _early_eos(
    params: Sequence[SamplingParams], eos: Sequence[Sequence[int]], vocab_size: int, device: torch.device | str
) -> tuple[Tensor, Tensor, Tensor] | None:
    ends = [[i for i in ids if i < vocab_size] if p.min_tokens else [] for p, ids in zip(params, eos, strict=True)]
    if not any(ends):
        return None
    least = torch.tensor([p.min_tokens for p in params], dtype=torch.int64, device=device)
    real = _padded([[1] * len(row) for row in ends], torch.bool, device)
    return least, _padded(ends, torch.int64, device), real


@dataclass(frozen=True)
class History:
    """What penalties need to know of the past."""

    prompt: Tensor  # [R, V] bool: the token occurs in the prompt
    counts: Tensor  # [R, V] float32: how often it occurs in the committed output

    @staticmethod
    def of(
        prompts: Sequence[Sequence[int]],
        outputs: Sequence[Sequence[int]],
        V: int,
        device: torch.device | str,
    ) -> History:
        prompt = np.zeros((len(prompts), V), dtype=np.bool_)
        counts = np.zeros((len(prompts), V), dtype=np.float32)
        for row, (before, after) in enumerate(zip(prompts, outputs, strict=True)):
            # Ids a smaller draft vocabulary lacks can have no logit there either.
            seen, out = np.asarray(before, dtype=np.int64), np.asarray(after, dtype=np.int64)
            prompt[row, seen[seen < V]] = True
            np.add.at(counts[row], out[out < V], 1.0)
        return History(torch.from_numpy(prompt).to(device), torch.from_numpy(counts).to(device))

    def add(self, tokens: Tensor) -> History:
        """Count one more output token for each row (tokens [R]), in place; returns itself."""
        # -1 marks a row whose logits are broken; it fails elsewhere, and must not bring the others down here.
        self.counts.scatter_add_(1, tokens.clamp_min(0).unsqueeze(1), torch.ones_like(self.counts[:, :1]))
        return self
