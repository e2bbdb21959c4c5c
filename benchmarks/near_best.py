"""How far gamma "auto" is from the best fixed draft length, which is chosen on one run and measured again beside it.

Knows: pairs with a wanted acceptance rate, fixed draft lengths, turns. Does not know: how models are made (``pairs``).
Run by never_slower.py (``--parts best`` and ``--parts kinds``).

"best": drafts a third of their target's size, with noise on their weights set for alpha near 0.6, 0.75 and 0.9.
"kinds": the embedded model with the draft that ships with it, on six kinds of task.
"""

from __future__ import annotations

import gc
import json
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from common import Report, interval, log, median, prompts
from pairs import Noise, Setting, answers, cpu_pair

from headstart import LLM, SamplingParams
from headstart.control.controller import FixedController
from headstart.lab.turns import Run, side_by_side
from headstart.machine.load.loading import load

Prompts = Callable[[int], list[list[int]]]  # of a turn


@dataclass
class Contest:
    """Auto, fixed draft lengths and plain decoding over the same prompts, in turns."""

    plain: LLM
    drafted: LLM  # opened with gamma "auto"
    prompts: Prompts
    tokens: int
    alone: Callable[[int], LLM] | None = None  # an engine of its own for a fixed length, where that is not the same
    beside: LLM | None = None  # opened as ``drafted``; then all answer at once, a step of each in turn

    def together(self, turn: int, gamma: int, *, auto: bool) -> dict[str, float]:
        """Rates of plain decoding, of a fixed draft length, and of auto, from a cold start (``side_by_side``)."""
        assert self.beside is not None
        params = SamplingParams(temperature=0, max_tokens=self.tokens, ignore_eos=True)
        engines = {"plain": self.plain, "fixed": self.beside} | ({"auto": self.drafted} if auto else {})
        parts = self.beside.engine.parts
        own, lines = parts.controller, self.prompts(turn)
        self.beside.cold()
        parts.controller = FixedController(gamma)
        try:
            return side_by_side({name: Run(llm.engine, lines, params) for name, llm in engines.items()})
        finally:
            parts.controller = own

    def run(self, llm: LLM, turn: int, gamma: int | None = None) -> float:
        """Tokens a second from a cold start, prompts included. ``gamma``: fixed for this run."""
        lines, parts = self.prompts(turn), llm.engine.parts
        own = parts.controller  # the one that is told of rounds: it must come back
        llm.cold()
        if gamma is not None:
            parts.controller = FixedController(gamma)
        gc.collect()
        try:
            started = time.perf_counter()
            llm.generate(lines, SamplingParams(temperature=0, max_tokens=self.tokens, ignore_eos=True))
            return len(lines) * self.tokens / (time.perf_counter() - started)
        finally:
            parts.controller = own

    def choose(self, gammas: list[int], turn: int) -> tuple[int, dict[int, float]]:
        """The best fixed length of one run. The first run of each only warms it up."""
        rates = {0: self.run(self.plain, turn)}
        if self.beside is not None:
            for gamma in gammas:
                found = self.together(turn, gamma, auto=False)
                rates[gamma] = rates[0] * found["fixed"] / found["plain"]
        for gamma in gammas if self.beside is None else ():
            self.run(self.drafted, turn + 1, gamma)
            rates[gamma] = self.run(self.drafted, turn, gamma)
        return max(gammas, key=lambda gamma: rates[gamma]), rates

    def measure(self, gammas: list[int], turns: int, late: Callable[[], bool]) -> dict[str, Any]:
        gc.collect()
        gc.freeze()  # a collection of all that was loaded would be timed as part of some run
        self.run(self.plain, 1)
        best, rates = self.choose(gammas, 0)
        log(f"  one run each: {', '.join(f'{g}: {r:.0f}' for g, r in rates.items())} tok/s; best: {best}")
        fixed = self.alone(best) if self.alone is not None else None
        if fixed is not None:
            self.run(fixed, 1)
        systems: dict[str, Callable[[int], float]] = {
            "plain": lambda turn: self.run(self.plain, turn),
            "auto": lambda turn: self.run(self.drafted, turn),
            "fixed": lambda turn: self.run(fixed, turn) if fixed is not None else self.run(self.drafted, turn, best),
        }
        self.run(self.drafted, 1)
        found: dict[str, list[float]] = {name: [] for name in systems}
        before = self.drafted.stats.drafted, self.drafted.stats.accepted
        names = list(systems)
        for turn in range(turns):
            if late() and turn >= 3:
                break
            if self.beside is not None:
                for name, rate in self.together(turn + 2, best, auto=True).items():
                    found[name].append(rate)
                continue
            for name in names[turn % 3 :] + names[: turn % 3]:
                found[name].append(systems[name](turn + 2))
        drafted, accepted = self.drafted.stats.drafted - before[0], self.drafted.stats.accepted - before[1]
        over = {
            f"auto_over_{name}": [a / b for a, b in zip(found["auto"], found[name], strict=True)]
            for name in ("fixed", "plain")
        }
        gc.unfreeze()
        return {
            "best_gamma": best,
            "one_run_tokens_per_second": rates,
            **{name: {"median": median(values), "interval": interval(values)} for name, values in over.items()},
            "tokens_per_second": {name: median(values) for name, values in found.items()},
            "turns": len(found["auto"]),
            "accepted_of_drafted": accepted / drafted if drafted else None,
            "reason": self.drafted.engine.inactive_reason,
            "ratios": over,
        }


