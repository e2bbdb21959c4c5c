"""How answers, figures and notes look: coloured on a terminal, plain in a file, whole at any width.

Knows: terminals. Does not know: engines; it sees only ``Piece`` and ``Stats``, and an ``LLM`` to name what runs.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from ..errors import HeadstartWarning
from ..types import Origin, Piece, Stats

__all__ = [
    "Answer",
    "closing_line",
    "describe",
    "draft_of",
    "facts",
    "legend",
    "note",
    "notes",
    "output",
    "show_log",
    "show_table",
    "show_warning",
    "summary",
    "what_runs",
]

_STYLES: dict[Origin, str] = {"accepted": "green", "correction": "yellow", "bonus": "cyan", "plain": ""}
_CODES: dict[Origin, str] = {"accepted": "32", "correction": "33", "bonus": "36", "plain": ""}
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\x80-\x9f]")  # all but newline and tab


def output() -> Console:
    """Standard output, for figures. Lines are left whole: a terminal wraps them, a file has no width."""
    return Console(highlight=False, soft_wrap=True)


def notes() -> Console:
    """Standard error, where everything but the text and the figures goes."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def note(text: str | Text) -> None:
    notes().print(Text(text) if isinstance(text, str) else text)


class Answer:
    """Standard output for text that comes piece by piece."""

    def __init__(self, *, plain: bool = False) -> None:
        """``plain``: no colours, even on a terminal."""
        console = Console()
        self.coloured = console.is_terminal and console.color_system is not None and not console.no_color and not plain
        self._terminal = console.is_terminal
        self._file = sys.stdout
        self._open = False  # is there text after the last newline?

    def write(self, piece: Piece) -> None:
        self.text(piece.text, piece.origin)

    def text(self, text: str, origin: Origin = "plain") -> None:
        """Text as the model wrote it; on a terminal without the characters that would steer it."""
        if not text:
            return
        if self._terminal:
            text = _CONTROL.sub("�", text)
        self._open = not text.endswith("\n")
        code = _CODES[origin]
        self._file.write(f"\x1b[{code}m{text}\x1b[0m" if self.coloured and code else text)
        self._file.flush()

    def end(self) -> None:
        """The answer is whole, or was stopped."""
        self._file.write("\n")
        self._file.flush()
        self._open = False

    def end_line(self) -> None:
        """What comes next begins on a line of its own."""
        if self._open:
            self.end()


def legend() -> Text:
    """What the colours mean."""
    text = Text("  tokens: ", style="dim")
    meanings: tuple[tuple[Origin, str], ...] = (
        ("accepted", "accepted draft"),
        ("correction", "correction"),
        ("bonus", "bonus"),
    )
    for origin, meaning in meanings:
        text.append(meaning, style=_STYLES[origin])
        text.append("  ")
    return text.append("plain", style="dim")


def closing_line(stats: Stats, inactive: str | None, *, model: bool = False) -> Text:
    """What speculation did, in one line; and why it stopped, where a ``model`` drafts, which costs time."""
    text = Text("  ", style="dim")
    if stats.drafted:
        text.append(
            f"alpha {stats.acceptance_rate:.2f} ({stats.accepted} of {stats.drafted} drafted tokens accepted)   "
        )
    elif inactive:
        text.append(f"speculation inactive: {inactive}   ")
    text.append(f"tau {stats.acceptance_length:.2f}   ")
    text.append(f"{stats.tokens} tokens in {stats.rounds} rounds   {stats.tokens_per_second:.1f} tok/s   ")
    text.append(f"first token after {stats.first_token_seconds:.2f} s")
    if stats.drafted and inactive and model:
        text.append(f"\n  speculation inactive by the end: {inactive}")
    return text


def summary(stats: Any, seconds: float) -> Text:
    """What an engine did for many answers, in one line. ``seconds``: from the first prompt to the last token."""
    text = Text(f"  {stats.finished} answers   {stats.tokens} tokens   ", style="dim")
    if stats.drafted:
        text.append(f"alpha {stats.acceptance_rate:.2f}   ")
    return text.append(f"tau {stats.acceptance_length:.2f}   {stats.tokens / seconds:.1f} tok/s, prompts included")


def what_runs(llm: Any) -> Text:
    """The model, its numbers and kernels, and who drafts, in one line: other kernels may mean another text."""
    return Text(f"  {describe(llm.report)}; draft {draft_of(llm)}", style="dim")


def describe(report: Any) -> str:
    """A model in one line, from its capability report."""
    return f"{report.architecture}, {_size(report)}, {report.dtype} on {report.device}, {report.kernels}"


def draft_of(llm: Any) -> str:
    """Who drafts; of a model, its size and its numbers, too."""
    name, report = llm.drafter_name, llm.draft_report
    return name if report is None else f"{name} of {_size(report)}, {report.dtype}, {report.kernels}"


def _size(report: Any) -> str:
    count = report.parameters
    return f"{count / 1e9:.2g}B parameters" if count >= 999.5e6 else f"{count / 1e6:.0f}M parameters"


def facts(llm: Any) -> dict[str, Any]:
    """What runs: the model, its numbers, where, on which kernels, and who drafts."""
    names = ("architecture", "parameters", "dtype", "device", "kernels")
    found = {name: getattr(llm.report, name) for name in names} | {"draft": llm.drafter_name}
    if llm.draft_report is not None:
        found |= {f"draft_{name}": getattr(llm.draft_report, name) for name in ("parameters", "dtype", "kernels")}
    return found


def show_table(console: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table where it fits; else a line for each value, so that none is cut. The first column names the rows."""
    table = Table()
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(Text(title, style="italic"))
    wanted = Measurement.get(console, console.options.update(max_width=1000), table).maximum
    if wanted <= console.width:
        console.print(table)
        return
    for row in rows:
        console.print(Text(row[0], style="bold"))
        for name, value in zip(columns[1:], row[1:], strict=True):
            console.print(Text(f"  {name}: {value}"))


class _Lines(logging.Handler):
    """Log records as lines on standard error; tracebacks only when asked for."""

    verbose = False

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage() if record.name == "headstart" else f"{record.name}: {record.getMessage()}"
        if record.levelno >= logging.WARNING:
            text = f"{record.levelname.lower()}: {record.getMessage()}"
        if self.verbose and record.exc_info:
            text += "\n" + logging.Formatter().formatException(record.exc_info)
        # What others wrote may stand in it: it must not steer the terminal, nor look like a line of ours.
        note(_CONTROL.sub("\N{REPLACEMENT CHARACTER}", text).replace("\n", "\n  "))


_LINES = _Lines()  # one for the process, as logging is


def show_log(*, verbose: bool) -> None:
    """Warnings of our own are always shown; ``verbose`` shows everything. Others' loggers: errors only."""
    _LINES.verbose = verbose
    root = logging.getLogger()
    if _LINES not in root.handlers:
        root.addHandler(_LINES)
    root.setLevel(logging.INFO if verbose else logging.ERROR)
    logging.getLogger("headstart").setLevel(logging.INFO if verbose else logging.WARNING)
    logging.getLogger("huggingface_hub").propagate = False  # it prints for itself


def show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
) -> None:
    """In the place of ``warnings.showwarning``: ours as one line, those of other packages not at all."""
    if issubclass(category, HeadstartWarning) or Path(filename).is_relative_to(Path(__file__).parents[1]):
        note(f"warning: {message}")
