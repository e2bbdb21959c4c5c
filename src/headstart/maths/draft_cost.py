"""What a draft takes, by its length, from the last few that were timed; and what one more token of anything takes.

Knows: a start that every draft pays (reading what was committed since the last one) and a step for each of its tokens.
Does not know: who drafts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import combinations
from statistics import median

__all__ = ["DraftSeconds", "slope"]


def slope(points: Sequence[tuple[int, float, int]]) -> float:
    """Seconds for each token more, from (tokens, seconds, how often it was timed); 0 if there is only one.

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


class DraftSeconds:
    """A line through the medians of each length seen lately.

    What was timed is forgotten after a while: a draft that looked too dear, because it was timed in a bad moment, is
    not made again and would look so for ever.
    """

    WINDOW, LIFETIME = 40, 200

    def __init__(self) -> None:
        self._seen: deque[tuple[int, float, int]] = deque(maxlen=self.WINDOW)  # tokens, seconds, when
        self._line: tuple[float, float] | None = None
        self._clock = 0

    def add(self, tokens: int, seconds: float) -> None:
        self._seen.append((tokens, seconds, self._clock))
        self._line = None

    def tick(self) -> None:
        """A round went by."""
        self._clock += 1
        while self._seen and self._seen[0][2] < self._clock - self.LIFETIME:
            self._seen.popleft()
            self._line = None

    def __bool__(self) -> bool:
        return bool(self._seen)

    def line(self) -> tuple[float, float]:
        """Seconds of the start, and of each token; zeros while nothing was timed, and no start while all drafts
        timed were of one length."""
        if self._line is None:
            self._line = self._fit()
        return self._line

    def _fit(self) -> tuple[float, float]:
        by_length: dict[int, list[float]] = {}
        for tokens, seconds, _ in self._seen:
            by_length.setdefault(tokens, []).append(seconds)
        # (length, median, weight): a single slow moment moves no median, and a rare length counts for little.
        points = [(n, median(found), len(found)) for n, found in by_length.items()]
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
