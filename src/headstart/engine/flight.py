"""A captured round that was launched: what the host remembers of it, and how to read what comes back.

Knows: the moments of a round on the device's clock, and the lines of its result. Does not know: what was launched, or
what becomes of the outcome.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from ..types import Proposal, TokenLogprob, Verdict
from .judge import token_logprobs
from .outcome import Outcome
from .programs import Shape
from .sequence import Sequence

__all__ = ["Flight", "mark"]


def mark(device: torch.device) -> Any:
    """A moment of the device's clock: an event; of the host's, in seconds, where the host does the work."""
    if device.type != "cuda":
        return perf_counter()
    found = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    found.record()
    return found


def _wait(moment: Any) -> None:
    if not isinstance(moment, float):
        moment.synchronize()


def _between(start: Any, end: Any) -> float:
    """Seconds between two moments."""
    return float(end - start if isinstance(start, float) else start.elapsed_time(end) / 1e3)


@dataclass
class Flight:
    """A launched round whose result was not read yet."""

    shape: Shape
    sequences: tuple[Sequence, ...]
    limits: tuple[int, ...]  # how much draft each of them takes
    marks: list[Any]  # when it was launched, drafted, and verified; the last only once it is decided
    drafted: bool  # by the draft model, on the device
    catch_up_seconds: float  # that the draft model took to read what it lacked, before the launch
    arrived: Any = None  # when its drafted tokens get to the host, where those are asked for
    host: list[Tensor] = field(default_factory=list)  # the result and, where wanted, the three of ``Logprobs``

    @property
    def decided(self) -> bool:
        """Is all of it launched?"""
        return bool(self.host)

    def drafts(self, came: Tensor) -> list[Proposal | None]:
        """What was drafted on the device: came [N, R], where it gets to the host. Waits until it is there."""
        if self.arrived is None:
            return [None] * len(self.limits)
        _wait(self.arrived)
        lines = came[: self.shape.gamma, : len(self.limits)].T.tolist()
        return [_proposal(line, limit) for line, limit in zip(lines, self.limits, strict=True)]

    def outcome(self) -> Outcome:
        """What came of it. Waits until it is over."""
        _wait(self.marks[-1])
        proposals: list[Proposal | None] = []
        verdicts: list[Verdict | None] = []
        logprobs: list[list[TokenLogprob]] = [[] for _ in self.sequences]
        result, *columns = self.host
        lines = result[: len(self.sequences), : 3 + self.shape.gamma].tolist()
        for i, (limit, (accepted, token, ok, *drafted)) in enumerate(zip(self.limits, lines, strict=True)):
            proposals.append(_proposal(drafted, limit))
            verdicts.append(Verdict.on(proposals[-1], range(accepted), token) if ok else None)
            top = self.sequences[i].params.logprobs
            if columns and top is not None:
                chosen, best, ids = (column[i, : accepted + 1].tolist() for column in columns)
                logprobs[i] = token_logprobs([*drafted[:accepted], token], chosen, best, ids, top)
        draft_seconds, verify_seconds = (_between(*pair) for pair in pairwise(self.marks))
        return Outcome(proposals, verdicts, logprobs, draft_seconds, verify_seconds, self.catch_up_seconds)


def _proposal(drafted: list[int], limit: int) -> Proposal | None:
    return Proposal.chain(drafted[:limit]) if limit else None
