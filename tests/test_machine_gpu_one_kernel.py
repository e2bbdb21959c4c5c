"""A draft whose layers are one kernel, against the same draft layer by layer and against Hugging Face's modules.

Without a GPU the kernel runs on the CPU, thread by thread (cuda_on_cpu.h).
"""

from __future__ import annotations

import ctypes
import logging
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from test_machine_gpu import CONFIGS, SIZES, build_from, draw
from transformers import DynamicCache, LlamaConfig, PretrainedConfig, Qwen2Config

from headstart.machine import gpu
from headstart.machine.gpu import one_kernel
from headstart.machine.gpu.one_kernel import KEYS, SPLITS, why_not_whole
from headstart.machine.lower import lower

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
needs_gpu = [pytest.mark.gpu, on_gpu]

SMALL = SIZES | {"hidden_size": 192, "intermediate_size": 512, "head_dim": 64, "vocab_size": 320}
THREE = {"num_attention_heads": 3, "num_key_value_heads": 1}
SHAPES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SMALL | THREE),
    "biases": LlamaConfig(**SMALL | {"num_attention_heads": 4, "attention_bias": True, "num_hidden_layers": 3}),
    "qwen2": Qwen2Config(**SMALL | THREE),
    "narrow heads": LlamaConfig(**SMALL | {"head_dim": 32}),
    # A program has two rows of queries, keys and values, which is one word of a quad.
    "one word": LlamaConfig(**SMALL | {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 3}),
    "wide heads": LlamaConfig(**SMALL | {"head_dim": 128, "num_attention_heads": 2}),
    "smollm": LlamaConfig(
        **SMALL
        | {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9}
        | {"num_key_value_heads": 3, "num_hidden_layers": 5, "tie_word_embeddings": True}
    ),
}


def build(config: PretrainedConfig, device: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> Any:
    return build_from(config, 3, device, dtype, spread=1.0, biases=0.3)


def two_ways(config: PretrainedConfig, rows: int = 1, capacity: int = 1100) -> tuple[Any, Any]:
    """The draft in one kernel and the draft layer by layer, over buffers of their own."""
    made = []
    for _ in "ab":
        made.append(gpu.fuse(build(config, "cuda"), rows=rows, capacity=capacity, draft=True))
    assert made[0].whole is not None
    made[1].whole = None
    return made[0], made[1]


def at(length: int) -> torch.Tensor:
    return torch.tensor([length], device="cuda")


def copy_rows(source: Any, target: Any) -> None:
    for (keys, values), (to_keys, to_values) in zip(source.cache, target.cache, strict=True):
        to_keys.copy_(keys)
        to_values.copy_(values)


@pytest.mark.parametrize("name", SHAPES)
def test_small_drafts_are_taken(name: str) -> None:
    assert why_not_whole(lower(build(SHAPES[name])), 132) is None


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("qwen3", "norms its heads"),
        ("mistral", "sliding windows"),
        ("phi3-partial", "turns some channels only"),
        ("llama", "multiples of 64"),
        ("llama-no-groups", "multiples of 64"),
    ],
)
def test_what_other_models_lack(name: str, reason: str) -> None:
    config = CONFIGS[name]
    if "llama" not in name:
        changes = {"hidden_size": 192, "num_attention_heads": 4, "head_dim": 64}
        config = type(config)(**config.to_dict() | changes)
    assert reason in str(why_not_whole(lower(build(config)), 132))


def test_large_or_wide_or_precise_drafts_go_layer_by_layer() -> None:
    exact = lower(build(SHAPES["llama"], dtype=torch.float32))
    assert why_not_whole(exact, 132) == "its weights are not bfloat16"
    weights = lower(build(SHAPES["smollm"]))
    assert why_not_whole(weights, 132) is None
    assert why_not_whole(weights, 24) == "it is too large"
    heads = lower(build(LlamaConfig(**SMALL | {"hidden_size": 576, "num_attention_heads": 18})))
    assert why_not_whole(heads, 132) == "it has too many heads"
    odd = lower(build(LlamaConfig(**SMALL | {"head_dim": 96, "num_attention_heads": 2})))
    assert why_not_whole(odd, 132) == "its heads are not 32, 64 or 128 wide"


COMPILER = shutil.which("g++") or shutil.which("clang++")
ENTRY = """
extern "C" void entry(unsigned seed, const Layer* layers, const u16* embedding, const u16* last_norm, const i64* tokens,
                      const i64* lengths, const float* cos, const float* sin, i64 capacity, i64 row_at, Boards board,
                      u32* epoch, u16* scaled, float* squares) {
  play(PROGRAMS, THREADS, sizeof(Shared), seed, [&] {
    step(layers, embedding, last_norm, tokens, lengths, cos, sin, capacity, row_at, board, epoch, scaled, squares);
  });
}
"""


