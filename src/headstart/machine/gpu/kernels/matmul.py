"""Skinny matrix products: a few token rows against a big weight matrix, with what stands before and after built in.

Knows: what 1 to 32 rows times a matrix is joined with, and the kernels for small matrices, where latency is all.
Does not know: what a model is. Matrices with long rows go to ``kernels.stream``.

    x [M, K] activations, W [N, K] weights, out = x W^T. A program takes ``HB`` rows of W (or twice ``HB``: pairs),
    whole (BK >= K), and makes [HB, BM] sums in float32, M padded to BM. Its KS warps take different channels, so that
    each has a short chain of tensor core products; their sums are added at the end. Which sums are added in which
    order does not depend on M. KS = 0 is for one or two rows: plain multiply-adds, the least latency of all.

Norms are not computed where they are needed but where their input is made. The kernel that writes the residual x
also writes x * g (g: the next norm's weight) and each program's part of sum(x^2). The reader multiplies by W and
scales its sums by 1 / rms at the end. So an RMS norm costs no pass and no launch.

Overlap (Hopper's programmatic dependent launch): each kernel lets the next one start early; that one loads its weights
and then waits for its input. The gap between two kernels is filled with the second one's weight reads.
Before ``gdc_wait`` only weights may be touched, and with PDL 2 what was written two kernels back: then each kernel lets
the next one start after its own wait, when the one before it has ended.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...quantize import Matrix
from ..compile.launching import launch, overlap
from ..tiles import LATE, PROGRAMS, Tile, fitting_stages, pieces, power_of_two
from . import stream
from .blocks import done, early, inverse_rms, product, square_parts, store_product, store_swiglu, wait
from .heads import Heads, pair, places_of, store_heads, turns_of

__all__ = ["Residual", "matmul", "matmul_residual", "matmul_rotary", "matmul_swiglu", "skinny_rows", "stored"]


@triton.jit
def _mine(N, HB: tl.constexpr, BM: tl.constexpr):
    """The program's outputs n, the weight rows of these (the last one past the end), and all tokens."""
    n = tl.program_id(0) * HB + tl.arange(0, HB)
    return n, tl.minimum(n, N - 1), tl.arange(0, BM)


