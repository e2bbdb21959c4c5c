"""Packed models on disk: the second load takes them, and nothing stale is ever taken."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
from kernel_tools import Compiler, ended, start_warm
from transformers import PreTrainedTokenizerFast

from headstart import LLM, SamplingParams
from headstart.errors import ModelRefused
from headstart.machine.cpu import build
from headstart.machine.cpu.packed import Packed
from headstart.machine.load import open, packed_store
from headstart.machine.load.model_info import Outline, report_from, report_text
from headstart.testing import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not()))

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
PARAMS = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "cache"))
    return _saved(tiny_model("qwen3", **SIZES), tmp_path / "model")


def opened(folder: Path, **settings: Any) -> LLM:
    return LLM(folder, None, max_model_len=64, **({"quantization": "int8"} | settings))


def copies(folder: Path) -> list[Path]:
    place = folder.parent / "cache" / "packed"
    return sorted(place.iterdir()) if place.exists() else []


def forbid_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("float weights were loaded")

    monkeypatch.setattr(open, "load", refuse)


def test_the_second_load_needs_no_float_weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = opened(folder)
    said, eos = first.generate("some words", PARAMS), first.engine._reception.eos
    assert len(copies(folder)) == 1
    forbid_loading(monkeypatch)
    again = opened(folder)
    assert isinstance(again.engine.parts.runner.model, Outline)
    assert again.generate("some words", PARAMS).token_ids == said.token_ids
    assert again.generate("some words", PARAMS).text == said.text
    assert (again.report, again.engine._reception.eos) == (first.report, eos)
    assert LLM(folder, folder, quantization="int8", max_model_len=64).generate([5, 6], PARAMS).token_ids, "as a draft"


def test_whatever_it_depends_on_is_in_its_name(folder: Path) -> None:
    opened(folder)
    opened(folder, quantization="int4")
    assert len(copies(folder)) == 2
    weights = folder / "model.safetensors"
    os.utime(weights, (1, 1))  # another file under the same name
    opened(folder)
    assert len(copies(folder)) == 3
    opened(folder, dtype="bfloat16")
    assert len(copies(folder)) == 4
    opened(folder, quantization=None)
    assert len(copies(folder)) == 4


def test_room_is_bounded_and_the_longest_unused_goes_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADSTART_CACHE_GB", "0")
    opened(folder)
    assert copies(folder) == []
    monkeypatch.delenv("HEADSTART_CACHE_GB")
    opened(folder)
    (eight,) = copies(folder)
    opened(folder, quantization="int4")
    four = next(copy for copy in copies(folder) if copy != eight)
    sizes = [sum(file.stat().st_size for file in copy.iterdir()) for copy in (eight, four)]
    os.utime(eight, (1000, 1000))
    os.utime(four, (2000, 2000))
    opened(folder)  # int8 is used: int4 has now been unused for longer
    monkeypatch.setenv("HEADSTART_CACHE_GB", str((sum(sizes) + sizes[0] / 2) / 1e9))
    opened(folder, dtype="bfloat16")
    assert eight in copies(folder)
    assert four not in copies(folder)
    assert len(copies(folder)) == 2


@pytest.mark.parametrize(
    "damage", ["cut", "other version", "gone", "no settings", "endless", "a plan of nonsense", "another plan"]
)
def test_a_damaged_copy_is_passed_over(folder: Path, damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said = opened(folder).generate([5, 6, 7], PARAMS).token_ids
    (copy,) = copies(folder)
    weights = copy / "weights.safetensors"
    if damage == "cut":
        weights.write_bytes(weights.read_bytes()[:50])
    elif damage == "other version":
        monkeypatch.setattr("headstart.machine.cpu.packed.VERSION", "0")
    elif damage == "no settings":
        (copy / "config.json").write_text("null")
    elif damage == "endless":
        (copy / "generation_config.json").write_text("[" * 100_000)
    elif damage == "another plan":  # of the same size: one bit of a number is wrong
        whole = weights.read_bytes()
        at = whole.index(b"inverse_frequencies") + len(b'inverse_frequencies\\": [1.0, 0.')
        weights.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    elif damage == "a plan of nonsense":
        header = weights.read_bytes()
        at = header.index(b'vocab\\": 112') + len(b'vocab\\": ')
        weights.write_bytes(header[:at] + b"1e9" + header[at + 3 :])
    else:
        (copy / "config.json").unlink()
    assert opened(folder).generate([5, 6, 7], PARAMS).token_ids == said
    monkeypatch.undo()
    monkeypatch.setenv("HEADSTART_CACHE", str(folder.parent / "cache"))
    forbid_loading(monkeypatch)
    assert damage == "other version" or opened(folder).generate([5, 6, 7], PARAMS).token_ids == said, "it was made anew"


def test_what_cannot_be_kept_is_no_fault(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(packed_store, "save_packed", full)
    assert opened(folder).generate([5, 6, 7], PARAMS).token_ids
    assert copies(folder) == []
    monkeypatch.undo()
    monkeypatch.setenv("HEADSTART_CACHE", str(folder.parent / "cache"))

    def full_for_tokenizers(*args: Any) -> None:
        raise Exception("No space left on device (os error 28)")  # as the library tokenizers does

    monkeypatch.setattr(PreTrainedTokenizerFast, "save_pretrained", full_for_tokenizers)
    assert opened(folder).generate([5, 6, 7], PARAMS).token_ids
    assert copies(folder) == []


@pytest.mark.parametrize("room", ["nan", "-1"])
def test_room_that_is_no_number(room: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADSTART_CACHE_GB", room)
    assert packed_store._room() == (0 if room == "-1" else 1e9 * packed_store.ROOM)


def test_a_copy_stays_when_the_models_own_tokenizer_is_damaged(folder: Path) -> None:
    opened(folder)
    tokenizer = folder / "tokenizer.json"
    whole, times = tokenizer.read_text(), (tokenizer.stat().st_atime_ns, tokenizer.stat().st_mtime_ns)
    tokenizer.write_text(whole.replace("{", "[", 1))
    os.utime(tokenizer, ns=times)
    with pytest.raises(ModelRefused, match=r"tokenizer\.json is damaged"):
        opened(folder)
    assert len(copies(folder)) == 1


def test_files_that_are_replaced_meanwhile(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was packed of the old ones is not kept as the new ones'."""
    weights = folder / "model.safetensors"
    other = tiny_model("qwen3", seed=1, **SIZES)
    new = opened(_saved(other, folder.parent / "other")).generate([5, 6, 7], PARAMS).token_ids
    fill = Packed.fill

    def fill_slowly(packed: Packed, *args: Any) -> None:
        fill(packed, *args)
        os.replace(folder.parent / "other" / "model.safetensors", weights)

    monkeypatch.setattr(Packed, "fill", fill_slowly)
    old = opened(folder).generate([5, 6, 7], PARAMS).token_ids
    monkeypatch.setattr(Packed, "fill", fill)
    assert opened(folder).generate([5, 6, 7], PARAMS).token_ids == new != old


