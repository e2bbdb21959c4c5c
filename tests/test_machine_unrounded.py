"""Models of floats from files run on the CPU's kernels as they are stored: nothing is rounded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
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
def test_float32_by_name_runs_on_the_models_own_modules(tmp_path: Path) -> None:
    folder = stored(tmp_path / "model", "llama", torch.bfloat16)
    plain = LLM(folder, None, max_rows=1, max_model_len=64, dtype="float32")
    assert (plain.report.dtype, plain.report.kernels) == ("float32", "torch")
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    mine = LLM(folder, None, max_rows=1, max_model_len=64)
    assert mine.generate(TEXT, params).token_ids == plain.generate(TEXT, params).token_ids


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
