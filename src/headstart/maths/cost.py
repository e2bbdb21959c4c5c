"""What a round of speculation costs and yields: the one cost model, for controller, distillation and benchmarks.

Knows: expected tokens of a round, the speed-up, the best draft length and the break-even of one token more, from
measured numbers; and how to read lines off measurements. Does not know: how they were measured.

    alpha  acceptance rate, 1 - TV(p, q) on average; a_j: for drafted token j, given that all before it are kept
    A_i    a_1 a_2 .. a_i: the probability that drafted token i is kept
    tau    tokens a round emits: 1 + A_1 + A_2 + ...; with one alpha for all, (1 - alpha^(gamma+1)) / (1 - alpha)
    c      one draft step
    v(n)   one target forward over n tokens; v(1) = 1
    S      speed-up over plain decoding: tau(gamma) / (gamma c + v(gamma + 1) + overhead)

``CostModel`` counts time in plain target steps (one token, one row); the functions take any unit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, combinations, pairwise, zip_longest
from operator import mul

__all__ = [
    "Acceptance",
    "CostModel",
    "Forecast",
    "best_length",
    "break_even",
    "by_width",
    "conditional",
    "reach",
    "round_tokens",
    "rounds_won",
    "slope",
    "slowest_rows",
    "slowest_tokens",
    "start_and_step",
    "tau",
    "with_draft",
]

Acceptance = float | Sequence[float]  # one alpha for all positions, or a_1, a_2, ... (the last one goes on for ever)
Point = tuple[int, float, int]  # tokens, what they took, how often that was timed


def reach(acceptance: Acceptance, gamma: int) -> list[float]:
    """A_1 .. A_gamma: the probability that drafted token i is kept, together with all before it."""
    if isinstance(acceptance, (int, float)):
        each = [float(acceptance)] * gamma
    else:
        known = list(acceptance[:gamma])
        each = known + [known[-1] if known else 0.0] * (gamma - len(known))
    if any(not 0 <= a <= 1 for a in each):
        raise ValueError(f"acceptance rates lie in [0, 1]: {each}")
    return list(accumulate(each, mul))


def conditional(reached: Sequence[float]) -> list[float]:
    """a_1, a_2 .. from A_1, A_2 ..: what ``reach`` was made of."""
    pairs = pairwise([1.0, *reached])
    return [min(1.0, after / before) if before > 0 else 0.0 for before, after in pairs]


def round_tokens(rows: Sequence[Sequence[float]]) -> list[float]:
    """Expected tokens of a round, by its draft length 0, 1, ... up to the longest row's: the target's own one for each
    row, and every drafted token that is reached. ``rows``: A_1, A_2, ... of each, as far as it can be drafted for."""
    gains = map(sum, zip_longest(*rows, fillvalue=0.0))
    return list(accumulate(gains, initial=float(len(rows))))


def with_draft(
    forwards: Sequence[float], start: float, step: float, lengths: Sequence[int] | None = None
) -> list[float]:
    """Seconds of rounds by their draft length, drafting included: any draft takes ``start``, each token ``step``.
    ``lengths``: others than 0, 1, 2 and so on."""
    gammas = lengths if lengths is not None else range(len(forwards))
    return [seconds + (start + gamma * step) * (gamma > 0) for gamma, seconds in zip(gammas, forwards, strict=True)]


def slowest_rows(rows: Sequence[Sequence[float]], share: float) -> list[int]:
    """Those whose first guesses hold least often, this share of all."""
    return sorted(range(len(rows)), key=lambda row: rows[row][0] if rows[row] else 0.0)[
        : max(1, round(share * len(rows)))
    ]


def slowest_tokens(rows: Sequence[Sequence[float]], share: float) -> list[float]:
    """Expected tokens of a round for each of those rows whose first guesses hold least often, this share of all; by
    draft length, as ``round_tokens``."""
    slowest = [rows[row] for row in slowest_rows(rows, share)]
    longest = max(map(len, rows), default=0)
    found = [tokens / len(slowest) for tokens in round_tokens(slowest)]
    return found + found[-1:] * (longest + 1 - len(found))


def tau(acceptance: Acceptance, gamma: int) -> float:
    """Expected tokens per round of one row."""
    if gamma < 0:
        raise ValueError(f"a draft length is not negative: {gamma}")
    return round_tokens([reach(acceptance, gamma)])[-1]


def best_length(speeds: Sequence[float], worth: float = 1.0) -> int:
    """The draft length whose round is fastest: speeds[gamma], in tokens for any unit of time; the shortest of equals.

    All are looked at, because v need not be convex: GPU kernels step up in tiles, and the best can lie past a step.
    ``worth``: a draft must promise this many times the speed of plain decoding, speeds[0].
    """
    best, least = 0, speeds[0] * worth
    for gamma, speed in enumerate(speeds):
        if gamma and speed > least:
            best, least = gamma, speed
    return best


def rounds_won(times: Sequence[float], alpha: float, left: float) -> float:
    """Plain rounds that drafts of this acceptance win in so many tokens of each row, at the best length. ``times``: of
    rounds, by draft length."""
    tokens = round_tokens([reach(alpha, len(times) - 1)])
    speedup = max(each / time for each, time in zip(tokens, times, strict=True)) * times[0]
    return (1 - 1 / speedup) * left


def break_even(price: float, speed: float) -> float:
    """The least acceptance probability, summed over rows, at which one more drafted token pays for itself: what rounds
    of this speed emit in the time it takes."""
    return price * speed


def by_width(points: Sequence[Point], widest: int) -> list[float]:
    """Times of forwards of 1 .. ``widest`` tokens, from points in order, the first of width 1: linear between measured
    widths and flat beyond them, so that an unknown width gets tried."""
    found = [points[0][1]]
    for (below, low, _), (above, high, _) in pairwise(points):
        step = (high - low) / (above - below)
        found += [low + step * (width - below) for width in range(below + 1, above)] + [high]
    return found[:widest] + [points[-1][1]] * (widest - len(found))


def slope(points: Sequence[Point]) -> float:
    """Seconds for each token more; 0 if there is only one point.

    The middle one of what any two points say, each pair with both points' weight: a length that was timed once, in a
    bad moment, does not tilt it, however far out it lies.
    """
    found = sorted(
        ((high - low) / (more - less), weight * other)
        for (less, low, weight), (more, high, other) in combinations(sorted(points), 2)
    )
    half = sum(weight for _, weight in found) / 2
    for value, weight in found:
        half -= weight
        if half <= 0:
            return value
    return 0.0


def start_and_step(points: Sequence[Point]) -> tuple[float, float]:
    """Of drafts by their length: seconds that any draft takes, and more for each of its tokens. Zeros while nothing was
    timed, and no start while all drafts timed were of one length."""
    total = sum(weight for _, _, weight in points)
    if not total:
        return 0.0, 0.0
    length = sum(n * weight for n, _, weight in points) / total
    seconds = sum(time * weight for _, time, weight in points) / total
    spread = sum(weight * (n - length) ** 2 for n, _, weight in points)
    if not spread:
        return 0.0, seconds / length
    step = sum(weight * (n - length) * (time - seconds) for n, time, weight in points) / spread
    step = min(max(step, 0.0), seconds / length)  # neither part is below zero
    return seconds - step * length, step


@dataclass(frozen=True)
class CostModel:
    """Measured costs, in plain target steps. ``v`` maps widths (tokens in one forward) to measured times."""

    c: float
    v: Mapping[int, float] = field(default_factory=dict)
    overhead: float = 0.0

    def __post_init__(self) -> None:
        if any(width < 1 for width in self.v):
            raise ValueError(f"a forward holds at least one token: {sorted(self.v)}")
        object.__setattr__(self, "v", dict(sorted({1: 1.0, **self.v}.items())))

    def verify(self, width: int) -> float:
        """v(width): linear between measured widths; past the last one the last slope goes on."""
        points = [(measured, time, 1) for measured, time in self.v.items()]
        last, time, _ = points[-1]
        if width > last:
            return time + slope(points[-2:]) * (width - last)
        return by_width(points, width)[-1]

    def speedup(self, gamma: int, acceptance: Acceptance) -> float:
        """S(gamma), over plain decoding at one token a step."""
        return tau(acceptance, gamma) / (gamma * self.c + self.verify(gamma + 1) + self.overhead)

    def best_speedup(self, maximum: int, acceptance: Acceptance) -> float:
        """S at the best draft length 0..maximum."""
        return max(self.speedup(gamma, acceptance) for gamma in range(maximum + 1))


@dataclass(frozen=True)
class Forecast:
    """What was measured of a pair before it serves anybody: where a controller begins."""

    cost: CostModel
    greedy: float  # acceptance rate of greedy requests
    drawn: float  # and of all others
