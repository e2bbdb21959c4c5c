"""Speculation on rounded targets is lossless with respect to them: same ids with and without it, in any batch."""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from test_equality import prompts, trees
from transformers import PreTrainedModel

from headstart import LLM, SamplingParams
from headstart.errors import HeadstartWarning, InvalidParameter, ModelRefused
from headstart.machine.cpu import build
from headstart.machine.cpu.runner import CpuRunner
from headstart.machine.head import HeadConfig, HeadNet, save_head
from headstart.testing import tiny_model

needs_kernels = pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not()))

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
LONGEST = 96
GREEDY = SamplingParams(max_tokens=14, temperature=0, ignore_eos=True)


@lru_cache
def target() -> PreTrainedModel:
    return tiny_model("qwen3", **SIZES)


@lru_cache
def draft() -> PreTrainedModel:
    """The target with some noise: it agrees often, and not always."""
    model = tiny_model("qwen3", **SIZES)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.15 * parameter.std())
    return model


def head(folder: Path) -> str:
    """A head without any training: its guesses are noise, which must not show."""
    config = HeadConfig(
        target_hidden=64,
        target_layers=2,
        target_vocab=target().config.vocab_size,
        watch=(0, 1),
        width=64,
        heads=2,
        kv_heads=1,
        head_dim=32,
        ffn=64,
        vocab=40,
    )
    torch.manual_seed(0)
    save_head(HeadNet(config, list(range(3, 43))), folder)
    return str(folder)


def made(kind: str, quantization: Any, rows: int, folder: Path) -> LLM:
    who: Any = {"none": None, "lookup": "lookup", "model": draft()}.get(kind)
    if kind == "tree":
        who = trees(draft())
    if kind == "head":
        who = head(folder)
    return LLM(target(), who, gamma=4, max_rows=rows, max_model_len=LONGEST, quantization=quantization)


@needs_kernels
@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("kind", ["lookup", "model", "tree", "head"])
def test_ids_are_those_of_plain_decoding(kind: str, quantization: str, tmp_path: Path) -> None:
    plain = made("none", quantization, 1, tmp_path)
    warm = dataclasses.replace(GREEDY, temperature=0.8, verification="coupled", seed=3)
    for params in (GREEDY, warm):
        alone = [plain.generate(prompt, params).token_ids for prompt in prompts(5)]
        for rows in (1, 5):
            llm = made(kind, quantization, rows, tmp_path)
            found = [c.token_ids for c in llm.generate(prompts(5), params)]
            assert found == alone, (params.temperature, rows)
            assert llm.stats.drafted > 0


@needs_kernels
def test_rounding_shows_in_the_report_and_changes_the_target() -> None:
    exact = LLM(target(), None, max_model_len=LONGEST)
    rounded = LLM(target(), None, max_model_len=LONGEST, quantization="int4")
    assert exact.report.dtype == "float32"
    assert rounded.report.dtype == "int4"
    assert rounded.report.bytes < exact.report.bytes / 3
    assert any("lossless with respect to" in note for note in rounded.report.notes)
    assert isinstance(rounded.engine.parts.runner, CpuRunner)


@needs_kernels
def test_a_draft_model_is_rounded_unless_told_not_to() -> None:
    for wish, packed in (("auto", True), ("int4", True), (None, False)):
        llm = LLM(target(), draft(), max_model_len=LONGEST, check=False, draft_quantization=wish)
        assert isinstance(llm.engine.parts.drafter.runner, CpuRunner) is packed
        assert not isinstance(llm.engine.parts.runner, CpuRunner)


@needs_kernels
def test_what_cannot_be_rounded_is_refused() -> None:
    with pytest.raises(ModelRefused, match="GPT2LMHeadModel is not one of"):
        LLM(tiny_model("gpt2"), None, max_model_len=64, quantization="int8")
    for name in ("quantization", "draft_quantization"):
        with pytest.raises(InvalidParameter, match=f"{name}.*int8"):
            LLM(target(), draft(), max_model_len=64, **{name: "int3"})
    llm = LLM(tiny_model("gpt2"), tiny_model("gpt2"), max_model_len=64)  # "auto" finds another way
    assert llm.generate([5, 6, 7], GREEDY).token_ids


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstart.machine.cpu.open.no_kernels", lambda: "no C++ compiler found")
    with pytest.raises(ModelRefused, match=r"no C\+\+ compiler found; use quantization=None"):
        LLM(target(), None, max_model_len=64, quantization="int8")
    with pytest.warns(HeadstartWarning, match=r"the draft model runs in float32.*no C\+\+ compiler found"):
        llm = LLM(target(), draft(), max_model_len=64)
    assert not isinstance(llm.engine.parts.drafter.runner, CpuRunner)


@needs_kernels
def test_the_number_of_threads_is_measured_or_set_by_hand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path))
    runner = LLM(target(), None, max_model_len=64, quantization="int8").engine.parts.runner
    assert isinstance(runner, CpuRunner)
    assert runner.threads == 1  # the tests' torch has one thread, so nothing is measured
    assert not (tmp_path / "threads").exists()
    said = []
    monkeypatch.setattr("headstart.machine.cpu.runner.threads_for", lambda step, about, most: said.append(most) or 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr("headstart.machine.cpu.open.processors", lambda: 2)
    LLM(target(), None, max_model_len=64, quantization="int8")
    assert said == [2]
    monkeypatch.setattr("headstart.assembly.processors", lambda: 2)
    with pytest.warns(HeadstartWarning, match="threads=3 is more than the 2 processors here"):
        own = LLM(target(), draft(), max_model_len=64, quantization="int8", threads=3).engine.parts
    assert (own.runner.threads, own.drafter.runner.threads, said) == (3, 3, [2])  # said by hand: nothing is measured


@needs_kernels
def test_the_embedded_model_is_rounded_by_default() -> None:
    plain = LLM(draft=None, max_rows=1, max_model_len=512)
    fast = LLM(max_rows=5, max_model_len=512)
    if plain.report.dtype != "int4":
        pytest.skip("the 4-bit weights of the embedded model are not here")
    assert LLM(draft=None, dtype="float32", max_model_len=64).report.dtype == "float32"
    assert LLM(draft=None, quantization=None, max_model_len=64).report.dtype == "bfloat16"  # as its folder has them
    questions = [
        "Why is the sky blue?",
        "Repeat: one two three one two three one two",
        "Name a fruit.",
        "2 + 2 =",
        "Hi",
    ]
    chats: Any = [[{"role": "user", "content": text}] for text in questions]
    params = SamplingParams(max_tokens=24, temperature=0)
    alone = [plain.chat(chat, params).token_ids for chat in chats]
    assert [fast.chat(chat, params).token_ids for chat in chats] == alone
    assert [c.token_ids for c in fast.chat(chats, params)] == alone
    assert fast.stats.accepted > 0
