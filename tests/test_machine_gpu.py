"""Fused models against the Hugging Face modules they were lowered from.

On a GPU: ``pytest -m gpu``. Without one the same tests run in Triton's interpreter where triton is installed and
TRITON_INTERPRET=1 is set (slow); else they are skipped, and only the lowering itself is tested.
"""

from __future__ import annotations

import copy
import dataclasses
import os
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from headstart.machine import gpu
from headstart.machine.kvcache import Slab
from headstart.machine.lower import lower, why_not
from headstart.machine.runner import EagerRunner

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
skipped = pytest.mark.skipif(gpu.available() is not None, reason=str(gpu.available()))


def kernels(test: Any) -> Any:
    """A test that runs kernels: on a GPU, or in the interpreter."""
    return skipped((pytest.mark.slow if INTERPRETED else pytest.mark.gpu)(test))


SIZES: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_hidden_layers": 4,  # the first, one whose launches are noted, and two for which they are made again
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
PHI = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "llama-bias-llama3": LlamaConfig(**SIZES | {"attention_bias": True, "rope_parameters": LLAMA3}),
    "llama-no-groups": LlamaConfig(
        **SIZES | {"num_attention_heads": 3, "num_key_value_heads": 3, "intermediate_size": 176}
    ),
    "smollm": LlamaConfig(**SIZES | {"head_dim": 64, "tie_word_embeddings": True, "hidden_size": 576}),
    "mistral": MistralConfig(**SIZES | {"sliding_window": 11}),
    "qwen2": Qwen2Config(**SIZES | {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}),
    "qwen3": Qwen3Config(**SIZES),
    "phi3": Phi3Config(**SIZES | PHI | {"head_dim": 96, "num_attention_heads": 4, "sliding_window": None}),
    "phi3-partial": Phi3Config(
        **SIZES
        | PHI
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}
    ),
}


