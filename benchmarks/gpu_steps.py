"""Whole steps of fused models on a GPU: how long they take, how right they are, and which tiles suit them.

    PYTHONPATH=src:benchmarks python benchmarks/gpu_steps.py [--out FOLDER] [--only small,big,tiles]

Times are medians of replays of a captured step. ``tiles`` tries other tiles for one matrix after another in a whole 8B
step, for 1, 9 and 32 tokens: what is fastest alone need not be so where the next kernel starts before its end.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import gpu_kernels as kernels
import torch
from common import as_json
from gpu_kernels import BF16, SMOL, VOCAB, gap, say, seconds
from transformers import LlamaConfig, LlamaForCausalLM

from headstart.lab.grow import SHAPES, Shape, grow
from headstart.machine import gpu
from headstart.machine.gpu import model as fused_model
from headstart.machine.gpu.compile.precompile import rehearsal
from headstart.machine.gpu.model import FusedModel
from headstart.machine.gpu.tiles import Tile
from headstart.machine.lower import lower


def llama(s: Shape, dtype: torch.dtype) -> LlamaForCausalLM:
    """A model of this shape with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=s.hidden,
        intermediate_size=s.ffn,
        num_hidden_layers=s.layers,
        num_attention_heads=s.heads,
        num_key_value_heads=s.kv_heads,
        head_dim=s.head_dim,
        tie_word_embeddings=True,
        max_position_embeddings=16384,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    )
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).eval().requires_grad_(False)
    for p in model.parameters():
        p.data = p.data.to(dtype)
    return model


def step_times(model: FusedModel, name: str, cases: list[tuple[int, int, int]]) -> dict[str, Any]:
    """ms of one captured forward; a case is (rows, tokens a row, context)."""
    found: dict[str, Any] = {}
    w = model.weights
    for rows, width, context in cases:
        tokens = torch.randint(0, VOCAB, (rows, width), device="cuda")
        lengths = torch.full((rows,), context, device="cuda", dtype=torch.int32)
        ms = seconds(lambda: model.forward(tokens, lengths, bound=context + 64)) * 1000  # noqa: B023
        keys = 4 * rows * context * w.kv_heads * w.head_dim * len(w.layers)
        floor = (w.step_bytes + keys) / kernels.BANDWIDTH * 1000
        found[f"{rows}x{width} @{context}"] = {"ms": ms, "floor_ms": floor, "share": floor / ms}
        say(f"{name} {rows} x {width} at {context}: {ms:.4f} ms, floor {floor:.4f}, {floor / ms:.1%}")
    return found


def without(model: FusedModel, name: str) -> dict[str, float]:
    """How much shorter a step gets when one kind of kernel is left out (the results are then wrong, of course)."""
    tokens = torch.zeros(1, 1, device="cuda", dtype=torch.int64)
    lengths = torch.full((1,), 256, device="cuda", dtype=torch.int32)

    def step() -> None:
        model.forward(tokens, lengths, bound=320)

    whole = seconds(step)
    found = {"whole": whole * 1e6}
    for part in (
        "matmul_rotary", "attend", "attend_alone", "join_residual", "matmul_swiglu", "matmul_residual", "matmul",
    ):  # fmt: skip
        real = getattr(fused_model, part)
        setattr(fused_model, part, lambda *a, **k: None)
        found[part] = (whole - seconds(step)) * 1e6 / (1 if part == "matmul" else len(model.weights.layers))
        setattr(fused_model, part, real)
    say(f"{name}: " + "  ".join(f"{k}: {v:.2f} us" for k, v in found.items()))
    return found


def errors(model: LlamaForCausalLM, fast: FusedModel) -> dict[str, float]:
    """Fused and HF logits in bfloat16 against float32, and whether one token alone equals it among nine to the bit."""
    tokens = torch.randint(0, VOCAB, (1, 200), device="cuda")
    start = torch.zeros(1, device="cuda", dtype=torch.int32)
    with torch.inference_mode():
        hf = model(tokens).logits[0, 180:189].float()
    fast.forward(tokens[:, :180], start, keep=0)
    together = fast.forward(tokens[:, 180:189], start + 180)[0]
    alone = torch.cat([fast.forward(tokens[:, 180 + i : 181 + i], start + 180 + i)[0] for i in range(9)])
    with torch.inference_mode():
        exact = model.float()(tokens).logits[0, 180:189] if model.num_parameters() < 1e9 else hf
    model.to(BF16)

    found = {
        "hf": gap(hf, exact),
        "fused 9": gap(together, exact),
        "fused 1": gap(alone, exact),
        "bits differ": float((alone != together).sum()),
        "argmax agrees": float((together.argmax(-1) == hf.argmax(-1)).float().mean()),
    }
    say("  ".join(f"{k}: {v:.3g}" for k, v in found.items()))
    return found


