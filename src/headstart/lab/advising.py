"""Will it pay, and with which draft? Every candidate is measured, predicted, and the best few are run to confirm.

Knows: the order of things and how the time is shared out. Does not know: how costs (``round_costs``) or acceptance
(``agreement``) are measured, how a speed-up follows from them (``predict``), or how a report looks.

    write      the target answers some of the prompts; its text is what drafts are held against
    costs      rounds of each candidate beside plain ones, by rows and draft length
    predict    the speed-up for every draft length, number of rows and temperature asked for
    confirm    the best few beside plain decoding, on prompts that nothing was predicted from
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..config import Config
from ..errors import HeadstartError, InvalidParameter
from ..sampling import Verification
from ..types import Tell, silent
from .advice_record import SECONDS, Advice, AdviseSettings, Outlook
from .agreement import Written
from .budget import Budget
from .candidates import Candidate, candidates, checked
from .confirming import Confirmation
from .machine_facts import machine, memory
from .predict import FEW, Draft, Gamma, predict, write
from .recommending import recommended, seen
from .round_costs import LENGTHS, RoundCosts, measure_rounds, told, with_widths
from .sweep import Filler
from .symptoms import Symptom, long_prompts, memory_tight, symptoms
from .system import System, SystemOptions
from .texts import Text, choose, shipped

__all__ = ["Adviser", "advise"]

PLAIN, FILLER = "plain", "filler"
TURNS = 5  # of measuring costs
MOST_TEXTS = 64
BATCHES = 4  # that texts are written for, where there are as many prompts: each ends with its slowest row
WRITING, MEASURING, CONFIRMING = 0.15, 0.5, 0.35  # shares of the time
PLACES = 8  # of a draft whose acceptance is shown
OPENED = 0.4  # of a candidate's time, at least, that is left to measure it when it is open
SPARE = 2  # systems beside those that will be confirmed that stay open


def advise(
    options: SystemOptions | None = None,
    given: Sequence[Any] | None = None,
    texts: Sequence[Text] | None = None,
    settings: AdviseSettings | None = None,
    *,
    tell: Tell | None = None,
    **more: Any,
) -> Advice:
    """Measure candidates for a target and say which to use, if any. ``given``: drafts as ``LLM`` takes them; None: what
    the catalogue knows and is here. ``texts``: None is our sixty prompts. ``more``: fields of ``SystemOptions`` and
    ``AdviseSettings``."""
    names = AdviseSettings.__dataclass_fields__
    settings = replace(settings or AdviseSettings(), **{k: v for k, v in more.items() if k in names})
    options = (options or SystemOptions()).changed(**{k: v for k, v in more.items() if k not in names})
    with Adviser(options, given, texts, settings, tell=tell or silent) as adviser:
        adviser.run(settings.seconds)
        return adviser.result()


class Adviser:
    """One target, its candidates, and what is found out about them. ``run`` may be interrupted, and ``result`` tells
    what there is by then."""

    def __init__(
        self,
        options: SystemOptions,
        given: Sequence[Any] | None,
        texts: Sequence[Text] | None,
        settings: AdviseSettings,
        *,
        tell: Tell = silent,
        prompts: Sequence[tuple[str, Sequence[int]]] | None = None,
        plain: System | None = None,
        only: bool = False,
    ) -> None:
        """``prompts``: tasks and token ids, in the place of texts. ``plain``: the target, open already; it stays open.
        ``only``: nothing but what is given is a candidate."""
        if options.gamma != "auto":
            raise InvalidParameter("gamma", "must be 'auto' here: every draft length is looked at")
        self.settings, self._tell, self._given = settings, tell, given
        self._rows = sorted(set(settings.rows))
        self._options = options.changed(draft=None, max_rows=max(options.max_rows, *self._rows))
        self._texts = list(texts) if texts is not None else choose(shipped()) if prompts is None else []
        self._prompts, self._only, self._borrowed = prompts, only, plain is not None
        self.plain = plain if plain is not None else System.open(self._options, tell)
        self.plain.options = self.plain.hold_threads()
        self.open: dict[str, System] = {}
        self.drafts: dict[str, Draft] = {}
        self.outlooks: dict[str, Outlook] = {}
        self.candidates: dict[str, Candidate] = {}
        self.notes: list[str] = []
        self.written: dict[float, list[Written]] = {}
        self._filler: System | None = None
        self._asked: list[Candidate] = []
        self._proposals: list[str] = []
        self._confirmed: dict[tuple[int, float], Confirmation] = {}  # by rows and temperature
        self._spent = 0.0

    def __enter__(self) -> Adviser:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.drafts.clear()
        for system in (*self.open.values(), self._filler, None if self._borrowed else self.plain):
            if system is not None:
                system.close()
        self.open.clear()

    def run(self, seconds: float | None = SECONDS) -> None:
        """All of it, within the time; None: no limit."""
        budget = Budget(seconds)
        try:
            self._run(budget)
        finally:
            self._spent = budget.spent

    def _run(self, budget: Budget) -> None:
        device = self.plain.device.type
        asked, self._proposals = candidates(
            self._options.model,
            self._given,
            device=device,
            quantization=self._options.draft_quantization,
            dtype=self._options.dtype if self._options.draft_dtype is None else self._options.draft_dtype,
            tokenizer=self.plain.target.tokenizer,
        )
        self._asked = [one for one in asked if one.draft in (self._given or ())] if self._only else asked
        self._split()
        self._write(budget.part(WRITING))
        each = budget.part(MEASURING / (MEASURING + CONFIRMING))
        for number, candidate in enumerate(self._asked):
            share = each.part(1 / (len(self._asked) - number))
            self._look_at(candidate, share, f"{candidate.name} ({number + 1} of {len(self._asked)})")
        self._confirm(budget)

    # -- text

    def _split(self) -> None:
        """Every other prompt is kept to confirm with. What is too long for the context is left out."""
        most = self.plain.max_len - self.settings.tokens - 2 * Config().draft.max_gamma - 2
        lines = self._prompts
        if lines is None:
            lines = [(text.task, self.plain.ids(text)) for text in self._texts]
        found = [(task, list(ids)) for task, ids in lines if len(ids) <= most]
        if len(found) < len(lines):
            self.notes.append(f"{len(lines) - len(found)} prompts are too long for {self.plain.max_len} tokens")
        if not found:
            raise InvalidParameter("prompts", "hold nothing that fits: all are too long, or there are none")
        tasks = list(dict.fromkeys(task for task, _ in found))
        order = {task: [line for line in found if line[0] == task] for task in tasks}
        halves: tuple[list[Any], list[Any]] = ([], [])
        for index in range(max(map(len, order.values()))):
            for lines in order.values():
                if index < len(lines):
                    halves[index % 2].append(lines[index])
        self.given, self.held = halves
        if not self.held:
            self.held = self.given
            self.notes.append(
                "there are too few prompts to keep some back: predicted and measured are of the same ones"
            )

    def _write(self, budget: Budget) -> None:
        temperatures = list(dict.fromkeys(self.settings.temperatures))
        for number, temperature in enumerate(temperatures):
            share = budget.part(1 / (len(temperatures) - number))
            self._tell(f"the target writes, at temperature {temperature:g}")
            least, most = max(self._rows), max(MOST_TEXTS, BATCHES * max(self._rows))
            prompts = [self.given[i % len(self.given)] for i in range(min(most, max(len(self.given), least)))]
            self.written[temperature] = write(
                self.plain,
                prompts,
                tokens=self.settings.tokens,
                temperature=temperature,
                ignore_eos=self.settings.ignore_eos,
                late=lambda share=share: share.over,  # type: ignore[misc]
            )
            if not self.written[temperature]:
                raise HeadstartError("the target ended every answer at once: there is no text to measure drafts on")

    # -- one candidate

    def _look_at(self, candidate: Candidate, budget: Budget, told_as: str) -> None:
        self._tell(f"{told_as}: opening")
        try:
            system = self.plain.sibling(candidate.draft, self._tell, **candidate.settings)
            self.open[candidate.name] = system
            self._measure(checked(candidate, self.plain, system), system, budget, told_as)
        except Exception as error:  # a file that is no model, memory, somebody's drafter: the others are measured
            self._refuse(candidate, _said(error))

    def _measure(self, candidate: Candidate, system: System, budget: Budget, told_as: str) -> None:
        self.candidates[candidate.name] = candidate
        budget = Budget(None if budget.seconds is None else max(budget.left, OPENED * budget.seconds))
        costs, plain = self._costs(candidate, system, budget.part(0.6), told_as)
        if system.engine.parts.drafter is None:
            return self._refuse(candidate, system.engine.inactive_reason or "it does not draft")
        self.drafts[candidate.name] = Draft(system, costs, plain)
        self._predict(candidate, costs, budget, told_as)
        self._close_the_worst()

    def _refuse(self, candidate: Candidate, why: str) -> None:
        """It is no candidate any more, and its memory is free for the others."""
        self.outlooks[candidate.name] = Outlook(candidate.name, candidate.kind, candidate.notes, why)
        self.drafts.pop(candidate.name, None)
        if (system := self.open.pop(candidate.name, None)) is not None:
            system.close()

    def _costs(
        self, candidate: Candidate, system: System, budget: Budget, told_as: str
    ) -> tuple[RoundCosts, RoundCosts]:
        systems = {PLAIN: self.plain, candidate.name: system}
        drafter = system.engine.parts.drafter
        free = drafter is not None and drafter.free
        if free:  # its guesses are seldom as long as what is asked for, so widths are measured with others
            self._filler = self._filler or self.plain.sibling(Filler(), self._tell)
            systems[FILLER] = self._filler
        captured = system.engine.parts.captured
        lengths = tuple(captured.lengths) if captured is not None else LENGTHS
        found = measure_rounds(
            systems,
            [ids for _, ids in self.given],
            rows=sorted({1, *self._rows}),
            lengths=lengths,
            turns=TURNS,
            late=lambda: budget.over,
            tell=lambda text: self._tell(f"{told_as}: {text}"),
        )
        own = found[candidate.name]
        return (with_widths(own, found[FILLER]) if free else own), found[PLAIN]

    def _predict(self, candidate: Candidate, costs: RoundCosts, budget: Budget, told_as: str) -> None:
        draft, settings = self.drafts[candidate.name], self.settings
        predictions, acceptance = [], {}
        self._tell(f"{told_as}: how often it is right")
        for number, temperature in enumerate(settings.temperatures):
            places = self._places(draft, temperature, budget.part(0.5 / (len(settings.temperatures) - number)))
            if places is not None:
                acceptance[f"{temperature:g}"] = places
        # What is run in the end first: fixed lengths only where there is time.
        gammas: list[Gamma] = ["auto", *settings.gammas]
        for gamma in gammas:
            for rows in settings.rows:
                for temperature in settings.temperatures:
                    if gamma != "auto" and budget.over:
                        continue
                    self._tell(f"{told_as}: predicting, gamma {gamma}, {rows} rows, temperature {temperature:g}")
                    texts = draft.known(self.written[temperature])
                    predictions.append(predict(draft, texts, gamma=gamma, rows=rows))
        self.outlooks[candidate.name] = Outlook(
            candidate.name,
            candidate.kind,
            candidate.notes,
            acceptance=acceptance,
            costs=told(costs) | {"plain": told(draft.plain)},
            predictions=tuple(predictions),
        )

    def _places(self, draft: Draft, temperature: float, budget: Budget) -> list[float] | None:
        rule: Verification | None = "block" if temperature else None
        least = max(FEW, BATCHES * max(self._rows))  # rows that share rounds are not told from fewer texts than rows
        return draft.acceptance(self.written[temperature], PLACES, rule, lambda: budget.over, least)

    def _ranked(self, rows: int, temperature: float) -> list[str]:
        """Candidates that could be measured, the most promising first."""

        def hope(name: str) -> float:
            found = self.outlooks[name].prediction(rows, temperature)
            return found.speedup.mid if found is not None else 0.0

        return sorted((name for name, outlook in self.outlooks.items() if outlook.predictions), key=hope, reverse=True)

    def _close_the_worst(self) -> None:
        """Models are large: those that will not be run any more are closed."""
        keep = {
            name
            for rows in self.settings.rows
            for temperature in self.settings.temperatures
            for name in self._ranked(rows, temperature)[: self.settings.confirm + SPARE]
        }
        for name in [name for name in self.open if name not in keep]:
            self.drafts.pop(name, None)
            self.open.pop(name).close()

    # -- confirming

    def _confirm(self, budget: Budget) -> None:
        cells = [(rows, temperature) for rows in self.settings.rows for temperature in self.settings.temperatures]
        for number, (rows, temperature) in enumerate(cells):
            names = [name for name in self._ranked(rows, temperature)[: self.settings.confirm] if name in self.open]
            if not names:
                continue
            found = Confirmation(
                self.plain,
                {name: self.open[name] for name in names},
                [ids for _, ids in self.held],
                rows=rows,
                temperature=temperature,
                tokens=self.settings.tokens,
                ignore_eos=self.settings.ignore_eos,
            )
            self._confirmed[rows, temperature] = found
            found.run(budget.part(1 / (len(cells) - number)), self._tell)

    # -- what comes of it

    @property
    def begun(self) -> bool:
        return any(outlook.predictions for outlook in self.outlooks.values())

    def result(self, *, stopped: bool = False) -> Advice:
        """What is known by now; something must be. ``stopped``: somebody did not want to wait."""
        self._count_blocks()
        rows, temperature = self.settings.rows[0], self.settings.temperatures[0]
        texts = self.written[temperature]
        tasks = list(dict.fromkeys(text.task for text in texts))
        notes = [*self.notes, *(found.cut for found in self._confirmed.values() if found.cut is not None)]
        if stopped:
            left = [one.name for one in self._asked if one.name not in self.outlooks]
            without = f"; nothing is known of {', '.join(left)}" if left else ""
            notes.append(f"it was stopped (Ctrl-C) before its time was over{without}")
        return Advice(
            machine=machine(),
            settings=self._shown(),
            about=self.plain.facts(),
            outlooks=tuple(self.outlooks.values()),
            recommendation=recommended(self._options, self.candidates, self.outlooks, rows, temperature),
            symptoms=tuple(self._symptoms()),
            proposals=tuple(self._proposals),
            texts={task: sum(text.task == task for text in texts) for task in tasks},
            tokens=sum(len(text.answer) for text in texts),
            seconds=self._spent,
            notes=tuple(notes),
        )

    def _count_blocks(self) -> None:
        """What was run so far goes to what is known of each candidate."""
        for cell, found in self._confirmed.items():
            for name in found.systems:
                outlook, ratio, figures = self.outlooks[name], found.ratio(name), found.figures(name)
                if ratio is not None and figures is not None:
                    self.outlooks[name] = replace(
                        outlook, measured={**outlook.measured, cell: ratio}, ran={**outlook.ran, cell: figures}
                    )

    def _symptoms(self) -> list[Symptom]:
        found: dict[str, Symptom] = {}
        for outlook in self.outlooks.values():
            for rows in self.settings.rows:
                for temperature in self.settings.temperatures:
                    if (figures := seen(outlook, rows, temperature)) is not None:
                        found |= {symptom.name: symptom for symptom in symptoms(figures)}
        lengths = [len(ids) for _, ids in self.given]
        usual = sum(lengths) / len(lengths)
        reading = [draft.costs.reading(1) for draft in self.drafts.values()]
        if (symptom := long_prompts(usual, {"draft": max(reading, default=0.0), "target": self._prefill})) is not None:
            found[symptom.name] = symptom
        total = memory(self.plain.device)["total"]
        if total is not None:
            slab = self.plain.engine.parts.runner.slab
            used = self.plain.report.bytes + slab.token_bytes * slab.rows * slab.max_len
            used += max((_draft_bytes(system, slab.rows * slab.max_len) for system in self.open.values()), default=0)
            if (symptom := memory_tight(used, total, max(self._rows), self.plain.max_len)) is not None:
                found[symptom.name] = symptom
        return list(found.values())

    @property
    def _prefill(self) -> float:
        return max((draft.plain.prefill(1) for draft in self.drafts.values()), default=0.0)

    def _shown(self) -> dict[str, Any]:
        default, mine = AdviseSettings(), self.settings
        names = [name for name in mine.__dataclass_fields__ if getattr(mine, name) != getattr(default, name)]
        usual = ("rows", "temperatures", "tokens")
        return self._options.told() | {name: getattr(mine, name) for name in dict.fromkeys((*usual, *names))}


def _said(error: Exception) -> str:
    """An error as a sentence; one that is not ours with its kind."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    return text if isinstance(error, (HeadstartError, ValueError)) else f"it failed: {type(error).__name__}: {text}"


def _draft_bytes(system: System, tokens: int) -> int:
    """Its weights, and its keys for so many tokens."""
    report, drafter = system.draft_report, system.engine.parts.drafter
    weights = report.bytes if report is not None else 0
    return weights + (drafter.token_bytes * tokens if drafter is not None else 0)
