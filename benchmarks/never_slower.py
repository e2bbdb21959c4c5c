"""Is speculation ever slower than plain decoding, and how far is gamma "auto" from the best fixed draft length?

    python benchmarks/never_slower.py                              # a GPU where there is one: 7 minutes for "slower"
    python benchmarks/never_slower.py --parts best --seconds 450   # near_best.py
    python benchmarks/never_slower.py --device cpu --batches 1 8   # the embedded model

"slower": a draft that is never right, one as large as the target (for which no draft length pays), and lookup where
nothing repeats, at temperature 0 and 1.5, alone and together; from a cold controller. "off": a loaded draft that no
request wants (``speculate=False``). Each figure is the rate over that of an engine without a draft in the same turn,
prompts included; reported are the median of the turns and the interval in which it lies with 95%.
Every turn measures all cases once: a run that is stopped early (``--seconds``) has fewer turns, not fewer cases.
On a CPU all engines of a case answer at once, a step of each in turn (lab/turns.py): it is shared with others.
``--go-on`` adds turns (or cases, with other --batches) to those that are stored.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import near_best
from common import Report, interval, log, median
from pairs import Setting, parser, read, setting_of

from headstart import LLM, SamplingParams
from headstart.lab.turns import Run, side_by_side

DRAFTS = ("useless", "as large", "lookup", "off")
PLAIN = "plain"


@dataclass(frozen=True)
class Case:
    temperature: float
    batch: int


def draft_of(setting: Setting, name: str) -> Any:
    useless = setting.useless
    return {PLAIN: None, "useless": useless, "off": useless, "as large": setting.target, "lookup": "lookup"}[name]


class NeverSlower:
    """Engines with drafts that cannot help, beside one without."""

    def __init__(self, setting: Setting, drafts: Sequence[str], cases: Sequence[Case], tokens: int) -> None:
        self.setting, self.drafts, self.cases, self.tokens = setting, drafts, cases, tokens
        self._gpu = setting.name.startswith("gpu")
        self.engines: dict[str, LLM] = {}
        self.rates: dict[tuple[str, Case], list[float]] = {}
        self.said: dict[tuple[str, Case], dict[str, Any]] = {}
        self.others: list[dict[str, Any]] = []  # stored by an earlier run, of other cases
        for name in (PLAIN, *drafts):
            opened = self._engine_name(name)
            if opened not in self.engines:
                started = time.perf_counter()
                self.engines[opened] = setting.llm(draft_of(setting, opened))
                log(f"{opened}: engine open ({time.perf_counter() - started:.1f} s)")
        for case in cases:
            for name in (PLAIN, *drafts):
                self._measure([name], case, turn=0, tokens=min(48, tokens))
        gc.collect()
        gc.freeze()  # a collection of all that was loaded would be timed as part of some run
        log("warm")

    def _engine_name(self, name: str) -> str:
        """On a CPU each has an engine of its own, since they answer at once."""
        return "useless" if name == "off" and self._gpu else name

    def _measure(self, names: Sequence[str], case: Case, turn: int, tokens: int) -> dict[str, float]:
        """Tokens a second over the whole of it, from a cold start; all of them at once."""
        lengths = [32 + 4 * (i % 9) for i in range(case.batch)]
        if self.setting.name == "quick":
            lengths = [8] * case.batch
        prompts = self.setting.random_prompts(lengths, turn)
        runs, before = {}, {}
        for name in names:
            llm = self.engines[self._engine_name(name)]
            wanted = name not in (PLAIN, "off")
            params = SamplingParams(temperature=case.temperature, max_tokens=tokens, ignore_eos=True, speculate=wanted)
            runs[name] = Run(llm.engine, prompts, params)
            before[name] = llm.stats.drafted, llm.stats.accepted, llm.stats.row_rounds
        rates = side_by_side(runs)
        for name, run in runs.items():
            stats = run.engine.stats
            drafted, accepted, rounds = (
                after - was
                for after, was in zip((stats.drafted, stats.accepted, stats.row_rounds), before[name], strict=True)
            )
            self.said[name, case] = {
                "alpha": accepted / drafted if drafted else None,
                "drafted_per_round": drafted / rounds,
                "reason": run.engine.inactive_reason,
            }
        return rates

    def turn(self, number: int) -> None:
        names = [PLAIN, *self.drafts]
        order = names[number % len(names) :] + names[: number % len(names)]
        for case in self.cases:
            for some in [[name] for name in order] if self._gpu else [order]:
                for name, rate in self._measure(some, case, number, self.tokens).items():
                    self.rates.setdefault((name, case), []).append(rate)

    def go_on(self, path: Path) -> int:
        """Take up the turns that are stored of these cases; how many there are."""
        stored = json.loads(path.read_text(encoding="utf-8")).get("slower", []) if path.exists() else []
        for found in stored:
            case = Case(found["temperature"], found["batch"])
            if case in self.cases and found["draft"] in self.drafts:
                self.rates[found["draft"], case] = found["rates"]
                self.rates[PLAIN, case] = found["plain_rates"]
            else:
                self.others.append(found)
        return min((len(rates) for rates in self.rates.values()), default=0)

    def result(self) -> list[dict[str, Any]]:
        found = []
        for name in self.drafts:
            for case in self.cases:
                rates, plain = self.rates[name, case], self.rates[PLAIN, case]
                ratios = [ours / theirs for ours, theirs in zip(rates, plain, strict=True)]
                found.append(
                    {
                        "draft": name,
                        "temperature": case.temperature,
                        "batch": case.batch,
                        "over_plain": median(ratios),
                        "interval": interval(ratios),
                        "turns": len(ratios),
                        "tokens_per_second": median(rates),
                        "plain_tokens_per_second": median(plain),
                        **self.said[name, case],
                        "ratios": ratios,
                        "rates": rates,
                        "plain_rates": plain,
                    }
                )
        return self.others + found


def measure(part: NeverSlower, turns: int, report: Report, *, go_on: bool) -> None:
    before = part.go_on(report.path) if go_on else 0
    for number in range(1 + before, turns + before + 1):
        if report.late:
            log(f"no time left after turn {number - 1}")
            break
        part.turn(number)
        found = part.result()
        report.add("slower", found)
        worst = sorted(found, key=lambda case: case["over_plain"])[:3]
        shown = ", ".join(f"{c['draft']} T{c['temperature']:g} x{c['batch']} {c['over_plain']:.3f}" for c in worst)
        log(f"turn {number}/{turns + before}; lowest: {shown}")
    for case in report.results.get("slower", []):
        low, high = case["interval"]
        log(
            f"{case['draft']:8} T {case['temperature']:g}, batch {case['batch']:2}: {case['over_plain']:.3f} "
            f"[{low:.3f}, {high:.3f}] of {case['plain_tokens_per_second']:.0f} tok/s"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser(__doc__, "turn")
    options.add_argument("--parts", nargs="+", default=["slower"], choices=("slower", "best", "kinds"))
    options.add_argument("--drafts", nargs="+", default=list(DRAFTS), choices=DRAFTS)
    options.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    options.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.5], help="of slower")
    options.add_argument("--alphas", nargs="+", type=float, default=[0.6, 0.75, 0.9], help="of best")
    options.add_argument("--gammas", nargs="+", type=int, default=[1, 2, 3, 4, 6, 8], help="of best and kinds")
    options.add_argument("--quantization", default="int4", help="of best's target on a CPU: int8, int4 or none")
    options.add_argument("--draft-quantization", default="auto", help="of best's draft on a CPU")
    options.add_argument("--tokens", type=int, default=256)
    options.add_argument("--turns", type=int, default=9)
    options.add_argument("--go-on", action="store_true", help="add to the turns or cases that are stored")
    given = read(options, arguments)
    rows = max(given.batches)
    settings = {key: getattr(given, key) for key in ("batches", "tokens", "turns")}
    # The time that models take to be made counts: it is spent on the same machine.
    name = "quick" if given.quick else "gpu-" + given.shape if given.device == "cuda" else "cpu"
    stem = {"slower": "never-slower", "best": "near-best", "kinds": "near-best-kinds"}[given.parts[0]]
    path = given.out / f"{stem}-{name}.json"
    report = Report(path, settings | {"weights": "real" if given.weights or name == "cpu" else "random"}, given.seconds)
    setting = setting_of(given, rows)
    if "slower" in given.parts:
        cases = [Case(temperature, batch) for temperature in given.temperatures for batch in given.batches]
        part = NeverSlower(setting, given.drafts, cases, given.tokens)
        measure(part, given.turns, report, go_on=given.go_on)
        gc.unfreeze()
        gc.collect()
    if "best" in given.parts:
        near_best.pairs(setting, given, report)
    if "kinds" in given.parts:
        near_best.kinds(setting, given, report)
    log(f"stored: {report.path}")


if __name__ == "__main__":
    main()
