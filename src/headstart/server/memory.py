"""Gives memory that is free back to the system.

Knows: glibc's malloc, and when a server has time. Does not know: what memory is used for.

glibc keeps what was freed between blocks that are still used. The logits of a round take some megabytes, of another
size each time, and small things that live longer lie between them: after 1,500 requests to the embedded model 34 of the
36 MB in the engine's arena were free, and 52 of the 242 MB in the main one, which loading had left there.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable

__all__ = ["Memory", "give_back"]

AT_REST = 1.0  # seconds without work, after which memory is given back
AT_WORK = 60.0  # seconds from one time to the next, where there is always work: it takes some milliseconds


def _trimmer() -> Callable[[int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    try:
        found: Callable[[int], int] = ctypes.CDLL(None).malloc_trim  # lets other threads run meanwhile
    except (OSError, AttributeError):  # musl has none, and gives back by itself
        return None
    return found


_trim = _trimmer()


def give_back() -> None:
    """At once; threads that allocate wait for some milliseconds. Does nothing where the C library cannot."""
    if _trim is not None:
        _trim(0)


class Memory:
    """When to give back: soon after work ended, and now and then while it does not."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._given = self._worked = clock()
        self._used = False  # something was computed since it was given back

    def due(self, idle: bool) -> bool:
        """Is it time? To be asked several times a second. Whoever is told so does it."""
        now = self._clock()
        if not idle:
            self._used, self._worked = True, now
        since = now - self._worked if idle else now - self._given
        if not self._used or since < (AT_REST if idle else AT_WORK):
            return False
        self._used, self._given = False, now
        return True
