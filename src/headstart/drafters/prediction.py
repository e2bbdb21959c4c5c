"""Draft from the text that a request's caller expects in the answer (``prediction``).

Knows: the expected text, and where in it an answer stands. Does not know: any model, or other ways to draft.

An answer is taken to begin as expected. While it goes on as expected, the place is known. When it says something else,
the place is looked for again after every token: where do the answer's last tokens stand in the expected text? The
longest match wins; of several, the one nearest to the place that was lost, since an edit mostly goes on behind itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from ..maths.limits import LONG_MATCH, MAX_STRENGTH
from ..types import DraftView, Proposal
from .base import Drafter

__all__ = ["MAX_PREDICTION", "Prediction", "PredictionDrafter"]

MAX_PREDICTION = 32_768  # tokens of a prediction that are looked at: it comes from outside
_BEHIND, _AHEAD = 256, 2048  # tokens around the place that was lost among which it is looked for


class Prediction:
    """One answer's place in the text that was expected."""

    def __init__(self, expected: Sequence[int]) -> None:
        self.expected = list(expected[:MAX_PREDICTION])
        self.read = 0  # tokens of the answer that were looked at
        self._at = 0  # the next expected token
        self._run = LONG_MATCH  # tokens before it that were as expected; that an answer begins so is likely, not sure
        self._lost = False
        self._home = 0  # the last place that was sure

    def follow(self, answer: Sequence[int]) -> None:
        """The answer so far."""
        for token in answer[self.read :]:
            if not self._lost and self._at < len(self.expected) and self.expected[self._at] == token:
                self._at += 1
                self._run += 1
            else:
                self._lost = True
        self.read = len(answer)
        if self._lost and answer:
            self._seek(answer)
        elif self._run >= LONG_MATCH:
            self._home = self._at

    def guess(self, budget: int) -> tuple[int, list[int]]:
        """How many tokens speak for it, and what should come next: nothing where the place is not known."""
        if self._lost:
            return 0, []
        found = list(takewhile(lambda token: token >= 0, self.expected[self._at : self._at + budget]))
        return min(self._run, MAX_STRENGTH), found

    def _seek(self, answer: Sequence[int]) -> None:
        """Find the place again, by the answer's last tokens."""
        last, best = answer[-1], (0, 0)
        at, stop = max(0, self._home - _BEHIND), min(len(self.expected), self._home + _AHEAD)
        while True:
            try:
                at = self.expected.index(last, at, stop)
            except ValueError:
                break
            far = at - self._home if at >= self._home else 2 * (self._home - at)
            if (found := (self._match(answer, at), -far)) > best:
                best, self._at = found, at + 1
            at += 1
        self._run, self._lost = best[0], best[0] == 0

    def _match(self, answer: Sequence[int], at: int) -> int:
        """How many of the answer's last tokens stand in the expected text up to ``at``."""
        most = min(len(answer), at + 1, MAX_STRENGTH)
        return next((n for n in range(most) if answer[-1 - n] != self.expected[at - n]), most)


class PredictionDrafter(Drafter):
    """Copies from the prediction alone, for requests that have one. It stands beside drafters that do not."""

    name = "prediction"
    free = True
    reads_predictions = True

    def __init__(self, min_match: int = LONG_MATCH) -> None:
        """``min_match``: the fewest tokens that must speak for a guess."""
        self.min_match = min_match
        self._known: dict[str, Prediction] = {}

    def propose(self, views: Sequence[DraftView], budgets: Sequence[int]) -> list[Proposal | None]:
        return [self.guess(view, budget) for view, budget in zip(views, budgets, strict=True)]

    def guess(self, view: DraftView, budget: int) -> Proposal | None:
        """What the caller expects next, at most ``budget`` tokens."""
        if not view.prediction or budget <= 0:
            return None
        known, length = self._known.get(view.id), len(view.tokens) - view.prompt_length
        if known is None or known.read > length:  # shorter than it was: another sequence
            known = self._known[view.id] = Prediction(view.prediction)
        if known.read < length:
            known.follow(view.tokens[view.prompt_length :])
        strength, draft = known.guess(budget)
        if not draft or strength < self.min_match:
            return None
        return Proposal.chain(draft, strength=strength, predicted=True)

    def release(self, sequence_id: str) -> None:
        self._known.pop(sequence_id, None)

    def reset(self) -> None:
        self._known.clear()
