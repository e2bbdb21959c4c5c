"""From logits to the distribution a token is drawn from, in a few small launches and without a sort.

Knows: what ``maths.distribution`` says about temperature, min-p, top-k and top-p; the results are its own, to
rounding. Does not know: who asks, penalties, masks.

A vocabulary is cut into at most 64 chunks, one program each. min-p, top-k and top-p all keep the tokens whose
probability is not under some floor, so the floor is all there is to find. A probability is not negative, so its bits
order as it does, and the floor is the largest number b for which the tokens with bits >= b weigh (or count) enough:
each round tries 32 numbers at once between the last round's two, and six rounds tell all 2^30 apart. Every round is a
launch of its own, because with programmatic dependent launch that costs no more than a barrier, and needs no state.
Sums are added in the same order whatever the other rows are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from .blocks import wait
from .race import CHUNKS, Rows, argmax, best, noise_at, race

__all__ = ["argmax", "nucleus", "race"]

_TRIES = 32  # numbers tried in a round
_ROUNDS = 6  # 32^6 = 2^30 > the bits of 1.0


@triton.jit
def _exp(x, LIB: tl.constexpr):
    return libdevice.exp(x) if LIB else tl.exp(x)


@triton.jit
def _weight(x, top, temperature, HEAT: tl.constexpr, COLD: tl.constexpr, LIB: tl.constexpr):
    """e^((x - top) / heat), rounded as ``maths.distribution`` rounds it."""
    if COLD:
        y = tl.div_rn(x - top, temperature)
    elif HEAT:
        y = tl.div_rn(x, temperature) - tl.div_rn(top, temperature)
    else:
        y = x - top
    return _exp(y, LIB)


@triton.jit
def _knob(knob, m, nodes, USED: tl.constexpr):
    return tl.load(knob + m // nodes).to(tl.float32) if USED else 1.0


@triton.jit(do_not_specialize=["nodes"])
def _stats_kernel(
    logits, temperature, peaks, sums, nodes, V, B: tl.constexpr, C: tl.constexpr, HEAT: tl.constexpr,
    COLD: tl.constexpr, LIB: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Each chunk's largest logit, and the sum of its weights against that one."""
    chunk, m = tl.program_id(0), tl.program_id(1)
    v = chunk * B + tl.arange(0, B)
    wait(PDL)
    x = tl.load(logits + m.to(tl.int64) * V + v, mask=v < V, other=float("-inf"))
    peak = tl.max(tl.where(x == x, x, float("inf")), axis=0)  # NaN counts as the largest, as in maths.argmax
    tl.store(peaks + m * C + chunk, peak)
    safe = tl.where(peak == float("-inf"), 0.0, peak)
    weight = _weight(x, safe, _knob(temperature, m, nodes, HEAT), HEAT, COLD, LIB)
    tl.store(sums + m * C + chunk, tl.sum(weight, axis=0))


@triton.jit
def _scale(peaks, sums, m, temperature, C: tl.constexpr, HEAT: tl.constexpr, COLD: tl.constexpr, LIB: tl.constexpr):
    """The row's largest logit, and the sum of all its weights: NaN or 0 if the row is broken."""
    c = tl.arange(0, C)
    peak = tl.load(peaks + m * C + c, cache_modifier=".cg")
    part = tl.load(sums + m * C + c, cache_modifier=".cg")
    top = tl.max(peak, axis=0)
    safe = tl.where(top == float("-inf"), 0.0, top)
    return top, tl.sum(part * _weight(peak, safe, temperature, HEAT, COLD, LIB), axis=0)


@triton.jit
def _bits(p):
    return p.to(tl.int32, bitcast=True)


