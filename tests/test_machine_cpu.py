"""The CPU's own kernels against torch: packing, products, whole decoders, and above all that no token's bits depend on
what else is computed beside it."""

from __future__ import annotations

import ctypes
import math
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from headstart.machine.cpu import build
from headstart.machine.cpu import plan as plan_module
from headstart.machine.cpu.formats import KINDS
from headstart.machine.cpu.library import MatrixRecord, instructions, kernels, pool
from headstart.machine.cpu.packed import load_packed, pack_model, save_packed, why_not
from headstart.machine.cpu.plan import EXACT
from headstart.machine.cpu.runner import CpuRunner
from headstart.maths.tree import Topology
from headstart.testing import TINY_VOCABULARY, tiny_model

pytestmark = pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not()))

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
#: family -> more settings; together they have biases, query and key norms, windows, untied and padded heads, and
#: channels that do not turn
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 32},
    "mistral": {"head_dim": 32},
    "qwen2": {"hidden_size": 128},
    "qwen2-mixed": {"hidden_size": 128},
    "qwen3": {"head_dim": 32, "tie_word_embeddings": True},
    "phi3": {"hidden_size": 128},
    "phi3-partial": {
        "hidden_size": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75},
    },
}
ISAS = ["native", "avx2", "plain"]
TEXT = [5, 9, 33, 17, 60, 2, 41, 8, 90, 12, 7, 55, 31, 20, 66, 3, 71, 28, 44, 19, 83, 10, 36, 50]


@lru_cache
def model(family: str) -> PreTrainedModel:
    return tiny_model(family.removesuffix("-partial"), **SIZES | FAMILIES[family])


def runner(family: str, kind: str, **settings: Any) -> CpuRunner:
    return CpuRunner(pack_model(model(family), kind), model(family), **{"rows": 3, "max_len": 64} | settings)


# -- matrices -----------------------------------------------------------------------------------------------------


def packed_matrix(weight: Tensor, kind: str, level: str) -> tuple[MatrixRecord, Tensor]:
    outputs, inputs = weight.shape
    memory = torch.empty(kernels(level).hs_packed_bytes(KINDS[kind], outputs, inputs), dtype=torch.uint8)
    order = torch.arange(outputs, dtype=torch.int32)
    kernels(level).hs_pack(KINDS[kind], weight.data_ptr(), order.data_ptr(), outputs, inputs, memory.data_ptr())
    return MatrixRecord(KINDS[kind], outputs, inputs, memory.data_ptr(), None), memory


def unpacked(record: MatrixRecord, level: str) -> Tensor:
    found = torch.empty(record.outputs, record.inputs)
    rows = torch.arange(record.outputs, dtype=torch.int32)
    kernels(level).hs_unpack(ctypes.byref(record), rows.data_ptr(), record.outputs, found.data_ptr())
    return found


def product(record: MatrixRecord, x: Tensor, level: str, threads: int = 1) -> Tensor:
    found = torch.empty(len(x), record.outputs)
    kernels(level).hs_product(
        pool(threads, level), ctypes.byref(record), x.contiguous().data_ptr(), len(x), found.data_ptr()
    )
    return found


def rounded(x: Tensor, by: int = 32) -> Tensor:
    """What the kernels make of activations: 8 bits and a scale for each group of 32. Where 256 share one, a group's is
    a half, a quarter or an eighth of it, if that is enough for its largest number and for 16 to be 1007 together."""
    groups = x.view(len(x), -1, 32)
    least = groups.abs().amax(-1, keepdim=True)
    if by == 256:
        together = groups.abs().view(len(x), -1, 2, 16).sum(-1).amax(-1, keepdim=True)
        blocks = torch.maximum(least, together * (127 / 1007)).view(len(x), -1, 8)
        most = blocks.amax(-1, keepdim=True).expand_as(blocks)
        finer = sum((blocks <= most * part).float() for part in (0.5, 0.25, 0.125))
        least = (most * 0.5**finer).reshape(least.shape)
    scale = least / 127
    return ((groups / scale.clamp_min(1e-30)).round() * scale).view_as(x)


@pytest.fixture(params=ISAS)
def level(request: pytest.FixtureRequest) -> str:
    reason = build.why_not(request.param)
    if reason is not None:
        pytest.skip(reason)
    return str(request.param)


