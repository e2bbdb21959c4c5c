"""Headstart against Hugging Face on a GPU: one run, one machine, side by side; results as JSON and a plot.

    python benchmarks/gpu.py --weights FOLDER_OR_GGUF --ids prompts.json --out results_folder

The target is the small model grown to a big shape (``headstart.lab.grow``): a big model's memory traffic, a small one's
text, and a draft that agrees with it. Without --weights a random model of the small shape is used: the same speed, but
acceptance then says nothing. --ids: token ids of the prompts ([[...], ...]), where there is no tokenizer.

Rates are of decoding: tokens over the clock time between rounds, everything included but the reading of prompts.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import as_json, log, machine, prompts
from gpu_common import TOKENS, assisted, bandwidth, hugging_face, speed, weight_bytes
from pairs import small_model

from headstart import LLM, SamplingParams
from headstart.control.controller import FixedController
from headstart.distill.shapes import shallow_copy
from headstart.lab.grow import SHAPES, grow
from headstart.machine import gpu
from headstart.maths.cost import CostModel

SAMPLED = {"temperature": 1.0, "top_p": 0.95, "verification": "block"}


class Bench:
    """The parts of the run. Each writes into ``results``; a part that fails says so and the others go on."""

    def __init__(self, small: Any, ids: list[list[int]], shape: str) -> None:
        self.small, self.ids, self.shape = small, ids, shape
        self.results: dict[str, Any] = {"machine": machine(), "shape": shape}
        self.target: Any = None
        self._shared: LLM | None = None

    def part(self, name: str, body: Callable[[], Any]) -> None:
        started = time.perf_counter()
        try:
            self.results[name] = body()
        except Exception as error:
            traceback.print_exc()
            self.results[name] = {"failed": f"{type(error).__name__}: {error}"}
        shown = json.dumps(self.results[name], default=str)
        log(f"{name} ({time.perf_counter() - started:.1f} s): {shown[:700]}")
        gc.collect()  # an LLM that is done with is a ring of references
        torch.cuda.empty_cache()

    def grow(self) -> dict[str, Any]:
        read = bandwidth()
        self.target = grow(self.small, SHAPES[self.shape], device="cuda", dtype=torch.bfloat16)
        self.small = self.small.to("cuda", torch.bfloat16)
        return {
            "read_bandwidth_tb_s": read / 1e12,
            "target_bytes": weight_bytes(self.target),
            "target_floor_ms": 1e3 * weight_bytes(self.target) / read,
            "draft_floor_ms": 1e3 * weight_bytes(self.small) / read,
        }

    def llm(self, draft: Any, gamma: Any, rows: int = 1, length: int = 1024, **settings: Any) -> LLM:
        """Without overlap, unless it is asked for: it has a part of its own."""
        options = {"overlap": False, "max_rows": rows, "max_model_len": length, **settings}
        return LLM(self.target, draft, gamma=gamma, check=False, **options)

    @property
    def shared(self) -> LLM:
        """One row, the whole draft model, any draft length up to 12: serves most parts."""
        if self._shared is None:
            self._shared = self.llm(self.small, "auto", max_gamma=12)
        return self._shared

    def startup(self) -> dict[str, Any]:
        """From two folders of weights to an engine with everything captured, in a process of its own, twice.

        The first time nothing is compiled, if Triton's cache was empty; the files were just written, so they are read
        from memory and not from a disk.
        """
        program = str(Path(__file__).with_name("gpu_startup.py"))
        with tempfile.TemporaryDirectory() as name:
            folders = [str(Path(name) / part) for part in ("target", "draft")]
            for model, folder in zip((self.target, self.small), folders, strict=True):
                model.save_pretrained(folder)
            told = [
                subprocess.run(
                    [sys.executable, program, *folders], check=True, stdout=subprocess.PIPE, text=True
                ).stdout
                for _ in "ab"
            ]
        first, again = (json.loads(text.splitlines()[-1]) for text in told)
        return first | {"again": again}

    def plain(self) -> dict[str, Any]:
        found = speed(self.shared, self.ids, gamma=0)
        floor = self.results["grow"]["target_floor_ms"]
        return found | {"share_of_bandwidth_floor": floor / found["round_ms"]}

    def speculative(self, gamma: int, **params: Any) -> dict[str, Any]:
        found = speed(self.shared, self.ids, gamma=gamma, **params)
        steps = gamma * found["draft_step_ms"] + found["verify_ms"]
        one = self.results.get("plain", {}).get("verify_ms")
        return found | {
            "round_over_steps": found["round_ms"] / steps,
            "verify_over_one_token": found["verify_ms"] / one if one else None,
        }

    def overlapped(self, gamma: int) -> dict[str, Any]:
        llm = self.llm(self.small, gamma, overlap=True)
        greedy, sampled = speed(llm, self.ids), speed(llm, self.ids, **SAMPLED)
        return {"greedy": greedy, "sampled": sampled}

    def adaptive(self) -> dict[str, Any]:
        return speed(self.llm(self.small, "auto"), self.ids)

    def lookup(self) -> dict[str, Any]:
        return speed(self.llm("lookup", "auto"), self.ids)

    def modules(self, gamma: int) -> dict[str, Any]:
        """The same model through Hugging Face's own modules, captured: what a model without fused kernels gets."""
        available, gpu.available = gpu.available, lambda: "switched off for this part"
        try:
            llm = self.llm(self.small, gamma)
            few = self.ids[:2]
            return {"plain": speed(llm, few, 96, gamma=0), f"speculative_{gamma}": speed(llm, few, 192, gamma=gamma)}
        finally:
            gpu.available = available

    def cut_draft(self, gamma: int) -> dict[str, Any]:
        """A draft with fewer layers: is the measured speed-up what the cost model says?"""
        draft = shallow_copy(self.small, [*range(22), *range(26, 30)]).to("cuda", torch.bfloat16)
        llm = self.llm(draft, gamma)
        plain, found = speed(llm, self.ids, gamma=0), speed(llm, self.ids, gamma=gamma)
        step = plain["round_ms"]
        model = CostModel(
            c=found["draft_step_ms"] / step,
            v={gamma + 1: found["verify_ms"] / step},
            overhead=found["neither_forward"] * found["round_ms"] / step,
        )
        predicted = model.speedup(gamma, found["conditional_acceptance"])
        measured = found["tokens_per_second"] / plain["tokens_per_second"]
        few = self.ids[:2]  # and does going on while the target verifies cost anything where it seldom pays?
        alone = speed(llm, few, gamma=gamma)["tokens_per_second"]
        beside = speed(self.llm(draft, gamma, overlap=True), few)["tokens_per_second"]
        return found | {
            "predicted_speedup": predicted,
            "measured_speedup": measured,
            "ratio": measured / predicted,
            "overlap_over_alone": beside / alone,
        }

    def batch(self, rows: int, gamma: int = 3) -> dict[str, Any]:
        ids = (self.ids * (rows // len(self.ids) + 1))[:rows]
        llm = self.llm(self.small, gamma, rows=rows)
        plain = speed(llm, ids, tokens=128, gamma=0)
        times = plain["tokens_per_second"] / self.results["plain"]["tokens_per_second"]
        return {
            "plain": plain | {"times_batch_1": times},
            f"speculative_{gamma}": speed(llm, ids, tokens=128, gamma=gamma),
            f"sampled_{gamma}": speed(llm, ids, tokens=128, gamma=gamma, **SAMPLED),
        }

    def long_context(self, length: int = 8000) -> dict[str, Any]:
        """A step at 8,000 tokens against a step at few: do the extra keys explain the difference?"""
        line = [token for ids in self.ids for token in ids]
        line = (line * (length // len(line) + 1))[: length - 80]
        config = self.target.config
        keys = 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * length
        found = speed(self.llm(None, 1, length=8192), [line], tokens=64)
        extra = keys / (self.results["grow"]["read_bandwidth_tb_s"] * 1e12) * 1e3
        explained = self.results["plain"]["round_ms"] + extra
        return {
            "step_ms": found["round_ms"],
            "key_bytes": keys,
            "explained_ms": explained,
            "ratio": found["round_ms"] / explained,
        }

    def tie_check(self) -> dict[str, Any]:
        """Proof 5: teacher-force the speculative output through the target's own modules; count what is no near-tie."""
        self.shared.engine.parts.controller = FixedController(8)
        flips, checked, worst = 0, 0, 0.0
        for line in self.ids:
            answer = self.shared.generate(line, SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True))
            whole = torch.tensor([[*line, *answer.token_ids]], device="cuda")
            with torch.inference_mode():
                logits = self.target(whole).logits[0, len(line) - 1 : -1].float()
            gap = logits.amax(-1) - logits.gather(1, whole[0, len(line) :, None])[:, 0]
            flips += int((gap > 0).sum())
            worst = max(worst, float(gap.max()))
            checked += len(gap)
        # The spacing of bfloat16 between 16 and 32 is 0.125: two such steps are as near as a tie can be told.
        return {"positions": checked, "not_the_argmax": flips, "largest_gap_in_logits": worst, "near_tie": 0.25}


def todo(bench: Bench) -> dict[str, Callable[[], Any]]:
    few = bench.ids[:2]
    return {
        "grow": bench.grow,
        "startup": bench.startup,
        "plain": bench.plain,
        "speculative_4": lambda: bench.speculative(4),
        "speculative_8": lambda: bench.speculative(8),
        "speculative_12": lambda: bench.speculative(12),
        "sampled_8": lambda: bench.speculative(8, **SAMPLED),
        "overlap_8": lambda: bench.overlapped(8),
        "tie_check": bench.tie_check,
        "hf_eager": lambda: hugging_face(bench.target, few, 48),
        "hf_assisted_8": lambda: assisted(bench.target, bench.small, few, 128, gamma=8),
        "hf_prompt_lookup": lambda: hugging_face(bench.target, few, 64, prompt_lookup_num_tokens=8),
        "cut_draft_5": lambda: bench.cut_draft(5),
        "batch_8": lambda: bench.batch(8),
        "batch_32": lambda: bench.batch(32),
        "long_context": bench.long_context,
        "lookup": bench.lookup,
        "adaptive": bench.adaptive,
        "hf_static_compiled": lambda: hugging_face(bench.target, few[:1], 256, cache_implementation="static"),
        "modules": lambda: bench.modules(8),
    }


def run(bench: Bench, parts: list[str], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for name, body in todo(bench).items():
        if name == "grow" or not parts or name in parts:
            bench.part(name, body)
            (out / f"gpu-{bench.shape}.json").write_text(as_json(bench.results))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights")
    parser.add_argument("--ids")
    parser.add_argument("--shape", default="llama-3-8b", choices=sorted(SHAPES))
    parser.add_argument("--parts", nargs="*", default=[])
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--out", default="benchmarks/results")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    small, tokenizer = small_model(arguments.weights)
    if arguments.ids:
        ids = json.loads(Path(arguments.ids).read_text())
    elif tokenizer is not None:
        texts = [text for kind in prompts(2).values() for text in kind]
        chat = [[{"role": "user", "content": text}] for text in texts]
        ids = [tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=False) for c in chat]
    else:
        ids = [torch.randint(3, 49152, (64 + 7 * i,)).tolist() for i in range(12)]
    run(Bench(small, ids[: arguments.prompts], arguments.shape), arguments.parts, Path(arguments.out))


if __name__ == "__main__":
    main()
