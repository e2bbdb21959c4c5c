"""Asks the drafter for guesses, where it runs on the host.

Knows: how long a guess may be, and that a drafter may be anybody's code. Does not know: who guesses, or how.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import takewhile
from time import perf_counter

from ..config import MAX_GAMMA
from ..types import Proposal
from .context import RoundContext
from .node_masks import held
from .outcome import Rows
from .proposal_check import checked
from .sequence import Sequence

__all__ = ["Drafted", "HostDrafts"]

FEW = 4  # forced tokens; behind fewer the drafter may know more


@dataclass(frozen=True)
class Drafted:
    """A guess for each row, None where there is none, and the time that took."""

    proposals: list[Proposal | None]
    seconds: float = 0.0
    catch_up_seconds: float = 0.0  # before that: reading what the drafter lacked


class HostDrafts:
    """Guesses for the coming round. Players may ask more than once: the same text is guessed about only once."""

    def __init__(self, context: RoundContext) -> None:
        self._context = context
        self._known: tuple[tuple[Sequence, int], ...] = ()  # an id may come again with another text
        self._found = Drafted([])

    def ask(self, rows: Rows) -> Drafted:
        """What the drafter says of these sequences, as far as they are committed."""
        text = tuple((s, len(s.tokens)) for s in rows.sequences)
        if text != self._known:
            self._known, self._found = text, _draft(self._context, rows.sequences)
        return self._found

    def predicted(self, rows: Rows) -> bool:
        """Is there a guess from somebody's prediction, which the drafter itself would not make?"""
        return any(guess is not None for guess in _predicted(self._context, rows.sequences))

    def likely(self, rows: Rows) -> bool:
        """Would there be a guess? One that costs time, or is drawn at random, is not made only to find that out."""
        context = self._context
        if context.drafter is None:
            return False
        if context.drafter.free:
            return any(proposal is not None for proposal in self.ask(rows).proposals)
        limits = _limits(context, rows.sequences)
        return any(limits) and any(context.controller.budgets(rows.sequences, limits))

    def take(self, rows: Rows) -> Drafted:
        """The same, to be verified now; it is not given twice."""
        found = self.ask(rows)
        self.forget()
        return found

    def forget(self) -> None:
        self._known = ()


def _draft(context: RoundContext, sequences: list[Sequence]) -> Drafted:
    """A drafter that fails, or proposes nonsense, is dropped for good: the text goes on without it."""
    nothing: list[Proposal | None] = [None] * len(sequences)
    limits = _limits(context, sequences)
    if context.drafter is None or not any(limits):
        return Drafted(nothing)
    try:
        started = perf_counter()
        expected = _expected(context, sequences, limits)
        budgets = context.controller.budgets(sequences, _rest(context, limits, expected))
        if not any(budgets) and expected == nothing:
            return Drafted(nothing)
        before = level = perf_counter()
        found = nothing
        if any(budgets):
            context.drafter.catch_up([s for s, budget in zip(sequences, budgets, strict=True) if budget])
            level = perf_counter()
            found = checked(
                context.drafter.propose(list(sequences), list(budgets)),
                budgets,
                width=context.runner.vocab_size,
                device=context.runner.device,
                sound_q=context.drafter.sound_q,
            )
        if found == nothing == expected:
            return Drafted(nothing, perf_counter() - level + before - started, level - before)
        found = [held(sequence, guess) for sequence, guess in zip(sequences, found, strict=True)]
        found = [_longer(mine, guess) for mine, guess in zip(expected, found, strict=True)]
        found = context.controller.trim(sequences, found)
        return Drafted(found, perf_counter() - level + before - started, level - before)
    except Exception as error:
        context.drop_drafter(error)
        return Drafted(nothing)


def _expected(context: RoundContext, sequences: list[Sequence], limits: list[int]) -> list[Proposal | None]:
    """Guesses that need no drafter: what grammars leave no choice about, and predictions."""
    if not any(s.constraint is not None or s.prediction for s in sequences):
        return [None] * len(sequences)
    found: list[Proposal | None] = []
    for sequence, limit, guess in zip(sequences, limits, _predicted(context, sequences), strict=True):
        forced = sequence.constraint.forced(min(limit, context.max_gamma)) if sequence.constraint is not None else ()
        forced = tuple(takewhile(lambda token: token < context.vocab_size, forced))
        only = replace(Proposal.chain(forced), forced=True) if forced and limit else None
        found.append(_longer(only, held(sequence, guess)))
    return found


def _longer(one: Proposal | None, other: Proposal | None) -> Proposal | None:
    """The first, unless it is forced and the other one goes on behind it."""
    if one is None or other is None:
        return one if one is not None else other
    if one.forced and len(other) > len(one) and other.is_chain and other.tokens[: len(one)] == one.tokens:
        return other
    return one


def _predicted(context: RoundContext, sequences: list[Sequence]) -> list[Proposal | None]:
    """Guesses from predictions, beside a drafter that does not read them."""
    if context.drafter is None or context.drafter.reads_predictions or not any(s.prediction for s in sequences):
        return [None] * len(sequences)
    most = [min(limit, context.max_gamma) for limit in _limits(context, sequences)]
    return context.predictions.propose(sequences, most)


def _rest(context: RoundContext, limits: list[int], expected: list[Proposal | None]) -> list[int]:
    """What is left to the drafter. One that drafts on the device does not do so from the host, too, in a round that has
    other guesses: that takes longer than the captured round after it."""
    on_device = context.captured is not None and context.captured.drafting
    if on_device and any(guess is not None for guess in expected):
        return [0] * len(limits)
    done = [guess is not None and not (guess.forced and len(guess) < FEW) for guess in expected]
    return [0 if known else limit for limit, known in zip(limits, done, strict=True)]


def _limits(context: RoundContext, sequences: list[Sequence]) -> list[int]:
    """The most tokens worth drafting: a round emits one more than it drafts, and all must fit.

    Whether a draft is a tree, or the neighbour of one in a batch, is known when it is drawn, and a drawn token must
    not be dropped: so every draft keeps to what the runner takes of a tree.
    """
    nodes = context.runner.most_nodes
    most = max(0, nodes - 1) if nodes is not None else MAX_GAMMA
    return [min(most, max(0, s.remaining - 1)) if s.params.speculate else 0 for s in sequences]
