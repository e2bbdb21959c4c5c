"""The last measurements of one kind of round.

Knows: seconds, and when they were measured (in rounds). Does not know: what a round of that kind is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import accumulate

__all__ = ["Cell", "TokenCost", "low"]


def low(seen: Sequence[float]) -> float:
    """The lower third of these."""
    return sorted(seen)[(len(seen) - 1) // 3]


class Cell:
    """The last measurements of one kind of round. Other work on the machine only ever slows a round down, so the value
    is a low one of them, but not the lowest where there are many: only where that is far below, so that most of them
    seem to be disturbed."""

    WINDOW, FAR = 9, 1.35

    def __init__(self) -> None:
        self.seen: deque[float] = deque(maxlen=self.WINDOW)
        self.value = 0.0
        self.last = 0  # when it was last measured
        self._when: deque[int] = deque(maxlen=self.WINDOW)  # the same of all that count

    def add(self, seconds: float, clock: int) -> None:
        self.seen.append(seconds)
        self._when.append(clock)
        self.value, self.last = self._low(), clock

    def before(self, last: int) -> int:
        """When it was measured before the last so many times, as far as is known."""
        return self._when[-1 - last] if len(self._when) > last else self.last

    def since(self, clock: int) -> bool:
        """Is all of it newer than that?"""
        return bool(self._when) and self._when[0] > clock

    def newer(self, other: Cell) -> bool:
        """Is all that it rests on newer than what the other one rests on, and more than a moment's?"""
        return len(self._when) == self.WINDOW and self._when[0] > other.last

    def _low(self) -> float:
        found, lowest = low(self.seen), min(self.seen)
        return lowest if lowest * self.FAR < found else found

    def doubt(self) -> None:
        """Little is left of it: of measurements in a bad moment the lowest one is the best."""
        if len(self.seen) > 2:
            self.value = min(self.seen)
            self.seen = deque([self.value] * 2, maxlen=self.WINDOW)
            self._when = deque([self.last] * 2, maxlen=self.WINDOW)

    def scale(self, last: int, by: float) -> None:
        """The last so many measurements turn out to be others."""
        old = len(self.seen) - min(last, len(self.seen))
        self.seen = deque([s * by if i >= old else s for i, s in enumerate(self.seen)], maxlen=self.WINDOW)
        self.value = self._low()


class TokenCost:
    """What a token more takes in rounds whose rows differ in width.

    There are many widths, each is seen seldom, and what is chosen is what looks cheapest of many noisy measurements: so
    it takes longer than it looks. All widths together say what a token takes.
    """

    WINDOW, FEW = 32, 9  # rounds: the last ones that count, and too few to tell

    def __init__(self) -> None:
        self._seen: deque[tuple[int, float]] = deque(maxlen=self.WINDOW)  # tokens more than in a plain round, seconds
        self._when: deque[int] = deque(maxlen=self.WINDOW)

    def add(self, more: int, seconds: float, clock: int) -> None:
        self._seen.append((more, seconds))
        self._when.append(clock)

    def since(self, clock: int) -> int:
        """How many are newer than that."""
        return sum(when > clock for when in self._when)

    def forget(self, before: int) -> None:
        """It may have been a bad moment, and while that rules drafts out few rounds say otherwise."""
        while self._when and self._when[0] < before:
            self._when.popleft()
            self._seen.popleft()

    def __bool__(self) -> bool:
        return len(self._seen) >= self.FEW

    def over(self, plain: float) -> float:
        """Over plain rounds of so many seconds: the middle one, by tokens."""
        each = sorted(((seconds - plain) / more, more) for more, seconds in self._seen)
        half = sum(more for more, _ in self._seen) / 2
        reached = accumulate(more for _, more in each)
        return max(0.0, next(cost for (cost, _), tokens in zip(each, reached, strict=True) if tokens >= half))

    def scale(self, last: int, by: float) -> None:
        """The last so many measurements turn out to be others."""
        old = len(self._seen) - min(last, len(self._seen))
        self._seen = deque(((n, s * by if i >= old else s) for i, (n, s) in enumerate(self._seen)), maxlen=self.WINDOW)
