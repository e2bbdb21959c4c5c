# mypy: ignore-errors
# Triton's language only looks like Python; mypy cannot read kernel bodies.
"""Building blocks of the skinny products: what every kernel of ``kernels_matmul`` and ``kernels_stream`` does alike.

Knows: how a tile of weights (floats, or rounded to 8 or 4 bits: see ``rounding``) is streamed and multiplied, what may
be done before the kernel in front has ended, how an RMS norm's scale is put together, and where heads are stored.
Does not know: what else is done with the sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "done", "early", "inverse_rms", "load_groups", "multiply", "pair", "product", "scale_rows", "square_parts",
    "store_heads", "tile_of", "unpack", "wait",
]  # fmt: skip

# Four bytes of two 4-bit weights each -> eight bfloat16 weights. A half byte q behind 0x43 is 128 + q, exactly; then
# come - 128 (exact) and scale * q + minimum (rounded once).
_UNPACK = tl.constexpr("""
{ .reg .b32 a, b, c, d, e, one, less;
mov.b32 one, 0x3F803F80; mov.b32 less, 0xC300C300;
shr.b32 e, $4, 4;
prmt.b32 a, $4, 0x43, 0x4140; prmt.b32 b, $4, 0x43, 0x4342;
prmt.b32 c, e, 0x43, 0x4140; prmt.b32 d, e, 0x43, 0x4342;
and.b32 a, a, 0xFF0FFF0F; and.b32 b, b, 0xFF0FFF0F; and.b32 c, c, 0xFF0FFF0F; and.b32 d, d, 0xFF0FFF0F;
fma.rn.bf16x2 a, a, one, less; fma.rn.bf16x2 b, b, one, less;
fma.rn.bf16x2 c, c, one, less; fma.rn.bf16x2 d, d, one, less;
fma.rn.bf16x2 $0, a, $5, $9; fma.rn.bf16x2 $1, b, $7, $11;
fma.rn.bf16x2 $2, c, $5, $9; fma.rn.bf16x2 $3, d, $7, $11; }
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
    if K % BK == 0:
        tile = tl.load(pointers, eviction_policy="evict_first")
    else:
        tile = tl.load(pointers, mask=at < STORED, other=0, eviction_policy="evict_first")
    return tile


@triton.jit
def _split_pair(both):
    """A scale and a minimum, bfloat16, in one word -> each twice in a word of its own."""
    scale = tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $1, 0x1010;", "=r,r", [both], dtype=tl.int32, is_pure=True, pack=1
    )
    minimum = tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $1, 0x3232;", "=r,r", [both], dtype=tl.int32, is_pure=True, pack=1
    )
    return scale, minimum


@triton.jit
def load_groups(s, at, mask, MASKED: tl.constexpr):
    """Scales and minima of the groups ``at`` (of 32 weights of 4 bits each), as ``unpack`` takes them."""
    if s.dtype.element_ty == tl.float32:
        if MASKED:
            scale = tl.load(s + 2 * at, mask=mask, other=0.0, eviction_policy="evict_first")
            minimum = tl.load(s + 2 * at + 1, mask=mask, other=0.0, eviction_policy="evict_first")
        else:
            scale = tl.load(s + 2 * at, eviction_policy="evict_first")
            minimum = tl.load(s + 2 * at + 1, eviction_policy="evict_first")
    else:
        if MASKED:
            both = tl.load(s + at, mask=mask, other=0, eviction_policy="evict_first")
        else:
            both = tl.load(s + at, eviction_policy="evict_first")
        scale, minimum = _split_pair(both)
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
    """The weights in the low and in the high halves of a tile of bytes, in the activations' type."""
    scale, minimum = _spread(scale), _spread(minimum)
    if scale.dtype == tl.float32:
        low = (tile & 15).to(tl.float32) * scale + minimum
        high = (tile >> 4).to(tl.float32) * scale + minimum
    else:
        low, high = tl.inline_asm_elementwise(
            _UNPACK, "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r", [tile, scale, minimum], dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True, pack=4,
        )  # fmt: skip
    return low, high


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
    tile = tile.to(xt.dtype).to(tl.float32)
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
def multiply(
    tile, scale, minimum, x, m, M, k, acc, K: tl.constexpr, BK: tl.constexpr, KS: tl.constexpr, BITS: tl.constexpr
):
    """acc + W[row, k : k + BK] x inputs for what ``tile_of`` loaded. 8-bit sums are still to be scaled.

    KS warps work each on its own channels, or (KS 0, one row or two) all without tensor cores.
    """
    xt = _inputs(x, m, M, k, K, BK, KS, BITS, False)
    if BITS == 4:
        low, high = unpack(tile, scale, minimum)
        xh = _inputs(x, m, M, k, K, BK, KS, BITS, True)
        if KS == 0:
            acc += _added(_times(low, xt) + _times(high, xh))
        else:
            acc = tl.dot(low, xt, acc, input_precision="ieee")
            acc = tl.dot(high, xh, acc, input_precision="ieee")
    elif KS == 0:
        acc += _added(_times(tile, xt))
    else:
        acc = tl.dot(tile.to(xt.dtype), xt, acc, input_precision="ieee")
    return acc


@triton.jit
def scale_rows(acc, s, row, BITS: tl.constexpr):
    """Sums [HB, BM] of 8-bit rows by the rows' scales."""
    if BITS == 8:
        acc = acc * tl.load(s + row)[:, None]
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
        scale = tl.load(s + row)
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
    if KS > 1:
        acc_a = tl.zeros([KS, HB, BM], tl.float32)
    else:
        acc_a = tl.zeros([HB, BM], tl.float32)
    acc_b = acc_a
    acc_a = multiply(wa[0], wa[1], wa[2], x, m, M, 0, acc_a, K, BK, KS, BITS)
    if PAIR:
        acc_b = multiply(wb[0], wb[1], wb[2], x, m, M, 0, acc_b, K, BK, KS, BITS)
    if KS > 1:
        acc_a = tl.sum(acc_a, axis=0)
        if PAIR:
            acc_b = tl.sum(acc_b, axis=0)
    if BITS == 8:
        acc_a = acc_a * wa[1][:, None]
        if PAIR:
            acc_b = acc_b * wb[1][:, None]
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


@triton.jit
def store_heads(
    a, b, head, ca, cb, m, live, slot, width, query, keys, values, capacity, HEADS: tl.constexpr, KV: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    """Channels ca and cb [HB] of one head [HB, BM] to the queries, or into the cache at ``slot`` [BM]."""
    kind = keys.dtype.element_ty
    at = ((m // width).to(tl.int64) * KV * capacity + slot)[None, :] * D
    fits = (live & (slot < capacity))[None, :]
    if head < HEADS:
        base = query + m[None, :] * (HEADS * D) + head * D
        tl.store(base + ca[:, None], a.to(kind), mask=live[None, :])
        tl.store(base + cb[:, None], b.to(kind), mask=live[None, :])
    elif head < HEADS + KV:
        base = keys + at + (head - HEADS).to(tl.int64) * capacity * D
        tl.store(base + ca[:, None], a.to(kind), mask=fits)
        tl.store(base + cb[:, None], b.to(kind), mask=fits)
    else:
        base = values + at + (head - HEADS - KV).to(tl.int64) * capacity * D
        tl.store(base + ca[:, None], a.to(kind), mask=fits)
        tl.store(base + cb[:, None], b.to(kind), mask=fits)
