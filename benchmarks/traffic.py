"""An engine in traffic: requests of many lengths, all at once and at random times; results as JSON and a plot.

    python benchmarks/traffic.py                     # a GPU where there is one: 96 requests over 32 rows, 5 minutes
    python benchmarks/traffic.py --device cpu        # the embedded model, 12 requests over 4 rows, 10 minutes
    python benchmarks/traffic.py --modes plain auto --parts closed --repeats 5

Prompts of 20 to 200 tokens, 24, 64 or 160 tokens to write, greedy. "closed": all requests at once. "arrivals": at
random times (Poisson, always the same draws), at shares of what plain decoding takes in "closed", and at ``--rate``
requests a second. "even": 64 tokens each, beside Hugging Face's ``generate_batch`` on a GPU.

One loop submits what is due and steps the engine, so nothing but the engine delays a token. A request's clock starts
when it was to arrive, not when the loop got round to it. A delivery is when listeners hear of a round: what a server
sends on. Prompts differ from run to run, so that none is warm; the engines are otherwise as they are after the runs
before, as in a server. All engines are open at once, and take turns.
"""

from __future__ import annotations

import gc
import inspect
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
from common import Report, log, median, quantile
from pairs import Setting, parser, read, setting_of
from traffic_plot import draw
from transformers import GenerationConfig

from headstart import LLM, SamplingParams
from headstart.types import Round

MODES: dict[str, Callable[[Setting], LLM]] = {
    "plain": lambda setting: setting.llm(None),
    "gamma 3": lambda setting: setting.llm(setting.draft, 3),
    "auto": lambda setting: setting.llm(setting.draft),
    "lookup": lambda setting: setting.llm("lookup"),
}
SPENT = ("prefill", "draft", "catch_up", "verify")
WRITES = {24: 30, 64: 32, 160: 34}  # tokens to write -> how many of 96 requests: 8,208 in all


