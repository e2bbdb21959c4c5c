"""A small draft's attention for a single token: many tiny programs, joined inside the output projection.

Knows: one row, one new token, and that latency is all there is to win. Does not know: windows, trees, batches, and
sums that must be those of a wider step; ``kernels.attention`` has those.

One warp takes one head and one chunk of keys, so that nothing in it waits for another warp. What it leaves is not
joined by a launch of its own: every program of the output projection joins all heads for itself.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...quantize import Matrix
from ..compile.launching import launch, overlap
from ..tiles import ALONE_CHUNK, Tile, pieces, power_of_two
from .attention import LOG2E, new_key, old_keys
from .blocks import done, load_groups, unpack, wait, widen
from .matmul import Residual, stored

__all__ = ["attend_alone", "join_residual"]


@triton.jit(do_not_specialize=["capacity"])
def _alone_kernel(
    query, keys, values, part, stats, lengths, capacity, scale, HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """part [HEADS, SPLITS, D] and stats [HEADS, SPLITS, 2] (largest score, sum) of one chunk.

    With PDL 2 the chunk's old keys are loaded before the kernel in front has ended: see ``kernels.attention``.
    """
    split = tl.program_id(0)
    head = tl.program_id(1)
    start = split * BK
    d = tl.arange(0, DP)
    base = (head // (HEADS // KV)).to(tl.int64) * capacity * D
    if PDL == 1 or PDL == 3:
        wait(PDL)
    length = tl.load(lengths, cache_modifier=".cg").to(tl.int32)
    if start <= length:
        j = start + tl.arange(0, BK)
        k, _ = old_keys(keys, base, j, length, 0, D, DP, False)
        v, _ = old_keys(values, base, j, length, 0, D, DP, False)
        if PDL == 2:
            wait(PDL)
        q = tl.load(query + head * D + d, mask=d < D, other=0.0, cache_modifier=".cg").to(tl.float32) * scale
        new_k = new_key(keys, base, length, start + BK, D, DP)
        new_v = new_key(values, base, length, start + BK, D, DP)
        s = tl.where(j == length, tl.sum(new_k * q, axis=0), tl.sum(k.to(tl.float32) * q[None, :], axis=1))
        s = tl.where(j <= length, s, float("-inf"))
        top = tl.max(s, axis=0)
        p = tl.exp2(s - top)
        last = tl.sum(tl.where(j == length, p, 0.0), axis=0)
        total = tl.sum(p[:, None] * v.to(tl.float32), axis=0) + last * new_v
        done(PDL)
        slot = head * SPLITS + split
        tl.store(part + slot * D + d, total, mask=d < D)
        tl.store(stats + slot * 2, top)
        tl.store(stats + slot * 2 + 1, tl.sum(p, axis=0))
    else:
        if PDL == 2:
            wait(PDL)


@triton.jit
def _joined(part, slot, seen, share, d, D: tl.constexpr):
    """[HP, channels] the heads' attended values of channels d."""
    mask = seen[:, :, None] & (d < D)[None, None, :]
    value = tl.load(part + slot[:, :, None] * D + d[None, None, :], mask=mask, other=0.0, cache_modifier=".cg")
    return tl.sum(share[:, :, None] * value, axis=1)


@triton.jit
def _dot(weights, x):
    """[HB] sums of weights [HB, HP, channels] times x [HP, channels]."""
    return tl.sum(tl.sum(weights.to(tl.float32) * x[None, :, :], axis=2), axis=1)


