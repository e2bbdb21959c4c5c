"""Drafts as far as it pays, by measured costs and measured acceptance.

Knows: ``Round`` records, and from them what a forward of each width costs (``costs``), how often a guess holds
(``acceptance``) and what drafting lost so far (``probes``). Does not know: models, drafters' insides or token values.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence

from ..maths.cost import Forecast, best_length, break_even, reach, round_tokens, slope, slowest_tokens, with_draft
from ..types import DraftView, Proposal, Round
from .acceptance import PAID, Acceptance
from .costs import Beliefs, Costs, DraftSeconds, low
from .forced import cut_forced, widened
from .probes import Probes, Rest
from .why import Figures

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
    SUPPOSED = 0.1  # plain rounds that a draft step takes, where nobody knows
    USUAL_LENGTH = 256.0  # tokens of an answer, before any was seen
    SURELY, MEASURED = 2.0, 1.0  # times what it takes to begin must be won in what is left to write; with a forecast
    HOPED = 0.85  # acceptance at which a draft that was never tried must pay well, to be tried
    DOUBT = 0.15  # by which acceptance may be better than what was measured before anything was served
    DOUBTED = 3.0  # a first draft that took more times what it should is not believed
    SLOWEST, GUARD = 0.25, 2.0  # of the rows: what they lose counts so many times, while no request waits
    NEAR = 8  # tokens that a drafter reads along with its first step: no catching up
    CHUNK = 512  # tokens that a drafter which catches up reads at once, in two draft steps and what each token takes

    def __init__(self, max_gamma: int, *, free: bool = False, ends_itself: bool = False, drawn: bool = False) -> None:
        """``drawn``: for rounds in which tokens are drawn, not greedy ones."""
        self.max_gamma, self._of_drawn = max_gamma, drawn
        self._forecast: Forecast | None = None
        self._cost_ratio: float | None = None
        self._lengths: tuple[int, ...] | None = None
        self.meet(free=free, ends_itself=ends_itself)

    def meet(
        self,
        *,
        free: bool,
        ends_itself: bool,
        cost: float | None = None,
        forecast: Forecast | None = None,
        lengths: Sequence[int] | None = None,
    ) -> None:
        self.free, self.ends_itself = free, ends_itself
        self._forecast = forecast or self._forecast
        known = self._forecast
        alpha = None if known is None else known.drawn if self._of_drawn else known.greedy
        self._cost_ratio = cost if cost is not None else self._cost_ratio
        self._lengths = tuple(lengths) if lengths is not None else self._lengths
        self._costs = Costs(known.cost if known is not None else None)
        self._drafting = DraftSeconds()
        self._caught_up: deque[float] = deque(maxlen=5)  # what catching up took, over what it was supposed to take
        self._acceptance = Acceptance(alpha)
        self._hoped = self.HOPED if alpha is None else min(self.HOPED, alpha + self.DOUBT)
        self._probes = Probes()
        self._pace: deque[tuple[int, float]] = deque(maxlen=15)  # tokens and seconds of the last rounds
        self._rows = 1
        self._waiting = 0  # requests
        self._behind: dict[str, int] = {}  # tokens that the drafter has not read; unknown ones: all of the text
        self._emitted: dict[str, int] = {}  # of running sequences
        self._length = self.USUAL_LENGTH
        self._missing = 0  # tokens that the drafter has to read if the next round drafts
        self._again = 0.0  # the share of them that it did not read because it was not asked
        self._held = False  # did a guess ever hold?
        self._enough = 0.0  # the share of first guesses that must hold, for a draft of one token to pay
        self._warm = False  # did it draft at all?
        self._drafted = False  # did the last round draft?
        self._rest, self._rest_of_free = Rest(), Rest()  # from deciding on drafts that cost time, and on free guesses
        self._why = _PLAIN
        self._figures: Figures | str | None = None

    def line(self, waiting: int) -> None:
        self._waiting = waiting

    def budgets(self, views: Sequence[DraftView], limits: Sequence[int]) -> list[int]:
        self._why = _PLAIN  # a round begins
        if not self.free:
            return self.paid_budgets(views, limits)
        if self._rest_of_free.lasts([view.id for view in views]):
            return [0] * len(limits)
        return [min(limit, self.max_gamma) for limit in limits]  # decided in trim, when the guesses are known

    def paid_budgets(self, views: Sequence[DraftView], limits: Sequence[int]) -> list[int]:
        if self._cost_ratio is not None and self._cost_ratio >= self.TOO_LARGE:
            self._say(
                f"drafting does not pay: the draft model reads {self._cost_ratio:.0%} of the bytes that the target "
                f"reads for a token, and from {self.TOO_LARGE:.0%} on there is nothing to win"
            )
            return [0] * len(limits)
        names = [view.id for view in views]
        if self._rest.lasts(names):
            return [0] * len(limits)
        found = self._settled(views, [min(limit, self.max_gamma) for limit in limits])
        if not any(found) and self._figures is not None and self._lengths is None:
            self._rest.begin(self._probes.rest, names)
        return found

    def _settled(self, views: Sequence[DraftView], limits: Sequence[int]) -> list[int]:
        """Budgets of drafts that cost time."""
        chances = [self._acceptance.chances(view.id, PAID, limit) for view, limit in zip(views, limits, strict=True)]
        behind = [self._behind.get(view.id, len(view.tokens)) for view in views]
        line = self._line(len(views))
        self._missing = sum(tokens for tokens in behind if tokens > self.NEAR)
        new = sum(len(view.tokens) for view in views if view.id not in self._behind)
        self._again = 1 - new / self._missing if self._missing else 0.0
        gamma = self._choose(views, chances, *line)
        if self._why == _PAYS and self._held and self.ends_itself and self._drafting:
            return list(limits)  # whether to draft is settled here, how far at every token
        if not gamma and self._missing and self._lengths is None:
            # All together cannot be afforded: the one with the least to read. (On a device all rows draft or none.)
            least, one = min(((n, i) for i, n in enumerate(behind) if limits[i]), default=(0, -1))
            self._missing = least * (least > self.NEAR)
            drafts = least and self._choose(views, chances, *line)
            return [int(i == one) if drafts else 0 for i in range(len(views))]
        return [min(gamma, limit) for limit in limits]

    def trim(self, views: Sequence[DraftView], proposals: Sequence[Proposal | None]) -> list[Proposal | None]:
        whole, proposals = proposals, cut_forced(self._costs, views, proposals)
        loose = [p is not None and not self._paid(p) and not p.forced and p.draw == "point" for p in proposals]
        if any(p is not None and not self._paid(p) and p.draw != "point" for p in proposals):
            # Drawn at random by a drafter that calls itself free: these stay whole, because a drawn token may not be
            # dropped when it is known. From the next round on ``budgets`` decides, beforehand.
            self.free = False
        if not any(loose):
            return widened(whole, proposals)
        chances = [
            self._acceptance.chances_of(view.id, p, paid=self._paid(p)) if p is not None else []
            for view, p in zip(views, proposals, strict=True)
        ]
        self._missing = 0
        shortest = 1 if all(p is None or p.is_chain for p in proposals) else 2  # of a tree two, which may be siblings
        gamma = self._choose(views, chances, 0.0, 0.0)
        gamma = max(gamma, shortest) if gamma else 0
        paid = any(p is not None and self._paid(p) for p in proposals)
        if not gamma and self._lengths is None and not paid and self._hopeless(chances):
            self._rest_of_free.begin(self._probes.LOOK, [view.id for view in views])
        pairs = zip(proposals, loose, strict=True)
        return widened(whole, [p.cut(gamma) if p is not None and cut else p for p, cut in pairs])

    def observe(self, rounds: Sequence[Round]) -> None:
        if not rounds:
            return
        first = rounds[0]
        drafted = any(r.drafted and not r.forced for r in rounds)  # what is forced says nothing about other guesses
        paid = [r for r in rounds if r.drafted and self._paid(r)]
        if first.prefill:  # a forward that also carried prompt tokens says little about a round's cost
            self._costs.read(sum(r.prefill + r.width for r in rounds), first.verify_seconds or first.round_seconds)
        else:
            # All but what a draft model takes: judging and committing a longer draft takes longer, too. Guesses that
            # call themselves free take the host a moment, which a plain round on a device does not wait for.
            # A round that was launched ahead may be over before anybody waits for it: then the device's clock counts.
            seconds = max(first.round_seconds - first.catch_up_seconds, first.draft_seconds + first.verify_seconds)
            self._costs.add(first.rows, first.width, seconds - first.draft_seconds * bool(paid))
            self._drafting.scale(self._costs.settle())
            self._pace.append((sum(r.emitted for r in rounds), seconds))
            self._rows = first.rows
        self._drafting.tick()
        for rest in (self._rest, self._rest_of_free) if drafted else ():
            rest.end()
        if paid:
            self._time_draft(first, paid)
        probe = drafted and self._why != _PAYS
        kinds = [(r.sequence, PAID if self._paid(r) else r.strength, r.outcomes) for r in rounds if not r.forced]
        self._acceptance.learn(kinds, probe=probe)
        self._held |= any(r.accepted and not r.forced for r in rounds)
        if not drafted:
            self._probes.plain()
        elif not first.prefill:
            cost, guesses = self._cost(first, paid, probe), [held[0] for _, _, held in kinds if held]
            given = sum(r.emitted for r in rounds) / len(rounds)
            self._probes.drafted(cost, given, guesses, probe=probe, enough=self._enough)
        for r in rounds:
            self._emitted[r.sequence] = self._emitted.get(r.sequence, 0) + r.emitted
            if r.drafted and self._paid(r):
                self._behind[r.sequence] = 0
            elif r.sequence in self._behind:
                self._behind[r.sequence] += r.emitted
        self._drafted = drafted
        if self._why == _PAYS and drafted:
            self._say(None)  # not by a probe: whoever reads the reason learns from it that drafting is held back
        self._why = _PLAIN

    def min_chance_to_extend(self) -> float:
        """One more token costs a draft step and a wider forward; in that time the rounds so far made so many tokens.

        A token's own chance is known only when its step is paid, so the last one's has to tell: divided by what the
        next one is usually worth.
        """
        pace, wider = self._pace_and_price()
        if not pace or not self._drafting:
            return 0.0
        return break_even(self._line(self._rows)[1] + wider, pace) / max(self._acceptance.rate(PAID - 1), 1e-3)

    def min_chances(self) -> tuple[float, float]:
        pace, wider = self._pace_and_price()
        return break_even(wider, pace), self.min_chance_to_extend()

    def beliefs(self) -> Beliefs:
        draft = (0.0, 0.0) if self.free and not self._drafting else self._line(self._rows)
        forwards = self._costs.forwards(self._rows, self.max_gamma + 1)
        return Beliefs(self._rows, forwards, *draft) if forwards else Beliefs()

    def forget(self, sequence_id: str) -> None:
        self._acceptance.forget(sequence_id)
        self._behind.pop(sequence_id, None)
        emitted = self._emitted.pop(sequence_id, 0)
        if emitted:
            self._length += 0.1 * (emitted - self._length)

    def reason(self) -> str | None:
        return str(self._figures) if self._figures is not None else None

    # -- learning

    def _time_draft(self, first: Round, paid: Sequence[Round]) -> None:
        # A drafter that was not asked for a while may read what it missed inside its first draft: no draft step.
        longest, seconds = max(r.drafted for r in paid), first.draft_seconds
        if not self._warm:  # its very first draft touches memory and wakes threads: it may say nothing about the next
            self._warm, supposed = True, self._line(first.rows)[1] * longest
            seconds = min(seconds, self.DOUBTED * supposed) if supposed else seconds
        level = all(self._behind.get(r.sequence, self.NEAR + 1) <= self.NEAR for r in paid)
        if level or first.catch_up_seconds:
            self._drafting.add(longest, seconds / self._costs.level, first.rows)
        if (supposed := self._reading(first.rows, *self._line(first.rows))) > 0:
            self._caught_up.append(first.catch_up_seconds / supposed)

    def _cost(self, first: Round, paid: Sequence[Round], probe: bool) -> float:
        """What a round with drafts cost, in plain rounds: by what such rounds take, not by this one's clock."""
        forwards = self._costs.forwards(first.rows, first.width)
        if not forwards:
            return 0.0
        start, step = self._doubted(first.rows) if paid else (0.0, 0.0)
        seconds = forwards[-1] + start + step * (first.width - 1)
        if self._probes.tried:
            seconds += first.catch_up_seconds * (1.0 if probe else self._again)
        if not self._drafted:
            seconds += 2 * self._costs.switch
        return seconds / forwards[0]

    # -- deciding

    def _paid(self, guess: Proposal | Round) -> bool:
        """Was its length settled before it was drafted, because its tokens cost time?"""
        return guess.paid or not (self.free or guess.predicted or guess.forced)

    def _line(self, rows: int) -> tuple[float, float]:
        """Seconds that any draft takes, and more for each of its tokens."""
        table = self._costs.table(rows)
        if self._drafting:
            start, step = (seconds * self._costs.level for seconds in self._drafting.line(rows))
            if self._forecast is not None and table and self._drafting.few(rows):  # timed in a bad moment, perhaps
                step = min(step, self._forecast.cost.c * table[0][1])
            return start, step
        return 0.0, self._supposed(rows)

    def _doubted(self, rows: int) -> tuple[float, float]:
        """``_line``, or less where it is old: perhaps it was timed in a bad moment, which must not rule probes out."""
        start, step = self._line(rows)
        return (0.0, min(start + step, self._supposed(rows))) if self._drafting.old(rows) else (start, step)

    def _supposed(self, rows: int) -> float:
        """Seconds of a draft step, before one was timed."""
        table = self._costs.table(rows)
        ratio = self._forecast.cost.c if self._forecast is not None else self._cost_ratio or self.SUPPOSED
        return ratio * table[0][1] if table else 0.0

    def _reading(self, rows: int, start: float, step: float) -> float:
        """Seconds that the drafter is supposed to take to read what it missed, by what a draft and the target's own
        reading take; more or less as it turns out (``_caught_up``)."""
        table = self._costs.table(rows)
        if not table or not self._missing:
            return 0.0
        ratio = (start + step) / table[0][1]
        if self._forecast is not None and self._cost_ratio is not None:
            ratio = min(ratio, self._cost_ratio)  # many tokens are arithmetic, of which there is as much as weights
        token = self._costs.token * ratio
        return -(-self._missing // self.CHUNK) * 2 * (start + step) + token * self._missing

    def _choose(self, views: Sequence[DraftView], chances: Sequence[Sequence[float]], start: float, step: float) -> int:
        """The draft length that gives the most tokens a second over all rows, or a probe, or 0."""
        tokens, rows = round_tokens(chances), len(chances)
        forwards = self._costs.forwards(rows, len(tokens), curious=self._drafted)
        if not forwards or len(tokens) == 1 or not self._costs.timed(rows):
            return 0  # a plain round first: it costs nothing and is what every other width is compared with
        times = with_draft(forwards, start, step)
        speeds = [t / each for t, each in zip(tokens, times, strict=True)]
        lag = 0.0  # more that must hold of each row's first guess, so that the slowest ones do not lose
        if rows > 1 and not self._waiting:
            slowest = self._slowest(views, chances, tokens, paid=step > 0)
            loss = [max(0.0, 1 - each * times[0] / time) for each, time in zip(slowest, times, strict=True)]
            speeds = [speed - self.GUARD * lost * speeds[0] for speed, lost in zip(speeds, loss, strict=True)]
            lag = (tokens[1] / rows - slowest[1]) * self.GUARD / (1 + self.GUARD) * (step > 0)
        if self._lengths is not None:
            speeds = [speed if gamma in self._lengths else 0.0 for gamma, speed in enumerate(speeds)]
        # A draft that fails as a whole must not lose more than there is: where little is known, drafts are short.
        room = max(times[1], times[0] * (1 + self._probes.room))
        best = best_length([s * (each <= room) for s, each in zip(speeds, times, strict=True)], self.WORTH_IT)
        reading, once = self._once(rows, start, step)
        left, surely = sum(self._left(view) for view in views), self.SURELY
        if self._forecast is not None:
            surely = self.MEASURED
        # What it read once and missed since was its own doing, and is paid out of what may be lost.
        wins = best and (1 / speeds[0] - 1 / speeds[best]) * left > surely * once
        if wins and self._probes.room > max(0.0, reading * self._again / times[0] - self._probes.ALLOWANCE):
            self._why = _PAYS
            return best if self._held or not step else 1  # the first drafts that cost time are short
        alpha = sum(c[0] for c in chances if c) / max(1, sum(bool(c) for c in chances))
        self._say(Figures(alpha, forwards[0], forwards[1], start + step, bool(best)))
        return self._probe(forwards, start, step, left / rows, lag, rows)

    def _hopeless(self, chances: Sequence[Sequence[float]]) -> bool:
        """Would guesses like these not pay even if all of them held? Too few rows have any, or wide rounds are dear."""
        tokens = round_tokens([[1.0] * len(each) for each in chances])
        forwards = self._costs.forwards(len(chances), len(tokens))
        least = self.WORTH_IT * tokens[0] / forwards[0] if forwards else 0.0
        return self._probes.tried and all(t < least * each for t, each in zip(tokens, forwards, strict=False))

    def _once(self, rows: int, start: float, step: float) -> tuple[float, float]:
        """Seconds of reading what the drafter missed, and of all that it takes to begin."""
        reading = self._reading(rows, start, step) * (low(self._caught_up) if self._caught_up else 1.0)
        return reading, reading + 2 * self._costs.switch * (not self._drafted)

    def _probe(self, forwards: Sequence[float], start: float, step: float, left: float, lag: float, rows: int) -> int:
        """1 if a draft is to be tried that is not expected to pay. ``left``: tokens of each row; ``lag``: see
        ``_choose``."""
        if step:
            start, step = self._doubted(rows)
        times = with_draft(forwards, start, step)
        _, once = self._once(rows, start, step)
        self._enough = break_even(times[1] - times[0], 1 / times[0]) + lag
        cost, worth = (times[1] + once) / times[0] - 1, self._worth(times, left)
        # The first one also where it is little of what lies ahead, and a good draft would win much more there.
        ahead = left if not self._probes.tried and self._missing and worth * times[0] > 3 * once else 0.0
        if worth <= cost or not self._probes.due(cost, ahead, self._enough):
            return 0
        self._why = max(self._why, _PROBE)
        return 1

    def _slowest(
        self, views: Sequence[DraftView], chances: Sequence[Sequence[float]], tokens: Sequence[float], *, paid: bool
    ) -> list[float]:
        """Expected tokens of a round for each of the slowest rows, by draft length; ``tokens``: for all. Own records of
        guesses that cost time may differ by chance: only what is more than that is believed."""
        apart = self._acceptance.apart([view.id for view in views]) if paid else 1.0
        means = (each / len(chances) for each in tokens)
        slowest = slowest_tokens(chances, self.SLOWEST)
        return [mean + apart * (slow - mean) for mean, slow in zip(means, slowest, strict=True)]

    def _worth(self, times: Sequence[float], left: float) -> float:
        """Plain rounds that a good draft would win in so many tokens of each row."""
        tokens = round_tokens([reach(self._hoped, len(times) - 1)])
        speedup = max(each / time for each, time in zip(tokens, times, strict=True)) * times[0]
        return (1 - 1 / speedup) * left

    def _left(self, view: DraftView) -> float:
        """Tokens that a sequence is expected to emit yet."""
        written = len(view.tokens) - view.prompt_length
        expected = max(self._length - written, (self._length + written) / 4)
        most = view.params.max_tokens
        return expected if most is None else min(expected, most - written)

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
        return max(emitted / seconds, self._rows / table[0][1]), max(0.0, slope(table))
