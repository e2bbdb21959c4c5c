"""How often a guess holds, given that everything before it in the draft held.

Knows: what was known of a guess before anyone looked (its strength, its place in the draft), and how such guesses
fared, for everyone and for each sequence. Does not know: what anything costs, or what a token is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import sqrt

from ..maths.limits import MAX_STRENGTH
from ..types import Proposal

__all__ = ["PAID", "UNKNOWN", "Acceptance"]

UNKNOWN = 0  # a free guess whose drafter does not say how sure it is
PAID = -1  # a guess whose every token cost time: the first of its draft; the second is PAID - 1, and so on

_DEEPEST = PAID - 7  # from here on all places in a draft count as one
_PRIORS = {PAID: 0.6, UNKNOWN: 0.5}
_PRIOR_WEIGHT = 2.5  # tries: a few failures must end what was only supposed
_MEASURED_WEIGHT = 5.0  # and what was measured over another text
_DEEPER_WEIGHT = 5.0  # tries that a place counts for which the next one is taken to be like


class _Hits:
    """A share of guesses that held; old evidence fades."""

    def __init__(self, prior: float, weight: float) -> None:
        self.hits, self.tries = prior * weight, weight

    def add(self, hit: bool, fade: float) -> None:
        self.hits = self.hits * fade + hit
        self.tries = self.tries * fade + 1

    def fade(self, by: float) -> None:
        self.hits, self.tries = self.hits * by, self.tries * by

    @property
    def rate(self) -> float:
        return self.hits / self.tries

    def doubt(self, most: float) -> None:
        if self.tries > most:
            self.hits, self.tries = self.rate * most, most


class Acceptance:
    """Kept by strength and place: for everyone, and by sequence, because texts differ more than drafts do."""

    FADE = 0.985  # of everyone's record, with each guess
    OWN_FADE = 0.98
    UNASKED = 0.9  # of the next place, when a paid draft held to its end: else a few failures would end drafts there
    OWN_WEIGHT = 6.0  # how many of a sequence's own tries count as much as everyone's record, at most
    DOUBT = 3.0, 1.5  # tries that are left of a record when things seem to have changed for the better, or worse

    def __init__(self, measured: float | None = None) -> None:
        """``measured``: acceptance rate of first tokens that cost time, if anybody knows."""
        self._shared: dict[int, _Hits] = {}
        if measured is not None:
            self._shared[PAID] = _Hits(measured, _MEASURED_WEIGHT)
        self._own: dict[str, dict[int, _Hits]] = {}
        self._rates: dict[int, float] = {}  # what ``rate`` said since the last round
        self._missed = self._spread = 0.0  # first guesses that held less often than expected lately, and the variance

    def learn(self, drafts: Sequence[tuple[str, int, Sequence[bool]]], *, probe: bool = False) -> None:
        """What became of a round's drafts: sequence, strength, and level by level whether it held.

        Two things make the record so far count for little: guesses that failed more often than chance explains, and a
        probe that held against expectation (``probe``).
        """
        drafts = [draft for draft in drafts if draft[2]]
        if not drafts:
            return
        rates = [self._rate(self._own.get(name, {}), strength) for name, strength, _ in drafts]
        held, expected = sum(outcomes[0] for _, _, outcomes in drafts), sum(rates)
        spread = sum(rate * (1 - rate) for rate in rates)
        self._missed = max(0.0, self._missed * 0.9 + expected - held)
        self._spread = self._spread * 0.9 + spread
        worse = self._missed > 2.5 * sqrt(self._spread) + 1
        if worse or (probe and held > expected + sqrt(spread)):
            self._own.clear()
            for found in self._shared.values():
                found.doubt(self.DOUBT[worse])
            self._missed = self._spread = 0.0
        self._rates.clear()
        for name, strength, outcomes in drafts:
            own = self._own.setdefault(name, {})
            for ahead, hit in enumerate(outcomes):
                key = _grown(strength, ahead)
                if key not in own:
                    tries = self._shared_hits(key).tries + _DEEPER_WEIGHT * (key < PAID)  # that ``rate`` rests on
                    own[key] = _Hits(self.rate(key), min(tries, self.OWN_WEIGHT))
                own[key].add(hit, self.OWN_FADE)
                self._shared_hits(key).add(hit, self.FADE)
            if strength < UNKNOWN and all(outcomes):
                self._shared_hits(_grown(strength, len(outcomes))).fade(self.UNASKED)
        self._rates.clear()

    def forget(self, sequence_id: str) -> None:
        self._own.pop(sequence_id, None)

    def rate(self, strength: int) -> float:
        """Of everyone's guesses of this strength; one further in a draft is supposed to be like the one before it."""
        known = self._rates.get(strength)
        if known is None:
            found = self._shared_hits(strength)
            prior, weight = (0.0, 0.0) if strength >= PAID else (self.rate(strength + 1), _DEEPER_WEIGHT)
            known = self._rates[strength] = (found.hits + prior * weight) / (found.tries + weight)
        return known

    def apart(self, sequences: Sequence[str], *, paid: bool = True) -> float:
        """How much of the difference between these sequences' own records lies in the texts and not in chance: what a
        deviation from the mean of their rates is to be taken times. 0 where nothing tells them apart; 1 for guesses
        that cost no time, whose strength says how they differ."""
        if not paid:
            return 1.0
        own = [self._own[name][PAID] for name in sequences if PAID in self._own.get(name, {})]
        tries = [max(1.0, each.tries - self.OWN_WEIGHT) for each in own]
        if len(own) < 2 or sum(tries) < self.OWN_WEIGHT * len(own):
            return 0.0
        mean = sum(each.rate for each in own) / len(own)
        weight = sum(n / each.tries for n, each in zip(tries, own, strict=True)) / len(own)  # of what was seen of each
        seen = sum((each.rate - mean) ** 2 for each in own) / (len(own) - 1) / weight**2
        chance = mean * (1 - mean) * sum(1 / n for n in tries) / len(own)
        return max(0.0, 1 - chance / seen) / weight if seen else 0.0

    def chances(self, sequence_id: str, strength: int, length: int) -> list[float]:
        """A_1 .. A_length: the chance that the first i guesses all hold."""
        own, chance, reached = self._own.get(sequence_id, {}), 1.0, list[float]()
        for ahead in range(length):  # a plain loop: it runs for every row of every round
            key = _grown(strength, ahead)
            found = own.get(key)
            chance *= found.rate if found is not None else self.rate(key)
            reached.append(chance)
        return reached

    def chances_of(self, sequence_id: str, proposal: Proposal, *, paid: bool) -> list[float]:
        """What each of a proposal's tokens is expected to add. Those of a tree share their level's chance."""
        strength = PAID if paid else proposal.strength
        if proposal.forced:
            return [1.0] * len(proposal)
        if proposal.is_chain:
            return self.chances(sequence_id, strength, len(proposal))
        depths: list[int] = []
        for parent in proposal.parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        by_level = self.chances(sequence_id, strength, max(depths) + 1)
        nodes = Counter(depths)
        return [by_level[depth] / nodes[depth] for depth in depths]

    def _rate(self, own: dict[int, _Hits], strength: int) -> float:
        found = own.get(strength)
        return found.rate if found is not None else self.rate(strength)

    def _shared_hits(self, strength: int) -> _Hits:
        found = self._shared.get(strength)
        if found is None:  # a longer match is a better guess
            prior = _PRIORS.get(strength, min(0.9, 0.25 + 0.12 * strength))
            found = self._shared[strength] = _Hits(max(0.0, prior), _PRIOR_WEIGHT if strength >= PAID else 0.0)
        return found


def _grown(strength: int, ahead: int) -> int:
    """A copied match gets longer with every token that holds, a paid draft deeper; what is unknown stays unknown."""
    if strength < UNKNOWN:
        return max(strength - ahead, _DEEPEST)
    return min(strength + ahead, MAX_STRENGTH) if strength > UNKNOWN else strength
