"""A GGUF file's own numbers in the CPU kernels: packed as they are, and multiplied with the same bits everywhere."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from test_machine_cpu import FAMILIES, TEXT, level, product, rounded, runner, unpacked
from test_machine_cpu_bits import OTHERS, same
from torch import Tensor

from headstart.machine.cpu import build
from headstart.machine.cpu.formats import KINDS
from headstart.machine.cpu.library import MatrixRecord, kernels
from headstart.machine.cpu.runner import CpuRunner

gguf = pytest.importorskip("gguf")
pytestmark = pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not()))
__all__ = ["level"]  # a fixture

#: type -> (its kind here, bytes of a block, inputs of a block, where its half floats are)
TYPES: dict[str, tuple[str, int, int, tuple[int, ...]]] = {
    "Q4_0": ("int4", 18, 32, (0,)),
    "Q4_1": ("int4", 20, 32, (0, 2)),
    "Q8_0": ("int8", 34, 32, (0,)),
    "Q4_K": ("q4_k", 144, 256, (0, 2)),
    "Q5_K": ("q5_k", 176, 256, (0, 2)),
    "Q6_K": ("q6_k", 210, 256, (208,)),
}
OUTPUTS, INPUTS = 80, 512


def number(name: str) -> Any:
    return gguf.GGMLQuantizationType[name]


@lru_cache
def raw(name: str, extreme: bool = False) -> np.ndarray:
    """A tensor's bytes [OUTPUTS, bytes of a row]: any bits, but halves that are numbers. ``extreme``: all bits set."""
    _, size, block, halves = TYPES[name]
    rng = np.random.default_rng(len(name) + size)
    found = rng.integers(0, 256, (OUTPUTS, INPUTS // block, size), dtype=np.uint8)
    if extreme:
        found[:] = 255 if name not in ("Q6_K", "Q8_0") else 128  # Q6_K: scales of -128
        if name == "Q6_K":
            found[::2, :, :192] = 0  # numbers of -32
            found[1::2, :, :192] = 255  # and of 31, whose sums before the 32 is off go past 16 bits
    for at in halves:
        scale = rng.normal(size=(OUTPUTS, INPUTS // block, 1)).astype(np.float16) * np.float16(0.01)
        found[..., at : at + 2] = scale.view(np.uint8)
    return found.reshape(OUTPUTS, -1)


def packed(name: str, on: str, *, extreme: bool = False) -> tuple[MatrixRecord, Tensor]:
    """In two ranges of tiles, as two threads would."""
    kind, source = TYPES[name][0], raw(name, extreme)
    size = kernels(on).hs_packed_bytes(KINDS[kind], OUTPUTS, INPUTS)
    memory = torch.full((size,), 77, dtype=torch.uint8)
    order = torch.arange(OUTPUTS, dtype=torch.int32).flip(0).contiguous()
    for first, last in ((0, 32), (32, OUTPUTS)):
        at = memory.data_ptr() + size // OUTPUTS * first
        wrong = kernels(on).hs_pack_gguf(
            *(KINDS[kind], number(name), source.ctypes.data, source.shape[1]),
            *(order[first:].data_ptr(), last - first, INPUTS, at),
        )
        assert not wrong
    return MatrixRecord(KINDS[kind], OUTPUTS, INPUTS, memory.data_ptr(), None), memory


@pytest.mark.parametrize("name", TYPES)
def test_the_numbers_are_the_files(name: str, level: str) -> None:
    wanted = torch.from_numpy(gguf.dequantize(raw(name), number(name))).flip(0)
    record, _memory = packed(name, level)
    assert torch.equal(unpacked(record, level), wanted)


@pytest.mark.parametrize("kind", ["int8", "int4", "float32"])
@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_floats_of_a_file_are_rounded_as_any_others(name: str, kind: str) -> None:
    weight = torch.randn(40, 96, generator=torch.Generator().manual_seed(4))
    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[name]
    source, floats = weight.to(dtype), weight.to(dtype).float()
    order = torch.cat([torch.arange(40), torch.tensor([-1] * 8)]).to(torch.int32)
    size = kernels().hs_packed_bytes(KINDS[kind], 48, 96)
    found, wanted = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    row_bytes = 96 * source.element_size()
    wrong = kernels().hs_pack_gguf(
        KINDS[kind], number(name), source.data_ptr(), row_bytes, order.data_ptr(), 48, 96, found.data_ptr()
    )
    kernels().hs_pack(KINDS[kind], floats.data_ptr(), order.data_ptr(), 48, 96, wanted.data_ptr())
    assert not wrong
    assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    ("kind", "name", "inputs"), [("q4_k", "Q6_K", 512), ("int8", "Q4_K", 512), ("q4_k", "F32", 512)]
)
def test_what_a_type_does_not_become_is_refused(kind: str, name: str, inputs: int) -> None:
    source, order = torch.zeros(16, 2048, dtype=torch.uint8), torch.arange(16, dtype=torch.int32)
    memory = torch.full((1 << 16,), 5, dtype=torch.uint8)
    assert kernels().hs_pack_gguf(
        KINDS[kind], number(name), source.data_ptr(), 2048, order.data_ptr(), 16, inputs, memory.data_ptr()
    )
    assert bool((memory == 5).all())


@pytest.mark.parametrize("extreme", [False, True])
@pytest.mark.parametrize("name", TYPES)
def test_products_are_those_of_the_files_numbers(name: str, extreme: bool, level: str) -> None:
    record, _memory = packed(name, level, extreme=extreme)
    x = torch.randn(19, INPUTS, generator=torch.Generator().manual_seed(5))
    x[2] = 0.0
    if extreme:
        x = torch.ones(4, INPUTS) * torch.tensor([[1.0], [-1.0], [3.0], [-0.5]])
    by = 256 if name.endswith("_K") else 32  # inputs that share a scale
    expected = rounded(x, by).double() @ unpacked(record, level).T.double()
    assert torch.allclose(
        product(record, x, level).double(), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max())
    )


@pytest.mark.parametrize("name", TYPES)
def test_a_tokens_product_has_the_same_bits_in_any_company(name: str, level: str) -> None:
    record, _memory = packed(name, level)
    x = torch.randn(21, INPUTS, generator=torch.Generator().manual_seed(6))
    together = product(record, x, level, threads=2)
    for count in range(1, 20):
        for first in (0, 21 - count):
            assert torch.equal(product(record, x[first : first + count], level), together[first : first + count])


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("other", OTHERS)
def test_products_have_the_same_bits_with_every_instruction_set(name: str, other: str) -> None:
    x = torch.randn(13, INPUTS, generator=torch.Generator().manual_seed(7)) * torch.logspace(-9, 9, 13)[:, None]
    (native, memory), (record, other_memory) = (packed(name, on) for on in ("native", other))
    assert torch.equal(memory, other_memory), "packed alike"
    assert same(product(native, x, "native"), product(record, x, other))


@pytest.mark.parametrize("apart", [("v",), ("k",), ("k", "v"), ("up",)])
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_keys_values_and_up_may_lie_apart(family: str, apart: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """In files of mixed kinds. ``qwen2`` has biases. Whether they lie apart or not, the bits are the same."""
    text, kept = torch.tensor([TEXT]), []
    assert "qwen2" in FAMILIES
    fused = runner(family, "int8").forward(slice(0, 1), text, [0])
    plan = runner(family, "int8").packed.plan
    starts = {"k": plan.queries, "v": plan.queries + plan.kv_heads * plan.head_dim}

    def rows(m: MatrixRecord, which: Tensor, bias: int | None) -> MatrixRecord:
        weight = torch.empty(len(which), m.inputs)
        order = which.to(torch.int32).contiguous()
        kernels().hs_unpack(ctypes.byref(m), order.data_ptr(), len(which), weight.data_ptr())
        memory = torch.empty(kernels().hs_packed_bytes(KINDS["int8"], len(which), m.inputs), dtype=torch.uint8)
        straight = torch.arange(len(which), dtype=torch.int32)
        kernels().hs_pack(0, weight.data_ptr(), straight.data_ptr(), len(which), m.inputs, memory.data_ptr())
        kept.append(memory)
        return MatrixRecord(0, len(which), m.inputs, memory.data_ptr(), bias)

    original = CpuRunner._layer

    def layer(own: CpuRunner, number: int) -> dict[str, Any]:
        record = original(own, number)
        whole, gate_up = record["qkv"], record["gate_up"]
        ends = {**starts, "end": whole.outputs}
        for name in [name for name in ("k", "v") if name in apart]:
            first = ends[name]
            last = ends["v"] if name == "k" and "v" in apart else ends["end"]
            bias = whole.bias + 4 * first if whole.bias else None
            record[name] = rows(whole, torch.arange(first, last), bias)
        if apart != ("up",):
            record["qkv"] = rows(whole, torch.arange(ends[apart[0]]), whole.bias)
        else:
            pairs = torch.arange(gate_up.outputs).view(-1, 2, 32)
            record["gate_up"] = rows(gate_up, pairs[:, 0].flatten(), None)
            record["up"] = rows(gate_up, pairs[:, 1].flatten(), None)
        return record

    monkeypatch.setattr(CpuRunner, "_layer", layer)
    assert torch.equal(runner(family, "int8").forward(slice(0, 1), text, [0]), fused)
