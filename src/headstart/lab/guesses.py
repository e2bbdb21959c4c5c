"""Who drafts when text that is already written is played again (``replay``), and how much of a guess would be kept.

Knows: sequences that are written again, drafters and known agreement, and how drafts end. Does not know: rounds,
controllers, or what anything costs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from ..drafters.base import Drafter, LeastChances
from ..sampling import SamplingParams, Verification
from ..types import Proposal
from .agreement import Agreement, Written, reached

__all__ = ["ByAgreement", "ByDrafter", "Ends", "Guesses", "TogetherWith", "View", "ends_each", "ends_together"]

Ends = Callable[[Sequence["View"], Sequence[int], Sequence[Agreement]], tuple[list[int], int]]  # lengths, and steps


@dataclass
class View:
    """A sequence that is written again; see ``DraftView``."""

    number: int  # of its text
    text: Written
    tokens: list[int]
    params: SamplingParams
    seed: int = 0
    prediction: tuple[int, ...] = ()
    constraint: None = None
    behind: int = 0  # tokens that the drafter has not read
    rounds: int = 0
    seconds: float = 0.0  # its share of the rounds it took part in

    @staticmethod
    def of(number: int, text: Written, rule: Verification | None) -> View:
        params = SamplingParams(
            temperature=text.temperature, max_tokens=len(text.answer), verification=rule if text.temperature else None
        )
        first = list(text.ids[: text.prompt + 1])  # the answer's first token comes with the reading of the prompt
        return View(number, text, first, params, behind=len(first))

    @property
    def id(self) -> str:
        return f"replay-{self.number}"

    @property
    def prompt_length(self) -> int:
        return self.text.prompt

    @property
    def start(self) -> int:
        """The next token of the answer."""
        return len(self.tokens) - self.text.prompt

    @property
    def left(self) -> int:
        return len(self.text.ids) - len(self.tokens)


class Guesses(Protocol):
    """Who drafts in a replay. A guess comes with how much of it the target would accept."""

    @property
    def steps(self) -> int:
        """That the last draft took, one whose token was not kept in the end included."""

    def begin(self, views: Sequence[View]) -> None:
        """These sequences begin."""

    def propose(self, views: Sequence[View], budgets: Sequence[int]) -> list[tuple[Proposal, int] | None]:
        """A draft of at most ``budgets[i]`` tokens for each, and how many of them hold."""

    def release(self, view: View) -> None:
        """It is written to its end."""


class ByDrafter:
    """The drafter itself, over the target's text: for guesses that are deterministic."""

    def __init__(self, drafter: Drafter, begin: Callable[[Sequence[View]], None], end: Callable[[View], None]) -> None:
        """``begin`` and ``end``: what a drafter that reads the target's hidden states needs (``predict``)."""
        self.drafter, self._begin, self._end = drafter, begin, end
        self._head, self.steps = drafter.halves()[1].head(), 0

    def begin(self, views: Sequence[View]) -> None:
        self._begin(views)

    def propose(self, views: Sequence[View], budgets: Sequence[int]) -> list[tuple[Proposal, int] | None]:
        asked = [view for view, budget in zip(views, budgets, strict=True) if budget]
        if not asked:
            return [None] * len(views)
        self.drafter.catch_up(asked)
        found = self.drafter.propose(list(views), list(budgets))
        self.steps = self._head.steps if self._head is not None else 0
        return [(p, _kept(view, p)) if p is not None and len(p) else None for view, p in zip(views, found, strict=True)]

    def release(self, view: View) -> None:
        self.drafter.release(view.id)
        self._end(view)


def _kept(view: View, proposal: Proposal) -> int:
    """How many levels of a draft the text goes along with."""
    node, kept = -1, 0
    for token in view.text.ids[len(view.tokens) :]:
        children = [i for i, parent in enumerate(proposal.parents) if parent == node and proposal.tokens[i] == token]
        if not children:
            break
        node, kept = children[0], kept + 1
    return kept


