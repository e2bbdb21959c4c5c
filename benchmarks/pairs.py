"""The models that benchmarks measure: a small one, a target grown from it, and drafts that agree with it more or less.

Knows: how to make targets and drafts, and prompts for them, and the options that say which. Does not know: what is
measured.

A grown target (``headstart.lab.grow``) has a big model's memory traffic and the small one's text. A draft is the small
model itself (it agrees almost always), the same with noise on its weights (as often as is asked for), or random weights
(never). Without weights of a real model the small one is random too: the speed is the same, and so is the agreement
between target and draft, only the text means nothing.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, prompts
from transformers import LlamaConfig, LlamaForCausalLM

from headstart import LLM, SamplingParams
from headstart.lab.grow import SHAPES, Shape, grow
from headstart.lab.weight_noise import Noise
from headstart.machine.load.embedded import embedded_folder
from headstart.machine.load.loading import load
from headstart.testing import TINY_VOCABULARY, tiny_model

SMALL = {  # the shape of SmolLM2-135M
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
CPU_TARGET = Shape(layers=32, hidden=1152, ffn=3072, heads=18, kv_heads=6, head_dim=64)
CPU_THREE = Shape(
    layers=30, hidden=1152, ffn=2304, heads=18, kv_heads=6, head_dim=64
)  # three times the embedded model's weights
THIRD = Shape(layers=30, hidden=2304, ffn=8192, heads=18, kv_heads=6, head_dim=128)  # of a llama-3-8b's weights
SHARED = Path(__file__).parents[2] / "shared" / "data"


@dataclass
class Setting:
    """A target, the drafts for it, and how its engines are opened."""

    name: str
    target: Any  # as ``LLM`` takes it
    draft: Any  # the good one
    useless: Any  # of the draft's size, and never right
    stream: list[int]  # token ids that prompts are cut from
    vocab_size: int
    small: Any = None  # computes what the target computes; None: the target is no such pair (``cpu_pair``)
    options: dict[str, Any] = field(default_factory=dict)
    draft_shape: Shape | None = None  # what a noisy draft is grown to

    def llm(self, draft: Any, gamma: Any = "auto", **settings: Any) -> LLM:
        return LLM(self.target, draft, gamma=gamma, **self.options | settings)

    def prompts(self, lengths: Sequence[int], turn: int) -> list[list[int]]:
        """Prompts of these lengths, cut one after the other. Each turn begins elsewhere, so that nothing is warm."""
        found, at = [], turn * (sum(lengths) + 7)
        for length in lengths:
            found.append([self.stream[(at + i) % len(self.stream)] for i in range(length)])
            at += length
        return found

    def random_prompts(self, lengths: Sequence[int], turn: int) -> list[list[int]]:
        """Prompts without any repeats to look up."""
        generator = torch.Generator().manual_seed(turn)
        return [torch.randint(3, self.vocab_size - 16, (n,), generator=generator).tolist() for n in lengths]

    def noisy_draft(self, noise: Noise, scale: float) -> Any:
        """The small model with so much noise on its weights; see ``draft_shape``."""
        model = noise.model(scale)
        if self.draft_shape is None:
            return model
        return grow(model, self.draft_shape, device=model.device, dtype=self.target.dtype)


def answers(plain: LLM, lines: Sequence[list[int]], tokens: int) -> list[tuple[int, list[int]]]:
    """The target's own greedy answers, each behind its prompt; for ``Noise``."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    found = plain.generate(list(lines), params)
    return [(len(line), [*line, *answer.token_ids]) for line, answer in zip(lines, found, strict=True)]


