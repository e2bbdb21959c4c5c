"""Files read tensor by tensor: split ones, folders of 16-bit weights, how much memory it takes, and being killed."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf_files import write_gguf
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from headstart import LLM, SamplingParams
from headstart.errors import ModelRefused
from headstart.machine.cpu import build
from headstart.machine.cpu.packed import Packed, load_packed, pack_model, save_packed
from headstart.machine.load import gguf, packed_store
from headstart.machine.load import open as open_module
from headstart.machine.load.gguf_header import read_header
from headstart.machine.load.hub import Remote
from headstart.machine.load.loading import load
from headstart.machine.load.streamed import Streamed, stream_folder, stream_gguf
from headstart.testing import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not()))

SIZES: dict[str, Any] = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
}
PARAMS = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


def opened(path: Path, **settings: Any) -> LLM:
    return LLM(path, None, max_model_len=64, max_rows=1, device="cpu", **settings)


# -- split files ----------------------------------------------------------------------------------------------------


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    write_gguf(tmp_path / "model.gguf", tiny_model("llama", **SIZES), kind="Q8_0", table="Q8_0", split=8)
    found = sorted(tmp_path.glob("*.gguf"))
    assert len(found) > 2
    assert found[0].name == f"model-00001-of-{len(found):05}.gguf"
    return found


def test_a_split_file_is_one_model(parts: list[Path], tmp_path: Path) -> None:
    """Whichever part is named; packed, and spelt out."""
    whole = write_gguf(tmp_path / "whole.gguf", tiny_model("llama", **SIZES), kind="Q8_0", table="Q8_0")
    expected = stream_gguf(whole, "own")
    assert isinstance(expected, Streamed)
    for part in (parts[0], parts[-1]):
        found = stream_gguf(part, "own")
        assert isinstance(found, Streamed)
        assert torch.equal(found.packed.data, expected.packed.data)
        assert found.loaded.report == expected.loaded.report
        assert found.loaded.tokenizer is not None
    floats, whole_floats = load(parts[1], device="cpu").model.state_dict(), load(whole, device="cpu").model.state_dict()
    assert all(torch.equal(floats[name], weight) for name, weight in whole_floats.items())


def test_parts_that_are_missing_or_damaged_are_named(parts: list[Path]) -> None:
    content = parts[1].read_bytes()
    parts[1].write_bytes(content[:-40])
    with pytest.raises(ModelRefused, match=rf"{parts[1].name} is cut short: it has .* fetch it again"):
        read_header(parts[0])
    parts[1].unlink()
    with pytest.raises(
        ModelRefused, match=f"is one of {len(parts)} parts of a model, and {parts[1].name} is not beside"
    ):
        read_header(parts[-1])
    alone = parts[0].rename(parts[0].with_name("first.gguf"))
    with pytest.raises(ModelRefused, match=f"is one of {len(parts)} parts of a model, and its name does not tell"):
        read_header(alone)
    alone.rename(parts[0])
    write_gguf(parts[1], tiny_model("llama", **SIZES), kind="Q8_0")
    with pytest.raises(ModelRefused, match="do not belong together"):
        read_header(parts[0])


# -- headers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "phi3"])
def test_the_configuration_is_the_one_that_transformers_reads(family: str, tmp_path: Path) -> None:
    made = tiny_model(family, **SIZES | ({"tie_word_embeddings": True} if family == "qwen3" else {}))
    path = write_gguf(tmp_path / "model.gguf", made)
    theirs = dict(load_gguf_checkpoint(str(path))["config"])
    ours = gguf._settings(path, read_header(path))
    assert ours.pop("head_dim") == 32  # which transformers does not read here
    assert ours == theirs


def test_what_transformers_alone_can_read_is_read_by_it(tmp_path: Path) -> None:
    """Mistral's files say that they are Llama's; only transformers' reader knows them by their name."""
    made = tiny_model("llama", **SIZES)
    path = write_gguf(tmp_path / "model.gguf", made, kind="Q8_0", table="Q8_0", name="mistral", split=8)
    found = stream_gguf(path.with_name("model-00001-of-00003.gguf"), "own")
    assert isinstance(found, Streamed)
    assert found.loaded.report.architecture == "MistralForCausalLM"
    assert not found.packed.plan.tied  # though the first part has no output head
    assert found.packed.plan.windows == (4096, 4096)


