"""Headstart against Hugging Face on the CPU: same weights, same dtype, same prompts, same greedy tokens, one run.

    python benchmarks/cpu.py                    # everything, about half an hour on two cores
    python benchmarks/cpu.py --per-kind 5 --tokens 48 --parts plain lookup

For every prompt the systems take turns, so that a busy moment of the machine hits all of them. A figure is the median
over prompts of the ratio of their times, prompt reading included; absolute times of a shared machine mean little and
are stored only to be able to recompute. Nothing else may run meanwhile.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from common import KINDS, geometric_mean, machine, median, prompts, save
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from headstart import LLM, SamplingParams
from headstart.lab.grow import Shape, grow
from headstart.machine.embedded import embedded_folder
from headstart.machine.loading import load

console = Console(width=140)
System = Callable[[list[int], int], tuple[list[int], float]]  # (prompt ids, tokens) -> (ids, seconds)


def hugging_face(model: PreTrainedModel, **options: Any) -> System:
    def run(ids: list[int], tokens: int) -> tuple[list[int], float]:
        batch = torch.tensor([ids])
        started = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out = model.generate(
                batch,
                attention_mask=torch.ones_like(batch),
                do_sample=False,
                max_new_tokens=tokens,
                pad_token_id=0,
                **options,
            )
        return out[0, len(ids) :].tolist(), time.perf_counter() - started

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


def pair(target: PreTrainedModel, noise: float) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A larger target that computes the embedded model's function, and a draft that agrees with it often, not always.

    The draft is the embedded model with noise on its weights: real text, and an acceptance rate well under 1.
    """
    shape = Shape(layers=32, hidden=1152, ffn=3072, heads=18, kv_heads=6, head_dim=64)
    big = grow(target, shape)
    draft = type(target)(target.config).eval()
    draft.load_state_dict(target.state_dict())
    draft.tie_weights()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in draft.named_parameters():
            if weight.dim() > 1 and "layers" in name:
                weight.add_(torch.randn(weight.shape, generator=generator) * weight.std() * noise)
    return big, draft


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
        if "overhead_share" in result:
            console.print(f"engine overhead, {result['ours']}: {result['overhead_share']:.1%} of a round")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--per-kind", type=int, default=10, help="prompts of each kind of task")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--draft-tokens", type=int, default=48, help="for the draft-model pair, whose target is larger")
    parser.add_argument(
        "--draft-noise", type=float, default=0.04, help="how far the draft's weights are off; 0.08: alpha 0.7"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--parts", nargs="*", default=["plain", "default", "lookup", "batch", "draft"])
    parser.add_argument("--out", default="cpu.json")
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
    settings = {k: v for k, v in vars(arguments).items() if k != "out"}

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
        llm = LLM(embedded_folder(), max_rows=1)  # the shipped head beside lookup
        off = headstart(llm, speculate=False)
        add("default", llm, f"headstart {llm.drafter_name}", ("headstart plain", off), arguments.tokens)
    if "lookup" in arguments.parts:
        llm = LLM(target, "lookup", tokenizer=tokenizer, max_rows=1)
        peer = hugging_face(theirs, prompt_lookup_num_tokens=10)
        add("lookup", llm, "headstart lookup", ("HF prompt lookup (10)", peer), arguments.tokens)
    if "batch" in arguments.parts:
        llm = LLM(target, None, tokenizer=tokenizer, max_rows=8)
        keep(batches(llm, encoded, 24, 8, repeats=5))
    if "draft" in arguments.parts:
        big, draft = pair(target, arguments.draft_noise)
        llm = LLM(big, draft, max_rows=1)
        peer = hugging_face(big, assistant_model=draft)
        add("draft", llm, "headstart draft model", ("HF assisted", peer), arguments.draft_tokens)
    show(results)


if __name__ == "__main__":
    main()
