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
from .machine_facts import machine, memory
from .predict import write
from .replay import ByAgreement, replay
from .round_costs import LENGTHS, RoundCosts, measure_rounds, told
from .statistics import Ratio
from .system import System, SystemOptions
from .texts import choose, shipped
from .weight_noise import Noise

__all__ = ["SECONDS", "Case", "WhatIf", "WhatIfSettings", "whatif"]

SECONDS = 60.0
SMALL = "small"  # the embedded model as the draft, as it is
TOKENS = 200  # of a supposed answer
TEXTS = 8


@dataclass(frozen=True)
class WhatIfSettings:
    """What is asked."""

    shape: str = "llama-3-8b"
    draft: str = SMALL  # or the name of a shape
    alphas: tuple[float, ...] = (0.5, 0.6, 0.7, 0.8, 0.9)
    rows: tuple[int, ...] = (1, 8)
    gammas: tuple[int, ...] = (1, 2, 3, 4, 6, 8)
    confirm: tuple[float, ...] = ()  # acceptance rates at which the pair is run
    seconds: float | None = SECONDS

    def __post_init__(self) -> None:
        for name, value in (("shape", self.shape), ("draft", self.draft)):
            known = [*SHAPES] + [SMALL] * (name == "draft")
            if value not in known:
                raise InvalidParameter(name, f"must be one of {', '.join(known)}, not {value!r}")
        if not all(0 < alpha < 1 for alpha in (*self.alphas, *self.confirm)):
            raise InvalidParameter("alpha", "must be between 0 and 1")
        if not self.rows or min(self.rows) < 1:
            raise InvalidParameter("rows", f"must be numbers of at least 1, not {self.rows}")


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
class WhatIf:
    """What ``whatif`` found."""

    machine: Mapping[str, Any]
    settings: Mapping[str, Any]
    about: Mapping[str, Any]
    costs: Mapping[str, Any]
    cases: tuple[Case, ...]
    notes: tuple[str, ...] = ()

    kind = "whatif"

    def to_json(self) -> dict[str, Any]:
        results = {
            "pair": dict(self.about),
            "costs": dict(self.costs),
            "cases": [case.to_json() for case in self.cases],
            "notes": list(self.notes),
        }
        return {"machine": dict(self.machine), "settings": dict(self.settings), "results": results}


def whatif(
    settings: WhatIfSettings | None = None,
    options: SystemOptions | None = None,
    *,
    tell: Tell | None = None,
    **more: Any,
) -> WhatIf:
    """Measure a pair of shapes. ``more``: fields of ``WhatIfSettings``; ``options``: device, dtype, quantization."""
    settings = replace(settings or WhatIfSettings(), **more)
    return _Supposed(settings, options or SystemOptions(), tell or silent).run()