def test_rotary_factors_and_scales_are_heeded(tmp_path: Path) -> None:
    """Llama 3.1's factors are a tensor; transformers passes them over, and a factor for all frequencies as well."""
    made, factors = tiny_model("llama", **SIZES), np.linspace(1, 8, 16, dtype=np.float32)
    plain = stream_gguf(write_gguf(tmp_path / "plain.gguf", made, kind="Q8_0"), "own")
    path = write_gguf(tmp_path / "factors.gguf", made, kind="Q8_0", more={"rope_freqs.weight": factors})
    turned, floats = stream_gguf(path, "own"), load(path, device="cpu").model
    path = write_gguf(
        tmp_path / "linear.gguf", made, kind="Q8_0", **{"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    )
    slowed = stream_gguf(path, "own")
    for each in (plain, turned, slowed):
        assert isinstance(each, Streamed)
    speeds = torch.tensor(plain.packed.plan.inverse_frequencies)
    torch.testing.assert_close(torch.tensor(turned.packed.plan.inverse_frequencies), speeds / torch.from_numpy(factors))
    torch.testing.assert_close(floats.model.rotary_emb.inv_freq, speeds / torch.from_numpy(factors))
    torch.testing.assert_close(torch.tensor(slowed.packed.plan.inverse_frequencies), speeds / 4)


# -- safetensors ----------------------------------------------------------------------------------------------------


def folder_of(folder: Path, family: str, dtype: torch.dtype, **more: Any) -> Path:
    tiny_model(family, **SIZES | more).to(dtype).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def in_two(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    places = {name: f"{'two' if i % 2 else 'one'}.safetensors" for i, name in enumerate(sorted(weights))}
    for file in ("one.safetensors", "two.safetensors"):
        save_file({name: weights[name] for name in weights if places[name] == file}, folder / file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def setting(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def with_header(folder: Path, header: bytes, name: str = "one.safetensors") -> None:
    (folder / name).write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))


def entry(**values: Any) -> bytes:
    return json.dumps({"model.norm.weight": {"dtype": "BF16", "shape": [4], "data_offsets": [0, 8]} | values}).encode()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "phi3"])
def test_a_folder_is_rounded_without_its_modules(
    family: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the very bits that its floats are rounded to."""
    more = {"tie_word_embeddings": True} if family == "qwen3" else {"hidden_size": 128}
    folder = folder_of(tmp_path / "model", family, dtype, **more)
    live = load(folder, device="cpu")
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(open_module, "load", lambda *_, **__: pytest.fail("float weights were loaded"))
    for kind in ("int8", "int4"):
        llm = opened(folder, quantization=kind)
        assert torch.equal(llm.engine.parts.runner.packed.data, pack_model(live.model, kind).data)
        assert llm.report.dtype == kind
        assert llm.engine._reception.eos == (2,)


def test_a_folder_in_parts_and_one_that_lacks_some(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", "llama", torch.bfloat16)
    whole = stream_folder(folder, "int8", Remote())
    assert whole is not None
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    in_two(folder, weights)
    found = stream_folder(folder, "int8", Remote())
    assert found is not None
    assert torch.equal(found.packed.data, whole.packed.data)
    del weights["model.norm.weight"]
    in_two(folder, weights)
    with pytest.raises(ModelRefused, match=r"lacks weights that LlamaForCausalLM needs, such as model\.norm"):
        opened(folder, quantization="int8")


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda folder: (folder / "two.safetensors").write_bytes(b""), "two.safetensors is damaged or cut short"),
        (
            lambda folder: (folder / "two.safetensors").write_bytes((folder / "one.safetensors").read_bytes()[:900]),
            "two.safetensors is damaged or cut short",
        ),
        (lambda folder: setting(folder, hidden_size="many"), "hidden_size"),
        (lambda folder: setting(folder, num_hidden_layers=3), "lacks weights that LlamaForCausalLM needs"),
        (lambda folder: setting(folder, num_hidden_layers=0), "has no layers"),
        (lambda folder: setting(folder, attention_bias=True), r"such as model\.layers\.0\.self_attn\.\w_proj\.bias"),
        (
            lambda folder: with_header(folder, b"[" * 100_000, "model.safetensors"),
            "model.safetensors is damaged or cut short",
        ),
        (lambda folder: with_header(folder, entry(shape=[10**30])), "one.safetensors is damaged or cut short"),
        (lambda folder: with_header(folder, entry(shape=[float("inf")])), "one.safetensors is damaged or cut short"),
    ],
)
def test_damage_is_told_as_ever(damage: Any, told: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", "llama", torch.bfloat16)
    in_two(folder, load_file(folder / "model.safetensors"))
    (folder / "model.safetensors").unlink()
    damage(folder)
    with pytest.raises(ModelRefused, match=told):
        opened(folder, quantization="int8")


def test_a_head_that_is_written_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tied one that has the embedding's numbers is passed over; another is a matrix of its own."""
    folder = folder_of(tmp_path / "model", "llama", torch.bfloat16, tie_word_embeddings=True)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    found = stream_folder(folder, "own", Remote())
    assert found is not None
    assert found.packed.plan.tied
    weights["lm_head.weight"][3, 5] += 1
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert stream_folder(folder, "own", Remote()) is None


def test_what_was_kept_of_a_file_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One digit of a number: it is made anew, and the file is not run by another plan."""
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "cache"))
    path = write_gguf(tmp_path / "model.gguf", tiny_model("llama", **SIZES), kind="Q8_0", table="Q8_0")
    said = opened(path).generate([5, 6, 7], PARAMS).token_ids
    (outline,) = (tmp_path / "cache" / "packed").glob("*/outline.json")
    whole = outline.read_text()
    assert "[1.0, 0." in whole
    outline.write_text(whole.replace("[1.0, 0.", "[1.0, 7."))
    assert opened(path).generate([5, 6, 7], PARAMS).token_ids == said
    assert outline.read_text() == whole


# -- files that change meanwhile ------------------------------------------------------------------------------------


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def overwritten(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(bytes(8))
    os.utime(path, (1, 1))


@pytest.mark.parametrize("change", [cut, overwritten])
@pytest.mark.parametrize("kind", ["gguf", "safetensors"])
def test_a_file_that_changes_meanwhile(kind: str, change: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence, not the end of the process, nor a model of old and new weights."""
    if kind == "gguf":
        path = source = write_gguf(tmp_path / "model.gguf", tiny_model("llama", **SIZES), kind="Q8_0", table="Q8_0")
    else:
        source = folder_of(tmp_path / "model", "llama", torch.bfloat16)
        path = source / "model.safetensors"
    fill = Packed.fill
    monkeypatch.setattr(Packed, "fill", lambda *args: (change(path), fill(*args)))
    with pytest.raises(ModelRefused, match=f"{path.name} was changed while it was read: load it again"):
        opened(source)


# -- memory, old files, and being killed ----------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="asks Linux for the peak")
def test_there_is_no_float_copy(tmp_path: Path) -> None:
    """Peak memory: less than twice the packed weights and the largest tensor."""
    big = tiny_model(
        "llama", hidden_size=512, intermediate_size=2048, num_hidden_layers=4, vocab_size=8000, head_dim=32
    )
    size = sum(weight.numel() for weight in big.parameters())
    path = write_gguf(tmp_path / "model.gguf", big.to(torch.float32), kind="Q8_0", table="Q8_0")
    del big
    stream_gguf(path, "own")  # whatever is imported on the way is imported now

    def memory(what: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(what))

    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    found = stream_gguf(path, "own")
    assert isinstance(found, Streamed)
    largest = max(entry.bytes for entry in read_header(path).tensors.values())
    assert memory("VmHWM") - before < 2 * found.packed.bytes + largest < 4 * size


def test_copies_of_earlier_versions_load(tmp_path: Path) -> None:
    packed = pack_model(tiny_model("llama", **SIZES), "int4")
    save_packed(packed, tmp_path / "new.safetensors", "about it")
    with safe_open(tmp_path / "new.safetensors", "pt") as file:
        header = dict(file.metadata())
    plan = json.loads(header["plan"])
    del plan["kinds"], header["sha256_plan"]  # which they did not have
    save_file({"data": packed.data}, tmp_path / "old.safetensors", {**header, "plan": json.dumps(plan)})
    (tmp_path / "old.safetensors").chmod(0o600)
    found = load_packed(tmp_path / "old.safetensors")
    assert found is not None
    assert found.plan == packed.plan
    assert torch.equal(found.data, packed.data)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")
def test_killed_in_the_middle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the outcome of a load is written: the next start is clean."""
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "cache"))
    path = write_gguf(tmp_path / "model.gguf", tiny_model("llama", **SIZES), kind="Q4_1", table="Q8_0")
    child = os.fork()
    if child == 0:
        packed_store.make_readable = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
        try:
            opened(path)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    shelf = tmp_path / "cache" / "packed"
    assert [name for name in os.listdir(shelf) if name.startswith(".")], "the test is about what it left"
    said = opened(path).generate([5, 6, 7], PARAMS).token_ids
    assert len(os.listdir(shelf)) == 1
    assert not any(name.startswith(".") for name in os.listdir(shelf))
    assert opened(path).generate([5, 6, 7], PARAMS).token_ids == said
