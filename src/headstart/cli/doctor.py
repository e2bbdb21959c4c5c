"""``headstart doctor``: is this machine fit, what will be slow, and does a pair of models fit?

Knows: the options, and how a check-up looks on a terminal. Does not know: how anything is found out.
"""

from __future__ import annotations

import os
from inspect import signature
from typing import Annotated, Any, get_args

import typer
from rich.console import Console
from rich.text import Text

from ..progress import telling
from .environment import PREFIX, unknown
from .exits import NOT_WELL
from .lab import ReportOptions
from .options import section, spread
from .screen import show_table
from .serve import serve

__all__ = ["doctor"]

_pair = section("Pair")
_STYLES = {"wrong": "bold red", "slow": "yellow", "note": "", "fine": "green"}


def doctor(
    report: ReportOptions,
    model: Annotated[
        str | None, _pair("--model", "-m", of="MODEL", help="Look at this model's files, too; nothing is loaded.")
    ] = None,
    draft: Annotated[str | None, _pair("--draft", "-d", of="DRAFT", help="And at this draft's.")] = None,
    quantization: Annotated[str, _pair(of="KIND", help="How the model would run: auto, int8, int4 or none.")] = "auto",
    draft_quantization: Annotated[str, _pair(of="KIND", help="The same for a draft model.")] = "auto",
    dtype: Annotated[str, _pair(of="TYPE", help="auto, float32, bfloat16 or float16.")] = "auto",
    rows: Annotated[int, _pair("--rows", of="N", help="Requests answered together.")] = 8,
    max_model_len: Annotated[int | None, _pair(of="N", help="The most tokens of prompt and answer together.")] = None,
) -> None:
    """Look at this machine: versions, devices, compilers, caches, and what will be slow and why.

    With --model, whether it and its draft fit in memory and run on kernels, before anything is loaded. Nothing is
    changed. Exit status 0 if nothing is wrong, 3 if something is.
    """
    report.begin()
    from ..lab.checkup.doctor import Asked
    from ..lab.checkup.doctor import doctor as look

    pair = None
    if model is not None or draft is not None:
        pair = Asked(model, draft, quantization, draft_quantization, dtype, rows, max_model_len)
    with telling(None) as tell:
        found = look(pair, environment=unknown(os.environ, _variables()), tell=tell)
    report.finish(found, lambda console: _show(console, found))
    if not found.well:
        raise typer.Exit(NOT_WELL)


def _variables() -> list[str]:
    """The environment variables of options: the server's."""
    options = (get_args(each.annotation) for each in signature(spread(serve, env=PREFIX)).parameters.values())
    return [option[1].envvar for option in options if len(option) > 1 and getattr(option[1], "envvar", None)]


def _show(console: Console, found: Any) -> None:
    from ..lab.checkup.looks import gigabytes
    from ..lab.report.doctor import sentence

    known = ", ".join(f"{name} {value}" for name, value in found.versions.items() if value is not None)
    console.print(Text(f"{found.machine['processor']}, {found.machine['cores']} processors; {found.machine['system']}"))
    console.print(Text(known, style="dim"))
    for level in ("wrong", "slow", "note", "fine"):
        for finding in found.of(level):
            line = Text(f"{level:>5}  ", style=_STYLES[level]).append(f"{finding.about}: {finding.text}", style="")
            console.print(line)
            if finding.advice:
                console.print(Text(f"       {finding.advice}", style="dim"))
    if found.places:
        rows = [(place.name, place.what, gigabytes(place.bytes), place.deletable) for place in found.places]
        show_table(console, "Caches, and what happens if they are deleted", ("folder", "what", "size", "then"), rows)
    console.print(Text(sentence(found), style="bold"))
