# mypy: ignore-errors
# Triton's language only looks like Python; mypy cannot read kernel bodies.
"""Skinny matrix products of large matrices: one program a multiprocessor, each streaming its own run of weight rows.

Knows: how to keep the memory busy while tile after tile of weights is multiplied. Does not know: what a model is, or
which tile is fast (``plan``), or how a caller states its wish (``kernels_matmul``).

A program takes PER times G tiles of HB weight rows (or of HB pairs of rows). G tiles share each loop step's inputs,
which with few bits a weight are as many bytes as the weights of one tile; PER such groups come one after another in a
single loop, so that the next group's weights are on their way while the last one's sums are written. Its KS warps take
different channels of a loop step. Which sums are added in which order depends on BK and KS alone, not on the tile's
rows, on G, on the number of programs or on how many tokens there are. How the compiler adds up a tile's columns might
depend on that, so sums of squares are made in float64, where squares of bfloat16 numbers add up exactly in any order.

Before it waits for its input a program asks the beginning of its weights into L2; shortly before its end it lets the
next kernel start, whose programs then take the places of those that have ended. What other kernels wrote is not read
through L1: with such early starts L1 may be older than L2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .kernels_blocks import inputs, inverse_rms, multiply, pair, scale_rows, square_parts, store_heads, tile_of

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
def _asker(ROWS: tl.constexpr, WARPS: tl.constexpr):
    """[32 * WARPS] which of the ROWS rows each thread asks for."""
    return tl.arange(0, 32 * WARPS) // (32 * WARPS // ROWS)


@triton.jit
def _begin(PDL: tl.constexpr):
    if PDL > 0:
        tl.extra.cuda.gdc_wait()


@triton.jit
def _late(i, STEPS: tl.constexpr, LATE: tl.constexpr, PDL: tl.constexpr):
    """Let the next kernel start LATE steps before the end; if LATE is 0, when this one has ended."""
    if PDL > 0:  # noqa: SIM102 - one is known when compiling, the other is not
        if i == (STEPS - LATE if STEPS > LATE else 0):
            tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _zero(KS: tl.constexpr, ROWS: tl.constexpr, BM: tl.constexpr):
    if KS > 1:
        acc = tl.zeros([KS, ROWS, BM], tl.float32)
    else:
        acc = tl.zeros([ROWS, BM], tl.float32)
    return acc


@triton.jit
def _step(low, high, w, s, row, k, acc, K: tl.constexpr, BK: tl.constexpr, KS: tl.constexpr, BITS: tl.constexpr):
    tile, scale, minimum = tile_of(w, s, row, k, K, BK, KS, BITS)
    return multiply(tile, scale, minimum, low, high, acc, KS, BITS)


@triton.jit
def _zeros(G: tl.constexpr, KS: tl.constexpr, ROWS: tl.constexpr, BM: tl.constexpr):
    """One accumulator a tile."""
    accs = ()
    for _ in tl.static_range(G):
        accs += (_zero(KS, ROWS, BM),)
    return accs


@triton.jit
def _total(acc, KS: tl.constexpr):
    if KS > 1:
        acc = tl.sum(acc, axis=0)
    return acc


@triton.jit
def _halves(acc, HB: tl.constexpr, BM: tl.constexpr):
    """[2 * HB, BM] -> two of [HB, BM]."""
    return tl.split(tl.permute(tl.reshape(acc, [2, HB, BM]), (1, 2, 0)))


@triton.jit
def _matmul_rows(tile, N, HB: tl.constexpr):
    return tl.minimum(tile * HB + tl.arange(0, HB), N - 1)


@triton.jit
def _matmul_end(acc, tile, s, bias, out, scale, m, M, N, HB: tl.constexpr, BITS: tl.constexpr, BIAS: tl.constexpr):
    n = tile * HB + tl.arange(0, HB)
    row = tl.minimum(n, N - 1)
    value = scale_rows(acc, s, row, BITS) * scale
    if BIAS:
        value = value + tl.load(bias + row).to(tl.float32)[:, None]
    mask = (n < N)[:, None] & (m < M)[None, :]
    tl.store(out + m[None, :].to(tl.int64) * N + n[:, None], value.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])
def matmul_kernel(
    x, w, s, bias, squares, out, M, eps, N, K: tl.constexpr, PARTS: tl.constexpr, PARTS_2: tl.constexpr,
    BK: tl.constexpr, HB: tl.constexpr, BM: tl.constexpr, KS: tl.constexpr, BITS: tl.constexpr, NORM: tl.constexpr,
    BIAS: tl.constexpr, PER: tl.constexpr, G: tl.constexpr, PDL: tl.constexpr, LATE: tl.constexpr, ASK: tl.constexpr,
    WARPS: tl.constexpr,
):  # fmt: skip
    """See ``kernels_matmul.matmul``."""
    STEPS: tl.constexpr = (K + BK - 1) // BK
    first = tl.program_id(0) * (PER * G)
    m = tl.arange(0, BM)
    if ASK > 0:
        for g in tl.static_range(G):
            _ask(w, tl.minimum((first + g) * HB + _asker(HB, WARPS), N - 1), K, HB, BITS, ASK, WARPS)
    _begin(PDL)
    scale = 1.0
    if NORM:
        scale = inverse_rms(square_parts(squares, m, M, PARTS, PARTS_2).to(tl.float64), eps, K)
    accs = _zeros(G, KS, HB, BM)
    for i in tl.range(0, PER * STEPS):
        _late(i, PER * STEPS, LATE, PDL)
        tile = first + i // STEPS * G
        k = i % STEPS * BK
        low, high = inputs(x, m, M, k, K, BK, KS, BITS)
        sums = ()
        for g in tl.static_range(G):
            sums += (_step(low, high, w, s, _matmul_rows(tile + g, N, HB), k, accs[g], K, BK, KS, BITS),)
        accs = sums
        if PER > 1:  # noqa: SIM102 - one is known when compiling, the other is not
            if i % STEPS == STEPS - 1:
                for g in tl.static_range(G):
                    _matmul_end(_total(accs[g], KS), tile + g, s, bias, out, scale, m, M, N, HB, BITS, BIAS)
                accs = _zeros(G, KS, HB, BM)
    if PER == 1:
        for g in tl.static_range(G):
            _matmul_end(_total(accs[g], KS), first + g, s, bias, out, scale, m, M, N, HB, BITS, BIAS)


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
    """See ``kernels_matmul.matmul_residual``."""
    STEPS: tl.constexpr = (K + BK - 1) // BK
    first = tl.program_id(0) * (PER * G)
    m = tl.arange(0, BM)
    if ASK > 0:
        for g in tl.static_range(G):
            _ask(w, tl.minimum((first + g) * HB + _asker(HB, WARPS), N - 1), K, HB, BITS, ASK, WARPS)
    _begin(PDL)
    accs = _zeros(G, KS, HB, BM)
    for i in tl.range(0, PER * STEPS):
        _late(i, PER * STEPS, LATE, PDL)
        tile = first + i // STEPS * G
        k = i % STEPS * BK
        low, high = inputs(x, m, M, k, K, BK, KS, BITS)
        sums = ()
        for g in tl.static_range(G):
            sums += (_step(low, high, w, s, _matmul_rows(tile + g, N, HB), k, accs[g], K, BK, KS, BITS),)
        accs = sums
        if PER > 1:  # noqa: SIM102 - one is known when compiling, the other is not
            if i % STEPS == STEPS - 1:
                for g in tl.static_range(G):
                    acc = _total(accs[g], KS)
                    _residual_end(
                        acc, tile + g, s, bias, residual, gain, scaled, squares, m, M, N, PARTS, HB, BITS, BIAS
                    )
                accs = _zeros(G, KS, HB, BM)
    if PER == 1:
        for g in tl.static_range(G):
            acc = _total(accs[g], KS)
            _residual_end(acc, first + g, s, bias, residual, gain, scaled, squares, m, M, N, PARTS, HB, BITS, BIAS)


@triton.jit
def _swiglu_rows(tile, F, HB: tl.constexpr):
    r = tl.arange(0, 2 * HB)
    return tl.minimum(tile * HB + tl.where(r < HB, r, F + r - HB), 2 * F - 1)


@triton.jit
def _swiglu_end(acc, tile, s, out, scale, m, M, F, HB: tl.constexpr, BM: tl.constexpr, BITS: tl.constexpr):
    gate, up = _halves(scale_rows(acc, s, _swiglu_rows(tile, F, HB), BITS), HB, BM)
    gate = gate * scale
    value = gate / (1.0 + tl.exp(-gate)) * (up * scale)
    n = tile * HB + tl.arange(0, HB)
    mask = (n < F)[:, None] & (m < M)[None, :]
    tl.store(out + m[None, :] * F + n[:, None], value.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])
def swiglu_kernel(
    x, w, s, squares, out, M, eps, F, K: tl.constexpr, PARTS: tl.constexpr, PARTS_2: tl.constexpr, BK: tl.constexpr,
    HB: tl.constexpr, BM: tl.constexpr, KS: tl.constexpr, BITS: tl.constexpr, PER: tl.constexpr, G: tl.constexpr,
    PDL: tl.constexpr, LATE: tl.constexpr, ASK: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """See ``kernels_matmul.matmul_swiglu``."""
    STEPS: tl.constexpr = (K + BK - 1) // BK
    first = tl.program_id(0) * (PER * G)
    m = tl.arange(0, BM)
    if ASK > 0:
        a = _asker(2 * HB, WARPS)
        for g in tl.static_range(G):
            ask = tl.minimum((first + g) * HB + tl.where(a < HB, a, F + a - HB), 2 * F - 1)
            _ask(w, ask, K, 2 * HB, BITS, ASK, WARPS)
    _begin(PDL)
    scale = inverse_rms(square_parts(squares, m, M, PARTS, PARTS_2).to(tl.float64), eps, K)
    accs = _zeros(G, KS, 2 * HB, BM)
    for i in tl.range(0, PER * STEPS):
        _late(i, PER * STEPS, LATE, PDL)
        tile = first + i // STEPS * G
        k = i % STEPS * BK
        low, high = inputs(x, m, M, k, K, BK, KS, BITS)
        sums = ()
        for g in tl.static_range(G):
            sums += (_step(low, high, w, s, _swiglu_rows(tile + g, F, HB), k, accs[g], K, BK, KS, BITS),)
        accs = sums
        if PER > 1:  # noqa: SIM102 - one is known when compiling, the other is not
            if i % STEPS == STEPS - 1:
                for g in tl.static_range(G):
                    _swiglu_end(_total(accs[g], KS), tile + g, s, out, scale, m, M, F, HB, BM, BITS)
                accs = _zeros(G, KS, 2 * HB, BM)
    if PER == 1:
        for g in tl.static_range(G):
            _swiglu_end(_total(accs[g], KS), first + g, s, out, scale, m, M, F, HB, BM, BITS)


@triton.jit
def _rotary_rows(tile, HB: tl.constexpr, D: tl.constexpr, TURN: tl.constexpr):
    """[2 * HB] the weight rows of HB pairs of channels of one head."""
    IN: tl.constexpr = D // 2 // HB  # tiles of a head
    r = tl.arange(0, 2 * HB)
    a, b = pair(tile % IN * HB + r % HB, TURN, D // 2)
    return tile // IN * D + tl.where(r < HB, a, b)


@triton.jit
def _rotary_end(
    acc, tile, s, bias, query, keys, values, cos, sin, scale, position, slot, m, live, width, capacity,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, TURN: tl.constexpr, HB: tl.constexpr, BM: tl.constexpr,
    BITS: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = D // 2
    IN: tl.constexpr = HALF // HB
    head = tile // IN
    a, b = _halves(scale_rows(acc, s, _rotary_rows(tile, HB, D, TURN), BITS), HB, BM)
    a, b = a * scale, b * scale
    i = tile % IN * HB + tl.arange(0, HB)
    ca, cb = pair(i, TURN, HALF)
    if BIAS:
        a += tl.load(bias + head * D + ca).to(tl.float32)[:, None]
        b += tl.load(bias + head * D + cb).to(tl.float32)[:, None]
    turns = (live & (head < HEADS + KV))[None, :]  # values do not turn
    turn = position[None, :] * HALF + i[:, None]
    c = tl.load(cos + turn, mask=turns, other=1.0)
    sn = tl.load(sin + turn, mask=turns, other=0.0)
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
    """See ``kernels_matmul.matmul_rotary``."""
    HALF: tl.constexpr = D // 2
    IN: tl.constexpr = HALF // HB  # tiles of a head
    STEPS: tl.constexpr = (K + BK - 1) // BK
    LAST: tl.constexpr = (HEADS + 2 * KV) * IN - 1  # past the end: the last tile again, which writes the same
    first = tl.program_id(0) * (PER * G)
    m = tl.arange(0, BM)
    live = m < M
    if ASK > 0:
        asker = _asker(2 * HB, WARPS)
        for g in tl.static_range(G):
            asked = tl.minimum(first + g, LAST)
            ask_a, ask_b = pair(asked % IN * HB + asker % HB, TURN, HALF)
            _ask(w, asked // IN * D + tl.where(asker < HB, ask_a, ask_b), K, 2 * HB, BITS, ASK, WARPS)
    _begin(PDL)
    length = tl.load(lengths + m // width, mask=live, other=0, cache_modifier=".cg").to(tl.int64)
    slot = length + m % width
    if TREE:
        position = length + tl.load(depths + m, mask=live, other=0, cache_modifier=".cg").to(tl.int64)
    else:
        position = slot
    position = tl.minimum(position, capacity - 1)  # the table ends where the cache does
    scale = inverse_rms(square_parts(squares, m, M, PARTS, PARTS_2).to(tl.float64), eps, K)
    accs = _zeros(G, KS, 2 * HB, BM)
    for t in tl.range(0, PER * STEPS):
        _late(t, PER * STEPS, LATE, PDL)
        tile = first + t // STEPS * G
        k = t % STEPS * BK
        low, high = inputs(x, m, M, k, K, BK, KS, BITS)
        sums = ()
        for g in tl.static_range(G):
            row = _rotary_rows(tl.minimum(tile + g, LAST), HB, D, TURN)
            sums += (_step(low, high, w, s, row, k, accs[g], K, BK, KS, BITS),)
        accs = sums
        if PER > 1:  # noqa: SIM102 - one is known when compiling, the other is not
            if t % STEPS == STEPS - 1:
                for g in tl.static_range(G):
                    _rotary_end(
                        _total(accs[g], KS), tl.minimum(tile + g, LAST), s, bias, query, keys, values, cos, sin, scale,
                        position, slot, m, live, width, capacity, HEADS, KV, D, TURN, HB, BM, BITS, BIAS,
                    )  # fmt: skip
                accs = _zeros(G, KS, 2 * HB, BM)
    if PER == 1:
        for g in tl.static_range(G):
            _rotary_end(
                _total(accs[g], KS), tl.minimum(first + g, LAST), s, bias, query, keys, values, cos, sin, scale,
                position, slot, m, live, width, capacity, HEADS, KV, D, TURN, HB, BM, BITS, BIAS,
            )  # fmt: skip
