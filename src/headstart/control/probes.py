"""What drafting may cost while it is not known to pay.

Knows: what drafts lost against plain decoding so far, and when one was last tried. Does not know: why.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["Probes", "Rest"]


class Probes:
    """An account of what drafting lost, in plain rounds, and of the rounds until it is tried again."""

    ALLOWANCE = 1.5  # rounds that may be lost, and of all rounds:
    SHARE, LATER, EARLY = 0.008, 0.018, 256.0  # the share of the first EARLY ones, and of those after them
    WON = 2.0  # rounds of what drafts gained are kept for when they lose
    FIRST = 0.022  # of the rounds that lie ahead may go into finding out, at the start
    LOOK, LONGEST = 3, 12  # rounds between two looks at whether to draft: deciding takes time, too
    SOON, SELDOM = 4, 64  # rounds from one probe to the next: twice as many after each that failed
    FADE = 0.995  # of what guesses said, with each round: texts change
    DOUBT = 2.0  # guesses that may have held beside those that were seen

    def __init__(self) -> None:
        self._lost = 0.0
        self._rounds = 0.0
        self.tried = False
        self._idle = 0
        self._every = self.SOON
        self._tries = self._hits = 0.0  # first guesses of late

    def plain(self) -> None:
        """A round without a draft went by."""
        self._rounds += 1
        self._idle += 1
        self._tries, self._hits = self._tries * self.FADE, self._hits * self.FADE

    def drafted(self, cost: float, tokens: float, guesses: Sequence[bool], *, probe: bool, enough: float = 0.0) -> None:
        """A round with drafts: what it cost, in plain rounds, the tokens that it gave a row, and whether each first
        guess held; ``enough``: the share that must, for a draft to pay. What was won pays for a few rounds that lose,
        not for many."""
        held = sum(guesses) > enough * len(guesses)
        self._tries, self._hits = self._tries * self.FADE + len(guesses), self._hits * self.FADE + sum(guesses)
        self.tried = True
        self._rounds += cost
        self._lost = max(-self.WON, self._lost + cost - tokens)
        if held or not probe:
            self._every = 2 if probe else self.SOON
        elif self._idle:
            self._every = min(2 * self._every, self.SELDOM)
        self._idle = 0

    @property
    def room(self) -> float:
        """Plain rounds that may still be lost now."""
        early = min(self._rounds, self.EARLY)
        return self.ALLOWANCE + self.SHARE * early + self.LATER * (self._rounds - early) - self._lost

    def rest(self, price: float) -> int:
        """Plain rounds after the next one in which there is nothing to decide: no probe is due, or it cannot be
        afforded. ``price``: what must be there to lose. Never before the first probe was due: a drafter that has to
        catch up costs more with every round."""
        if self._idle >= self._every:
            return int(min(max((price - self.room) / self.LATER, self.LOOK), self.LONGEST))
        return min(self._every - self._idle - 1, self.LONGEST) if self.tried else 0

    def due(self, cost: float, ahead: float, enough: float) -> bool:
        """Is it time to try a draft that is not expected to pay, and can its cost be afforded? The very first one also
        where it is little of what lies ahead (in rounds). None where so many guesses failed of late that the share of
        those that hold cannot well be ``enough``: many rows say in a round what one says in many."""
        if not self.tried and cost <= self.FIRST * ahead:
            return self._idle > 0
        if self._hits + self.DOUBT < enough * (self._tries + self.DOUBT):
            return False
        return self._idle >= self._every and cost <= self.room


class Rest:
    """Rounds in which nothing is decided, while the same sequences run: deciding takes time, too. Where many rests
    follow each other, they get longer."""

    MANY = 24

    def __init__(self) -> None:
        self._rounds, self._whose, self._before = 0, tuple[str, ...](), 0

    def begin(self, most: int, whose: Sequence[str]) -> None:
        self._before = self._before + 1 if tuple(whose) == self._whose else 0
        self._rounds = min(Probes.LONGEST if self._before >= self.MANY else Probes.LOOK, most)
        self._whose = tuple(whose)

    def end(self) -> None:
        self._rounds = self._before = 0

    def lasts(self, whose: Sequence[str]) -> bool:
        """One of its rounds, if there is one left."""
        if not self._rounds or tuple(whose) != self._whose:
            return False
        self._rounds -= 1
        return True
