"""Is the interval of `headstart bench` honest? Over many small benches of the same prompts: how often does the 90%
interval hold the long-run value, and how wide is it?

    python benchmarks/lab_intervals.py                  # 40 benches of 16 seconds, every one with engines of its own
    python benchmarks/lab_intervals.py --benches 3      # a look

The long-run value is the speed-up over the blocks of all benches together, of the prompts that a bench got to (on a
machine that is busy it may be fewer). Blocks are stored, so that other intervals can be tried on the same measurements
(`--again FILE` does that, without measuring); `--rounds FILE` keeps the time of every round, too.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from common import RESULTS, Report, as_json, log, median

from headstart.lab.bench_record import PLAIN, BenchSettings
from headstart.lab.benching import Bencher
from headstart.lab.figures import Measured
from headstart.lab.statistics import LEVEL, Block, ratio
from headstart.lab.system import SystemOptions
from headstart.lab.texts import choose, shipped


def measured(settings: BenchSettings, options: SystemOptions, per_task: int) -> tuple[list[Block], list[Any]]:
    """The blocks of one bench, from opening to closing; and of each block its prompt and all rounds of both ways."""
    texts = choose(shipped(), per_task)
    with Bencher(options, texts, settings) as bencher:
        bencher.run(settings.seconds)
        name = list(bencher.systems)[1]
        both = zip(bencher.measured(PLAIN), bencher.measured(name), strict=True)
        rounds = [
            [block.prompt, _rounds(a), _rounds(b)] for block, (a, b) in zip(bencher.pairs(name), both, strict=True)
        ]
        return bencher.pairs(name), rounds


def _rounds(block: Measured) -> dict[str, Any]:
    """Of each: milliseconds, those in which the draft read a prompt, width, tokens, and whether drafting cost time."""
    each = [
        [round(1e3 * r.round_seconds, 3), round(1e3 * r.catch_up_seconds, 3), r.width, r.emitted, int(r.paid)]
        for r in block.decoding
    ]
    return {"tokens": block.decode_tokens, "seconds": block.decode_seconds, "rounds": each}


def judged(benches: list[list[Block]]) -> dict[str, Any]:
    """How often each bench's interval holds the value of all of them together, on the prompts it got to."""
    every = [block for blocks in benches for block in blocks]
    found = [ratio(blocks) for blocks in benches]
    truths = []
    for blocks in benches:
        prompts = {block.prompt for block in blocks}
        together = ratio([block for block in every if block.prompt in prompts])
        assert together is not None
        truths.append(together.value)
    sure = [(each, truth) for each, truth in zip(found, truths, strict=True) if each is not None and each.interval]
    held = [each.interval is not None and each.interval.holds(truth) for each, truth in sure]
    return {
        "benches": len(benches),
        "long_run": median(truths),
        "long_run_differs": max(truths) / min(truths) - 1,
        "held": sum(held),
        "without_interval": len(benches) - len(sure),
        "level": LEVEL,
        "median_width": median(each.interval.width for each, _ in sure if each.interval is not None) if sure else None,
        "values": [each.value if each is not None else None for each in found],
        "intervals": [
            [each.interval.low, each.interval.high] if each is not None and each.interval is not None else None
            for each in found
        ],
        "blocks_a_bench": median(len(blocks) for blocks in benches),
    }


def told(found: dict[str, Any]) -> str:
    width = f"{found['median_width']:.3f}" if found["median_width"] is not None else "-"
    return (
        f"long run {found['long_run']:.3f}x; held by {found['held']} of {found['benches']} intervals, median width "
        f"{width} of the speed-up, {found['blocks_a_bench']:g} blocks a bench"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--benches", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=16, help="of each bench, loading not counted")
    parser.add_argument("--window", type=float, default=1180, help="seconds in all")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--gamma", type=int, help="a fixed draft length; without it: auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--device", help="without it: a GPU if there is one")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--per-task", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS / "lab-intervals.json")
    parser.add_argument("--rounds", type=Path, help="keep the times of all rounds in this file")
    parser.add_argument("--again", type=Path, help="judge the blocks of this file instead of measuring")
    given = parser.parse_args()
    if given.again is not None:
        stored = json.loads(given.again.read_text(encoding="utf-8"))["blocks"]
        log(told(judged([[Block(*block) for block in blocks] for blocks in stored])))
        return
    about = {name: getattr(given, name) for name in ("benches", "seconds", "draft", "gamma", "tokens", "per_task")}
    report = Report(given.out, about, given.window)
    settings = BenchSettings(tokens=given.tokens, seconds=given.seconds)
    options = SystemOptions(draft=given.draft, max_model_len=1024, threads=given.threads, device=given.device)
    if given.gamma is not None:
        options = options.changed(gamma=given.gamma)
    benches: list[list[Block]] = []
    kept: list[list[Any]] = []
    for number in range(given.benches):
        if report.late:
            log(f"no time left after bench {number}")
            break
        started = time.perf_counter()
        blocks, rounds = measured(settings, options, given.per_task)
        benches.append(blocks)
        kept.append(rounds)
        if given.rounds is not None:
            given.rounds.write_text(as_json(kept), encoding="utf-8")
        found = judged(benches)
        report.results["blocks"] = [
            [[b.prompt, b.base_tokens, b.base_seconds, b.tokens, b.seconds, int(b.drafted)] for b in blocks]
            for blocks in benches
        ]
        report.add("judged", found)
        log(f"{number + 1} in {time.perf_counter() - started:.0f} s: {found['values'][-1]:.3f}x; {told(found)}")


if __name__ == "__main__":
    main()
