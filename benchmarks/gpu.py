"""Headstart against Hugging Face on a GPU: one run, one machine, side by side; results as JSON and a plot.

    python benchmarks/gpu.py --weights FOLDER_OR_GGUF --ids prompts.json --out results_folder

The target is the small model grown to a big shape (``headstart.lab.grow``): a big model's memory traffic, a small one's
text, and a draft that agrees with it. Without --weights a random model of the small shape is used: the same speed, but
acceptance then says nothing. --ids: token ids of the prompts ([[...], ...]), where there is no tokenizer.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import machine, median, prompts
from transformers import LlamaConfig, LlamaForCausalLM

from headstart import LLM, SamplingParams
from headstart.lab.grow import SHAPES, cut, grow
from headstart.machine.loading import load
from headstart.maths.cost import CostModel
from headstart.types import Round

SMALL = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
}
TOKENS = 256


def log(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def bandwidth() -> float:
    """Bytes a second that a plain reduction reads."""
    data = torch.empty(2 * 1024**3, dtype=torch.bfloat16, device="cuda").normal_()
    for _ in range(3):
        data.sum()
    times = []
    for _ in range(10):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")
        start.record()
        data.view(-1, 1024).amax(-1)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return data.numel() * 2 / median(times)


def weight_bytes(model: Any) -> int:
    """What one step reads: every weight once (the embedding is looked up, not read, unless it is the head too)."""
    seen, total = set(), 0
    for name, weight in model.named_parameters():
        lookup = "embed_tokens" in name and not model.config.tie_word_embeddings
        if weight.data_ptr() not in seen and not lookup:
            seen.add(weight.data_ptr())
            total += weight.numel() * weight.element_size()
    return total


def speed(llm: LLM, ids: list[list[int]], tokens: int = TOKENS, **params: Any) -> dict[str, Any]:
    """Tokens a second over all prompts, one batch, decoding only; with tau and step times from the rounds."""
    rounds: list[Round] = []
    keep = rounds.extend
    settings = {"temperature": 0.0, "ignore_eos": True, **params}
    llm.generate(ids[: llm.config.engine.max_rows], SamplingParams(max_tokens=40, **settings))  # record and warm up
    llm.engine.listen(keep)
    batch = llm.config.engine.max_rows
    started = time.perf_counter()
    for at in range(0, len(ids), batch):
        llm.generate(ids[at : at + batch], SamplingParams(max_tokens=tokens, seed=at, **settings))
    wall = time.perf_counter() - started
    llm.engine._listeners.remove(keep)
    full = [r for r in rounds if not r.prefill and r.rows == min(batch, len(ids))]
    seconds = sum(r.round_seconds / r.rows for r in full)
    emitted = sum(r.emitted for r in full)
    drafted, accepted = sum(r.drafted for r in full), sum(r.accepted for r in full)
    by_position = [0.0] * 64
    asked = [0] * 64
    for r in full:
        for i, hit in enumerate(r.outcomes):
            asked[i] += 1
            by_position[i] += hit
    gamma = max((r.drafted for r in full), default=0)
    return {
        "tokens_per_second": emitted / seconds,
        "wall_tokens_per_second": len(ids) * tokens / wall,
        "tau": emitted / max(1, len(full)),
        "alpha": accepted / drafted if drafted else None,
        "conditional_acceptance": [hit / n for hit, n in zip(by_position, asked, strict=True) if n],
        "gamma": gamma,
        "round_ms": 1e3 * median(r.round_seconds for r in full),
        "verify_ms": 1e3 * median(r.verify_seconds for r in full),
        "draft_step_ms": 1e3 * median(r.draft_seconds / r.drafted for r in full if r.drafted) if drafted else None,
        "neither_forward": 1 - sum((r.draft_seconds + r.verify_seconds) / r.rows for r in full) / seconds,
    }


def hugging_face(model: Any, ids: list[list[int]], tokens: int, **options: Any) -> dict[str, Any]:
    times = []
    for line in [ids[0], *ids]:
        batch = torch.tensor([line], device="cuda")
        torch.cuda.synchronize()
        started = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out = model.generate(
                batch,
                attention_mask=torch.ones_like(batch),
                do_sample=False,
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                pad_token_id=0,
                **options,
            )
        torch.cuda.synchronize()
        times.append((time.perf_counter() - started, out.shape[1] - len(line)))
    seconds, count = (sum(column) for column in zip(*times[1:], strict=True))  # the first is the warm-up
    return {"tokens_per_second": count / seconds}


class Bench:
    """The parts of the run. Each writes into ``results``; a part that fails says so and the others go on."""

    def __init__(self, small: Any, ids: list[list[int]], shape: str) -> None:
        self.small, self.ids, self.shape = small, ids, shape
        self.results: dict[str, Any] = {"machine": machine(), "shape": shape}
        self.target: Any = None

    def part(self, name: str, body: Callable[[], Any]) -> None:
        started = time.perf_counter()
        try:
            self.results[name] = body()
        except Exception as error:
            traceback.print_exc()
            self.results[name] = {"failed": f"{type(error).__name__}: {error}"}
        shown = json.dumps(self.results[name], default=str)
        log(f"{name} ({time.perf_counter() - started:.1f} s): {shown[:600]}")
        torch.cuda.empty_cache()

    def grow(self) -> dict[str, Any]:
        self.target = grow(self.small, SHAPES[self.shape], device="cuda", dtype=torch.bfloat16)
        self.small = self.small.to("cuda", torch.bfloat16)
        read = bandwidth()
        return {
            "read_bandwidth_tb_s": read / 1e12,
            "target_bytes": weight_bytes(self.target),
            "target_floor_ms": 1e3 * weight_bytes(self.target) / read,
            "draft_floor_ms": 1e3 * weight_bytes(self.small) / read,
        }

    def llm(self, draft: Any, gamma: Any, rows: int = 1, length: int = 1024) -> LLM:
        return LLM(self.target, draft, gamma=gamma, max_rows=rows, max_model_len=length, check=False)

    def startup(self) -> dict[str, Any]:
        started = time.perf_counter()
        llm = self.llm(self.small, 8)
        llm.generate(self.ids[0], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
        return {"seconds_to_first_recorded_answer": time.perf_counter() - started}

    def plain(self) -> dict[str, Any]:
        return speed(self.llm(None, 1), self.ids)

    def speculative(self, gamma: int, **params: Any) -> dict[str, Any]:
        return speed(self.llm(self.small, gamma), self.ids, **params)

    def lookup(self) -> dict[str, Any]:
        return speed(self.llm("lookup", 8), self.ids)

    def cut_draft(self, gamma: int) -> dict[str, Any]:
        """A draft with fewer layers: is the measured speed-up what the cost model says?"""
        draft = cut(self.small, first=22, last=4).to("cuda", torch.bfloat16)
        plain = self.results["plain"]
        found = speed(self.llm(draft, gamma), self.ids)
        step = plain["round_ms"]
        model = CostModel(
            c=found["draft_step_ms"] / step,
            v={gamma + 1: found["verify_ms"] / step},
            overhead=found["neither_forward"] * found["round_ms"] / step,
        )
        predicted = model.speedup(gamma, found["conditional_acceptance"])
        measured = found["tokens_per_second"] / plain["tokens_per_second"]
        return found | {"predicted_speedup": predicted, "measured_speedup": measured}

    def batch(self, rows: int, gamma: int | None) -> dict[str, Any]:
        ids = (self.ids * (rows // len(self.ids) + 1))[:rows]
        llm = self.llm(self.small if gamma else None, gamma or 1, rows=rows)
        return speed(llm, ids, tokens=128)

    def long_context(self, length: int = 8000) -> dict[str, Any]:
        """A step at 8,000 tokens against a step at few: do the extra keys explain the difference?"""
        line = [token for ids in self.ids for token in ids]
        line = (line * (length // len(line) + 1))[: length - 80]
        config = self.target.config
        keys = 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * length
        found = speed(self.llm(None, 1, length=8192), [line], tokens=64)
        extra = keys / (self.results["grow"]["read_bandwidth_tb_s"] * 1e12) * 1e3
        short = self.results["plain"]["round_ms"]
        return {"step_ms": found["round_ms"], "short_step_ms": short, "key_bytes": keys, "explained_ms": short + extra}

    def tie_check(self) -> dict[str, Any]:
        """Proof 5: teacher-force the speculative output through the target's own modules; count what is no near-tie."""
        llm = self.llm(self.small, 8)
        flips, checked, worst = 0, 0, 0.0
        for line in self.ids[:4]:
            answer = llm.generate(line, SamplingParams(temperature=0, max_tokens=128, ignore_eos=True))
            whole = torch.tensor([[*line, *answer.token_ids]], device="cuda")
            with torch.inference_mode():
                logits = self.target(whole).logits[0, len(line) - 1 : -1].float()
            chosen = logits.gather(1, whole[0, len(line) :, None])[:, 0]
            gap = logits.amax(-1) - chosen
            flips += int((gap > 0).sum())
            worst = max(worst, float(gap.max()))
            checked += len(gap)
        return {"positions": checked, "not_the_argmax": flips, "largest_gap_in_logits": worst}


