"""Streams without a task to wake for each event: what a round brought is written by the callback that tells of it.

Knows: whose news there is, and when a connection takes no more. Does not know: what is in an event.

With eight clients a round of some milliseconds brings eight events. A task, a queue and five generators for each cost
more than the events themselves, on cores that compute.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from ..engine.inbox import Reader
from ..types import Piece

__all__ = ["Direct", "pumped"]


class Direct(Protocol):
    """A connection that takes parts of an answer whose headers are on their way."""

    @property
    def full(self) -> bool: ...  # it should be given nothing more before ``drain``

    def write(self, data: bytes) -> None: ...

    async def drain(self) -> None: ...  # returns at once where the client is gone


async def pumped(
    readers: Sequence[Reader], direct: Direct, events: Callable[[int, list[Piece]], Sequence[bytes]]
) -> None:
    """Write what comes for all readers until they have ended; failures of theirs are not raised. Left early, it stops
    all of them. ``events``: what becomes of a reader's pieces, given by its number."""
    pump = _Pump(readers, direct, events)
    try:
        await pump.run()
    finally:
        pump.stop()
        for reader in readers:
            reader.close()


class _Pump:
    def __init__(
        self, readers: Sequence[Reader], direct: Direct, events: Callable[[int, list[Piece]], Sequence[bytes]]
    ) -> None:
        self._readers, self._direct, self._events = readers, direct, events
        self._left = set(range(len(readers)))
        self._halted: asyncio.Future[None] | None = None  # while there is one, news are written as they come

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        for number, reader in enumerate(self._readers):
            reader.listen(partial(self._news, number))
        while self._left:
            self._halted = loop.create_future()
            for number in list(self._left):  # for what came before, or while the connection was full
                self._news(number)
            await self._halted  # the end of it all, a connection that is full, or a fault of ours
            await self._direct.drain()

    def stop(self) -> None:
        self._halted = None

    def _news(self, number: int) -> None:
        """In the event loop, when a reader has news."""
        halted = self._halted
        if halted is None or halted.done():
            return  # it is asked again
        try:
            reader = self._readers[number]
            if pieces := reader.pieces():
                for event in self._events(number, pieces):
                    self._direct.write(event)
            if reader.ended:
                self._left.discard(number)
        except Exception as error:
            halted.set_exception(error)
        else:
            if not self._left or self._direct.full:
                halted.set_result(None)
