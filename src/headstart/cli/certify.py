"""``headstart certify``: a certificate of losslessness for a pair of models on this machine.

Knows: the options, and how a certificate looks on a terminal. Does not know: how anything is checked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text as Styled

from .exits import NOT_WELL
from .lab import Prompts, ReportOptions, measure, measuring, system_options
from .options import ModelOptions, section
from .screen import show_table

if TYPE_CHECKING:
    from ..lab.certifying.certificate import Certificate

__all__ = ["certify"]

_checks = section("Checks")


def certify(
    model: ModelOptions,
    report: ReportOptions,
    rows: Annotated[int, _checks("--rows", of="N", help="Requests answered together, at the most.")] = 16,
    seed: Annotated[int, _checks("--seed", of="N", help="Another one asks the same with other noise.")] = 0,
    prompts: Prompts = None,
) -> None:
    """Check that speculation with a pair of models changes nothing, and write a certificate.

    Greedy and coupled answers, alone and in company, are put through the target again, token by token; what the token
    and the block rule draw is compared with the target's own distribution; and the same tests have to reject runs that
    are wrong on purpose. Exit status 0 if all of it holds, 3 if not.
    """
    time = report.begin()
    options = system_options(model, max_rows=rows)
    with measuring(model) as tell:
        from ..lab import read_texts
        from ..lab.certifying.certify import Certifier

        texts = read_texts(prompts) if prompts is not None else None
        with Certifier(options, texts, thorough=report.thorough, seed=seed, tell=tell) as certifier:
            found = measure(certifier, time, report, tell, _show)
    if not found.holds:
        raise typer.Exit(NOT_WELL)


def _show(console: Console, found: Certificate) -> None:
    from ..lab.report.certify import sentence

    ids = [check for check in found.checks if check.p_value is None]
    laws = [check for check in found.checks if check.p_value is not None]
    show_table(
        console,
        "The same tokens as plain forward passes give",
        ("check", "with", "company", "decided by", "drafter", "compared", "accepted", "near-ties", "verdict"),
        [
            (c.name, c.settings, c.company, c.backend, c.drafter, str(c.compared), f"{c.accepted} of {c.drafted}",
             str(c.ties), c.verdict)
            for c in ids
        ],
    )  # fmt: skip
    show_table(
        console,
        "The same distribution as plain forward passes give",
        ("check", "with", "rule", "decided by", "drafter", "samples", "p-value", "notices a distance of", "verdict"),
        [
            (c.name, c.settings, c.rule, c.backend, c.drafter, str(c.compared), _p_value(c), f"{c.detectable:.2f}",
             c.verdict)
            for c in laws
        ],
    )  # fmt: skip
    show_table(
        console,
        "Runs that are wrong on purpose, through the same tests",
        ("control", "test", "samples", "outcome"),
        [(c.name, c.test, str(c.samples), _outcome(c.rejected, c.needed)) for c in found.controls],
    )
    for text in found.skipped:
        console.print(Styled(f"not checked: {text}", style="dim"))
    for fault in found.faults:
        console.print(Styled(fault, style="red"))
    console.print(Styled(sentence(found), style="bold green" if found.holds else "bold red"))


def _p_value(check: Any) -> str:
    return f"{check.p_value:.2g}" + (f", again {check.again:.2g}" if check.again is not None else "")


def _outcome(rejected: bool, needed: bool) -> str:
    return "rejected, as it must be" if rejected and needed else "rejected" if rejected else "not rejected"
