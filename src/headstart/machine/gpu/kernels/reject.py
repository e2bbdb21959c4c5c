"""The token and the block rule on chains in four launches.

Knows: what ``maths.verify.chain_rules`` says, and the noise of ``maths.noise``, bit for bit; sums over the vocabulary
are added in another order. Does not know: where the distributions come from, or what the verdict is used for.

As tensor operations the rules are some 75 kernels of a few numbers each, which a captured round would notice. Here
(1) each chunk of the vocabulary is summed up for all nodes at once, (2) one program a row decides what is accepted,
(3) the target's own token is drawn from the residual, which is never written out, and (4) picked among the chunks'.

Words: an edge is a drafted token with its parent: edge e leads from node e to node e + 1. Its p is the parent's, its q
is what its token was drawn from. NaN goes through comparisons as it goes through torch's clamps. Products are not
contracted into multiply-adds: both kernels that see a residual must agree about what is left of it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....maths.noise import ACCEPT, COUPLED, RESIDUAL
from ..tiles import power_of_two
from .blocks import wait
from .keys import round_key, words_of
from .race import Rows, best, noise_at

__all__ = ["rejected"]

_TOLERANCE = 1e-3  # as ``maths.chance.sound``


@triton.jit
def _at_most_one(x):
    return tl.where(x > 1.0, 1.0, x)


@triton.jit
def _ratios(p, q, tokens, r, N, most, V, B: tl.constexpr):
    """Of each edge of row r [B]: p / q of its token (0 / 0 is 0), and is it a token at all?"""
    e = tl.arange(0, B)
    token = tl.load(tokens + r * (N + 1) + 1 + e, mask=e < N, other=0)
    place = tl.minimum(tl.maximum(token, 0), V - 1)
    above = tl.load(p + (r * (N + 1) + e).to(tl.int64) * V + place, mask=e < N, other=0.0, cache_modifier=".cg")
    drawn = tl.load(q + (r * most + e).to(tl.int64) * V + place, mask=e < N, other=1.0, cache_modifier=".cg")
    return tl.where(above > 0.0, tl.div_rn(above, drawn), 0.0), place == token


@triton.jit
def _pick(values, at, n):
    """values[at]."""
    return tl.sum(tl.where(n == at, values, 0.0), axis=0)


@triton.jit
def _through(ratios, count, B: tl.constexpr):
    """r of the nodes 0 .. count [B]: the probability, as far as is known, that the target's text goes through."""
    n = tl.arange(0, B)
    r = 1.0
    through = tl.full([B], 1.0, tl.float32)
    for i in tl.range(0, count, loop_unroll_factor=4):
        r = _at_most_one(r * _pick(ratios, i, n))
        through = tl.where(n == i + 1, r, through)
    return through


@triton.jit
def _rest(p, q, scale):
    """What is left of the target's distribution once the child is rejected."""
    rest = p * scale - q
    return tl.where(rest < 0.0, 0.0, rest)


@triton.jit(do_not_specialize=["N", "most"])
def _sums_kernel(
    p, q, tokens, block, parts, N, most, V, W: tl.constexpr, C: tl.constexpr, B: tl.constexpr, PDL: tl.constexpr
):
    """Each chunk's sums of p, of q, and of the residual, at one node -> parts [R * (N+1), 3, C]. The last has no q."""
    chunk, m = tl.program_id(0), tl.program_id(1)
    r, node = m // (N + 1), m % (N + 1)
    v = chunk * W + tl.arange(0, W)
    wait(PDL)
    of_p = tl.load(p + m.to(tl.int64) * V + v, mask=v < V, other=0.0, cache_modifier=".cg")
    mine = (v < V) & (node < N)
    of_q = tl.load(q + (r * most + node).to(tl.int64) * V + v, mask=mine, other=0.0, cache_modifier=".cg")
    ratios, _ = _ratios(p, q, tokens, r, N, most, V, B)
    steps = tl.where((tl.load(block + r) != 0) & (node < N), node, 0)
    scale = _pick(_through(ratios, steps, B), steps, tl.arange(0, B))
    at = parts + m * 3 * C + chunk
    tl.store(at, tl.sum(of_p, axis=0))
    tl.store(at + C, tl.sum(of_q, axis=0))
    tl.store(at + 2 * C, tl.sum(_rest(of_p, of_q, scale), axis=0))


