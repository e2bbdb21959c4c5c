"""What a start-up tells: plain lines where there is no terminal, and only of what takes long."""

from __future__ import annotations

import time

import pytest
from typer.testing import CliRunner

from headstart import LLM, progress
from headstart.cli.main import app
from headstart.progress import telling
from headstart.testing import tiny_model


def shown_within(seconds: float, text: str, capfd: pytest.CaptureFixture[str]) -> str:
    """Standard error, as soon as it holds this."""
    limit, shown = time.monotonic() + seconds, ""
    while text not in shown and time.monotonic() < limit:
        shown += capfd.readouterr().err
        time.sleep(0.01)
    return shown


def test_what_takes_long_is_told_in_a_line(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "PATIENCE", 0.05)
    with telling(None) as tell:
        tell("converting the model")
        shown = shown_within(30, "converting", capfd)
        tell("converting the model")  # the same once more is no news
        tell("")
        tell("compiling kernels")
        shown += shown_within(30, "compiling", capfd)
    assert shown == "headstart: converting the model ...\nheadstart: compiling kernels ...\n"


def test_many_short_things_are_told_of_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "INTERVAL", 0.05)
    shown, count = "", 0
    with telling(None) as tell:
        while shown.count("\n") < 3 and count < 100_000:
            tell(f"recording {(count := count + 1)}")
            time.sleep(0.001)
            shown += capfd.readouterr().err
    assert 3 <= shown.count("\n") < count


def test_a_quick_start_says_nothing(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "PATIENCE", 600.0)
    monkeypatch.setattr(progress, "INTERVAL", 600.0)
    with telling(None) as tell:
        for number in range(100):
            tell(f"step {number}")
    LLM(tiny_model("llama"), draft=None)
    assert capfd.readouterr().err == ""


def test_a_listener_is_told_everything_and_nobody_else(capfd: pytest.CaptureFixture[str]) -> None:
    told: list[str] = []
    LLM(tiny_model("llama"), draft=None, progress=told.append)
    assert "loading LlamaForCausalLM" in told
    assert capfd.readouterr().err == ""


def test_the_command_line_tells_too(tiny_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    result = CliRunner().invoke(app, ["generate", "-m", tiny_folder, "-n", "2", "x"])
    assert f"headstart: loading {tiny_folder} ...\n" in result.stderr
    assert "loading" not in result.stdout