def random_model(seed: int, **changes: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(LlamaConfig(**SMALL | changes)).eval().requires_grad_(False)


def small_model(weights: str | None) -> tuple[Any, Any]:
    """The small model in float32 on the CPU, and its tokenizer; random, without one, where no weights are given."""
    if weights is None:
        return random_model(0), None
    loaded = load(weights, dtype="float32", device="cpu")
    return loaded.model, loaded.tokenizer


def token_stream(tokenizer: Any, ids: str | None, vocab_size: int) -> list[int]:
    """Tokens of real text: from a file ([[...], ...]), or the held-out prompts, or ours; random without a tokenizer."""
    if ids is not None:
        return [token for line in json.loads(Path(ids).read_text()) for token in line]
    if tokenizer is None:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(3, vocab_size - 16, (40_000,), generator=generator).tolist()
    if SHARED.is_dir():
        lines = [line for path in sorted(SHARED.glob("*.jsonl")) for line in path.read_text().splitlines()]
        texts = [json.loads(line)["prompt"] for line in lines]
    else:
        texts = [text for kind in prompts().values() for text in kind]
    return [token for text in texts for token in tokenizer(text + "\n\n", add_special_tokens=False)["input_ids"]]


def gpu_setting(weights: str | None, ids: str | None, shape: str, rows: int) -> Setting:
    """A target of a big shape in bfloat16, and the small model as its draft."""
    small, tokenizer = small_model(weights)
    target = grow(small, SHAPES[shape], device="cuda", dtype=torch.bfloat16)
    return Setting(
        name=f"gpu-{shape}",
        target=target,
        draft=copy.deepcopy(small).to("cuda", torch.bfloat16),
        useless=random_model(1).to("cuda", torch.bfloat16),
        stream=token_stream(tokenizer, ids, target.config.vocab_size),
        vocab_size=target.config.vocab_size,
        small=small.to("cuda"),  # in float32: rotary frequencies must not be rounded
        options={"check": False, "max_rows": rows, "max_model_len": 1024},
        draft_shape=THIRD,
    )


def cpu_setting(ids: str | None, rows: int) -> Setting:
    """The embedded model as it comes, and the head that ships with it; the useless draft has six layers."""
    folder = embedded_folder()
    tokenizer = load(folder).tokenizer
    return Setting(
        name="cpu",
        target=folder,
        draft="auto",
        useless=random_model(1, num_hidden_layers=6),
        stream=token_stream(tokenizer, ids, SMALL["vocab_size"]),  # type: ignore[arg-type]
        vocab_size=len(tokenizer),
        options={"check": False, "max_rows": rows, "max_model_len": 1024},
    )


def cpu_pair(setting: Setting, quantization: str | None, draft_quantization: str | None) -> Setting:
    """A target three times the embedded model's size with its function, and the embedded model as the draft."""
    small = load(embedded_folder(), dtype="float32").model
    options = setting.options | {"quantization": quantization, "draft_quantization": draft_quantization}
    grown = grow(small, CPU_THREE)
    return Setting("cpu-pair", grown, small, None, setting.stream, setting.vocab_size, small, options)


def tiny_setting(rows: int) -> Setting:
    """Models of a few thousand weights: to see in seconds that a benchmark runs. Its figures mean nothing."""
    target = tiny_model("llama")
    return Setting(
        name="quick",
        target=target,
        draft=tiny_model("llama"),
        useless=tiny_model("llama", seed=1),
        stream=token_stream(None, None, TINY_VOCABULARY),
        vocab_size=TINY_VOCABULARY,
        small=target,
        options={"check": False, "max_rows": rows, "max_model_len": 160, "quantization": None}
        | {"draft_quantization": None},
    )


def parser(about: str | None, piece: str) -> argparse.ArgumentParser:
    """The options of every benchmark over these models; ``piece`` is what it measures one by one, as in "turn"."""
    found = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    found.add_argument("--weights", help="the small model, a folder or a .gguf file (GPU); random without it")
    found.add_argument("--ids", help="token ids of real text for prompts: [[...], ...]")
    found.add_argument("--shape", default="llama-3-8b", choices=sorted(SHAPES))
    found.add_argument("--seconds", type=float, default=math.inf, help=f"begin no further {piece} after this time")
    found.add_argument("--threads", type=int, help="torch's, on a CPU")
    found.add_argument("--quick", action="store_true", help="tiny models, to see that it runs")
    found.add_argument("--out", type=Path, default=RESULTS)
    return found


def read(options: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """What was asked for; torch has as many threads from now on, also in the report."""
    given = options.parse_args(arguments)
    if given.threads:
        torch.set_num_threads(given.threads)
    return given


def setting_of(given: argparse.Namespace, rows: int) -> Setting:
    """The models that these options ask for."""
    if given.quick:
        return tiny_setting(rows)
    if given.device == "cuda":
        return gpu_setting(given.weights, given.ids, given.shape, rows)
    return cpu_setting(given.ids, rows)
