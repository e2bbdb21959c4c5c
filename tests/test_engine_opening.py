"""What a start-up does around loading: what compiles is started where it will be wanted, and who waits is told."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from headstart import LLM, ModelNotFound
from headstart.engine import warm_up
from headstart.machine import gpu
from headstart.machine.gpu.compile import precompile
from headstart.machine.load import open
from headstart.testing import tiny_model

CUDA, CPU = {"device": "cuda"}, {"device": "cpu"}


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Each time that what compiles is started."""
    found: list[str] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(gpu, "available", lambda: None)
    monkeypatch.setattr(precompile, "expected", lambda: (found.append("started"), nullcontext())[1])
    return found


def saved(tmp_path: Path, architecture: str) -> Path:
    tiny_model(architecture).save_pretrained(tmp_path / architecture)
    return tmp_path / architecture


def test_what_compiles_starts_for_models_that_will_want_it(entered: list[str], tmp_path: Path) -> None:
    open.ready_to_compile(saved(tmp_path, "llama"), CUDA)
    open.ready_to_compile(None, CUDA)  # the embedded model
    assert len(entered) == 2


def test_and_for_no_others(entered: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llama = saved(tmp_path, "llama")
    open.ready_to_compile(llama, CPU)
    open.ready_to_compile(None, CPU)
    open.ready_to_compile(saved(tmp_path, "gpt2"), CUDA)
    open.ready_to_compile(tiny_model("llama"), CUDA)  # it is not on a GPU
    open.ready_to_compile(tmp_path / "nothing", CUDA)
    open.ready_to_compile("somebody/a-model-that-was-never-fetched", CUDA)
    monkeypatch.setattr(gpu, "available", lambda: "the package triton is not installed")
    open.ready_to_compile(llama, CUDA)
    assert entered == []


def test_every_load_says_so_before_it_begins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(
        "headstart.assembly.ready_to_compile", lambda *given: (asked.append(given[0]), nullcontext())[1]
    )
    with pytest.raises(ModelNotFound):
        LLM(tmp_path / "nothing", device="cpu")
    assert asked == [tmp_path / "nothing"]


class Rounds:
    """Rounds to be captured, of which the second cannot be if ``broken``."""

    captured_programs = 2
    runners = ()

    def __init__(self, *, broken: bool = False) -> None:
        self._broken = broken

    def warm_up(self, report: Callable[[int, int], None]) -> None:
        report(0, 2)
        if self._broken:
            raise RuntimeError("it looks at its tensors on the host")
        report(2, 2)


def test_capturing_tells_how_far_it_is() -> None:
    told: list[str] = []
    assert warm_up._captured(Rounds(), "Some", told.append, compiled=False)  # type: ignore[arg-type]
    assert told == ["capturing rounds (0 of 2)", "capturing rounds (2 of 2)"]


def test_rounds_stay_captured_where_reading_cannot_be(caplog: pytest.LogCaptureFixture) -> None:
    class Runner:
        def capture_reads(self) -> None:
            raise torch.OutOfMemoryError("no room")

    rounds: Any = Rounds()
    rounds.runners = (Runner(),)
    with caplog.at_level(logging.WARNING):
        assert warm_up._captured(rounds, "Some", lambda text: None, compiled=False)
    assert "read launch by launch" in caplog.text


def test_what_cannot_be_captured_is_played_step_by_step(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        rounds: Any = Rounds(broken=True)
        assert not warm_up._captured(rounds, "Some", lambda text: None, compiled=False)
    assert "Some cannot be captured (it looks at its tensors on the host)" in caplog.text


def test_whoever_is_told_can_stop_it() -> None:
    def tell(text: str) -> None:
        raise KeyError("enough")

    rounds: Any = Rounds()
    with pytest.raises(KeyError, match="enough"):
        warm_up._captured(rounds, "Some", tell, compiled=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_without_a_gpu_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precompile, "expected", lambda: pytest.fail("started"))
    LLM(tiny_model("llama"), "lookup", max_model_len=64)