def test_the_peak_counts_its_products(level: str) -> None:
    """Two threads, ten rounds of 12 instructions of 64 products each, with AVX2 8 of 32; others are not measured."""
    wanted = {"AVX-512 VNNI": 12 * 64, "AVX2": 8 * 32}.get(instructions(level), 0)
    assert kernels(level).hs_multiply(pool(2, level), 10) == 2 * 10 * wanted


def rounded_weights(x: np.ndarray[Any, Any], kind: str) -> tuple[np.ndarray[Any, Any], ...]:
    """The rule, one group of 32 after the other: numbers [.., 32], scales and minima [..] as halves."""
    if kind == "int8":
        halves, least = (np.abs(x).max(-1) / np.float32(127)).astype(np.float16), np.float16(0)
    else:
        low, high = np.fmin.reduce(x, -1), x.max(-1)
        halves, least = ((high - low) / np.float32(15)).astype(np.float16), low.astype(np.float16)
    scale = halves.astype(np.float32)
    inverse = np.where(scale > 0, np.float32(1) / scale, np.float32(0))[..., None]
    numbers = np.rint((x - least.astype(np.float32)[..., None]) * inverse)
    numbers = np.nan_to_num(numbers.clip(-127, 127) + 128, nan=128) if kind == "int8" else numbers.clip(0, 15)
    return np.nan_to_num(numbers).astype(np.uint8), halves, least


@pytest.mark.parametrize("kind", ["int8", "int4"])
@np.errstate(all="ignore")
def test_weights_are_rounded_as_the_rule_says_to_the_last_byte(kind: str, level: str) -> None:
    """Large and small ones, ties, infinities, and NaN, with which a whole group is: it must not become a number."""
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn(96, 64, generator=generator) * torch.logspace(-9, 6, 96)[:, None]
    weight[3, 32:] = 0.0
    weight[4] = torch.arange(64) / 2 - 7.5
    weight[5, 7], weight[6, 0], weight[7, 3], weight[8, 40] = math.nan, math.nan, math.inf, -math.inf
    _, memory = packed_matrix(weight, kind, level)
    tiles = memory.numpy().reshape(6, 2, -1)  # [tiles, blocks, bytes]
    size = 512 if kind == "int8" else 256
    words = tiles[..., :size].reshape(6, 2, -1, 16, 4).transpose(0, 3, 1, 2, 4).reshape(96, 2, -1)
    numbers = words if kind == "int8" else np.concatenate([words & 15, words >> 4], -1)
    halves = tiles[..., size:].copy().view(np.float16).reshape(6, 2, -1, 16).transpose(2, 0, 3, 1).reshape(-1, 96, 2)
    expected, *scales = rounded_weights(weight.numpy().reshape(96, 2, 32), kind)
    assert np.array_equal(numbers, expected)
    for found, wanted in zip(halves, scales, strict=kind == "int4"):
        assert np.array_equal(found, wanted, equal_nan=True)


