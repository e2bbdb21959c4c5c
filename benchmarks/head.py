"""How good the shipped head guesses, or another draft: alpha and tau by kind of task, greedy and at temperature 1.
No clock is read.

    python benchmarks/head.py                                     # our sixty prompts
    python benchmarks/head.py --data ../shared/data --per-kind 8  # prompts from elsewhere, by file

Drafts of a fixed length, no lookup, and nothing is cut short, so that the figures are the draft's own.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, machine, prompts, save
from rich.console import Console
from rich.table import Table

from headstart import LLM, SamplingParams
from headstart.drafters.head import HeadDrafter
from headstart.drafters.model import ModelDrafter
from headstart.machine.load.embedded import embedded_draft, embedded_folder

console = Console()


def from_folder(folder: Path, per_kind: int | None) -> dict[str, list[str]]:
    found = {}
    for path in sorted(folder.glob("*.jsonl")):
        lines = [json.loads(line)["prompt"] for line in path.read_text().splitlines()]
        found[path.stem] = lines[:per_kind]
    return found


def measure(llm: LLM, texts: list[str], tokens: int, temperature: float) -> dict[str, float]:
    """Rounds that read the prompt draft nothing and are left out."""
    seed = 1 if temperature else None
    params = SamplingParams(temperature=temperature, max_tokens=tokens, seed=seed, verification="block")
    answers = llm.chat([[{"role": "user", "content": text}] for text in texts], params)
    assert isinstance(answers, list)
    all_stats = [answer.stats for answer in answers]
    drafted, accepted = sum(s.drafted for s in all_stats), sum(s.accepted for s in all_stats)
    rounds, emitted = sum(s.rounds - 1 for s in all_stats), sum(s.tokens - 1 for s in all_stats)
    return {"alpha": accepted / max(1, drafted), "tau": emitted / max(1, rounds), "tokens": emitted}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", type=Path, default=embedded_draft(), help="a head's folder, or a small model's")
    parser.add_argument("--data", type=Path, help="a folder of .jsonl files with the field 'prompt', instead of ours")
    parser.add_argument("--per-kind", type=int, default=10)
    parser.add_argument(
        "--kinds", nargs="*", help="only these; what --out holds of others, from an earlier run, is kept"
    )
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rows", type=int, default=10, help="prompts that are answered together")
    parser.add_argument("--gamma", type=int, default=5)
    parser.add_argument("--branch", type=int, default=1, help="above 1: trees, with gamma nodes")
    parser.add_argument("--temperatures", type=float, nargs="*", default=[0.0, 1.0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", default="head.json")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    llm = LLM(
        embedded_folder(),
        str(arguments.draft),
        gamma=arguments.gamma,
        dtype=torch.float32,
        quantization=None,
        draft_quantization=None,
        max_rows=arguments.rows,
        max_model_len=1024,
    )
    drafter = llm.engine.parts.drafter
    if isinstance(drafter, HeadDrafter):
        drafter.min_chance_to_extend, drafter.branch = 0.0, arguments.branch
    elif isinstance(drafter, ModelDrafter):
        drafter._min_chance_to_extend = None
    chosen = from_folder(arguments.data, arguments.per_kind) if arguments.data else prompts(arguments.per_kind)
    results: dict[str, dict[str, Any]] = {}
    if arguments.kinds:
        chosen = {kind: texts for kind, texts in chosen.items() if kind in arguments.kinds}
        if (RESULTS / arguments.out).exists():
            results = json.loads((RESULTS / arguments.out).read_text())["results"]
    table = Table(title=f"{arguments.draft.name}, {arguments.gamma} tokens drafted a round", title_justify="left")
    for column in ("task", *(f"{name}, T = {t:g}" for t in arguments.temperatures for name in ("alpha", "tau"))):
        table.add_column(column, justify="left" if column == "task" else "right")
    for kind, texts in chosen.items():
        measured = {f"{t:g}": measure(llm, texts, arguments.tokens, t) for t in arguments.temperatures}
        results[kind] = results.get(kind, {}) | measured
        cells = [f"{found[name]:.3f}" for found in measured.values() for name in ("alpha", "tau")]
        console.print(kind, *cells)
        table.add_row(kind, *cells)
    means = {}
    for temperature in sorted({temperature for found in results.values() for temperature in found}):
        those = [found[temperature] for found in results.values() if temperature in found]
        means[temperature] = {name: sum(found[name] for found in those) / len(those) for name in ("alpha", "tau")}
    asked = [means[f"{t:g}"] for t in arguments.temperatures]
    table.add_row("mean", *(f"{found[name]:.3f}" for found in asked for name in ("alpha", "tau")))
    console.print(table)
    path = save(arguments.out, {"machine": machine(), "settings": vars(arguments), "mean": means, "results": results})
    console.print(f"saved to {path}")


if __name__ == "__main__":
    main()