class OnACpu:
    """The kernel with a CPU's threads in a GPU's place: see cuda_on_cpu.h."""

    def __init__(self, weights: Any, buffers: Any, tokens: int, programs: int, folder: Path) -> None:
        header = Path(__file__).with_name("cuda_on_cpu.h")
        text = one_kernel.source(weights, programs, tokens, SPLITS[0], f'#include "{header}"\n') + ENTRY
        (folder / "whole.cpp").write_text(text)
        options = ["-O1", "-std=c++17", "-w", "-shared", "-fPIC", "-fno-strict-aliasing", "-Wl,-Bsymbolic"]
        library = folder / "whole.so"
        subprocess.run([str(COMPILER), *options, "-o", library, folder / "whole.cpp"], check=True)
        self.library = ctypes.CDLL(str(library))
        self.weights, self.rotary = weights, weights.rotary_table(buffers[0][0].shape[2])
        self.sizes = one_kernel._Sizes(weights, programs)
        self.quads = torch.zeros(sum(self.sizes.boards), 4, dtype=torch.int32)
        self.boards = one_kernel._Boards(*(part.data_ptr() for part in torch.split(self.quads, self.sizes.boards)))
        self.layers = torch.tensor(one_kernel.pointers(weights, buffers))
        self.epoch, self.capacity = torch.zeros(1, dtype=torch.int32), buffers[0][0].shape[2]

    def step(self, tokens: torch.Tensor, length: int, seed: int) -> torch.Tensor:
        """Logits of the last token."""
        w = self.weights
        scaled, squares = torch.zeros(w.hidden, dtype=torch.bfloat16), torch.zeros(self.sizes.with_x)
        here = torch.tensor([length])
        tensors = [self.layers, w.embedding, w.norm, tokens, here, *self.rotary[:2]]
        rest = [self.epoch, scaled, squares]
        self.library.entry(
            seed,
            *(ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors),
            ctypes.c_int64(self.capacity),
            ctypes.c_int64(0),
            self.boards,
            *(ctypes.c_void_p(tensor.data_ptr()) for tensor in rest),
        )
        return (scaled.float() * torch.rsqrt(squares.sum() / w.hidden + w.eps)) @ w.head.data.float().T


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler")
@pytest.mark.parametrize(
    ("name", "tokens", "programs"), [("biases", 2, 20), ("wide heads", 1, 20), ("narrow heads", 1, 28)]
)
def test_what_it_works_out_on_a_cpu(name: str, tokens: int, programs: int, tmp_path: Path) -> None:
    """All of the kernel but a GPU's own words: in any order of its programs and warps, and with idle programs."""
    config = type(SHAPES[name])(
        **SHAPES[name].to_dict() | {"num_hidden_layers": 2}
    )  # one hands its results to the next
    model, exact = build(config), build(config, dtype=torch.float32)
    ids = torch.tensor([draw(140, 5)]) % 320
    weights = lower(model)
    buffers = weights.buffers(1, 160)
    kernel = OnACpu(weights, buffers, tokens, programs, tmp_path)
    for length in (0, KEYS + 1):
        new = ids[0, length : length + tokens].contiguous()
        before, after = DynamicCache(), DynamicCache()
        with torch.inference_mode():
            if length:
                model(ids[:, :length], past_key_values=before)
            usual = model(ids[:, : length + tokens], past_key_values=after).logits[0, -1].float()
            truth = exact(ids[:, : length + tokens]).logits[0, -1]
        found = []
        for seed in (1, 2):
            for i, pair in enumerate(buffers):
                for buffer, known in zip(pair, _layer(before, i) if length else (None, None), strict=True):
                    buffer.zero_()
                    if known is not None:
                        buffer[0, :, :length] = known
            found.append(kernel.step(new, length, seed))
        assert torch.equal(*found)
        far, near = (float((x - truth).norm() / truth.norm()) for x in (found[0], usual))
        assert far < 1.4 * near + 2e-3, (length, far, near)
        for i, pair in enumerate(buffers):
            for buffer, known in zip(pair, _layer(after, i), strict=True):
                fresh, want = buffer[0, :, length : length + tokens].float(), known[:, length:].float()
                assert float((fresh - want).norm() / want.norm()) < 0.05
                assert not bool(buffer[0, :, length + tokens :].any())


