"""Sampling on the CPU: speculation against plain decoding with temperature, per kind of task, on the default model.

    python benchmarks/sampled.py                       # both settings, both rules, five prompts a kind
    python benchmarks/sampled.py --per-kind 10 --tokens 64 --rules block

For every prompt greedy plain, sampled plain and sampled speculative decoding take turns, as many tokens each. A figure
is the median over prompts of the ratio of seconds a token, from the second token on. Under the coupled rule the tokens
must be those of plain decoding with the same seed, which is counted. Nothing else may run meanwhile.

A shared machine's moods outlast a run of half a second, so there is a second figure, "steady": the same rounds, each at
what such a round (as many drafted tokens, the same settings) takes undisturbed: the lower quartile over all prompts.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from common import KINDS, geometric_mean, machine, median, prompts, save
from rich.console import Console
from rich.table import Table

from headstart import LLM, SamplingParams
from headstart.types import Round

SETTINGS: dict[str, dict[str, float]] = {
    "temperature 1": {"temperature": 1.0},
    "temperature 0.8, top-p 0.95": {"temperature": 0.8, "top_p": 0.95},
}
ROUNDS: list[Round] = []  # of the run that is under way
console = Console(width=150)


def timed(llm: LLM, ids: list[int], params: SamplingParams) -> tuple[list[int], float, list[tuple[int, int, float]]]:
    """The tokens, seconds for each from the second one on, and the rounds: drafted, emitted, seconds."""
    slab = llm.engine.parts.runner.slab
    for row in range(slab.rows):  # cold every time
        slab.truncate(row, 0)
    first, found = 0.0, []
    ROUNDS.clear()
    for piece in llm.stream(ids, params):
        first = first or time.perf_counter()
        if piece.token_id is not None:
            found.append(piece.token_id)
    # Pieces of the first round come together; the few tokens it may hold more than one do not matter among many.
    rounds = [(r.drafted, r.emitted, r.round_seconds) for r in ROUNDS if not r.prefill]
    return found, (time.perf_counter() - first) / (len(found) - 1), rounds


def play(llm: LLM, ids: list[int], tokens: int, seed: int, turn: int, rules: list[str]) -> dict[str, Any]:
    """One prompt: greedy plain once, and per setting plain and each rule, the order turning from prompt to prompt."""
    fixed: dict[str, Any] = {"max_tokens": tokens, "ignore_eos": True, "seed": seed}
    runs = {"greedy": SamplingParams(temperature=0, speculate=False, **fixed)}
    for name, setting in SETTINGS.items():
        runs[f"{name}/plain"] = SamplingParams(speculate=False, **setting, **fixed)
        for rule in rules:
            runs[f"{name}/{rule}"] = SamplingParams(verification=rule, **setting, **fixed)  # type: ignore[arg-type]
    order = list(runs)
    order = order[turn % len(order) :] + order[: turn % len(order)]
    found = {name: timed(llm, ids, runs[name]) for name in order}
    same = [found[f"{name}/coupled"][0] == found[f"{name}/plain"][0] for name in SETTINGS] if "coupled" in rules else []
    return {
        "seconds_a_token": {name: seconds for name, (_, seconds, _) in found.items()},
        "rounds": {name: rounds for name, (_, _, rounds) in found.items()},
        "coupled_same": same,
    }


def steady(raw: dict[str, list[dict[str, Any]]]) -> None:
    """Add to every prompt what its rounds would take at the usual speed, seconds a token."""
    seen: dict[tuple[str, int], list[float]] = {}
    entries = [entry for found in raw.values() for entry in found]
    for entry in entries:
        for name, rounds in entry["rounds"].items():
            for drafted, _, seconds in rounds:
                seen.setdefault((name, drafted), []).append(seconds)
    usual = {key: sorted(found)[len(found) // 4] for key, found in seen.items()}
    for entry in entries:
        entry["steady_seconds_a_token"] = {
            name: sum(usual[name, drafted] for drafted, _, _ in rounds) / sum(emitted for _, emitted, _ in rounds)
            for name, rounds in entry.pop("rounds").items()
        }


def summary(raw: dict[str, list[dict[str, Any]]], rules: list[str]) -> dict[str, Any]:
    def ratio(kind: str, above: str, below: str, measure: str = "seconds_a_token") -> float:
        seconds = [entry[measure] for entry in raw[kind]]
        return median(each[above] / each[below] for each in seconds)

    made: dict[str, Any] = {}
    for name in SETTINGS:
        over = {rule: {kind: ratio(kind, f"{name}/plain", f"{name}/{rule}") for kind in raw} for rule in rules}
        calm = {
            rule: {kind: ratio(kind, f"{name}/plain", f"{name}/{rule}", "steady_seconds_a_token") for kind in raw}
            for rule in rules
        }
        extra = [
            1e3 * (e["steady_seconds_a_token"][f"{name}/plain"] - e["steady_seconds_a_token"]["greedy"])
            for entries in raw.values()
            for e in entries
        ]
        made[name] = {
            "over_plain": over,
            "geometric_mean": {rule: geometric_mean(by_kind.values()) for rule, by_kind in over.items()},
            "steady_over_plain": calm,
            "steady_geometric_mean": {rule: geometric_mean(by_kind.values()) for rule, by_kind in calm.items()},
            "steady_milliseconds_a_token_more_than_greedy": median(extra),
        }
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--per-kind", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--kinds", nargs="*", default=list(KINDS))
    parser.add_argument("--rules", nargs="*", default=["block", "coupled"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", default="cpu-sampled.json")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    llm = LLM(max_rows=1)
    llm.listen(ROUNDS.extend)
    assert llm.tokenizer is not None
    raw: dict[str, list[dict[str, Any]]] = {}
    for turn, (kind, text) in enumerate((k, t) for k in arguments.kinds for t in prompts(arguments.per_kind)[k]):
        ids = llm.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        if not raw:
            play(llm, ids, 16, 0, 0, arguments.rules)  # warm up
        raw.setdefault(kind, []).append(play(llm, ids, arguments.tokens, turn, turn, arguments.rules))
    steady(raw)
    found = summary(raw, arguments.rules)
    same = [one for entries in raw.values() for entry in entries for one in entry["coupled_same"]]
    save(
        arguments.out,
        {
            "machine": machine(),
            "settings": vars(arguments),
            "drafter": llm.drafter_name,
            "results": found,
            "coupled_tokens_as_plain": f"{sum(same)} of {len(same)}",
            "raw": raw,
        },
    )
    table = Table(title="Speed over plain decoding, sampled (median over prompts)", title_justify="left")
    for column in ("settings", "rule", *raw, "geo. mean", "plain - greedy"):
        table.add_column(column)
    for name, entry in found.items():
        for rule in arguments.rules:
            more = f"{entry['steady_milliseconds_a_token_more_than_greedy']:.2f} ms"
            for which in ("", "steady_"):
                cells = [f"{entry[which + 'over_plain'][rule][kind]:.2f}" for kind in raw]
                mean = f"{entry[which + 'geometric_mean'][rule]:.2f}"
                table.add_row(name, f"{rule} {which[:-1]}", *cells, mean, more)
    console.print(table)
    console.print(f"coupled tokens as plain: {sum(same)} of {len(same)}")


if __name__ == "__main__":
    main()
