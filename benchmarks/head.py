"""How good the shipped head guesses: alpha and tau by kind of task, greedy and at temperature 1. No clock is read.

    python benchmarks/head.py                                     # our sixty prompts
    python benchmarks/head.py --data ../shared/data --per-kind 8  # prompts from elsewhere, by file

Drafts of a fixed length, no lookup, and nothing is cut short, so that the figures are the head's own.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from common import machine, prompts, save
from rich.console import Console
from rich.table import Table

from headstart import LLM, SamplingParams
from headstart.drafters.head import HeadDrafter
from headstart.machine.embedded import embedded_draft, embedded_folder

console = Console()


def from_folder(folder: Path, per_kind: int | None) -> dict[str, list[str]]:
    found = {}
    for path in sorted(folder.glob("*.jsonl")):
        lines = [json.loads(line)["prompt"] for line in path.read_text().splitlines()]
        found[path.stem] = lines[:per_kind]
    return found


def measure(llm: LLM, texts: list[str], tokens: int, temperature: float) -> dict[str, float]:
    """Rounds that read the prompt draft nothing and are left out."""
    drafted = accepted = rounds = emitted = 0
    for i, text in enumerate(texts):
        params = SamplingParams(temperature=temperature, max_tokens=tokens, seed=i)
        answer = llm.chat([{"role": "user", "content": text}], params)
        assert not isinstance(answer, list)
        stats = answer.stats
        drafted += stats.drafted
        accepted += stats.accepted
        rounds += stats.rounds - 1
        emitted += stats.tokens - 1
    return {"alpha": accepted / max(1, drafted), "tau": emitted / max(1, rounds), "tokens": emitted}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head", type=Path, default=embedded_draft())
    parser.add_argument("--data", type=Path, help="a folder of .jsonl files with the field 'prompt', instead of ours")
    parser.add_argument("--per-kind", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--gamma", type=int, default=5)
    parser.add_argument("--branch", type=int, default=1, help="above 1: trees, with gamma nodes")
    parser.add_argument("--temperatures", type=float, nargs="*", default=[0.0, 1.0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", default="head.json")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    llm = LLM(embedded_folder(), str(arguments.head), gamma=arguments.gamma, max_rows=1, max_model_len=2048)
    drafter = llm.engine.parts.drafter
    assert isinstance(drafter, HeadDrafter)
    drafter.least_hope, drafter.branch = 0.0, arguments.branch
    chosen = from_folder(arguments.data, arguments.per_kind) if arguments.data else prompts(arguments.per_kind)
    results: dict[str, dict[str, Any]] = {}
    table = Table(title=f"{arguments.head.name}, {arguments.gamma} tokens drafted a round", title_justify="left")
    for column in ("task", *(f"{name}, T = {t:g}" for t in arguments.temperatures for name in ("alpha", "tau"))):
        table.add_column(column, justify="left" if column == "task" else "right")
    for kind, texts in chosen.items():
        results[kind] = {f"{t:g}": measure(llm, texts, arguments.tokens, t) for t in arguments.temperatures}
        cells = [f"{found[name]:.3f}" for found in results[kind].values() for name in ("alpha", "tau")]
        console.print(kind, *cells)
        table.add_row(kind, *cells)
    means = {
        f"{t:g}": {name: sum(r[f"{t:g}"][name] for r in results.values()) / len(results) for name in ("alpha", "tau")}
        for t in arguments.temperatures
    }
    table.add_row("mean", *(f"{found[name]:.3f}" for found in means.values() for name in ("alpha", "tau")))
    console.print(table)
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(arguments).items()}
    path = save(arguments.out, {"machine": machine(), "settings": settings, "mean": means, "results": results})
    console.print(f"saved to {path}")


if __name__ == "__main__":
    main()
