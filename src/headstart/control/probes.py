"""What drafting may cost while it is not known to pay.

Knows: what drafts lost against plain decoding so far, and when one was last tried. Does not know: why.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["Account", "Probes", "Rest"]


class Account:
    """What all drafts lost, in plain rounds, and what may still be lost."""

    ALLOWANCE = 1.5  # rounds that may be lost, and of all rounds:
    SHARE, LATER, EARLY = 0.008, 0.018, 256.0  # the share of the first EARLY ones, and of those after them
    WON = 2.0  # rounds of what drafts gained are kept for when they lose
    STREAK = 0.8  # of what rounds won is kept for the next one, to see whether drafts win
    OWED = 2.0  # rounds at most that asking for guesses took, which is paid out of what drafts gain

    def __init__(self) -> None:
        self._lost = self._owed = 0.0
        self._rounds = 0.0
        self._won, self._paid = 0.0, False  # by drafts of late, in rounds that follow each other; of which kind

    def plain(self, *, checking: bool = False) -> None:
        """A round without a draft went by. ``checking``: between drafted ones, to see what it takes."""
        self._rounds += 1
        self._won *= checking

    def asked(self, took: float) -> None:
        """A round without a draft, for which guesses were asked: that took so much of a plain round."""
        self._owed = min(self._owed + took, self.OWED)

    def drafted(self, cost: float, reading: float = 0.0, *, tokens: float, paid: bool = False) -> None:
        """A round with drafts: what it cost, in plain rounds, and what the drafter's reading before it; the tokens that
        it gave a row. What was won pays for a few rounds that lose, not for many."""
        before = self._won if paid is self._paid else 0.0
        self._won, self._paid = min(self.STREAK * before + tokens - cost, 1.0), paid
        lost = cost + reading - tokens
        owed = min(self._owed, max(0.0, -lost))
        self._owed -= owed
        self._rounds += cost + reading
        self._lost = max(-self.WON, self._lost + lost + owed)

    def wins(self, *, paid: bool) -> bool:
        """Did the last rounds draft, guesses of this kind, and win?"""
        return self._won > 0 and self._paid is paid

    @property
    def room(self) -> float:
        """Plain rounds that may still be lost now."""
        early = min(self._rounds, self.EARLY)
        return self.ALLOWANCE + self.SHARE * early + self.LATER * (self._rounds - early) - self._lost


class Probes:
    """When guesses of one kind are tried again, of which it is not known that they pay. Guesses that cost time and
    those that cost none say nothing about each other: only what both lost is on one account."""

    FIRST = 0.022  # of the rounds that lie ahead may go into finding out, at the start
    LOOK, LONGEST = 3, 12  # rounds between two looks at whether to draft: deciding takes time, too
    SOON, SELDOM = 4, 64  # rounds from one probe to the next: twice as many after each that failed
    FADE = 0.995  # of what guesses said, with each round: texts change
    DOUBT = 2.0  # guesses that may have held beside those that were seen

    def __init__(self, account: Account) -> None:
        self._account = account
        self.tried = False
        self.enough = 0.0  # the share of first guesses that must hold, for a draft of one token to pay
        self._idle = 0
        self._every = self.SOON
        self._tries = self._hits = 0.0  # first guesses of late

    def add(self, guesses: Sequence[bool], *, probe: bool) -> None:
        """A round: whether each first guess of this kind held. None: it went by without a draft of this kind."""
        self._tries, self._hits = self._tries * self.FADE + len(guesses), self._hits * self.FADE + sum(guesses)
        if not guesses:
            self._idle += 1
            return
        self.tried = True
        if sum(guesses) > self.enough * len(guesses) or not probe:
            self._every = 2 if probe else self.SOON
        elif self._idle:
            self._every = min(2 * self._every, self.SELDOM)
        self._idle = 0

    def rest(self, price: float) -> int:
        """Plain rounds after the next one in which there is nothing to decide: no probe is due, or it cannot be
        afforded. ``price``: what must be there to lose. Never before the first probe was due: a drafter that has to
        catch up costs more with every round."""
        if self._idle >= self._every:
            return int(min(max((price - self._account.room) / Account.LATER, self.LOOK), self.LONGEST))
        return min(self._every - self._idle - 1, self.LONGEST) if self.tried else 0

    def due(self, cost: float, ahead: float) -> bool:
        """Is it time to try a draft that is not expected to pay, and can its cost be afforded? The very first one also
        where it is little of what lies ahead (in rounds). None where so many guesses failed of late that the share of
        those that hold cannot well be ``enough``: many rows say in a round what one says in many."""
        if not self.tried and cost <= self.FIRST * ahead:
            return self._idle > 0
        if self._hits + self.DOUBT < self.enough * (self._tries + self.DOUBT):
            return False
        return self._idle >= self._every and cost <= self._account.room


class Rest:
    """Rounds in which nothing is decided, while the same sequences run: deciding takes time, too. Where many rests
    follow each other, they get longer."""

    MANY = 4

    def __init__(self) -> None:
        self._rounds, self._whose, self._before = 0, tuple[str, ...](), 0

    def begin(self, most: int, whose: Sequence[str]) -> None:
        self._before = self._before + 1 if tuple(whose) == self._whose else 0
        self._rounds = min(Probes.LONGEST if self._before >= self.MANY else Probes.LOOK, most)
        self._whose = tuple(whose)

    def end(self, *, pays: bool) -> None:
        """A draft was made: one that pays, or a probe."""
        self._rounds, self._before = 0, 0 if pays else self._before

    def lasts(self, whose: Sequence[str]) -> bool:
        """One of its rounds, if there is one left."""
        if not self._rounds or tuple(whose) != self._whose:
            return False
        self._rounds -= 1
        return True
