"""What a draft will be worth: from what rounds cost and how a draft agrees with written text, a speed-up.

Knows: how to have a system's own drafter and controller play again over text (``replay``), at any draft length, number
of rows and temperature, and how sure the outcome is. Does not know: how costs are measured, or which candidates there
are.

Two answers, from the same measurements:

    formula   S(gamma) = tau(gamma) / (gamma c + v(gamma + 1) + o) of ``maths.cost``, with the conditional acceptance by
              place over all places of the text: what it would be if every round were an average one
    replay    rounds as they would follow each other on these texts, with the controller that serves; rows that share a
              round wait for its widest, and batches end with their slowest row. This is the one that is reported
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ..control.controller import FixedController, GreedyAndSampled
from ..machine.model_runner import ModelRunner
from ..maths.cost import tau
from ..sampling import SamplingParams, Verification
from ..types import Request
from .agreement import Agreement, Written, by_place, of_head, of_model
from .guesses import ByAgreement, ByDrafter, Ends, Guesses, TogetherWith, View, ends_each, ends_together
from .replay import Played, replay
from .round_costs import RoundCosts
from .statistics import Interval, quantile
from .system import System

__all__ = ["Draft", "Prediction", "predict", "write"]

Gamma = int | Literal["auto"]
PLACES = 10  # of a head's drafts that are looked at where tokens are drawn
RESAMPLED = 400  # times that texts are drawn again for an interval
REPEATS = 3  # replays of drawn tokens
FEW = 6  # texts that a draft is held against, whatever the time
WARM = 2  # texts that are written before, so that the controller knows the machine


@dataclass(frozen=True)
class Prediction:
    """What is expected of a draft at one draft length, number of rows and temperature."""

    gamma: Gamma
    rows: int
    temperature: float
    speedup: Interval
    tau: float
    alpha: float  # accepted of drafted tokens
    draft_share: float  # of the rounds' time
    formula: float | None  # S(gamma), for a fixed gamma
    lengths: dict[int, float]  # draft length of the widest row: share of the rounds

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {
            "speedup": self.speedup.to_json(),
            "lengths": {str(n): s for n, s in self.lengths.items()},
        }


def write(
    system: System,
    prompts: Sequence[tuple[str, Sequence[int]]],
    *,
    tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    ignore_eos: bool = False,
    late: Callable[[], bool] = lambda: False,
) -> list[Written]:
    """The target's own answers to (task, prompt ids), as many at a time as there are rows. ``late``: begin no more."""
    engine, found = system.engine, list[Written]()
    rows = engine.config.max_rows
    for first in range(0, len(prompts), rows):
        if found and late():
            break
        batch = prompts[first : first + rows]
        handles = []
        for i, (_, ids) in enumerate(batch):
            drawn = {"seed": seed + first + i, "verification": "coupled"} if temperature else {}
            params = SamplingParams(
                temperature=temperature,
                max_tokens=tokens,
                ignore_eos=ignore_eos,
                speculate=False,
                **drawn,  # type: ignore[arg-type]
            )
            handles.append(engine.submit(Request(f"write-{first + i}", tuple(ids), params)))
        while not engine.idle:
            engine.step()
        for (task, ids), handle in zip(batch, handles, strict=True):
            handle.raise_failure()
            answer = handle.completion().choices[0].token_ids
            if len(answer) > 2:
                found.append(Written(task, len(ids), (*ids, *answer), temperature))
    return found