def run(bench: Bench, parts: list[str], out: Path) -> None:
    few = bench.ids[:2]
    todo: dict[str, Callable[[], Any]] = {
        "grow": bench.grow,
        "startup": bench.startup,
        "plain": bench.plain,
        "speculative_4": lambda: bench.speculative(4),
        "speculative_8": lambda: bench.speculative(8),
        "speculative_12": lambda: bench.speculative(12),
        "sampled_8": lambda: bench.speculative(8, temperature=1.0, top_p=0.95, verification="block"),
        "tie_check": bench.tie_check,
        "cut_draft_5": lambda: bench.cut_draft(5),
        "batch_8": lambda: bench.batch(8, None),
        "batch_32": lambda: bench.batch(32, None),
        "batch_8_speculative_3": lambda: bench.batch(8, 3),
        "batch_32_speculative_3": lambda: bench.batch(32, 3),
        "long_context": bench.long_context,
        "lookup": bench.lookup,
        "hf_eager": lambda: hugging_face(bench.target, few, 48),
        "hf_assisted_8": lambda: hugging_face(
            bench.target, few, 48, assistant_model=bench.small, num_assistant_tokens=8
        ),
        "hf_prompt_lookup": lambda: hugging_face(bench.target, few, 48, prompt_lookup_num_tokens=8),
        "hf_static_compiled": lambda: hugging_face(bench.target, few, 128, cache_implementation="static"),
    }
    for name, body in todo.items():
        if name == "grow" or not parts or name in parts:
            bench.part(name, body)
            out.mkdir(parents=True, exist_ok=True)
            (out / f"gpu-{bench.shape}.json").write_text(json.dumps(bench.results, indent=1, default=str) + "\n")


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
    if arguments.weights:
        loaded = load(arguments.weights, dtype="float32", device="cpu")
        small, tokenizer = loaded.model, loaded.tokenizer
    else:
        small, tokenizer = LlamaForCausalLM(LlamaConfig(**SMALL)).eval(), None
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
