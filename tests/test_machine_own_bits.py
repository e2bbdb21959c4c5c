"""GGUF files on the CPU's kernels: their own numbers, packed tensor by tensor, and what is said about it."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf_files import write_gguf
from torch import Tensor

from headstart import LLM, SamplingParams, assembly
from headstart.errors import HeadstartWarning, ModelRefused
from headstart.machine.cpu import build
from headstart.machine.cpu.formats import as_floats
from headstart.machine.cpu.names import GGUF, parts_from
from headstart.machine.cpu.runner import CpuRunner
from headstart.machine.load import open as open_module
from headstart.machine.load import streamed
from headstart.machine.load.gguf import mapped, read_gguf
from headstart.machine.load.gguf_header import read_header
from headstart.machine.load.streamed import Streamed, stream_gguf
from headstart.testing import tiny_model

pytestmark = pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not()))

SIZES: dict[str, Any] = {
    **{"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"head_dim": 64, "num_hidden_layers": 2},
}
TEXT = [5, 9, 33, 17, 60, 2, 41, 8, 90, 12, 7, 55]
PARAMS = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
EXACT = {"Q4_0": "int4", "Q4_1": "int4", "Q5_0": "int8", "Q8_0": "int8", "Q4_K": "q4_k", "Q5_K": "q5_k", "Q6_K": "q6_k"}


@cache
def model(family: str) -> Any:
    more = {"tie_word_embeddings": True} if family == "qwen3" else {}
    made = tiny_model(family, **SIZES, **more)
    for name, weight in made.named_parameters():  # norms and biases that are not ones and zeros
        if weight.dim() == 1:
            weight.data += 0.1 * torch.randn(len(weight), generator=torch.Generator().manual_seed(len(name)))
    return made


def packed(path: Path, kind: str = "own") -> Streamed:
    found = stream_gguf(path, kind)
    assert isinstance(found, Streamed), found
    return found


def logits(found: Streamed) -> Tensor:
    runner = CpuRunner(found.packed, found.loaded.model, max_len=64)
    return runner.forward(slice(0, 1), torch.tensor([TEXT]), [0])[0]


def distance(found: Streamed, path: Path) -> float:
    """From the logits of the file's own weights in float32."""
    spelt_out, _ = read_gguf(path)
    with torch.inference_mode():
        exact = spelt_out(torch.tensor([TEXT])).logits[0]
    return float((logits(found) - exact).norm() / exact.norm())


def numbers(found: Streamed, path: Path) -> Any:
    """Every matrix as the kernels see it, and as the file has it."""
    plan = found.packed.plan
    parts = parts_from(plan, mapped(read_header(path)), GGUF)
    for matrix in plan.matrices():
        whole = torch.cat([as_floats(stored) for stored in parts[matrix.part]])
        rows = torch.from_numpy(matrix.rows()[: matrix.outputs]).long()
        yield matrix, found.packed.rows(matrix.name, torch.arange(matrix.outputs)), whole[rows]


@pytest.mark.parametrize("kind", [*EXACT, "Q5_1"])
def test_a_files_own_numbers_run(kind: str, tmp_path: Path) -> None:
    """Weights as the package gguf reads them, and logits close to theirs: activations are rounded."""
    gguf = pytest.importorskip("gguf")
    path = write_gguf(tmp_path / "model.gguf", model("llama"), kind=kind, table="Q8_0")
    found = packed(path)
    assert found.packed.plan.kind == EXACT.get(kind, "int8")
    stored = mapped(read_header(path))["blk.1.ffn_down.weight"]
    theirs = gguf.quants.dequantize(stored.bytes.reshape(stored.shape[0], -1), gguf.GGMLQuantizationType[stored.kind])
    for matrix, ours, files in numbers(found, path):
        if matrix.name == "1.down":
            torch.testing.assert_close(files, torch.from_numpy(np.array(theirs)), rtol=1e-5, atol=1e-6)
        off = 1e-6 if kind in EXACT or matrix.part == "embedding" else float(files.abs().max()) / 200
        torch.testing.assert_close(ours, files, rtol=1e-5, atol=off)
    assert distance(found, path) < 0.05


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "phi3"])
def test_each_matrix_has_its_own_kind(family: str, tmp_path: Path) -> None:
    """As Q4_K_M mixes them, and worse: queries, keys, values, gate and up of different kinds; biases, norms, a tied
    head."""
    mixed = {
        **{"blk.0.attn_v": "Q6_K", "blk.0.ffn_down": "Q6_K", "blk.0.ffn_up": "Q5_K", "blk.0.attn_output": "Q8_0"},
        **{"blk.1.attn_k": "Q5_K", "blk.1.attn_v": "Q5_K", "output": "Q5_K"},
    }
    if family == "qwen2":
        mixed |= {"blk.1.attn_v": "Q4_1", "blk.1.ffn_gate": "Q6_K"}
    path = write_gguf(
        tmp_path / "model.gguf",
        model(family),
        kind="Q4_K",
        table="Q6_K",
        kinds=lambda name: mixed.get(name.removesuffix(".weight")),
    )
    found = packed(path)
    for _, ours, files in numbers(found, path):
        torch.testing.assert_close(ours, files, rtol=1e-5, atol=1e-6)
    names = {matrix.name: matrix.kind for matrix in found.packed.plan.matrices()}
    assert names["embedding"] == "q6_k"
    assert names.get("head") == (None if family == "qwen3" else "q5_k")
    if family != "phi3":
        assert (names["0.qkv"], names["0.v"], names["0.up"], names["0.down"]) == ("q4_k", "q6_k", "q5_k", "q6_k")
        assert (names["1.qkv"], names["1.k"]) == ("q4_k", "q5_k")
        assert names.get("1.v") == ("int4" if family == "qwen2" else None)
    assert distance(found, path) < 0.05


