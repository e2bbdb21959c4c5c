"""What would speculation be worth for a model that is not here? A model of its shape is grown and measured.

Knows: shapes, which pair is made of them, and the order of measuring. Does not know: how a model is grown (``grow``),
how costs are measured (``round_costs``), or how a speed-up follows from them (``maths.cost``, ``replay``).

Costs are those of the grown pair on this machine: its memory traffic and arithmetic are the real model's. How often a
draft holds cannot be known without the models, so the speed-up is told for several acceptance rates, as if every guess
held with that probability on its own. ``confirm`` puts noise on a draft's weights until it agrees so often and runs it.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from ..control.controller import GreedyAndSampled
from ..errors import InvalidParameter
from ..machine.load.embedded import embedded_folder
from ..machine.load.loading import load
from ..maths.cost import tau
from ..types import Tell, silent
from .advice_record import AdviseSettings
from .advising import Adviser
from .agreement import Agreement, Written
from .budget import Budget
from .grow import SHAPES, grow
from .guesses import ByAgreement
from .machine_facts import machine, memory
from .predict import write
from .record import Record
from .replay import replay
from .round_costs import RoundCosts, measure_rounds, told
from .statistics import Ratio
from .system import System, SystemOptions
from .texts import choose, shipped
from .weight_noise import Noise

__all__ = ["SECONDS", "Case", "Supposer", "WhatIf", "WhatIfSettings", "whatif"]

SECONDS = 60.0
SMALL = "small"  # the embedded model as the draft, as it is
USUAL = {"cuda": "llama-3-8b", "cpu": "1.5b"}  # the target's shape, by device
ON_CPU = "int8"  # weights of the target: floats of this size are nothing to run on a CPU
PROMPT, TOKENS = 64, 200  # tokens of a prompt at the most, and of a supposed answer
TEXTS = 8
LEAST = 15.0  # seconds for a pair that is run


@dataclass(frozen=True)
class WhatIfSettings:
    """What is asked."""

    shape: str | None = None  # None: one that people run on such a device
    draft: str = SMALL  # or the name of a shape
    alphas: tuple[float, ...] = (0.5, 0.6, 0.7, 0.8, 0.9)
    rows: tuple[int, ...] = (1, 8)
    gammas: tuple[int, ...] = (1, 2, 3, 4, 6, 8)
    confirm: tuple[float, ...] = ()  # acceptance rates at which the pair is run
    seconds: float | None = SECONDS

    def __post_init__(self) -> None:
        for name, value in (("shape", self.shape), ("draft", self.draft)):
            known = [*SHAPES] + [SMALL] * (name == "draft")
            if value is not None and value not in known:
                raise InvalidParameter(name, f"must be one of {', '.join(known)}, not {value!r}")
        if not all(0 < alpha < 1 for alpha in (*self.alphas, *self.confirm)):
            raise InvalidParameter("alpha", "must be between 0 and 1")
        if not self.rows or min(self.rows) < 1:
            raise InvalidParameter("rows", f"must be numbers of at least 1, not {self.rows}")

    @property
    def supposed(self) -> list[float]:
        """Every acceptance rate that is looked at."""
        return sorted({*self.alphas, *self.confirm})


@dataclass(frozen=True)
class Case:
    """The speed-up at one acceptance rate and number of rows."""

    alpha: float
    rows: int
    by_gamma: Mapping[int, float]  # by the cost model
    auto: float  # with the controller that serves
    measured: Ratio | None = None
    agreement: float | None = None  # of the draft that was measured

    def to_json(self) -> dict[str, Any]:
        found = asdict(self) | {"by_gamma": {str(gamma): value for gamma, value in self.by_gamma.items()}}
        return found | {"measured": self.measured.to_json() if self.measured is not None else None}


@dataclass(frozen=True)
class WhatIf(Record):
    """What ``whatif`` found."""

    kind = "whatif"

    about: Mapping[str, Any]
    costs: Mapping[str, Any]
    cases: tuple[Case, ...]
    notes: tuple[str, ...] = ()

    def results(self) -> dict[str, Any]:
        return {
            "pair": dict(self.about),
            "costs": dict(self.costs),
            "cases": [case.to_json() for case in self.cases],
            "notes": list(self.notes),
        }


def whatif(
    settings: WhatIfSettings | None = None,
    options: SystemOptions | None = None,
    *,
    tell: Tell | None = None,
    **more: Any,
) -> WhatIf:
    """Measure a pair of shapes. ``more``: fields of ``WhatIfSettings``; ``options``: device, dtype, quantization."""
    settings = replace(settings or WhatIfSettings(), **more)
    with Supposer(settings, options or SystemOptions(), tell=tell or silent) as supposer:
        supposer.run(settings.seconds)
        return supposer.result()


class Supposer:
    """A grown target, a draft, and what is measured of them. ``run`` may be interrupted, and ``result`` tells what
    there is by then."""

    def __init__(self, settings: WhatIfSettings, options: SystemOptions, *, tell: Tell = silent) -> None:
        self.device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if self.device.type == "cpu" and options.quantization == "auto":
            options = options.changed(quantization=ON_CPU)
        floats = self.device.type == "cpu" and options.quantization is None
        self.dtype = torch.float32 if floats else torch.bfloat16  # what is packed is as good in half the memory
        self.settings, self._tell, self.notes = settings, tell, list[str]()
        self.shape = settings.shape or USUAL.get(self.device.type, USUAL["cpu"])
        self.cases: list[Case] = []
        self._open, self._about, self._told = ExitStack(), dict[str, Any](), dict[str, Any]()
        self._check_memory()
        tell("loading the model that is grown")
        loaded = load(embedded_folder(tell), dtype="float32", device="cpu")
        self.small, self.tokenizer = loaded.model, loaded.tokenizer
        tell(f"growing {self.shape}")
        self.target = grow(self.small, SHAPES[self.shape], device=self.device, dtype=self.dtype)
        self._options = options.changed(
            model=self.target,
            tokenizer=self.tokenizer,
            draft=None,
            device=None,
            max_rows=max(settings.rows),
            max_model_len=options.max_model_len or 1024,
            check=False,
        )
        try:
            self.plain = self._open.enter_context(System.open(self._options, tell))
            self.system = self._open.enter_context(self.plain.sibling(self._draft(self.small), tell))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Supposer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._open.close()

    def _check_memory(self) -> None:
        """Refuse what cannot fit, before it is grown."""
        shape, free = SHAPES[self.shape], memory(self.device)["free"]
        attention = 2 * shape.hidden * (shape.heads + shape.kv_heads) * shape.head_dim
        weights = shape.layers * (3 * shape.hidden * shape.ffn + attention)
        needed = weights * self.dtype.itemsize * (1.5 if self.device.type == "cpu" else 1)  # packed beside floats
        if free is not None and needed > 0.9 * free:
            raise InvalidParameter(
                "shape",
                f"{self.shape} takes {needed / 1e9:.0f} GB of weights, and {free / 1e9:.0f} GB are free here: try a "
                f"smaller one ({', '.join(SHAPES)})",
            )

    def _draft(self, model: Any) -> Any:
        if self.settings.draft == SMALL:
            return copy.deepcopy(model).to(self.device, self.dtype)
        return grow(model, SHAPES[self.settings.draft], device=self.device, dtype=self.dtype)

    def run(self, seconds: float | None = SECONDS) -> None:
        """Costs, what follows from them, and then the pairs that are run."""
        settings, budget = self.settings, Budget(seconds)
        prompts = [("any", self.plain.ids(text)[:PROMPT]) for text in choose(shipped(), 4)]
        self._about = self.system.facts() | {"shape": self.shape, "draft_shape": settings.draft}
        costs, base = self._costs([ids for _, ids in prompts], budget)
        self._told = told(costs) | {"plain": told(base)}
        for rows in settings.rows:
            for alpha in settings.supposed:
                self._tell(f"{rows} row{'s' * (rows > 1)}, alpha {alpha:g}")
                self.cases.append(self._case(costs, base, alpha, rows))
        for number, alpha in enumerate(settings.confirm):
            share = None if seconds is None else max(LEAST, budget.left / (len(settings.confirm) - number))
            self._confirm(alpha, prompts, share)

    @property
    def begun(self) -> bool:
        return bool(self.cases)

    def result(self, *, stopped: bool = False) -> WhatIf:
        """What is known by now; some case must be. ``stopped``: somebody did not want to wait."""
        mine = self.settings
        shown = {"shape": self.shape, "draft": mine.draft, "rows": mine.rows, "alphas": mine.alphas}
        notes = [*self.notes, *(["it was stopped (Ctrl-C) before its time was over"] * stopped)]
        return WhatIf(machine(), shown, self._about, self._told, tuple(self.cases), tuple(notes))

    def _costs(self, prompts: Sequence[Sequence[int]], budget: Budget) -> tuple[RoundCosts, RoundCosts]:
        captured = self.system.engine.parts.captured
        share = budget.part(1 / (1 + len(self.settings.confirm)))
        found = measure_rounds(
            {"plain": self.plain, "drafted": self.system},
            prompts,
            rows=sorted({1, *self.settings.rows}),
            lengths=captured.lengths if captured is not None else (0, *sorted(self.settings.gammas)),
            late=lambda: share.over,
            tell=self._tell,
        )
        return found["drafted"], found["plain"]

    def _case(self, costs: RoundCosts, base: RoundCosts, alpha: float, rows: int) -> Case:
        plain = base.plain(rows)
        times = costs.times(rows, max(self.settings.gammas))
        by_gamma = {gamma: tau(alpha, gamma) * plain / times[gamma] for gamma in self.settings.gammas}
        return Case(alpha, rows, by_gamma, self._auto(costs, base, alpha, rows))

    def _auto(self, costs: RoundCosts, base: RoundCosts, alpha: float, rows: int) -> float:
        """With the controller of the system, over texts along which each guess holds with this probability."""
        system, parts = self.system, self.system.engine.parts
        controller, drafter = parts.controller, parts.drafter
        assert isinstance(controller, GreedyAndSampled)
        assert drafter is not None
        known = supposed_texts(alpha, max(TEXTS, rows))
        system.cold()
        controller.meet(free=drafter.free, ends_itself=False)
        played = replay([*known], ByAgreement(known, None), controller, costs, rows=rows)
        system.cold()
        return played.rate / replay([*known], None, None, base, rows=rows).rate

    def _confirm(self, alpha: float, prompts: Sequence[tuple[str, Sequence[int]]], seconds: float | None) -> None:
        """Run a draft that agrees about so often."""
        self._tell(f"a draft that agrees {alpha:.0%}")
        texts = write(self.plain, prompts[:8], tokens=48, ignore_eos=True)
        noise = Noise(self.small)
        scale, agreed = noise.scale_for(alpha, [(text.prompt, text.ids) for text in texts])
        settings = AdviseSettings(
            rows=self.settings.rows, gammas=(), tokens=96, ignore_eos=True, confirm=1, seconds=seconds
        )
        draft = self._draft(noise.model(scale))
        given: dict[str, Any] = {"tell": self._tell, "prompts": prompts, "plain": self.plain, "only": True}
        with Adviser(self._options, [draft], None, settings, **given) as adviser:
            adviser.run(seconds)
            run = {key: ratio for outlook in adviser.result().outlooks for key, ratio in outlook.measured.items()}
        for index, case in enumerate(self.cases):
            ratio = run.get((case.rows, 0.0))
            if case.alpha == alpha and ratio is not None:
                self.cases[index] = replace(case, measured=ratio, agreement=agreed)


def supposed_texts(alpha: float, count: int) -> dict[Written, Agreement]:
    """Texts of no meaning along which each guess holds with probability ``alpha``."""
    chance, found = random.Random(0), dict[Written, Agreement]()
    for number in range(count):
        line = (tuple(float(chance.random() < alpha) for _ in range(TOKENS)),)
        text = Written(f"supposed {number}", PROMPT, tuple(range(PROMPT + TOKENS)))
        found[text] = Agreement(True, line, line, line, line)
    return found
