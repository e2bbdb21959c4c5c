"""Who runs now: the waiting line, the one prompt being read in, and the rows that decode.

Knows: the slab's rows and the order of requests. Does not know: models, drafts or text.

One prompt is read in at a time, in order of arrival. That is on purpose: when several requests share a prefix, the
second finds it already in the slab and copies it.

Requests may be added from any thread; everything else is for the one that steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from threading import Lock

from ..errors import EngineBusy
from ..machine.kvcache import Slab
from .sequence import Sequence

__all__ = ["Scheduler"]


class Scheduler:
    """Admission, rows, and their release."""

    def __init__(self, slab: Slab, max_waiting: int) -> None:
        self._slab = slab
        self._max_waiting = max_waiting
        self._waiting: deque[Sequence] = deque()
        self._filling: Sequence | None = None
        self._running: dict[str, Sequence] = {}
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
            waiting = sum(not s.dropped for s in tuple(self._waiting))  # these go before the next step
        return waiting > 0 and waiting + sequences > self._max_waiting

    def restart(self, sequences: Iterable[Sequence]) -> None:
        """Nobody holds a row any more; these wait, in this order. The slab was reset."""
        with self._line:
            self._waiting = deque(sequences)
        self._filling = None
        self._running = {}

    @property
    def idle(self) -> bool:
        return not (self._waiting or self._filling or self._running)

    @property
    def arriving(self) -> bool:
        """Is a prompt being read in, or waiting for a row that is free?"""
        return self._filling is not None or bool(self._waiting and self._slab.free_rows)

    def to_fill(self) -> Sequence | None:
        """The sequence whose prompt is to be read in now, in a row of its own; None if there is none or no row."""
        if self._filling is None and self._waiting and self._slab.free_rows:
            with self._line:
                sequence = self._waiting.popleft()
            sequence.tally.start()
            sequence.tally.cached_tokens = self._slab.acquire(sequence.id, sequence.tokens)
            self._filling = sequence
        return self._filling

    def filled(self, sequence: Sequence) -> None:
        """Its prompt is in: it decodes with the others from now on."""
        assert sequence is self._filling
        self._filling = None
        self._slab.promote(sequence.id)
        self._running[sequence.id] = sequence

    def ready(self) -> list[Sequence]:
        """The decoding sequences, in row order from row 0."""
        return [self._running[key] for key in self._slab.ready_keys]

    def held(self) -> list[Sequence]:
        """Everything that has a row."""
        return [*self._running.values(), *([self._filling] if self._filling else [])]

    def retire(self, sequence: Sequence) -> None:
        """Give up the sequence's row, or its place in the line. A row that failed is wiped: NaN must not stay."""
        failed = sequence.finish_reason == "error"
        if sequence is self._filling:
            self._filling = None
            self._slab.release(sequence.id, scrub=failed)
        elif self._running.pop(sequence.id, None) is not None:
            self._slab.release(sequence.id, scrub=failed)
        else:
            with self._line, suppress(ValueError):
                self._waiting.remove(sequence)

    def waits(self, sequence: Sequence) -> bool:
        with self._line:
            return sequence in self._waiting
