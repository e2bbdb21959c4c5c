"""Rounds played again over text that is already written: what drafts and controller would have done, and how long.

Knows: the order of a round and a clock that goes by measured costs. Does not know: which tokens a draft gets right
(``guesses``), how costs are measured (``round_costs``), or what becomes of the figures.

The controller is the one that serves, and the drafter, where it runs on the host, too; only the target is not there:
its word is the text. So what is predicted is what would happen, with the clock of a machine that does nothing else. The
controller is told other times than that clock's: single rounds scatter as they did when they were measured, and a
controller holds back now and then for no other reason.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, cycle, islice

from ..config import EngineConfig
from ..control.controller import Controller
from ..sampling import Verification
from ..types import Proposal, Round
from .agreement import Written
from .guesses import Guesses, View
from .round_costs import RoundCosts

__all__ = ["Played", "replay"]

NEAR = 8  # tokens that a drafter reads along with its first step (``AdaptiveController.NEAR``)


@dataclass
class Played:
    """What came of a replay."""

    tokens: int = 0  # but the first of each answer, which comes with its prompt's reading
    seconds: float = 0.0
    rounds: int = 0
    row_rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    draft_seconds: float = 0.0
    gammas: dict[int, int] = field(default_factory=dict)  # draft length of the widest row: rounds
    each: dict[int, float] = field(default_factory=dict)  # of each text, its share of the seconds

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def tau(self) -> float:
        return self.tokens / self.row_rounds if self.row_rounds else 0.0

    @property
    def alpha(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0


def replay(
    texts: Sequence[Written],
    guesses: Guesses | None,
    controller: Controller | None,
    costs: RoundCosts,
    *,
    rows: int,
    rule: Verification | None = None,
    cold: Callable[[], None] | None = None,
    seed: int = 0,
    chunk: int = EngineConfig.prefill_chunk,
) -> Played:
    """Write the texts again, ``rows`` at a time, each batch from its beginning to the end of its longest.

    ``costs`` says on which kind of machine. ``cold``: called before each batch, where every batch begins as new.
    ``seed``: where in the measured scatter of rounds it begins. ``chunk``: tokens of prompts that are read before the
    rows that have begun get a round.
    """
    played, scatter = Played(), costs.scatter(rows)
    times = islice(cycle(scatter), random.Random(seed).randrange(len(scatter)), None)
    for first in range(0, len(texts), rows):
        if cold is not None:
            cold()
        views = [View.of(first + i, text, rule) for i, text in enumerate(texts[first : first + rows])]
        _Batch(views, guesses, controller, costs, played, times).play(chunk)
    return played


class _Batch:
    """Some texts that begin together."""

    def __init__(
        self,
        views: list[View],
        guesses: Guesses | None,
        controller: Controller | None,
        costs: RoundCosts,
        out: Played,
        times: Iterator[float],
    ) -> None:
        self.views, self.guesses, self.controller, self.costs, self.out = views, guesses, controller, costs, out
        self.times = times  # what rounds are said to take, over what they take
        self.flight: int | None = None  # the draft length of the round that a device was given ahead
        self.waits = False  # was the round that is played not launched ahead, though it could have been?

    def play(self, chunk: int) -> None:
        """Until all have begun, nothing is counted, as when it is measured. A row that begins early is ahead by then,
        the more the better its draft is, and the last ones end the batch alone."""
        if self.guesses is not None:
            self.guesses.begin(self.views)
        everyone, self.views, out, self.out = self.views, [], self.out, Played()
        read = list(accumulate(view.prompt_length for view in everyone))
        for step in range(-(-read[-1] // chunk)):
            self._begin(
                [v for v, tokens in zip(everyone, read, strict=True) if step * chunk < tokens <= (step + 1) * chunk]
            )
            if (step + 1) * chunk < read[-1] and self.views:
                self._round()
                self._leave()
        self.out, out.each = out, out.each | dict.fromkeys(self.out.each, 0.0)
        for view in self.views:
            view.seconds = 0.0
        while self.views:
            self._round()
            self._leave()

    def _begin(self, views: list[View]) -> None:
        """The target reads their prompts whoever drafts, so that is not counted."""
        self.views += views
        if self.controller is not None and views:
            seconds = self.costs.prefill(len(views)) * sum(view.prompt_length for view in views)
            read = [Round(v.id, 0, 0, 1, len(views), 1, v.prompt_length - 1, 0.0, seconds, seconds) for v in views]
            self.controller.observe(read)
        self.flight = None
        self._leave()

    def _leave(self) -> None:
        for view in [view for view in self.views if view.left <= 0]:
            self.out.each[view.number] = view.seconds
            self.views.remove(view)
            self.flight = None
            if self.guesses is not None:
                self.guesses.release(view)
            if self.controller is not None:
                self.controller.forget(view.id)

    def _round(self) -> None:
        drafts: list[tuple[Proposal, int] | None] = [None] * len(self.views)
        if self.guesses is not None and self.controller is not None:
            self.controller.line(0)
            drafts = self._on_device() if self.costs.lengths is not None else self._on_host()
        elif self.costs.buckets is not None:
            self._launch(0, 0)
        width = self.costs.width([len(draft[0]) if draft is not None else 0 for draft in drafts])
        paid = [draft is not None and (draft[0].paid or not self.costs.free) for draft in drafts]
        longest = max((len(d[0]) for d, p in zip(drafts, paid, strict=True) if d is not None and p), default=0)
        rows = len(self.views)
        timed = width > 1 or self.costs.lengths is None  # where drafts are made on the device: as rounds with them
        forward, gap = self.costs.forward(rows, width), self.costs.gap(rows) * (self.waits and timed)
        steps = max(longest, self.guesses.steps) if self.guesses is not None and longest else longest
        drafting = self.costs.draft(rows, steps)
        missing = [view.behind for view, p in zip(self.views, paid, strict=True) if p and view.behind > NEAR]
        reading = self.costs.reading(len(missing)) * sum(missing)
        records = [self._commit(view, draft, p) for view, draft, p in zip(self.views, drafts, paid, strict=True)]
        self._count(records, forward, drafting, reading, gap)

    def _on_host(self) -> list[tuple[Proposal, int] | None]:
        assert self.guesses is not None
        assert self.controller is not None
        limits = [max(0, view.left - 1) for view in self.views]
        if not any(limits):
            return [None] * len(limits)
        budgets = self.controller.budgets(self.views, limits)
        drafts = self.guesses.propose(self.views, budgets) if any(budgets) else [None] * len(limits)
        trimmed = self.controller.trim(self.views, [draft[0] if draft is not None else None for draft in drafts])
        return [
            (short, min(draft[1], len(short))) if short is not None and draft is not None else None
            for short, draft in zip(trimmed, drafts, strict=True)
        ]

    def _on_device(self) -> list[tuple[Proposal, int] | None]:
        """A draft model in captured rounds: all rows draft alike, and a round is launched before the last one is read,
        so that what is decided now holds for the next one."""
        assert self.guesses is not None
        assert self.controller is not None
        assert self.costs.lengths is not None
        wanted = max(self.controller.budgets(self.views, [self.costs.lengths[-1]] * len(self.views)))
        gamma = max(length for length in self.costs.lengths if length <= wanted)
        now = gamma if self.flight is None else self.flight
        self._launch(now, gamma)
        return self.guesses.propose(self.views, [now] * len(self.views)) if now else [None] * len(self.views)

    def _launch(self, now: int, gamma: int) -> None:
        """The next round goes to the device ahead of this one's result, unless some row may be near its end or drafting
        begins or ends (``CapturedRounds.play``)."""
        ending = any(view.left <= now + 1 for view in self.views)
        self.waits = self.flight is None
        self.flight = gamma if bool(now) == bool(gamma) and not ending else None

    def _commit(self, view: View, draft: tuple[Proposal, int] | None, paid: bool) -> Round:
        length, held = (len(draft[0]), min(draft[1], view.left)) if draft is not None else (0, 0)
        emitted = min(held + 1, view.left)
        view.tokens.extend(view.text.ids[len(view.tokens) : len(view.tokens) + emitted])
        view.behind = 0 if paid else view.behind + emitted
        proposal = draft[0] if draft is not None else None
        return Round(
            view.id,
            length,
            min(held, emitted),
            emitted,
            len(self.views),
            0,
            0,
            0.0,
            0.0,
            0.0,
            outcomes=(True,) * held + (False,) * (held < length),
            strength=proposal.strength if proposal is not None else 0,
            paid=proposal is not None and proposal.paid,
        )

    def _count(self, records: list[Round], forward: float, drafting: float, reading: float, gap: float) -> None:
        out, width = self.out, 1 + max(record.drafted for record in records)
        seconds = forward + drafting + reading + gap
        apart = reading if self.costs.reads_apart else 0.0
        if self.controller is not None:
            told = {"draft_seconds": drafting + reading - apart, "verify_seconds": forward}
            told |= {"round_seconds": seconds, "catch_up_seconds": apart}
            times = next(self.times)
            told = {name: times * each for name, each in told.items()}
            tokens = sum(1 + record.drafted for record in records) if self.costs.ragged else 0
            self.controller.observe([replace(r, width=width, tokens=tokens, **told) for r in records])  # type: ignore[arg-type]
        out.rounds += 1
        out.row_rounds += len(records)
        out.tokens += sum(record.emitted for record in records)
        out.drafted += sum(record.drafted for record in records)
        out.accepted += sum(record.accepted for record in records)
        out.seconds += seconds
        out.draft_seconds += drafting + reading
        out.gammas[width - 1] = out.gammas.get(width - 1, 0) + 1
        for view in self.views:
            view.rounds += 1
            view.seconds += seconds / len(self.views)
