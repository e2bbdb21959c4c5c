"""Grown models written as GGUF: whoever reads the file gets the small model's function and tokenizer."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from gguf_files import write_gguf

from headstart.lab.grow import Shape, grow_tensors
from headstart.machine.load.loading import read_gguf
from headstart.testing import tiny_model

gguf = pytest.importorskip("gguf")


@pytest.fixture
def make_gguf(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    import make_gguf

    return make_gguf


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.arange(3, 40)[None]).logits[0]


@pytest.mark.parametrize("biases", [False, True])
def test_the_file_has_the_small_models_function(make_gguf: ModuleType, tmp_path: Path, biases: bool) -> None:
    small = tiny_model("llama")
    sizes = small.config
    like = write_gguf(tmp_path / "small.gguf", small)
    padded = sizes.vocab_size + 7
    shape = Shape(
        layers=sizes.num_hidden_layers + 1,
        hidden=2 * sizes.hidden_size,
        ffn=2 * sizes.intermediate_size,
        heads=2 * sizes.num_attention_heads,
        kv_heads=2 * sizes.num_key_value_heads,
        head_dim=(1 if biases else 2) * sizes.head_dim,  # readers of a Qwen2 take it for hidden / heads
        vocab=padded,
        biases=biases,
    )
    config, tensors = grow_tensors(small, shape, torch.device("cpu"), torch.float32)
    path = tmp_path / "grown.gguf"
    make_gguf.write_gguf(path, "grown", config, tensors, like)

    found, tokenizer = read_gguf(path)
    assert type(found).__name__ == ("Qwen2ForCausalLM" if biases else "LlamaForCausalLM")
    assert found.config.vocab_size == padded
    want = logits(small)
    got = logits(found)[:, : sizes.vocab_size]
    torch.testing.assert_close(got, want, atol=1e-2 * float(want.abs().max()), rtol=0)  # float16 in the file
    assert len(tokenizer) == sizes.vocab_size, "without what fills the vocabulary up"
    assert tokenizer("AB!!").input_ids == read_gguf(like)[1]("AB!!").input_ids
    fields = gguf.GGUFReader(path).fields
    assert fields["tokenizer.ggml.tokens"].contents()[-1] == f"[PAD{padded - 1}]"
    assert fields["tokenizer.ggml.token_type"].contents()[-7:] == [gguf.TokenType.UNUSED] * 7
    kinds = {tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors if "norm" in tensor.name}
    assert kinds == {"F32"}


def test_tensors_are_made_as_they_are_written(make_gguf: ModuleType) -> None:
    """What is held is what came before its turn, not the model."""
    made: list[str] = []

    def stream():
        for name in "badce":
            made.append(name)
            yield name, torch.zeros(1)

    order = make_gguf.in_order("abcde", stream())
    assert [next(order)[0], next(order)[0]] == ["a", "b"]
    assert made == ["b", "a"]
    assert [name for name, _ in order] == ["c", "d", "e"]
