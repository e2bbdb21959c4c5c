"""Skinny matrix products of large matrices: one program a multiprocessor, each streaming its own run of weight rows.

Knows: how to keep the memory busy while tile after tile of weights is multiplied. Does not know: what a model is, or
which tile is fast (``tiles``), or how a caller states its wish (``kernels.matmul``).

A program takes PER times G tiles of HB weight rows (or of HB pairs of rows). G tiles share each loop step's inputs,
which with few bits a weight are as many bytes as the weights of one tile; PER such groups come one after another in a
single loop, so that the next group's weights are on their way while the last one's sums are written. Its KS warps take
different channels of a loop step. Which sums are added in which order depends on BK and KS alone, not on the tile's
rows, on G, on the number of programs or on how many tokens there are. How the compiler adds up a tile's columns might
depend on that, so sums of squares are made in float64, where squares of bfloat16 numbers add up exactly in any order.

Before it waits for its input a program asks the beginning of its weights into L2; shortly before its end it lets the
next kernel start, whose programs then take the places of those that have ended. What other kernels wrote is not read
through L1: with such early starts L1 may be older than L2.

Each kernel is ``_stream`` with functions of its own: ROWS(tile, r, *rows) says which weight rows numbers r of a tile
are, END(sums, tile, s, *end) what becomes of its sums. The tuples stand in the calls: a name given to one would turn
its constants into tensors.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .blocks import (
    inputs,
    inverse_rms,
    multiply,
    scale_rows,
    square_parts,
    store_product,
    store_swiglu,
    tile_of,
    total,
    zero,
)
from .heads import pair, places_of, store_heads, turns_of

__all__ = ["matmul_kernel", "residual_kernel", "rotary_kernel", "swiglu_kernel"]


@triton.jit
def _ask(w, row, K: tl.constexpr, ROWS: tl.constexpr, BITS: tl.constexpr, BYTES: tl.constexpr, WARPS: tl.constexpr):
    """Ask the first BYTES of the program's ROWS first weight rows into L2. row: each thread's.

    One thread a row does it: the instruction is uniform, so the threads of a warp would take turns anyway.
    """
    STORED: tl.constexpr = K // 2 if BITS == 4 else K
    mine = (tl.arange(0, 32 * WARPS) % (32 * WARPS // ROWS) == 0).to(tl.int32)
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r,r",
        [(w + row.to(tl.int64) * STORED).to(tl.int64, bitcast=True), tl.full([32 * WARPS], BYTES, tl.int32), mine],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _begin(
    w, first, rows, ROWS: tl.constexpr, K: tl.constexpr, HEIGHT: tl.constexpr, BITS: tl.constexpr, G: tl.constexpr,
    PDL: tl.constexpr, ASK: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Ask for the first tiles' weights, and wait for what the kernel before writes."""
    if ASK > 0:
        asker = tl.arange(0, 32 * WARPS) // (32 * WARPS // HEIGHT)  # which of a tile's rows each thread asks for
        for g in tl.static_range(G):
            _ask(w, ROWS(first + g, asker, *rows), K, HEIGHT, BITS, ASK, WARPS)
    if PDL > 0:
        tl.extra.cuda.gdc_wait()


@triton.jit
def _late(i, STEPS: tl.constexpr, LATE: tl.constexpr, PDL: tl.constexpr):
    """Let the next kernel start LATE steps before the end; if LATE is 0, when this one has ended."""
    if PDL > 0:  # noqa: SIM102 - one is known when compiling, the other is not
        if i == (STEPS - LATE if STEPS > LATE else 0):
            tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _zeros(G: tl.constexpr, KS: tl.constexpr, HEIGHT: tl.constexpr, BM: tl.constexpr):
    """One accumulator a tile."""
    accs = ()
    for _ in tl.static_range(G):
        accs += (zero(KS, HEIGHT, BM),)
    return accs


