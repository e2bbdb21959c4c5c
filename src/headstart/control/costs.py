"""What a round costs by its rows and width: measured as it goes.

Knows: seconds of the last rounds. Does not know: who drafts, what that takes (``draft_costs``), or whether it holds;
how lines are read off measurements (``maths.cost``).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from math import inf, log
from statistics import median
from typing import NamedTuple

from ..maths.cost import CostModel, Point, by_width, slope
from ..types import Round
from .measurements import Cell, TokenCost

__all__ = ["LIFETIME", "Beliefs", "Costs", "like", "nearest"]

LIFETIME = 200  # rounds after which a measurement counts for little, so that a bad moment rules nothing out for good


def nearest(known: Iterable[int], rows: int) -> int | None:
    """Of these numbers of rows the one most like it."""
    return min(known, key=lambda other: abs(other - rows), default=None)


class Beliefs(NamedTuple):
    """What is thought to be known of costs, for those who watch."""

    rows: int = 0  # it holds for so many; 0: nothing is measured
    forwards: Sequence[float] = ()  # seconds of a round without drafting, of width 1, 2 ... tokens a row; or empty
    draft: float = 0.0  # seconds that any draft takes
    step: float = 0.0  # and more for each of its tokens


class Costs:
    """Seconds a round takes without drafting, by rows and width.

    Measurements are kept relative to how fast the machine is at the time (``level``). What slows everything down, other
    work or a growing context, is seen on whatever is measured now and then holds for what was measured before. A width
    counts when it was seen twice: what is done for the first time takes longer (a GPU loads a graph when it is first
    replayed). A round that begins or ends drafting is not counted where its width is known: what it takes more is
    the price of the change (``switch``).
    """

    UNSEEN = 0.93  # what a width that was never measured may cost of what its neighbours say: so it is tried
    FURTHEST = 4.0  # times faster or slower that the machine may seem to be at once
    FOLLOWED = 7  # rounds: the machine's speed changed where two thirds of them are off by more than ``LARGE``,
    LARGE = 0.25
    STEADY = 0.08  # or two thirds of twice as many by more than this
    MANY = 32  # tokens of prompts that must be read at once to tell what one more takes
    DEAREST = 0.7  # plain rounds that a token more a row is supposed to take at most: a first reading can be very slow
    FAR = 1e6  # times faster or slower than at the start: then the level is taken into the measurements
    AT_LEAST = 0.5  # of what a token more is thought to cost, that each width costs more;
    ALONE = 0.9  # where it was measured a few times only
    FORGOTTEN = 2 * LIFETIME  # rounds after which a measurement counts for nothing
    TRUSTED = 4  # measurements of a width, with which it is believed that it costs far more than supposed

    def __init__(self, measured: CostModel | None = None, *, ragged: bool = False) -> None:
        """``measured``: the target's forwards by their width, if anybody knows. ``ragged``: rows of a forward may
        differ in width. Then a width here is one and all drafted tokens of the round; else those of the widest row."""
        self._measured, self.ragged = measured, ragged
        self._wider: dict[int, float] = {}  # by rows: what a token more a row costs by it, in plain rounds
        self._cells: dict[int, dict[int, Cell]] = {}
        self._tokens: dict[int, TokenCost] = {}  # by rows; ragged only
        self._ratios: deque[tuple[float, int]] = deque(maxlen=2 * self.FOLLOWED)  # to what was expected, and the width
        self._switches: deque[float] = deque([0.0], maxlen=7)
        self._tables: dict[int, list[Point]] = {}  # what ``table`` said since the last measurement
        self._read: tuple[int, float] | None = None  # tokens and seconds of the forward that read prompts fastest
        self._misjudged = 0, 1.0  # the last so many rounds were measured at another speed of the machine than believed
        self._unsure: set[int] = set()  # rows whose wide rounds became dearer, while no plain one said so
        self._clock = 0
        self._drafted = False
        self.level = 1.0

    def width(self, first: Round) -> int:
        """As it is counted here, of a round by one of its records."""
        if not self.ragged:
            return first.width
        return 1 + (first.tokens or first.rows * first.width) - first.rows

    def add(self, rows: int, width: int, seconds: float) -> None:
        width = _nearly(width) if self.ragged else width
        self._clock += 1
        self._tables.clear()
        changed, self._drafted = self._drafted != (width > 1), width > 1
        if changed and width == 1 and not self.timed(rows):
            return  # drafting has just ended: the next one is what others are compared with
        cells = self._cells.setdefault(like(rows), {})
        if width in cells and width == 1 and like(rows) in self._unsure:
            self._only_wide(seconds / self.level / cells[1].value, like(rows))
        cell = cells.setdefault(width, Cell())
        if len(cell.seen) >= 3:
            if changed and not self.ragged:  # where rows differ in width, nothing is captured or launched ahead
                # Over a usual round of this width, and less than that counts, too: what only ever adds up would be
                # noise, and on a noisy machine each guess that comes alone would seem to cost a round.
                usual = median(cell.seen)
                self._switches.append(min(max(seconds / self.level - usual, -usual), usual))
                if seconds > cell.value * self.level:
                    cell.last = self._clock
                    return
            self._follow(seconds / self.level / median(cell.seen), like(rows), width)
        cell.add(max(seconds, 1e-9) / self.level, self._clock)
        if self.ragged and width > 1:
            self._tokens.setdefault(like(rows), TokenCost()).add(width - 1, seconds / self.level, self._clock)
        self._doubt_old(like(rows))

    def _doubt_old(self, rows: int) -> None:
        """What is old counts for little, then for nothing: nothing else ends a bad moment that rules drafts out."""
        cells, since = self._cells[rows], self._clock - LIFETIME
        for width in [width for width, cell in cells.items() if width > 1 and cell.last < since]:
            cells[width].doubt()
            if cells[width].last < self._clock - self.FORGOTTEN:
                del cells[width]
        if rows in self._tokens:
            self._tokens[rows].forget(since)

    def _follow(self, ratio: float, rows: int, width: int) -> None:
        """Most of the last rounds took longer than they used to, or less long: so does everything now. On a noisy
        machine some always do, and what is not measured meanwhile would drift away: so a small change is looked at for
        longer than a large one."""
        self._ratios.append((ratio, width))
        for last, change in ((self.FOLLOWED, self.LARGE), (2 * self.FOLLOWED, self.STEADY)):
            if len(self._ratios) < last:
                return
            recent = list(self._ratios)[-last:]
            ordered = sorted(ratio for ratio, _ in recent)
            if ordered[last // 3] > 1 + change or ordered[-1 - last // 3] < 1 / (1 + change):
                middle = min(max(median(ordered), 1 / self.FURTHEST), self.FURTHEST)
                self.level *= middle
                if middle > 1 and not any(w == 1 and ratio > 1 + change for ratio, w in recent):
                    self._unsure.add(rows)
                self._take_over(rows, width, middle, recent)
                self._ratios.clear()
                return

    def _take_over(self, rows: int, width: int, change: float, recent: Sequence[tuple[float, int]]) -> None:
        """The level changed: what was measured since is not what it was taken for. ``width``: the round's, which is not
        among the measurements yet."""
        cells = self._cells[rows]
        times = Counter(w for _, w in recent) - Counter([width])
        off = Counter(w for ratio, w in recent if log(max(ratio, 1e-9)) / log(change) > 0.5)
        slow = {w: n - (w == width) for w, n in off.items()}
        since = max((cells[w].before(n) for w, n in slow.items() if w in cells), default=self._clock)
        for each in slow.keys() & cells.keys():
            cells[each].scale(times[each], 1 / change)
        late = [w for w in cells.keys() - slow.keys() if w > 1 and self._measured_since(rows, w, since, change)]
        for each in cells.keys() - slow.keys():
            cells[each].scale(len(cells[each].seen) if each in late else times[each], 1 / change)
        if late:
            self._misjudged = self._clock - since, 1 / change
        if rows in self._tokens:
            tokens, wide = self._tokens[rows], sum(w > 1 for _, w in recent)
            tokens.scale(tokens.since(since) if late else wide, 1 / change)

    def _measured_since(self, rows: int, width: int, since: int, change: float) -> bool:
        """The machine's speed changed at some time after ``since``, as is seen on other widths. Was this one, which was
        not measured before, measured at the new speed? So it was if it then costs more nearly what it should."""
        cells = self._cells[rows]
        if 1 not in cells or not cells[width].since(since):
            return False
        plain = cells[1].value
        expected = plain + self._supposed(rows, plain * self.level) / self.level * (width - 1)
        off = cells[width].value / expected
        return abs(log(off / change)) < abs(log(off))

    def misjudged(self) -> tuple[int, float]:
        """The last so many rounds turned out to be measured at another speed than was believed; what is kept elsewhere
        of them, relative to the level, must be multiplied by the second. Told once."""
        found, self._misjudged = self._misjudged, (0, 1.0)
        return found

    def _only_wide(self, ratio: float, rows: int) -> None:
        """A plain round takes so many times what it should: if far less, only wide rounds became slower."""
        self._unsure.discard(rows)
        if ratio > 1 / (1 + self.LARGE):
            return
        self.level *= ratio
        for width, cell in self._cells[rows].items():
            cell.scale(len(cell.seen) * (width > 1), 1 / ratio)
        if rows in self._tokens:
            self._tokens[rows].scale(TokenCost.WINDOW, 1 / ratio)
        self._ratios.clear()

    def settle(self) -> float:
        """Where the level has gone far, take it into the measurements. What is kept elsewhere relative to the level
        must be multiplied by what comes back."""
        if 1 / self.FAR < self.level < self.FAR:
            return 1.0
        by, self.level = self.level, 1.0
        for cell in (cell for cells in self._cells.values() for cell in cells.values()):
            cell.scale(len(cell.seen), by)
        for token in self._tokens.values():
            token.scale(TokenCost.WINDOW, by)
        self._switches = deque((seconds * by for seconds in self._switches), maxlen=self._switches.maxlen)
        if self._read is not None:
            self._read = self._read[0], self._read[1] * by
        self._tables.clear()
        return by

    def read(self, tokens: int, seconds: float) -> None:
        """A forward that read prompts: it tells what a token more takes, where nothing else does."""
        seconds /= self.level
        if tokens < self.MANY:
            return
        if self._read is None or seconds / tokens < self._read[1] / self._read[0]:
            self._read = tokens, seconds

    @property
    def wide(self) -> bool:
        """Did the last round verify anything, forced tokens too?"""
        return self._drafted

    @property
    def switch(self) -> float:
        """Seconds that beginning to draft, and ending it, take each."""
        return max(0.0, median(self._switches)) * self.level

    @property
    def token(self) -> float:
        """Seconds of a token that is read along with many; 0 while not known."""
        if self._read is None:
            return 0.0
        plain = nearest((r for r, cells in self._cells.items() if 1 in cells), 1)
        if plain is None:
            return 0.0
        tokens, seconds = self._read
        return max(0.0, seconds - self._cells[plain][1].value) / max(1, tokens - plain) * self.level

    def timed(self, rows: int) -> bool:
        """Was a plain round with as many rows timed, or with more? What fewer rows say of it is a guess."""
        return any(known >= like(rows) and 1 in cells and cells[1].seen for known, cells in self._cells.items())

    def doubtful(self, rows: int) -> bool:
        """Was a plain round timed once, and took no less than wider ones, or did these become dearer since? Drafts may
        only look fast then, and while they are made it is not timed again."""
        cells = self._cells.get(like(rows), {})
        wider = [cell.value for width, cell in cells.items() if width > 1 and len(cell.seen) > 1]
        once = 1 in cells and len(cells[1].seen) == 1 and cells[1].value >= min(wider, default=inf)
        return once or like(rows) in self._unsure

    def table(self, rows: int) -> list[Point]:
        """(width, seconds, measurements), by width, for this number of rows or the measured one nearest to it; empty if
        there is no plain round (width 1) to compare with."""
        rows = like(rows)
        if rows not in self._tables:
            self._tables[rows] = [(width, seconds * self.level, times) for width, seconds, times in self._table(rows)]
        return self._tables[rows]

    def forwards(self, rows: int, widest: int, *, curious: bool = False) -> list[float]:
        """Seconds of rounds of width 1 .. ``widest``; empty while no plain round was measured. ``curious``: widths that
        were never measured are given a chance."""
        table = self.table(rows)
        if not table:
            return []
        plain, known = table[0][1], {width for width, _, _ in table}
        last, seconds, _ = table[-1]
        if last < widest:
            more = max(0.0, slope(table)) if len(table) > 1 else self._supposed(rows, plain)
            table = [*table, (widest, seconds + more * (widest - last), 0)]
        found = by_width(table, widest)
        if not curious:
            return found
        if self.ragged:  # there are so many that some never come; what lies between others is known well enough
            known.update(range(1, last))
        return [s if w in known else max(plain, s * self.UNSEEN) for w, s in enumerate(found, 1)]

    def seconds(self, rows: int, widths: Sequence[int], *, curious: bool = False) -> list[float]:
        """The same of these widths, in order."""
        found = self.forwards(rows, widths[-1], curious=curious)
        return [found[width - 1] for width in widths] if found else []

    def _supposed(self, rows: int, plain: float) -> float:
        """Seconds that a round takes more for each step of its width: as measured before anything was served, else as
        when prompts are read, else by its shape: more rows are nearer to where a forward is bound by arithmetic."""
        tokens = 1 if self.ragged else rows  # more, for a step
        if self._measured is not None:
            if rows not in self._wider:
                v = self._measured.verify
                self._wider[rows] = (v(4 * rows) / v(rows) - 1) / 3
            return plain * self._wider[rows] / rows * tokens
        known = self.token if self._read is not None else plain * (0.02 / rows + 0.003)
        return min(known * tokens, self.DEAREST * plain * tokens / rows)

    def _token(self, rows: int, plain: float) -> float:
        """What a token more takes by all ragged rounds of so many rows, or the nearest to it; 0 while not known."""
        cells = self._cells
        known = (r for r, token in self._tokens.items() if token and (r == rows or 1 in cells[r]))
        near = nearest(known, rows)
        if near is None:
            return 0.0
        return self._tokens[near].over(plain if near == rows else cells[near][1].value)

    def _table(self, rows: int) -> list[Point]:
        own = _seen(self._cells.get(rows, {}))
        wider: int | None = None
        if len(own) < 2 or 1 not in own:
            wider = nearest((r for r, cells in self._cells.items() if 1 in cells and len(_seen(cells)) > 1), rows)
            if 1 not in own:
                like = wider if wider is not None else nearest((r for r, c in self._cells.items() if 1 in c), rows)
                if like is None:
                    return []
                own = _seen(self._cells[like])
        points = [(width, cell.value, len(cell.seen)) for width, cell in sorted(own.items())]
        if len(points) == 1 and wider is not None:
            # Only plain rounds were measured: a wider one costs more as it does with other rows, each adding the same.
            other = _seen(self._cells[wider])
            share = other[1].value / points[0][1] if self.ragged else rows / wider  # a token takes what it takes there
            more = sorted((w, cell.value / other[1].value - 1) for w, cell in other.items() if w > 1)
            points += [(w, points[0][1] * (1 + max(0.0, excess) * share), 1) for w, excess in more]
        # A plain round takes no longer than any wider one. What says otherwise was timed in a bad moment, and must not
        # make useless drafts look fast: while they are made, plain rounds are not timed again. Between wider ones there
        # may be holes (kernels for five tokens that beat those for four).
        outdated = {width for width, cell in own.items() if own[1].newer(cell)}  # itself measured in a bad moment, then
        lowest = min(seconds for width, seconds, _ in points if width not in outdated)
        step = self._supposed(rows, lowest * self.level) / self.level
        most, start = 2 * step, lowest * (1.15 if self._measured is None else 1.05)
        believed = [(1, lowest, points[0][2])]
        for width, seconds, times in points[1:]:
            seconds = seconds if times >= self.TRUSTED else min(seconds, start + most * (width - 1))
            believed.append((width, max(seconds, lowest), times))
        if not self.ragged:
            return believed
        # A token more is little beside what rounds scatter by: what all of them say of it counts, too.
        least = self.AT_LEAST * (max(0.0, slope(believed)) if len(believed) > 2 else step)
        token = self._token(rows, lowest) if rows > 1 else 0.0  # the few widths of one row are seen often
        found = believed[:1]
        for width, seconds, times in believed[1:]:
            by_all = max(least, token * (self.ALONE if times < self.TRUSTED else self.AT_LEAST))
            found.append((width, max(seconds, lowest + by_all * (width - 1)), times))
        return found


def _seen(cells: dict[int, Cell]) -> dict[int, Cell]:
    """Those that count."""
    return {width: cell for width, cell in cells.items() if width == 1 or len(cell.seen) > 1}


def _nearly(width: int) -> int:
    """Ragged widths that are measured as one: there are too many to see each of them often."""
    step = 1 << max(0, (width - 2).bit_length() - 3)
    return 1 + round((width - 1) / step) * step


def like(rows: int) -> int:
    """Numbers of rows that are measured as one."""
    return rows if rows <= 8 else -(-rows // 4) * 4
