# mypy: ignore-errors
# Triton's language only looks like Python; mypy cannot read kernel bodies.
"""Noise keys in one launch: ``maths.noise.keys`` is some fifty tiny ones, which a recorded round would notice.

Knows: the mixing of ``maths.noise``, bit for bit. Does not know: what is drawn with the keys.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["keys"]

_BLOCK = 128


@triton.jit
def _mix64(x):
    """splitmix64's finaliser; the arithmetic shift's copies of the sign are masked away."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit(do_not_specialize=["count", "width"])
def _keys_kernel(
    seeds, base, offset, stream, low, high, count, width,
    OFFSET: tl.constexpr, STREAM: tl.constexpr, WIDE_BASE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """OFFSET, STREAM: the number itself, or -1 for a tensor."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = i < count
    row = i // width
    key = tl.load(seeds + row, mask=live, other=0) + -7046029254386353131
    key = _mix64(key) + tl.load(base + (i if WIDE_BASE else row), mask=live, other=0) * -3335678366873096957
    key = _mix64(key)
    if OFFSET < 0:
        key += tl.load(offset + i, mask=live, other=0) * -8306560040656073257
    else:
        key += tl.full([BLOCK], OFFSET, tl.int64) * -8306560040656073257
    if STREAM < 0:
        key += tl.load(stream + row, mask=live, other=0) * -7046029254386353131
    else:
        key += tl.full([BLOCK], STREAM, tl.int64) * -7046029254386353131
    key = _mix64(key)
    tl.store(low + i, key.to(tl.int32), mask=live)
    tl.store(high + i, (key >> 32).to(tl.int32), mask=live)


def keys(seed: Tensor, base: Tensor, offset: Tensor | int, stream: Tensor | int) -> tuple[Tensor, Tensor]:
    """As ``maths.noise.keys``: seed [R], base [R] or [R, N], offset a number or [R, N], stream a number or [R]."""
    wide = next((x for x in (base, offset) if isinstance(x, Tensor) and x.dim() == 2), None)
    shape = tuple(wide.shape) if wide is not None else tuple(seed.shape)
    low, high = (torch.empty(shape, dtype=torch.int32, device=seed.device) for _ in "ab")
    if not low.numel():
        return low, high
    fixed_offset, fixed_stream = not isinstance(offset, Tensor), not isinstance(stream, Tensor)
    base = base.contiguous()
    _keys_kernel[(triton.cdiv(low.numel(), _BLOCK),)](
        seed.contiguous(),
        base,
        base if fixed_offset else offset.contiguous(),
        base if fixed_stream else stream.contiguous(),
        low,
        high,
        low.numel(),
        shape[1] if wide is not None else 1,
        OFFSET=offset if fixed_offset else -1,
        STREAM=stream if fixed_stream else -1,
        WIDE_BASE=base.dim() == 2,
        BLOCK=_BLOCK,
    )
    return low, high
