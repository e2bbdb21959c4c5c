"""Headstart against Hugging Face on the CPU: same weights, same dtype, same prompts, same greedy tokens, one run.

    python benchmarks/cpu.py                    # everything, about half an hour on two cores
    python benchmarks/cpu.py --per-kind 5 --tokens 48 --parts plain lookup
    python benchmarks/cpu.py --per-kind 5 --tokens 128 --parts peers --peers-python ...    # see peers.py

For every prompt the systems take turns, so that a busy moment of the machine hits all of them. A figure is the median
over prompts of the ratio of their times, prompt reading included; absolute times of a shared machine mean little and
are stored only to be able to recompute. Nothing else may run meanwhile.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from common import KINDS, geometric_mean, greedy, machine, median, prompts, save, set_draft_length
from pairs import CPU_TARGET, Noise
from peers import Run, open_peers, race, speeds
from peers import System as Timed
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from headstart import LLM, SamplingParams
from headstart.lab.grow import grow
from headstart.machine.load.embedded import embedded_folder
from headstart.machine.load.loading import load

console = Console(width=140)
System = Callable[[list[int], int], tuple[list[int], float]]  # (prompt ids, tokens) -> (ids, seconds)


def hugging_face(model: PreTrainedModel, **options: Any) -> System:
    def run(ids: list[int], tokens: int) -> tuple[list[int], float]:
        started = time.perf_counter()
        return greedy(model, ids, tokens, **options), time.perf_counter() - started

    return run


def headstart(llm: LLM, **params: Any) -> System:
    def run(ids: list[int], tokens: int) -> tuple[list[int], float]:
        slab = llm.engine.parts.runner.slab
        for row in range(slab.rows):  # cold every time: Hugging Face keeps nothing between calls either
            slab.truncate(row, 0)
        started = time.perf_counter()
        answer = llm.generate(ids, SamplingParams(temperature=0, max_tokens=tokens, **params))
        return list(answer.token_ids), time.perf_counter() - started

    return run


def compare(
    name: str, ours: tuple[str, System], theirs: tuple[str, System], encoded: dict[str, list[list[int]]], tokens: int
) -> dict[str, Any]:
    """Both systems in turn over all prompts; the ratio of their times by kind of task."""
    ratios: dict[str, list[float]] = {}
    seconds: dict[str, list[tuple[float, float, int]]] = {}
    same = total = 0
    for system in (ours[1], theirs[1]):
        system(encoded[KINDS[0]][0], 4)  # warm up
    for kind, lines in encoded.items():
        for i, ids in enumerate(lines):
            console.print(f"  {name}: {kind} {i + 1}/{len(lines)}", end="\r")
            order = (ours[1], theirs[1]) if i % 2 else (theirs[1], ours[1])
            first, second = order[0](ids, tokens), order[1](ids, tokens)
            mine, peer = (first, second) if i % 2 else (second, first)
            same += mine[0] == peer[0]
            total += 1
            # The same tokens take the same work; should they ever differ, compare seconds a token.
            ratios.setdefault(kind, []).append((peer[1] / len(peer[0])) / (mine[1] / len(mine[0])))
            seconds.setdefault(kind, []).append((mine[1], peer[1], len(mine[0])))
    by_kind = {kind: median(values) for kind, values in ratios.items()}
    return {
        "comparison": name,
        "ours": ours[0],
        "peer": theirs[0],
        "speed_over_peer": by_kind,
        "geometric_mean": geometric_mean(by_kind.values()),
        "same_tokens": f"{same} of {total}",
        "seconds_ours_peer_tokens": seconds,
    }


def batches(llm: LLM, encoded: dict[str, list[list[int]]], tokens: int, rows: int, repeats: int) -> dict[str, Any]:
    """Throughput of ``rows`` sequences together against one at a time, decoding only."""
    lines = [line for kind in KINDS for line in encoded[kind][:2]][:rows]
    params = SamplingParams(temperature=0, max_tokens=tokens, speculate=False, ignore_eos=True)
    ratios = []
    for _ in range(repeats):
        # The batch needs its rows to start together, so both sides are timed from the second token on.
        before = llm.stats.round_seconds, llm.stats.rounds
        llm.generate(lines[0], params)
        alone = (llm.stats.round_seconds - before[0]) / (llm.stats.rounds - before[1] - 1)
        before = llm.stats.round_seconds, llm.stats.rounds
        llm.generate(lines, params)
        # The first ``rows`` rounds read prompts in; those that follow carry every row.
        together = (llm.stats.round_seconds - before[0]) / (llm.stats.rounds - before[1] - rows)
        ratios.append(alone / together * rows)
        console.print(f"  batch {rows}: {ratios[-1]:.2f}x", end="\r")
    return {"comparison": f"batch {rows} over batch 1, throughput", "median": median(ratios), "all": ratios}


def widths(llm: LLM, context: int = 200, repeats: int = 15) -> dict[str, Any]:
    """What a forward over several tokens costs, in forwards over one; widths in turn, medians."""
    runner = llm.engine.parts.runner
    ids = torch.arange(context + 8) % 1000 + 100
    runner.forward(slice(0, 1), ids[None, :context], [0], keep=1)
    seconds: dict[int, list[float]] = {width: [] for width in (1, 2, 4, 8)}
    for _ in range(repeats):
        for width, found in seconds.items():
            started = time.perf_counter()
            runner.forward(slice(0, 1), ids[None, context : context + width], [context])
            found.append(time.perf_counter() - started)
    one = median(seconds[1])
    return {
        "comparison": "a forward over several tokens against one, the default configuration",
        "weights": llm.report.dtype,
        "times_one": {width: median(found) / one for width, found in seconds.items()},
        "seconds": seconds,
    }


def timed(llm: LLM, count: Counter[str] | None = None, **params: Any) -> Timed:
    """Ours for the race with other engines: exactly so many tokens, and when the first of them came.

    ``count``: where these runs' own tokens and rounds are added up.
    """

    def run(ids: list[int], tokens: int) -> Run:
        before = llm.stats.tokens, llm.stats.row_rounds
        slab = llm.engine.parts.runner.slab
        for row in range(slab.rows):
            slab.truncate(row, 0)
        settings = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, **params)
        found: list[int] = []
        first = 0.0
        started = time.perf_counter()
        for piece in llm.stream(ids, settings):
            first = first or time.perf_counter()
            if piece.token_id is not None:
                found.append(piece.token_id)
        seconds = time.perf_counter() - started
        if count is not None:
            count.update(tokens=llm.stats.tokens - before[0], rounds=llm.stats.row_rounds - before[1])
        return Run(found, seconds, first - started)

    return run


def timed_hugging_face(model: PreTrainedModel, **options: Any) -> Timed:
    class Clock:
        """A streamer: told of the prompt, then of every token."""

        def __init__(self) -> None:
            self.calls: list[float] = []

        def put(self, value: Any) -> None:
            self.calls.append(time.perf_counter())

        def end(self) -> None:
            pass

    def run(ids: list[int], tokens: int) -> Run:
        clock = Clock()
        started = time.perf_counter()
        found, seconds = hugging_face(model, min_new_tokens=tokens, streamer=clock, **options)(ids, tokens)
        return Run(found, seconds, clock.calls[1] - started)

    return run


def against_peers(
    encoded: dict[str, list[list[int]]],
    theirs: PreTrainedModel,
    arguments: argparse.Namespace,
    keep: Callable[[dict[str, Any]], None],
) -> None:
    """Every engine that is installed, ours plain and as it comes, all in turn over the same prompts.

    A prompt's answer is as long as our own plain answer to it, at most ``--tokens``; nobody may stop earlier.
    """
    llm = LLM(embedded_folder(), max_rows=1)
    plain, drafted = timed(llm, speculate=False), Counter[str]()
    peers, missing = open_peers(arguments.peers_python, arguments.threads)
    systems: dict[str, Timed] = {
        "headstart plain": plain,
        f"headstart {llm.drafter_name}": timed(llm, drafted),
        "HF float32": timed_hugging_face(theirs),
        **peers,
    }
    lengths: dict[str, list[int]] = {}
    for kind, lines in encoded.items():
        for ids in lines:
            answer = llm.generate(ids, SamplingParams(temperature=0, max_tokens=arguments.tokens, speculate=False))
            lengths.setdefault(kind, []).append(max(16, len(answer.token_ids)))
    about: dict[str, Any] = {
        "comparison": "peers",
        "missing": missing,
        "versions": {name: peer.version for name, peer in peers.items()},
        "tokens": lengths,
    }

    def so_far(raw: dict[str, Any]) -> None:
        about["tokens_seconds_read_seconds"] = raw
        keep(about)

    runs = race(systems, encoded, lengths, so_far, {"HF float32": arguments.hf_prompts})
    for peer in peers.values():
        peer.close()
    over = {ours: speeds(runs, ours) for ours in ("headstart plain", f"headstart {llm.drafter_name}")}
    keep(about | {"speed_over": over, "acceptance_length": drafted["tokens"] / drafted["rounds"]})
    for ours, table in over.items():
        shown = Table(title=f"{ours}: its speed over the others' (decoding)", title_justify="left")
        for column in ("system", *KINDS, "geo. mean", "with prompt", "tok/s"):
            shown.add_column(column)
        for name, entry in table.items():
            cells = [f"{entry['decode_ratio'][kind]:.2f}" for kind in encoded]
            speed = median(entry["decode_tokens_per_second"].values())
            means = [f"{entry[m]:.2f}" for m in ("decode_geometric_mean", "whole_geometric_mean")]
            shown.add_row(name, *cells, *means, f"{speed:.0f}")
        console.print(shown)


def pair(target: PreTrainedModel, noise: float) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A larger target that computes the embedded model's function, and a draft that agrees with it often, not always.

    The draft is the embedded model with noise on its weights: real text, and an acceptance rate well under 1.
    """
    return grow(target, CPU_TARGET), Noise(target).model(noise)


