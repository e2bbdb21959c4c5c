"""Who decides and who guesses while rounds of every draft length are timed (``round_costs``).

Knows: how to draft so many tokens, whatever comes of it. Does not know: clocks.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..control.controller import Controller
from ..drafters.base import Drafter
from ..types import DraftView, Proposal

__all__ = ["TINY", "Filler", "Sweep"]

TINY = 1e-9  # as the least chance to draft on: nothing is that unlikely, so drafts have their full length


class Filler(Drafter):
    """Guesses that cost nothing and mean nothing, to see what rounds of a width cost."""

    name = "filler"

    def propose(self, views: Sequence[DraftView], budgets: Sequence[int]) -> list[Proposal | None]:
        return [Proposal.chain(view.tokens[-1:] * n) if n else None for view, n in zip(views, budgets, strict=True)]


class Sweep(Controller):
    """Drafts as long as it is told to, whatever comes of it."""

    def __init__(self) -> None:
        self.gamma = 0

    def budgets(self, views: Sequence[DraftView], limits: Sequence[int]) -> list[int]:
        return [min(self.gamma, limit) for limit in limits]

    paid_budgets = budgets

    def min_chance_to_extend(self) -> float:
        return TINY

    def min_chances(self) -> tuple[float, float]:
        return TINY, TINY

    def reason(self) -> str | None:
        return None
