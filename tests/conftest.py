"""What the tests share: the embedded model, loaded once, and one torch thread (two collapse on a busy machine)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from headstart import LLM
from headstart.machine.cpu import build
from headstart.machine.load.embedded import embedded_folder
from headstart.machine.load.loading import load
from headstart.testing import tiny_model, tiny_tokenizer


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    # On an empty cache all workers would wait for the one that compiles, so each begins with kernels of its own.
    if worker:
        build.why_not([*build.ISAS][int(worker.removeprefix("gw")) % len(build.ISAS)])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Long ones first, so that none is left for one worker at the end while the other idles.
    items.sort(key=lambda item: "slow" not in item.keywords)
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)


@pytest.fixture(scope="session")
def embedded() -> LLM:
    """The embedded model with lookup, in float32 on Hugging Face's modules; converted into the cache on first use."""
    loaded = load(embedded_folder(), dtype="float32", device="cpu")
    return LLM(loaded.model, "lookup", tokenizer=loaded.tokenizer, max_rows=4, max_model_len=2048)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny Llama with a tokenizer of single characters and a chat template, on disk: nonsense, quickly."""
    path = tmp_path_factory.mktemp("tiny")
    tiny_model("llama", max_position_embeddings=4096).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture
def cold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The kernels' folder of an empty cache, in a process that has loaded none."""
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HEADSTART_CPU_ISA", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(build, "_libraries", {})
    monkeypatch.setattr(build, "_failures", {})
    monkeypatch.setattr(build, "PAUSES", (0.0, 0.0))
    yield tmp_path / "cache" / "kernels"
    assert not list((tmp_path / "cache" / "kernels").glob(".*")), "something is left"
