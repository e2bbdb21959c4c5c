"""Who waits on an event loop for a place in the engine's line.

Knows: how many places there are, and who comes next. Does not know: requests, or what becomes of them in the line.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from threading import Lock

from .engine import Engine

__all__ = ["Places"]


class _Place:
    """One who waits for places in the line, on an event loop."""

    def __init__(self, count: int) -> None:
        self.count, self.granted = count, False
        self._loop, self._news = asyncio.get_running_loop(), asyncio.Event()

    def grant(self) -> None:
        """From any thread."""
        self.granted = True
        with suppress(RuntimeError):  # its event loop is closed
            self._loop.call_soon_threadsafe(self._news.set)

    async def wait(self) -> None:
        await self._news.wait()


class Places:
    """Who waits for a place in the engine's line, in order of arrival. When places get free, as many are woken as find
    one: a thousand who wait do not all look at once."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._waiting: deque[_Place] = deque()
        self._promised = 0  # places of those who were woken and have not submitted yet
        self._lock = Lock()  # the thread that computes wakes
        self._closed = False
        self._listening = engine.listen(begun=self._moved, ended=self._moved)

    @asynccontextmanager
    async def place(self, count: int) -> AsyncIterator[None]:
        """Waits until so many requests may enter. Enter inside."""
        mine = _Place(count)
        with self._lock:
            self._waiting.append(mine)
        try:
            self._moved()
            await mine.wait()
            yield
        finally:
            with self._lock:
                if mine.granted:
                    self._promised -= count
                else:
                    self._waiting.remove(mine)
            self._moved()  # it may have left more than it took

    def close(self) -> None:
        """Wake all: they learn that nothing is taken any more."""
        self._listening.close()
        self._closed = True
        self._moved()

    def _moved(self, _: object = None) -> None:
        """Somebody left the line, or came. By any thread."""
        with self._lock:
            while self._waiting and (self._closed or self._fits(self._waiting[0].count)):
                first = self._waiting.popleft()
                self._promised += first.count
                first.grant()

    def _fits(self, count: int) -> bool:
        """Would the line take so many more? One that is empty takes any number."""
        taken = self._engine.waiting + self._promised
        return not taken or taken + count <= self._engine.config.max_waiting