@dataclass(frozen=True)
class Load:
    """How long the prompts are and how many tokens each request writes."""

    lengths: list[int]
    tokens: list[int]

    @staticmethod
    def of(requests: int, low: int, high: int, writes: dict[int, int]) -> Load:
        """Lengths spread evenly on a log scale, in a random order that is always the same. ``writes``: see WRITES."""
        lengths = [round(low * (high / low) ** ((i + 0.5) / requests)) for i in range(requests)]
        each = [tokens for tokens, count in writes.items() for _ in range(count)]
        tokens = [each[i * len(each) // requests] for i in range(requests)]
        for values, seed in ((lengths, 1), (tokens, 2)):
            random.Random(seed).shuffle(values)
        return Load(lengths, tokens)

    def even(self, tokens: int) -> Load:
        return Load(self.lengths, [tokens] * len(self.lengths))

    def arrivals(self, rate: float | None) -> list[float]:
        """When each request comes: at once, or so many a second."""
        if rate is None:
            return [0.0] * len(self.lengths)
        draws, now, times = random.Random(3), 0.0, []
        for _ in self.lengths:
            now += draws.expovariate(1.0) / rate
            times.append(now)
        return times


class Heard:
    """Listens to an engine. Notes the time and nothing else, because it is called in the middle of a step."""

    def __init__(self) -> None:
        self.rounds: list[tuple[float, list[Round]]] = []

    def __call__(self, records: list[Round]) -> None:
        self.rounds.append((time.perf_counter(), records))

    def deliveries(self) -> dict[str, list[float]]:
        """Of each request, when tokens came."""
        found: dict[str, list[float]] = {}
        for when, records in self.rounds:
            for record in records:
                if record.emitted:
                    found.setdefault(record.sequence.rpartition("/")[0], []).append(when)
        return found

    def decoding(self) -> dict[str, float | None]:
        """Means over the rounds that read no prompt."""
        rounds = [records for _, records in self.rounds if records and not records[0].prefill]
        seconds = sum(records[0].round_seconds for records in rounds)
        records = [record for each in rounds for record in each]
        drafted, count = sum(r.drafted for r in records), max(1, len(records))
        return {
            "rounds": len(rounds),
            "rows_in_use": sum(r[0].rows * r[0].round_seconds for r in rounds) / seconds if seconds else 0.0,
            "tau": sum(r.emitted for r in records) / count,
            "alpha": sum(r.accepted for r in records) / drafted if drafted else None,
            "drafted_per_row": drafted / count,
        }


def drive(llm: LLM, prompts: list[list[int]], tokens: list[int], arrivals: list[float]) -> dict[str, Any]:
    """Submit each prompt when it is due, and step until all are answered."""
    engine, heard = llm.engine, Heard()
    requests = [
        llm.request(prompt, SamplingParams(temperature=0, max_tokens=n, ignore_eos=True), id=f"traffic-{i}")
        for i, (prompt, n) in enumerate(zip(prompts, tokens, strict=True))
    ]
    due, handles, idle = deque(zip(arrivals, requests, strict=True)), [], 0.0
    gc.collect()
    gc.freeze()  # a collection of all that was loaded would be timed as part of some round
    before = asdict(llm.stats)
    with llm.listen(heard):
        started = time.perf_counter()
        while due or not engine.idle:
            now = time.perf_counter() - started
            while due and due[0][0] <= now:
                handles.append(engine.submit(due.popleft()[1]))
            if engine.idle:
                idle += wait_until(started + due[0][0])
            else:
                engine.step()
        wall = time.perf_counter() - started
    gc.unfreeze()
    answers = [handle.completion() for handle in handles]
    written = [len(answer.token_ids) for answer in answers]
    if written != tokens:
        raise RuntimeError(f"not all was written: {[a.error for a in answers if a.error][:3]}")
    due_at = {request.id: started + at for request, at in zip(requests, arrivals, strict=True)}
    spent = {key: value - before[key] for key, value in asdict(llm.stats).items()}
    return described(heard, due_at, dict(zip(due_at, tokens, strict=True)), spent, wall, idle)


def wait_until(when: float) -> float:
    """Sleep most of the time, spin the rest: a sleep may end a millisecond late. How long it took."""
    started = time.perf_counter()
    while (left := when - time.perf_counter()) > 0:
        if left > 0.002:
            time.sleep(left - 0.002)
    return time.perf_counter() - started


def described(
    heard: Heard, due_at: dict[str, float], tokens: dict[str, int], spent: dict[str, float], wall: float, idle: float
) -> dict[str, Any]:
    """``spent``: what the engine's stats grew by."""
    came = heard.deliveries()
    first = [1e3 * (came[name][0] - at) for name, at in due_at.items()]
    gaps = [1e3 * (b - a) for times in came.values() for a, b in pairwise(times)]
    whole = [1e3 * (came[name][-1] - came[name][0]) / (n - 1) for name, n in tokens.items() if n > 1]
    parts = {name: spent[f"{name}_seconds"] for name in SPENT}
    total = sum(tokens.values())
    return {
        "requests": len(tokens),
        "tokens": total,
        "wall_seconds": wall,
        "tokens_per_second": total / wall,
        "requests_per_second": len(tokens) / wall,
        "first_token_ms": spread(first),
        "gap_ms": spread(gaps),
        "ms_per_token": spread(whole),
        **heard.decoding(),
        # What is in none of the forwards is the host's: scheduling, judging there, committing, launching.
        "seconds": parts | {"host": max(0.0, wall - idle - sum(parts.values())), "idle": idle},
    }


def spread(values: list[float]) -> dict[str, float]:
    return {"median": median(values), "p99": quantile(values, 0.99), "max": max(values)} if values else {}


class Traffic:
    """The parts of the run. Results are stored as they come."""

    def __init__(self, setting: Setting, load: Load, report: Report, names: Sequence[str]) -> None:
        self.setting, self.load, self.report = setting, load, report
        self.turn = 0
        self.engines: dict[str, LLM] = {}
        for name in names:
            started = time.perf_counter()
            self.engines[name] = MODES[name](setting)
            log(f"{name}: engine open ({time.perf_counter() - started:.1f} s)")
        self.round_of("warm up", load)

    def round_of(self, what: str, load: Load, rate: float | None = None, only: Sequence[str] = ()) -> dict[str, Any]:
        """The same requests for every engine, in turns; prompts that were never read before."""
        prompts, found = self.setting.prompts(load.lengths, self.turn), {}
        names = list(self.engines)
        for name in names[self.turn % len(names) :] + names[: self.turn % len(names)]:
            if only and name not in only:
                continue
            found[name] = run = drive(self.engines[name], prompts, load.tokens, load.arrivals(rate))
            log(
                f"{what}, {name}: {run['tokens_per_second']:.0f} tok/s, first token {shown(run['first_token_ms'])} ms, "
                f"gap {shown(run['gap_ms'])} ms, {run['rows_in_use']:.1f} rows, tau {run['tau']:.2f}"
            )
        self.turn += 1
        return {name: found[name] for name in names if name in found}

    def closed(self, repeats: int) -> None:
        for llm in self.engines.values():
            llm.cold()  # what was learnt while kernels were compiled says nothing
        runs = [self.round_of(f"closed {i + 1}/{repeats}", self.load) for i in range(repeats)]
        middle = {
            name: sorted((run[name] for run in runs), key=lambda run: run["tokens_per_second"])[repeats // 2]
            for name in self.engines
        }
        rates = {name: [run[name]["tokens_per_second"] for run in runs] for name in self.engines}
        self.report.add("closed", {name: middle[name] | {"all_tokens_per_second": rates[name]} for name in middle})

    def arrivals(self, shares: Sequence[float], rate: float | None) -> None:
        closed = self.report.results.get("closed") or self.round_of("capacity", self.load)
        capacity = closed["plain" if "plain" in closed else next(iter(closed))]["requests_per_second"]
        rates = {f"{share:.0%} of capacity": share * capacity for share in shares}
        if rate is not None:
            rates[f"{rate:g} a second"] = rate
        found: dict[str, Any] = {"capacity": capacity, "loads": []}
        for what, each in rates.items():
            if self.report.late:
                log(f"no time left for {what}")
                break
            found["loads"].append({"load": what, "rate": each, "modes": self.round_of(what, self.load, each)})
            self.report.add("arrivals", found)

    def even(self, tokens: int, hugging_face: bool) -> None:
        load = self.load.even(tokens)
        found = self.round_of(f"{tokens} each", load)
        self.report.add("even", {"tokens_each": tokens, "modes": found})
        self.engines.clear()  # it sizes its cache by the memory that is free
        gc.collect()
        if hugging_face:
            torch.cuda.empty_cache()
            prompts = self.setting.prompts(load.lengths, self.turn)
            theirs = self.report.guarded(lambda: generate_batch(self.setting.target, prompts, tokens))
            self.report.add("even", {"tokens_each": tokens, "modes": found, "hugging_face": theirs})


def shown(values: dict[str, float]) -> str:
    return f"{values['median']:.1f} ({values['p99']:.1f})" if values else "none"


def generate_batch(model: Any, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    """Hugging Face's continuous batching, warmed up, its manager kept where this version can keep it."""
    config = GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    known = inspect.signature(model.generate_batch).parameters
    options: dict[str, Any] = {"persistent_manager": True} if "persistent_manager" in known else {}
    others = [prompt[::-1] for prompt in prompts]  # it keeps prompts that it has read
    model.generate_batch(others, generation_config=config, **options)
    started = time.perf_counter()
    answers = list(model.generate_batch(prompts, generation_config=config, **options).values())
    wall = time.perf_counter() - started
    written = sum(len(answer.generated_tokens) for answer in answers)
    # Without its own set-up, where it says when the first request came in and the last one went.
    spans = [(a.created_time, a.lifespan[1]) for a in answers if min(a.lifespan) > 0]
    inside = max(end for _, end in spans) - min(start for start, _ in spans) if spans else wall
    seconds = inside if 0 < inside <= wall else wall
    if "persistent_manager" in known:
        model.destroy_cached_continuous_batching_manager()
    return {"tokens": written, "tokens_per_second": written / seconds, "wall_tokens_per_second": written / wall}


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser(__doc__, "load")
    options.add_argument("--requests", type=int, help="96 on a GPU, 12 on a CPU")
    options.add_argument("--rows", type=int, help="32 on a GPU, 4 on a CPU")
    options.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    options.add_argument("--parts", nargs="+", default=["closed", "arrivals", "even"])
    options.add_argument("--repeats", type=int, default=3, help="of the closed loop; the middle one is reported")
    options.add_argument("--shares", nargs="*", type=float, default=[0.25, 0.5, 0.75, 1.0], help="of plain's capacity")
    options.add_argument("--rate", type=float, help="requests a second; 12 on a GPU")
    given = read(options, arguments)
    rate, low, high, writes = given.rate, 20, 200, WRITES
    if given.quick:
        requests, rows, low, high, writes = given.requests or 6, given.rows or 3, 5, 20, {4: 1, 8: 1, 12: 1}
    elif given.device == "cuda":
        requests, rows, rate = given.requests or 96, given.rows or 32, rate or 12.0
    else:
        requests, rows = given.requests or 12, given.rows or 4
    setting = setting_of(given, rows)
    load = Load.of(requests, low, high, writes)
    settings = {
        "target": setting.name,
        "weights": "real" if given.weights or setting.name == "cpu" else "random",
        "requests": requests,
        "rows": rows,
        "prompt_tokens": sum(load.lengths),
        "tokens": sum(load.tokens),
        "repeats": given.repeats,
    }
    report = Report(given.out / f"traffic-{setting.name}.json", settings, given.seconds)
    traffic = Traffic(setting, load, report, given.modes)
    if "closed" in given.parts:
        traffic.closed(given.repeats)
    if "arrivals" in given.parts:
        traffic.arrivals(given.shares, rate)
    if "even" in given.parts:
        traffic.even(8 if given.quick else 64, given.device == "cuda" and not given.quick)
    log(f"stored: {report.path}; plot: {report.guarded(lambda: draw(report.path))}")


if __name__ == "__main__":
    main()
