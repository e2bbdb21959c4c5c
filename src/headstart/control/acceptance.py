"""How often a guess holds, given that everything before it in the draft held.

Knows: what was known of a guess before anyone looked (its strength), and how such guesses fared, for everyone and for
each sequence. Does not know: what anything costs, or what a token is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..maths.cost import reach
from ..maths.limits import MAX_STRENGTH
from ..types import Proposal

__all__ = ["PAID", "UNKNOWN", "Acceptance"]

UNKNOWN = 0  # a free guess whose drafter does not say how sure it is
PAID = -1  # a guess whose every token cost time: how many there are was settled before, whatever its drafter says of it

_PRIORS = {PAID: 0.7, UNKNOWN: 0.5}  # a model's guess starts as good as a long match
_PRIOR_WEIGHT = 2.0


class _Hits:
    """A share of guesses that held; old evidence fades."""

    FADE = 0.98

    def __init__(self, prior: float, weight: float) -> None:
        self.hits, self.tries = prior * weight, weight

    def add(self, hit: bool) -> None:
        self.hits = self.hits * self.FADE + hit
        self.tries = self.tries * self.FADE + 1

    @property
    def rate(self) -> float:
        return self.hits / self.tries


class Acceptance:
    """Kept by strength: for everyone, and by sequence, because texts differ more than drafts do."""

    OWN_WEIGHT = 6.0  # how many shared tries count as much as one sequence's own record

    def __init__(self) -> None:
        self._shared: dict[int, _Hits] = {}
        self._own: dict[str, dict[int, _Hits]] = {}

    def __contains__(self, sequence_id: object) -> bool:
        return sequence_id in self._own

    def add(self, sequence_id: str, strength: int, outcomes: Sequence[bool]) -> None:
        """What became of one draft, level by level."""
        for ahead, hit in enumerate(outcomes):
            grown = _grown(strength, ahead)
            self._own_hits(sequence_id, grown).add(hit)
            self._shared_hits(grown).add(hit)

    def forget(self, sequence_id: str) -> None:
        self._own.pop(sequence_id, None)

    def rate(self, strength: int) -> float:
        """Of everyone's guesses of this strength."""
        return self._shared_hits(strength).rate

    def chances(self, sequence_id: str, strength: int, length: int) -> list[float]:
        """A_1 .. A_length: the chance that the first i guesses all hold."""
        own = self._own.get(sequence_id, {})
        grown = (_grown(strength, ahead) for ahead in range(length))
        return reach([(own.get(each) or self._shared_hits(each)).rate for each in grown], length)

    def chances_of(self, sequence_id: str, proposal: Proposal, *, paid: bool) -> list[float]:
        """What each of a proposal's tokens is expected to add. Those of a tree share their level's chance."""
        strength = PAID if paid else proposal.strength
        if proposal.is_chain:
            return self.chances(sequence_id, strength, len(proposal))
        depths: list[int] = []
        for parent in proposal.parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        by_level = self.chances(sequence_id, strength, max(depths) + 1)
        nodes = Counter(depths)
        return [by_level[depth] / nodes[depth] for depth in depths]

    def _shared_hits(self, strength: int) -> _Hits:
        found = self._shared.get(strength)
        if found is None:  # a longer match is a better guess
            prior = _PRIORS.get(strength, min(0.9, 0.25 + 0.12 * strength))
            found = self._shared[strength] = _Hits(prior, _PRIOR_WEIGHT)
        return found

    def _own_hits(self, sequence_id: str, strength: int) -> _Hits:
        own = self._own.setdefault(sequence_id, {})
        if strength not in own:
            own[strength] = _Hits(self._shared_hits(strength).rate, self.OWN_WEIGHT)
        return own[strength]


def _grown(strength: int, ahead: int) -> int:
    """A copied match gets longer with every token that holds; what is unknown stays unknown."""
    return min(strength + ahead, MAX_STRENGTH) if strength > UNKNOWN else strength