@triton.jit
def _sum_of(parts, first, which, live, C: tl.constexpr, B: tl.constexpr):
    """One of the three sums [B], of nodes ``first`` and on."""
    at = ((first + tl.arange(0, B)) * 3 + which)[:, None] * C + tl.arange(0, C)[None, :]
    return tl.sum(tl.load(parts + at, mask=live[:, None], other=0.0, cache_modifier=".cg"), axis=1)


@triton.jit
def _sound(total, TOLERANCE: tl.constexpr):
    return tl.abs(total - 1.0) < TOLERANCE


@triton.jit(do_not_specialize=["N", "most"])
def _verdict_kernel(
    p, q, tokens, limits, block, seeds, base, parts, accepted, ok, scales, low_key, high_key, N, most, V,
    C: tl.constexpr, B: tl.constexpr, TOLERANCE: tl.constexpr, ACCEPT: tl.constexpr, RESIDUAL: tl.constexpr,
    COUPLED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row: how many drafted tokens are accepted, is p well there; the scale of the residual that the target's own
    token comes from (-1: from p itself), and the key of that draw."""
    r = tl.program_id(0)
    e = tl.arange(0, B)  # as a node: its own; as an edge: the one below it
    wait(PDL)
    ratios, real = _ratios(p, q, tokens, r, N, most, V, B)
    first, inner = r * (N + 1), e < N
    sound_p = _sound(_sum_of(parts, first, 0, e <= N, C, B), TOLERANCE)
    sound_q = _sound(_sum_of(parts, first, 1, inner, C, B), TOLERANCE)
    mass = _sum_of(parts, first, 2, inner, C, B)
    below = _sum_of(parts, first + 1, 2, e + 1 < N, C, B)  # the mass at the edge's child
    limit = tl.load(limits + r)
    # Edges count up to the first that is broken, and up to the row's limit.
    usable = tl.min(tl.where(inner & (e < limit) & sound_p & sound_q & real, N, tl.minimum(e, N)), axis=0)
    whole = tl.load(block + r) != 0
    through = _through(ratios, N, B)
    reach = _at_most_one(through * ratios)  # r of the edge's child
    lost = below + (1.0 - reach)
    saved = tl.where(lost > 0.0, tl.div_rn(below, lost), 1.0)
    chance = tl.where(whole, tl.where(e + 1 < usable, saved, reach), _at_most_one(ratios))
    key = round_key(tl.load(seeds + r), tl.load(base + r))
    low, _ = words_of(key, (e + 1).to(tl.int64), ACCEPT)
    uniform = (((low >> 9) & 0x7FFFFF).to(tl.float32) + 0.5) * (2.0**-23)
    yes = (uniform < chance) & (e < usable)
    leading = tl.min(tl.where(yes, N, tl.minimum(e, N)), axis=0)
    furthest = tl.max(tl.where(yes, e + 1, 0), axis=0)
    last = tl.where(whole, furthest, leading)
    # A usable child that was not accepted was rejected. Rounding alone can leave nothing of p: p itself will do then.
    some = (last < usable) & (_pick(mass, last, e) > 0.0)
    scale = tl.where(whole, _pick(through, last, e), 1.0)
    tl.store(accepted + r, last.to(tl.int64))
    tl.store(ok + r, tl.max(((e == last) & sound_p).to(tl.int8), axis=0))
    tl.store(scales + r, tl.where(some, scale, -1.0))
    # A round without a draft uses the position's own noise.
    stream = tl.where(limit > 0, RESIDUAL, COUPLED).to(tl.int64)
    low, high = words_of(key, tl.full([], 0, tl.int64), stream)
    tl.store(low_key + r, low)
    tl.store(high_key + r, high)


@triton.jit(do_not_specialize=["N", "most"])
def _draw_kernel(
    p, q, accepted, scales, low_key, high_key, scores, winners, N, most, V, W: tl.constexpr, C: tl.constexpr,
    LIB: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Each chunk's winner in the race for the target's own token."""
    chunk, r = tl.program_id(0), tl.program_id(1)
    v = chunk * W + tl.arange(0, W)
    wait(PDL)
    node = tl.load(accepted + r, cache_modifier=".cg")
    scale = tl.load(scales + r, cache_modifier=".cg")
    noise = noise_at(v, tl.load(low_key + r, cache_modifier=".cg"), tl.load(high_key + r, cache_modifier=".cg"), LIB)
    weight = tl.load(p + (r * (N + 1) + node) * V + v, mask=v < V, other=0.0, cache_modifier=".cg")
    child = tl.minimum(node, N - 1)  # where nothing is taken off, any will do
    of_q = tl.load(q + (r * most + child) * V + v, mask=v < V, other=0.0, cache_modifier=".cg")
    weight = tl.where(scale >= 0.0, _rest(weight, of_q, scale), weight)
    best(tl.div_rn(weight, noise), v, V, scores, winners, r * C + chunk)


def rejected(
    p: Tensor, q: Tensor, tokens: Tensor, limits: Tensor, block: Tensor, seeds: Tensor, base: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The verdict on R chains of N >= 1 drafted tokens each: how many are accepted [R], the target's own token [R], and
    is p well where it comes from [R]. As ``maths.verify.chain_rules`` with ``maths.chance.CounterChance``.

    p float32 [R, N+1, V]; q float32 [R, N, V], rows may stand apart; tokens [R, N+1]; limits [R]: drafted tokens that
    count; block [R]: 0 for the token rule; seeds, base [R].
    """
    rows, nodes, size = p.shape
    assert p.dtype == q.dtype == torch.float32
    assert nodes > 1
    if q.stride(2) != 1 or q.stride(1) != size or q.stride(0) % size:
        q = q.contiguous()
    p, tokens = p.contiguous(), tokens.contiguous()
    draft = (nodes - 1, q.stride(0) // size, size)
    r = Rows(p.view(rows * nodes, size))
    drawn = Rows(r.values[:rows])  # for its size: one race a row
    chunks = power_of_two(-(-size // r.width))  # of a small vocabulary fewer: 64 would take the interpreter hours
    parts = r.new(3, chunks)
    accepted, scales = drawn.new(dtype=torch.int64), drawn.new()
    ok, low, high = drawn.new(dtype=torch.bool), drawn.new(dtype=torch.int32), drawn.new(dtype=torch.int32)
    exact = {"C": chunks, "enable_fp_fusion": False}
    common = exact | {"B": max(power_of_two(nodes), 16)} | r.overlap
    limits, block, seeds, base = (each.contiguous() for each in (limits, block, seeds, base))
    _sums_kernel[(chunks, r.count)](p, q, tokens, block, parts, *draft, W=r.width, num_warps=r.warps, **common)
    _verdict_kernel[(rows,)](
        p, q, tokens, limits, block, seeds, base, parts, accepted, ok.view(torch.int8), scales, low, high, *draft,
        TOLERANCE=_TOLERANCE, ACCEPT=ACCEPT, RESIDUAL=RESIDUAL, COUPLED=COUPLED, num_warps=4, **common,
    )  # fmt: skip
    _draw_kernel[(chunks, rows)](
        p, q, accepted, scales, low, high, drawn.scores, drawn.winners, *draft, W=r.width, num_warps=r.warps,
        **exact, **r.options,
    )  # fmt: skip
    return accepted, drawn.pick(chunks=chunks), ok