def build(name: str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Any:
    return build_from(CONFIGS[name], sum(name.encode()), device, dtype)


def build_from(
    config: PretrainedConfig, seed: int, device: str, dtype: torch.dtype, spread: float = 2.0, biases: float = 0.5
) -> Any:
    """A model with random weights, the same for the same arguments. ``spread``: what a matrix makes of unit inputs."""
    torch.manual_seed(seed)
    config = copy.deepcopy(config)
    config._attn_implementation = "sdpa"
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for key, p in model.named_parameters():
            if "norm" in key:
                p.copy_(1 + 0.3 * torch.randn_like(p))
            else:
                p.normal_(0, spread / p.shape[-1] ** 0.5 if p.dim() > 1 else biases)
    for p in model.parameters():
        p.data = p.data.to(dtype)  # not model.to(dtype), which would round the rotary table too
    return model.to(device)


@torch.inference_mode()
def truth(model: Any, tokens: list[int]) -> torch.Tensor:
    """Logits [len, V] of one fresh pass, float32."""
    return model(torch.tensor([tokens], device=model.device), use_cache=False).logits[0].float()


def draw(count: int, seed: int) -> list[int]:
    return torch.randint(0, 211, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


class Rig:
    """A model, its fused twin, and rows of known text."""

    def __init__(
        self, name: str, dtype: torch.dtype, *, rows: int = 3, capacity: int = 160, draft: bool = False
    ) -> None:
        self.model = build(name, DEVICE, dtype)
        self.fused = gpu.fuse(self.model, rows=rows, capacity=capacity, draft=draft)
        self.texts = [draw(capacity, row) for row in range(rows)]
        own = [truth(self.model, text) for text in self.texts]
        wide = copy.deepcopy(self.model).float()
        self.want = [truth(wide, text) for text in self.texts]
        # What the module's own rounding costs is the measure: the fused model may not be worse by half.
        gaps = [float((a - b).norm() / b.norm()) for a, b in zip(own, self.want, strict=True)]
        self.limit = max(2e-5, 1.5 * max(gaps))

    def small_chunks(self) -> None:
        """Chunks of 64 keys, so that short rows are split and joined as long ones are."""
        old = self.fused.attention
        self.fused.attention = dataclasses.replace(old, chunk=64, keys=32, one=32 if old.one else 0)

    def feed(self, starts: list[int], width: int, **options: Any) -> torch.Tensor:
        tokens = torch.tensor([t[s : s + width] for t, s in zip(self.texts, starts, strict=False)], device=DEVICE)
        lengths = torch.tensor(starts, device=DEVICE, dtype=torch.int32)
        return self.fused.forward(tokens, lengths, **options)

    def check(self, got: torch.Tensor, want: torch.Tensor) -> None:
        assert got.dtype == torch.float32
        error = float((got - want).norm() / want.norm())
        assert error < self.limit, (error, self.limit)

    def check_rows(self, starts: list[int], width: int, **options: Any) -> None:
        logits = self.feed(starts, width, **options)
        for row, start in enumerate(starts):
            self.check(logits[row], self.want[row][start : start + width][-logits.shape[1] :])


DTYPES = [torch.float32] if INTERPRETED else [torch.float32, torch.bfloat16]


@kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_architecture(name: str, dtype: torch.dtype) -> None:
    """Prefill, ragged decoding of one and of several tokens, a rejected draft overwritten, and one token alone."""
    rig = Rig(name, dtype)
    rig.check_rows([0, 0, 0], 20, keep=3)  # 60 tokens: the wide path
    rig.check_rows([20, 13, 6], 9)  # 27 tokens, ragged, over keys that were rolled back
    rig.check_rows([25, 22, 15], 1)
    rig.check_rows([26], 5)


@kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["smollm", "llama-no-groups", "mistral", "phi3", "qwen3"])
def test_drafts(name: str, dtype: torch.dtype) -> None:
    """The kernels for a draft's steps of one token or two, alone and in a batch, split and not."""
    rig = Rig(name, dtype, draft=True)
    rig.check_rows([0, 0, 0], 70, keep=1)
    rig.check_rows([70], 2, bound=128)
    rig.check_rows([70, 30], 1)
    rig.check_rows([70], 1, bound=128)
    rig.check_rows([71, 33, 64], 1)
    rig.small_chunks()
    rig.check_rows([72, 64, 65], 1)
    rig.check_rows([73], 1)


@kernels
def test_long_rows_are_split_and_joined() -> None:
    rig = Rig("llama", torch.float32, rows=2, capacity=300)
    rig.small_chunks()
    rig.check_rows([0, 0], 100, keep=1)
    rig.check_rows([100, 100], 70, keep=2)
    rig.check_rows([170, 90], 3)
    rig.check_rows([173, 93], 1, bound=192)
    rig.check_rows([174, 60], 1)


@kernels
def test_split_windows() -> None:
    rig = Rig("mistral", torch.float32, rows=2, capacity=220)
    rig.small_chunks()
    rig.check_rows([0, 0], 80, keep=1)
    rig.check_rows([80, 60], 80, keep=2)
    rig.check_rows([133, 64], 4)


TREE = [[-1, 0, 0, 1, 2, 1], [-1, 0, 1, 2, 2, 0]]  # each node's parent, root first


@kernels
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3"])
@pytest.mark.parametrize("dense", [False, True])
def test_trees(name: str, dense: bool) -> None:
    """Each node's logits are those of its own path, in the skinny and in the wide path."""
    rig = Rig(name, torch.float32, rows=2)
    repeat = 3 if dense else 1  # 2 x 18 nodes take the wide path
    # Further copies of the tree hang from the first one's root.
    parents = [[p + 6 * k if i else 0 for k in range(repeat) for i, p in enumerate(row)] for row in TREE]
    nodes = 6 * repeat
    ancestors = torch.zeros(2, nodes, nodes, dtype=torch.bool)
    paths: list[list[list[int]]] = []
    for r, row in enumerate(parents):
        paths.append([])
        for i in range(nodes):
            path = [i]
            while path[0] != 0:
                path.insert(0, row[path[0]])
            paths[r].append(path)
            ancestors[r, i, path] = True
    starts = [17, 12]
    rig.feed([0, 0], 20, keep=0)
    drafted = [draw(nodes, 50 + r) for r in range(2)]
    got = rig.fused.forward(
        torch.tensor(drafted, device=DEVICE), torch.tensor(starts, device=DEVICE), ancestors.to(DEVICE)
    )
    for r in range(2):
        for i in range(nodes):
            tokens = rig.texts[r][: starts[r]] + [drafted[r][n] for n in paths[r][i]]
            rig.check(got[r, i], truth(rig.model, tokens)[-1])


@kernels
def test_first_row_leaves_other_rows_alone() -> None:
    rig = Rig("llama", torch.float32)
    rig.feed([0, 0, 0], 12, keep=0)
    before = [(k[[0, 2]].clone(), v[[0, 2]].clone()) for k, v in rig.fused.cache]
    tokens = torch.tensor([rig.texts[1][12:16]], device=DEVICE)
    got = rig.fused.forward(tokens, torch.tensor([12], device=DEVICE), first_row=1)
    rig.check(got[0], rig.want[1][12:16])
    for (k, v), (old_k, old_v) in zip(rig.fused.cache, before, strict=True):
        assert torch.equal(k[[0, 2]], old_k)
        assert torch.equal(v[[0, 2]], old_v)


@kernels
def test_tokens_and_lengths_may_be_columns_of_wider_tensors() -> None:
    rig = Rig("llama", torch.float32)
    rig.feed([0, 0, 0], 12, keep=0)
    starts = [12, 7, 9]
    wide = torch.zeros(3, 5, dtype=torch.int64, device=DEVICE)
    wide[:, 2] = torch.tensor([t[s] for t, s in zip(rig.texts, starts, strict=True)])
    lengths = torch.zeros(3, 2, dtype=torch.int64, device=DEVICE)
    lengths[:, 1] = torch.tensor(starts)
    got = rig.fused.forward(wide[:, 2:3], lengths[:, 1])
    for row, start in enumerate(starts):
        rig.check(got[row], rig.want[row][start : start + 1])


@kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_alone_and_among_others_is_the_same_to_the_bit(dtype: torch.dtype) -> None:
    """Verifying eight tokens gives the very logits that decoding one by one gives: speculation changes no bit."""
    rig = Rig("smollm", dtype, rows=2)
    rig.small_chunks()
    rig.feed([0, 0], 60, keep=0)
    together = rig.feed([60, 50], 8)  # 16 tokens
    for i in range(8):
        alone = rig.feed([60 + i], 1)
        assert torch.equal(alone[0, 0], together[0, i])
    pair = rig.feed([60, 50], 1)
    assert torch.equal(pair[:, 0], together[:, 0])


@kernels
@pytest.mark.skipif(INTERPRETED, reason="too large for the interpreter")
def test_large_matrices_are_streamed_to_the_same_bits_again_and_again() -> None:
    """Kernels start before the one in front has ended, so a race would show as a difference between two runs."""
    sizes = {"hidden_size": 2560, "intermediate_size": 6912, "num_attention_heads": 20, "num_key_value_heads": 4}
    torch.manual_seed(0)
    with torch.device(DEVICE):
        config = LlamaConfig(**SIZES | sizes | {"head_dim": 128, "num_hidden_layers": 4, "vocab_size": 30011})
        model = AutoModelForCausalLM.from_config(config).eval()
    for p in model.parameters():
        p.data = p.data.to(torch.bfloat16)
    twin = gpu.fuse(model, rows=32, capacity=320)
    text = draw(273, 5)
    start = torch.tensor([256], device=DEVICE)
    tokens = torch.tensor([text], device=DEVICE)
    twin.forward(tokens[:, :256], start - 256, keep=0)
    together = twin.forward(tokens[:, 256:272], start).clone()
    own = truth(model, text[:272])[256:]
    wide = truth(copy.deepcopy(model).float(), text[:272])[256:]
    assert float((together[0] - wide).norm()) < 1.5 * float((own - wide).norm())
    for _ in range(8):
        for width in (1, 2, 8, 9, 16):
            assert torch.equal(twin.forward(tokens[:, 256 : 256 + width], start)[0], together[0, :width])
    many = twin.forward(tokens[:, 256:257].expand(32, 1).contiguous(), start.expand(32).contiguous())
    assert float((many[0] - wide[:1]).norm()) < 1.5 * float((own[:1] - wide[:1]).norm())


@kernels
@pytest.mark.skipif(INTERPRETED, reason="graphs need a GPU")
def test_a_captured_forward_reads_lengths_from_the_device() -> None:
    rig = Rig("llama", torch.float32, rows=2)
    rig.feed([0, 0], 20, keep=0)
    tokens = torch.tensor([t[:2] for t in rig.texts[:2]], device=DEVICE)
    lengths = torch.zeros(2, device=DEVICE, dtype=torch.int32)
    rig.fused.forward(tokens, lengths)  # compile outside the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = rig.fused.forward(tokens, lengths)
    rig.feed([0, 0], 20, keep=0)
    for starts in ([15, 9], [17, 11], [4, 13]):
        tokens.copy_(torch.tensor([t[s : s + 2] for t, s in zip(rig.texts, starts, strict=False)]))
        lengths.copy_(torch.tensor(starts))
        graph.replay()
        for row, start in enumerate(starts):
            rig.check(logits[row], rig.want[row][start : start + 2])


# -- the lowering itself, without a GPU -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_slab_is_as_the_modules_make_it(name: str, dtype: torch.dtype) -> None:
    """A fused runner allocates it without having run the modules."""
    model = build(name, dtype=dtype)
    modules, weights, slab = EagerRunner(model, rows=2, max_len=40), lower(model), Slab(2, 40)
    slab.allocate(weights.buffers(1, 1))
    assert len(slab.layers) == len(modules.slab.layers)
    for mine, theirs in zip(slab.layers, modules.slab.layers, strict=True):
        for a, b in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
            assert (a.shape, a.stride(), a.dtype, a.device) == (b.shape, b.stride(), b.dtype, b.device)


@pytest.mark.parametrize("name", CONFIGS)
def test_lowering_leaves_the_model_as_it_was(name: str) -> None:
    model = build(name)
    assert why_not(model) is None
    tokens = draw(15, 1)
    before = truth(model, tokens)
    weights = lower(model)
    assert torch.equal(truth(model, tokens), before)
    again = lower(model)
    for a, b in zip(weights.layers, again.layers, strict=True):
        assert a.qkv.data.data_ptr() == b.qkv.data.data_ptr()
        assert torch.equal(a.gate_up.data, b.gate_up.data)
    if hasattr(model.model.layers[1].self_attn, "k_proj"):  # the modules are views: nothing is stored twice
        q = model.config.num_attention_heads * model.config.head_dim
        at = weights.layers[1].qkv.data[q:].data_ptr()
        assert model.model.layers[1].self_attn.k_proj.weight.data_ptr() == at


def test_windows_are_read_layer_by_layer() -> None:
    assert [layer.window for layer in lower(build("qwen2")).layers] == [None, None, 9, 9]
    assert [layer.window for layer in lower(build("mistral")).layers] == [11] * 4
    assert [layer.window for layer in lower(build("llama")).layers] == [None] * 4


def test_what_cannot_be_lowered_says_why() -> None:
    gpt = AutoModelForCausalLM.from_config(GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=50))
    assert "GPT2" in str(why_not(gpt))
    reasons = {
        "gelu": {"hidden_act": "gelu"},
        "biases": {"mlp_bias": True},
        "head width 16": {"head_dim": 16},
        "dynamic": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
    }
    for words, change in reasons.items():
        model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES | change))
        assert words in str(why_not(model)), words
    half = build("llama").half()
    assert "float32 or all bfloat16" in str(why_not(half))


def test_rotary_table_of_a_partial_head() -> None:
    weights = lower(build("phi3-partial"))
    cos, sin, turning = weights.rotary_table(40)
    assert (turning, cos.shape) == (8, (40, 16))
    assert bool((cos[:, 8:] == 1).all())
    assert not bool(sin[:, 8:].any())
    assert bool(sin[1:, 0].any())


def test_a_part_that_the_kernels_do_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("qwen3")
    monkeypatch.setattr(gpu, "available", lambda: None)
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    assert gpu.reason_against(model) is None
    monkeypatch.setattr(gpu, "parts_of", lambda _: frozenset({"norms its heads", "squares its gates"}), raising=False)
    assert gpu.reason_against(model) == "it squares its gates, which the GPU kernels do not"
