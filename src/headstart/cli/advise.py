"""``headstart advise``: which draft to use for a model, or none.

Knows: the options and the tables. Does not know: how anything is measured or predicted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from ..errors import InvalidParameter
from .lab import ReportOptions, TextOptions, interrupted, measuring, seconds_left, section, system_options
from .options import ModelOptions
from .screen import show_table

if TYPE_CHECKING:
    from ..lab.advice_record import Advice, AdviseSettings, Outlook

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
            adviser.settings = replace(settings, seconds=seconds_left(time))
            stopped = interrupted(adviser.run, lambda: any(one.predictions for one in adviser.outlooks.values()))
            found = adviser.result(stopped=stopped)
        tell("")
        report.finish(found, lambda console: show(console, found))
    if stopped:
        raise KeyboardInterrupt


def show(console: Console, found: Advice) -> None:
    """The candidates as a table, what holds them back, and the recommendation."""
    rows, temperatures = found.settings["rows"], found.settings["temperatures"]
    for count in rows:
        for temperature in temperatures:
            where = f"{count} row{'s' * (count > 1)}, temperature {temperature:g}"
            lines = [_line(outlook, count, temperature) for outlook in found.outlooks if outlook.refused is None]
            columns = ("draft", "first guess", "tau", "predicted", "90%", "best gamma", "measured", "90%")
            show_table(console, f"Speed-up over plain decoding: {where}", columns, lines)
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


def _line(outlook: Outlook, rows: int, temperature: float) -> tuple[str, ...]:
    auto, ratio = outlook.prediction(rows, temperature), outlook.measured.get((rows, temperature))
    first = outlook.acceptance.get(f"{temperature:g}")
    fixed = [p for p in outlook.predictions if (p.rows, p.temperature) == (rows, temperature) and p.gamma != "auto"]
    best = max(fixed, key=lambda p: p.speedup.mid, default=None)
    sure = ratio.others or ratio.interval if ratio is not None else None
    return (
        outlook.name,
        f"{first[0]:.0%}" if first else "-",
        f"{auto.tau:.2f}" if auto is not None else "-",
        f"{auto.speedup.mid:.2f}x" if auto is not None else "-",
        f"{auto.speedup.low:.2f} to {auto.speedup.high:.2f}" if auto is not None else "-",
        f"{best.gamma} ({best.speedup.mid:.2f}x)" if best is not None else "-",
        f"{ratio.value:.2f}x" if ratio is not None else "-",
        f"{sure.low:.2f} to {sure.high:.2f}" if sure is not None else "-",
    )
