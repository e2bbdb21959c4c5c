"""How much computing a grammar may take while it is followed.

Knows: processor seconds of one grammar, over all the texts that follow it. Does not know: what is computed.

Masks are worked out between the rounds of everybody. Some grammars compile at once and then take longer with each token
(ambiguous ones: ``a: a a | "a"``); the library bounds one step of them, not their sum. Every committed token earns
``A_TOKEN`` seconds, some hundred times what masks usually take. A grammar that is ``MOST`` seconds behind is given up.
"""

from __future__ import annotations

from time import thread_time

__all__ = ["A_TOKEN", "MOST", "TOO_SLOW", "Budget"]

A_TOKEN = 0.01  # seconds that the masks for one committed token may take, in the long run
MOST = 1.0  # seconds beyond that
TOO_SLOW = f"takes more than {A_TOKEN * 1000:g} ms of computing for each token: make it simpler, or less ambiguous"


class Budget:
    """Shared by all texts that follow one grammar, so that many at once get no more than one."""

    def __init__(self) -> None:
        self._behind = 0.0
        self.exceeded = False  # and so it stays

    def spending(self, *, tokens: int = 0) -> _Spending:
        """What runs inside counts; ``tokens`` were committed by it."""
        return _Spending(self, tokens)

    def spend(self, seconds: float) -> None:
        self._behind = max(0.0, self._behind + seconds)
        if self._behind > MOST:
            self.exceeded = True


class _Spending:
    """A class, not a generator: between two forwards nothing is in the cache, and every line of code costs."""

    __slots__ = ("_budget", "_earned", "_started")

    def __init__(self, budget: Budget, tokens: int) -> None:
        self._budget, self._earned = budget, A_TOKEN * tokens
        self._started = thread_time()  # not the clock's: a busy machine is no fault of a grammar's

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        self._budget.spend(thread_time() - self._started - self._earned)