@triton.jit
def _join_kernel(
    part, stats, lengths, w, scales, bias, residual, gain, scaled, squares, N, K: tl.constexpr, HB: tl.constexpr,
    HP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, CHUNK: tl.constexpr, SPLITS: tl.constexpr, SP: tl.constexpr,
    BITS: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * HB + tl.arange(0, HB)
    row = tl.minimum(n, N - 1)
    mask = n < N
    h = tl.arange(0, HP)
    s = tl.arange(0, SP)
    head = h < K // D
    STORED: tl.constexpr = 2 if BITS == 4 else 1  # weights in a byte
    j = tl.arange(0, DP // STORED)
    inside = head[:, None] & (j < D // STORED)[None, :]
    at = row.to(tl.int64)[:, None, None] * (K // STORED) + (h[:, None] * (D // STORED) + j[None, :])[None, :, :]
    weights = tl.load(w + at, mask=inside[None, :, :], other=0, eviction_policy="evict_first")
    if BITS == 8:
        by = tl.load(scales + row) * 64.0
    if BITS == 4:
        g = tl.arange(0, DP // 32)
        group = row.to(tl.int64)[:, None, None] * (K // 32) + (h[:, None] * (D // 32) + g[None, :])[None, :, :]
        by, minimum = load_groups(scales, group, (head[:, None] & (g < D // 32)[None, :])[None, :, :], True)
    gain_like = tl.load(gain + row)
    gains = gain_like.to(tl.float32)
    if PDL != 2:
        wait(PDL)
    old = tl.load(residual + n, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    live = tl.load(lengths, cache_modifier=".cg").to(tl.int32) // CHUNK + 1
    if PDL == 2:  # the residual and the lengths were written two kernels back or earlier
        wait(PDL)
    seen = head[:, None] & (s < live)[None, :]
    slot = h[:, None] * SPLITS + s[None, :]
    top = tl.load(stats + slot * 2, mask=seen, other=-1e30, cache_modifier=".cg")
    total = tl.load(stats + slot * 2 + 1, mask=seen, other=0.0, cache_modifier=".cg")
    share = tl.exp2(top - tl.max(top, axis=1)[:, None])
    share = share / tl.where(head, tl.sum(share * total, axis=1), 1.0)[:, None]
    if BITS == 4:
        low, high = unpack(weights, by, minimum)
        d = j // 16 * 32 + j % 16
        acc = _dot(low, _joined(part, slot, seen, share, d, D))
        acc += _dot(high, _joined(part, slot, seen, share, d + 16, D))
        acc = acc * 32768.0
    else:
        acc = _dot(widen(weights, gain_like, BITS), _joined(part, slot, seen, share, j, D))
        if BITS == 8:
            acc = acc * by
    done(PDL)
    if BIAS:
        acc = acc + tl.load(bias + row).to(tl.float32)
    new = (old + acc).to(residual.dtype.element_ty)
    tl.store(residual + n, new, mask=mask)
    new = tl.where(mask, new.to(tl.float32), 0.0)
    tl.store(scaled + n, (new * gains).to(scaled.dtype.element_ty), mask=mask)
    tl.store(squares + tl.program_id(0), tl.sum(new * new, axis=0))


def attend_alone(
    query: Tensor, cache: tuple[Tensor, Tensor], work: tuple[Tensor, Tensor], lengths: Tensor, *, pdl: int
) -> None:
    """Attention of query [1, heads, D] over the row's keys, its own last, to ``work``.

    ``cache``: keys and values [1, kv_heads, capacity, D]; ``work``: part [heads, splits, D] and stats [heads, splits,
    2], float32, one split for ALONE_CHUNK keys.
    """
    keys, values = cache
    _, kv, capacity, d = keys.shape
    heads, splits = work[0].shape[:2]
    launch(
        _alone_kernel, (splits, heads),
        query, keys, values, *work, lengths, capacity, d**-0.5 * LOG2E, HEADS=heads, KV=kv, D=d, DP=power_of_two(d),
        BK=ALONE_CHUNK, SPLITS=splits, num_warps=1, **overlap(pdl),
    )  # fmt: skip


def join_residual(
    work: tuple[Tensor, Tensor], lengths: Tensor, w: Matrix, to: Residual, t: Tile, *, bias: Tensor | None, pdl: int
) -> None:
    """``matmul_residual`` of what ``attend_alone`` left: x [1, N] += attended W^T + bias, and so on."""
    (outputs, inputs), (heads, splits, d) = w.shape, work[0].shape
    tiles = pieces(outputs, t.rows)
    assert to.squares.shape == (1, tiles)
    assert heads * d == inputs
    launch(
        _join_kernel, (tiles,),
        *work, lengths, *stored(w, to.x), to.x if bias is None else bias, *to, outputs, K=inputs, HB=t.rows,
        HP=power_of_two(heads), D=d, DP=power_of_two(d), CHUNK=ALONE_CHUNK, SPLITS=splits, SP=power_of_two(splits),
        BITS=w.bits, BIAS=bias is not None, num_warps=t.warps, **overlap(pdl),
    )  # fmt: skip
