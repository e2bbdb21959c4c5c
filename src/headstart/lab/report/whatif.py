"""The page of a ``whatif``: the speed-up of a pair that is not here, by acceptance rate.

Knows: how a ``WhatIf`` is told and drawn. Does not know: how it was measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..what_if import Case, WhatIf
from .page import Html, closing, facts, figures, html_page, opening, section, table
from .plots import Series, lines

__all__ = ["page"]


def page(found: WhatIf) -> str:
    """The whole page."""
    return html_page("Headstart what if", [*_parts(found)])


def _parts(found: WhatIf) -> Iterator[Html]:
    shape, draft = found.settings["shape"], found.settings["draft"]
    first = [case for case in found.cases if case.rows == found.cases[0].rows]
    best = max(first, key=lambda case: case.alpha)
    sentence = (
        f"A target of the shape {shape} with a draft of the shape {draft}, on this machine with {best.rows} "
        f"row{'s' * (best.rows > 1)}: {best.auto:.2f} times as fast as plain decoding if {best.alpha:.0%} of guesses "
        "hold."
    )
    yield opening(sentence, found.notes)
    for rows in dict.fromkeys(case.rows for case in found.cases):
        cases = [case for case in found.cases if case.rows == rows]
        yield section(f"{rows} row{'s' * (rows > 1)}", _table(cases), figures([_picture(cases)]))
    yield section("The pair", facts(found.about))
    yield closing(found.settings, found.machine)


def _table(cases: Sequence[Case]) -> Html:
    gammas = list(cases[0].by_gamma)
    rows = [
        (
            f"{case.alpha:g}",
            *(f"{case.by_gamma[gamma]:.2f}x" for gamma in gammas),
            f"{case.auto:.2f}x",
            f"{case.measured.value:.2f}x" if case.measured is not None else "-",
        )
        for case in cases
    ]
    told = (
        "alpha: the share of guesses that hold, supposed. By draft length gamma from the cost model; auto with the "
        "controller that serves. Measured: a draft with noise on its weights that agrees about so often."
    )
    return table(("alpha", *(f"gamma {gamma}" for gamma in gammas), "auto", "measured"), rows, told)


def _picture(cases: Sequence[Case]) -> tuple[str, str]:
    series = [Series(f"alpha {case.alpha:g}", list(case.by_gamma), list(case.by_gamma.values())) for case in cases]
    drawn = lines(
        series,
        "draft length gamma (tokens)",
        "speed-up (times)",
        title="by gamma",
        level=1,
        whole=True,
    )
    return drawn, "Speed-up by draft length, for each acceptance rate."
