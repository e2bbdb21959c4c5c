"""``headstart advise``: which draft to use for a model, or none.

Knows: the options and the tables. Does not know: how anything is measured or predicted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from ..errors import InvalidParameter
from .lab import ReportOptions, TextOptions, measure, measuring, section, system_options
from .options import ModelOptions
from .screen import show_table

if TYPE_CHECKING:
    from ..lab.advice_record import Advice, AdviseSettings

__all__ = ["advise"]

_what = section("What is measured")

Drafts = Annotated[list[str] | None, typer.Argument(metavar="DRAFT", help="Further candidates.")]


@dataclass(frozen=True)
class AdviseOptions:
    """What is asked."""

    candidates: Annotated[
        list[str] | None,
        _what(
            "--candidates",
            of="DRAFT",
            help="Drafts to compare, as --draft takes them: --candidates D1 D2. Without any: what the catalogue knows "
            "for this model and lies on this machine.",
        ),
    ] = None
    rows: Annotated[
        list[int] | None,
        _what("--rows", of="N", help="Requests answered together. May be repeated. Without it: 1."),
    ] = None
    temperature: Annotated[
        list[float] | None,
        _what("--temperature", "-t", of="T", help="0 is greedy. May be repeated. Without it: 0."),
    ] = None
    tokens: Annotated[int, _what("--tokens", "-n", of="N", help="The most tokens of an answer.")] = 64
    confirm: Annotated[int, _what(of="N", help="Run the N most promising to confirm; 0: only predict.")] = 2

    def settings(self) -> AdviseSettings:
        from ..lab.advice_record import AdviseSettings

        return AdviseSettings(
            rows=tuple(self.rows or (1,)),
            temperatures=tuple(self.temperature or (0.0,)),
            tokens=self.tokens,
            confirm=self.confirm,
        )


def advise(
    *,
    drafts: Drafts = None,
    model: ModelOptions,
    options: AdviseOptions,
    texts: TextOptions,
    report: ReportOptions,
) -> None:
    """Say which draft to use for a model, with the line to run, or why not to speculate.

    The model writes some text. How often each candidate would have been right is read off it, what rounds cost is
    measured, and the speed-up follows for every draft length. The best few are then run to confirm, on other prompts.
    """
    time = report.begin()
    if model.gamma != "auto":
        raise InvalidParameter("gamma", "is not for this command: every draft length is looked at")
    with measuring(model) as tell:
        from ..lab.advising import Adviser

        given = [*(options.candidates or ()), *(drafts or ()), *([model.draft] if model.draft != "auto" else [])]
        settings, asked = options.settings(), texts.read()
        with Adviser(system_options(model, draft=None), given or None, asked, settings, tell=tell) as adviser:
            measure(adviser, time, report, tell, show)


def show(console: Console, found: Advice) -> None:
    """The candidates as a table, what holds them back, and the recommendation."""
    from ..lab.advice_record import COLUMNS

    rows, temperatures = found.settings["rows"], found.settings["temperatures"]
    for count in rows:
        for temperature in temperatures:
            where = f"{count} row{'s' * (count > 1)}, temperature {temperature:g}"
            lines = [outlook.row(count, temperature) for outlook in found.outlooks if outlook.refused is None]
            show_table(console, f"Speed-up over plain decoding: {where}", COLUMNS, lines)
    for outlook in found.outlooks:
        if outlook.refused is not None:
            console.print(f"{outlook.name}: not measured: {outlook.refused}", markup=False)
        for said in outlook.notes:
            console.print(f"{outlook.name}: {said}", markup=False)
    for symptom in found.symptoms:
        console.print(f"symptom: {symptom}", markup=False)
    if found.proposals:
        console.print("known for this model, and not here:", markup=False)
        for said in found.proposals:
            console.print(f"  {said}", markup=False)
    for said in found.notes:
        console.print(f"note: {said}", markup=False)
    best = found.recommendation
    console.print(f"\n{best.sentence}\n", markup=False)
    console.print(f"  {best.command}\n", markup=False, soft_wrap=True)
    for line in best.python.splitlines():
        console.print(f"  {line}", markup=False, soft_wrap=True)