def _store(report: Report, part: str, found: list[dict[str, Any]], about: dict[str, Any]) -> None:
    found.append(about)
    report.add(part, found)
    fixed, plain = about["auto_over_fixed"]["median"], about["auto_over_plain"]["median"]
    log(f"  auto over the best fixed one ({about['best_gamma']}): {fixed:.3f}, over plain: {plain:.3f}")


def _stored(report: Report, part: str, given: Namespace) -> list[dict[str, Any]]:
    """What an earlier run has found, where this one goes on."""
    if not given.go_on or not report.path.exists():
        return []
    return list(json.loads(report.path.read_text(encoding="utf-8")).get(part, []))


def pairs(setting: Setting, given: Namespace, report: Report) -> None:
    """A pair whose draft is a third of its target, at three rates of acceptance and several batch sizes."""
    gpu = setting.name.startswith("gpu")
    if setting.small is None:
        names = (None if name == "none" else name for name in (given.quantization, given.draft_quantization))
        setting = cpu_pair(setting, *names)
    tiny = setting.name == "quick"
    plain, noise = setting.llm(None), Noise(setting.small)
    length = 16 if tiny else 64
    texts = answers(plain, setting.prompts([length] * (8 if gpu else 4), 0), 32 if tiny else 96)
    log(f"{setting.name}: target open")
    found = _stored(report, "best", given)
    done = {(case["alpha_wanted"], case["batch"]) for case in found}
    for alpha in given.alphas:
        batches = [batch for batch in given.batches if (alpha, batch) not in done]
        if report.late or not batches:
            continue
        scale, agreed = noise.scale_for(alpha, texts)
        log(f"alpha {alpha}: noise {scale:.4f} agrees with {agreed:.3f} of the target's tokens")
        draft = setting.noisy_draft(noise, scale)
        drafted, beside = setting.llm(draft), None if gpu else setting.llm(draft)
        for batch in batches:
            if report.late:
                log(f"no time left for alpha {alpha}, batch {batch}")
                continue
            log(f"alpha {alpha}, batch {batch}")
            alone = None
            if gpu and batch == 1:  # a fixed length drafts on while the target verifies
                small = replace(setting, options=setting.options | {"max_rows": 1})
                alone = lambda gamma, small=small, draft=draft: small.llm(draft, gamma)  # noqa: E731
            lines = lambda turn, batch=batch: setting.prompts([length] * batch, 5 + turn)  # noqa: E731
            contest = Contest(plain, drafted, lines, given.tokens, alone, beside)
            case = {"alpha_wanted": alpha, "agreement": agreed, "noise": scale, "batch": batch}
            _store(report, "best", found, case | contest.measure(given.gammas, given.turns, lambda: report.late))
        del draft, drafted, beside
        gc.collect()
        if gpu:
            torch.cuda.empty_cache()


def kinds(setting: Setting, given: Namespace, report: Report) -> None:
    """The embedded pair on each of six kinds of task, one prompt at a time."""
    if setting.name != "cpu":
        raise SystemExit("--parts kinds is about the embedded model on a CPU: --device cpu")
    tokenizer = load(setting.target).tokenizer
    one_row = replace(setting, options=setting.options | {"max_rows": 1})
    plain, drafted, beside = one_row.llm(None), one_row.llm(setting.draft), one_row.llm(setting.draft)
    found = _stored(report, "kinds", given)
    done = {case["kind"] for case in found}
    for kind, texts in prompts().items():
        if report.late or kind in done:
            log(f"no time left for {kind}" if report.late else f"{kind} is stored")
            continue
        log(kind)
        lines = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
            )
            for text in texts
        ]
        each = lambda turn, lines=lines: [lines[turn % len(lines)]]  # noqa: E731
        contest = Contest(plain, drafted, each, given.tokens, beside=beside)
        _store(report, "kinds", found, {"kind": kind} | contest.measure(given.gammas, given.turns, lambda: report.late))
