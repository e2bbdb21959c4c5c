"""Models of floats from files run on the CPU's kernels as they are stored: nothing is rounded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf_files import write_gguf
from transformers import AutoModelForCausalLM

from headstart import LLM, SamplingParams
from headstart.machine.cpu import build
from headstart.machine.cpu.runner import CpuRunner
from headstart.testing import tiny_model

needs_kernels = pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not()))
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "num_hidden_layers": 2}
TEXT = [5, 17, 3, 50, 9, 88, 41, 7, 100, 63, 12, 12, 20, 31]


def stored(path: Path, family: str, dtype: torch.dtype) -> Path:
    model = tiny_model(family, **SIZES).to(dtype)
    model.save_pretrained(path)
    return path


@needs_kernels
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_folders_numbers_are_kept(tmp_path: Path, family: str, dtype: str) -> None:
    folder = stored(tmp_path / "model", family, getattr(torch, dtype))
    llm = LLM(folder, None, max_rows=2, max_model_len=64)
    runner = llm.engine.parts.runner
    assert isinstance(runner, CpuRunner)
    assert runner.packed.plan.exact
    assert (llm.report.dtype, llm.report.kernels[:3]) == (dtype, "C++")
    assert any("nothing is rounded" in note for note in llm.report.notes)
    found = runner.forward(slice(0, 1), torch.tensor([TEXT]), [0])[0]
    with torch.no_grad():  # the same numbers, in float32
        same = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        expected = same(torch.tensor([TEXT])).logits[0]
    assert torch.allclose(found, expected, atol=2e-5 * float(expected.abs().max()), rtol=0)


@needs_kernels
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_float32_by_name_keeps_what_is_stored(tmp_path: Path, dtype: str) -> None:
    """Floats of 16 bits are the same numbers in float32, so that only memory is saved; ids are Hugging Face's."""
    folder = stored(tmp_path / "model", "llama", getattr(torch, dtype))
    llm = LLM(folder, None, max_rows=1, max_model_len=64, dtype="float32")
    runner = llm.engine.parts.runner
    assert isinstance(runner, CpuRunner)
    assert runner.packed.plan.kind == dtype
    assert (llm.report.dtype, llm.report.kernels[:3]) == ("float32", "C++")
    assert any("nothing is rounded" in note for note in llm.report.notes)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    written = theirs.generate(torch.tensor([TEXT]), max_new_tokens=24, do_sample=False, eos_token_id=None)
    assert list(llm.generate(TEXT, params).token_ids) == written[0, len(TEXT) :].tolist()
    own = LLM(theirs, None, max_rows=1, max_model_len=64)  # a model that is passed in runs on its own modules
    assert (own.report.dtype, own.report.kernels) == ("float32", "torch")
    assert own.generate(TEXT, params).token_ids == llm.generate(TEXT, params).token_ids


@needs_kernels
def test_the_embedded_model_in_float32_writes_what_hugging_faces_modules_do(embedded: LLM) -> None:
    llm = LLM(dtype="float32", max_rows=2, max_model_len=256)  # with the head that ships with it
    assert isinstance(llm.engine.parts.runner, CpuRunner)
    chats = [[{"role": "user", "content": text}] for text in ("How do I boil an egg?", "What is 17 plus 25?")]
    found = llm.chat(chats, SamplingParams(temperature=0, max_tokens=40))
    expected = embedded.chat(chats, SamplingParams(temperature=0, max_tokens=40, speculate=False))
    assert isinstance(found, list)
    assert isinstance(expected, list)
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert llm.stats.accepted > 0


@needs_kernels
def test_float32_rounds_no_activations_of_a_file_of_several_kinds(tmp_path: Path) -> None:
    """Beside a quantized matrix activations would be rounded, so all are spelt out, though most are floats."""
    path = write_gguf(tmp_path / "model.gguf", tiny_model("llama", **SIZES), kind="F16", table="Q8_0")
    kinds = {}
    for dtype in ("auto", "float32"):
        runner = LLM(path, None, max_rows=1, max_model_len=64, dtype=dtype).engine.parts.runner
        assert isinstance(runner, CpuRunner)
        kinds[dtype] = (runner.packed.plan.kind, runner.packed.plan.table_kind)
    assert kinds == {"auto": ("float16", "int8"), "float32": ("float32", "float32")}


@needs_kernels
def test_a_dtype_by_name_is_what_weights_are_kept_in(tmp_path: Path) -> None:
    folder = stored(tmp_path / "model", "llama", torch.float32)
    llm = LLM(folder, None, max_rows=1, max_model_len=64, dtype="bfloat16")
    assert (llm.report.dtype, llm.report.kernels[:3]) == ("bfloat16", "C++")
    same = LLM(stored(tmp_path / "half", "llama", torch.bfloat16), None, max_rows=1, max_model_len=64)
    runners = [one.engine.parts.runner for one in (llm, same)]
    assert torch.equal(*(r.forward(slice(0, 1), torch.tensor([TEXT]), [0]) for r in runners))


@needs_kernels
def test_drafts_change_no_text_of_an_unrounded_target(tmp_path: Path) -> None:
    folder = stored(tmp_path / "model", "llama", torch.bfloat16)
    plain = LLM(folder, None, max_rows=3, max_model_len=96)
    drafted = LLM(
        folder, tiny_model("llama", **SIZES | {"num_hidden_layers": 1}), gamma=4, max_rows=3, max_model_len=96
    )
    prompts = [TEXT, TEXT[4:], TEXT[:3]]
    for params in (
        SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
        SamplingParams(temperature=1, seed=3, max_tokens=24, ignore_eos=True),
    ):
        outs = [[out.token_ids for out in llm.generate(prompts, params)] for llm in (plain, drafted)]
        assert outs[0] == outs[1]
    assert drafted.stats.drafted > 0


@needs_kernels
def test_without_kernels_it_runs_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = stored(tmp_path / "model", "llama", torch.bfloat16)
    monkeypatch.setattr("headstart.machine.load.open.no_kernels", lambda say=None: "no C++ compiler found")
    llm = LLM(folder, None, max_rows=1, max_model_len=64)  # a warning would fail the test
    assert (llm.report.dtype, llm.report.kernels) == ("float32", "torch")
