"""Tokens of GGUF files: what only fills a vocabulary up is no token, texts begin and turns end as in llama.cpp."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gguf_files import write_gguf

from headstart import LLM, SamplingParams
from headstart.errors import ModelRefused
from headstart.machine.cpu.build import why_not as no_kernels
from headstart.machine.load.gguf import read_gguf
from headstart.machine.load.loading import eos_ids, load
from headstart.testing import tiny_model

SIZES: dict[str, Any] = {"max_model_len": 64, "max_rows": 1, "device": "cpu", "gamma": 3}


def model(vocabulary: int = 128) -> Any:
    return tiny_model(
        "llama",
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=64,
        num_attention_heads=2,
        num_key_value_heads=2,
    )


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "cache"))


@pytest.mark.skipif(no_kernels() is not None, reason=str(no_kernels()))
def test_two_sizes_of_a_family_draft_for_each_other(tmp_path: Path) -> None:
    """One tokenizer, filled up to different sizes: as the files of Qwen2.5 with 0.5B and 7B are."""
    target = write_gguf(tmp_path / "large.gguf", model(160), kind="Q8_0", filling=60)
    draft = write_gguf(tmp_path / "small.gguf", model(128), kind="Q8_0", filling=28)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    for _ in range(2):  # again: with what was kept of them
        llm = LLM(target, draft, **SIZES)
        assert llm.report.tokenizer_size == 100
        answer = llm.generate("ABBA", params)
        assert answer.stats.drafted > 0
        assert max(answer.token_ids) < 100, "what no text has is not written either"
    assert answer.token_ids == LLM(target, None, **SIZES).generate("ABBA", params).token_ids


def test_other_tokens_are_still_another_tokenizer(tmp_path: Path) -> None:
    target = write_gguf(tmp_path / "large.gguf", model(160), filling=60)
    draft = write_gguf(tmp_path / "small.gguf", model(128), filling=20)
    with pytest.raises(ModelRefused, match="different tokenizers, of 100 and 108 tokens"):
        LLM(target, draft, **SIZES)


@pytest.mark.parametrize(
    ("about", "begins"),
    [
        ({}, False),
        ({"add_bos_token": True}, True),
        ({"pre": "llama-bpe"}, True),
        ({"pre": "llama-bpe", "add_bos_token": False}, False),
    ],
)
def test_a_raw_prompt_begins_as_the_header_says(about: dict[str, Any], begins: bool, tmp_path: Path) -> None:
    tokenizer: Any = read_gguf(write_gguf(tmp_path / "model.gguf", model(), about=about))[1]
    assert (tokenizer("AB").input_ids[0] == 1) is begins
    tokenizer.save_pretrained(tmp_path / "kept")
    again = type(tokenizer).from_pretrained(tmp_path / "kept")
    assert again("AB").input_ids == tokenizer("AB").input_ids
    assert 1 not in tokenizer("AB", add_special_tokens=False).input_ids


def test_an_answer_ends_where_a_turn_ends(tmp_path: Path) -> None:
    """Phi-3's files name <|endoftext|> alone, early ones of Llama 3 <|end_of_text|>; their turns end otherwise."""
    path = write_gguf(tmp_path / "named.gguf", model(), special=("<|end|>", "<|user|>"))
    assert eos_ids(load(path)) == (2, 95)
    path = write_gguf(tmp_path / "told.gguf", model(), about={"eot_token_id": 40, "eom_token_id": 41})
    assert eos_ids(load(path)) == (2, 40, 41)
    if no_kernels() is None:
        for _ in range(2):  # again: with what was kept of it
            llm = LLM(tmp_path / "named.gguf", None, **SIZES)
            answer = llm.generate("AB", SamplingParams(temperature=0, max_tokens=4, logit_bias={95: 100}))
            assert (answer.token_ids, answer.finish_reason) == ((95,), "stop")


@pytest.mark.skipif(no_kernels() is not None, reason=str(no_kernels()))
def test_a_file_without_the_ending_is_known_by_its_beginning(tmp_path: Path) -> None:
    """Ollama's are called sha256-..., and Windows writes .GGUF."""
    path = write_gguf(tmp_path / "model.gguf", model(), kind="Q8_0")
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    expected = LLM(path, None, **SIZES).generate("ABBA", params).token_ids
    for name in ("sha256-74701a8c", "MODEL.GGUF"):
        other = path.rename(tmp_path / name)
        for quantization in ("auto", "int8", "int8"):  # int8 again: from the packed copy
            llm = LLM(other, None, quantization=quantization, **SIZES)
            assert llm.generate("ABBA", params).token_ids == expected
        path = other