def test_a_token_has_the_same_bits_in_any_company(tmp_path: Path) -> None:
    """Inputs of K kinds are rounded by 256, which several heads and threads make together."""
    kinds = {"ffn_down": "Q6_K", "attn_output": "Q5_K"}
    path = write_gguf(
        tmp_path / "model.gguf",
        tiny_model("llama", **SIZES | {"intermediate_size": 768}),
        kind="Q4_K",
        table="Q6_K",
        kinds=lambda name: kinds.get(name.removesuffix(".weight").split(".")[-1]),
    )
    found = packed(path)
    text, wanted = torch.tensor([TEXT * 4]), None
    for threads in (1, 2):
        runner = CpuRunner(found.packed, found.loaded.model, max_len=64, threads=threads)
        together = runner.forward(slice(0, 1), text, [0])[0]
        at, parts = 0, []
        for width in (17, 1, 2, 4, 5, 8, 3, 8):
            parts.append(runner.forward(slice(0, 1), text[:, at : at + width], [at])[0])
            at += width
        wanted = together if wanted is None else wanted
        assert torch.equal(together, wanted)
        assert torch.equal(torch.cat(parts), wanted[:at])


def test_rounding_is_what_it_was(tmp_path: Path) -> None:
    """quantization="int8" of a file: the numbers that its floats are rounded to; in Q4_1 and Q8_0 those that it has."""
    for kind, wish in (("Q6_K", "int8"), ("Q6_K", "int4"), ("Q4_1", "int4"), ("Q8_0", "int8")):
        path = write_gguf(tmp_path / f"{kind}.gguf", model("llama"), kind=kind, table="Q8_0")
        spelt_out, _ = read_gguf(path)
        before = open_module.runner_for(  # the floats of a live model, packed
            open_module.Opened(open_module.load(spelt_out), wish), rows=1, max_len=32, margin=2
        )[0]
        after = packed(path, wish).packed
        for matrix in after.plan.matrices():
            rows = torch.arange(matrix.outputs)
            assert torch.equal(after.rows(matrix.name, rows), before.packed.rows(matrix.name, rows)), (kind, matrix)


# -- what runs, and what is said ------------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "cache"))
    return write_gguf(
        tmp_path / "model.gguf",
        model("llama"),
        kind="Q4_K",
        table="Q6_K",
        kinds=lambda name: "Q6_K" if "attn_v" in name else None,
    )


def opened(path: Path, **settings: Any) -> LLM:
    return LLM(path, None, max_model_len=64, max_rows=1, device="cpu", **settings)


