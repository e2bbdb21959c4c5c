"""``headstart profile``: what steps cost here, by rows and context, and what memory they take.

Knows: the options and the tables. Does not know: how it is measured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from rich.console import Console

from ..errors import InvalidParameter
from .lab import ReportOptions, measure, measuring, section, system_options
from .options import ModelOptions
from .screen import show_table

if TYPE_CHECKING:
    from ..lab.profile_record import Profile

__all__ = ["profile"]

_size = section("Size")

MostRows = Annotated[int, _size("--rows", of="N", help="The most requests together: 1, 8 and N are measured.")]
Contexts = Annotated[
    list[int] | None,
    _size("--context", of="N", help="Tokens that stand before a step. May be repeated. Without it: 64, 512 and 2048."),
]


def profile(*, model: ModelOptions, rows: MostRows = 8, contexts: Contexts = None, report: ReportOptions) -> None:
    """Measure what the target's and the draft's steps cost, and what memory they take.

    Steps are timed in the engine, as they are served: a plain step, one that verifies up to 15 drafted tokens, a draft
    step, the reading of prompts. Ctrl-C ends it with what there is.
    """
    time = report.begin()
    if rows < 1:
        raise InvalidParameter("rows", f"must be at least 1, not {rows}")
    if any(each < 1 for each in contexts or ()):
        raise InvalidParameter("context", "must be at least 1 token")
    with measuring(model) as tell:
        from ..lab.profiling import CONTEXTS, Profiler

        options = system_options(model)
        with Profiler(options, rows, contexts or CONTEXTS, tell=tell) as profiler:
            measure(profiler, time, report, tell, show)


def show(console: Console, found: Profile) -> None:
    """As tables: steps, the verify curve, what drafting would win, memory."""
    from ..lab.profile_record import ALPHAS

    columns = ("rows, context", "plain step", "draft start", "draft step", "times faster", "prompt tok/s")
    rows = [
        (
            f"{c.rows}, {c.context}",
            _ms(c.target_step),
            _ms(c.draft_start),
            _ms(c.draft_step),
            f"{c.faster:.1f}" if c.faster is not None else "-",
            f"{c.prefill:.0f}",
        )
        for c in found.costs
    ]
    show_table(console, "Steps", columns, rows)
    widths = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
    curve = [(f"{c.rows}, {c.context}", *(f"{c.verify(w):.2f}" for w in widths)) for c in found.costs]
    show_table(console, "v(n): checking n tokens at once, in plain steps", ("rows, context", *map(str, widths)), curve)
    if found.about.get("draft") != "none":
        gains = [
            (f"{c.rows}, {c.context}", *(f"{s:.2f}x ({g})" for g, s in (c.best(a, found.most) for a in ALPHAS)))
            for c in found.costs
        ]
        title = "Speed-up by the cost model at the best draft length (in brackets), by acceptance rate alpha"
        show_table(console, title, ("rows, context", *(f"alpha {a:g}" for a in ALPHAS)), gains)
    memory = found.memory
    lines = [
        ("target's weights", _bytes(memory.target)),
        ("draft's weights", _bytes(memory.draft)),
        ("keys and values a token", _bytes(memory.token)),
        (f"keys and values, {memory.rows} x {memory.max_len} tokens", _bytes(memory.held)),
        ("captured rounds", _bytes(memory.captured)),
        ("free now", _bytes(memory.free)),
        (f"further rows of {memory.max_len} tokens that fit", str(memory.more_rows(memory.max_len) or 0)),
    ]
    show_table(console, "Memory", ("", ""), lines)
    for said in found.warnings:
        console.print(f"warning: {said}", markup=False)
    for said in found.notes:
        console.print(f"note: {said}", markup=False)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def _bytes(count: int | None) -> str:
    if count is None:
        return "not known"
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} bytes"
