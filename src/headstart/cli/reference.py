"""The options of every command as a page: ``python -m headstart.cli.reference docs/cli.md`` writes them into it.

Knows: the marks between which they stand. Does not know: the commands; it asks them. A test compares page and commands.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import typer

from .commands import Entry, sections
from .main import app

__all__ = ["options_page", "with_options"]

BEGIN, END = "<!-- options: begin (made by python -m headstart.cli.reference) -->", "<!-- options: end -->"


def options_page() -> str:
    """Every command with its options, as Markdown."""
    group: Any = typer.main.get_command(app)
    context = group.make_context("headstart", [], resilient_parsing=True)
    parts = []
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        about = "\n\n".join(" ".join(paragraph.split()) for paragraph in str(command.help).split("\n\n"))
        parts.append(f"## headstart {name}\n\n{about}\n")
        parts += [_table(section, rows) for section, rows in sections(command, context).items()]
    return "\n".join(parts)


def _table(section: str, rows: list[Entry]) -> str:
    lines = [f"| {section} | default | |", "| --- | --- | --- |"]
    for row in rows:
        default = f"`{row.default}`" if row.default else ""
        lines.append(f"| `{row.names}` | {default} | {row.help} |")
    return "\n".join(lines) + "\n"


def with_options(page: str) -> str:
    """The page with its options brought up to date."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{options_page()}\n{END}{after}"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(with_options(path.read_text(encoding="utf-8")), encoding="utf-8")
