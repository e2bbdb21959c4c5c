"""Where models come from, what is refused, and that every refusal says why and what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM

from headstart.errors import InvalidParameter, MissingExtra, ModelNotFound, ModelRefused
from headstart.machine.load import loading
from headstart.machine.load.loading import Loaded, capability, eos_ids, load, same_tokenizer
from headstart.testing import ARCHITECTURES, REFUSED_ARCHITECTURES, TINY_VOCABULARY, tiny_model, tiny_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with loading.quiet():
        tiny_model("llama").save_pretrained(tmp_path)
        tiny_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def test_a_folder_loads_with_its_tokenizer_and_a_report(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    loaded = load(folder)
    assert capfd.readouterr() == ("", ""), "loading must not draw bars through a program's output"
    original = tiny_model("llama")
    assert torch.equal(loaded.model.lm_head.weight, original.lm_head.weight)
    assert not loaded.model.training
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.decode(loaded.tokenizer("Hi there!\n").input_ids) == "Hi there!\n"
    report = loaded.report
    assert report.supported
    assert report.reasons == report.notes == ()
    assert report.architecture == "LlamaForCausalLM"
    assert report.parameters == original.num_parameters()
    assert report.bytes == 4 * report.parameters
    assert (report.layers, report.vocab_size, report.tokenizer_size) == (2, TINY_VOCABULARY, TINY_VOCABULARY)
    assert (report.max_context, report.sliding_window, report.dtype) == (256, None, "float32")
    assert report.device == str(loaded.model.device)
    assert eos_ids(loaded) == (2,)


def test_dtype(folder: Path) -> None:
    assert load(str(folder), dtype="bfloat16").report.dtype == "bfloat16"
    assert load(folder, dtype=torch.float64).report.dtype == "float64"
    with loading.quiet():
        tiny_model("llama", dtype=torch.bfloat16).save_pretrained(folder)
    assert load(folder, device="cpu").report.dtype == "float32", "on the CPU, float32 is the fast and exact one"
    for wrong in ("int8", "half a float", torch.int32):
        with pytest.raises(InvalidParameter, match="dtype must be"):
            load(folder, dtype=wrong)


def test_what_is_no_model_or_no_device_is_named(folder: Path) -> None:
    with pytest.raises(InvalidParameter, match="model must be a folder"):
        load(5)  # type: ignore[arg-type]
    for device in ("foo", 5.0, f"cuda:{torch.cuda.device_count()}"):
        with pytest.raises(InvalidParameter, match="device"):
            load(folder, device=device)  # type: ignore[arg-type]


def test_a_live_model_is_taken_as_it_is() -> None:
    model = tiny_model("qwen3", dtype=torch.bfloat16)
    loaded = load(model)
    assert loaded.model is model
    assert loaded.tokenizer is None
    assert loaded.report.dtype == "bfloat16"
    assert loaded.report.notes == ("no tokenizer: prompts must be token ids",)
    tokenizer = tiny_tokenizer()
    assert load(model, tokenizer=tokenizer).tokenizer is tokenizer


def test_a_tokenizer_can_come_from_elsewhere(folder: Path) -> None:
    loaded = load(tiny_model("gpt2"), tokenizer=folder)
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.get_vocab() == tiny_tokenizer().get_vocab()
    with pytest.raises(ModelRefused, match="knows 120 tokens but the model only 112"):
        load(tiny_model("gpt2"), tokenizer=tiny_tokenizer(120))
    added = tiny_tokenizer()
    added.add_tokens(["<tool>"])
    notes = load(tiny_model("gpt2"), tokenizer=added).report.notes
    assert notes == ("the tokenizer has 1 added tokens that the model lacks; they cannot be used",)


def test_a_folder_without_a_tokenizer_still_loads(tmp_path: Path) -> None:
    with loading.quiet():
        tiny_model("llama").save_pretrained(tmp_path)
    assert load(tmp_path).tokenizer is None


def test_a_padded_head_and_a_long_rope_are_noted() -> None:
    report = load(tiny_model("llama", vocab_size=128), tokenizer=tiny_tokenizer()).report
    assert report.notes == ("the output head has 16 more rows than the tokenizer; those ids are never emitted",)
    factors = [1.0] * 6
    rope = {"rope_type": "longrope", "short_factor": factors, "long_factor": factors, "rope_theta": 10000.0}
    model = tiny_model("phi3", original_max_position_embeddings=64, rope_parameters=rope)
    report = capability(model, tiny_tokenizer())
    assert report.max_context == 64
    assert report.notes == ("served up to 64 tokens, not 256: beyond that its rotation depends on the batch",)
    assert report.sliding_window == 8


def test_end_tokens_come_from_everywhere_they_are_written() -> None:
    model = tiny_model("llama")
    model.generation_config.eos_token_id = [7, 9]
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = "<spare0>"
    assert eos_ids(load(model, tokenizer=tokenizer)) == (2, 7, 9, 99)
    model.generation_config.eos_token_id = TINY_VOCABULARY + 5  # an id the model does not have
    assert eos_ids(load(model)) == (2,)


# -- refused --------------------------------------------------------------------------------------------------------

WHY = {
    "bloom": "ALiBi",
    "mpt": "ALiBi",
    "falcon-alibi": "ALiBi",
    "gpt-neo": "own windows",
    "mamba": "whose running state cannot be rolled back",
    "rwkv": "whose running state cannot be rolled back",
    "recurrent-gemma": "whose running state cannot be rolled back",
    "qwen3-next": "whose running state cannot be rolled back",
    "t5": "encoder-decoder",
}


@pytest.mark.parametrize("name", REFUSED_ARCHITECTURES)
def test_what_cannot_be_served_is_refused_with_why_and_what_to_do(name: str) -> None:
    model = tiny_model(name)
    with pytest.raises(ModelRefused) as refusal:
        load(model)
    message = str(refusal.value)
    assert message.startswith(type(model).__name__)
    assert WHY[name] in message
    assert "; use a decoder-only model" in message
    report = capability(model, None)
    assert not report.supported
    assert report.reasons == (message,)


@pytest.mark.parametrize("name", ["bloom", "t5", "qwen3-next"])
def test_a_refused_folder_is_refused_before_its_weights_are_read(name: str, tmp_path: Path) -> None:
    tiny_model(name).config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(ModelRefused, match=WHY[name]):
        load(tmp_path)


def test_everything_else_is_not() -> None:
    for name in ARCHITECTURES:
        assert load(tiny_model(name)).report.supported


def test_a_masked_model_has_no_causal_head(tmp_path: Path) -> None:
    config = BertConfig(
        vocab_size=TINY_VOCABULARY, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    with loading.quiet():
        BertForMaskedLM(config).save_pretrained(tmp_path)
    with pytest.raises(ModelRefused, match="no causal language model head"):
        load(tmp_path)


def test_pickled_weights_are_refused_unread(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"this would run code")
    with pytest.raises(ModelRefused, match=r"pickle files, which can run any code.*save_pretrained"):
        load(folder)


def test_pickle_beside_an_index_is_refused_too(folder: Path) -> None:
    """A safetensors file that is not the model's must not open the door to its pickle."""
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    torch.save(tiny_model("llama").state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(ModelRefused, match="pickle"):
        load(folder)


def test_remote_code_is_off(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.OwnLM"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text("raise SystemExit('foreign code ran')")
    with pytest.raises(ModelRefused, match="trust_remote_code=True"):
        load(folder)


def test_trust_is_loud(folder: Path) -> None:
    with pytest.warns(UserWarning, match="trust_remote_code is on"):
        load(folder, trust_remote_code=True)


@pytest.mark.parametrize("name", ["/no/such/folder", "./neither", "a/b/c", Path("nor-this"), "no-file.gguf"])
def test_what_is_not_there_is_not_found(name: str | Path) -> None:
    with pytest.raises(ModelNotFound, match=r"there is no (folder|file)"):
        load(name)


def test_an_unknown_hub_name_is_not_found() -> None:
    with pytest.raises(ModelNotFound, match="no model 'nobody/nothing'"):
        load("nobody/nothing", local_files_only=True)


def test_half_a_folder_says_what_is_missing(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    empty = tmp_path_factory.mktemp("empty")
    with pytest.raises(ModelNotFound, match=r"no config\.json"):
        load(empty)
    (empty / "some.gguf").touch()
    with pytest.raises(ModelNotFound, match=r"GGUF file in it, name .*some\.gguf"):
        load(empty)
    (empty / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelRefused, match="adapter, not a model: merge it"):
        load(empty)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelNotFound, match="no weights"):
        load(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "no-such-thing"}))
    (folder / "model.safetensors").touch()
    with pytest.raises(ModelRefused, match="transformers cannot load"):
        load(folder)


