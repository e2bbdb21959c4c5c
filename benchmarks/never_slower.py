"""Is speculation ever slower than plain decoding, and how far is gamma "auto" from the best fixed draft length?

    python benchmarks/never_slower.py                              # a GPU where there is one: 7 minutes for "slower"
    python benchmarks/never_slower.py --parts best --seconds 450   # near_best.py
    python benchmarks/never_slower.py --device cpu --batches 1 8   # the embedded model

"slower": a draft that is never right, one as large as the target (for which no draft length pays), and lookup where
nothing repeats, at temperature 0 and 1.5, alone and together; from a cold controller. "off": a loaded draft that no
request wants (``speculate=False``). Each figure is the rate over that of an engine without a draft in the same turn,
prompts included; reported are the median of the turns and the interval in which it lies with 95%.
Every turn measures all cases once: a run that is stopped early (``--seconds``) has fewer turns, not fewer cases.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import near_best
from common import Report, interval, log, median
from pairs import Setting, parser, read, setting_of

from headstart import LLM, SamplingParams

DRAFTS = ("useless", "as large", "lookup", "off")
PLAIN = "plain"


@dataclass(frozen=True)
class Case:
    temperature: float
    batch: int


def draft_of(setting: Setting, name: str) -> Any:
    return {PLAIN: None, "useless": setting.useless, "as large": setting.target, "lookup": "lookup"}[name]


class NeverSlower:
    """Engines with drafts that cannot help, beside one without."""

    def __init__(self, setting: Setting, drafts: Sequence[str], cases: Sequence[Case], tokens: int) -> None:
        self.setting, self.drafts, self.cases, self.tokens = setting, drafts, cases, tokens
        self.engines: dict[str, LLM] = {}
        self.rates: dict[tuple[str, Case], list[float]] = {}
        self.said: dict[tuple[str, Case], dict[str, Any]] = {}
        for name in (PLAIN, *drafts):
            opened = self._engine_name(name)
            if opened not in self.engines:
                started = time.perf_counter()
                self.engines[opened] = setting.llm(draft_of(setting, opened))
                log(f"{opened}: engine open ({time.perf_counter() - started:.1f} s)")
        for case in cases:
            for name in (PLAIN, *drafts):
                self._run(name, case, turn=0, tokens=min(48, tokens))
        gc.collect()
        gc.freeze()  # a collection of all that was loaded would be timed as part of some run
        log("warm")

    def _engine_name(self, name: str) -> str:
        return "useless" if name == "off" else name

    def _run(self, name: str, case: Case, turn: int, tokens: int) -> float:
        """Tokens a second over the whole of it, from a cold start."""
        llm = self.engines[self._engine_name(name)]
        lengths = [32 + 4 * (i % 9) for i in range(case.batch)]
        if self.setting.name == "quick":
            lengths = [8] * case.batch
        params = SamplingParams(
            temperature=case.temperature, max_tokens=tokens, ignore_eos=True, speculate=name not in (PLAIN, "off")
        )
        prompts = self.setting.random_prompts(lengths, turn)
        llm.cold()
        gc.collect()
        before = llm.stats.drafted, llm.stats.accepted, llm.stats.row_rounds
        started = time.perf_counter()
        llm.generate(prompts, params)
        seconds = time.perf_counter() - started
        drafted, accepted, rounds = (
            after - was
            for after, was in zip((llm.stats.drafted, llm.stats.accepted, llm.stats.row_rounds), before, strict=True)
        )
        self.said[name, case] = {
            "alpha": accepted / drafted if drafted else None,
            "drafted_per_round": drafted / rounds,
            "reason": llm.engine.inactive_reason,
        }
        return case.batch * tokens / seconds

    def turn(self, number: int) -> None:
        names = [PLAIN, *self.drafts]
        order = names[number % len(names) :] + names[: number % len(names)]
        for case in self.cases:
            for name in order:
                self.rates.setdefault((name, case), []).append(self._run(name, case, number, self.tokens))

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
                    }
                )
        return found


def measure(part: NeverSlower, turns: int, report: Report) -> None:
    for number in range(1, turns + 1):
        if report.late:
            log(f"no time left after {number - 1} turns")
            break
        part.turn(number)
        found = part.result()
        report.add("slower", found)
        worst = sorted(found, key=lambda case: case["over_plain"])[:3]
        shown = ", ".join(f"{c['draft']} T{c['temperature']:g} x{c['batch']} {c['over_plain']:.3f}" for c in worst)
        log(f"turn {number}/{turns}; lowest: {shown}")
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
        measure(NeverSlower(setting, given.drafts, cases, given.tokens), given.turns, report)
        gc.unfreeze()
        gc.collect()
    if "best" in given.parts:
        near_best.pairs(setting, given, report)
    if "kinds" in given.parts:
        near_best.kinds(setting, given, report)
    log(f"stored: {report.path}")


if __name__ == "__main__":
    main()
