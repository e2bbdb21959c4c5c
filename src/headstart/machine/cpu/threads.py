"""How many threads to use now: all of them, or one while the machine has other work.

Knows: how long steps took. Does not know: what a step is.

Threads that meet a hundred times a step must all be running at the same moment. When other programs want the cores,
each meeting can take a time slice, and a step ten times as long; one thread alone loses only its share. The results are
the same bits either way, so it is safe to change at any step.
"""

from __future__ import annotations

__all__ = ["Pace"]

SLOW = 2.5  # times the best time of such a step: more is not the tokens' fault
PATIENCE = 3  # slow steps, with quick ones counted against them, before the others are sent away
PAUSE = 48  # steps alone before all threads are tried again


class Pace:
    """Counts slow steps and says how many threads the next one gets."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._best: dict[tuple[int, ...], float] = {}  # size of a step -> seconds
        self._slow = 0
        self._alone = 0  # steps left with one thread

    def threads(self) -> int:
        return 1 if self._alone else self.most

    def took(self, size: tuple[int, ...], seconds: float) -> None:
        """The step that ``threads`` was asked for is done. Steps of one ``size`` should take about as long."""
        if self._alone:
            self._alone -= 1
            return
        best = self._best.get(size)
        if best is None or seconds < best:
            self._best[size] = seconds
        elif seconds > SLOW * best:
            self._slow += 1
            if self._slow >= PATIENCE and self.most > 1:
                self._slow, self._alone = PATIENCE - 1, PAUSE  # after the pause one more slow step is enough
            return
        self._slow = max(0, self._slow - 1)