def test_placement_over_devices_names_its_package(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match="'accelerate'"):
        load(folder, device_map="auto")
    with pytest.raises(InvalidParameter, match="device_map is for folders and hub ids"):
        load("model.gguf", device_map="auto")
    with pytest.raises(InvalidParameter, match="leave one of them out"):
        load(folder, device_map="auto", device="cpu")


# -- drafts ----------------------------------------------------------------------------------------------------------


def with_tokenizer(tokenizer: Any, vocabulary: int = TINY_VOCABULARY) -> Loaded:
    return load(tiny_model("llama", vocab_size=vocabulary), tokenizer=tokenizer)


def test_a_draft_must_share_the_tokenizer() -> None:
    target = with_tokenizer(tiny_tokenizer())
    assert same_tokenizer(target, with_tokenizer(tiny_tokenizer(), 128)) is None, "a padded head is no difference"
    smaller = same_tokenizer(target, with_tokenizer(tiny_tokenizer(110)))
    assert smaller == "they use different tokenizers, of 112 and 110 tokens"
    foreign = same_tokenizer(target, with_tokenizer(tiny_tokenizer(shuffle=4)))
    assert foreign == "they use different tokenizers: token 3 is '\\n' in the one and '#' in the other"


def test_without_two_tokenizers_nothing_speaks_against_a_draft() -> None:
    """Sizes of heads do not: see tests/test_padded_vocabularies.py."""
    target = with_tokenizer(None)
    for draft in (with_tokenizer(None), with_tokenizer(tiny_tokenizer()), with_tokenizer(None, 128)):
        assert same_tokenizer(target, draft) is None
        assert same_tokenizer(draft, target) is None
