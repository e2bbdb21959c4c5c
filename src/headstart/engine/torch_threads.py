"""How many threads torch may use inside a step, where the models have threads of their own.

Knows: torch's setting, and that several engines in several threads may want to change it at once.
Does not know: why a step wants fewer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock, get_ident

import torch

__all__ = ["torch_threads"]

_lock = Lock()
# Threads in a step that changed the setting. The first one notes what it was, so that none takes another's for it.
_inside: set[int] = set()
_before = 0


@contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """Inside, torch uses ``count`` threads; None: as many as it has."""
    global _before
    if count is None:
        yield
        return
    me = get_ident()
    with _lock:
        if not _inside - {me}:  # this thread itself can only be left over from a step that was interrupted
            _before = _before if me in _inside else torch.get_num_threads()
        _inside.add(me)
    try:
        torch.set_num_threads(count)
        yield
    finally:
        torch.set_num_threads(_before)
        with _lock:
            _inside.discard(me)
