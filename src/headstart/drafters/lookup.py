"""Draft by copying: what followed the last time the text went like this?

Knows: the tokens of each sequence, and when the text its caller expects is the better guess (``prediction.py`` knows
that text). Does not know: any model.

The longest suffix of the text that occurred before is looked up in a suffix automaton, which grows with the text. The
guess is what followed its latest occurrence. Answers that repeat the prompt (edits, summaries, questions over a
text) or themselves are guessed well, others hardly ever; the match length says which, and the controller learns
how far to trust it.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import InvalidParameter
from ..maths.limits import MAX_STRENGTH
from ..types import DraftView, Proposal
from .base import Drafter
from .prediction import PredictionDrafter
from .suffix import SuffixAutomaton

__all__ = ["LookupDrafter"]


class LookupDrafter(Drafter):
    """Copies from the prompt, the answer so far and the prediction. No model, no training."""

    name = "lookup"
    free = True
    reads_predictions = True

    def __init__(self, min_match: int = 1) -> None:
        """``min_match``: the shortest match worth a guess.

        1, because guesses cost nothing and the controller trims what does not pay. Over lab/data/prompts.jsonl
        (embedded model, greedy, drafts of 8) the first guess held in 24% of matches of length 1, 53% of length 2,
        78% of length 3 and 96% of 16 and more; 1 gave the longest acceptance length on every kind of task.
        """
        if min_match < 1:
            raise InvalidParameter("min_match", f"must be at least 1, not {min_match}")
        self.min_match = min_match
        self._indexes: dict[str, SuffixAutomaton] = {}
        self._predictions = PredictionDrafter(min_match)

    def propose(self, views: Sequence[DraftView], budgets: Sequence[int]) -> list[Proposal | None]:
        return [self._guess(view, budget) if budget > 0 else None for view, budget in zip(views, budgets, strict=True)]

    def release(self, sequence_id: str) -> None:
        self._indexes.pop(sequence_id, None)
        self._predictions.release(sequence_id)

    def reset(self) -> None:
        self._indexes.clear()
        self._predictions.reset()

    def _guess(self, view: DraftView, budget: int) -> Proposal | None:
        """What speaks for itself by the longer match, the text so far or the prediction."""
        expected = self._predictions.guess(view, budget)
        index = self._index(view)
        length, end = next(index.matches(), (0, -1))
        strength = min(length, MAX_STRENGTH)
        if expected is not None and len(view.tokens) == view.prompt_length:
            return expected  # nothing was said yet that the prompt could be like
        if strength < self.min_match or (expected is not None and strength < expected.strength):
            return expected
        if expected is not None and strength == expected.strength and end < view.prompt_length:
            return expected  # what the answer itself said before wins over it, but not what the prompt says
        return Proposal.chain(index.continuation(end, budget), strength=strength)

    def _index(self, view: DraftView) -> SuffixAutomaton:
        """The sequence's automaton, grown by what was committed since it was last asked for."""
        index = self._indexes.get(view.id)
        if index is None or len(index) > len(view.tokens):  # shorter than it was: another sequence
            index = self._indexes[view.id] = SuffixAutomaton()
        index.extend(view.tokens[len(index) :])
        return index
