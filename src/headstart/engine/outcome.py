"""What a player is given for a round, and what it brings back.

Knows: the two records between a round and whoever plays it. Does not know: how a round is played.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..machine.kvcache import Slab
from ..types import Proposal, TokenLogprob, Verdict
from .sequence import Sequence

__all__ = ["DraftFailed", "Outcome", "Rows", "emitted"]


class DraftFailed(Exception):
    """The draft model could not be brought level; nothing was launched, and the target's rows are as they were."""


@dataclass(frozen=True)
class Rows:
    """The sequences of one round, and their rows of the slab: consecutive ones, but where prompts are read in."""

    sequences: list[Sequence]
    numbers: list[int]
    lengths: list[int]  # keys that each row holds as the round begins
    behind: list[int]  # tokens it lacks besides the last committed one, which it always lacks: a prompt's end
    ahead: bool  # nothing is about to change, so the next round may be launched before this one is over

    @staticmethod
    def of(slab: Slab, sequences: list[Sequence], first: int, *, ahead: bool) -> Rows:
        lengths = slab.lengths[first : first + len(sequences)]
        behind = [len(s.tokens) - 1 - length for s, length in zip(sequences, lengths, strict=True)]
        return Rows(sequences, list(range(first, first + len(sequences))), lengths, behind, ahead)

    @property
    def first(self) -> int:
        return self.numbers[0]

    @property
    def reading(self) -> bool:
        """Does the round read the end of a prompt as well?"""
        return any(self.behind)


@dataclass(frozen=True)
class Outcome:
    """What one round said: for each row its proposal, and the target's verdict on it.

    A verdict is None where the row's numbers broke down. ``logprobs`` holds, for rows that asked for them, the target's
    log-probabilities of the accepted tokens and of the one it added; nothing for other rows.
    """

    proposals: list[Proposal | None]
    verdicts: list[Verdict | None]
    logprobs: list[list[TokenLogprob]]
    draft_seconds: float
    verify_seconds: float  # the target's forward alone
    catch_up_seconds: float = 0.0  # before it was asked, the drafter read what it lacked; no part of drafting
    tokens: int = 0  # of the target's forward, where rows differ in width; 0: all are as wide as the widest


def emitted(proposal: Proposal | None, verdict: Verdict) -> list[int]:
    """The accepted tokens and the target's own, in order."""
    drafted = proposal.tokens if proposal is not None else ()
    return [*(drafted[node] for node in verdict.path), verdict.token]