@triton.jit
def _narrow(state, mass, count, m, most, C: tl.constexpr, J: tl.constexpr, BY_COUNT: tl.constexpr):
    """What the last round found: the new lowest and past-the-highest floor, mass and count from the lowest up, goal.

    state [M, 4]: lowest, past-the-highest, step, and the bits of the mass that must be reached; if that is negative,
    it is a share of the mass at the number tried first. most: the count that must be reached, if BY_COUNT.
    """
    low = tl.load(state + m * 4, cache_modifier=".cg")
    high = tl.load(state + m * 4 + 1, cache_modifier=".cg")
    step = tl.load(state + m * 4 + 2, cache_modifier=".cg")
    goal = tl.load(state + m * 4 + 3, cache_modifier=".cg").to(tl.float32, bitcast=True)
    j = tl.arange(0, J)
    at = (m * C + tl.arange(0, C))[:, None] * J + j[None, :]
    masses = tl.sum(tl.load(mass + at, cache_modifier=".cg"), axis=0)
    if BY_COUNT:
        counts = tl.sum(tl.load(count + at, cache_modifier=".cg"), axis=0)
        enough = counts >= most
    else:
        counts = tl.zeros([J], tl.int32)
        goal = tl.where(goal < 0.0, -goal * tl.sum(tl.where(j == 0, masses, 0.0), axis=0), goal)
        enough = masses >= goal
    # The lowest is known to be enough, so that is what remains if rounding says none is.
    best = tl.max(tl.where(enough & (j < tl.cdiv(high - low, step)), j, 0), axis=0)
    mine = j == best
    low += best * step
    held, counted = tl.sum(tl.where(mine, masses, 0.0), axis=0), tl.sum(tl.where(mine, counts, 0), axis=0)
    return low, tl.minimum(high, low + step), held, counted, goal


@triton.jit
def _begin(p_top, first, share, V, BY_COUNT: tl.constexpr, TOP_P: tl.constexpr):
    """Before the first round: lowest and past-the-highest floor, if all from ``first`` up may stay."""
    low, high = first, tl.maximum(_bits(p_top), first) + 1
    if not BY_COUNT:
        if TOP_P:
            # V tokens under this together weigh less than what the nucleus leaves out, so its floor is not lower.
            safe = tl.maximum(_bits(0.5 * (1.0 - share) * p_top / V), first)
            low = tl.where(share < 1.0, tl.minimum(safe, high - 1), first)
            high = tl.where(share < 1.0, high, low + 1)
        else:
            high = low + 1
    return low, high


@triton.jit
def _weigh(row, tries, start, V, B: tl.constexpr, L: tl.constexpr, J: tl.constexpr, BY_COUNT: tl.constexpr):
    """Mass and count [J] of the chunk's tokens from each of the numbers up."""
    acc = tl.zeros([J, L], tl.float32)
    num = tl.zeros([J, L], tl.int32)
    for s in range(0, B, L):
        v = start + s + tl.arange(0, L)
        p = tl.load(row + v, mask=v < V, other=-1.0, cache_modifier=".cg")
        keep = _bits(p)[None, :] >= tries[:, None]
        acc += tl.where(keep, p[None, :], 0.0)
        if BY_COUNT:
            num += keep.to(tl.int32)
    return tl.sum(acc, axis=1), tl.sum(num, axis=1)


