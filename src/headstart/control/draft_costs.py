"""What drafting takes beside forwards of the target: measured as it goes, and what is supposed before that.

Knows: seconds of the last drafts, what was measured before anything was served, sizes. Does not know: whether guesses
hold, or who drafts.
"""

from __future__ import annotations

from collections import deque

from ..maths.cost import Forecast, start_and_step
from .costs import LIFETIME, Costs, like, nearest
from .measurements import low

__all__ = ["DraftCosts", "DraftSeconds"]


class DraftSeconds:
    """What a draft takes: a start that every draft pays (reading what was committed since the last one) and a step for
    each of its tokens. A line through low values of each length seen lately, for each number of rows. What is old
    counts until there is something new: to suppose something instead could only be worse."""

    WINDOW = 20
    FEW = 4  # with fewer measurements the fastest one counts, since any may have been disturbed

    def __init__(self) -> None:
        self._seen: dict[int, deque[tuple[int, float, int]]] = {}  # by rows: tokens, seconds, when
        self._lines: dict[int, tuple[float, float]] = {}
        self._clock = 0

    def add(self, tokens: int, seconds: float, rows: int = 1) -> None:
        rows = like(rows)
        seen = self._seen.setdefault(rows, deque(maxlen=self.WINDOW))
        while seen and seen[0][2] < self._clock - LIFETIME:
            seen.popleft()
        seen.append((tokens, seconds, self._clock))
        self._lines.pop(rows, None)

    def scale(self, by: float, last: int | None = None) -> None:
        """All measurements turn out to be others, or those of the last so many rounds."""
        since = self._clock - last if last is not None else -1
        if by != 1.0:
            for rows, seen in self._seen.items():
                scaled = ((n, seconds * by if when > since else seconds, when) for n, seconds, when in seen)
                self._seen[rows] = deque(scaled, maxlen=self.WINDOW)
            self._lines.clear()

    def tick(self) -> None:
        """A round went by."""
        self._clock += 1

    def __bool__(self) -> bool:
        return bool(self._seen)

    def few(self, rows: int = 1) -> bool:
        """Is what ``line`` says of little weight?"""
        found = nearest(self._seen, like(rows))
        return found is None or len(self._seen[found]) < self.FEW

    def old(self, rows: int = 1) -> bool:
        """Is all that ``line`` rests on old? It may have been measured in a bad moment."""
        found = nearest(self._seen, like(rows))
        return found is None or self._seen[found][-1][2] < self._clock - LIFETIME

    def line(self, rows: int = 1) -> tuple[float, float]:
        """Seconds of the start, and of each token, for the number of rows nearest to this one."""
        found = nearest(self._seen, like(rows))
        if found is None:
            return 0.0, 0.0
        if found not in self._lines and len(self._seen[found]) < self.FEW:
            self._lines[found] = 0.0, min(seconds / tokens for tokens, seconds, _ in self._seen[found])
        if found not in self._lines:
            by_length: dict[int, list[float]] = {}
            for tokens, seconds, _ in self._seen[found]:
                by_length.setdefault(tokens, []).append(seconds)
            # A slow moment moves nothing, and a rare length counts for little.
            self._lines[found] = start_and_step([(n, low(times), len(times)) for n, times in by_length.items()])
        return self._lines[found]


class DraftCosts:
    """Seconds of drafts and of catching up, as fast as the machine is now."""

    SUPPOSED = 0.1  # plain rounds that a draft step takes, where nobody knows
    DOUBTED = 3.0  # a first draft that took more times what it should is not believed
    CHUNK = 512  # tokens that a drafter which catches up reads at once, in two draft steps and what each token takes

    def __init__(self, costs: Costs, forecast: Forecast | None, ratio: float | None) -> None:
        """``ratio``: bytes that the drafter reads for a token, over the target's, if anybody knows."""
        self._costs, self._forecast, self._ratio = costs, forecast, ratio
        self._seen = DraftSeconds()
        self._caught_up: deque[float] = deque(maxlen=5)  # what catching up took, over what it was supposed to take
        self._warm = False  # did it draft at all?

    def __bool__(self) -> bool:
        """Was a draft timed?"""
        return bool(self._seen)

    def tick(self) -> None:
        """A round went by."""
        rounds, by = self._costs.misjudged()
        self._seen.scale(by, rounds)
        self._seen.scale(self._costs.settle())
        self._seen.tick()

    def add(self, rows: int, longest: int, seconds: float, catch_up: float, *, level: bool, missing: int) -> None:
        """A draft of so many tokens, and catching up before it. ``level``: no row had more to read than comes along
        with a draft's first step; ``missing``: tokens there were to read."""
        if not self._warm:  # its very first draft touches memory and wakes threads: it may say nothing about the next
            self._warm, supposed = True, self.line(rows)[1] * longest
            seconds = min(seconds, self.DOUBTED * supposed) if supposed else seconds
        # A drafter that was not asked for a while may read what it missed inside its first draft: no draft step.
        if level or catch_up:
            self._seen.add(longest, seconds / self._costs.level, rows)
        if (supposed := self._reading(rows, missing, *self.line(rows))) > 0:
            self._caught_up.append(catch_up / supposed)

    def line(self, rows: int) -> tuple[float, float]:
        """Seconds that any draft takes, and more for each of its tokens."""
        table = self._costs.table(rows)
        if self._seen:
            start, step = (seconds * self._costs.level for seconds in self._seen.line(rows))
            if self._forecast is not None and table and self._seen.few(rows):  # timed in a bad moment, perhaps
                step = min(step, self._forecast.cost.c * table[0][1])
            return start, step
        return 0.0, self._supposed(rows)

    def doubted(self, rows: int) -> tuple[float, float]:
        """``line``, or less where it is old: perhaps it was timed in a bad moment, which must not rule probes out."""
        start, step = self.line(rows)
        return (0.0, min(start + step, self._supposed(rows))) if self._seen.old(rows) else (start, step)

    def reading(self, rows: int, missing: int, start: float, step: float) -> float:
        """Seconds that the drafter takes to read what it missed."""
        return self._reading(rows, missing, start, step) * (low(self._caught_up) if self._caught_up else 1.0)

    def _reading(self, rows: int, missing: int, start: float, step: float) -> float:
        """What it is supposed to take, by what a draft and the target's own reading take; more or less as it turns out
        (``_caught_up``)."""
        table = self._costs.table(rows)
        if not table or not missing:
            return 0.0
        ratio = (start + step) / table[0][1]
        if self._forecast is not None and self._ratio is not None:
            ratio = min(ratio, self._ratio)  # many tokens are arithmetic, of which there is as much as weights
        token = self._costs.token * ratio
        return -(-missing // self.CHUNK) * 2 * (start + step) + token * missing

    def _supposed(self, rows: int) -> float:
        """Seconds of a draft step, before one was timed."""
        table = self._costs.table(rows)
        ratio = self._forecast.cost.c if self._forecast is not None else self._ratio or self.SUPPOSED
        return ratio * table[0][1] if table else 0.0
