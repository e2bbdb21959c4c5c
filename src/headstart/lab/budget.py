"""Time that a measurement may take.

Knows: the clock. Does not know: what takes the time.
"""

from __future__ import annotations

from time import perf_counter

__all__ = ["Budget"]


class Budget:
    """Starts when it is made. ``seconds`` None: no limit."""

    def __init__(self, seconds: float | None = None) -> None:
        self.seconds, self._started = seconds, perf_counter()

    @property
    def spent(self) -> float:
        return perf_counter() - self._started

    @property
    def left(self) -> float:
        """Seconds; infinite where there is no limit."""
        return float("inf") if self.seconds is None else self.seconds - self.spent

    @property
    def over(self) -> bool:
        return self.left <= 0

    def part(self, share: float) -> Budget:
        """A share of what is left, from now on."""
        return Budget(None if self.seconds is None else max(0.0, self.left * share))