@triton.jit
def _ended(accs, tile, s, end, END: tl.constexpr, G: tl.constexpr, KS: tl.constexpr):
    """What becomes of the sums of G tiles."""
    for g in tl.static_range(G):
        END(total(accs[g], KS), tile + g, s, *end)


@triton.jit
def _stream(
    x, w, s, m, M, first, rows, ROWS: tl.constexpr, end, END: tl.constexpr, K: tl.constexpr, BK: tl.constexpr,
    HEIGHT: tl.constexpr, BM: tl.constexpr, KS: tl.constexpr, BITS: tl.constexpr, PER: tl.constexpr, G: tl.constexpr,
    PDL: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    """The program's tiles of HEIGHT weight rows, from number ``first`` on, times x."""
    STEPS: tl.constexpr = (K + BK - 1) // BK
    r = tl.arange(0, HEIGHT)
    accs = _zeros(G, KS, HEIGHT, BM)
    for i in tl.range(0, PER * STEPS):
        _late(i, PER * STEPS, LATE, PDL)
        tile = first + i // STEPS * G
        k = i % STEPS * BK
        low, high = inputs(x, m, M, k, K, BK, KS, BITS)
        sums = ()
        for g in tl.static_range(G):
            weights, scale, minimum = tile_of(w, s, ROWS(tile + g, r, *rows), k, K, BK, KS, BITS)
            sums += (multiply(weights, scale, minimum, low, high, accs[g], KS, BITS),)
        accs = sums
        if PER > 1:  # noqa: SIM102 - one is known when compiling, the other is not
            if i % STEPS == STEPS - 1:
                _ended(accs, tile, s, end, END, G, KS)
                accs = _zeros(G, KS, HEIGHT, BM)
    if PER == 1:
        _ended(accs, first, s, end, END, G, KS)


@triton.jit
def _scale(squares, m, M, eps, K: tl.constexpr, PARTS: tl.constexpr, PARTS_2: tl.constexpr):
    return inverse_rms(square_parts(squares, m, M, PARTS, PARTS_2).to(tl.float64), eps, K)


@triton.jit
def _matmul_rows(tile, r, N, HB: tl.constexpr):
    return tl.minimum(tile * HB + r, N - 1)


@triton.jit
def _matmul_end(acc, tile, s, bias, out, scale, m, M, N, HB: tl.constexpr, BITS: tl.constexpr, BIAS: tl.constexpr):
    n = tile * HB + tl.arange(0, HB)
    row = tl.minimum(n, N - 1)
    store_product(scale_rows(acc, s, row, BITS) * scale, n, row, m, M, N, bias, out, BIAS)


@triton.jit(do_not_specialize=["M"])
def matmul_kernel(
    x, w, s, bias, squares, out, M, eps, N, K: tl.constexpr, PARTS: tl.constexpr, PARTS_2: tl.constexpr,
    BK: tl.constexpr, HB: tl.constexpr, BM: tl.constexpr, KS: tl.constexpr, BITS: tl.constexpr, NORM: tl.constexpr,
    BIAS: tl.constexpr, PER: tl.constexpr, G: tl.constexpr, PDL: tl.constexpr, LATE: tl.constexpr, ASK: tl.constexpr,
    WARPS: tl.constexpr,
):  # fmt: skip
    """See ``kernels.matmul.matmul``."""
    first, m = tl.program_id(0) * (PER * G), tl.arange(0, BM)
    _begin(w, first, (N, HB), _matmul_rows, K, HB, BITS, G, PDL, ASK, WARPS)
    scale = 1.0
    if NORM:
        scale = _scale(squares, m, M, eps, K, PARTS, PARTS_2)
    _stream(
        x, w, s, m, M, first, (N, HB), _matmul_rows, (bias, out, scale, m, M, N, HB, BITS, BIAS), _matmul_end, K, BK,
        HB, BM, KS, BITS, PER, G, PDL, LATE,
    )  # fmt: skip


@triton.jit
def _residual_end(
    acc, tile, s, bias, residual, gain, scaled, squares, m, M, N, PARTS: tl.constexpr, HB: tl.constexpr,
    BITS: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    n = tile * HB + tl.arange(0, HB)
    row = tl.minimum(n, N - 1)
    value = scale_rows(acc, s, row, BITS)
    if BIAS:
        value = value + tl.load(bias + row).to(tl.float32)[:, None]
    mask = (n < N)[:, None] & (m < M)[None, :]
    at = m[None, :] * N + n[:, None]
    old = tl.load(residual + at, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    value = (old + value).to(residual.dtype.element_ty)
    tl.store(residual + at, value, mask=mask)
    value = tl.where(mask, value.to(tl.float64), 0.0)
    g = tl.load(gain + row).to(tl.float32)[:, None]
    tl.store(scaled + at, (value.to(tl.float32) * g).to(scaled.dtype.element_ty), mask=mask)
    part = tl.sum(value * value, axis=0).to(tl.float32)
    tl.store(squares + m * PARTS + tile, part, mask=(m < M) & (tile < PARTS))


@triton.jit(do_not_specialize=["M"])
def residual_kernel(
    x, w, s, bias, residual, gain, scaled, squares, M, N, K: tl.constexpr, PARTS: tl.constexpr, BK: tl.constexpr,
    HB: tl.constexpr, BM: tl.constexpr, KS: tl.constexpr, BITS: tl.constexpr, BIAS: tl.constexpr, PER: tl.constexpr,
    G: tl.constexpr, PDL: tl.constexpr, LATE: tl.constexpr, ASK: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """See ``kernels.matmul.matmul_residual``."""
    first, m = tl.program_id(0) * (PER * G), tl.arange(0, BM)
    _begin(w, first, (N, HB), _matmul_rows, K, HB, BITS, G, PDL, ASK, WARPS)
    _stream(
        x, w, s, m, M, first, (N, HB), _matmul_rows,
        (bias, residual, gain, scaled, squares, m, M, N, PARTS, HB, BITS, BIAS), _residual_end, K, BK, HB, BM, KS, BITS,
        PER, G, PDL, LATE,
    )  # fmt: skip


@triton.jit
def _halves(acc, HB: tl.constexpr, BM: tl.constexpr):
    """[2 * HB, BM] -> two of [HB, BM]."""
    return tl.split(tl.permute(tl.reshape(acc, [2, HB, BM]), (1, 2, 0)))


@triton.jit
def _swiglu_rows(tile, r, F, HB: tl.constexpr):
    return tl.minimum(tile * HB + tl.where(r < HB, r, F + r - HB), 2 * F - 1)


@triton.jit
def _swiglu_end(acc, tile, s, out, scale, m, M, F, HB: tl.constexpr, BM: tl.constexpr, BITS: tl.constexpr):
    row = _swiglu_rows(tile, tl.arange(0, 2 * HB), F, HB)
    gate, up = _halves(scale_rows(acc, s, row, BITS), HB, BM)
    store_swiglu(gate, up, scale, tile * HB + tl.arange(0, HB), m, M, F, out)


@triton.jit(do_not_specialize=["M"])
def swiglu_kernel(
    x, w, s, squares, out, M, eps, F, K: tl.constexpr, PARTS: tl.constexpr, PARTS_2: tl.constexpr, BK: tl.constexpr,
    HB: tl.constexpr, BM: tl.constexpr, KS: tl.constexpr, BITS: tl.constexpr, PER: tl.constexpr, G: tl.constexpr,
    PDL: tl.constexpr, LATE: tl.constexpr, ASK: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """See ``kernels.matmul.matmul_swiglu``."""
    first, m = tl.program_id(0) * (PER * G), tl.arange(0, BM)
    _begin(w, first, (F, HB), _swiglu_rows, K, 2 * HB, BITS, G, PDL, ASK, WARPS)
    scale = _scale(squares, m, M, eps, K, PARTS, PARTS_2)
    _stream(
        x, w, s, m, M, first, (F, HB), _swiglu_rows, (out, scale, m, M, F, HB, BM, BITS), _swiglu_end, K, BK, 2 * HB,
        BM, KS, BITS, PER, G, PDL, LATE,
    )  # fmt: skip


@triton.jit
def _rotary_tile(tile, HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, HB: tl.constexpr):
    """Its head, and the first of its channel pairs. Past the end: the last tile again, which writes the same."""
    IN: tl.constexpr = D // 2 // HB  # tiles of a head
    tile = tl.minimum(tile, (HEADS + 2 * KV) * IN - 1)
    return tile // IN, tile % IN * HB


@triton.jit
def _rotary_rows(tile, r, HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, TURN: tl.constexpr, HB: tl.constexpr):
    """The weight rows of HB pairs of channels of one head."""
    head, i = _rotary_tile(tile, HEADS, KV, D, HB)
    a, b = pair(i + r % HB, TURN, D // 2)
    return head * D + tl.where(r < HB, a, b)


@triton.jit
def _rotary_end(
    acc, tile, s, bias, query, keys, values, cos, sin, scale, position, slot, m, live, width, capacity,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, TURN: tl.constexpr, HB: tl.constexpr, BM: tl.constexpr,
    BITS: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = D // 2
    row = _rotary_rows(tile, tl.arange(0, 2 * HB), HEADS, KV, D, TURN, HB)
    a, b = _halves(scale_rows(acc, s, row, BITS), HB, BM)
    a, b = a * scale, b * scale
    head, i = _rotary_tile(tile, HEADS, KV, D, HB)
    i = i + tl.arange(0, HB)
    ca, cb = pair(i, TURN, HALF)
    if BIAS:
        a += tl.load(bias + head * D + ca).to(tl.float32)[:, None]
        b += tl.load(bias + head * D + cb).to(tl.float32)[:, None]
    c, sn = turns_of(cos, sin, position, i, live & (head < HEADS + KV), HALF)  # values do not turn
    a, b = a * c - b * sn, b * c + a * sn
    store_heads(a, b, head, ca, cb, m, live, slot, width, query, keys, values, capacity, HEADS, KV, D)


@triton.jit(do_not_specialize=["M", "width", "capacity"])
def rotary_kernel(
    x, w, s, bias, squares, query, keys, values, cos, sin, lengths, depths, M, width, capacity, eps, K: tl.constexpr,
    PARTS: tl.constexpr, PARTS_2: tl.constexpr, HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr,
    TURN: tl.constexpr, BK: tl.constexpr, HB: tl.constexpr, BM: tl.constexpr, KS: tl.constexpr, BITS: tl.constexpr,
    BIAS: tl.constexpr, TREE: tl.constexpr, PER: tl.constexpr, G: tl.constexpr, PDL: tl.constexpr, LATE: tl.constexpr,
    ASK: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """See ``kernels.matmul.matmul_rotary``."""
    first, m = tl.program_id(0) * (PER * G), tl.arange(0, BM)
    live = m < M
    _begin(w, first, (HEADS, KV, D, TURN, HB), _rotary_rows, K, 2 * HB, BITS, G, PDL, ASK, WARPS)
    slot, position = places_of(lengths, depths, m, live, width, capacity, TREE)
    scale = _scale(squares, m, M, eps, K, PARTS, PARTS_2)
    _stream(
        x, w, s, m, M, first, (HEADS, KV, D, TURN, HB), _rotary_rows,
        (
            bias, query, keys, values, cos, sin, scale, position, slot, m, live, width, capacity, HEADS, KV, D, TURN,
            HB, BM, BITS, BIAS,
        ),
        _rotary_end, K, BK, 2 * HB, BM, KS, BITS, PER, G, PDL, LATE,
    )  # fmt: skip
