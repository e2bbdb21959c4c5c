"""Rounded weights on a GPU: speed against the bandwidth they need, perplexity, and the same tokens with speculation.

    python benchmarks/gpu_quantized.py --weights FOLDER_OR_GGUF --ids prompts.json --text text_ids.json

Two targets: the small model itself, and the small model grown to a big shape (see ``gpu.py``). --text: token ids for
the perplexity ([...], as ``perplexity.py`` chooses its text; --write-text FILE makes them, without a GPU). Perplexity
is computed by the decoding kernels, sixteen tokens at a time, in windows of 512. A floor is the bytes that a step of
these very weights reads, over the measured bandwidth. Written to gpu-quantized.json, after each part.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import gc
import json
import math
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import as_json, log, machine
from gpu_common import bandwidth, speed
from torch.nn.functional import cross_entropy

from headstart import LLM, SamplingParams
from headstart.control.controller import FixedController
from headstart.lab.grow import SHAPES, grow
from headstart.machine.load.loading import load
from headstart.machine.quantize import rounded

WINDOW, STEP = 512, 16
KINDS: tuple[Any, ...] = (None, "int8", "int4")
GAMMA = 8
COUPLED = {"temperature": 0.8, "verification": "coupled"}


def name(kind: str | None) -> str:
    return kind or "bfloat16"


@torch.inference_mode()
def perplexity(llm: LLM, ids: list[int]) -> dict[str, Any]:
    """Of text by the kernels that decode: the model's own runner, row 0."""
    runner: Any = llm.engine.parts.runner
    runner.slab.truncate(0, 0)  # the row's keys are overwritten here: no later prompt may find them
    total, count = torch.zeros((), dtype=torch.float64, device="cuda"), 0
    for at in range(0, len(ids) - 1, WINDOW):
        window = torch.tensor([ids[at : at + WINDOW]], device="cuda")
        logits = [
            runner.forward(slice(0, 1), window[:, start : start + STEP], [start])[0]
            for start in range(0, window.shape[1], STEP)
        ]
        total += cross_entropy(torch.cat(logits)[:-1], window[0, 1:], reduction="none").double().sum()
        count += window.shape[1] - 1
    return {"perplexity": math.exp(float(total) / count), "tokens": count}


def same_tokens(llm: LLM, ids: list[list[int]], tokens: int = 128) -> dict[str, int]:
    """How many prompts get the same ids with speculation as without: greedy, and coupled at a temperature."""
    found, slab = {"prompts": len(ids)}, llm.engine.parts.runner.slab
    for rule, params in (("greedy", {"temperature": 0.0}), ("coupled", COUPLED)):
        answers = []
        for gamma in (0, GAMMA, 3):
            llm.engine.parts.controller = FixedController(gamma)
            answers.append([])
            for i, line in enumerate(ids):
                slab.truncate(0, 0)  # all read their whole prompt: cuBLAS rounds a prompt by its length
                asked = SamplingParams(max_tokens=tokens, ignore_eos=True, seed=i, **params)
                answers[-1].append(llm.generate(line, asked).token_ids)
        found[f"{rule}_same"] = sum(a == b == c for a, b, c in zip(*answers, strict=True))
        found[f"{rule}_accepted"] = llm.stats.accepted
    return found


