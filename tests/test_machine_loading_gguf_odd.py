"""GGUF files that are whole but not what they seem: nothing of them is passed over in silence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf_files import write_gguf

from headstart import LLM, SamplingParams
from headstart.errors import ModelRefused
from headstart.machine.cpu import build
from headstart.machine.load import gguf
from headstart.machine.load.gguf_header import read_header
from headstart.machine.load.loading import load
from headstart.machine.load.streamed import Streamed, stream_gguf
from headstart.testing import tiny_model

pytestmark = pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not()))

SIZES: dict[str, Any] = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
}
TEXT = [5, 6, 7, 50, 3, 99, 20, 11]


def written(path: Path, family: str = "llama", **settings: Any) -> Path:
    sizes = SIZES | ({"hidden_size": 128} if family == "phi3" else {})
    return write_gguf(path / "model.gguf", tiny_model(family, **sizes), kind="Q8_0", table="Q8_0", **settings)


def said(path: Path, **more: Any) -> torch.Tensor:
    """Logits of the file on our kernels."""
    llm = LLM(path, None, max_model_len=64, max_rows=1, device="cpu", threads=1, **more)
    return llm.engine.parts.runner.forward(slice(0, 1), torch.tensor([TEXT]), [0])[0]


def spelt_out(path: Path) -> torch.Tensor:
    with torch.inference_mode():
        return load(path, device="cpu").model(torch.tensor([TEXT])).logits[0]


def close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return bool((found - wanted).norm() < 0.05 * wanted.norm())  # activations are rounded


# -- tensors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["foo", "output.bias", "blk.0.attn_q_norm.weight", "blk.2.attn_q.weight"])
def test_what_is_left_over_is_named(name: str, tmp_path: Path) -> None:
    """A tensor that no part of the model is made of; packed, and spelt out."""
    path = written(tmp_path, more={name: np.ones(64, dtype=np.float32)})
    for way in (lambda: stream_gguf(path, "own"), lambda: load(path, device="cpu")):
        with pytest.raises(ModelRefused, match=f"has 1 tensors that are not read as parts of a llama model.*'{name}'"):
            way()


def with_setting(path: Path, name: bytes, value: int) -> Path:
    whole = path.read_bytes()
    at = whole.index(name) + len(name) + 4
    path.write_bytes(whole[:at] + value.to_bytes(4, "little") + whole[at + 4 :])
    return path


def test_layers_that_are_not_counted_are_not_dropped(tmp_path: Path) -> None:
    path = with_setting(written(tmp_path), b"llama.block_count", 1)
    with pytest.raises(ModelRefused, match=r"not read as parts of a llama model, such as 'blk\.1"):
        stream_gguf(path, "own")
    with pytest.raises(ModelRefused, match="is damaged: it describes 0 layers and has 2"):
        stream_gguf(with_setting(path, b"llama.block_count", 0), "own")


def test_biases_of_a_llama_are_heeded(tmp_path: Path) -> None:
    """Some files of that architecture have them, for some parts only: on our kernels as spelt out."""
    random = np.random.default_rng(0)
    biases = {f"blk.0.attn_{part}.bias": 3 * random.normal(size=size) for part, size in (("q", 128), ("v", 64))}
    path = written(tmp_path, more={name: bias.astype(np.float32) for name, bias in biases.items()})
    found, wanted = said(path), spelt_out(path)
    assert close(found, wanted)
    assert not close(found, said(written(tmp_path)))
    path = written(tmp_path, more={"blk.1.ffn_down.bias": np.ones(64, dtype=np.float32)})
    assert "feed-forward layers have biases" in str(stream_gguf(path, "own"))
    assert load(path, device="cpu").model.model.layers[1].mlp.down_proj.bias.tolist() == [1.0] * 64


def test_rows_of_the_embedding_are_the_vocabulary(tmp_path: Path) -> None:
    """Whatever the setting says: llama.cpp runs such files, too."""
    path = written(tmp_path)
    wanted = said(path)
    assert torch.equal(said(with_setting(path, b"llama.vocab_size", 100)), wanted)


def test_a_tokenizer_of_more_tokens_than_the_model_has_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    path = written(tmp_path)
    reader = gguf.read_tokenizer
    monkeypatch.setattr("headstart.machine.load.streamed.read_tokenizer", lambda *_: _Longer(reader(*_)))
    with pytest.raises(ModelRefused, match="the tokenizer knows 5000 tokens but the model only 112"):
        stream_gguf(path, "own")


class _Longer:
    vocab_size = 5000

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def __len__(self) -> int:
        return self.vocab_size


# -- names of files, tokenizers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["model-00001-of-00000.gguf", "model-00003-of-00002.gguf", "model-00000-of-00001.gguf"]
)
def test_a_name_that_only_looks_like_a_parts(name: str, tmp_path: Path) -> None:
    path = written(tmp_path).rename(tmp_path / name)
    assert len(read_header(path).tensors) == 21


def without(path: Path, left_out: Callable[[str], bool]) -> Path:
    """The file again, less some of its settings."""
    package = pytest.importorskip("gguf")
    reader, to = package.GGUFReader(str(path)), path.with_name("less.gguf")
    writer = package.GGUFWriter(str(to), "llama")
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture" and not left_out(name):
            writer.add_key_value(name, field.contents(), *field.types[:2])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return to


def test_a_file_without_a_tokenizer_takes_ids(tmp_path: Path) -> None:
    """As a folder does; and again from what was kept of it."""
    path = without(written(tmp_path), lambda name: name.startswith("tokenizer."))
    for _ in range(2):
        llm = LLM(path, None, max_model_len=64, max_rows=1, device="cpu", threads=1)
        assert "no tokenizer: prompts must be token ids" in llm.report.notes
        assert len(llm.generate(TEXT, SamplingParams(temperature=0, max_tokens=3)).token_ids) == 3
    assert load(path, device="cpu").tokenizer is None
    path = without(written(tmp_path), lambda name: name == "tokenizer.ggml.merges")
    with pytest.raises(ModelRefused, match=r"less\.gguf's tokenizer cannot be read .*; pass tokenizer= to use another"):
        stream_gguf(path, "own")


# -- rotation -------------------------------------------------------------------------------------------------------


def test_channels_that_do_not_turn(tmp_path: Path) -> None:
    """Phi-4-mini turns three quarters of them; of other models that is not known."""
    path = written(tmp_path, "phi3", **{"rope.dimension_count": 24})
    found = stream_gguf(path, "own")
    assert isinstance(found, Streamed)
    assert len(found.packed.plan.inverse_frequencies) == 12
    with pytest.raises(ModelRefused, match=r"turns 16 of the 32 channels of each head"):
        stream_gguf(written(tmp_path, **{"rope.dimension_count": 16}), "own")


def test_factors_by_length(tmp_path: Path) -> None:
    """Phi-3's long contexts: served on torch, as far as the rotation is the same for all, with the short factors."""
    short, long = (np.linspace(1, end, 16, dtype=np.float32) for end in (2, 64))
    more = {"rope_factors_short.weight": short, "rope_factors_long.weight": long}
    settings = {"rope.scaling.original_context_length": 64, "attention.sliding_window": 48}
    path = written(tmp_path, "phi3", more=more, **settings)
    assert "rotary scaling (longrope) changes with the length" in str(stream_gguf(path, "own"))
    found = load(path, device="cpu")
    assert found.report.max_context == 64
    assert found.report.sliding_window == 48
    speeds = found.model.model.rotary_emb.inv_freq
    torch.testing.assert_close(speeds, 10000.0 ** (-torch.arange(16) / 16) / torch.from_numpy(short))


def test_ways_to_scale_it(tmp_path: Path) -> None:
    before = written(tmp_path, **{"rope.scale_linear": 4.0})
    assert gguf._settings(before, read_header(before))["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    odd = written(tmp_path, **{"rope.scaling.type": "spiral"})
    with pytest.raises(ModelRefused, match="scales its rotation in a way that is not known here: 'spiral'"):
        stream_gguf(odd, "own")
    halves = written(tmp_path, more={"rope_freqs.weight": np.ones(16, dtype=np.float16)})
    with pytest.raises(ModelRefused, match=r"has rope_freqs\.weight in F16"):
        stream_gguf(halves, "own")
