"""Who runs now: the waiting line, the prompts being read in, and the rows that decode.

Knows: the slab's rows and the order of requests. Does not know: models, drafts or text.

Prompts are read in together, in forwards of a bounded number of tokens. One that shares its beginning with another that
is being read waits for it: it then finds that beginning in the slab and copies it.

While more requests wait than there are free rows, every one of them has to wait for somebody's end anyway. Then a row
that got free is held back a little, so that several prompts share a forward: one by itself takes all other rows about
as long as a token does.

Requests may be added from any thread; everything else is for the one that steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock

from ..errors import EngineBusy
from ..machine.kvcache import Slab
from ..machine.reading import shares, waits_for
from .copies import undisturbed
from .sequence import Sequence

__all__ = ["Chunk", "Scheduler"]

_SHARE = 16  # while a line waits, a forward reads prompts for one row in so many, or more ...
_PATIENCE = 4  # ... unless the rows that run have written so many tokens each since one got free
_LOOKED_AT = 64  # waiting requests that are asked in a step whether they can be let in


@dataclass(frozen=True)
class Chunk:
    """A part of one prompt, to be read in now. ``scored``: with the log-probabilities of its tokens."""

    sequence: Sequence
    row: int
    tokens: list[int]
    last: bool  # does the prompt end here, and an answer begin?
    scored: bool = False


class Scheduler:
    """Admission, rows, and their release."""

    def __init__(self, slab: Slab, max_waiting: int) -> None:
        self._slab = slab
        self._max_waiting = max_waiting
        self._waiting: deque[Sequence] = deque()
        self._filling: dict[str, Sequence] = {}  # in order of arrival
        self._running: dict[str, Sequence] = {}
        self._held_back = 0  # tokens that running rows wrote since a row got free that a waiting request could have
        self._line = Lock()  # over ``_waiting``

    def add(self, sequences: list[Sequence]) -> None:
        """Put them in the waiting line. An empty line takes any number: n choices are never too many for it."""
        with self._line:
            if self.full(len(sequences)):
                raise EngineBusy(
                    f"{len(self._waiting)} requests wait already; the queue holds {self._max_waiting} (max_waiting)"
                )
            self._waiting.extend(sequences)

    def full(self, sequences: int = 1) -> bool:
        """Would ``add`` refuse that many sequences now?"""
        waiting = len(self._waiting)
        if waiting + sequences > self._max_waiting:
            line = undisturbed(lambda: tuple(self._waiting))
            waiting = sum(not s.dropped for s in line)  # the others go before the next step
        return waiting > 0 and waiting + sequences > self._max_waiting

    def restart(self, sequences: Iterable[Sequence]) -> None:
        """Nobody holds a row any more; these wait, in this order. The slab was reset."""
        with self._line:
            self._waiting = deque(sequences)
        self._filling = {}
        self._running = {}

    @property
    def idle(self) -> bool:
        return not (self._waiting or self._filling or self._running)

    @property
    def waiting(self) -> int:
        """Requests in the line, n choices of one counted as n."""
        return len(self._waiting)

    @property
    def arriving(self) -> bool:
        """Is a prompt being read in, or waiting for a row that is free and not held back?"""
        if self._filling:
            return True
        waiting, free = len(self._waiting), self._slab.free_rows
        if not waiting or not free:
            return False
        enough = max(1, self._slab.rows // _SHARE)
        return waiting <= free or free >= enough or not self._running or self._held_back >= _PATIENCE

    def wrote(self, tokens: int) -> None:
        """A round went by in which rows wrote up to so many tokens."""
        free = self._waiting and self._slab.free_rows
        self._held_back = self._held_back + tokens if free else 0

    def chunks(self, budget: int, enough: int | None = None) -> list[Chunk]:
        """What to read in now, ``budget`` tokens at the most; nothing if no prompt waits, or none has a row.
        ``enough``: see ``shares``."""
        self._admit()
        filling, found = list(self._filling.values()), []
        rows = [self._slab.row(s.id) for s in filling]
        starts = [self._slab.lengths[row] for row in rows]
        behind = [len(s.tokens) - start for s, start in zip(filling, starts, strict=True)]
        for i, count in enumerate(shares(behind, budget, enough)):
            if count:
                sequence, start, end = filling[i], starts[i], starts[i] + count
                scored = start < sequence.scored_until
                if scored:
                    end = min(end, sequence.scored_until)
                last = end == len(sequence.tokens) and sequence.remaining > 0
                found.append(Chunk(sequence, rows[i], sequence.tokens[start:end], last, scored))
        return found

    def _admit(self) -> None:
        """Give waiting requests rows, in order of arrival; see ``waits_for`` for those that are passed over."""
        self._held_back = 0
        at, held = 0, ""  # held: a request whose prompt waits; its other choices do, too
        while self._slab.free_rows and at < min(len(self._waiting), _LOOKED_AT):
            sequence = self._waiting[at]
            unread = [s.tokens for s in self._filling.values()]
            if sequence.request.id == held or (
                unread and waits_for(sequence.reusable, unread, self._slab.warm(sequence.reusable))
            ):
                held = sequence.request.id
                at += 1
                continue
            with self._line:
                del self._waiting[at]
            sequence.tally.start()
            sequence.tally.cached_tokens = self._slab.acquire(sequence.id, sequence.reusable)
            self._filling[sequence.id] = sequence

    def filled(self, sequence: Sequence) -> None:
        """Its prompt is in: it decodes with the others from now on."""
        del self._filling[sequence.id]
        self._slab.promote(sequence.id)
        self._running[sequence.id] = sequence

    def ready(self) -> list[Sequence]:
        """The decoding sequences, in row order from row 0."""
        return [self._running[key] for key in self._slab.ready_keys]

    def retire(self, sequence: Sequence) -> None:
        """Give up the sequence's row, or its place in the line. A row that failed is wiped: NaN must not stay. So is
        one whose prompt was not read to its end, where that matters: nobody has seen its numbers."""
        failed = sequence.finish_reason == "error"
        if self._filling.pop(sequence.id, None) is not None:
            unseen = self._slab.reads_dead and sequence.finish_reason == "abort"
            self._slab.release(sequence.id, scrub=failed or unseen)
        elif self._running.pop(sequence.id, None) is not None:
            self._slab.release(sequence.id, scrub=failed)
        else:
            with self._line, suppress(ValueError):
                self._waiting.remove(sequence)

    def waits(self, sequence: Sequence) -> bool:
        with self._line:
            return sequence in self._waiting
