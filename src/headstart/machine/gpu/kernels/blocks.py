"""Building blocks of the skinny products: what every kernel of ``kernels.matmul`` and ``kernels.stream`` does alike.

Knows: how a tile of weights (floats, or rounded to 8 or 4 bits: see ``quantize``) is streamed and multiplied, what may
be done before the kernel in front has ended, and how an RMS norm's scale is put together.
Does not know: what else is done with the sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "done", "early", "inputs", "inverse_rms", "load_groups", "multiply", "product", "scale_rows", "square_parts",
    "store_product", "store_swiglu", "tile_of", "total", "unpack", "wait", "widen", "zero",
]  # fmt: skip

# A byte q under eight zero bits is q * 2^-133 as bfloat16, exactly: down there its numbers lie evenly. From there one
# multiply-add of two weights at a time gives (q - 128) / 64: 8-bit weights are 64 times too small until their sums are
# scaled.
_BYTES = tl.constexpr("""
{ .reg .b32 a, b, t, up, less;
mov.b32 up, 0x7F007F00; mov.b32 less, 0xC000C000;
xor.b32 t, $2, 0x80808080;
prmt.b32 a, t, 0, 0x4140; prmt.b32 b, t, 0, 0x4342;
fma.rn.bf16x2 $0, a, up, less; fma.rn.bf16x2 $1, b, up, less; }
""")

# Four bytes of two 4-bit weights each, in the same way: q (or 16 q) * 2^-133 * scale + minimum, rounded once. Scale and
# minimum share a word, and are kept so that the sum is what it should be times 2^-15 (``quantize.SCALE_UP``).
_HALVES = tl.constexpr("""
{ .reg .b32 a, b, c, d, l, h, by, by_16, least, less; .reg .b16 s, m;
mov.b32 {s, m}, $5; mov.b32 by, {s, s}; mov.b32 least, {m, m};
mov.b32 less, 0x3D803D80; mul.rn.bf16x2 by_16, by, less;
and.b32 l, $4, 0x0F0F0F0F; and.b32 h, $4, 0xF0F0F0F0;
prmt.b32 a, l, 0, 0x4140; prmt.b32 b, l, 0, 0x4342; prmt.b32 c, h, 0, 0x4140; prmt.b32 d, h, 0, 0x4342;
fma.rn.bf16x2 $0, a, by, least; fma.rn.bf16x2 $1, b, by, least;
fma.rn.bf16x2 $2, c, by_16, least; fma.rn.bf16x2 $3, d, by_16, least; }
""")


@triton.jit
def _deal(first, COUNT: tl.constexpr, KS: tl.constexpr, LINE: tl.constexpr):
    """first .. first + COUNT as [1, COUNT], or [KS, 1, COUNT / KS]: runs of LINE are dealt to the KS warps in turn."""
    if KS <= 1:
        at = (first + tl.arange(0, COUNT))[None, :]
    else:
        RUN: tl.constexpr = LINE if COUNT // KS > LINE else COUNT // KS
        j = tl.arange(0, COUNT // KS)
        at = first + (j // RUN * (RUN * KS) + j % RUN)[None, None, :] + (tl.arange(0, KS) * RUN)[:, None, None]
    return at


@triton.jit
def _places(k, BK: tl.constexpr, KS: tl.constexpr, BITS: tl.constexpr):
    """Where channels k .. k + BK of a row are stored; with 4 bits two share a byte. A run is a line of memory."""
    if BITS == 4:
        at = _deal(k // 2, BK // 2, KS, 128)
    elif BITS == 8:
        at = _deal(k, BK, KS, 128)
    else:
        at = _deal(k, BK, KS, 64)
    return at


@triton.jit
def _load(pointers, mask, MASKED: tl.constexpr):
    """Weights are read once."""
    if MASKED:
        tile = tl.load(pointers, mask=mask, other=0, eviction_policy="evict_first")
    else:
        tile = tl.load(pointers, eviction_policy="evict_first")
    return tile


@triton.jit
def _weights(w, row, k, K: tl.constexpr, BK: tl.constexpr, KS: tl.constexpr, BITS: tl.constexpr):
    """What is stored of W[row, k : k + BK], [KS, HB, BK / KS], or [HB, BK] if there are no slices."""
    STORED: tl.constexpr = K // 2 if BITS == 4 else K
    at = _places(k, BK, KS, BITS)
    if KS == 0 and BITS < 16:  # the compiler sees runs of 8: as many a thread as of x, so that layouts agree
        at = at // 8 * 8 + at % 8
    start = row.to(tl.int64) * STORED
    if KS <= 1:
        pointers = w + start[:, None] + at
    else:
        pointers = w + start[None, :, None] + at
    return _load(pointers, at < STORED, K % BK != 0)


@triton.jit
def load_groups(s, at, mask, MASKED: tl.constexpr):
    """Scales and minima of the groups ``at`` (of 32 weights of 4 bits each), as ``unpack`` takes them."""
    if s.dtype.element_ty == tl.float32:
        scale, minimum = _load(s + 2 * at, mask, MASKED), _load(s + 2 * at + 1, mask, MASKED)
    else:
        scale = _load(s + at, mask, MASKED)
        minimum = scale  # both are in one word
    return scale, minimum


@triton.jit
def tile_of(w, s, row, k, K: tl.constexpr, BK: tl.constexpr, KS: tl.constexpr, BITS: tl.constexpr):
    """Weights W[row, k : k + BK] as they are stored; with 4 bits also their groups' scales and minima."""
    tile = _weights(w, row, k, K, BK, KS, BITS)
    if BITS == 4:
        at = _deal(k // 32, BK // 32, KS, 8)
        start = row.to(tl.int64) * (K // 32)
        if KS <= 1:
            scale, minimum = load_groups(s, start[:, None] + at, at < K // 32, K % BK != 0)
        else:
            scale, minimum = load_groups(s, start[None, :, None] + at, at < K // 32, K % BK != 0)
    else:
        scale, minimum = tile, tile
    return tile, scale, minimum


@triton.jit
def _spread(group):
    """[..., G] -> [..., 16 * G]: what holds for a group, for each of its bytes."""
    if len(group.shape) == 2:
        wide = tl.broadcast_to(group[:, :, None], [group.shape[0], group.shape[1], 16])
        wide = tl.reshape(wide, [group.shape[0], group.shape[1] * 16])
    else:
        wide = tl.broadcast_to(group[:, :, :, None], [group.shape[0], group.shape[1], group.shape[2], 16])
        wide = tl.reshape(wide, [group.shape[0], group.shape[1], group.shape[2] * 16])
    return wide


@triton.jit
def unpack(tile, scale, minimum):
    """The weights in the low and in the high halves of a tile of bytes, in the activations' type, by 2^-15."""
    if scale.dtype == tl.float32:
        scale, minimum = _spread(scale) * 2.0**-100 * 2.0**-33, _spread(minimum)
        low = (tile & 15).to(tl.float32) * scale + minimum
        high = (tile >> 4).to(tl.float32) * scale + minimum
    else:
        low, high = tl.inline_asm_elementwise(
            _HALVES, "=r,=r,=r,=r,r,r,r,r,r", [tile, _spread(scale)], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True,
            pack=4,
        )  # fmt: skip
    return low, high


@triton.jit
def widen(tile, like, BITS: tl.constexpr):
    """Floats as they are; bytes in the type of ``like``, by 1 / 64."""
    if BITS == 8:
        if like.dtype == tl.float32:
            tile = tile.to(tl.float32) * (1 / 64)
        else:
            tile = tl.inline_asm_elementwise(_BYTES, "=r,=r,r", [tile], dtype=tl.bfloat16, is_pure=True, pack=4)
    return tile


@triton.jit
def _inputs(x, m, M, k, K: tl.constexpr, BK: tl.constexpr, KS: tl.constexpr, BITS: tl.constexpr, HIGH: tl.constexpr):
    """x[m, channels] turned, [KS, BK / KS, BM] or [BK, BM]; for one row (KS 0) as it is. Rows past M are zero.

    The channels are those of a tile of weights; with 4 bits those in its low or in its HIGH halves.
    """
    at = _places(k, BK, KS, BITS)
    if BITS == 4:
        at = at // 16 * 32 + at % 16 + 16 * HIGH
    if KS <= 1:
        row = m[:, None]
    else:
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
def _times(tile, xt):
    """Products [HB, BK], or with two token rows [HB, 2, BK]."""
    tile = tile.to(tl.float32)
    if xt.shape[0] == 1:
        found = tile * xt.to(tl.float32)
    else:
        found = tile[:, None, :] * xt.to(tl.float32)[None, :, :]
    return found


@triton.jit
def _added(found):
    """Sums [HB, BM] of what ``_times`` found."""
    if len(found.shape) == 2:
        total = tl.sum(found, axis=1)[:, None]
    else:
        total = tl.sum(found, axis=2)
    return total


@triton.jit
def inputs(x, m, M, k, K: tl.constexpr, BK: tl.constexpr, KS: tl.constexpr, BITS: tl.constexpr):
    """What ``multiply`` takes of x[m, k : k + BK]; with 4 bits in two parts."""
    low = _inputs(x, m, M, k, K, BK, KS, BITS, False)
    high = low
    if BITS == 4:
        high = _inputs(x, m, M, k, K, BK, KS, BITS, True)
    return low, high


@triton.jit
def multiply(tile, scale, minimum, low, high, acc, KS: tl.constexpr, BITS: tl.constexpr):
    """acc + W[row, k : k + BK] x ``inputs`` for what ``tile_of`` loaded. Sums of rounded weights are not scaled yet.

    KS warps work each on its own channels, or (KS 0, one row or two) all without tensor cores.
    """
    if BITS == 4:
        a, b = unpack(tile, scale, minimum)
        if KS == 0:
            acc += _added(_times(a, low) + _times(b, high))
        else:
            acc = tl.dot(a, low, acc, input_precision="ieee")
            acc = tl.dot(b, high, acc, input_precision="ieee")
    elif KS == 0:
        acc += _added(_times(widen(tile, low, BITS), low))
    else:
        acc = tl.dot(widen(tile, low, BITS), low, acc, input_precision="ieee")
    return acc


@triton.jit
def scale_rows(acc, s, row, BITS: tl.constexpr):
    """Sums [HB, BM] of rounded weights to what they should be."""
    if BITS == 8:
        acc = acc * (tl.load(s + row) * 64.0)[:, None]
    if BITS == 4:
        acc = acc * 32768.0
    return acc


@triton.jit
def zero(KS: tl.constexpr, ROWS: tl.constexpr, BM: tl.constexpr):
    """Where ``multiply`` begins."""
    if KS > 1:
        acc = tl.zeros([KS, ROWS, BM], tl.float32)
    else:
        acc = tl.zeros([ROWS, BM], tl.float32)
    return acc


@triton.jit
def total(acc, KS: tl.constexpr):
    """The sums of all warps together."""
    if KS > 1:
        acc = tl.sum(acc, axis=0)
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
def _whole(w, s, row, K: tl.constexpr, BK: tl.constexpr, KS: tl.constexpr, BITS: tl.constexpr):
    tile, scale, minimum = tile_of(w, s, row, 0, K, BK, KS, BITS)
    if BITS == 8:
        scale = tl.load(s + row) * 64.0
    return tile, scale, minimum


@triton.jit
def early(
    w, s, row_a, row_b, K: tl.constexpr, BK: tl.constexpr, KS: tl.constexpr, BITS: tl.constexpr, PAIR: tl.constexpr
):
    """Before the wait: short weight rows are loaded whole, and their scales."""
    wa = _whole(w, s, row_a, K, BK, KS, BITS)
    if PAIR:
        wb = _whole(w, s, row_b, K, BK, KS, BITS)
    else:
        wb = wa
    return wa, wb


@triton.jit
def product(
    x, wa, wb, m, M, K: tl.constexpr, BK: tl.constexpr, HB: tl.constexpr, BM: tl.constexpr, KS: tl.constexpr,
    BITS: tl.constexpr, PAIR: tl.constexpr,
):  # fmt: skip
    """Sums [HB, BM] of the rows that ``early`` loaded, and of their partners."""
    acc_a = zero(KS, HB, BM)
    acc_b = acc_a
    low, high = inputs(x, m, M, 0, K, BK, KS, BITS)
    acc_a = multiply(wa[0], wa[1], wa[2], low, high, acc_a, KS, BITS)
    if PAIR:
        acc_b = multiply(wb[0], wb[1], wb[2], low, high, acc_b, KS, BITS)
    acc_a = total(acc_a, KS)
    if PAIR:
        acc_b = total(acc_b, KS)
    if BITS == 8:
        acc_a = acc_a * wa[1][:, None]
        if PAIR:
            acc_b = acc_b * wb[1][:, None]
    if BITS == 4:
        acc_a = acc_a * 32768.0
        acc_b = acc_b * 32768.0
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
def store_product(acc, n, row, m, M, N, bias, out, BIAS: tl.constexpr):
    """Sums [HB, BM] and the bias to out [M, N]; ``row``: n, or the last one."""
    if BIAS:
        acc = acc + tl.load(bias + row).to(tl.float32)[:, None]
    mask = (n < N)[:, None] & (m < M)[None, :]
    tl.store(out + m[None, :].to(tl.int64) * N + n[:, None], acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def store_swiglu(gate, up, scale, n, m, M, F, out):
    """silu(gate) * up [HB, BM], both scaled, to out [M, F]."""
    gate = gate * scale
    value = gate / (1.0 + tl.exp(-gate)) * (up * scale)
    mask = (n < F)[:, None] & (m < M)[None, :]
    tl.store(out + m[None, :] * F + n[:, None], value.to(out.dtype.element_ty), mask=mask)
