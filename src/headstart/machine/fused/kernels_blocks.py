# mypy: ignore-errors
# Triton's language only looks like Python; mypy cannot read kernel bodies.
"""Building blocks of the skinny products: what every kernel of ``kernels_matmul`` does in the same way.

Knows: how a tile of weights is streamed and multiplied, what may be done before the kernel in front has ended, and
how an RMS norm's scale is put together. Does not know: what is done with the sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["askers", "done", "early", "inverse_rms", "pair", "product", "square_parts", "wait"]


@triton.jit
def _ask(w, row, K: tl.constexpr, HB: tl.constexpr, BYTES: tl.constexpr, WARPS: tl.constexpr):
    """Ask the first BYTES of the program's HB weight rows into L2. row [32 * WARPS]: each thread's, see ``askers``.

    One thread a row does it: the instruction is uniform, so the threads of a warp would take turns anyway.
    """
    mine = (tl.arange(0, 32 * WARPS) % (32 * WARPS // HB) == 0).to(tl.int32)
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r,r",
        [
            (w + row.to(tl.int64) * K).to(tl.int64, bitcast=True),
            tl.full([32 * WARPS], BYTES, tl.int32),
            mine,
        ],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def askers(HB: tl.constexpr, WARPS: tl.constexpr):
    """[32 * WARPS] which of the HB rows each thread asks for."""
    return tl.arange(0, 32 * WARPS) // (32 * WARPS // HB)


@triton.jit
def _channels(k, BK: tl.constexpr, KS: tl.constexpr):
    """Channels k .. k + BK as [KS, BK / KS]: runs of 64 (a whole line of memory) are dealt to the KS warps in turn."""
    RUN: tl.constexpr = 64 if BK // KS > 64 else BK // KS
    j = tl.arange(0, BK // KS)
    return k + (j // RUN * (RUN * KS) + j % RUN)[None, :] + (tl.arange(0, KS) * RUN)[:, None]


@triton.jit
def _weights(w, row, k, K: tl.constexpr, BK: tl.constexpr, KS: tl.constexpr):
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
def _inputs(x, m, M, k, K: tl.constexpr, BK: tl.constexpr, KS: tl.constexpr):
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
def _multiply(weights, inputs, acc, KS: tl.constexpr):
    """acc + weights x inputs: with KS warps each on its own channels, or (KS 0, one row) without tensor cores."""
    if KS == 0:
        acc += tl.sum(weights.to(tl.float32) * inputs.to(tl.float32), axis=1)[:, None]
    else:
        acc = tl.dot(weights, inputs, acc, input_precision="ieee")
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
def early(
    w, row_a, row_b, ask_a, ask_b, K: tl.constexpr, BK: tl.constexpr, HB: tl.constexpr, KS: tl.constexpr,
    PAIR: tl.constexpr, ASK: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """What can be done before the wait: short weight rows are loaded whole, of long ones the beginnings asked for."""
    if BK >= K:
        wa = _weights(w, row_a, 0, K, BK, KS)
        if PAIR:
            wb = _weights(w, row_b, 0, K, BK, KS)
        else:
            wb = wa
    else:
        if ASK > 0:
            _ask(w, ask_a, K, HB, ASK, WARPS)
            if PAIR:
                _ask(w, ask_b, K, HB, ASK, WARPS)
        wa = 0
        wb = 0
    return wa, wb


@triton.jit
def product(
    x, w, wa, wb, row_a, row_b, m, M, K: tl.constexpr, BK: tl.constexpr, HB: tl.constexpr, BM: tl.constexpr,
    KS: tl.constexpr, PAIR: tl.constexpr,
):  # fmt: skip
    """Sums [HB, BM] of rows row_a and, for pairs, of row_b. wa and wb are what ``early`` loaded."""
    if KS > 1:
        acc_a = tl.zeros([KS, HB, BM], tl.float32)
    else:
        acc_a = tl.zeros([HB, BM], tl.float32)
    acc_b = acc_a
    if BK >= K:
        xt = _inputs(x, m, M, 0, K, BK, KS)
        acc_a = _multiply(wa, xt, acc_a, KS)
        if PAIR:
            acc_b = _multiply(wb, xt, acc_b, KS)
    else:
        for k in tl.range(0, K, BK):
            xt = _inputs(x, m, M, k, K, BK, KS)
            acc_a = _multiply(_weights(w, row_a, k, K, BK, KS), xt, acc_a, KS)
            if PAIR:
                acc_b = _multiply(_weights(w, row_b, k, K, BK, KS), xt, acc_b, KS)
    if KS > 1:
        acc_a = tl.sum(acc_a, axis=0)
        if PAIR:
            acc_b = tl.sum(acc_b, axis=0)
    return acc_a, acc_b


@triton.jit
def square_parts(squares, m, M, PARTS: tl.constexpr, PARTS_2: tl.constexpr):
    """[BM, PARTS_2] what the programs that wrote x left of sum(x^2)."""
    p = tl.arange(0, PARTS_2)
    mask = (m < M)[:, None] & (p < PARTS)[None, :]
    return tl.load(squares + m[:, None] * PARTS + p[None, :], mask=mask, other=0.0)


@triton.jit
def inverse_rms(parts, eps, K: tl.constexpr):
    """[1, BM] 1 / sqrt(mean(x^2) + eps)."""
    return tl.rsqrt(tl.sum(parts, axis=1) / K + eps)[None, :]


@triton.jit
def pair(i, TURN: tl.constexpr, HALF: tl.constexpr):
    """The two channels of pair i in a head of 2 * HALF channels whose first 2 * TURN turn."""
    a = tl.where(i < TURN, i, TURN + i)
    b = tl.where(i < TURN, TURN + i, HALF + i)
    return a, b