class Bench:
    """The parts. A part that fails says so and the others go on."""

    def __init__(self, origin: Any, ids: list[list[int]], text: list[int], shape: str, out: Path) -> None:
        self.origin, self.ids, self.text, self.shape, self.out = origin, ids, text, shape, out
        self.small = copy.deepcopy(origin)
        for p in self.small.parameters():
            p.data = p.data.to(torch.bfloat16)  # not .to(dtype), which would round the rotary table too
        self.small.to("cuda")
        self.results: dict[str, Any] = {"machine": machine(), "shape": shape}
        self.big: Any = None
        self.read = bandwidth()
        self.results["read_bandwidth_tb_s"] = self.read / 1e12

    def part(self, title: str, body: Callable[[], Any]) -> None:
        started = time.perf_counter()
        try:
            self.results[title] = body()
        except Exception as error:
            traceback.print_exc()
            self.results[title] = {"failed": f"{type(error).__name__}: {error}"}
        seconds = time.perf_counter() - started
        log(f"{title} ({seconds:.1f} s): {json.dumps(self.results[title], default=str)[:900]}")
        gc.collect()
        torch.cuda.empty_cache()
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / "gpu-quantized.json").write_text(as_json(self.results))

    def grow(self) -> dict[str, Any]:
        self.big = grow(self.origin, SHAPES[self.shape], device="cuda", dtype=torch.bfloat16)
        return {"parameters": sum(p.numel() for p in self.big.parameters())}

    def llm(self, target: Any, kind: Any, draft: Any, draft_kind: Any, rows: int = 1) -> LLM:
        return LLM(
            target,
            draft,
            gamma=GAMMA,
            quantization=kind,
            draft_quantization=draft_kind,
            max_rows=rows,
            max_model_len=1024,
            overlap=False,
            check=False,
        )

    def plain(self, llm: LLM) -> dict[str, Any]:
        """Decoding one token at a time, against its own floor."""
        found = speed(llm, self.ids, tokens=192, gamma=0)
        weights = llm.engine.parts.runner.fused.weights  # type: ignore[union-attr]
        floor = 1e3 * weights.step_bytes / self.read
        return {
            "tokens_per_second": found["tokens_per_second"],
            "step_ms": found["round_ms"],
            "step_bytes": weights.step_bytes,
            "all_bytes": weights.bytes,
            "floor_ms": floor,
            "share_of_its_floor": floor / found["round_ms"],
        }

    def alone(self, kind: Any) -> dict[str, Any]:
        """The small model as a target."""
        llm = self.llm(self.small, kind, None, None)
        return self.plain(llm) | perplexity(llm, self.text)

    def pair(self, kind: Any, draft_kind: Any, *, whole: bool) -> dict[str, Any]:
        """The big target with the small draft. ``one_kernel``: with perplexity and the proof of equal tokens."""
        started = time.perf_counter()
        llm = self.llm(self.big, kind, self.small, draft_kind)
        ready = time.perf_counter() - started
        plain = self.plain(llm)
        drafted = speed(llm, self.ids, gamma=GAMMA)
        kept = ("tokens_per_second", "tau", "alpha", "round_ms", "verify_ms", "draft_step_ms")
        found: dict[str, Any] = {"seconds_to_ready": ready, "plain": plain}
        found[f"speculative_{GAMMA}"] = {key: drafted[key] for key in kept} | {
            "times_plain": drafted["tokens_per_second"] / plain["tokens_per_second"],
            "verify_over_step": drafted["verify_ms"] / plain["step_ms"],
        }
        if whole:
            found |= perplexity(llm, self.text) | {"same_tokens": same_tokens(llm, self.ids)}
        return found

    def kernels(self) -> dict[str, Any]:
        """Each matrix of the big shape by itself: microseconds for 1 and 9 tokens, its floor, and other tiles."""
        from gpu_kernels import Chain, matrices, plan_of

        found: dict[str, Any] = {}
        for kind, (n, k) in matrices("8b").items():
            for bits in ("int8", "int4") if kind != "head" else ("int8",):
                chain = Chain("8b", kind, 1)
                chain.weights = [rounded(w.data, bits) for w in chain.weights]
                base = plan_of("8b", kind, 2, bits=chain.weights[0].bits)
                tiles = {"plan": base} | {
                    f"{slices}x{depth}x{stages}": dataclasses.replace(
                        base, slices=slices, warps=slices, depth=depth, stages=stages
                    )
                    for slices, depth, stages in ((4, 512, 8), (8, 1024, 4), (8, 512, 8))
                }
                line: dict[str, Any] = {"floor": 1e6 * chain.weights[0].bytes / self.read}
                for title, t in tiles.items():
                    if title == "plan" or t != base:
                        line[title] = [1e6 * self._time(chain, rows, t) for rows in (1, 9)]
                found[f"{kind} {bits} {n}x{k}"] = line
                log(f"{kind} {bits}: {line}")
        return found

    def _time(self, chain: Any, rows: int, t: Any) -> float:
        other = type(chain)("8b", chain.kind, rows, copies=1)
        other.weights = chain.weights
        try:
            return float(other.time(t))
        except Exception as error:  # a tile that does not fit
            log(f"{chain.kind} {t}: {type(error).__name__}: {str(error)[:200]}")
            return float("nan")


def todo(bench: Bench) -> dict[str, Callable[[], Any]]:
    parts: dict[str, Callable[[], Any]] = {f"small {name(kind)}": (lambda k=kind: bench.alone(k)) for kind in KINDS}
    parts["grow"] = bench.grow
    for kind, draft_kind in [("int8", None), ("int4", None), (None, None), (None, "int8"), ("int8", "int8")]:
        whole = draft_kind is None
        parts[f"big {name(kind)}, draft {name(draft_kind)}"] = lambda k=kind, d=draft_kind, w=whole: bench.pair(
            k, d, whole=w
        )
    parts["kernels"] = bench.kernels
    return parts


def write_text(path: Path, tokens: int, data: Path) -> None:
    from perplexity import text

    from headstart.machine.load.embedded import embedded_folder

    tokenizer: Any = load(embedded_folder(), dtype="float32", device="cpu").tokenizer
    path.write_text(json.dumps(tokenizer(text(data)).input_ids[:tokens]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights")
    parser.add_argument("--ids")
    parser.add_argument("--text")
    parser.add_argument("--write-text", type=Path)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--shape", default="llama-3-8b", choices=sorted(SHAPES))
    parser.add_argument("--parts", nargs="*", default=[], help="those whose name contains one of these words")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    if arguments.write_text is not None:
        write_text(arguments.write_text, arguments.tokens, arguments.data)
        return
    torch.manual_seed(0)
    origin = load(arguments.weights, dtype="float32", device="cpu").model
    ids = json.loads(Path(arguments.ids).read_text())[: arguments.prompts]
    text = json.loads(Path(arguments.text).read_text())[: arguments.tokens]
    bench = Bench(origin, ids, text, arguments.shape, arguments.out)
    for title, body in todo(bench).items():
        if not arguments.parts or any(word in title for word in arguments.parts) or title == "grow":
            bench.part(title, body)


if __name__ == "__main__":
    main()