@pytest.mark.parametrize("kind", ["int8", "int4", "float32", "bfloat16", "float16"])
def test_products_are_those_of_the_unpacked_numbers(kind: str, level: str) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(80, 96, generator=generator)
    weight[3, 32:64] = 0.0  # a group without any numbers
    x = torch.randn(19, 96, generator=generator)
    x[2] = 0.0
    record, _memory = packed_matrix(weight, kind, level)
    exact = unpacked(record, level)
    if kind in EXACT:
        assert torch.equal(exact, weight.to(getattr(torch, kind)).float())
    else:
        assert (exact - weight).abs().max() <= weight.abs().max() / {"int8": 127, "int4": 15}[kind] + 1e-3
    expected = (x if kind in EXACT else rounded(x)).double() @ exact.T.double()
    assert torch.allclose(product(record, x, level).double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", ["int8", "int4", "float32", "bfloat16", "float16"])
def test_a_tokens_product_has_the_same_bits_in_any_company(kind: str, level: str) -> None:
    generator = torch.Generator().manual_seed(1)
    record, _memory = packed_matrix(torch.randn(144, 64, generator=generator), kind, level)
    x = torch.randn(21, 64, generator=generator)
    together = product(record, x, level, threads=2)
    for count in range(1, 10):
        for first in (0, 5, 12):
            assert torch.equal(product(record, x[first : first + count], level), together[first : first + count])


def test_extreme_numbers_do_not_overflow(level: str) -> None:
    """The largest 8-bit products of all signs: a kernel that adds them in 16 bits would saturate."""
    for sign in (1.0, -1.0):
        record, _memory = packed_matrix(torch.full((16, 64), sign), "int8", level)
        assert torch.allclose(product(record, torch.ones(2, 64), level), torch.full((2, 16), 64 * sign), rtol=1e-3)
    ramp = torch.linspace(-3, 3, 64).repeat(16, 1)
    record, _memory = packed_matrix(ramp, "int4", level)
    found, expected = product(record, -ramp[:2], level), -rounded(ramp[:2]) @ unpacked(record, level).T
    assert torch.allclose(found, expected, rtol=1e-4)


def test_4_bit_numbers_of_a_gguf_file_are_kept_exactly() -> None:
    """Q4_1: value = scale * number + minimum with half-float scale and minimum. Q8_0: scale * number."""
    generator = torch.Generator().manual_seed(2)
    scale = (torch.rand(16, 4, 1, generator=generator) * 0.1 + 0.001).half().float()
    least = (torch.randn(16, 4, 1, generator=generator) * 0.3).half().float()
    numbers = torch.randint(0, 16, (16, 4, 32), generator=generator).float()
    numbers[..., 0], numbers[..., 1] = 0, 15  # a file's extremes are taken
    weight = (scale * numbers + least).view(16, 128)
    record, _memory = packed_matrix(weight, "int4", "native")
    assert torch.allclose(unpacked(record, "native"), weight, rtol=0, atol=1e-6)
    signed = torch.randint(-127, 128, (16, 4, 32), generator=generator).float()
    signed[..., 0] = 127
    weight = (scale * signed).view(16, 128)
    record, _memory = packed_matrix(weight, "int8", "native")
    assert torch.equal(unpacked(record, "native"), weight)


def test_broken_numbers_stay_visible(level: str) -> None:
    record, _memory = packed_matrix(torch.randn(16, 64), "int8", level)
    x = torch.randn(3, 64)
    x[1, 40] = float("nan")
    found = product(record, x, level)
    assert found[1].isnan().all()
    assert found[[0, 2]].isfinite().all()
    x[1, 40] = float("inf")
    assert not product(record, x, level)[1].isfinite().any()


# -- decoders -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_decoder_is_the_hugging_face_model(family: str) -> None:
    with torch.no_grad():
        expected = model(family)(torch.tensor([TEXT])).logits[0]
    for kind, limit in (("float32", 1e-5), ("float16", 4e-3), ("bfloat16", 0.04), ("int8", 0.08), ("int4", 0.6)):
        found = runner(family, kind).forward(slice(1, 2), torch.tensor([TEXT]), [0])[0]
        assert found.shape == expected.shape
        error = (found - expected).square().mean().sqrt() / expected.std()
        assert error < limit, (kind, error)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["int8", "int4", "bfloat16"])
def test_no_logit_depends_on_the_company(family: str, kind: str) -> None:
    """One pass over the text; token by token; with rejected drafts; in ragged rows; as a branch of a tree; on two
    threads: the same bits."""
    r = runner(family, kind)
    ids = torch.tensor([TEXT])
    fresh = r.forward(slice(0, 1), ids, [0])[0]
    for threads in (1, 2):
        r.threads = threads
        for at, token in enumerate(TEXT):
            assert torch.equal(r.forward(slice(0, 1), torch.tensor([[token]]), [at])[0, 0], fresh[at]), (threads, at)
    # Ragged: row 0 at 9 with a draft that is wrong after two, row 1 at 4, row 2 at 0.
    r.prefill(1, TEXT[:4])
    r.slab.truncate(1, 0)
    block = torch.tensor([[*TEXT[9:11], 77, 78, 79], TEXT[4:9], TEXT[:5]])
    found = r.forward(slice(0, 3), block, [9, 4, 0])
    assert torch.equal(found[0, :2], fresh[9:11])
    assert torch.equal(found[1], fresh[4:9])
    assert torch.equal(found[2], fresh[:5])
    # And each row with its own tokens only.
    pieces = r.forward_ragged(slice(0, 3), [[*TEXT[9:11], 77], TEXT[4:9], TEXT[:1]], [9, 4, 0])
    assert [len(logits) for logits in pieces] == [3, 5, 1]
    assert torch.equal(pieces[0][:2], fresh[9:11])
    assert torch.equal(pieces[1], fresh[4:9])
    assert torch.equal(pieces[2], fresh[:1])
    # A tree whose second branch is the text; its keys stand with gaps.
    tree = Topology.of([(-1, -1, 1, 0, 2)], r.device)
    nodes = torch.tensor([[TEXT[11], 77, TEXT[12], TEXT[13], 78, TEXT[14]]])
    r.forward(slice(0, 1), ids[:, :11], [0])
    found = r.forward(slice(0, 1), nodes, [11], tree)[0]
    assert torch.equal(found[[0, 2, 3, 5]], fresh[11:15])
    r.slab.lengths[0], r.slab.tokens[0] = 11, TEXT[:11]
    r.slab.keep(0, 11, [2, 3, 5])
    assert torch.equal(r.forward(slice(0, 1), ids[:, 15:], [15])[0], fresh[15:])
    assert torch.equal(r.forward(slice(0, 1), ids, [0], keep=2)[0], fresh[-2:])
    assert r.forward(slice(0, 1), ids, [0], keep=0).shape == (1, 0, TINY_VOCABULARY)