class _Supposed:
    """A grown target, a draft, and what is measured of them."""

    def __init__(self, settings: WhatIfSettings, options: SystemOptions, tell: Tell) -> None:
        self.settings, self._tell, self.notes = settings, tell, list[str]()
        self.device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self._check_memory()
        tell("loading the model that is grown")
        loaded = load(embedded_folder(tell), dtype="float32", device="cpu")
        self.small, self.tokenizer = loaded.model, loaded.tokenizer
        tell(f"growing {settings.shape}")
        self.target = grow(self.small, SHAPES[settings.shape], device=self.device, dtype=self.dtype)
        self._options = options.changed(
            model=self.target,
            tokenizer=self.tokenizer,
            draft=None,
            device=None,
            max_rows=max(settings.rows),
            max_model_len=options.max_model_len or 1024,
            check=False,
        )

    def _check_memory(self) -> None:
        """Refuse what cannot fit, before it is grown."""
        shape, free = SHAPES[self.settings.shape], memory(self.device)["free"]
        attention = 2 * shape.hidden * (shape.heads + shape.kv_heads) * shape.head_dim
        weights = shape.layers * (3 * shape.hidden * shape.ffn + attention)
        needed = weights * (2 if self.device.type == "cuda" else 4)
        if free is not None and needed > 0.9 * free:
            raise InvalidParameter(
                "shape",
                f"{self.settings.shape} takes {needed / 1e9:.0f} GB of weights, and {free / 1e9:.0f} GB are free here",
            )

    def _draft(self, model: Any) -> Any:
        if self.settings.draft == SMALL:
            return copy.deepcopy(model).to(self.device, self.dtype)
        return grow(model, SHAPES[self.settings.draft], device=self.device, dtype=self.dtype)

    def run(self) -> WhatIf:
        settings, budget = self.settings, Budget(self.settings.seconds)
        with System.open(self._options, self._tell) as plain:
            prompts = [("any", plain.ids(text)) for text in choose(shipped(), 4)]
            with plain.sibling(self._draft(self.small), self._tell) as system:
                costs, base = self._costs(plain, system, [ids for _, ids in prompts], budget)
                about = system.facts() | {"shape": settings.shape, "draft_shape": settings.draft}
                cases = [
                    self._case(system, costs, base, alpha, rows) for rows in settings.rows for alpha in settings.alphas
                ]
            for alpha in settings.confirm:
                cases = self._confirmed(plain, cases, alpha, prompts)
        shown = {"shape": settings.shape, "draft": settings.draft, "rows": settings.rows, "alphas": settings.alphas}
        return WhatIf(machine(), shown, about, told(costs) | {"plain": told(base)}, tuple(cases), tuple(self.notes))

    def _costs(
        self, plain: System, system: System, prompts: Sequence[Sequence[int]], budget: Budget
    ) -> tuple[RoundCosts, RoundCosts]:
        captured = system.engine.parts.captured
        found = measure_rounds(
            {"plain": plain, "drafted": system},
            prompts,
            rows=sorted({1, *self.settings.rows}),
            lengths=captured.lengths if captured is not None else LENGTHS,
            late=lambda: budget.over,
            tell=self._tell,
        )
        return found["drafted"], found["plain"]

    def _case(self, system: System, costs: RoundCosts, base: RoundCosts, alpha: float, rows: int) -> Case:
        plain = base.plain(rows)
        times = costs.times(rows, max(self.settings.gammas))
        by_gamma = {gamma: tau(alpha, gamma) * plain / times[gamma] for gamma in self.settings.gammas}
        return Case(alpha, rows, by_gamma, self._auto(system, costs, base, alpha, rows))

    def _auto(self, system: System, costs: RoundCosts, base: RoundCosts, alpha: float, rows: int) -> float:
        """With the controller of the system, over texts along which each guess holds with this probability."""
        controller, drafter = system.engine.parts.controller, system.engine.parts.drafter
        assert isinstance(controller, GreedyAndSampled)
        assert drafter is not None
        known = supposed_texts(alpha, max(TEXTS, rows))
        system.cold()
        controller.meet(free=drafter.free, ends_itself=False)
        played = replay([*known], ByAgreement(known, None), controller, costs, rows=rows)
        system.cold()
        return played.rate / replay([*known], None, None, base, rows=rows).rate

    def _confirmed(
        self, plain: System, cases: list[Case], alpha: float, prompts: Sequence[tuple[str, Sequence[int]]]
    ) -> list[Case]:
        """Run a draft that agrees about so often."""
        self._tell(f"a draft that agrees {alpha:.0%}")
        texts = write(plain, prompts[:8], tokens=48, ignore_eos=True)
        noise = Noise(self.small)
        scale, agreed = noise.scale_for(alpha, [(text.prompt, text.ids) for text in texts])
        settings = AdviseSettings(
            rows=self.settings.rows, gammas=(), tokens=96, ignore_eos=True, confirm=1, seconds=self.settings.seconds
        )
        draft = self._draft(noise.model(scale))
        with Adviser(
            self._options, [draft], None, settings, tell=self._tell, prompts=prompts, plain=plain, only=True
        ) as adviser:
            run = {key: ratio for outlook in adviser.run().outlooks for key, ratio in outlook.measured.items()}
        found = []
        for case in cases:
            ratio = run.get((case.rows, 0.0))
            match = case.alpha == alpha and ratio is not None
            found.append(replace(case, measured=ratio, agreement=agreed) if match else case)
        return found


def supposed_texts(alpha: float, count: int) -> dict[Written, Agreement]:
    """Texts of no meaning along which each guess holds with probability ``alpha``."""
    chance, found = random.Random(0), dict[Written, Agreement]()
    for number in range(count):
        line = (tuple(float(chance.random() < alpha) for _ in range(TOKENS)),)
        text = Written(f"supposed {number}", 64, tuple(range(64 + TOKENS)))
        found[text] = Agreement(True, line, line, line, line)
    return found
