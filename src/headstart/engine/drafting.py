"""Asks the drafter for guesses, where it runs on the host.

Knows: how long a guess may be, and that a drafter may be anybody's code. Does not know: who guesses, or how.
"""

from __future__ import annotations

from ..types import Proposal
from .outcome import Rows
from .parts import Parts
from .proposal_check import checked
from .sequence import Sequence

__all__ = ["draft"]


def draft(parts: Parts, rows: Rows) -> list[Proposal | None]:
    """A guess for each row, None where there is none. A drafter that fails, or proposes nonsense, is dropped for good:
    the text goes on without it."""
    sequences = rows.sequences
    nothing: list[Proposal | None] = [None] * len(sequences)
    limits = [_limit(parts, sequence) for sequence in sequences]
    if parts.drafter is None or not any(limits):
        return nothing
    try:
        budgets = parts.controller.budgets(sequences, limits)
        if not any(budgets):
            return nothing
        found = checked(
            parts.drafter.propose(list(sequences), list(budgets)),
            budgets,
            width=parts.runner.vocab_size,
            device=parts.runner.device,
            sound_q=parts.drafter.sound_q,
        )
        return parts.controller.trim(sequences, found)
    except Exception as error:
        parts.drop_drafter(error)
        return nothing


def _limit(parts: Parts, sequence: Sequence) -> int:
    """The most tokens worth drafting: a round emits one more than it drafts, and all must fit."""
    if not sequence.params.speculate:
        return 0
    return max(0, min(sequence.remaining, parts.max_len - len(sequence.tokens)) - 1)
