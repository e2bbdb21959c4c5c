"""Sums of ``Round`` records: for one sequence, and for the engine as a whole.

Knows: how to add rounds up. Does not know: where they come from.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from ..types import Accepting, Round, Stats

__all__ = ["EngineStats", "Tally"]


class Tally:
    """Adds up one sequence's rounds. It is made when the sequence is submitted, and its clock starts then."""

    def __init__(self, prompt_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.cached_tokens = 0
        self._submitted = perf_counter()
        self._started: float | None = None
        self._first: float | None = None  # when the first token was there
        self._last = 0.0
        self._sums: dict[str, Any] = defaultdict(int)  # by the names of ``Stats``
        self._accepted: list[int] = []  # drafts of which 0, 1, 2 ... tokens were accepted

    def start(self) -> None:
        """The first prefill begins now. A sequence that is read in again keeps its beginning."""
        if self._started is None:
            self._started = self._last = perf_counter()

    def add(self, r: Round) -> None:
        sums = self._sums
        sums["rounds"] += 1
        sums["tokens"] += r.emitted
        for name in ("drafted", "accepted", "draft_seconds", "verify_seconds"):
            sums[name] += getattr(r, name)
        if r.drafted:
            sums["drafts"] += 1
            self._accepted += [0] * (r.accepted + 1 - len(self._accepted))
            self._accepted[r.accepted] += 1
        if r.predicted:
            sums["predicted"] += r.drafted
            sums["predicted_accepted"] += r.accepted
        if r.forced:
            sums["forced"] += r.drafted
        if not r.prefill:
            sums["decode_tokens"] += r.emitted
            sums["decode_seconds"] += r.round_seconds
        self._last = perf_counter()
        if self._first is None and r.emitted:
            self._first = self._last

    def stats(self) -> Stats:
        submitted, started, first = self._submitted, self._started, self._first
        return Stats(
            **self._sums,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            seconds=self._last - started if started is not None else 0.0,
            waiting_seconds=started - submitted if started is not None else 0.0,
            first_token_seconds=first - submitted if first is not None else 0.0,
            acceptance_histogram=tuple(self._accepted),
        )


@dataclass
class EngineStats(Accepting):
    """Adds up everything an engine did; a door shows it, the benchmark reads it."""

    rounds: int = 0  # target forwards that decoded
    row_rounds: int = 0  # rounds counted by sequence
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    draft_seconds: float = 0.0  # these three: rounds that carried no prompt
    verify_seconds: float = 0.0
    round_seconds: float = 0.0
    catch_up_seconds: float = 0.0  # of these, the drafter's reading of what it lacked
    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    cached_tokens: int = 0  # prompt tokens that were warm in the slab
    finished: int = 0
    aborted: int = 0
    failed: int = 0

    def add(self, rounds: list[Round]) -> None:
        """The records of one round, one for each of its sequences."""
        if not rounds:
            return
        self.rounds += 1
        self.row_rounds += len(rounds)
        self.tokens += sum(r.emitted for r in rounds)
        self.drafted += sum(r.drafted for r in rounds)
        self.accepted += sum(r.accepted for r in rounds)
        if rounds[0].prefill:
            self.prefill_tokens += sum(r.prefill for r in rounds)
            self.prefill_seconds += rounds[0].verify_seconds
            return
        self.draft_seconds += rounds[0].draft_seconds
        self.verify_seconds += rounds[0].verify_seconds
        self.round_seconds += rounds[0].round_seconds
        self.catch_up_seconds += rounds[0].catch_up_seconds

    @property
    def acceptance_length(self) -> float:
        return self.tokens / self.row_rounds if self.row_rounds else 0.0

    @property
    def overhead_share(self) -> float:
        """Share of the rounds' time spent in neither model's forward."""
        if self.round_seconds <= 0:
            return 0.0
        return max(0.0, 1.0 - (self.draft_seconds + self.verify_seconds) / self.round_seconds)
