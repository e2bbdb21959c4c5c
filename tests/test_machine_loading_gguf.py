"""GGUF files: ordinary models, told from damaged files in one sentence, and honest about which weights run."""

from __future__ import annotations

import logging
import random
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import write_gguf

from headstart.api import LLM
from headstart.errors import HeadstartError, MissingExtra, ModelNotFound, ModelRefused
from headstart.machine.cpu.build import why_not as no_kernels
from headstart.machine.load import gguf_header, loading
from headstart.machine.load.gguf_header import read_header
from headstart.machine.load.hub import Remote
from headstart.machine.load.loading import eos_ids, load
from headstart.testing import tiny_model


def wide_model(heads: int = 2) -> Any:
    """Widths that blocks of 32 weights fit into, and with two heads our kernels' heads as well."""
    return tiny_model("llama", hidden_size=64, intermediate_size=64, num_attention_heads=heads, num_key_value_heads=2)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", wide_model()).read_bytes()


def test_a_gguf_file_is_an_ordinary_model(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = tiny_model("llama")
    write_gguf(tmp_path / "tiny.gguf", model)
    loaded = load(tmp_path / "tiny.gguf")
    assert capfd.readouterr() == ("", "")
    tokens = torch.tensor([[5, 6, 7, 50, 60]])
    with torch.inference_mode():
        torch.testing.assert_close(loaded.model(tokens).logits, model(tokens).logits, atol=1e-5, rtol=1e-5)
    assert eos_ids(loaded) == (2,)
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.convert_tokens_to_ids("</s>") == 2
    assert loaded.report.dtype == "float32"
    assert loaded.report.notes[-1] == "the file's weights are F32, read as float32"


# -- which weights run


@pytest.mark.skipif(no_kernels() is not None, reason=str(no_kernels()))
@pytest.mark.parametrize(("kind", "own", "other"), [("Q4_1", "int4", "int8"), ("Q8_0", "int8", "int4")])
def test_its_own_bits_are_named_when_they_run(
    kind: str, own: Any, other: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HEADSTART_CACHE_GB", "0")
    path = write_gguf(tmp_path / "tiny.gguf", wide_model(), kind=kind, table="Q8_0")
    sizes: dict[str, Any] = {"max_model_len": 64, "max_rows": 1, "device": "cpu"}
    kept = LLM(path, None, quantization=own, **sizes).report
    assert kept.dtype == own
    assert f"{own} keeps the very numbers of the file's {kind} layers" in kept.notes
    anew = LLM(path, None, quantization=other, **sizes).report
    assert not any("keeps the very numbers" in note or "quantization=" in note for note in anew.notes)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_nothing_is_advised_that_cannot_be_done(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "odd.gguf", wide_model(heads=4), kind="Q8_0")
    notes = LLM(path, None, max_model_len=64, max_rows=1, device="cpu", dtype="float32").report.notes
    assert any("Q8_0" in note for note in notes)
    assert not any("quantization=" in note for note in notes)


def test_a_file_of_few_bits_has_the_type_of_models_on_a_gpu(tmp_path: Path) -> None:
    """Where no type is asked for, which on a CPU it always is."""
    for kind, dtype in (("Q4_1", torch.bfloat16), ("F16", torch.bfloat16), ("F32", torch.float32)):
        path = write_gguf(tmp_path / f"{kind}.gguf", wide_model(), kind=kind)
        model, _, notes = loading._fetch(path, None, None, Remote())
        assert model.dtype == dtype
        assert notes[0].endswith(f" as {str(dtype).removeprefix('torch.')}")


# -- damaged files


def refused(path: Path) -> str:
    with pytest.raises(ModelRefused) as refusal:
        load(path)
    message = str(refusal.value)
    assert str(path) in message or path.name in message
    assert "\n" not in message
    return message


def test_what_is_no_gguf_file_is_told_so(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "model.gguf"
    with pytest.raises(ModelNotFound, match="there is no file"):
        load(path)
    for content, told in (
        (b"", "is empty"),
        (b"GG", "is no GGUF file"),
        (b"once upon a time there was a text file\n" * 100, "is no GGUF file"),
        (b"GGUF", "is cut short or damaged"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(64), "is of GGUF version 1"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(64), "byte order of another machine"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 0), "holds no model"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**63, 2**63), "is cut short or damaged"),
        (whole[: len(whole) // 2], "is cut short: it has"),
        (whole[:-1], "is cut short: it has"),
    ):
        path.write_bytes(content)
        assert told in refused(path)


def test_a_count_that_never_ends_is_not_followed(tmp_path: Path) -> None:
    """An array of 2^60 numbers: the package gguf would count them all."""
    name = b"general.architecture"
    array = struct.pack("<IIQ", 9, 4, 2**60)
    header = b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + struct.pack("<Q", len(name)) + name + array
    (tmp_path / "model.gguf").write_bytes(header + bytes(1000))
    assert "is cut short or damaged" in refused(tmp_path / "model.gguf")


def test_numbers_that_would_fill_the_memory_are_not_believed(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "model.gguf"

    def with_setting(name: bytes, value: int) -> bytes:
        at = whole.index(name) + len(name) + 4
        return whole[:at] + struct.pack("<I", value) + whole[at + 4 :]

    path.write_bytes(with_setting(b"llama.block_count", 2**30))
    assert refused(path).endswith("it describes 1073741824 layers and has 2")
    path.write_bytes(with_setting(b"llama.feed_forward_length", 2**28))
    assert "is damaged: it describes a model of" in refused(path)


def test_unknown_kinds_of_weights_and_models_are_named(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "model.gguf"
    name = b"blk.0.attn_q.weight"
    at = whole.index(name) + len(name) + 4 + 2 * 8  # behind the number of dimensions and the two of them
    path.write_bytes(whole[:at] + struct.pack("<I", 12345) + whole[at + 4 :])
    assert "weights of a kind (number 12345, in blk.0.attn_q.weight)" in refused(path)
    path.write_bytes(whole[:at] + struct.pack("<I", 26) + whole[at + 4 :])  # I32: no weights
    assert "cannot be read as a model (NotImplementedError" in refused(path)
    path.write_bytes(whole.replace(b"llama", b"lhama"))
    assert "architecture lhama is not supported" in refused(path)


def test_a_gguf_file_that_lacks_weights_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "half.gguf", tiny_model("llama"), leave_out="ffn_up")
    assert "half.gguf lacks weights" in refused(path)


def test_no_damage_ends_in_anything_but_a_sentence(tmp_path: Path, whole: bytes) -> None:
    """Cut anywhere in the header, or with any byte of it changed: a refusal, or a model."""
    path, dice = tmp_path / "model.gguf", random.Random(1)
    header = whole.index(b"blk.1.ffn_norm.weight")  # near the end of it
    for length in range(1, header, 41):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelRefused):
            read_header(path)
    sound = []
    for _ in range(200):
        at = dice.randrange(header)
        damaged = bytearray(whole)
        damaged[at] ^= 1 << dice.randrange(8)
        path.write_bytes(damaged)
        try:
            read_header(path)
            sound.append(bytes(damaged))
        except ModelRefused:
            pass
    assert 20 < len(sound) < 200
    for damaged in sound[:12]:  # these get as far as transformers
        path.write_bytes(damaged)
        with suppress(HeadstartError):
            load(path)


def test_without_the_package_gguf_the_extra_is_named(
    tmp_path: Path, whole: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.gguf").write_bytes(whole)
    monkeypatch.setattr(gguf_header, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match="'gguf'"):
        load(tmp_path / "model.gguf")