def _saved(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def test_two_processes_at_once(folder: Path) -> None:
    code = (
        "import sys; from headstart import LLM, SamplingParams\n"
        "llm = LLM(sys.argv[1], None, max_model_len=64, quantization='int8')\n"
        "print(llm.generate([5, 6, 7], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)).token_ids)"
    )
    compiler = Compiler(folder.parent / "compiler")
    settings: Any = {"cache": folder.parent / "cache", "CXX": str(compiler.path)}
    said = ended(*(start_warm(code, str(folder), **settings) for _ in range(2)))
    assert said[0] == said[1] != ""
    assert compiler.count == 1
    assert len(copies(folder)) == 1


@pytest.mark.parametrize("where", ["while it packs", "while it is kept"])
def test_ctrl_c_while_it_loads(folder: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left, no thread goes on, and the next load is as ever."""
    before = threading.active_count()

    def strike(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    def told(text: str) -> None:
        if where == "while it packs" and text.endswith("%"):
            strike()

    with monkeypatch.context() as patch:
        if where == "while it is kept":
            patch.setattr(packed_store, "make_readable", strike)
        with pytest.raises(KeyboardInterrupt):
            opened(folder, progress=told)
    assert threading.active_count() == before
    assert copies(folder) == []
    assert opened(folder).generate("some words", PARAMS).token_ids
    assert len(copies(folder)) == 1


def test_reports_survive_being_written(folder: Path) -> None:
    report = opened(folder, quantization=None).report
    assert report_from(report_text(report)) == report
    for broken in ("", "{}", '{"architecture": "x"}', "[1]"):
        assert report_from(broken) is None