class ByAgreement:
    """A draft whose agreement along each text is known (``agreement``): no model runs."""

    def __init__(
        self, found: dict[Written, Agreement], rule: Verification | None, ends: Ends | None = None, seed: int = 0
    ) -> None:
        """``ends``: where a drafter ends its drafts itself."""
        self._found, self._rule, self._ends, self.steps = found, rule, ends, 0
        self._random = random.Random(seed)

    def begin(self, views: Sequence[View]) -> None:
        return None

    def propose(self, views: Sequence[View], budgets: Sequence[int]) -> list[tuple[Proposal, int] | None]:
        known = [self._found[view.text] for view in views]
        lengths, self.steps = (list(budgets), max(budgets)) if self._ends is None else self._ends(views, budgets, known)
        return [
            (Proposal.chain([0] * length), self._held(one, view.start, length)) if length else None
            for view, one, length in zip(views, known, lengths, strict=True)
        ]

    def release(self, view: View) -> None:
        return None

    def _held(self, found: Agreement, start: int, length: int) -> int:
        chances = reached(found, start, length, None if found.greedy else self._rule)
        draw = self._random.random()
        return sum(draw < chance for chance in chances)


class TogetherWith:
    """A copier beside a draft that costs time, as ``PortfolioDrafter`` asks them."""

    def __init__(self, copier: ByDrafter, costly: ByAgreement, budgets: Callable[..., list[int]]) -> None:
        self._copier, self._costly, self._budgets = copier, costly, budgets

    @property
    def steps(self) -> int:
        return self._costly.steps

    def begin(self, views: Sequence[View]) -> None:
        self._copier.begin(views)

    def propose(self, views: Sequence[View], budgets: Sequence[int]) -> list[tuple[Proposal, int] | None]:
        copied = self._copier.propose(views, budgets)
        left = [0 if guess is not None else limit for guess, limit in zip(copied, budgets, strict=True)]
        if not any(left):
            return copied
        drafted = self._costly.propose(views, self._budgets(views, left))
        paid = [None if guess is None else (replace(guess[0], paid=True), guess[1]) for guess in drafted]
        return [guess if guess is not None else other for guess, other in zip(copied, paid, strict=True)]

    def release(self, view: View) -> None:
        self._copier.release(view)


def ends_together(least: Callable[[], float]) -> Ends:
    """A draft model's way to end drafts (``drafters.model``): all rows together, when what they may still win summed up
    is less than ``least``."""

    def lengths(views: Sequence[View], budgets: Sequence[int], known: Sequence[Agreement]) -> tuple[list[int], int]:
        enough, length, chances = least(), 1, [1.0] * len(views)
        while enough and length < max(budgets):
            places = [min(length - 1, len(view.text.answer) - view.start - 1) for view in views]
            chances = [
                chance * one.at(one.hope, view.start, place)
                for chance, one, view, place in zip(chances, known, views, places, strict=True)
            ]
            if sum(chance for chance, budget in zip(chances, budgets, strict=True) if budget > length) < enough:
                break
            length += 1
        found = [min(budget, length) if enough else budget for budget in budgets]
        return found, max(found)

    return lengths


def ends_each(least: Callable[[int], LeastChances]) -> Ends:
    """A head's way (``drafters.head``): each row by the chance that its next token is reached at all."""

    def lengths(views: Sequence[View], budgets: Sequence[int], known: Sequence[Agreement]) -> tuple[list[int], int]:
        needed = least(max(1, sum(budget > 0 for budget in budgets)))
        firsts = (one.at(one.hope, v.start, 0) for v, b, one in zip(views, budgets, known, strict=True) if b and v.left)
        first = min(needed.first, max(firsts, default=0.0))
        found, steps = [], 0
        for view, budget, one in zip(views, budgets, known, strict=True):
            chance, length = 1.0, budget
            for place in range(min(budget, view.left)):
                steps = max(steps, place + 1)
                chance *= one.at(one.hope, view.start, place)
                kept = needed.kept if place else first
                if chance < max(kept, needed.followed):
                    length = place + (chance >= kept)
                    break
            found.append(length)
        return found, steps

    return lengths