@triton.jit(do_not_specialize=["M"])
def _matmul_kernel(
    x, w, s, bias, squares, out, M, eps, N, K: tl.constexpr, PARTS: tl.constexpr, PARTS_2: tl.constexpr,
    BK: tl.constexpr, HB: tl.constexpr, BM: tl.constexpr, KS: tl.constexpr, BITS: tl.constexpr, NORM: tl.constexpr,
    BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n, row, m = _mine(N, HB, BM)
    wa, wb = early(w, s, row, row, K, BK, KS, BITS, False)
    wait(PDL)
    if NORM:
        parts = square_parts(squares, m, M, PARTS, PARTS_2)
    acc, _ = product(x, wa, wb, m, M, K, BK, HB, BM, KS, BITS, False)
    done(PDL)
    if NORM:
        acc = acc * inverse_rms(parts, eps, K)
    store_product(acc, n, row, m, M, N, bias, out, BIAS)


@triton.jit(do_not_specialize=["M"])
def _residual_kernel(
    x, w, s, bias, residual, gain, scaled, squares, M, N, K: tl.constexpr, PARTS: tl.constexpr, BK: tl.constexpr,
    HB: tl.constexpr, BM: tl.constexpr, KS: tl.constexpr, BITS: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n, row, m = _mine(N, HB, BM)
    mask = (n < N)[:, None] & (m < M)[None, :]
    at = m[None, :] * N + n[:, None]
    wa, wb = early(w, s, row, row, K, BK, KS, BITS, False)
    g = tl.load(gain + row).to(tl.float32)[:, None]
    if PDL == 2:  # the residual was written two kernels back or earlier
        old = tl.load(residual + at, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
        wait(PDL)
    else:
        wait(PDL)
        old = tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
    acc, _ = product(x, wa, wb, m, M, K, BK, HB, BM, KS, BITS, False)
    done(PDL)
    if BIAS:
        acc = acc + tl.load(bias + row).to(tl.float32)[:, None]
    value = (old + acc).to(residual.dtype.element_ty)
    tl.store(residual + at, value, mask=mask)
    value = tl.where(mask, value.to(tl.float32), 0.0)
    tl.store(scaled + at, (value * g).to(scaled.dtype.element_ty), mask=mask)
    tl.store(squares + m * PARTS + tl.program_id(0), tl.sum(value * value, axis=0), mask=m < M)


@triton.jit(do_not_specialize=["M"])
def _swiglu_kernel(
    x, w, s, squares, out, M, eps, F, K: tl.constexpr, PARTS: tl.constexpr, PARTS_2: tl.constexpr,
    BK: tl.constexpr, HB: tl.constexpr, BM: tl.constexpr, KS: tl.constexpr, BITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n, row, m = _mine(F, HB, BM)
    wa, wb = early(w, s, row, row + F, K, BK, KS, BITS, True)
    wait(PDL)
    parts = square_parts(squares, m, M, PARTS, PARTS_2)
    gate, up = product(x, wa, wb, m, M, K, BK, HB, BM, KS, BITS, True)
    done(PDL)
    store_swiglu(gate, up, inverse_rms(parts, eps, K), n, m, M, F, out)


@triton.jit(do_not_specialize=["M", "width", "capacity"])
def _rotary_kernel(
    x, w, s, bias, squares, query, keys, values, cos, sin, lengths, depths, M, width, capacity, eps,
    K: tl.constexpr, PARTS: tl.constexpr, PARTS_2: tl.constexpr, HEADS: tl.constexpr, KV: tl.constexpr,
    D: tl.constexpr, TURN: tl.constexpr, BK: tl.constexpr, HB: tl.constexpr, BM: tl.constexpr, KS: tl.constexpr,
    BITS: tl.constexpr, BIAS: tl.constexpr, TREE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = D // 2
    head = tl.program_id(0) // (HALF // HB)
    first = (tl.program_id(0) % (HALF // HB)) * HB
    i = first + tl.arange(0, HB)
    ca, cb = pair(i, TURN, HALF)
    ra, rb = head * D + ca, head * D + cb
    m = tl.arange(0, BM)
    live = m < M
    wa, wb = early(w, s, ra, rb, K, BK, KS, BITS, True)
    if PDL != 2:
        wait(PDL)
    slot, position = places_of(lengths, depths, m, live, width, capacity, TREE)
    c, sn = turns_of(cos, sin, position, i, live & (head < HEADS + KV), HALF)  # values do not turn
    if PDL == 2:  # lengths and depths were written two kernels back or earlier
        wait(PDL)
    parts = square_parts(squares, m, M, PARTS, PARTS_2)
    a, b = product(x, wa, wb, m, M, K, BK, HB, BM, KS, BITS, True)
    done(PDL)
    scale = inverse_rms(parts, eps, K)
    a, b = a * scale, b * scale
    if BIAS:
        a += tl.load(bias + ra).to(tl.float32)[:, None]
        b += tl.load(bias + rb).to(tl.float32)[:, None]
    a, b = a * c - b * sn, b * c + a * sn
    store_heads(a, b, head, ca, cb, m, live, slot, width, query, keys, values, capacity, HEADS, KV, D)


# -- how they are called ----------------------------------------------------------------------------------------------


def skinny_rows(rows: int) -> int:
    """The padded row count of the kernels, or 0 if there are too many rows for them."""
    return 0 if rows > 32 else 16 if rows <= 16 else 32


def _launch(
    kernels: tuple[Any, Any], x: Tensor, w: Matrix, tiles: int, t: Tile, pdl: int, *args: Any, pair: bool = False,
    **constants: object,
) -> None:  # fmt: skip
    """Launch the one of (for short rows, for long rows) that takes the matrix."""
    rows, inputs = x.shape
    assert t.slices or rows <= 2
    options = constants | {"K": inputs, "BK": t.depth, "HB": t.rows, "KS": t.slices, "BITS": w.bits}
    options |= {"num_warps": t.warps} | overlap(pdl)
    if t.depth >= inputs:
        options |= {"BM": skinny_rows(rows) if t.slices else rows, "num_stages": t.stages}
        launch(kernels[0], (tiles,), x, *stored(w, x), *args, **options)
        return
    # Fewer tokens leave more room for weights on their way; float32 is not there to be fast.
    padded = 8 if rows <= 8 and x.element_size() == 2 else skinny_rows(rows)
    together = t.together if padded <= 16 else pieces(t.together, 2)  # as many sums as there are registers
    groups = pieces(tiles, together)
    per = pieces(groups, PROGRAMS)
    height = 2 * t.rows if pair else t.rows
    ask = min(t.prefetch // (height * together), w.data.shape[1] * w.data.element_size()) // 16 * 16
    stages = fitting_stages(t, height, together, padded, bits=w.bits, size=x.element_size())
    options |= {"PER": per, "G": together, "ASK": ask, "WARPS": t.warps, "BM": padded}
    options |= {"LATE": max(LATE // together, 1), "num_stages": stages}
    launch(kernels[1], (pieces(groups, per),), x, *stored(w, x), *args, **options)


def stored(w: Matrix, x: Tensor) -> tuple[Tensor, Tensor]:
    """What a kernel reads: weights and scales. A scale and a minimum of two bytes each are read as one word."""
    if w.scales is None:
        return w.data, x
    return w.data, w.scales.view(torch.int32) if w.scales.element_size() == 2 else w.scales


def _parts(squares: Tensor | None) -> dict[str, int]:
    parts = 1 if squares is None else squares.shape[1]
    return {"PARTS": parts, "PARTS_2": power_of_two(parts)}


def matmul(
    x: Tensor, w: Matrix, out: Tensor, t: Tile, *, bias: Tensor | None, squares: Tensor | None, eps: float, pdl: int
) -> None:
    """out [M, N] = norm(x) W^T + bias. With ``squares`` [M, parts], x is scaled by the gain already (see above)."""
    _launch(
        (_matmul_kernel, stream.matmul_kernel), x, w, pieces(w.shape[0], t.rows), t, pdl,
        x if bias is None else bias, x if squares is None else squares, out, len(x), eps, w.shape[0],
        NORM=squares is not None, BIAS=bias is not None, **_parts(squares),
    )  # fmt: skip


class Residual(NamedTuple):
    """What a product that ends a block leaves: the residual stream, and what the next norm needs of it."""

    x: Tensor  # [M, N], added to
    gain: Tensor  # [N], the next norm's weight
    scaled: Tensor  # [M, N] x * gain
    squares: Tensor  # [M, tiles] parts of sum(x^2)


def matmul_residual(x: Tensor, w: Matrix, to: Residual, t: Tile, *, bias: Tensor | None, pdl: int) -> None:
    """x W^T + bias to the residual stream."""
    tiles = pieces(w.shape[0], t.rows)
    assert to.squares.shape[1] == tiles
    _launch(
        (_residual_kernel, stream.residual_kernel), x, w, tiles, t, pdl,
        x if bias is None else bias, *to, len(x), w.shape[0], PARTS=tiles, BIAS=bias is not None,
    )  # fmt: skip


def matmul_swiglu(x: Tensor, w: Matrix, out: Tensor, t: Tile, *, squares: Tensor, eps: float, pdl: int) -> None:
    """out [M, F] = silu(gate) * up, with [gate; up] = norm(x) W^T and W [2F, K]."""
    ffn = w.shape[0] // 2
    _launch(
        (_swiglu_kernel, stream.swiglu_kernel), x, w, pieces(ffn, t.rows), t, pdl, squares, out, len(x), eps, ffn,
        pair=True, **_parts(squares),
    )  # fmt: skip


def matmul_rotary(
    x: Tensor, w: Matrix, to: Heads, t: Tile, *, bias: Tensor | None, squares: Tensor, eps: float, pdl: int
) -> None:
    """norm(x) W^T + bias as heads of queries, keys and values."""
    assert to.query.shape[2] // 2 % t.rows == 0
    _launch(
        (_rotary_kernel, stream.rotary_kernel), x, w, w.shape[0] // 2 // t.rows, t, pdl,
        x if bias is None else bias, squares, *to.buffers, len(x), to.step.width, to.capacity, eps,
        pair=True, BIAS=bias is not None, **to.sizes, **_parts(squares),
    )  # fmt: skip
