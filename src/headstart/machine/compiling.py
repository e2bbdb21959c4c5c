"""Threads that compile grammars: how many at once, and whose turn it is.

Knows: what takes long, and which client asked for it. Does not know: grammars.

What is being compiled cannot be stopped. So what takes long gives its place up to others and goes on beside them, with
less of the processor; a client that has too much of it waits, and the others do not.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from threading import Lock, Thread
from time import monotonic
from typing import Generic, TypeVar

from ..errors import EngineBusy

__all__ = ["Compilers"]

T = TypeVar("T")

AT_ONCE = 4  # that are not slow
SLOW = 0.5  # seconds from which on one is
MOST = 12  # at once, slow ones too
EACH = 3  # of one client's
WAITING = 256
NICE = 10  # by so much a slow one's priority is lowered: the engine goes first
PAUSE = 0.1  # seconds in which those who wait for a place look whether there is one


class _Compiling(Generic[T]):
    """One thing that is compiled, or waits for its turn."""

    def __init__(self, work: Callable[[], T], client: str | None) -> None:
        self.work, self.client = work, client
        self.future: Future[T] = Future()
        self.thread: Thread | None = None
        self._began, self._lowered = 0.0, False

    @property
    def slow(self) -> bool:
        return monotonic() - self._began > SLOW

    def begin(self, then: Callable[[_Compiling[T]], None]) -> None:
        self._began = monotonic()
        self.thread = Thread(target=self._run, args=(then,), name="headstart-grammar", daemon=True)
        self.thread.start()

    def lower(self) -> None:
        """Let others go first, once."""
        if not self._lowered and sys.platform == "linux" and self.thread is not None:
            self._lowered = True
            if self.thread.native_id is not None:
                with suppress(OSError):  # it has ended, or may not
                    mine = os.getpriority(os.PRIO_PROCESS, self.thread.native_id)
                    os.setpriority(os.PRIO_PROCESS, self.thread.native_id, mine + NICE)

    def _run(self, then: Callable[[_Compiling[T]], None]) -> None:
        if not self.future.set_running_or_notify_cancel():
            then(self)
            return
        try:
            found = self.work()
        except BaseException as error:
            then(self)
            self.future.set_exception(error)
        else:
            then(self)
            self.future.set_result(found)


class Compilers(Generic[T]):
    """Any thread may use it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._running: list[_Compiling[T]] = []
        self._waiting: list[_Compiling[T]] = []

    def submit(self, work: Callable[[], T], client: str | None = None) -> Future[T]:
        """``client``: who asks for it; None: this program itself, which may have as much as there is. Whoever waits for
        it calls ``tend`` every ``pause`` seconds. ``EngineBusy``: too many wait."""
        job = _Compiling(work, client)
        with self._lock:
            if len(self._waiting) >= WAITING:
                raise EngineBusy(f"{WAITING} grammars wait to be compiled")
            self._waiting.append(job)
        self.tend()
        return job.future

    def pause(self, future: Future[T]) -> float:
        """How long who waits for this may sleep: until there may be a place for it; once it has begun, until it is slow
        and gives its place up. Its end is told by the future itself."""
        return PAUSE + (SLOW if future.running() else 0.0)

    def tend(self) -> None:
        """Begin what may begin."""
        with self._lock:
            slow = [job for job in self._running if job.slow]
            for job in slow:
                job.lower()
            self._waiting = [job for job in self._waiting if not (job.future.running() or job.future.done())]
            running = Counter(job.client for job in self._running)
            while len(self._running) < min(MOST, AT_ONCE + len(slow)):
                ready = [job for job in self._waiting if job.client is None or running[job.client] < EACH]
                if not ready:
                    return
                job = min(ready, key=lambda job: running[job.client])  # clients take turns
                job.begin(self._ended)  # first: whatever interrupts this, none is lost, and none begins twice
                self._running.append(job)
                self._waiting.remove(job)
                running[job.client] += 1

    def _ended(self, job: _Compiling[T]) -> None:
        with self._lock, suppress(ValueError):
            self._running.remove(job)
        self.tend()
