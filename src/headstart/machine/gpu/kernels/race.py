"""The largest of a vocabulary, and a token drawn by a race, in two small launches.

Knows: how ``maths.noise`` makes a race out of keys (the integers are the same bits, the logarithm is CUDA's own, as
torch uses it), and that NaN counts as the largest value. Does not know: where values or probabilities come from.

A vocabulary is cut into at most 64 chunks, one program each; a second kernel picks the winner among theirs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from ..compile.launching import overlap, supports_overlap
from ..tiles import power_of_two
from .blocks import wait

__all__ = ["CHUNKS", "Rows", "argmax", "best", "noise_at", "race"]

CHUNKS = 64


@triton.jit
def noise_at(v, low, high, LIB: tl.constexpr):
    """``maths.noise.exponential`` at tokens v."""
    x = v.to(tl.uint32) * 0x7F4A7C15
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    x = (x ^ (x >> 16)) + low.to(tl.uint32, bitcast=True)
    x = (x ^ (x >> 16)) * 0x7FEB352D + high.to(tl.uint32, bitcast=True)
    x = (x ^ (x >> 15)) * 0x846CA68B
    x = (x ^ (x >> 16)) & 0x7FFFFFFF
    value = tl.minimum((x.to(tl.int32).to(tl.float32) + 0.5) * (2.0**-31), 1.0 - 2.0**-24)
    if LIB:
        noise = -libdevice.log1p(-value)
    else:
        noise = (-tl.log(1.0 - value.to(tl.float64))).to(tl.float32)
    return noise


@triton.jit
def best(score, v, V, scores, winners, at):
    """The chunk's largest score and the first token that has it. NaN counts as the largest."""
    score = tl.where(v < V, tl.where(score == score, score, float("inf")), float("-inf"))
    peak, place = tl.max(score, axis=0, return_indices=True)
    tl.store(scores + at, peak)
    tl.store(winners + at, tl.sum(tl.where(tl.arange(0, v.shape[0]) == place, v, 0), axis=0))


@triton.jit
def _score_kernel(
    values, low_key, high_key, scores, winners, V, B: tl.constexpr, C: tl.constexpr, LIB: tl.constexpr,
    RACE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Each chunk's largest value, or its winner in a race."""
    chunk, m = tl.program_id(0), tl.program_id(1)
    v = chunk * B + tl.arange(0, B)
    wait(PDL)
    x = tl.load(values + m.to(tl.int64) * V + v, mask=v < V, other=float("-inf"))
    if RACE:
        x = tl.div_rn(x, noise_at(v, tl.load(low_key + m), tl.load(high_key + m), LIB))
    best(x, v, V, scores, winners, m * C + chunk)


@triton.jit
def _winner_kernel(scores, winners, out, C: tl.constexpr, FINITE: tl.constexpr, PDL: tl.constexpr):
    """FINITE: -1 where the best score is not a finite number."""
    m = tl.program_id(0)
    c = tl.arange(0, C)
    wait(PDL)
    score = tl.load(scores + m * C + c, cache_modifier=".cg")
    token = tl.load(winners + m * C + c, cache_modifier=".cg")
    # The chunks stand in order, so the first of the best is the smallest token.
    peak = tl.max(score, axis=0)
    first = tl.min(tl.where(score == peak, token, 2147483647), axis=0)
    if FINITE:
        first = tl.where((peak > float("-inf")) & (peak < float("inf")), first, -1)
    tl.store(out + m, first.to(tl.int64))


# -- how they are called ----------------------------------------------------------------------------------------------


class Rows:
    """M rows of one call, and what the kernels leave for one another."""

    def __init__(self, values: Tensor) -> None:
        assert values.dtype == torch.float32
        assert values.is_contiguous()
        self.values = values
        self.size = values.shape[-1]
        self.count = values.numel() // self.size
        self.nodes = self.count // values.shape[0] if values.dim() > 1 else 1
        # Tokens in a chunk: by the vocabulary alone, so that a row's sums do not depend on other rows.
        self.width = max(power_of_two(-(-self.size // CHUNKS)), 64)
        self.grid = (CHUNKS, self.count)
        self.overlap = overlap(2 if supports_overlap(values.device) else 0)  # early starts where the GPU can
        self.options = {"LIB": values.device.type == "cuda"} | self.overlap  # CUDA's own exp and log1p, as torch's
        self.warps = 4 if self.width <= 1024 else 8
        self.scores = self.new(CHUNKS)
        self.winners = self.new(CHUNKS, dtype=torch.int32)

    def new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(self.count, *shape, device=self.values.device, dtype=dtype)

    def score(self, keys: tuple[Tensor, Tensor] | None) -> None:
        """Each chunk's largest value, or with keys its winner in a race."""
        low, high = (self.values, self.values) if keys is None else (key.contiguous() for key in keys)
        _score_kernel[self.grid](
            self.values, low, high, self.scores, self.winners, self.size, B=self.width, C=CHUNKS, RACE=keys is not None,
            num_warps=self.warps, **self.options,
        )  # fmt: skip

    def pick(self, *, finite: bool = False, chunks: int = CHUNKS) -> Tensor:
        out = self.new(dtype=torch.int64)
        _winner_kernel[(self.count,)](
            self.scores, self.winners, out, C=chunks, FINITE=finite, num_warps=1, **self.overlap
        )  # fmt: skip
        return out.view(self.values.shape[:-1])


def argmax(values: Tensor, *, finite: bool = False) -> Tensor:
    """First index of the largest: values float32 [.., V] -> [..] int64. NaN counts as the largest.

    ``finite``: -1 where the largest is not a finite number.
    """
    r = Rows(values)
    r.score(None)
    return r.pick(finite=finite)


def race(p: Tensor, keys: tuple[Tensor, Tensor]) -> Tensor:
    """As ``maths.noise.race``: p float32 [.., V], keys two int32 [..] -> [..] int64."""
    r = Rows(p)
    r.score(keys)
    return r.pick()
