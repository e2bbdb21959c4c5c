"""Whether free guesses are worth asking for in every round.

Knows: what asking took and what the guesses brought lately, in plain rounds. Does not know: who guesses, or why guesses
fail.

A guess that calls itself free still takes the host's time in every round, found or not, and so does deciding whether to
verify it. With one row and a slow target that is nothing; with eight rows of a small model it was 6% of a round, more
than guesses can win there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from .measurements import low

__all__ = ["Asking"]


class Asking:
    """An account of the rounds in which guesses were asked for; while they bring less than they take, most rounds go by
    without asking, and those without follow each other for longer and longer."""

    FADE = 0.96  # of what was seen, with each round that asked
    FEW = 8.0  # rounds: with fewer of them nothing is known
    FREE = 0.004  # of a round: what takes less is always asked for
    SHORTEST, LONGEST = 3, 48  # rounds without asking, one after the other
    STALL = 3.0  # times what asking usually takes that it may have taken: one stall must not count for long

    def __init__(self) -> None:
        self._took = self._brought = self._rounds = 0.0  # of late, in plain rounds; and the rounds that asked
        self._length = self.SHORTEST
        self._left, self._whose = 0, tuple[str, ...]()
        self._seconds = {paid: deque[float](maxlen=9) for paid in (True, False)}

    def usual(self, seconds: float, *, paid: bool) -> float:
        """What is to be counted of what asking took now. ``paid``: in vain, of a drafter whose tokens cost time."""
        seen = self._seconds[paid]
        seen.append(seconds)
        return min(seconds, self.STALL * low(seen))

    @property
    def pays(self) -> bool:
        return self._rounds < self.FEW or self._took <= max(self._brought, self.FREE * self._rounds)

    def add(self, took: float, brought: float, whose: Sequence[str]) -> None:
        """A round of these sequences that asked: what that took, and what the guesses that were verified brought over
        a plain round (both in plain rounds)."""
        self._took, self._brought = self._took * self.FADE + took, self._brought * self.FADE + brought
        self._rounds = self._rounds * self.FADE + 1
        if self.pays:
            self._length = self.SHORTEST
        elif brought > took:  # the text may be about to repeat itself: the next round asks again
            self._length = max(self.SHORTEST, self._length // 2)
        else:
            self._left, self._whose = self._length, tuple(whose)
            self._length = min(2 * self._length, self.LONGEST)

    def rests(self, whose: Sequence[str]) -> bool:
        """Is this one of the rounds without asking? New sequences bring new text: then it is not."""
        if not self._left or tuple(whose) != self._whose:
            return False
        self._left -= 1
        return True
