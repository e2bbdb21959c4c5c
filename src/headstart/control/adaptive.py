"""Drafts as far as it pays, by measured costs and measured acceptance.

Knows: ``Round`` records, and from them what a forward of each width costs (``costs``) and how often a guess holds
(``acceptance``). Does not know: models, drafters' insides or token values.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ..maths.cost import best_length, break_even, by_width, round_tokens
from ..types import DraftView, Proposal, Round
from .acceptance import PAID, Acceptance
from .costs import Costs, DraftSeconds

__all__ = ["AdaptiveController"]


class AdaptiveController:
    """Drafts as far as it pays.

    By the cost model of ``maths.cost``, in seconds: a draft of gamma tokens, and what a round gamma + 1 wide takes
    besides. The round's width is chosen for all its rows together, since they share the forward.
    """

    PROBE_EVERY = 24  # rounds without a draft before a sequence gets to try again
    WORTH_IT = 1.03  # a draft must promise this much over plain decoding: what it rests on is measured, and errs

    def __init__(self, max_gamma: int, *, free: bool = False, ends_itself: bool = False) -> None:
        self.max_gamma = max_gamma
        self.meet(free=free, ends_itself=ends_itself)

    def meet(self, *, free: bool, ends_itself: bool) -> None:
        self.free, self.ends_itself = free, ends_itself
        self._costs = Costs()
        self._drafting = DraftSeconds()
        self._acceptance = Acceptance()
        self._pace: deque[tuple[int, float]] = deque(maxlen=15)  # tokens and seconds of the last rounds
        self._rows = 1
        self._idle: dict[str, int] = {}  # rounds since a sequence last had a draft
        self._awake: set[str] = set()  # sequences whose costly drafter was asked in their last round
        self._reason: str | None = None
        self._pays = False  # was any draft of this round found worth its time?

    def budgets(self, views: Sequence[DraftView], limits: Sequence[int]) -> list[int]:
        self._pays = False  # a round begins
        if self.free:
            return [min(limit, self.max_gamma) for limit in limits]  # decided in trim, when the guesses are known
        return self.paid_budgets(views, limits)

    def paid_budgets(self, views: Sequence[DraftView], limits: Sequence[int]) -> list[int]:
        limits = [min(limit, self.max_gamma) for limit in limits]
        chances = [self._acceptance.chances(view.id, PAID, limit) for view, limit in zip(views, limits, strict=True)]
        width = self._best_width(chances, *self._drafting.line())
        if width and self.ends_itself and self._drafting:
            return limits  # whether to draft is settled here, how far at every token
        return self._with_probes(views, [min(width, limit) for limit in limits], limits)

    def trim(self, views: Sequence[DraftView], proposals: Sequence[Proposal | None]) -> list[Proposal | None]:
        loose = [p is not None and not self._paid(p) and p.draw == "point" for p in proposals]  # may be cut
        if any(p is not None and not self._paid(p) and p.draw != "point" for p in proposals):
            # Drawn at random by a drafter that calls itself free: these stay whole, because a drawn token may not be
            # dropped when it is known. From the next round on ``budgets`` decides, beforehand.
            self.free = False
        if not any(loose):
            return list(proposals)
        chances = [
            self._acceptance.chances_of(view.id, p, paid=self._paid(p)) if p is not None else []
            for view, p in zip(views, proposals, strict=True)
        ]
        width = self._best_width(chances, 0.0, 0.0)
        limits = [len(p) if p is not None else 0 for p in proposals]
        keep = self._with_probes(views, [min(width, limit) for limit in limits], limits)
        return [p.cut(n) if p is not None and cut else p for p, n, cut in zip(proposals, keep, loose, strict=True)]

    def observe(self, rounds: Sequence[Round]) -> None:
        if not rounds:
            return
        first = rounds[0]
        if not first.prefill:  # a forward that also carried prompt tokens says nothing about a round's cost
            # All but the drafting: judging and committing a longer draft takes longer, too.
            seconds = first.round_seconds - first.catch_up_seconds
            self._costs.add(first.rows, first.width, seconds - first.draft_seconds * (first.width > 1))
            self._pace.append((sum(r.emitted for r in rounds), seconds))
            self._rows = first.rows
        self._drafting.tick()
        paid = [r for r in rounds if r.drafted and self._paid(r)]
        # A drafter that was not asked for a while first reads what it missed (at the start, the whole prompt):
        # that is no draft step.
        if paid and all(r.sequence in self._awake for r in paid):
            self._drafting.add(max(r.drafted for r in paid), first.draft_seconds)
        for r in rounds:
            self._idle[r.sequence] = 0 if r.drafted else self._idle.get(r.sequence, 0) + 1
            (self._awake.add if r.drafted and self._paid(r) else self._awake.discard)(r.sequence)
            self._acceptance.add(r.sequence, PAID if self._paid(r) else r.strength, r.outcomes)
        if self._pays and any(r.drafted for r in rounds):
            self._reason = None  # not by a probe: whoever reads the reason learns from it that drafting is held back

    def least_hope(self) -> float:
        """One more token costs a draft step and a wider forward; in that time the rounds so far made so many tokens.

        A token's own chance is known only when its step is paid, so the last one's has to tell: divided by what the
        next one is usually worth.
        """
        pace, wider = self._pace_and_price()
        if not pace or not self._drafting:
            return 0.0
        return break_even(self._drafting.line()[1] + wider, pace) / self._acceptance.rate(PAID)

    def least_kept(self) -> float:
        pace, wider = self._pace_and_price()
        return break_even(wider, pace)

    def least_chances(self) -> tuple[float, float]:
        return self.least_kept(), self.least_hope()

    def _pace_and_price(self) -> tuple[float, float]:
        """Tokens a second of the last rounds, and seconds that a wider forward takes for each token more; 0 while not
        known."""
        table = self._costs.table(self._rows)
        if not table or not self._pace:
            return 0.0, 0.0
        emitted, seconds = (sum(column) for column in zip(*self._pace, strict=True))
        return max(emitted / seconds, self._rows / table[0][1]), self._costs.slope(self._rows)

    def forget(self, sequence_id: str) -> None:
        self._acceptance.forget(sequence_id)
        self._idle.pop(sequence_id, None)
        self._awake.discard(sequence_id)

    def reason(self) -> str | None:
        return self._reason

    def _paid(self, guess: Proposal | Round) -> bool:
        """Was its length settled before it was drafted, because its tokens cost time?"""
        return guess.paid or not self.free

    def _best_width(self, chances: Sequence[Sequence[float]], start: float, step: float) -> int:
        """The draft length that gives the most tokens a second over all rows. ``start``, ``step``: seconds that any
        draft takes, and more for each of its tokens."""
        table, tokens = self._costs.table(len(chances)), round_tokens(chances)
        if not table or len(tokens) == 1:
            return 0  # a plain round first: it costs nothing and is what every other width is compared with
        forwards = by_width(table, len(tokens))
        drafts = [start + gamma * step if gamma else 0.0 for gamma in range(len(tokens))]
        speeds = [t / max(f + d, 1e-9) for t, f, d in zip(tokens, forwards, drafts, strict=True)]
        best = best_length(speeds, self.WORTH_IT)
        if best:
            self._pays = True
        else:
            alpha = sum(c[0] for c in chances if c) / max(1, sum(bool(c) for c in chances))
            self._reason = (
                f"drafting does not pay now: about {alpha:.0%} of first guesses hold, "
                f"and plain decoding is expected to give {speeds[0]:.1f} tokens/s"
            )
        return best

    def _with_probes(self, views: Sequence[DraftView], chosen: list[int], limits: Sequence[int]) -> list[int]:
        """Let a sequence that has not drafted for long try one short draft, so that a change is noticed."""
        if any(chosen):
            return chosen
        for i, view in enumerate(views):
            if limits[i] and self._idle.get(view.id, 0) >= self.PROBE_EVERY:
                chosen[i] = min(2, limits[i])
        return chosen