def test_features_are_the_hidden_states() -> None:
    r = runner("llama", "float32")
    r.watch((0, 1, 0))
    r.prefill(1, TEXT[:10])
    r.forward(slice(0, 2), torch.tensor([TEXT[:4], TEXT[10:14]]), [0, 10])
    with torch.no_grad():
        states = model("llama").model(torch.tensor([TEXT[:14]]), output_hidden_states=True).hidden_states
    found = r.features(1, 0, 14)
    assert torch.allclose(found[:, :64], states[1][0], atol=0.02)
    assert torch.equal(found[:, 128:], found[:, :64])
    assert not torch.allclose(found[:, 64:128], states[1][0], atol=0.02)
    assert torch.equal(r.features(0, 0, 4), found[:4])
    r.forward_ragged(slice(0, 2), [TEXT[4:6], TEXT[10:14]], [4, 10])
    assert torch.equal(r.features(0, 0, 6), found[:6])
    assert torch.equal(r.features(1, 0, 14), found)
    with pytest.raises(ValueError, match="already watches"):
        r.watch((1,))


def test_ids_and_sizes_are_checked() -> None:
    r = runner("llama", "int8")
    with pytest.raises(ValueError, match="vocabulary"):
        r.forward(slice(0, 1), torch.tensor([[TINY_VOCABULARY]]), [0])
    with pytest.raises(ValueError, match="do not fit"):
        r.forward(slice(0, 1), torch.tensor([TEXT]), [r.slab.capacity - 5])
    with pytest.raises(ValueError, match="do not agree"):
        r.forward(slice(0, 2), torch.tensor([TEXT]), [0])
    with pytest.raises(ValueError, match="do not fit"):
        r.forward_ragged(slice(0, 2), [TEXT, TEXT[:1]], [r.slab.capacity - 5, 0])
    with pytest.raises(ValueError, match="do not agree"):
        r.forward_ragged(slice(0, 2), [TEXT], [0])
    with pytest.raises(ValueError, match="vocabulary"):
        r.forward_ragged(slice(0, 2), [[1, 2], [TINY_VOCABULARY]], [0, 0])


def test_packed_weights_on_disk(tmp_path: Path) -> None:
    packed = pack_model(model("qwen2"), "int4")
    save_packed(packed, tmp_path / "x.safetensors")
    again = load_packed(tmp_path / "x.safetensors")
    assert again is not None
    assert again.plan == packed.plan
    assert torch.equal(again.data, packed.data)


def test_what_cannot_be_packed() -> None:
    assert why_not(model("llama")) is None
    assert "GPT2LMHeadModel" in str(why_not(tiny_model("gpt2")))
    assert "multiple" in str(why_not(tiny_model("llama", **SIZES | {"intermediate_size": 80, "head_dim": 32})))


def test_a_part_that_the_kernels_do_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """An architecture that is lowered for GPUs first is not run here with a part of it left out."""
    assert why_not(model("qwen3")) is None
    monkeypatch.setattr(plan_module, "PARTS", plan_module.PARTS - {"norms its heads"})
    assert why_not(model("qwen3")) == "it norms its heads, which the CPU kernels do not"
    assert why_not(model("qwen2")) is None
