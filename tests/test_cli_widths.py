"""What is shown at any width, on a terminal and in a file: no value is cut."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest
from kernel_tools import Compiler
from rich.console import Console
from terminal_tools import Terminal
from typer.testing import CliRunner

from headstart.cli.main import app
from headstart.cli.reference import with_options
from headstart.cli.screen import Answer, show_table

COLUMNS = ("prompt", "tokens", "plain", "drafted", "speed-up", "alpha", "tau", "same")
ROWS = [("code edit", "96", "1234.5", "5678.9", "4.60x", "0.98", "12.34", "yes"), ("summary", *"1234567")]


@pytest.mark.parametrize("width", [20, 40, 60, 80, 200])
@pytest.mark.parametrize("terminal", [True, False])
def test_tables_become_lines(width: int, terminal: bool) -> None:
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=terminal, color_system=None, soft_wrap=True)
    show_table(console, "A title that is rather long for some of the widths", COLUMNS, ROWS)
    shown = file.getvalue()
    assert "…" not in shown
    for value in (*COLUMNS[1:], *(value for row in ROWS for value in row)):
        assert re.search(rf"(^|\W){re.escape(value)}(\W|$)", shown), value
    if width < 80:
        assert "  speed-up: 4.60x\n" in shown
    else:
        assert all(len(line) <= width for line in shown.splitlines())
        assert "│ code edit │" in shown


def values(shown: str) -> int:
    """How many lines are "  name: value"."""
    assert "…" not in shown
    return len(re.findall(r"^  [^:\n]+: \S+$", shown, re.MULTILINE))


@pytest.mark.parametrize("width", [40, 60])
def test_demo_in_a_narrow_place(tiny_folder: str, width: int) -> None:
    result = CliRunner().invoke(app, ["demo", "-m", tiny_folder, "-n", "4"], env={"COLUMNS": str(width)})
    assert result.exit_code == 0, result.output
    assert values(result.stdout) == 3 * 7


def test_distill_in_a_file(tiny_folder: str, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(f"What is {i}?" for i in range(8)))
    sizes = {"sequences": 8, "answer-tokens": 8, "steps": 2, "batch": 2, "vocab": 64, "rows": 4}
    more = [part for name, value in sizes.items() for part in (f"--{name}", str(value))]
    folders = ["-m", tiny_folder, "-o", str(tmp_path / "draft"), "--prompts", str(prompts)]
    result = CliRunner().invoke(app, ["distill", *folders, *more], env={"COLUMNS": "80"})  # as where there is none
    assert result.exit_code == 0, result.output
    assert values(result.stdout) == 2 * 5
    assert "━" not in result.stderr  # bars are for terminals


def test_demo_on_a_terminal_of_60_columns(tiny_folder: str, tmp_path: Path) -> None:
    cold = {"HEADSTART_CACHE": str(tmp_path / "cache"), "CXX": str(Compiler(tmp_path / "compiler").path)}
    with Terminal("demo", "-m", tiny_folder, "-n", "4", columns=60, **cold) as terminal:
        assert terminal.end() == 0
        plain = re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]", "", terminal.shown).replace("\r", "")
    assert len(re.findall(r"^  speed-up: \d+\.\d\dx$", plain, re.MULTILINE)) == 3, plain
    assert "…" not in plain


@pytest.mark.parametrize("width", [30, 40, 60, 80, 200])
@pytest.mark.parametrize("command", ["", "generate", "chat", "demo", "distill"])
def test_help_fits(command: str, width: int) -> None:
    arguments = [command, "--help"] if command else ["--help"]
    shown = CliRunner().invoke(app, arguments, env={"COLUMNS": str(width)}).stdout
    assert "…" not in shown
    assert "..." not in shown.replace("cuda:1 ...", "").replace("[ARGS]...", "")
    for line in shown.splitlines():
        assert len(line) <= width or len(line.split()) <= 2 or line.startswith("Usage"), line


class Screen(io.StringIO):
    """A terminal for ``rich``, without one."""

    def isatty(self) -> bool:
        return True


def test_a_model_cannot_steer_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "tab\there, \x1b]0;title\x07 and \x9b2J\r\nend"
    for file, shown in ((io.StringIO(), text), (Screen(), "tab\there, �]0;title� and �2J�\nend")):
        monkeypatch.setattr(sys, "stdout", file)
        Answer(plain=True).text(text)
        assert file.getvalue() == shown


def test_the_page_has_the_options_there_are() -> None:
    path = Path(__file__).parents[1] / "docs" / "cli.md"
    page = path.read_text(encoding="utf-8")
    assert page == with_options(page), "python -m headstart.cli.reference docs/cli.md brings it up to date"
    assert "--logit-bias ID=VALUE" in page
