"""Two guessers at once: copy where the text repeats itself, ask the trained one where it does not.

Knows: who guesses better for a sequence now, by the length of the match. Does not know: how either of them guesses.

A copied guess costs nothing and can be long; a trained one costs time for every token and is right more often when
nothing repeats. So the copier is asked first, and its guess is taken when its match is long enough.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ..maths.limits import LONG_MATCH
from ..types import DraftView, Proposal, Verdict
from .base import DraftContext, Drafter
from .head import HeadDrafter
from .lookup import LookupDrafter

__all__ = ["PortfolioDrafter"]

Budgets = Callable[[Sequence[DraftView], Sequence[int]], list[int]]


class PortfolioDrafter(Drafter):
    """``lookup`` beside another drafter."""

    free = True  # of its own budget: ``budgets`` decides how much of the costly drafter is worth its time
    reads_predictions = True

    def __init__(self, costly: Drafter, budgets: Budgets, long_match: int = LONG_MATCH) -> None:
        """``budgets``: how many tokens the costly drafter may draft for each sequence, at most the given limits."""
        self.costly = costly
        self.lookup = LookupDrafter(min_match=long_match)
        self.name = f"{costly.name}+lookup"
        self.ends_itself = costly.ends_itself
        self.sound_q = costly.sound_q
        self.needs_torch = costly.needs_torch
        self._budgets = budgets

    @classmethod
    def for_target(cls, context: DraftContext) -> PortfolioDrafter:
        """The head in the folder that ``context.source`` is, beside ``lookup``."""
        return cls(HeadDrafter.for_target(context), context.advice.paid_budgets)

    def propose(self, views: Sequence[DraftView], budgets: Sequence[int]) -> list[Proposal | None]:
        copied = self.lookup.propose(views, budgets)
        left = [0 if guess is not None else limit for guess, limit in zip(copied, budgets, strict=True)]
        if not any(left):
            return copied
        drafted = self.costly.propose(views, self._budgets(views, left))
        # Their length was settled beforehand: what is free here is only the other half.
        paid = [None if guess is None else replace(guess, paid=True) for guess in drafted]
        return [guess if guess is not None else other for guess, other in zip(copied, paid, strict=True)]

    @property
    def token_bytes(self) -> int:
        return self.costly.token_bytes

    def halves(self) -> tuple[Drafter, Drafter]:
        return self.lookup, self.costly

    def commit(self, views: Sequence[DraftView], verdicts: Sequence[Verdict | None]) -> None:
        self.costly.commit(views, verdicts)

    def release(self, sequence_id: str) -> None:
        self.lookup.release(sequence_id)
        self.costly.release(sequence_id)

    def reset(self) -> None:
        self.lookup.reset()
        self.costly.reset()
