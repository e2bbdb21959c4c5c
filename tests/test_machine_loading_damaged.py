"""Folders with something wrong in them: one sentence that names the file, whatever its reader raised."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_drafters_head import head as make_head

from headstart.api import LLM
from headstart.errors import HeadstartError, ModelNotFound, ModelRefused
from headstart.machine.head import load_head, save_head
from headstart.machine.load.embedded import embedded_draft
from headstart.machine.load.loading import load, quiet
from headstart.testing import tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    with quiet():
        tiny_model("llama").save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "model"))


def refused(folder: Path, kind: type[HeadstartError] = ModelRefused) -> str:
    with pytest.raises(kind) as refusal:
        load(folder)
    message = str(refusal.value)
    assert "\n" not in message
    assert len(message) < 600
    return message


def half(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])


def setting(**values: Any) -> Callable[[Path], None]:
    def change(file: Path) -> None:
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return change


@pytest.mark.parametrize(
    ("name", "damage", "told"),
    [
        ("model.safetensors", lambda f: f.write_bytes(b""), "model.safetensors is damaged or cut short"),
        ("model.safetensors", lambda f: f.write_text("once upon a time"), "model.safetensors is damaged or cut short"),
        ("model.safetensors", half, "model.safetensors is damaged or cut short"),
        ("config.json", lambda f: f.write_text(""), "config.json is damaged, or no JSON"),
        ("config.json", half, "config.json is damaged, or no JSON"),
        ("config.json", lambda f: f.write_text("[]"), "config.json holds no settings"),
        ("config.json", lambda f: f.write_text("[" * 100_000), "config.json is damaged, or no JSON"),
        ("config.json", lambda f: f.write_bytes(b"\xff\xfe\x00"), "config.json is damaged, or no JSON"),
        ("config.json", setting(hidden_size="many"), "hidden_size"),
        ("config.json", setting(hidden_size=96), "weights of other shapes than its config.json says, such as lm_head"),
        (
            "config.json",
            setting(num_hidden_layers=3),
            "lacks weights that LlamaForCausalLM needs, such as",
        ),
        ("generation_config.json", half, "generation_config.json is damaged, or no JSON"),
        ("tokenizer.json", lambda f: f.write_text(""), "tokenizer.json is damaged, or no JSON"),
        ("tokenizer.json", half, "tokenizer.json is damaged, or no JSON"),
        ("tokenizer.json", lambda f: f.write_text("{}"), "cannot load the tokenizer in"),
        ("tokenizer_config.json", half, "tokenizer_config.json is damaged, or no JSON"),
        ("tokenizer_config.json", lambda f: f.write_text("[]"), "tokenizer_config.json holds no settings"),
    ],
)
def test_a_damaged_file_is_named(folder: Path, name: str, damage: Callable[[Path], None], told: str) -> None:
    damage(folder / name)
    assert told in refused(folder)


def test_weights_in_parts(folder: Path) -> None:
    """A part that is damaged is named; one that is not there too."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    for part, some in (("one", names[::2]), ("two", names[1::2])):
        save_file({name: weights[name] for name in some}, folder / f"{part}.safetensors", {"format": "pt"})
    places = {name: f"{'two' if i % 2 else 'one'}.safetensors" for i, name in enumerate(names)}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    assert load(folder).report.supported
    half(folder / "two.safetensors")
    assert "two.safetensors is damaged or cut short" in refused(folder)
    (folder / "two.safetensors").unlink()
    assert "two.safetensors" in refused(folder)
    half(index)
    assert "model.safetensors.index.json is damaged, or no JSON" in refused(folder)


def test_a_file_instead_of_a_folder(folder: Path) -> None:
    assert "is a file: name the folder" in refused(folder / "model.safetensors")
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    assert "config.json cannot be read: Is a directory" in refused(folder)


@contextmanager
def as_nobody() -> Iterator[None]:
    """Root may read everything; someone else may not."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="permissions as POSIX has them")
@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "model.gguf", "."])
def test_files_that_may_not_be_read(folder: Path, name: str) -> None:
    load(folder)  # whatever transformers imports on the way is imported as ourselves
    (folder / "model.gguf").write_bytes(b"GGUF")
    for file in folder.iterdir():
        file.chmod(0o644)
    for parent in (folder, *folder.parents):
        if parent.stat().st_uid == os.geteuid() and parent.stat().st_mode & 0o077 == 0:
            parent.chmod(0o755)  # the fixture's folders, not the file in question
    (folder / name).chmod(0)
    try:
        with as_nobody():
            message = refused(folder / name if name.endswith(".gguf") else folder)
    finally:
        (folder / name).chmod(0o755)
    assert f"{(folder / name).name} cannot be read: " in message or f"{folder} cannot be read" in message
    assert "ermission denied" in message


# -- draft heads


def test_a_head_is_no_model(tmp_path: Path) -> None:
    shipped = embedded_draft()
    assert shipped is not None
    for folder in (shipped, tmp_path / "head"):
        if folder != shipped:
            save_head(make_head(), folder)
        with pytest.raises(ModelRefused, match=r"is a draft head, not a model: pass it as draft= \(--draft\)"):
            LLM(folder)
        with pytest.raises(ModelRefused, match="is a draft head"):
            load(str(folder))


def test_a_damaged_head_is_told_in_a_sentence(tmp_path: Path) -> None:
    save_head(make_head(), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    for change in ({"ids": None}, {"head": torch.zeros(3, 3)}, {"fuse": None}):
        kept = {name: weight for name, weight in {**weights, **change}.items() if weight is not None}
        save_file(kept, tmp_path / "model.safetensors")
        with pytest.raises(ModelRefused, match=r"the draft head in .* cannot be read") as refusal:
            load_head(tmp_path)
        assert "\n" not in str(refusal.value)
    half(tmp_path / "model.safetensors")
    with pytest.raises(ModelRefused, match=r"the draft head in .* cannot be read"):
        load_head(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelNotFound, match="holds no draft head"):
        load_head(tmp_path)
