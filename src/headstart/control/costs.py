"""What a round costs by its width, and a draft by its length, measured as it goes.

Knows: seconds of the last rounds and drafts. Does not know: who drafts, or whether it holds; how lines are read off
measurements (``maths.cost``).
"""

from __future__ import annotations

from collections import deque
from statistics import median

from ..maths.cost import Point, slope, start_and_step

__all__ = ["Costs", "DraftSeconds"]

LIFETIME = 200  # rounds after which a measurement is forgotten, so that one of a bad moment rules nothing out for good


class Costs:
    """Seconds a round takes without drafting, by (rows, width), measured as it goes: the median of the last few.

    The first of a width, but for plain rounds, is not counted: what is done for the first time takes longer (a GPU
    loads a recording when it is first played), and a width that looks dear is not tried again soon.
    """

    WINDOW = 7

    def __init__(self) -> None:
        self._seen: dict[int, dict[int, deque[tuple[int, float]]]] = {}
        self._tables: dict[int, list[Point]] = {}  # what ``table`` said since the last measurement
        self._slopes: dict[int, float] = {}  # and ``slope``
        self._met: set[tuple[int, int]] = set()
        self._clock = 0

    def add(self, rows: int, width: int, seconds: float) -> None:
        self._clock += 1
        if width > 1 and (rows, width) not in self._met:
            self._met.add((rows, width))
            return
        self._tables.clear()
        self._slopes.clear()
        by_width = self._seen.setdefault(rows, {})
        by_width.setdefault(width, deque(maxlen=self.WINDOW)).append((self._clock, seconds))
        for stale in [w for w, seen in by_width.items() if w > 1 and seen[-1][0] < self._clock - LIFETIME]:
            del by_width[stale]

    def table(self, rows: int) -> list[Point]:
        """(width, seconds, measurements), by width, for the measured number of rows nearest to ``rows``; empty if none.

        Only tables with a plain round (width 1) and something to compare it with are borrowed from another
        number of rows.
        """
        if rows not in self._tables:
            self._tables[rows] = self._table(rows)
        return self._tables[rows]

    def slope(self, rows: int) -> float:
        """Seconds that each token more takes."""
        if rows not in self._slopes:
            self._slopes[rows] = max(0.0, slope(self.table(rows)))
        return self._slopes[rows]

    def _table(self, rows: int) -> list[Point]:
        own = self._seen.get(rows, {})
        if 1 not in own or len(own) == 1:
            others = [r for r, known in self._seen.items() if 1 in known and len(known) > 1]
            if others:
                own = self._seen[min(others, key=lambda r: abs(r - rows))]
        if 1 not in own:
            return []
        # A round never takes longer than a wider one. What says otherwise was timed in a bad moment, and must not make
        # useless drafts look fast: while they are made, plain rounds are not timed again.
        table, least = [], float("inf")
        for width in sorted(own, reverse=True):
            least = min(least, median(seconds for _, seconds in own[width]))
            table.append((width, least, len(own[width])))
        return table[::-1]


class DraftSeconds:
    """What a draft takes: a start that every draft pays (reading what was committed since the last one) and a step for
    each of its tokens. A line through the medians of each length seen lately."""

    WINDOW = 40

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
        while self._seen and self._seen[0][2] < self._clock - LIFETIME:
            self._seen.popleft()
            self._line = None

    def __bool__(self) -> bool:
        return bool(self._seen)

    def line(self) -> tuple[float, float]:
        """Seconds of the start, and of each token."""
        if self._line is None:
            by_length: dict[int, list[float]] = {}
            for tokens, seconds, _ in self._seen:
                by_length.setdefault(tokens, []).append(seconds)
            # A single slow moment moves no median, and a rare length counts for little.
            self._line = start_and_step([(n, median(found), len(found)) for n, found in by_length.items()])
        return self._line
