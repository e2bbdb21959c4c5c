"""When to come back: how fast the waiting line moves.

Knows: when requests ended, and how many wait. Does not know: who asks.
"""

from __future__ import annotations

import random
from collections import deque
from contextlib import ExitStack
from math import ceil
from time import monotonic

from ..engine.copies import undisturbed
from ..engine.engine import Engine
from ..engine.handle import Handle

__all__ = ["Pace"]

LOOKED_AT = 64  # endings
LONGEST = 60  # seconds


class Pace:
    """Tells those for whom there is no place when about half of the line will have moved on: soon enough that it does
    not run empty, and not all at the same moment. Who came back every second would cost more than what is computed."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._ends = deque[float](maxlen=LOOKED_AT)
        self.listening: ExitStack = engine.listen(ended=self._ended)

    def _ended(self, handle: Handle) -> None:
        """By the thread that steps."""
        self._ends.extend([monotonic()] * handle.request.params.n)

    def retry_after(self) -> int:
        """Seconds."""
        ends = undisturbed(lambda: tuple(self._ends))
        if len(ends) < 2:
            return 1
        each = (monotonic() - ends[0]) / len(ends)
        half = min(LONGEST, ceil(self._engine.waiting / 2 * each))
        return random.randint(max(1, ceil(half / 2)), max(1, half))
