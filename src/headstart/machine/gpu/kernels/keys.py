"""Noise keys in one launch: ``maths.noise.keys`` is some fifty tiny ones, which a captured round would notice.

Knows: the mixing of ``maths.noise``, bit for bit. Does not know: what is drawn with the keys.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..tiles import pieces

__all__ = ["keys", "round_key", "words_of"]

_BLOCK = 128


@triton.jit
def _mix64(x):
    """splitmix64's finaliser; the arithmetic shift's copies of the sign are masked away."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def round_key(seed, base):
    """``maths.noise.round_key``."""
    return _mix64(_mix64(seed + -7046029254386353131) + base * -3335678366873096957)


@triton.jit
def words_of(key, offset, stream):
    """``maths.noise.keys_in``: offset, stream int64."""
    key = _mix64(key + offset * -8306560040656073257 + stream * -7046029254386353131)
    return key.to(tl.int32), (key >> 32).to(tl.int32)


@triton.jit(do_not_specialize=["count", "width"])
def _keys_kernel(
    seeds, base, offset, stream, low, high, count, width,
    OFFSET: tl.constexpr, STREAM: tl.constexpr, WIDE_BASE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """OFFSET, STREAM: the number itself, or -1 for a tensor."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = i < count
    row = i // width
    wide = base + (i if WIDE_BASE else row)
    key = round_key(tl.load(seeds + row, mask=live, other=0), tl.load(wide, mask=live, other=0))
    if OFFSET < 0:
        place = tl.load(offset + i, mask=live, other=0)
    else:
        place = tl.full([BLOCK], OFFSET, tl.int64)
    if STREAM < 0:
        kind = tl.load(stream + row, mask=live, other=0)
    else:
        kind = tl.full([BLOCK], STREAM, tl.int64)
    first, second = words_of(key, place, kind)
    tl.store(low + i, first, mask=live)
    tl.store(high + i, second, mask=live)


def keys(seed: Tensor, base: Tensor, offset: Tensor | int, stream: Tensor | int) -> tuple[Tensor, Tensor]:
    """As ``maths.noise.keys``: seed [R], base [R] or [R, N], offset a number or [R, N], stream a number or [R]."""
    wide = next((x for x in (base, offset) if isinstance(x, Tensor) and x.dim() == 2), None)
    shape = tuple(wide.shape) if wide is not None else tuple(seed.shape)
    low, high = (torch.empty(shape, dtype=torch.int32, device=seed.device) for _ in "ab")
    if not low.numel():
        return low, high
    fixed_offset, fixed_stream = not isinstance(offset, Tensor), not isinstance(stream, Tensor)
    base = base.contiguous()
    _keys_kernel[(pieces(low.numel(), _BLOCK),)](
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
