"""The checks of a certificate, one function for each kind of question.

Knows: what is asked of an engine, what the answer is held against, and what goes into the record. Does not know: which
checks make up a certificate, or in which order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any

import numpy as np

from ...engine.engine import Engine
from ...types import SamplingParams
from ..budget import Budget
from .audit import Answer, Audit, audited, tampered
from .certificate import Check, Control
from .engines import Engines
from .evidence import FIRST, MORE, Plan, Tested
from .laws import FirstTokens, Place, along
from .running import Asked, Company, Exercise, answers
from .stress import Overconfident, Recorder, StressDrafter
from .truth import Truth, processed, target_law

__all__ = ["Examiner", "Given"]

DISTANCES = (0.05, 0.1, 0.2)  # total variations whose power is told
PILOT = 100  # outcomes after which the time that more will take is known
LEAST = 200  # outcomes of a test, however slow the machine is
DRAFTED = 2  # tokens of a round of the drafter that is often wrong
AGAIN = 1 << 40  # where the seeds of a repetition begin

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Given:
    """Requests of one kind."""

    name: str  # of the check
    settings: str  # in words
    asked: Sequence[Asked]

    @property
    def params(self) -> SamplingParams:
        return self.asked[0].params


@dataclass
class Examiner:
    """Asks engines and writes down what came."""

    engines: Engines
    truth: Truth
    plan: Plan
    tell: Tell
    seed: int = 0
    checks: list[Check] = field(default_factory=list)
    controls: list[Control] = field(default_factory=list)
    _known: dict[object, Audit] = field(default_factory=dict)  # answers that were audited before
    _told: float = 0.0

    # -- the same tokens as plain passes give

    def ids(self, given: Given, company: Company, engine: Engine | None = None, *, drafts: bool = True) -> list[Answer]:
        """Greedy and coupled answers, token by token. ``drafts``: nothing is tested where none are made."""
        engine, started = engine or self.engines.engine, monotonic()
        self._say(f"{given.name}, {given.settings}, {company}")
        found, exercise = answers(engine, given.asked, company, self._step)
        audit = Audit()
        for answer in found:
            audit += self._audited(answer)
        wrong = list(audit.first_wrong)
        fault = self._unexercised(exercise, engine) if drafts else None
        self.checks.append(
            Check(
                name=given.name,
                settings=given.settings,
                rule="greedy" if given.params.greedy else "coupled",
                company=company,
                backend=self.engines.backend(engine, given.params),
                drafter=engine.parts.drafter_name or "none" if drafts else "none",
                verdict="fails" if audit.wrong else "not exercised" if fault else "holds",
                compared=audit.positions + audit.logprobs,
                ties=audit.ties,
                widest_tie=audit.widest_tie,
                by_kernels=audit.by_kernels,
                seconds=monotonic() - started,
                found=tuple([*wrong, fault] if fault else wrong),
                **_exercised(exercise),
            )
        )
        return found

    def _audited(self, answer: Answer) -> Audit:
        """The same answer to the same question is looked at once."""
        logprobs = tuple((each.token_id, each.logprob) for each in answer.logprobs or ())
        key = (answer.prompt, answer.tokens, answer.seed, repr(answer.params), logprobs)
        if key not in self._known:
            self._known[key] = audited(answer, self.truth)
            self._step()
        return self._known[key]

    def tampered(self, found: Sequence[Answer], name: str) -> None:
        """The control of ``ids``."""
        audit = audited(tampered(found, self.truth), self.truth)
        self.controls.append(
            Control(
                name=f"{name}, tampered with",
                what="one token of an answer is the target's second choice",
                test=name,
                rejected=audit.wrong > 0,
                needed=True,
                samples=audit.positions,
                note="" if audit.wrong else "the second choice was within rounding of the first",
            )
        )

    # -- the same distribution

    def first_tokens(self, law: FirstTokens, rule: str, settings: str, budget: Budget, most: int, *, own: bool) -> None:
        """The joint distribution of the first tokens behind a prompt: by the drafter that serves, or (not ``own``) by
        one that is often wrong."""
        name = f"first tokens, {settings}, {rule}"
        self._say(name)
        started, params = monotonic(), replace(law.params, verification=rule)  # type: ignore[arg-type]
        exercise = Exercise()

        def sampled(engine: Engine, first_seed: int, count: int) -> list[Answer]:
            asked = [Asked(law.prompt, replace(params, seed=first_seed + i)) for i in range(count)]
            found, did = answers(engine, asked, "together", self._step)
            exercise.add(did)
            return found

        engine = self.engines.engine if own else self.engines.of(self._stress(law, self.seed), gamma=DRAFTED)
        drawn = sampled(engine, self.seed, min(PILOT, most))
        affordable = int(PILOT * budget.left / max(monotonic() - started, 1e-3)) if budget.seconds is not None else most
        count = min(most, max(LEAST, affordable))
        drawn += sampled(engine, self.seed + len(drawn), count - len(drawn))
        first, again = self._tested(law, drawn), None
        if first.p_value < FIRST and not self.plan.fails(first.p_value):
            self._say(f"{name}: once more, with {MORE * count} samples")
            if not own:
                engine = self.engines.of(self._stress(law, self.seed + AGAIN), gamma=DRAFTED)
            again = self._tested(law, sampled(engine, self.seed + AGAIN, MORE * count))
        given = Given("first tokens", settings, [Asked(law.prompt, params)])
        self._record(given, rule, engine, (first, again), exercise, started)

    def disagreements(self, candidates: Sequence[Place], params: SamplingParams) -> Place:
        """Of these places the one behind which there is the most to correct of the drafter that serves."""
        drafter = self.engines.drafter
        assert drafter is not None
        self._say("where the drafter disagrees with the target")
        recorder = Recorder(drafter, self.engines.width)
        engine = self.engines.of(recorder)
        answers(engine, [Asked(place.tokens, replace(params, seed=self.seed)) for place in candidates], step=self._step)
        best, furthest = candidates[0], -1.0
        for text, q in recorder.seen.items():
            place = next((each for each in candidates if each.tokens in (text, text[:-1])), None)
            if place is None:
                continue
            output = list(text[len(place.tokens) :])
            x = processed(self.truth.after(text, len(text))[0], params, place.tokens, output)
            p = target_law(x, params).p
            distance = float(np.abs(p - q.numpy()[: len(p)]).sum()) / 2
            worth = distance * (1 - distance) * (1 - float((p**2).sum()))  # wrong, and still accepted now and then
            if worth > furthest:
                best, furthest = place, worth
        return best

    def _tested(self, law: FirstTokens, drawn: Sequence[Answer]) -> Tested:
        return law.test([answer.tokens for answer in drawn], strict=self.truth.exact)

    def _stress(self, law: FirstTokens, seed: int) -> StressDrafter:
        return StressDrafter(law.prompt, law.drafts(), self.engines.width, seed + 7)

    def overconfident(self, law: FirstTokens, rule: str, settings: str, most: int, *, own: bool) -> None:
        """Its control: the same drafts, said to come from another distribution, so that too many are accepted."""
        self._say(f"the control of first tokens ({rule})")
        drafter = self.engines.drafter if own else self._stress(law, self.seed)
        assert drafter is not None
        engine = self.engines.of(Overconfident(drafter, self.engines.width), gamma=None if own else DRAFTED)
        params = replace(law.params, verification=rule)  # type: ignore[arg-type]
        taken: list[Answer] = []
        tested = Tested(0.0, 0, 1.0, 0)
        while len(taken) < most and not self.plan.fails(tested.p_value):
            asked = [Asked(law.prompt, replace(params, seed=self.seed + len(taken) + i)) for i in range(PILOT // 2)]
            taken += answers(engine, asked, "together", self._step)[0]
            tested = self._tested(law, taken)
        rejected = self.plan.fails(tested.p_value)
        who = self.engines.engine.parts.drafter_name if own else "stress"
        self.controls.append(
            Control(
                name=f"accepts too often, {rule}, drafter {who}",
                what="drafts are said to be drawn from half of their distribution and half of anything: p / q doubles",
                test=f"first tokens, {settings}, {rule}",
                rejected=rejected,
                needed=not own,
                p_value=tested.p_value,
                samples=tested.samples,
                note="" if rejected else "its drafts agree so well that accepting them too often hardly shows",
            )
        )

    def texts(self, given: Given, rule: str, budget: Budget, most: int) -> None:
        """Every token along sampled texts, by the drafter that serves. ``most``: texts of each prompt."""
        engine, started, exercise = self.engines.engine, monotonic(), Exercise()
        self._say(f"{given.name}, {given.settings}, {rule}")
        drawn = self._texts(engine, given, rule, self.seed, 1, exercise)
        tested = along(drawn, self.truth)
        spent = max(monotonic() - started, 1e-3)
        times = most if budget.seconds is None else min(most, max(2, int(budget.left / spent) + 1))
        drawn += self._texts(engine, given, rule, self.seed + 1000, times - 1, exercise)
        tested, again = along(drawn, self.truth), None
        if tested.p_value < FIRST and not self.plan.fails(tested.p_value):
            self._say(f"{given.name}, {given.settings}, {rule}: once more, with {MORE * times} texts of each prompt")
            again = along(self._texts(engine, given, rule, self.seed + AGAIN, MORE * times, exercise), self.truth)
        self._record(given, rule, engine, (tested, again), exercise, started)

    def _texts(
        self, engine: Engine, given: Given, rule: str, first: int, times: int, exercise: Exercise
    ) -> list[Answer]:
        asked = [
            replace(one, params=replace(one.params, verification=rule, seed=first + 1000 * time + i))  # type: ignore[arg-type]
            for time in range(times)
            for i, one in enumerate(given.asked)
        ]
        found, did = answers(engine, asked, "together", self._step)
        exercise.add(did)
        return found

    def _record(
        self,
        given: Given,
        rule: str,
        engine: Engine,
        tested: tuple[Tested, Tested | None],
        exercise: Exercise,
        started: float,
    ) -> None:
        first, again = tested
        fails = self.plan.fails(first.p_value, again.p_value if again is not None else None)
        fault = self._unexercised(exercise, engine)
        wrong = []
        if first.impossible:
            wrong.append(f"{first.impossible} of {first.samples} outcomes cannot come from the target at all")
        if fails:
            told = f"p = {first.p_value:.2g}" + (f", once more p = {again.p_value:.2g}" if again is not None else "")
            wrong.append(f"the distribution is another one ({told})")
        self.checks.append(
            Check(
                name=given.name,
                settings=given.settings,
                rule=rule,
                company="together",
                backend=self.engines.backend(engine, replace(given.params, verification=rule)),  # type: ignore[arg-type]
                drafter=engine.parts.drafter_name or "none",
                verdict="fails" if fails else "not exercised" if fault else "holds",
                compared=first.samples + (again.samples if again is not None else 0),
                p_value=first.p_value,
                again=again.p_value if again is not None else None,
                statistic=first.statistic,
                degrees=first.degrees,
                detectable=self.plan.detectable(first.samples, first.degrees, excused=first.excused),
                power={f"{d:g}": self.plan.power(first.samples, first.degrees, d, first.excused) for d in DISTANCES},
                excused=first.excused,
                seconds=monotonic() - started,
                found=tuple([*wrong, fault] if fault else wrong),
                **_exercised(exercise),
            )
        )

    # -- small things

    def _unexercised(self, exercise: Exercise, engine: Engine) -> str | None:
        if engine.parts.inactive is not None:
            return engine.parts.inactive
        if engine.parts.drafter is None:
            return None
        return None if exercise.drafted else "nothing was drafted, so nothing was tested"

    def _say(self, text: str) -> None:
        self._text, self._told = text, 0.0
        self._step()

    def _step(self) -> None:
        """Whoever waits is told a few times a second."""
        if monotonic() - self._told > 0.2:
            self._told = monotonic()
            self.tell(self._text)


def _exercised(exercise: Exercise) -> dict[str, Any]:
    names = ("drafted", "accepted", "rejections")
    return {name: getattr(exercise, name) for name in names} | {"rows": exercise.widest}