def test_it_runs_with_its_own_bits_and_says_so(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    first = opened(path, progress=told.append)
    assert (first.report.dtype, first.report.kernels[:3], first.report.device) == ("Q4_K", "C++", "cpu")
    assert "the file's weights are Q4_K (and Q6_K, F32), run as they are" in first.report.notes
    assert "activations are rounded to 8 bits" in first.report.notes[-1]
    assert "dtype='float32' spells the weights out" in first.report.notes[-1]
    assert told[-1] == "loading model.gguf: 100%"
    assert first.report.bytes < 1.2 * path.stat().st_size
    said = first.generate("ABBA", PARAMS)
    # Again: the weights from the file, all else from what was kept.
    for name in ("empty_model", "read_tokenizer"):
        monkeypatch.setattr(streamed, name, lambda *_: pytest.fail("read again"))
    again = opened(path)
    assert again.report == first.report
    assert (again.generate("ABBA", PARAMS).token_ids, again.generate("ABBA", PARAMS).text) == (
        said.token_ids,
        said.text,
    )
    kept = [file.stat().st_size for file in (path.parent / "cache" / "packed").rglob("*") if file.is_file()]
    assert sum(kept) < 50_000, "no copy of the weights"


def test_floats_when_they_are_asked_for(path: Path) -> None:
    for wish in ({"dtype": "float32"}, {"quantization": None}):
        report = opened(path, **wish).report
        assert (report.dtype, report.kernels[:3]) == ("float32", "C++")
        assert "the file's weights are Q4_K (and Q6_K, F32), spelt out as float32" in report.notes
        assert "without dtype= and quantization= it runs with its own bits, several times faster" in report.notes
    rounded = opened(path, quantization="int4").report
    assert rounded.dtype == "int4"
    assert "the file's weights are Q4_K (and Q6_K, F32), rounded to int4" in rounded.notes


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_floats_by_name_run_on_the_kernels(path: Path, dtype: str) -> None:
    """On the model's own modules in bfloat16 a CPU wrote a tenth of the tokens that float32 gives."""
    told: list[str] = []
    llm = opened(path, dtype=dtype, progress=told.append)
    assert (llm.report.dtype, llm.report.kernels[:3]) == (dtype, "C++")
    assert f"the file's weights are Q4_K (and Q6_K, F32), spelt out as {dtype}" in llm.report.notes
    assert not any("nothing is rounded" in note for note in llm.report.notes)
    runner = llm.engine.parts.runner
    tokens = torch.tensor([[5, 6, 7, 50, 60]])
    found = runner.forward(slice(0, 1), tokens, [0])[0]
    with torch.inference_mode():
        same = read_gguf(path)[0]  # the same numbers, in float32
        for weight in same.parameters():
            if weight.dim() == 2:
                weight.copy_(weight.to(getattr(torch, dtype)))
        expected = same(tokens).logits[0]
    assert torch.allclose(found, expected, atol=2e-5 * float(expected.abs().max()), rtol=0)


def test_spelling_out_tells_how_far_it_is(path: Path) -> None:
    told: list[str] = []
    opened(path, dtype="float32", progress=told.append)
    assert told[-1] == "loading model.gguf: 100%"
    assert len(told) > 10


def test_files_of_floats_stay_floats(tmp_path: Path) -> None:
    report = opened(write_gguf(tmp_path / "model.gguf", model("llama"), kind="F16", table="F16")).report
    assert (report.dtype, report.kernels[:3]) == ("float16", "C++")
    assert "the file's weights are F16 (and F32), run as they are" in report.notes
    assert any("nothing is rounded" in note for note in report.notes)


def test_a_draft_too_large_to_be_asked_is_not_measured(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "LEAST_PARAMETERS", 0)
    monkeypatch.setattr(assembly, "measure", lambda *_: pytest.fail("measured"))
    llm = LLM(path, path, max_model_len=64, max_rows=1, device="cpu")
    llm.generate("ABBA", PARAMS)
    assert "the draft model reads 100% of the bytes" in str(llm.engine.inactive_reason)


def test_a_draft_runs_with_its_own_bits_too(path: Path) -> None:
    llm = LLM(path, path, max_model_len=64, max_rows=1, device="cpu")
    assert llm.engine.parts.drafter.runner.packed.plan.kind == "q4_k"
    assert llm.generate("ABBA", PARAMS).token_ids == opened(path).generate("ABBA", PARAMS).token_ids


def test_what_cannot_run_on_the_kernels_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = tiny_model("llama", hidden_size=64, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2)
    path = write_gguf(tmp_path / "odd.gguf", odd, kind="Q8_0", table="Q8_0")
    told = "odd.gguf runs in float32 on torch, several times slower than with its own bits: its head width 16"
    with pytest.warns(HeadstartWarning, match=told):
        report = opened(path).report
    assert (report.dtype, report.kernels) == ("float32", "torch")
    assert any(note.startswith(told) for note in report.notes)
    monkeypatch.setenv("HEADSTART_REQUIRE_KERNELS", "1")
    with pytest.raises(ModelRefused, match="its head width 16"):
        opened(path)


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS", "TQ1_0"])
def test_kinds_that_are_not_read_are_named(kind: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", model("llama"), kinds=lambda name: kind if "ffn" in name else "Q8_0")
    with pytest.raises(ModelRefused, match=rf"has weights in {kind}, which .* use another quantization .* dtype="):
        opened(path)
