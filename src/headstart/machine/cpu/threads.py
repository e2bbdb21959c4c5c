"""How many threads to use now: what was measured to be fastest, fewer while the machine has other work.

Knows: how long steps took. Does not know: what a step is.

Threads that meet a hundred times a step must all be running at the same moment. When other programs want the cores,
each meeting can take a time slice, and a step ten times as long; one thread alone loses only its share. And what was
measured at load may have been measured beside other work. So now and then a single step is tried with more or fewer
threads. The results are the same bits either way, so it is safe to change at any step.
"""

from __future__ import annotations

__all__ = ["Pace", "counts"]

SLOW = 2.5  # times the best time of such a step: more is not the tokens' fault
PATIENCE = 3  # slow steps, with quick ones counted against them, before the others are sent away
PAUSE = 48  # steps alone before all threads are tried again

FASTER = 0.9  # of the usual time: what another number of threads must reach
WINS = 3  # trials in a row before it is taken
FIRST_TRIAL, LAST_TRIAL = 256, 16384  # steps between two trials; they back off while they fail
_NEWEST = 0.2  # the part of the newest step in the usual time


def counts(most: int) -> list[int]:
    """1, 2, 4, ... and ``most``: the numbers of threads that are tried."""
    found = [1]
    while found[-1] * 2 < most:
        found.append(found[-1] * 2)
    return [*found, most] if most > 1 else found


class Pace:
    """Says how many threads the next step gets, and learns from how long it took."""

    def __init__(self, most: int, *, start: int | None = None, fixed: bool = False) -> None:
        """``most``: threads there are. ``start``: how many are used at first. ``fixed``: and always."""
        self.most = most
        self._now = most if start is None else start
        self._fixed = fixed or most == 1
        self._best: dict[tuple[int, ...], float] = {}  # size of a step -> seconds
        self._usual: dict[tuple[int, ...], float] = {}
        self._slow = 0
        self._alone = 0  # steps left with one thread
        self._gap = self._until = FIRST_TRIAL
        self._wins = 0
        self._upward = True

    @property
    def now(self) -> int:
        """How many threads are used, trials and busy moments apart."""
        return self._now

    def threads(self) -> int:
        if self._alone:
            return 1
        return self._other() if not self._until else self._now

    def took(self, size: tuple[int, ...], seconds: float) -> None:
        """The step that ``threads`` was asked for is done. Steps of one ``size`` should take about as long."""
        if self._fixed:
            return
        if self._alone:
            self._alone -= 1
        elif not self._until:
            self._tried(size, seconds)
        else:
            self._until -= 1
            self._noted(size, seconds)

    def _noted(self, size: tuple[int, ...], seconds: float) -> None:
        usual = self._usual.setdefault(size, seconds)
        self._usual[size] = usual + _NEWEST * (seconds - usual)
        best = self._best.get(size)
        if best is None or seconds < best:
            self._best[size] = seconds
        elif seconds > SLOW * best and self._now > 1:
            self._slow += 1
            if self._slow >= PATIENCE:
                self._slow, self._alone = PATIENCE - 1, PAUSE  # after the pause one more slow step is enough
            return
        self._slow = max(0, self._slow - 1)

    # -- trials

    def _other(self) -> int:
        """The number of threads to try: the next larger or smaller one, by turns."""
        tried = counts(self.most)
        at = tried.index(self._now) if self._now in tried else len(tried) - 1
        there = at + 1 if (self._upward and at + 1 < len(tried)) or at == 0 else at - 1
        return tried[there]

    def _tried(self, size: tuple[int, ...], seconds: float) -> None:
        usual = self._usual.get(size)
        if usual is None:  # nothing to compare with: the next step will do
            return
        if seconds >= FASTER * usual:
            self._wins, self._upward = 0, not self._upward
            self._gap = min(2 * self._gap, LAST_TRIAL)
            self._until = self._gap
            return
        self._wins += 1
        if self._wins < WINS:
            return
        self._now, self._wins, self._slow = self._other(), 0, 0
        self._best.clear()
        self._usual.clear()
        self._gap = self._until = FIRST_TRIAL
