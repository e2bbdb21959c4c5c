"""Draft by copying: what followed the last time the text went like this?

Knows: the tokens of each sequence, and the text its caller expects (``prediction``). Does not know: any model.

The longest suffix of the text that occurred before is looked up in a suffix automaton, which grows with the text. The
guess is what followed its latest occurrence. Answers that repeat the prompt (edits, summaries, questions over a
text) or themselves are guessed well, others hardly ever; the match length says which, and the controller learns
how far to trust it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from ..errors import InvalidParameter
from ..maths.limits import LONG_MATCH, MAX_STRENGTH
from ..types import DraftView, Proposal
from .base import Drafter
from .suffix import SuffixAutomaton

__all__ = ["LookupDrafter"]

MAX_PREDICTION = 32_768  # tokens of a prediction that are looked at: it comes from outside
_SEPARATOR = -1  # between prediction and prompt; equal to no token, so no match crosses it
_PREDICTION_STRENGTH = LONG_MATCH  # of the guess that an answer begins as its caller expects: likely, not sure


class LookupDrafter(Drafter):
    """Copies from the prompt, the answer so far and the prediction. No model, no training."""

    name = "lookup"
    free = True

    def __init__(self, min_match: int = 1) -> None:
        """``min_match``: the shortest match worth a guess.

        1, because guesses cost nothing and the controller trims what does not pay. Over benchmarks/prompts.jsonl
        (embedded model, greedy, drafts of 8) the first guess held in 24% of matches of length 1, 53% of length 2,
        78% of length 3 and 96% of 16 and more; 1 gave the longest acceptance length on every kind of task.
        """
        if min_match < 1:
            raise InvalidParameter("min_match", f"must be at least 1, not {min_match}")
        self.min_match = min_match
        self._indexes: dict[str, SuffixAutomaton] = {}

    def propose(self, views: Sequence[DraftView], budgets: Sequence[int]) -> list[Proposal | None]:
        return [self._guess(view, budget) if budget > 0 else None for view, budget in zip(views, budgets, strict=True)]

    def release(self, sequence_id: str) -> None:
        self._indexes.pop(sequence_id, None)

    def reset(self) -> None:
        self._indexes.clear()

    def _guess(self, view: DraftView, budget: int) -> Proposal | None:
        index = self._index(view)
        found = index.matches()
        if view.prediction and len(view.tokens) == view.prompt_length:
            found = chain([(_PREDICTION_STRENGTH, -1)], found)  # -1: it stands at the very beginning
        for length, end in found:
            if length < self.min_match:
                break
            if draft := index.continuation(end, budget):  # empty behind the last token of the prediction
                return Proposal.chain(draft, strength=min(length, MAX_STRENGTH))
        return None

    def _index(self, view: DraftView) -> SuffixAutomaton:
        """The sequence's automaton, grown by what was committed since it was last asked for."""
        ahead = min(len(view.prediction), MAX_PREDICTION) + 1 if view.prediction else 0
        index = self._indexes.get(view.id)
        if index is None or len(index) - ahead > len(view.tokens):  # shorter than it was: another sequence
            # The prediction stands before the prompt, so that what was really said wins where both match
            index = SuffixAutomaton([*view.prediction[:MAX_PREDICTION], _SEPARATOR] if ahead else ())
            self._indexes[view.id] = index
        index.extend(view.tokens[len(index) - ahead :])
        return index
