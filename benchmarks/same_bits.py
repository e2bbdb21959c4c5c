"""Are texts the same in any company with ``invariant=True``, and what does it cost? A grown bfloat16 target on a GPU.

    python benchmarks/same_bits.py ids --weights FOLDER_OR_GGUF --kinds greedy --gammas 0 3 --out results_folder
    python benchmarks/same_bits.py price --weights FOLDER_OR_GGUF --out results_folder

``ids``: requests alone, 8 and 32 together, with each draft length, pass after pass (the first cold, the others warm),
each against plain decoding alone; how many have the same ids. That first answer is kept in the results folder, or taken
from --reference, so that a later run compares with an earlier one. ``price``: decoding and reading prompts, with and
without. Without --weights a random model of SmolLM2-135M's shape is grown: near-ties are then many more.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from pathlib import Path
from typing import Any

import torch
from common import as_json, log, machine, median, prompts
from gpu_common import speed
from pairs import small_model

from headstart import LLM, SamplingParams
from headstart.control.controller import Controller, FixedController
from headstart.lab.grow import SHAPES, grow

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "coupled": {"temperature": 1.0, "verification": "coupled"},
}
ROWS = 32


class Bench:
    """A target, a draft, prompts, and what was found about them."""

    def __init__(self, weights: str | None, shape: str, out: Path) -> None:
        torch.manual_seed(0)
        small, tokenizer = small_model(weights)
        self.target = grow(small, SHAPES[shape], device="cuda", dtype=torch.bfloat16)
        self.draft = small.to("cuda", torch.bfloat16)
        if tokenizer is not None:
            chats = [[{"role": "user", "content": text}] for texts in prompts().values() for text in texts]
            ids = [tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=False) for c in chats]
            more = [[{"role": "user", "content": f"In one sentence: {c[0]['content']}"}] for c in chats[:4]]
            ids += [tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=False) for c in more]
        else:
            ids = [torch.randint(3, 49152, (24 + 3 * i,)).tolist() for i in range(64)]
        self.ids = ids[:64]
        self.out = out
        self.results: dict[str, Any] = {"machine": machine(), "shape": shape}

    def llm(self, *, invariant: bool) -> LLM:
        """One engine for every draft length: ``set_gamma``."""
        settings: dict[str, Any] = {"overlap": False, "max_rows": ROWS, "max_model_len": 1024, "max_gamma": 8}
        return LLM(self.target, self.draft, gamma="auto", check=False, invariant=invariant, **settings)

    def store(self, name: str) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / name).write_text(as_json(self.results))


def set_gamma(llm: LLM, gamma: str, own: Controller) -> None:
    """``own``: the engine's controller as it was opened, the only one that is told of rounds."""
    llm.engine.parts.controller = own
    llm.cold()
    if gamma != "auto":
        llm.engine.parts.controller = FixedController(int(gamma))


# -- the same ids ---------------------------------------------------------------------------------------------------


def passes(
    llm: LLM, ids: list[list[int]], params: list[SamplingParams], together: int, count: int, again: int
) -> list[Any]:
    """[pass][request] the ids of the answers. Requests come in groups as large as there are rows, so that a group's
    prompts are still warm in its later passes. ``again``: only so many of a group are written in its later passes."""
    found: list[list[Any]] = [[] for _ in range(count)]
    for group in range(0, len(ids), ROWS):
        llm.cold()
        for line in found:
            stop = min(group + (ROWS if line is found[0] else again), len(ids))
            for at in range(group, stop, together):
                end = min(at + together, group + ROWS)
                answers = llm.generate(ids[at:end], params[at:end])
                line += [(i, list(answer.token_ids)) for i, answer in enumerate(answers, start=at)]
    return found


