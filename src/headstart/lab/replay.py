"""Rounds played again over text that is already written: what drafts and controller would have done, and how long.

Knows: the order of a round, which tokens a draft gets right (``agreement``, or the written text itself), and a clock
that goes by measured costs. Does not know: how costs are measured (``round_costs``), or what becomes of the figures.

The controller is the one that serves, and the drafter, where it runs on the host, too; only the target is not there:
its word is the text. So what is predicted is what would happen, with the clock of a machine that does nothing else.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from ..control.controller import Controller
from ..drafters.base import Drafter
from ..sampling import SamplingParams, Verification
from ..types import Proposal, Round
from .agreement import Agreement, Written, reached
from .round_costs import RoundCosts

__all__ = ["ByAgreement", "ByDrafter", "Ends", "Guesses", "Played", "TogetherWith", "View", "replay"]

NEAR = 8  # tokens that a drafter reads along with its first step (``AdaptiveController.NEAR``)
Ends = Callable[[Sequence["View"], Sequence[int], Sequence[Agreement]], tuple[list[int], int]]  # lengths, and steps


@dataclass
class View:
    """A sequence that is written again; see ``DraftView``."""

    number: int  # of its text
    text: Written
    tokens: list[int]
    params: SamplingParams
    seed: int = 0
    prediction: tuple[int, ...] = ()
    constraint: None = None
    behind: int = 0  # tokens that the drafter has not read
    rounds: int = 0
    seconds: float = 0.0  # its share of the rounds it took part in

    @staticmethod
    def of(number: int, text: Written, rule: Verification | None) -> View:
        params = SamplingParams(
            temperature=text.temperature, max_tokens=len(text.answer), verification=rule if text.temperature else None
        )
        first = list(text.ids[: text.prompt + 1])  # the answer's first token comes with the reading of the prompt
        return View(number, text, first, params, behind=len(first))

    @property
    def id(self) -> str:
        return f"replay-{self.number}"

    @property
    def prompt_length(self) -> int:
        return self.text.prompt

    @property
    def start(self) -> int:
        """The next token of the answer."""
        return len(self.tokens) - self.text.prompt

    @property
    def left(self) -> int:
        return len(self.text.ids) - len(self.tokens)


class Guesses(Protocol):
    """Who drafts in a replay. A guess comes with how much of it the target would accept."""

    @property
    def steps(self) -> int:
        """That the last draft took, one whose token was not kept in the end included."""

    def begin(self, views: Sequence[View]) -> None:
        """These sequences begin."""

    def propose(self, views: Sequence[View], budgets: Sequence[int]) -> list[tuple[Proposal, int] | None]:
        """A draft of at most ``budgets[i]`` tokens for each, and how many of them hold."""

    def release(self, view: View) -> None:
        """It is written to its end."""


class ByDrafter:
    """The drafter itself, over the target's text: for guesses that are deterministic."""

    def __init__(self, drafter: Drafter, begin: Callable[[Sequence[View]], None], end: Callable[[View], None]) -> None:
        """``begin`` and ``end``: what a drafter that reads the target's hidden states needs (``predict``)."""
        self.drafter, self._begin, self._end = drafter, begin, end
        self._head, self.steps = drafter.halves()[1].head(), 0

    def begin(self, views: Sequence[View]) -> None:
        self._begin(views)

    def propose(self, views: Sequence[View], budgets: Sequence[int]) -> list[tuple[Proposal, int] | None]:
        asked = [view for view, budget in zip(views, budgets, strict=True) if budget]
        if not asked:
            return [None] * len(views)
        self.drafter.catch_up(asked)
        found = self.drafter.propose(list(views), list(budgets))
        self.steps = self._head.steps if self._head is not None else 0
        return [(p, _kept(view, p)) if p is not None and len(p) else None for view, p in zip(views, found, strict=True)]

    def release(self, view: View) -> None:
        self.drafter.release(view.id)
        self._end(view)


def _kept(view: View, proposal: Proposal) -> int:
    """How many levels of a draft the text goes along with."""
    node, kept = -1, 0
    for token in view.text.ids[len(view.tokens) :]:
        children = [i for i, parent in enumerate(proposal.parents) if parent == node and proposal.tokens[i] == token]
        if not children:
            break
        node, kept = children[0], kept + 1
    return kept


class ByAgreement:
    """A draft whose agreement along each text is known (``agreement``): no model runs."""

    def __init__(
        self, found: dict[Written, Agreement], rule: Verification | None, ends: Ends | None = None, seed: int = 0
    ) -> None:
        """``ends``: where a drafter ends its drafts itself."""
        self._found, self._rule, self._ends, self.steps = found, rule, ends, 0
        self._random = random.Random(seed)

    def begin(self, views: Sequence[View]) -> None:
        return None

    def propose(self, views: Sequence[View], budgets: Sequence[int]) -> list[tuple[Proposal, int] | None]:
        known = [self._found[view.text] for view in views]
        lengths, self.steps = (list(budgets), max(budgets)) if self._ends is None else self._ends(views, budgets, known)
        return [
            (Proposal.chain([0] * length), self._held(one, view.start, length)) if length else None
            for view, one, length in zip(views, known, lengths, strict=True)
        ]

    def release(self, view: View) -> None:
        return None

    def _held(self, found: Agreement, start: int, length: int) -> int:
        chances = reached(found, start, length, None if found.greedy else self._rule)
        draw = self._random.random()
        return sum(draw < chance for chance in chances)


