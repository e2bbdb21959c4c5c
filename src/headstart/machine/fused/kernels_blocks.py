# mypy: ignore-errors
# Triton's language only looks like Python; mypy cannot read kernel bodies.
"""Building blocks of the skinny products: what every kernel of ``kernels_matmul`` and ``kernels_stream`` does alike.

Knows: how a tile of weights is streamed and multiplied, what may be done before the kernel in front has ended, and
how an RMS norm's scale is put together. Does not know: what is done with the sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "done", "early", "inputs", "inverse_rms", "multiply", "pair", "product", "square_parts", "wait", "weights",
]  # fmt: skip


@triton.jit
def _channels(k, BK: tl.constexpr, KS: tl.constexpr):
    """Channels k .. k + BK as [KS, BK / KS]: runs of 64 (a whole line of memory) are dealt to the KS warps in turn."""
    RUN: tl.constexpr = 64 if BK // KS > 64 else BK // KS
    j = tl.arange(0, BK // KS)
    return k + (j // RUN * (RUN * KS) + j % RUN)[None, :] + (tl.arange(0, KS) * RUN)[:, None]


@triton.jit
def weights(w, row, k, K: tl.constexpr, BK: tl.constexpr, KS: tl.constexpr):
    """W[row, k : k + BK] as [KS, HB, BK / KS], or [HB, BK] if there are no slices."""
    if KS <= 1:
        at = (k + tl.arange(0, BK))[None, :]
        pointers = w + row.to(tl.int64)[:, None] * K + at
    else:
        at = _channels(k, BK, KS)[:, None, :]
        pointers = w + row.to(tl.int64)[None, :, None] * K + at
    if K % BK == 0:
        tile = tl.load(pointers, eviction_policy="evict_first")
    else:
        tile = tl.load(pointers, mask=at < K, other=0.0, eviction_policy="evict_first")
    return tile


@triton.jit
def inputs(x, m, M, k, K: tl.constexpr, BK: tl.constexpr, KS: tl.constexpr):
    """x[m, k : k + BK] turned, [KS, BK / KS, BM] or [BK, BM]; for one row (KS 0) as it is. Rows past M are zero."""
    if KS <= 1:
        at = (k + tl.arange(0, BK))[None, :]
        row = m[:, None]
    else:
        at = _channels(k, BK, KS)[:, None, :]
        row = m[None, :, None]
    mask = row < M
    if K % BK != 0:
        mask = mask & (at < K)
    tile = tl.load(x + row * K + at, mask=mask, other=0.0)
    if KS > 1:
        tile = tl.permute(tile, (0, 2, 1))
    if KS == 1:
        tile = tl.trans(tile)
    return tile


@triton.jit
def multiply(tile, xt, acc, KS: tl.constexpr):
    """acc + weights x inputs: with KS warps each on its own channels, or (KS 0, one row) without tensor cores."""
    if KS == 0:
        acc += tl.sum(tile.to(tl.float32) * xt.to(tl.float32), axis=1)[:, None]
    else:
        acc = tl.dot(tile, xt, acc, input_precision="ieee")
    return acc


@triton.jit
def wait(PDL: tl.constexpr):
    """Wait until the kernel before has written everything.

    PDL says when the next kernel may start: 0 when this one has ended, 1 at once, 2 after the wait, 3 at ``done``.
    """
    if PDL == 1:
        tl.extra.cuda.gdc_launch_dependents()
    if PDL > 0:
        tl.extra.cuda.gdc_wait()
    if PDL == 2:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def done(PDL: tl.constexpr):
    """The long part is over: let the next kernel start."""
    if PDL == 3:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def early(w, row_a, row_b, K: tl.constexpr, BK: tl.constexpr, KS: tl.constexpr, PAIR: tl.constexpr):
    """Before the wait: short weight rows are loaded whole."""
    wa = weights(w, row_a, 0, K, BK, KS)
    if PAIR:
        wb = weights(w, row_b, 0, K, BK, KS)
    else:
        wb = wa
    return wa, wb


@triton.jit
def product(
    x, wa, wb, m, M, K: tl.constexpr, BK: tl.constexpr, HB: tl.constexpr, BM: tl.constexpr, KS: tl.constexpr,
    PAIR: tl.constexpr,
):  # fmt: skip
    """Sums [HB, BM] of the rows that ``early`` loaded, and of their partners."""
    if KS > 1:
        acc_a = tl.zeros([KS, HB, BM], tl.float32)
    else:
        acc_a = tl.zeros([HB, BM], tl.float32)
    acc_b = acc_a
    xt = inputs(x, m, M, 0, K, BK, KS)
    acc_a = multiply(wa, xt, acc_a, KS)
    if PAIR:
        acc_b = multiply(wb, xt, acc_b, KS)
    if KS > 1:
        acc_a = tl.sum(acc_a, axis=0)
        if PAIR:
            acc_b = tl.sum(acc_b, axis=0)
    return acc_a, acc_b


@triton.jit
def square_parts(squares, m, M, PARTS: tl.constexpr, PARTS_2: tl.constexpr):
    """[BM, PARTS_2] what the programs that wrote x left of sum(x^2). Not through L1, which may be older than L2."""
    p = tl.arange(0, PARTS_2)
    mask = (m < M)[:, None] & (p < PARTS)[None, :]
    return tl.load(squares + m[:, None] * PARTS + p[None, :], mask=mask, other=0.0, cache_modifier=".cg")


@triton.jit
def inverse_rms(parts, eps, K: tl.constexpr):
    """[1, BM] 1 / sqrt(mean(x^2) + eps)."""
    return tl.rsqrt((tl.sum(parts, axis=1) / K).to(tl.float32) + eps)[None, :]


@triton.jit
def pair(i, TURN: tl.constexpr, HALF: tl.constexpr):
    """The two channels of pair i in a head of 2 * HALF channels whose first 2 * TURN turn."""
    a = tl.where(i < TURN, i, TURN + i)
    b = tl.where(i < TURN, TURN + i, HALF + i)
    return a, b
