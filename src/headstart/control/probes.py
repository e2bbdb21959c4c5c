"""What drafting may cost while it is not known to pay.

Knows: what drafts lost against plain decoding so far, and when one was last tried. Does not know: why.
"""

from __future__ import annotations

__all__ = ["Probes"]


class Probes:
    """An account of what drafting lost, in plain rounds, and of the rounds until it is tried again."""

    ALLOWANCE = 1.5  # rounds that may be lost, and of all rounds:
    SHARE, LATER, EARLY = 0.008, 0.018, 256.0  # the share of the first EARLY ones, and of those after them
    WON = 2.0  # rounds of what drafts gained are kept for when they lose
    FIRST = 0.022  # of the rounds that lie ahead may go into finding out, at the start
    SOON, SELDOM = 4, 64  # rounds from one probe to the next: twice as many after each that failed

    def __init__(self) -> None:
        self._lost = 0.0
        self._rounds = 0.0
        self.tried = False
        self._idle = 0
        self._every = self.SOON

    def plain(self) -> None:
        """A round without a draft went by."""
        self._rounds += 1
        self._idle += 1

    def drafted(self, cost: float, tokens: float, *, probe: bool, held: bool) -> None:
        """A round with drafts: what it cost, in plain rounds, and the tokens that it gave a row. What was won pays for
        a few rounds that lose, not for many."""
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

    def due(self, cost: float, ahead: float) -> bool:
        """Is it time to try a draft that is not expected to pay, and can its cost be afforded? The very first one also
        where it is little of what lies ahead (in rounds)."""
        if not self.tried and cost <= self.FIRST * ahead:
            return self._idle > 0
        return self._idle >= self._every and cost <= self.room
