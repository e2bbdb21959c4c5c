"""What a round costs by its width, measured as it goes.

Knows: seconds of rounds, by rows and width. Does not know: what is drafted, or whether it holds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from ..maths.draft_cost import slope

__all__ = ["Costs", "by_width"]


class Costs:
    """Seconds a round takes without drafting, by (rows, width), measured as it goes: the median of the last few.

    A measurement is forgotten after a while, so that one taken in a bad moment does not rule a width out for good. The
    first of a width, but for plain rounds, is not counted: what is done for the first time takes longer (a GPU loads
    a recording when it is first played), and a width that looks dear is not tried again soon.
    """

    WINDOW, LIFETIME = 7, 200

    def __init__(self) -> None:
        self._seen: dict[int, dict[int, deque[tuple[int, float]]]] = {}
        self._tables: dict[int, list[tuple[int, float, int]]] = {}  # what ``table`` said since the last measurement
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
        for stale in [w for w, seen in by_width.items() if w > 1 and seen[-1][0] < self._clock - self.LIFETIME]:
            del by_width[stale]

    def table(self, rows: int) -> list[tuple[int, float, int]]:
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

    def _table(self, rows: int) -> list[tuple[int, float, int]]:
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


def by_width(table: Sequence[tuple[int, float, int]], widest: int) -> list[float]:
    """Seconds of widths 1 .. ``widest``: linear between measured ones, flat beyond them, so that an unknown width gets
    tried. The first width measured is 1."""
    found = [table[0][1]]
    for (below, low, _), (above, high, _) in pairwise(table):
        step = (high - low) / (above - below)
        found += [low + step * (width - below) for width in range(below + 1, above + 1)]
    return found[:widest] + [table[-1][1]] * (widest - len(found))
