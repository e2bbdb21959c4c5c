"""Drafts as far as it pays, by measured costs and measured acceptance.

Knows: ``Round`` records, and from them what a forward of each width costs (``costs``), how often a guess holds
(``acceptance``) and what drafting lost so far (``probes``). Does not know: models, drafters' insides or token values.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from math import inf

from ..maths.cost import Forecast, best_length, break_even, rounds_won, slope, with_draft
from ..types import DraftView, Proposal, Round
from .acceptance import PAID, Acceptance
from .answers import Answers
from .asking import Asking
from .choices import Choices
from .costs import Beliefs, Costs
from .draft_costs import DraftCosts
from .forced import cut_forced, widened
from .probes import Account, Probes, Rest
from .why import Figures, too_large

__all__ = ["AdaptiveController"]

log = logging.getLogger(__name__)

_PLAIN, _PROBE, _PAYS = range(3)  # why the next round drafts or does not


class AdaptiveController:
    """Drafts as far as it pays.

    By the cost model of ``maths.cost``, in seconds: a draft of gamma tokens, and what a round gamma + 1 wide takes
    besides. The round's width is chosen for all its rows together, since they share the forward: for the most tokens a
    second, and so that rows whose guesses fail are not slowed down much for the sake of others, while no request waits
    for the row that a fast one would leave. Where drafting is not expected to pay, it is tried now and then by one
    token for every row; what such probes lose is bounded (``probes``).
    """

    WORTH_IT = 1.02  # a draft must promise this much over plain decoding: what it rests on is measured, and errs
    TOO_LARGE = 0.8  # a draft that reads this share of the target's bytes for a token cannot pay
    SURELY, SURELY_RAGGED, MEASURED = 2.0, 4.0, 1.0  # times what it takes to begin must be won yet; with a forecast
    HOPED = 0.85  # acceptance at which a draft that was never tried must pay well, to be tried
    DOUBT = 0.15  # by which acceptance may be better than what was measured before anything was served
    SLOWEST, GUARD = 0.25, 2.0  # of the rows: what they lose counts so many times, while no request waits
    NEAR = 8  # tokens that a drafter reads along with its first step: no catching up

    def __init__(self, max_gamma: int, *, free: bool = False, ends_itself: bool = False, drawn: bool = False) -> None:
        """``drawn``: for rounds in which tokens are drawn, not greedy ones."""
        self.max_gamma, self._of_drawn = max_gamma, drawn
        self._forecast: Forecast | None = None
        self._cost_ratio: float | None = None
        self._lengths: tuple[int, ...] | None = None
        self._ragged = False
        self.meet(free=free, ends_itself=ends_itself)

    def meet(
        self,
        *,
        free: bool,
        ends_itself: bool,
        cost: float | None = None,
        forecast: Forecast | None = None,
        lengths: Sequence[int] | None = None,
        ragged: bool | None = None,
    ) -> None:
        self.free, self.ends_itself = free, ends_itself
        self._forecast = forecast or self._forecast
        known = self._forecast
        alpha = None if known is None else known.drawn if self._of_drawn else known.greedy
        self._cost_ratio = cost if cost is not None else self._cost_ratio
        self._lengths = tuple(lengths) if lengths is not None else self._lengths
        self._ragged = ragged if ragged is not None else self._ragged
        self._costs = Costs(known.cost if known is not None else None, ragged=self._ragged)
        self._drafting = DraftCosts(self._costs, known, self._cost_ratio)
        self._acceptance = Acceptance(alpha)
        self._hoped = self.HOPED if alpha is None else min(self.HOPED, alpha + self.DOUBT)
        self._account = Account()
        self._probes = {paid: Probes(self._account) for paid in (True, False)}  # of guesses that cost time, and others
        self._pace: deque[tuple[int, float]] = deque(maxlen=15)  # tokens and seconds of the last rounds
        self._rows, self._waiting = 1, 0  # of the last round; requests
        self._behind: dict[str, int] = {}  # tokens that the drafter has not read; unknown ones: all of the text
        self._answers = Answers()
        self._missing = 0  # tokens that the drafter has to read if the next round drafts
        self._again = 0.0  # the share of them that it did not read because it was not asked
        self._held = False  # did a guess ever hold?
        self._asked: set[str] = set()  # sequences for which this round's paid drafts were asked
        self._price = inf  # plain rounds that there must be to lose, for a draft to be made
        self._kept: dict[int, float] = {}  # by rows: guesses a row kept lately by a drafter that ends its drafts itself
        self._drafted = False  # did the last round draft?
        self._checking = False  # is it a plain round between drafted ones, to see what it takes?
        self._rest = Rest()  # from deciding on drafts that cost time
        self._asking, self._looked = Asking(), False  # for free guesses; were they asked for in this round?
        self._beside = False  # are there drafts that cost time beside free guesses?
        self._why, self._pays = _PLAIN, set[bool]()  # the latter: kinds of guesses, paid or not
        self._figures: Figures | str | None = None

    def line(self, waiting: int) -> None:
        self._waiting = waiting

    def budgets(self, views: Sequence[DraftView], limits: Sequence[int]) -> list[int]:
        self._why, self._pays = _PLAIN, set()  # a round begins
        self._asked, self._looked = set(), False
        if not self.free:
            return self.paid_budgets(views, limits)
        names = [view.id for view in views]
        if self._asking.rests(names) and (not self._beside or self._rest.lasts(names)):
            return [0] * len(limits)
        self._looked = True
        return [min(limit, self.max_gamma) for limit in limits]  # decided in trim, when the guesses are known

    def paid_budgets(self, views: Sequence[DraftView], limits: Sequence[int]) -> list[int]:
        self._beside = True
        if self._cost_ratio is not None and self._cost_ratio >= self.TOO_LARGE:
            self._say(too_large(self._cost_ratio, self.TOO_LARGE))
            return [0] * len(limits)
        if self._rest.lasts(names := [view.id for view in views]):
            return [0] * len(limits)
        found = self._settled(views, [min(limit, self.max_gamma) for limit in limits])
        if not any(found) and self._figures is not None and self._lengths is None:
            self._rest.begin(self._probes[True].rest(self._price), names)
        self._asked = {name for name, budget in zip(names, found, strict=True) if budget}
        return found

    def _settled(self, views: Sequence[DraftView], limits: Sequence[int]) -> list[int]:
        """Budgets of drafts that cost time."""
        chances = [self._acceptance.chances(view.id, PAID, limit) for view, limit in zip(views, limits, strict=True)]
        behind = [self._behind.get(view.id, len(view.tokens)) for view in views]
        line = self._drafting.line(len(views))
        self._missing = sum(tokens for tokens in behind if tokens > self.NEAR)
        new = sum(len(view.tokens) for view in views if view.id not in self._behind)
        self._again = 1 - new / self._missing if self._missing else 0.0
        found = self._choose(views, chances, *line)
        if True in self._pays and self._held and self.ends_itself and self._drafting:
            return list(limits)  # whether to draft is settled here, how far at every token
        if not any(found) and self._missing and self._lengths is None:
            # All together cannot be afforded: the one with the least to read. (On a device all rows draft or none.)
            least, one = min(((n, i) for i, n in enumerate(behind) if limits[i]), default=(0, -1))
            self._missing = least * (least > self.NEAR)
            drafts = least and any(self._choose(views, chances, *line))
            return [int(i == one) if drafts else 0 for i in range(len(views))]
        return [min(length, limit) for length, limit in zip(found, limits, strict=True)]

    def trim(self, views: Sequence[DraftView], proposals: Sequence[Proposal | None]) -> list[Proposal | None]:
        whole, proposals = proposals, cut_forced(self._costs, views, proposals)
        loose = [p is not None and not self._paid(p) and not p.forced and p.draw == "point" for p in proposals]
        if any(p is not None and not self._paid(p) and p.draw != "point" for p in proposals):
            # Drawn at random by a drafter that calls itself free: these stay whole, because a drawn token may not be
            # dropped when it is known. From the next round on ``budgets`` decides, beforehand.
            self.free = False
        chains = all(p is None or p.is_chain for p in proposals)
        if not any(loose):
            return proposals if self._ragged and chains else widened(whole, proposals)
        of = self._acceptance.chances_of
        each = zip(views, proposals, strict=True)
        chances = [of(view.id, p, paid=self._paid(p)) if p is not None else [] for view, p in each]
        self._missing = 0
        shortest = 1 if chains else 2  # of a tree two, which may be siblings
        fixed = [not cut for cut in loose] if chains else None
        lengths = [max(n, shortest) if n else 0 for n in self._choose(views, chances, 0.0, 0.0, fixed)]
        found = [p.cut(n) if p is not None and cut else p for p, cut, n in zip(proposals, loose, lengths, strict=True)]
        return found if self._ragged and chains else widened(whole, found)

    def observe(self, rounds: Sequence[Round]) -> None:
        if not rounds:
            return
        first, drafts, emitted = rounds[0], [r for r in rounds if r.drafted], sum(r.emitted for r in rounds)
        drafted = any(not r.forced for r in drafts)  # what is forced says nothing about other guesses
        paid = [r for r in drafts if self._paid(r)]
        if first.prefill:  # a forward that also carried prompt tokens says little about a round's cost
            self._costs.read(sum(r.prefill + r.width for r in rounds), first.verify_seconds or first.round_seconds)
        else:
            # All but what a draft model takes: judging and committing a longer draft takes longer, too. Guesses that
            # call themselves free take the host a moment, which a plain round on a device does not wait for.
            # A round that was launched ahead may be over before anybody waits for it: then the device's clock counts.
            seconds = max(first.round_seconds - first.catch_up_seconds, first.draft_seconds + first.verify_seconds)
            drafting = first.draft_seconds * (self._ragged or bool(paid or self._asked))
            self._costs.add(first.rows, self._costs.width(first), seconds - drafting)
            self._pace.append((emitted, seconds))
            self._rows = first.rows
        self._drafting.tick()
        if (self._looked or self._asked) and not paid and not first.prefill:
            first = replace(first, draft_seconds=self._asking.usual(first.draft_seconds, paid=bool(self._asked)))
        if self._looked and not paid and not self._asked:
            self._looked_for(first, rounds, drafted=drafted)
        if paid:
            self._rest.end(pays=True in self._pays)
            level = all(self._behind.get(r.sequence, self.NEAR + 1) <= self.NEAR for r in paid)
            longest, catch_up = max(r.drafted for r in paid), first.catch_up_seconds
            self._drafting.add(first.rows, longest, first.draft_seconds, catch_up, level=level, missing=self._missing)
            kept = sum(r.drafted for r in paid) / max(1, len(self._asked))
            self._kept[first.rows] = kept + 0.9 * (self._kept.get(first.rows, kept) - kept)
        probe = drafted and self._why != _PAYS
        kinds = [(r.sequence, PAID if self._paid(r) else r.strength, r.outcomes) for r in drafts if not r.forced]
        self._acceptance.learn(kinds, probe=probe)
        if any(r.accepted and not r.forced for r in drafts):
            self._held = True
        if not drafted and self._asked and self._lengths is None and first.draft_seconds and not first.prefill:
            self._in_vain(first)
        elif not drafted or not first.prefill:
            each = emitted / len(rounds)
            if drafted:
                self._account.drafted(*self._cost(first, paid, probe), tokens=each, paid=bool(paid))
            else:
                self._account.plain(checking=self._checking)
            for of_paid, probes in self._probes.items():
                guesses = [held[0] for _, strength, held in kinds if held and (strength == PAID) is of_paid]
                probes.add(guesses, probe=of_paid not in self._pays)
        for r in rounds:
            self._answers.add(r.sequence, r.emitted)
            if (r.drafted and self._paid(r)) or (paid and r.sequence in self._asked):
                self._behind[r.sequence] = 0  # what was asked reads along, also where nothing was likely enough
            elif r.sequence in self._behind:
                self._behind[r.sequence] += r.emitted
        self._drafted, self._checking = drafted or self._checking, False
        if self._why == _PAYS and drafted:
            self._say(None)  # not by a probe: whoever reads the reason learns from it that drafting is held back
        self._why, self._pays = _PLAIN, set()

    def min_chance_to_extend(self) -> float:
        """One more token costs a draft step and a wider forward; in that time the rounds so far made so many tokens.

        A token's own chance is known only when its step is paid, so the last one's has to tell: divided by what the
        next one is usually worth.
        """
        pace, wider = self._pace_and_price()
        if not pace or not self._drafting:
            return 0.0
        return break_even(self._drafting.line(self._rows)[1] + wider, pace) / max(self._acceptance.rate(PAID - 1), 1e-3)

    def min_chances(self) -> tuple[float, float]:
        pace, wider = self._pace_and_price()
        return break_even(wider, pace), self.min_chance_to_extend()

    def beliefs(self) -> Beliefs:
        draft = (0.0, 0.0) if self.free and not self._drafting else self._drafting.line(self._rows)
        each = self._rows if self._ragged else 1  # steps of width, for a token more a row
        forwards = self._costs.seconds(self._rows, [1 + gamma * each for gamma in range(self.max_gamma + 1)])
        return Beliefs(self._rows, forwards, *draft) if forwards else Beliefs()

    def forget(self, sequence_id: str) -> None:
        self._acceptance.forget(sequence_id)
        self._behind.pop(sequence_id, None)
        self._answers.end(sequence_id)

    def reason(self) -> str | None:
        return str(self._figures) if self._figures is not None else None

    # -- learning

    def _looked_for(self, first: Round, rounds: Sequence[Round], *, drafted: bool) -> None:
        """Free guesses were asked for: what that took, and what those brought that were verified."""
        forwards = self._costs.forwards(first.rows, self._costs.width(first))
        if first.prefill or not forwards:
            return
        took, brought = first.draft_seconds / forwards[0], 0.0
        if drafted:
            brought = sum(r.emitted for r in rounds) / len(rounds) - forwards[-1] / forwards[0]
        elif self._ragged:
            self._account.asked(took)
        self._asking.add(took, brought, [r.sequence for r in rounds])

    def _in_vain(self, first: Round) -> None:
        """Drafts were asked for that cost time, and there is none: lost as by guesses that fail."""
        table, failed = self._costs.table(first.rows), [False] * len(self._asked)
        self._account.drafted(1 + first.draft_seconds / table[0][1] if table else 1.0, tokens=1.0, paid=True)
        self._probes[True].add(failed, probe=True)
        self._probes[False].add((), probe=True)

    def _cost(self, first: Round, paid: Sequence[Round], probe: bool) -> tuple[float, float]:
        """What a round with drafts cost, in plain rounds: by what such rounds take, not by this one's clock. And what
        the drafter's reading cost, as far as it is paid out of what may be lost."""
        forwards = self._costs.forwards(first.rows, self._costs.width(first))
        if not forwards:
            return 0.0, 0.0
        start, step = self._drafting.doubted(first.rows) if paid else (0.0, 0.0)
        seconds = forwards[-1] + start + step * (first.width - 1)
        if self._ragged and not paid:
            seconds += first.draft_seconds
        reading = first.catch_up_seconds * (1.0 if probe else self._again) * self._probes[True].tried
        return (seconds + self._beginning) / forwards[0], reading / forwards[0]

    # -- deciding

    def _paid(self, guess: Proposal | Round) -> bool:
        """Was its length settled before it was drafted, because its tokens cost time?"""
        return guess.paid or not (self.free or guess.predicted or guess.forced)

    def _choose(
        self,
        views: Sequence[DraftView],
        chances: Sequence[Sequence[float]],
        start: float,
        step: float,
        fixed: Sequence[bool] | None = (),
    ) -> list[int]:
        """The draft length of each row with which all together get the most tokens a second, or a probe, or zeros.

        ``fixed``: rows that are verified whole, whatever is chosen; None: some are trees, and all will be padded."""
        rows, paid = len(chances), start + step > 0
        choices = self._choices(chances, fixed, paid=paid)
        tokens = choices.tokens
        forwards = self._costs.seconds(rows, choices.widths, curious=self._drafted)
        self._checking = self._drafted and self._costs.doubtful(rows)
        if not forwards or len(tokens) == 1 or not self._costs.timed(rows) or self._checking:
            return [0] * rows  # a plain round first: it costs nothing and is what every other width is compared with
        times = with_draft(forwards, start, step, choices.longest)
        speeds = [t / each for t, each in zip(tokens, times, strict=True)]
        guarded = rows > 1 and not self._waiting
        if guarded:
            slowest = choices.lagging(self._acceptance.apart([view.id for view in views], paid=paid))
            loss = [max(0.0, 1 - each * times[0] / time) for each, time in zip(slowest, times, strict=True)]
            speeds = [speed - self.GUARD * lost * speeds[0] for speed, lost in zip(speeds, loss, strict=True)]
        if self._lengths is not None:
            speeds = [speed if gamma in self._lengths else 0.0 for gamma, speed in enumerate(speeds)]
        # A draft that fails as a whole must not lose more than there is: where little is known, drafts are short.
        room = max(times[1], times[0] * (1 + self._account.room))
        best = best_length([s * (each <= room) for s, each in zip(speeds, times, strict=True)], self.WORTH_IT)
        reading = self._drafting.reading(rows, self._missing, start, step)
        once = reading + self._beginning
        left = sum(self._answers.left(view) for view in views)
        # Where rows differ in width, a probe of one row costs little: more is known before all of them catch up.
        surely = self.MEASURED if self._forecast is not None else self.SURELY_RAGGED if self._ragged else self.SURELY
        # What it read once and missed since was its own doing, and is paid out of what may be lost.
        wins = best and (1 / speeds[0] - 1 / speeds[best]) * left > surely * once
        self._price = max(0.0, reading * self._again / times[0] - self._account.ALLOWANCE) if wins else inf
        # What reading took is lost whatever comes now: while drafts win, it is won back by going on.
        if self._account.room > self._price or (wins and not once and self._account.wins(paid=paid)):
            self._why = _PAYS
            self._pays.add(paid)
            found = choices.lengths(best)
            return found if self._held or not paid else [min(1, n) for n in found]  # the first that cost time are short
        alpha = sum(c[0] for c in chances if c) / max(1, sum(bool(c) for c in chances))
        self._say(Figures(alpha, forwards[0], forwards[1], start + step, bool(best)))
        return self._probe(views, chances, start, step, left / rows, guarded=guarded)

    def _choices(self, chances: Sequence[Sequence[float]], fixed: Sequence[bool] | None, *, paid: bool) -> Choices:
        kept = self._kept.get(len(chances)) if self.ends_itself else None
        if not self._ragged or fixed is None or (paid and kept is None):
            # A draft model's step is paid for all rows together: what one row's longer draft saves is little beside it.
            return Choices.by_length(chances, self.SLOWEST, ragged=self._ragged)
        found = Choices.by_guess(chances, self.SLOWEST, fixed)
        return found.shortened(round(kept * len(chances))) if paid and kept is not None else found

    @property
    def _beginning(self) -> float:
        """Seconds that it takes to begin drafting and to end it again, where the last round did not draft."""
        return 2 * self._costs.switch * (not self._drafted)

    def _probe(
        self,
        views: Sequence[DraftView],
        chances: Sequence[Sequence[float]],
        start: float,
        step: float,
        left: float,
        *,
        guarded: bool,
    ) -> list[int]:
        """A token for each row if a draft is to be tried that is not expected to pay, else none. ``left``: tokens of
        each row; ``guarded``: the slowest rows must not lose, so more must hold of each row's first guess."""
        choices = Choices.by_length(chances, self.SLOWEST, ragged=self._ragged)
        rows, paid = len(chances), start + step > 0
        probes, lag = self._probes[paid], 0.0
        if guarded and paid:
            slowest = choices.lagging(self._acceptance.apart([view.id for view in views]))
            lag = (choices.tokens[1] / rows - slowest[1]) * self.GUARD / (1 + self.GUARD)
        if paid:
            start, step = self._drafting.doubted(rows)
        times = with_draft(self._costs.seconds(rows, choices.widths, curious=self._drafted), start, step)
        once = self._drafting.reading(rows, self._missing, start, step) + self._beginning
        probes.enough = break_even(times[1] - times[0], 1 / times[0]) + lag
        cost, worth = (times[1] + once) / times[0] - 1, rounds_won(times, self._hoped, left)
        # The first one also where it is little of what lies ahead, and a good draft would win much more there.
        ahead = left if not probes.tried and self._missing and worth * times[0] > 3 * once else 0.0
        if worth > cost:
            self._price = min(self._price, cost)
        if worth <= cost or not probes.due(cost, ahead):
            return [0] * rows
        self._why = max(self._why, _PROBE)
        return choices.lengths(1)

    def _say(self, figures: Figures | str | None) -> None:
        before, self._figures = self._figures, figures
        if (figures is None) != (before is None):
            log.info("no speculation: %s", figures) if figures is not None else log.info("speculation is back")

    def _pace_and_price(self) -> tuple[float, float]:
        """Tokens a second of the last rounds, and seconds that a wider forward takes for each token more; 0 while not
        known."""
        table = self._costs.table(self._rows)
        if not table or not self._pace:
            return 0.0, 0.0
        emitted, seconds = (sum(column) for column in zip(*self._pace, strict=True))
        each = self._rows if self._ragged else 1  # steps of width, for a token more a row
        return max(emitted / seconds, self._rows / table[0][1]), max(0.0, slope(table)) * each
