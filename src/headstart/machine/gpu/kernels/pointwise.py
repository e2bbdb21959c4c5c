"""The small steps between matrix products, for what the skinny products cannot take along.

Knows: embedding rows, residual + RMS norm, rotary + key-value write (with Qwen3's head norms), SwiGLU, hidden states
that are kept for a head; each over rows.
Does not know: what a model is.

Decoding uses ``embed`` once a step, and ``rotate`` where heads are normed. Prefill (more than 32 rows, cuBLAS
products) uses the rest.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..compile.launching import launch, overlap
from ..step import Step
from ..tiles import pieces, power_of_two
from .blocks import wait
from .heads import Heads, pair

__all__ = ["embed", "norm", "remember", "rotate", "swiglu"]


@triton.jit(do_not_specialize=["parts"])
def _embed_kernel(
    tokens, table, gain, x, scaled, squares, parts, H: tl.constexpr, BH: tl.constexpr, SCALED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0)
    h = tl.arange(0, BH)
    g = tl.load(gain + h, mask=h < H, other=0.0).to(tl.float32)
    wait(PDL)
    token = tl.load(tokens + m).to(tl.int64)
    row = tl.load(table + token * H + h, mask=h < H, other=0.0)
    tl.store(x + m * H + h, row, mask=h < H)
    if SCALED:
        value = row.to(tl.float32)
        tl.store(scaled + m * H + h, (value * g).to(scaled.dtype.element_ty), mask=h < H)
        total = tl.sum(value * value, axis=0)
        tl.store(squares + m * parts + h, tl.where(h == 0, total, 0.0), mask=h < parts)


@triton.jit
def _norm_kernel(x, add, gain, out, eps, H: tl.constexpr, BH: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr):
    m = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BH)
    g = tl.load(gain + h, mask=h < H, other=0.0).to(tl.float32)
    wait(PDL)
    value = tl.load(x + m * H + h, mask=h < H, other=0.0)
    if ADD:
        value = (value.to(tl.float32) + tl.load(add + m * H + h, mask=h < H, other=0.0).to(tl.float32)).to(value.dtype)
        tl.store(x + m * H + h, value, mask=h < H)
    value = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / H + eps)
    tl.store(out + m * H + h, (value * scale * g).to(out.dtype.element_ty), mask=h < H)


@triton.jit
def _place(lengths, m, width, RAGGED: tl.constexpr):
    """Of token m: its row, the keys there before this step, and its slot. Ragged: lengths [M, 2] has row and slot."""
    if RAGGED:
        row = tl.load(lengths + 2 * m).to(tl.int64)
        slot = tl.load(lengths + 2 * m + 1).to(tl.int64)
        length = slot  # only trees ask for it
    else:
        row = (m // width).to(tl.int64)
        length = tl.load(lengths + m // width).to(tl.int64)
        slot = length + m % width
    return row, length, slot


@triton.jit(do_not_specialize=["width", "capacity"])
def _rotate_kernel(
    qkv, q_gain, k_gain, query, keys, values, cos, sin, lengths, depths, width, capacity, eps,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, HP: tl.constexpr, TURN: tl.constexpr, NORM: tl.constexpr,
    TREE: tl.constexpr, RAGGED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = D // 2
    m = tl.program_id(0)
    head = tl.program_id(1)
    i = tl.arange(0, HP)
    ca, cb = pair(i, TURN, HALF)
    real = i < HALF
    wait(PDL)
    source = qkv + (m.to(tl.int64) * (HEADS + 2 * KV) + head) * D
    a = tl.load(source + ca, mask=real, other=0.0).to(tl.float32)
    b = tl.load(source + cb, mask=real, other=0.0).to(tl.float32)
    if NORM:  # noqa: SIM102 - one is known when compiling, the other is not
        if head < HEADS + KV:
            gain = q_gain
            if head >= HEADS:
                gain = k_gain
            scale = tl.rsqrt(tl.sum(a * a + b * b, axis=0) / D + eps)
            a = a * scale * tl.load(gain + ca, mask=real, other=0.0).to(tl.float32)
            b = b * scale * tl.load(gain + cb, mask=real, other=0.0).to(tl.float32)
    row, length, slot = _place(lengths, m, width, RAGGED)
    if head < HEADS + KV:
        position = slot
        if TREE:
            position = length + tl.load(depths + m).to(tl.int64)
        position = tl.minimum(position, capacity - 1)  # the table ends where the cache does
        c = tl.load(cos + position * HALF + i, mask=real, other=1.0)
        s = tl.load(sin + position * HALF + i, mask=real, other=0.0)
        a, b = a * c - b * s, b * c + a * s
    kind = keys.dtype.element_ty
    if head < HEADS:
        base = query + (m.to(tl.int64) * HEADS + head) * D
        tl.store(base + ca, a.to(kind), mask=real)
        tl.store(base + cb, b.to(kind), mask=real)
    elif slot < capacity:
        if head < HEADS + KV:
            base = keys + ((row * KV + head - HEADS) * capacity + slot) * D
            tl.store(base + ca, a.to(kind), mask=real)
            tl.store(base + cb, b.to(kind), mask=real)
        else:
            base = values + ((row * KV + head - HEADS - KV) * capacity + slot) * D
            tl.store(base + ca, a.to(kind), mask=real)
            tl.store(base + cb, b.to(kind), mask=real)


@triton.jit
def _swiglu_kernel(gate_up, out, F, BF: tl.constexpr):
    m = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BF + tl.arange(0, BF)
    gate = tl.load(gate_up + m * 2 * F + f, mask=f < F, other=0.0).to(tl.float32)
    up = tl.load(gate_up + m * 2 * F + F + f, mask=f < F, other=0.0).to(tl.float32)
    tl.store(out + m * F + f, (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=f < F)


@triton.jit(do_not_specialize=["width", "capacity", "offset"])
def _remember_kernel(
    x, features, lengths, width, capacity, offset, H: tl.constexpr, F: tl.constexpr, BH: tl.constexpr,
    RAGGED: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0)
    h = tl.arange(0, BH)
    row, _, slot = _place(lengths, m, width, RAGGED)
    at = (row * capacity + slot) * F + offset
    value = tl.load(x + m * H + h, mask=h < H, other=0.0)
    tl.store(features + at + h, value, mask=(h < H) & (slot < capacity))


def _warps(width: int) -> int:
    """A power of two, whatever the width is."""
    return min(power_of_two(max(width // 512, 1)), 8)


def embed(
    tokens: Tensor,
    table: Tensor,
    gain: Tensor,
    x: Tensor,
    scaled: Tensor | None,
    squares: Tensor | None,
    *,
    pdl: int,
) -> None:
    """x [M, H] = table[tokens [M]]; scaled = x * gain; squares [M, parts] = sum(x^2), and zeros behind it.

    As many parts as the products leave in later layers, so that the first layer needs no kernels of its own.
    """
    hidden = table.shape[1]
    assert squares is None or squares.shape[1] <= hidden
    launch(
        _embed_kernel, (x.shape[0],),
        tokens, table, gain, x, x if scaled is None else scaled, x if squares is None else squares,
        1 if squares is None else squares.shape[1], H=hidden, BH=power_of_two(hidden), SCALED=scaled is not None,
        num_warps=_warps(hidden), **overlap(pdl),
    )  # fmt: skip


def norm(x: Tensor, add: Tensor | None, gain: Tensor, out: Tensor, *, eps: float, pdl: int) -> None:
    """x [M, H] += add; out = RMS norm of x, times gain."""
    hidden = x.shape[1]
    launch(
        _norm_kernel, (x.shape[0],),
        x, x if add is None else add, gain, out, eps, H=hidden, BH=power_of_two(hidden), ADD=add is not None,
        num_warps=_warps(hidden), **overlap(pdl),
    )  # fmt: skip


def rotate(qkv: Tensor, gains: tuple[Tensor, ...], to: Heads, *, eps: float, pdl: int) -> None:
    """From qkv [M, (heads + 2 kv) * D]: queries and keys normed (by two ``gains``, or none) and turned, keys and values
    stored."""
    sizes = to.sizes
    launch(
        _rotate_kernel, (qkv.shape[0], sizes["HEADS"] + 2 * sizes["KV"]),
        qkv, *(gains or (qkv, qkv)), *to.buffers, to.step.width, to.capacity, eps, HP=power_of_two(sizes["D"] // 2),
        NORM=bool(gains), RAGGED=to.step.packed is not None, num_warps=1, **sizes, **overlap(pdl),
    )  # fmt: skip


def remember(x: Tensor, features: Tensor, step: Step, *, offset: int) -> None:
    """x [M, H] -> features [R, capacity, F], from channel ``offset`` on, at the slots of the tokens' keys."""
    rows, hidden = x.shape
    launch(
        _remember_kernel, (rows,),
        x, features, step.lengths, step.width, features.shape[1], offset, H=hidden, F=features.shape[2],
        BH=power_of_two(hidden), RAGGED=step.packed is not None, num_warps=_warps(hidden),
    )  # fmt: skip


def swiglu(gate_up: Tensor, out: Tensor) -> None:
    """out [M, F] = silu(gate) * up from gate_up [M, 2F]."""
    rows, ffn = out.shape
    launch(_swiglu_kernel, (rows, pieces(ffn, 1024)), gate_up, out, ffn, BF=1024, num_warps=4)