@triton.jit(do_not_specialize=["nodes"])
def _search_kernel(
    logits, temperature, peaks, sums, min_p, top_k, top_p, old_state, old_mass, old_count, state, mass, count, out,
    nodes, V, B: tl.constexpr, L: tl.constexpr, C: tl.constexpr, J: tl.constexpr, HEAT: tl.constexpr,
    COLD: tl.constexpr, LIB: tl.constexpr, MIN_P: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr,
    FIRST: tl.constexpr, BY_COUNT: tl.constexpr, MAKE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One round of the search by count (top-k) or by mass (top-p, after top-k's), over the probabilities in ``out``.

    FIRST: the search begins. MAKE: nobody has written the probabilities yet.
    """
    chunk, m = tl.program_id(0), tl.program_id(1)
    row = out + m.to(tl.int64) * V
    v = chunk * B + tl.arange(0, B)
    wait(PDL)
    if MAKE:
        x = tl.load(logits + m.to(tl.int64) * V + v, mask=v < V, other=float("-inf"))
    else:
        p = tl.load(row + v, mask=v < V, other=0.0, cache_modifier=".cg")
    row_temperature = _knob(temperature, m, nodes, HEAT)
    top, total = _scale(peaks, sums, m, row_temperature, C, HEAT, COLD, LIB)
    most = tl.minimum(tl.load(top_k + m // nodes), V).to(tl.int32) if TOP_K else 0
    if FIRST:
        p_top = tl.div_rn(1.0, total)
        share = _knob(top_p, m, nodes, TOP_P)
        goal = -share
        first = _bits(p_top * tl.load(min_p + m // nodes).to(tl.float32)) if MIN_P else 0
        if TOP_K and not BY_COUNT:
            first, _, held, counted, _ = _narrow(old_state, old_mass, old_count, m, most, C, J, True)
            # Of those that tie for the last place only so many count as fill it.
            tie = first.to(tl.float32, bitcast=True)
            goal = share * (held - tl.maximum(counted - most, 0).to(tl.float32) * tie)
        low, high = _begin(p_top, first, share, V, BY_COUNT, TOP_P)
    else:
        low, high, _, _, goal = _narrow(old_state, old_mass, old_count, m, most, C, J, BY_COUNT)
        first = low
    step = tl.maximum((high - low + J - 1) // J, 1)
    if chunk == 0:
        tl.store(state + m * 4, low)
        tl.store(state + m * 4 + 1, high)
        tl.store(state + m * 4 + 2, step)
        tl.store(state + m * 4 + 3, goal.to(tl.int32, bitcast=True))
    j = tl.arange(0, J)
    tries = tl.where(j == 0, first, low + j * step)
    if MAKE:
        p = tl.div_rn(_weight(x, top, row_temperature, HEAT, COLD, LIB), total)
        tl.store(row + v, p, mask=v < V)
        tl.debug_barrier()  # other threads of this program read it
    b = tl.where(v < V, _bits(p), -1)
    at = (m * C + chunk) * J + j
    if tl.sum(((b >= first) & (b < high)).to(tl.int32), axis=0) > 0:
        masses, counts = _weigh(row, tries, chunk * B, V, B, L, J, BY_COUNT)
        tl.store(mass + at, masses)
        if BY_COUNT:
            tl.store(count + at, counts)
    else:  # all stay or none: no number tried makes a difference here
        above = b >= high
        tl.store(mass + at, tl.zeros([J], tl.float32) + tl.sum(tl.where(above, p, 0.0), axis=0))
        if BY_COUNT:
            tl.store(count + at, tl.zeros([J], tl.int32) + tl.sum(above.to(tl.int32), axis=0))


@triton.jit(do_not_specialize=["nodes", "apart"])
def _write_kernel(
    logits, temperature, peaks, sums, top_k, state, mass, count, out, into, low_key, high_key, scores, winners, nodes,
    apart, V, B: tl.constexpr, C: tl.constexpr, J: tl.constexpr, HEAT: tl.constexpr, COLD: tl.constexpr,
    LIB: tl.constexpr, CUT: tl.constexpr, BY_COUNT: tl.constexpr, RACE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The probabilities, to every ``apart``-th row. CUT: there was a search, whose last round was BY_COUNT or not."""
    chunk, m = tl.program_id(0), tl.program_id(1)
    v = chunk * B + tl.arange(0, B)
    wait(PDL)
    row_temperature = _knob(temperature, m, nodes, HEAT)
    top, total = _scale(peaks, sums, m, row_temperature, C, HEAT, COLD, LIB)
    if CUT:
        p = tl.load(out + m.to(tl.int64) * V + v, mask=v < V, other=0.0, cache_modifier=".cg")
        most = tl.minimum(tl.load(top_k + m // nodes), V).to(tl.int32) if BY_COUNT else 0
        floor, _, held, _, _ = _narrow(state, mass, count, m, most, C, J, BY_COUNT)
        p = tl.where(_bits(p) >= floor, tl.div_rn(p, held), 0.0)
    else:
        x = tl.load(logits + m.to(tl.int64) * V + v, mask=v < V, other=float("-inf"))
        p = tl.div_rn(_weight(x, top, row_temperature, HEAT, COLD, LIB), total)
    p = tl.where((total > 0.0) & (total < float("inf")), p, float("nan"))  # a broken row is broken everywhere
    tl.store(into + m.to(tl.int64) * apart * V + v, p, mask=v < V)
    if RACE:
        noise = noise_at(v, tl.load(low_key + m), tl.load(high_key + m), LIB)
        best(tl.div_rn(p, noise), v, V, scores, winners, m * C + chunk)


# -- how they are called ----------------------------------------------------------------------------------------------


def nucleus(
    logits: Tensor,
    keys: tuple[Tensor, Tensor] | None = None,
    *,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    cold: bool = False,
    into: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The distribution each node's token is drawn from: logits float32 [R, N, V] or [R, V] -> the same shape. With
    ``keys`` (two int32 of that shape without V) also a token of each, by ``race``.

    temperature, top_p, min_p float32 [R] and top_k int [R] (huge: not used): None where no row uses it. cold: some
    temperature is close to 0. A broken row is NaN. ``into`` float32 [R, V], rows a multiple of V apart: where the
    distributions of logits [R, V] go.
    """
    r = Rows(logits)
    assert into is None or (into.shape == logits.shape and into.stride(-1) == 1 and into.stride(0) % r.size == 0)
    peaks, sums = r.new(CHUNKS), r.new(CHUNKS)
    options = {"HEAT": temperature is not None, "COLD": cold and temperature is not None, "B": r.width, "C": CHUNKS}
    common = options | {"num_warps": r.warps} | r.options

    def knob(value: Tensor | None) -> Tensor:
        return logits if value is None else value

    _stats_kernel[r.grid](logits, knob(temperature), peaks, sums, r.nodes, r.size, **common)
    # Two sets of what a round leaves: it reads one and writes the other.
    sets = [
        (r.new(4, dtype=torch.int32), r.new(CHUNKS, _TRIES), r.new(CHUNKS, _TRIES, dtype=torch.int32)) for _ in range(2)
    ]
    rounds = [(True, i == 0) for i in range(_ROUNDS if top_k is not None else 0)]
    rounds += [(False, i == 0) for i in range(_ROUNDS if top_p is not None else 0)]
    if not rounds and min_p is not None:
        rounds = [(False, True)]
    out = torch.empty_like(logits)
    for i, (by_count, first) in enumerate(rounds):
        sets.reverse()
        _search_kernel[r.grid](
            logits, knob(temperature), peaks, sums, knob(min_p), knob(top_k), knob(top_p), *sets[1], *sets[0], out,
            r.nodes, r.size, L=min(r.width, 64), J=_TRIES, MIN_P=min_p is not None, TOP_K=top_k is not None,
            TOP_P=top_p is not None, FIRST=first, BY_COUNT=by_count, MAKE=i == 0, **common,
        )  # fmt: skip
    low, high = (logits, logits) if keys is None else (key.contiguous() for key in keys)
    place, apart = (out, 1) if into is None else (into, into.stride(0) // r.size)
    _write_kernel[r.grid](
        logits, knob(temperature), peaks, sums, knob(top_k), *sets[0], out, place, low, high, r.scores, r.winners,
        r.nodes, apart, r.size, J=_TRIES, CUT=bool(rounds), BY_COUNT=bool(rounds) and rounds[-1][0],
        RACE=keys is not None, **common,
    )  # fmt: skip
    return place, None if keys is None else r.pick()
