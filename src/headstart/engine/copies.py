"""Copies of what other threads change meanwhile.

Knows: that a copy may be disturbed. Does not know: what is copied, or who changes it.

``list(a_dict.items())`` and ``tuple(a_deque)`` are not one step: memory for the copy may start the garbage collector,
whose finalizers let other threads run, or change the very collection. Python then raises ``RuntimeError``. With a
thousand clients that come and go it happens within minutes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

__all__ = ["undisturbed"]

T = TypeVar("T")
_TRIES = 1000  # then it is something else


def undisturbed(copy: Callable[[], T]) -> T:
    """What ``copy`` makes of a collection, once nobody changed it meanwhile."""
    for _ in range(_TRIES):
        with suppress(RuntimeError):
            return copy()
    return copy()
