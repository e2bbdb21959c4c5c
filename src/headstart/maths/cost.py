"""What a round of speculation costs and yields.

Knows: expected tokens per round, the speed-up and the best draft length, from measured numbers.
Does not know: how they were measured. Time is counted in plain target steps (one token, one row).

    alpha  acceptance rate, 1 - TV(p, q) on average; a_j: for drafted token j, given that all before it are kept
    tau    tokens a round emits: 1 + a_1 + a_1 a_2 + ...; with one alpha for all, (1 - alpha^(gamma+1)) / (1 - alpha)
    c      one draft step
    v(n)   one target forward over n tokens; v(1) = 1
    S      speed-up over plain decoding: tau(gamma) / (gamma c + v(gamma + 1) + overhead)
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

__all__ = ["Acceptance", "CostModel", "reach", "tau"]

Acceptance = float | Sequence[float]  # one alpha for all positions, or a_1, a_2, ... (the last one goes on for ever)


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


def tau(acceptance: Acceptance, gamma: int) -> float:
    """Expected tokens per round: the target's own one, and every drafted token that is reached."""
    if gamma < 0:
        raise ValueError(f"a draft length is not negative: {gamma}")
    return 1.0 + sum(reach(acceptance, gamma))


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
        widths = list(self.v)
        at = bisect_left(widths, width)
        if at < len(widths) and widths[at] == width:
            return self.v[width]
        if len(widths) == 1:
            return self.v[widths[0]]
        at = min(max(at, 1), len(widths) - 1)
        left, right = widths[at - 1], widths[at]
        slope = (self.v[right] - self.v[left]) / (right - left)
        return self.v[left] + slope * (width - left)

    def round_cost(self, gamma: int) -> float:
        """One whole round: gamma draft steps, one target forward over gamma + 1 tokens, the overhead."""
        return gamma * self.c + self.verify(gamma + 1) + self.overhead

    def speedup(self, gamma: int, acceptance: Acceptance) -> float:
        """S(gamma), over plain decoding at one token a step."""
        return tau(acceptance, gamma) / self.round_cost(gamma)

    def worth_one_more(self, gamma: int, acceptance: Acceptance) -> bool:
        """Does drafted token gamma + 1 earn more than the round does so far? Written without a division, as more
        width can be free."""
        gain = reach(acceptance, gamma + 1)[-1]
        price = self.c + self.verify(gamma + 2) - self.verify(gamma + 1)
        return gain > price * self.speedup(gamma, acceptance)

    def best_gamma(self, maximum: int, acceptance: Acceptance) -> int:
        """The draft length 0..maximum with the greatest speed-up; the shortest of equals.

        All are tried, because v need not be convex: GPU kernels step up in tiles, and the best can lie past a step.
        """
        return max(range(maximum + 1), key=lambda gamma: (self.speedup(gamma, acceptance), -gamma))