CASES = [(1, 1, 256), (1, 9, 256), (8, 4, 256), (32, 1, 256)]
STEPS = {"135m": [*CASES, (1, 2, 256), (8, 1, 256), (1, 1, 1000)], "8b": [*CASES, (1, 1, 8192), (1, 9, 8192)]}


def steps_small() -> dict[str, Any]:
    model = llama(SMOL, BF16)
    fast = gpu.fuse(model, rows=32, capacity=1152, draft=True)
    found: dict[str, Any] = {"errors": errors(model, fast)}
    model = llama(SMOL, BF16)
    fast = gpu.fuse(model, rows=32, capacity=1152, draft=True)
    found["steps"] = step_times(fast, "135m", STEPS["135m"])
    found["without"] = without(fast, "135m")
    return found


def steps_big() -> dict[str, Any]:
    started = time.time()
    small = llama(SMOL, torch.float32)
    model = grow(small, "llama-3-8b", dtype=BF16)
    torch.cuda.synchronize()
    found: dict[str, Any] = {"grow_s": time.time() - started}
    started = time.time()
    fast = FusedModel(lower(model), lower(model).buffers(32, 8448))
    torch.cuda.synchronize()
    found["lower_s"] = time.time() - started
    size = fast.weights.step_bytes / 1e9
    say(f"grown in {found['grow_s']:.1f} s, lowered in {found['lower_s']:.1f} s, {size:.2f} GB a step")
    found["steps"] = step_times(fast, "8b", STEPS["8b"])
    found["errors"] = errors(model, fast)
    return found


# -- tiles ------------------------------------------------------------------------------------------------------------

# Rows and stages to try for each matrix; what else a tile has stays as planned.
TRIED = {
    "qkv": [(8, 5), (8, 6), (8, 7), (16, 3), (16, 4), (32, 3)],
    "o": [(32, 4), (32, 6), (32, 8), (64, 4)],
    "gate_up": [(8, 5), (8, 6), (8, 7), (16, 3), (16, 4), (32, 3)],
    "down": [(32, 3), (32, 4), (32, 5), (64, 3)],
    "head": [(32, 3), (32, 4), (64, 3)],
}


def tiles() -> dict[str, Any]:
    weights = lower(llama(SHAPES["llama-3-8b"], BF16))
    fast = FusedModel(weights, weights.buffers(32, 1152))
    plans = {1: fast._tiles[True], 9: fast._tiles[False], 32: fast._many}
    tokens = {n: torch.randint(0, VOCAB, (n, 1) if n == 32 else (1, n), device="cuda") for n in plans}
    lengths = torch.full((32,), 256, device="cuda", dtype=torch.int32)

    def step(n: int, plan: dict[str, Tile]) -> None:
        fast._tiles, fast._many = {False: plan, True: plan}, plan
        fast.forward(tokens[n], lengths[: len(tokens[n])], bound=512)

    def others(n: int) -> dict[tuple[str, int, int], dict[str, Tile]]:
        plan = plans[n]
        return {
            (name, rows, stages): plan | {name: replace(plan[name], rows=rows, stages=stages)}
            for name, numbers in TRIED.items()
            for rows, stages in numbers
        }

    with torch.inference_mode(), rehearsal() as compiled:
        fast.weights = replace(weights, layers=weights.layers[:2])
        for n, plan in plans.items():
            for other in (plan, *others(n).values()):
                step(n, other)
    fast.weights = weights
    say(f"compiled {len(compiled)} kernels")
    found: dict[str, Any] = {}
    for n, plan in plans.items():
        line = {"as planned": seconds(lambda: step(n, plan)) * 1000}  # noqa: B023
        for key, other in others(n).items():
            try:
                line[" ".join(map(str, key))] = seconds(lambda: step(n, other), replays=9) * 1000  # noqa: B023
            except Exception as error:  # it does not fit
                say(f"{n} tokens, {key}: {type(error).__name__}: {str(error)[:100]}")
        found[f"{n} tokens"] = line
        best = sorted(line.items(), key=lambda item: item[1])[:6]
        say(f"{n} tokens: planned {line['as planned']:.4f} ms; " + "  ".join(f"{k}: {v:.4f}" for k, v in best))
    return found


PARTS = {"small": steps_small, "big": steps_big, "tiles": tiles}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--only", default="small,big")
    options = parser.parse_args()
    kernels.bandwidth()
    result: dict[str, Any] = {}
    for name in options.only.split(","):
        started = time.time()
        result[name] = PARTS[name]()
        torch.cuda.empty_cache()
        say(f"-- {name}: {time.time() - started:.0f} s")
        (options.out / "gpu_steps.json").write_text(as_json(result))


if __name__ == "__main__":
    main()