class Draft:
    """One system's drafter, and what is known of it along written texts."""

    def __init__(self, system: System, costs: RoundCosts, plain: RoundCosts) -> None:
        """``plain``: the costs of plain decoding, of a system without a drafter."""
        self.system, self.costs, self.plain = system, costs, plain
        parts = system.engine.parts
        assert parts.drafter is not None, "a system without a drafter has nothing to predict"
        assert isinstance(parts.controller, GreedyAndSampled), "gamma must be 'auto'"
        self.drafter, self.controller, self.runner = parts.drafter, parts.controller, parts.runner
        self.copier, self.costly = parts.drafter.halves()
        self.vocab_size = parts.vocab_size
        self._known: dict[Written, Agreement] = {}

    def agreement(self, text: Written, places: int = PLACES) -> Agreement | None:
        """Along one text, from a pass of each model; None: this drafter has no probabilities."""
        if text not in self._known:
            model, head = self.costly.text_model(), self.costly.head()
            if model is not None:
                self._known[text] = of_model(self.runner, model, text, self.vocab_size)
            elif head is not None:
                self._known[text] = of_head(self.runner, head, text, self.vocab_size, places)
        return self._known.get(text)

    def acceptance(
        self,
        texts: Sequence[Written],
        most: int,
        rule: Verification | None,
        late: Callable[[], bool] = lambda: False,
        least: int = FEW,
    ) -> list[float] | None:
        """a_1 .. a_most; None: this drafter has no probabilities. ``late``: look at no more texts than the least."""
        known: list[Agreement] = []
        for text in texts:
            if len(known) >= least and late():
                break
            if (found := self.agreement(text, most)) is not None:
                known.append(found)
        return by_place(known, most, rule) if known else None

    def known(self, texts: Sequence[Written]) -> list[Written]:
        """Those of the texts that rounds can be played over without another pass of the models."""
        model, head = self.costly.text_model(), self.costly.head()
        passes = model is not None or (head is not None and any(text.temperature for text in texts))
        return [text for text in texts if text in self._known or not passes]

    def replayed(self, texts: Sequence[Written], gamma: Gamma, rows: int, *, cold: bool, seed: int = 0) -> Played:
        """The texts written again with this draft."""
        drawn = texts[0].temperature > 0
        rule: Verification | None = "block" if drawn else None
        with self._deciding(gamma) as reset:
            guesses = self._guesses(texts, rule, seed)
            reset()
            try:
                if not cold:  # as in service: what was learnt before stays
                    first = texts[: max(WARM, rows)]
                    replay(first, guesses, self.controller, self.costs, rows=rows, rule=rule)
                begin = reset if cold else None
                return replay(texts, guesses, self.controller, self.costs, rows=rows, rule=rule, cold=begin, seed=seed)
            finally:
                self.system.cold()

    @contextmanager
    def _deciding(self, gamma: Gamma) -> Iterator[Callable[[], None]]:
        """The controller of this draft length; what comes back makes it forget what it learnt."""
        if gamma == "auto":
            yield lambda: self.controller.meet(free=self.drafter.free, ends_itself=self.drafter.ends_itself)
            return
        with self.controller.replaced(FixedController(gamma)):
            yield lambda: None

    def _guesses(self, texts: Sequence[Written], rule: Verification | None, seed: int) -> Guesses:
        """A draft model is asked about each text once, by one pass. Others draft as they do when they serve; where
        their guesses are drawn at random, by a pass for each place."""
        head = self.costly.head()
        if self.costly.text_model() is not None:
            return ByAgreement(self._all(texts), rule, self._ends(), seed)
        if rule is None or head is None:
            rows = _TargetRows(self.runner) if head is not None else None
            begin, end = (rows.begin, rows.end) if rows is not None else (lambda views: None, lambda view: None)
            return ByDrafter(self.drafter, begin, end)
        drawn = ByAgreement(self._all(texts), rule, self._ends(), seed)
        if self.copier is None:
            return drawn
        copier = ByDrafter(self.copier, lambda views: None, lambda view: None)
        return TogetherWith(copier, drawn, self.controller.paid_budgets)

    def _all(self, texts: Sequence[Written]) -> dict[Written, Agreement]:
        found = {text: self.agreement(text) for text in texts}
        return {text: agreement for text, agreement in found.items() if agreement is not None}

    def _ends(self) -> Ends | None:
        """How it ends drafts itself."""
        if not self.costly.ends_itself:
            return None
        head = self.costly.head()
        return (
            ends_each(head.least_chances) if head is not None else ends_together(self.controller.min_chance_to_extend)
        )


class _TargetRows:
    """The target's rows, with the hidden states of texts that are written again: one pass over each."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def begin(self, views: Sequence[View]) -> None:
        slab = self._runner.slab
        for view in views:
            slab.acquire(view.id, view.text.ids)
            slab.promote(view.id)
            row = slab.row(view.id)
            slab.truncate(row, 0)
            self._runner.prefill(row, list(view.text.ids[:-1]))

    def end(self, view: View) -> None:
        self._runner.slab.release(view.id)


def predict(
    draft: Draft, texts: Sequence[Written], *, gamma: Gamma, rows: int, cold: bool = False, seed: int = 0
) -> Prediction:
    """The speed-up over plain decoding of the same texts, by replay. ``cold``: each batch begins as just loaded."""
    texts = texts[: max(rows, len(texts) // rows * rows)]  # whole batches: a smaller one is another case
    temperature = texts[0].temperature
    repeats = REPEATS if temperature else 1
    played = [draft.replayed(texts, gamma, rows, cold=cold, seed=seed + i) for i in range(repeats)]
    base = replay(texts, None, None, draft.plain, rows=rows)
    value = sum(p.rate for p in played) / repeats / base.rate
    formula = None
    if gamma != "auto" and (a := draft.acceptance(texts, max(1, gamma), "block" if temperature else None)):
        ahead = draft.costs.times(rows, gamma)[gamma] / draft.plain.plain(rows)
        formula = tau(a, gamma) / ahead
    out = played[0]
    total = sum(out.gammas.values())
    return Prediction(
        gamma,
        rows,
        temperature,
        _interval(value, base, played),
        sum(p.tau for p in played) / repeats,
        sum(p.alpha for p in played) / repeats,
        out.draft_seconds / out.seconds if out.seconds else 0.0,
        formula,
        {length: count / total for length, count in sorted(out.gammas.items())},
    )


def _interval(value: float, base: Played, played: Sequence[Played]) -> Interval:
    """90% for other texts like these: texts drawn again, with replacement, each with its own tokens and seconds."""
    pairs = [(base.each[i], sum(p.each[i] for p in played) / len(played)) for i in base.each]
    if len(pairs) < 3:
        return Interval(value, value, value)
    chance = random.Random(0)
    found = []
    for _ in range(RESAMPLED):
        chosen = [pairs[chance.randrange(len(pairs))] for _ in pairs]
        found.append(math.log(sum(a for a, _ in chosen) / sum(b for _, b in chosen)))
    middle = math.log(sum(a for a, _ in pairs) / sum(b for _, b in pairs))
    low, high = (math.exp(quantile(found, share) - middle) for share in (0.05, 0.95))
    return Interval(value * low, value, value * high)