def show(results: list[dict[str, Any]]) -> None:
    table = Table(title="Speed over the peer (median over prompts; above 1 is faster)", title_justify="left")
    for column in ("ours", "peer", *KINDS, "geo. mean", "same tokens"):
        table.add_column(column, justify="right" if column not in ("ours", "peer") else "left")
    for result in results:
        if "geometric_mean" in result:
            cells = [f"{result['speed_over_peer'][kind]:.2f}" for kind in KINDS]
            mean = f"{result['geometric_mean']:.2f}"
            table.add_row(result["ours"], result["peer"], *cells, mean, result["same_tokens"])
    console.print(table)
    for result in results:
        if "median" in result:
            console.print(f"{result['comparison']}: {result['median']:.2f}x")
        if "times_one" in result:
            console.print(", ".join(f"{width} tokens {times:.2f}x" for width, times in result["times_one"].items()))
        if "overhead_share" in result:
            console.print(f"engine overhead, {result['ours']}: {result['overhead_share']:.1%} of a round")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--per-kind", type=int, default=10, help="prompts of each kind of task")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--draft", help="a draft for the embedded model, say from `headstart distill --kind model`")
    parser.add_argument("--assistant-tokens", type=int, default=2, help="tokens a draft, for HF assisted generation")
    parser.add_argument("--draft-tokens", type=int, default=48, help="for the draft-model pair")
    parser.add_argument(
        "--draft-noise", type=float, default=0.04, help="how far the draft's weights are off; 0.08: alpha 0.7"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--parts", nargs="*", default=["plain", "default", "lookup", "batch", "draft"])
    parser.add_argument("--peers-python", default=sys.executable, help="the python that has the other engines")
    parser.add_argument("--hf-prompts", type=int, default=5, help="of each kind, beside the other engines")
    parser.add_argument("--out", default="cpu.json")
    parser.add_argument("--peers-out", default="cpu-peers.json")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    loaded = load(embedded_folder())
    target, tokenizer = loaded.model, loaded.tokenizer
    theirs = load(embedded_folder()).model  # a copy of its own: neither side may profit from what the other did
    encoded = {
        kind: [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
            )
            for text in texts
        ]
        for kind, texts in prompts(arguments.per_kind).items()
    }
    results: list[dict[str, Any]] = []
    settings = {k: v for k, v in vars(arguments).items() if k not in ("out", "peers_python")}

    def keep(result: dict[str, Any]) -> None:
        """Show and store as it goes: a run is long, and what was measured should outlive it."""
        results.append(result)
        show([result])
        save(arguments.out, {"machine": machine(), "settings": settings, "results": results})

    def add(name: str, llm: LLM, ours: str, theirs: tuple[str, System], tokens: int) -> None:
        result = compare(name, (ours, headstart(llm)), theirs, encoded, tokens)
        result["overhead_share"] = llm.stats.overhead_share
        result["acceptance_rate"] = llm.stats.acceptance_rate
        result["acceptance_length"] = llm.stats.acceptance_length
        keep(result)

    if "plain" in arguments.parts:
        llm = LLM(target, None, tokenizer=tokenizer, max_rows=1)
        add("plain", llm, "headstart plain", ("HF generate", hugging_face(theirs)), arguments.tokens)
    if "default" in arguments.parts:
        # The shipped head beside lookup (or --draft), on float weights; the quantized default runs against the peers.
        exact: dict[str, Any] = {"dtype": "float32", "quantization": None, "draft_quantization": None}
        llm = LLM(embedded_folder(), arguments.draft or "auto", max_rows=1, **exact)
        off = headstart(llm, speculate=False)
        add("default", llm, f"headstart {llm.drafter_name}", ("headstart plain", off), arguments.tokens)
    if "widths" in arguments.parts:
        keep(widths(LLM(max_rows=1)))
    if "peers" in arguments.parts:

        def store(result: dict[str, Any]) -> None:
            save(arguments.peers_out, {"machine": machine(), "settings": settings, "results": result})

        against_peers(encoded, theirs, arguments, store)
    if "lookup" in arguments.parts:
        llm = LLM(target, "lookup", tokenizer=tokenizer, max_rows=1)
        peer = hugging_face(theirs, prompt_lookup_num_tokens=10)
        add("lookup", llm, "headstart lookup", ("HF prompt lookup (10)", peer), arguments.tokens)
    if "batch" in arguments.parts:
        llm = LLM(target, None, tokenizer=tokenizer, max_rows=8)
        keep(batches(llm, encoded, 24, 8, repeats=5))
    if "draft" in arguments.parts:
        if arguments.draft:
            big, copy = target, theirs
            draft, other = (load(arguments.draft, dtype="float32").model for _ in "ab")
        else:
            big, draft = pair(target, arguments.draft_noise)
            copy, other = big, draft  # too large to have twice
        ours = partial(LLM, big, draft, quantization=None, draft_quantization=None, max_rows=1)
        peer = hugging_face(copy, assistant_model=other)
        add("draft", ours(), "headstart draft model", ("HF assisted", peer), arguments.draft_tokens)
        # Its defaults end a draft where the draft model is not sure. The other way is short drafts of one length.
        count = arguments.assistant_tokens
        set_draft_length(other, count)
        add("draft_short", ours(), "headstart draft model", (f"HF assisted ({count})", peer), arguments.draft_tokens)
    if results:
        show(results)


if __name__ == "__main__":
    main()