def _layer(cache: DynamicCache, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    return cache.layers[index].keys[0], cache.layers[index].values[0]


class TestOnAGpu:
    pytestmark = needs_gpu

    @pytest.mark.parametrize("tokens", [1, 2])
    @pytest.mark.parametrize("name", SHAPES)
    def test_as_near_the_truth_as_layer_by_layer(self, name: str, tokens: int) -> None:
        """Logits and what is left in the cache, at lengths around every border."""
        alone, steps = two_ways(SHAPES[name])
        exact = build(SHAPES[name], "cuda", torch.float32)
        ids = torch.tensor([draw(1030, 5)], device="cuda") % 320
        with torch.inference_mode():
            truth = exact(ids).logits[0]
        for length in (0, 1, 5, KEYS - 1, KEYS, KEYS + 1, 300, 511 - tokens, 512 - tokens, 700, 1024 - tokens):
            bound = 512 if length + tokens <= 512 else 1024
            if length:
                steps.forward(ids[:, :length], at(0), None, 1)
            copy_rows(steps, alone)
            new = ids[:, length : length + tokens]
            want = steps.forward(new, at(length), None, 1, bound=bound)[0, 0]
            found = alone.forward(new, at(length), None, 1, bound=bound)[0, 0]
            right = truth[length + tokens - 1]
            far, usual = (float((x - right).norm() / right.norm()) for x in (found, want))
            assert far < 1.4 * usual + 2e-3, (length, far, usual)
            assert usual < 0.2  # so that the comparison says something
            for mine, theirs in zip(alone.cache, steps.cache, strict=True):
                for a, b in zip(mine, theirs, strict=True):
                    fresh = slice(length, length + tokens)
                    difference = (a[0, :, fresh] - b[0, :, fresh]).float().norm() / b[0, :, fresh].float().norm()
                    assert float(difference) < 0.1
                    assert torch.equal(a[0, :, :length], b[0, :, :length])
                    assert not bool(a[0, :, length + tokens :].any())

    def test_other_rows_are_left_alone(self) -> None:
        alone, steps = two_ways(SHAPES["llama"], rows=3, capacity=600)
        ids = torch.tensor([draw(60, 6)], device="cuda") % 320
        for row in range(3):
            for one in (alone, steps):
                one.forward(ids[:, row : row + 40], at(0), None, 1, first_row=row)
        before = [tensor.clone() for pair in alone.cache for tensor in pair]
        found, want = (one.forward(ids[:, 50:51], at(40), None, 1, first_row=1, bound=512) for one in (alone, steps))
        assert float((found - want).norm() / want.norm()) < 0.05
        for old, now in zip(before, (tensor for pair in alone.cache for tensor in pair), strict=True):
            assert torch.equal(now[0], old[0])
            assert torch.equal(now[2], old[2])
            assert not torch.equal(now[1], old[1])

    def test_captured_and_replayed_many_times(self) -> None:
        """Programs that talk through memory: any that read too early would show as a difference, sooner or later."""
        alone, _ = two_ways(SHAPES["smollm"])
        ids = torch.tensor([draw(300, 7)], device="cuda") % 320
        alone.forward(ids, at(0), None, 1)
        two, one, length = ids[:, :2].contiguous(), ids[:, 2:3].contiguous(), at(300)
        found: list[torch.Tensor] = []

        def body() -> None:
            found[:] = [
                alone.forward(two, length, None, 1, bound=512),
                alone.forward(one, length + 2, None, 1, bound=512),
                alone.forward(one, length + 3, None, 1, bound=1024),
            ]

        body()
        first = [logits.clone() for logits in found]
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            body()
        for _ in range(400):
            graph.replay()
            assert all(torch.equal(a, b) for a, b in zip(found, first, strict=True))

    def test_a_row_longer_than_promised_ends_and_leaves_the_cache_as_it_is(self) -> None:
        """Idle rows may be anywhere: see ``DeviceRunner.device_forward``."""
        alone, _ = two_ways(SHAPES["llama"])
        ids = torch.tensor([draw(20, 8)], device="cuda") % 320
        alone.forward(ids, at(0), None, 1)
        before = [tensor.clone() for pair in alone.cache for tensor in pair]
        for length in (513, 1024, 1099, 5000):
            alone.forward(ids[:, :2], at(length), None, 1, bound=512)
        torch.cuda.synchronize()
        for old, now in zip(before, (tensor for pair in alone.cache for tensor in pair), strict=True):
            assert torch.equal(now, old)

    def test_when_it_is_used(self, monkeypatch: pytest.MonkeyPatch) -> None:
        alone, steps = two_ways(SHAPES["llama"])
        ids = torch.tensor([draw(20, 9)], device="cuda") % 320
        calls = []
        own = alone.whole.step
        monkeypatch.setattr(alone.whole, "step", lambda *a: calls.append(a) or own(*a))

        def used(count: int, keep: int = 1, bound: int = 512) -> bool:
            calls.clear()
            found = alone.forward(ids[:, :count], at(0), None, keep, bound=bound)
            want = steps.forward(ids[:, :count], at(0), None, keep, bound=bound)
            assert float((found - want).norm() / want.norm()) < 0.05
            return bool(calls)

        assert used(1)
        assert used(2)
        assert used(2, bound=KEYS * max(SPLITS))
        assert not used(3)
        assert not used(2, keep=2)
        assert not used(1, bound=KEYS * max(SPLITS) + 1)
        alone.beside = True
        assert not used(1)

    def test_what_does_not_compile_is_said_and_done_without(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def fail(*_: Any) -> bytes:
            raise RuntimeError("no compiler today")

        monkeypatch.setattr(one_kernel, "binary", fail)
        draft = gpu.fuse(build(SHAPES["llama"], "cuda"), rows=1, capacity=64, draft=True)
        with caplog.at_level(logging.WARNING):
            logits = draft.forward(torch.zeros(1, 1, dtype=torch.int64, device="cuda"), at(0), None, 1)
        assert bool(logits.isfinite().all())
        assert "no compiler today" in caplog.text
