"""How many tokens to draft now, for each sequence; zero is an answer.

Knows: ``Round`` records, and from them what a forward of each width costs and how often a guess holds.
Does not know: models, drafters' insides or token values.

Losslessness: the draft length may depend on anything known before the tokens were drawn, never on the value
of a token that was drawn at random. ``budgets`` is called before drafting. ``trim`` is called after it, but only
for drafters whose guesses are deterministic (``Drafter.free``), where a shorter guess is simply another
deterministic guess.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Protocol

from .config import DraftConfig
from .maths.draft_cost import DraftSeconds, slope
from .types import DraftView, Proposal, Round

__all__ = ["AdaptiveController", "Controller", "FixedController", "TwoMinds", "controller_for"]

MAX_STRENGTH = 16  # longer matches are as good as this one


class Controller(Protocol):
    """Chooses draft lengths and learns from what came of them."""

    def budgets(self, views: Sequence[DraftView], limits: Sequence[int]) -> list[int]:
        """Tokens to draft for each sequence, at most ``limits[i]``. Before drafting."""

    def paid_budgets(self, views: Sequence[DraftView], limits: Sequence[int]) -> list[int]:
        """The same for a drafter whose tokens cost time, whatever the drafter in charge is."""

    def trim(self, views: Sequence[DraftView], proposals: Sequence[Proposal | None]) -> list[Proposal | None]:
        """Cut deterministic guesses of known strength to what is worth verifying. After drafting."""

    def observe(self, rounds: Sequence[Round]) -> None:
        """Learn from one round: a record for each of its sequences."""

    def least_hope(self) -> float:
        """How likely to be accepted, summed over the rows, one more drafted token must be to be worth its time."""

    def least_kept(self) -> float:
        """The same for a token that is drafted already, and now is worth verifying or not."""

    def forget(self, sequence_id: str) -> None:
        """The sequence is gone."""

    def reason(self) -> str | None:
        """Why speculation is held back just now, for people; None while it is not."""


def controller_for(config: DraftConfig, *, free: bool, ends_itself: bool = False) -> Controller:
    """The controller that the settings ask for. ``free``: the drafter's guesses cost nothing. ``ends_itself``: it ends
    a draft that is not likely enough to hold (see ``least_hope``)."""
    if config.gamma == "auto":
        greedy, drawn = (AdaptiveController(config.max_gamma, free=free, ends_itself=ends_itself) for _ in "ab")
        return TwoMinds(greedy, drawn)
    return FixedController(config.gamma)


class FixedController:
    """Always the same draft length."""

    def __init__(self, gamma: int) -> None:
        self.gamma = gamma

    def budgets(self, views: Sequence[DraftView], limits: Sequence[int]) -> list[int]:
        return [min(self.gamma, limit) for limit in limits]

    paid_budgets = budgets

    def trim(self, views: Sequence[DraftView], proposals: Sequence[Proposal | None]) -> list[Proposal | None]:
        return list(proposals)

    def observe(self, rounds: Sequence[Round]) -> None:
        pass

    def least_hope(self) -> float:
        return 0.0

    least_kept = least_hope

    def forget(self, sequence_id: str) -> None:
        pass

    def reason(self) -> str | None:
        return None


class TwoMinds:
    """One controller for rounds whose rows are all greedy, another for the rest.

    Drawn tokens cost more to draft and to judge and hold less often: what one kind taught must not put the other off.
    """

    def __init__(self, greedy: Controller, drawn: Controller) -> None:
        self._greedy, self._drawn = greedy, drawn
        self._now = greedy  # whose round it is: a round is observed before the next one's budgets are asked for

    def _turn(self, views: Sequence[DraftView]) -> Controller:
        self._now = self._greedy if all(view.params.greedy for view in views) else self._drawn
        return self._now

    def budgets(self, views: Sequence[DraftView], limits: Sequence[int]) -> list[int]:
        return self._turn(views).budgets(views, limits)

    def paid_budgets(self, views: Sequence[DraftView], limits: Sequence[int]) -> list[int]:
        return self._turn(views).paid_budgets(views, limits)

    def trim(self, views: Sequence[DraftView], proposals: Sequence[Proposal | None]) -> list[Proposal | None]:
        return self._turn(views).trim(views, proposals)

    def observe(self, rounds: Sequence[Round]) -> None:
        self._now.observe(rounds)

    def least_hope(self) -> float:
        return self._now.least_hope()

    def least_kept(self) -> float:
        return self._now.least_kept()

    def forget(self, sequence_id: str) -> None:
        self._greedy.forget(sequence_id)
        self._drawn.forget(sequence_id)

    def reason(self) -> str | None:
        return self._now.reason()


class _Costs:
    """Seconds a round takes without drafting, by (rows, width), measured as it goes: the median of the last few.

    A measurement is forgotten after a while, so that one taken in a bad moment does not rule a width out for good. The
    first of a width, but for plain rounds, is not counted: what is done for the first time takes longer (a GPU loads
    a recording when it is first played), and a width that looks dear is not tried again soon.
    """

    WINDOW, LIFETIME = 7, 200

    def __init__(self) -> None:
        self._seen: dict[int, dict[int, deque[tuple[int, float]]]] = {}
        self._tables: dict[int, list[tuple[int, float, int]]] = {}  # what ``table`` said since the last measurement
        self._slopes: dict[int, float] = {}  # and ``slope``
        self._met: set[tuple[int, int]] = set()
        self._clock = 0

    def add(self, rows: int, width: int, seconds: float) -> None:
        self._clock += 1
        if width > 1 and (rows, width) not in self._met:
            self._met.add((rows, width))
            return
        self._tables.clear()
        self._slopes.clear()
        by_width = self._seen.setdefault(rows, {})
        by_width.setdefault(width, deque(maxlen=self.WINDOW)).append((self._clock, seconds))
        for stale in [w for w, seen in by_width.items() if w > 1 and seen[-1][0] < self._clock - self.LIFETIME]:
            del by_width[stale]

    def table(self, rows: int) -> list[tuple[int, float, int]]:
        """(width, seconds, measurements), by width, for the measured number of rows nearest to ``rows``; empty if none.

        Only tables with a plain round (width 1) and something to compare it with are borrowed from another
        number of rows.
        """
        if rows not in self._tables:
            self._tables[rows] = self._table(rows)
        return self._tables[rows]

    def slope(self, rows: int) -> float:
        """Seconds that each token more takes."""
        if rows not in self._slopes:
            self._slopes[rows] = max(0.0, slope(self.table(rows)))
        return self._slopes[rows]

    def _table(self, rows: int) -> list[tuple[int, float, int]]:
        own = self._seen.get(rows, {})
        if 1 not in own or len(own) == 1:
            others = [r for r, known in self._seen.items() if 1 in known and len(known) > 1]
            if others:
                own = self._seen[min(others, key=lambda r: abs(r - rows))]
        if 1 not in own:
            return []
        return sorted((width, median(seconds for _, seconds in seen), len(seen)) for width, seen in own.items())


def _by_width(table: Sequence[tuple[int, float, int]], widest: int) -> list[float]:
    """Seconds of widths 1 .. ``widest``: linear between measured ones, flat beyond them, so that an unknown width gets
    tried. The first width measured is 1."""
    found = [table[0][1]]
    for (below, low, _), (above, high, _) in pairwise(table):
        step = (high - low) / (above - below)
        found += [low + step * (width - below) for width in range(below + 1, above + 1)]
    return found[:widest] + [table[-1][1]] * (widest - len(found))


class _Hits:
    """How often a guess held, given that everything before it in the draft held; old evidence fades."""

    FADE = 0.98

    def __init__(self, prior: float, weight: float) -> None:
        self.hits, self.tries = prior * weight, weight

    def add(self, hit: bool) -> None:
        self.hits = self.hits * self.FADE + hit
        self.tries = self.tries * self.FADE + 1

    @property
    def rate(self) -> float:
        return self.hits / self.tries


class AdaptiveController:
    """Drafts as far as it pays, by measured costs and measured acceptance.

    Expected tokens of a round with draft length g: tau(g) = 1 + sum_i A_i, A_i the chance that the first i guesses
    all hold. Seconds: a draft of g tokens, and what a round g + 1 wide takes besides. The round's width is
    chosen for all its rows together, since they share the forward. Acceptance is kept by the guess's ``strength``
    for everyone, and by sequence, because texts differ more than drafts do.
    """

    PROBE_EVERY = 24  # rounds without a draft before a sequence gets to try again
    WORTH_IT = 1.03  # a draft must promise this much over plain decoding: what it rests on is measured, and errs
    OWN_WEIGHT = 6.0  # how many shared tries count as much as one sequence's own record

    def __init__(self, max_gamma: int, *, free: bool = False, ends_itself: bool = False) -> None:
        self.max_gamma = max_gamma
        self.free = free
        self.ends_itself = ends_itself
        self._costs = _Costs()
        self._drafting = DraftSeconds()
        self._pace: deque[tuple[int, float]] = deque(maxlen=15)  # tokens and seconds of the last rounds
        self._rows = 1
        self._shared: dict[int, _Hits] = {}
        self._own: dict[str, dict[int, _Hits]] = {}
        self._idle: dict[str, int] = {}  # rounds since a sequence last had a draft
        self._awake: set[str] = set()  # sequences whose costly drafter was asked in their last round
        self._reason: str | None = None

    def budgets(self, views: Sequence[DraftView], limits: Sequence[int]) -> list[int]:
        if self.free:
            return [min(limit, self.max_gamma) for limit in limits]  # decided in trim, when the guesses are known
        return self.paid_budgets(views, limits)

    def paid_budgets(self, views: Sequence[DraftView], limits: Sequence[int]) -> list[int]:
        limits = [min(limit, self.max_gamma) for limit in limits]
        chances = [self._chances(view.id, 0, limit) for view, limit in zip(views, limits, strict=True)]
        width = self._best_width(chances, *self._drafting.line())
        if width and self.ends_itself and self._drafting:
            return limits  # whether to draft is settled here, how far at every token
        return self._with_probes(views, [min(width, limit) for limit in limits], limits)

    def trim(self, views: Sequence[DraftView], proposals: Sequence[Proposal | None]) -> list[Proposal | None]:
        chances = [
            self._chances(view.id, p.strength, len(p)) if p is not None else []
            for view, p in zip(views, proposals, strict=True)
        ]
        width = self._best_width(chances, 0.0, 0.0)
        limits = [len(p) if p is not None else 0 for p in proposals]
        keep = self._with_probes(views, [min(width, limit) for limit in limits], limits)
        # A guess of unknown strength was paid for beforehand, and may have been drawn at random: it stays whole.
        known = [p is not None and p.strength > 0 and p.draw == "point" for p in proposals]
        return [_cut(p, n) if k else p for p, n, k in zip(proposals, keep, known, strict=True)]

    def observe(self, rounds: Sequence[Round]) -> None:
        if not rounds:
            return
        first = rounds[0]
        if not first.prefill:  # a forward that also carried prompt tokens says nothing about a round's cost
            # All but the drafting: judging and committing a longer draft takes longer, too.
            self._costs.add(first.rows, first.width, first.round_seconds - first.draft_seconds * (first.width > 1))
            self._pace.append((sum(r.emitted for r in rounds), first.round_seconds))
            self._rows = first.rows
        self._drafting.tick()
        paid = [r for r in rounds if r.drafted and r.strength == 0]
        # A drafter that was not asked for a while first reads what it missed (at the start, the whole prompt):
        # that is no draft step.
        if paid and all(r.sequence in self._awake for r in paid):
            self._drafting.add(max(r.drafted for r in paid), first.draft_seconds)
        for r in rounds:
            self._idle[r.sequence] = 0 if r.drafted else self._idle.get(r.sequence, 0) + 1
            (self._awake.add if r.drafted and r.strength == 0 else self._awake.discard)(r.sequence)
            for ahead, hit in enumerate(r.outcomes):
                strength = _grown(r.strength, ahead)
                self._own_hits(r.sequence, strength).add(hit)
                self._shared_hits(strength).add(hit)

    def least_hope(self) -> float:
        """One more token costs a draft step and a wider forward; in that time the rounds so far made so many tokens.

        A token's own chance is known only when its step is paid, so the last one's has to tell: divided by what the
        next one is usually worth.
        """
        pace, wider = self._pace_and_price()
        if not pace or not self._drafting:
            return 0.0
        return pace * (self._drafting.line()[1] + wider) / self._shared_hits(0).rate

    def least_kept(self) -> float:
        pace, wider = self._pace_and_price()
        return pace * wider

    def _pace_and_price(self) -> tuple[float, float]:
        """Tokens a second of the last rounds, and seconds that a wider forward takes for each token more; 0 while not
        known."""
        table = self._costs.table(self._rows)
        if not table or not self._pace:
            return 0.0, 0.0
        emitted, seconds = (sum(column) for column in zip(*self._pace, strict=True))
        return max(emitted / seconds, self._rows / table[0][1]), self._costs.slope(self._rows)

    def forget(self, sequence_id: str) -> None:
        self._own.pop(sequence_id, None)
        self._idle.pop(sequence_id, None)
        self._awake.discard(sequence_id)

    def reason(self) -> str | None:
        return self._reason

    # -- acceptance

    def _shared_hits(self, strength: int) -> _Hits:
        # A longer match is a better guess; a model's guess (strength 0) starts as good as a long match.
        prior = 0.7 if strength == 0 else min(0.9, 0.25 + 0.12 * strength)
        return self._shared.setdefault(strength, _Hits(prior, 2.0))

    def _own_hits(self, sequence_id: str, strength: int) -> _Hits:
        own = self._own.setdefault(sequence_id, {})
        if strength not in own:
            own[strength] = _Hits(self._shared_hits(strength).rate, self.OWN_WEIGHT)
        return own[strength]

    def _chances(self, sequence_id: str, strength: int, length: int) -> list[float]:
        """A_1 .. A_length: the chance that the first i guesses all hold."""
        chances, together = [], 1.0
        for ahead in range(length):
            grown = _grown(strength, ahead)
            known = self._own.get(sequence_id, {}).get(grown) or self._shared_hits(grown)
            together *= known.rate
            chances.append(together)
        return chances

    # -- cost

    def _best_width(self, chances: Sequence[Sequence[float]], start: float, step: float) -> int:
        """The draft length that gives the most tokens a second over all rows. ``start``, ``step``: seconds that any
        draft takes, and more for each of its tokens."""
        rows = len(chances)
        longest = max((len(c) for c in chances), default=0)
        table = self._costs.table(rows)
        if not table:
            return 0  # a plain round first: it costs nothing and is what every other width is compared with
        best, best_speed, plain_speed = 0, 0.0, 0.0
        emitted = float(rows)
        for gamma, forward in enumerate(_by_width(table, longest + 1)):
            if gamma:
                emitted += sum(c[gamma - 1] for c in chances if len(c) >= gamma)
            drafting = start + gamma * step if gamma else 0.0
            speed = emitted / max(forward + drafting, 1e-9)
            if gamma == 0:
                plain_speed = speed
            if speed > (best_speed if best else best_speed * self.WORTH_IT):
                best, best_speed = gamma, speed
        self._reason = None
        if best == 0 and longest:
            alpha = sum(c[0] for c in chances if c) / max(1, sum(bool(c) for c in chances))
            self._reason = (
                f"drafting does not pay now: about {alpha:.0%} of first guesses hold, "
                f"and plain decoding is expected to give {plain_speed:.1f} tokens/s"
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


def _grown(strength: int, ahead: int) -> int:
    """A copied match gets longer with every token that holds; a guess of unknown strength stays unknown."""
    return min(strength + ahead, MAX_STRENGTH) if strength else 0


def _cut(proposal: Proposal | None, n: int) -> Proposal | None:
    """The first n tokens of a chain."""
    if proposal is None or n == 0:
        return None
    if n >= len(proposal):
        return proposal
    return Proposal(proposal.tokens[:n], proposal.parents[:n], proposal.q, proposal.draw, proposal.strength)
