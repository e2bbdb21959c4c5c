"""``headstart whatif``: what speculation would be worth for a model that is not here.

Knows: the options and the tables. Does not know: how it is measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from rich.console import Console

from .lab import ReportOptions, measure, measuring, section
from .options import ModelOptions, Verbose
from .screen import show_table

if TYPE_CHECKING:
    from ..lab.what_if import WhatIf, WhatIfSettings

__all__ = ["whatif"]

_what = section("What is measured")


@dataclass(frozen=True)
class WhatIfOptions:
    """Which pair, and what is supposed of it."""

    shape: Annotated[
        str | None,
        _what(
            "--shape",
            "-s",
            of="SHAPE",
            help="The target's sizes; a wrong name lists them. Without it: llama-3-8b on a GPU, 1.5b on a CPU.",
        ),
    ] = None
    draft: Annotated[
        str, _what("--draft", "-d", of="SHAPE", help="The draft's sizes: a shape, or small (135M weights).")
    ] = "small"
    alpha: Annotated[
        list[float] | None,
        _what("--alpha", of="A", help="An acceptance rate to suppose. May be repeated. Without it: 0.5 to 0.9."),
    ] = None
    rows: Annotated[
        list[int] | None, _what("--rows", of="N", help="Requests together. May be repeated. Without it: 1 and 8.")
    ] = None
    confirm: Annotated[
        list[float] | None,
        _what("--confirm", of="A", help="Run a draft that is made to agree so often, too. May be repeated."),
    ] = None
    quantization: Annotated[
        str, _what(of="KIND", help="Weights of the target: auto (int8 on a CPU), int8, int4 or none.")
    ] = "auto"
    draft_quantization: Annotated[str, _what(of="KIND", help="Weights of the draft.")] = "auto"
    device: Annotated[str | None, _what(of="DEVICE", help="cpu, cuda ... Without it: a GPU if there is one.")] = None
    verbose: Verbose = False

    def settings(self) -> WhatIfSettings:
        from ..lab.what_if import WhatIfSettings

        usual = WhatIfSettings()
        return WhatIfSettings(
            shape=self.shape,
            draft=self.draft,
            alphas=tuple(self.alpha or usual.alphas),
            rows=tuple(self.rows or usual.rows),
            confirm=tuple(self.confirm or ()),
        )


def whatif(*, options: WhatIfOptions, report: ReportOptions) -> None:
    """Measure what speculation would be worth for a model you have not downloaded.

    A model of its shape is grown from the embedded one and measured on this machine. How often a draft would be right
    is not known without the models, so the speed-up is shown for several acceptance rates.
    """
    time = report.begin()
    with measuring(ModelOptions(verbose=options.verbose)) as tell:
        from ..lab.system import SystemOptions
        from ..lab.what_if import Supposer

        system = SystemOptions(device=options.device).changed(
            quantization=None if options.quantization == "none" else options.quantization,
            draft_quantization=None if options.draft_quantization == "none" else options.draft_quantization,
        )
        with Supposer(options.settings(), system, tell=tell) as supposer:
            measure(supposer, time, report, tell, show)


def show(console: Console, found: WhatIf) -> None:
    """A table for each number of rows."""
    for rows in dict.fromkeys(case.rows for case in found.cases):
        cases = [case for case in found.cases if case.rows == rows]
        gammas = list(cases[0].by_gamma)
        lines = [
            (
                f"{case.alpha:g}",
                *(f"{case.by_gamma[gamma]:.2f}x" for gamma in gammas),
                f"{case.auto:.2f}x",
                str(case.measured) if case.measured is not None else "-",
            )
            for case in cases
        ]
        pair = f"{found.settings['shape']} with a draft of {found.settings['draft']}"
        columns = ("alpha", *(f"gamma {gamma}" for gamma in gammas), "auto", "measured")
        show_table(console, f"{pair}, {rows} row{'s' * (rows > 1)}: speed-up over plain decoding", columns, lines)
    for said in found.notes:
        console.print(f"note: {said}", markup=False)
