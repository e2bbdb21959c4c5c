"""Many threads, one engine: one of them steps for everybody, the others sleep until what they wait for has come.

Knows: who steps now, who sleeps, and when each is to be woken. Does not know: what a step does.

The thread that finds nobody stepping leads: it steps until its own wait is over, and wakes the others as theirs end.
Then another one leads. So no thread is kept for stepping, a single caller pays next to nothing, and the step
itself needs no other lock.

Ctrl-C may strike at any instruction. Only ``_lock``, which is taken and given back by ``with``, decides who may step;
everything else here is a hint that makes waking quick. A hint that got lost costs a sleeper ``PATIENCE`` once.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, Lock, get_ident
from typing import TypeVar

from ..errors import HeadstartError
from .copies import undisturbed

__all__ = ["Turns"]

T = TypeVar("T")

PATIENCE = 0.2  # seconds without a step before a sleeper looks for itself


class Turns:
    """Hands the right to step from thread to thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._owner: int | None = None  # who holds the lock; may be out of date while nobody does
        self._leading = False  # somebody steps until its own wait is over
        self._steps = 0  # taken by leaders; tells a sleeper that its leader lives
        self._knocking: set[int] = set()  # threads that want the lock now: a leader lets them in between two steps
        self._sleepers: dict[Event, Callable[[], bool]] = {}  # and what each of them waits for

    @property
    def mine(self) -> bool:
        """Is this thread in the middle of a step (a listener or a drafter calls back)?"""
        return self._owner == get_ident() and self._lock.locked()

    @property
    def busy(self) -> bool:
        """Does any thread step?"""
        return self._lock.locked()

    def alone(self, work: Callable[[], T]) -> T:
        """Do ``work`` while nobody steps; waits for the step in progress."""
        if self.mine:
            raise HeadstartError("the engine is in the middle of a step: listeners and drafters must not step it")
        me = get_ident()
        self._knocking.add(me)
        try:
            with self._lock:
                self._owner = me
                self._knocking.discard(me)
                try:
                    return work()
                finally:
                    self._owner = None
        finally:
            self._knocking.discard(me)
            self._wake_one()

    def close(self, timeout: float) -> None:
        """Let nobody step from here on: daemon threads then sleep, instead of being torn out of a step at exit."""
        self._knocking.add(0)  # a leader stops after its step, and waits until the lock is taken
        self._lock.acquire(timeout=timeout)

    def until(self, done: Callable[[], bool], step: Callable[[], None]) -> None:
        """Return when ``done()``: by stepping, or while another thread steps. ``done`` is asked from any thread."""
        if done():
            return
        wake = Event()
        self._sleepers[wake] = done
        try:
            while not done():
                if self._leading:
                    before = self._steps
                    if wake.wait(PATIENCE):
                        wake.clear()
                    if self._leading and self._steps != before:
                        continue
                if not done() and self.alone(lambda: self._lead(done, step)):
                    self._let_in(wake)
        finally:
            self._sleepers.pop(wake, None)
            self._wake_one()

    def _lead(self, done: Callable[[], bool], step: Callable[[], None]) -> bool:
        """Step until ``done()``, or until somebody knocks: True then."""
        self._leading = True
        try:
            while not done():
                step()
                self._steps += 1
                if len(self._sleepers) > 1:
                    for wake, ready in undisturbed(lambda: list(self._sleepers.items())):
                        if ready():
                            wake.set()
                if self._knocking:
                    return True
            return False
        finally:
            self._leading = False

    def _let_in(self, wake: Event) -> None:
        """Wait until those who knocked have the lock: whoever gave it back would else be the first to take it again."""
        for _ in range(50):
            if not self._knocking:
                return
            wake.wait(0.001)
            wake.clear()
        self._knocking.clear()  # a thread that was interrupted while it knocked

    def _wake_one(self) -> None:
        """Nobody steps any more: let the one who sleeps longest look."""
        for wake in undisturbed(lambda: list(self._sleepers)):
            if not wake.is_set():
                wake.set()
                return
