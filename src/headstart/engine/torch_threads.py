"""How many threads torch may use inside a step, where the models have threads of their own.

Knows: torch's setting, and that several engines in several threads may want to change it at once.
Does not know: why a step wants fewer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

import torch

__all__ = ["torch_threads"]

_lock = Lock()
_inside = 0  # steps that have changed the setting: the first one remembers it, so that none takes another's for it
_before = 0


@contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """Inside, torch uses ``count`` threads; None: as many as it has."""
    global _inside, _before
    if count is None:
        yield
        return
    with _lock:
        if not _inside:
            _before = torch.get_num_threads()
        _inside += 1
    try:
        torch.set_num_threads(count)
        yield
    finally:
        torch.set_num_threads(_before)
        with _lock:
            _inside -= 1