class TogetherWith:
    """A copier beside a draft that costs time, as ``PortfolioDrafter`` asks them."""

    def __init__(self, copier: ByDrafter, costly: ByAgreement, budgets: Callable[..., list[int]]) -> None:
        self._copier, self._costly, self._budgets = copier, costly, budgets

    @property
    def steps(self) -> int:
        return self._costly.steps

    def begin(self, views: Sequence[View]) -> None:
        self._copier.begin(views)

    def propose(self, views: Sequence[View], budgets: Sequence[int]) -> list[tuple[Proposal, int] | None]:
        copied = self._copier.propose(views, budgets)
        left = [0 if guess is not None else limit for guess, limit in zip(copied, budgets, strict=True)]
        if not any(left):
            return copied
        drafted = self._costly.propose(views, self._budgets(views, left))
        paid = [None if guess is None else (replace(guess[0], paid=True), guess[1]) for guess in drafted]
        return [guess if guess is not None else other for guess, other in zip(copied, paid, strict=True)]

    def release(self, view: View) -> None:
        self._copier.release(view)


def ends_together(least: Callable[[], float]) -> Ends:
    """A draft model's way to end drafts (``drafters.model``): all rows together, when what they may still win summed up
    is less than ``least``."""

    def lengths(views: Sequence[View], budgets: Sequence[int], known: Sequence[Agreement]) -> tuple[list[int], int]:
        enough, length, chances = least(), 1, [1.0] * len(views)
        while enough and length < max(budgets):
            places = [min(length - 1, len(view.text.answer) - view.start - 1) for view in views]
            chances = [
                chance * one.at(one.hope, view.start, place)
                for chance, one, view, place in zip(chances, known, views, places, strict=True)
            ]
            if sum(chance for chance, budget in zip(chances, budgets, strict=True) if budget > length) < enough:
                break
            length += 1
        found = [min(budget, length) if enough else budget for budget in budgets]
        return found, max(found)

    return lengths


def ends_each(least: Callable[[int], tuple[float, float]]) -> Ends:
    """A head's way (``drafters.head``): each row by the chance that its next token is reached at all."""

    def lengths(views: Sequence[View], budgets: Sequence[int], known: Sequence[Agreement]) -> tuple[list[int], int]:
        kept, followed = least(max(1, sum(budget > 0 for budget in budgets)))
        found, steps = [], 0
        for view, budget, one in zip(views, budgets, known, strict=True):
            chance, length = 1.0, budget
            for place in range(min(budget, view.left)):
                steps = max(steps, place + 1)
                chance *= one.at(one.hope, view.start, place)
                if chance < max(kept * (place > 0), followed):
                    length = place if place and chance < kept else place + 1
                    break
            found.append(length)
        return found, steps

    return lengths


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
) -> Played:
    """Write the texts again, ``rows`` at a time, each batch from its beginning to the end of its longest.

    ``costs`` says on which kind of machine. ``cold``: called before each batch, where every batch begins as new.
    """
    played = Played()
    for first in range(0, len(texts), rows):
        if cold is not None:
            cold()
        views = [View.of(first + i, text, rule) for i, text in enumerate(texts[first : first + rows])]
        _Batch(views, guesses, controller, costs, played).play()
    return played


class _Batch:
    """Some texts that begin together."""

    def __init__(
        self, views: list[View], guesses: Guesses | None, controller: Controller | None, costs: RoundCosts, out: Played
    ) -> None:
        self.views, self.guesses, self.controller, self.costs, self.out = views, guesses, controller, costs, out
        self.flight: int | None = None  # the draft length of the round that a device was given ahead
        self.waits = False  # was the round that is played not launched ahead, though it could have been?

    def play(self) -> None:
        if self.guesses is not None:
            self.guesses.begin(self.views)
        if self.controller is not None:
            self._read_prompts(self.controller)
        self._leave()
        while self.views:
            self._round()
            self._leave()

    def _read_prompts(self, controller: Controller) -> None:
        """The target reads them whoever drafts, so that is not counted."""
        seconds = self.costs.prefill(len(self.views)) * sum(view.prompt_length for view in self.views)
        rows = len(self.views)
        read = [Round(v.id, 0, 0, 1, rows, 1, v.prompt_length - 1, 0.0, seconds, seconds) for v in self.views]
        controller.observe(read)

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
        width = 1 + max((len(draft[0]) for draft in drafts if draft is not None), default=0)
        paid = [draft is not None and (draft[0].paid or not self.costs.free) for draft in drafts]
        longest = max((len(d[0]) for d, p in zip(drafts, paid, strict=True) if d is not None and p), default=0)
        rows = len(self.views)
        forward, gap = self.costs.forward(rows, width), self.costs.gap(rows) * self.waits
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
            told = {"width": width, "draft_seconds": drafting + reading - apart, "verify_seconds": forward}
            told |= {"round_seconds": seconds, "catch_up_seconds": apart}
            self.controller.observe([replace(record, **told) for record in records])  # type: ignore[arg-type]
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