def same_ids(bench: Bench, arguments: argparse.Namespace) -> None:
    llm = bench.llm(invariant=not arguments.default)
    own, ids = llm.engine.parts.controller, bench.ids[: arguments.requests]
    known = json.loads(Path(arguments.reference).read_text()) if arguments.reference else {}
    table: dict[str, Any] = {}
    for kind in arguments.kinds:
        params = [
            SamplingParams(max_tokens=arguments.tokens, seed=i, ignore_eos=True, **KINDS[kind]) for i in range(64)
        ]
        for gamma in arguments.gammas:
            set_gamma(llm, gamma, own)
            for together in arguments.together:
                started = time.perf_counter()
                again = arguments.again if together == 1 else ROWS
                found = passes(llm, ids, params, together, arguments.passes, again)
                want = known.setdefault(kind, [answer for _, answer in found[0]])
                equal = [sum(want[i] == answer for i, answer in line) for line in found]
                written = [len(line) for line in found]
                name = f"{kind}, gamma {gamma}, {together} together"
                table[name] = {"same": equal, "of": written, "seconds": time.perf_counter() - started}
                log(f"{name}: {equal} of {written} the same, pass by pass ({table[name]['seconds']:.0f} s)")
                bench.results["same_ids"] = {"invariant": not arguments.default, "tokens": arguments.tokens} | table
                bench.store("same-bits-default.json" if arguments.default else "same-bits.json")
    (bench.out / "same-bits-reference.json").write_text(as_json(known))


# -- the price ------------------------------------------------------------------------------------------------------


def reading(llm: LLM, pieces: int, tokens: int) -> float:
    """Milliseconds to read so many tokens into each of so many rows."""
    runner, times = llm.engine.parts.runner, []
    llm.cold()
    for turn in range(12):
        text = torch.randint(3, 49152, (pieces, tokens), generator=torch.Generator().manual_seed(turn)).tolist()
        for row in range(pieces):
            runner.slab.truncate(row, 0)
        torch.cuda.synchronize()
        started = time.perf_counter()
        runner.read(list(enumerate(text)))
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - started))
    for row in range(pieces):
        runner.slab.truncate(row, 0)
    return median(times[3:])


def price(bench: Bench, arguments: argparse.Namespace) -> None:
    found: dict[str, Any] = {}
    for name, invariant in (("default", False), ("invariant", True)):
        llm = bench.llm(invariant=invariant)
        mine: dict[str, Any] = {}
        for rows in (1, 8, 32):
            for gamma in (0, 3, 8):
                measured = speed(llm, bench.ids[:rows], tokens=128, gamma=gamma)
                mine[f"{rows} rows, gamma {gamma}, tokens/s"] = measured["tokens_per_second"]
        for pieces, tokens in ((1, 64), (1, 512), (8, 64)):
            mine[f"reading {pieces} x {tokens}, ms"] = reading(llm, pieces, tokens)
        found[name] = mine
        log(f"{name}: {json.dumps(mine)}")
        del llm
        gc.collect()  # an LLM is a ring of references
        torch.cuda.empty_cache()
    found["invariant over default"] = {key: found["invariant"][key] / found["default"][key] for key in found["default"]}
    log(json.dumps(found["invariant over default"], indent=1))
    bench.results["price"] = found
    bench.store("same-bits-price.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["ids", "price"])
    parser.add_argument("--weights")
    parser.add_argument("--shape", default="llama-3-8b", choices=sorted(SHAPES))
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--gammas", nargs="*", default=["0", "3", "8", "auto"])
    parser.add_argument("--together", nargs="*", type=int, default=[1, 8, 32])
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--again", type=int, default=ROWS, help="how many of each 32 are written again when alone")
    parser.add_argument("--default", action="store_true", help="without invariant, to see what it changes")
    parser.add_argument("--reference", help="answers of an earlier run")
    parser.add_argument("--out", default="benchmarks/results")
    arguments = parser.parse_args()
    bench = Bench(arguments.weights, arguments.shape, Path(arguments.out))
    (same_ids if arguments.part == "ids" else price)(bench, arguments)


if __name__ == "__main__":
    main()
