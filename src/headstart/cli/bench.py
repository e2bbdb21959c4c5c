"""``headstart bench``: plain and speculative decoding side by side, by task.

Knows: the options and the tables. Does not know: how it is measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console

from .lab import ReportOptions, Rows, TextOptions, measure, measuring, section, system_options
from .options import ModelOptions, Temperature
from .screen import show_table

if TYPE_CHECKING:
    from ..lab.bench_record import Bench, BenchSettings, Way
    from ..lab.figures import Figures

__all__ = ["bench"]

_what = section("What is measured")


@dataclass(frozen=True)
class BenchOptions:
    """What is measured, besides the models."""

    tokens: Annotated[int, _what("--tokens", "-n", of="N", help="The most tokens of an answer.")] = 64
    rows: Rows = 1
    temperature: Temperature = 0.0
    verification: Annotated[
        str | None, _what(of="RULE", help="How drafted tokens are checked when sampling: block, token or coupled.")
    ] = None
    ignore_eos: Annotated[
        bool, _what("--ignore-eos", help="Write all --tokens of every answer, past what ends it.")
    ] = False
    turns: Annotated[
        int | None, _what(of="N", help="Measure every prompt N times. Without it: what the time allows.")
    ] = None
    drafter: Annotated[
        list[str] | None,
        _what("--drafter", of="DRAFT", help="Another draft to measure beside --draft. May be repeated."),
    ] = None
    peers: Annotated[
        list[str] | None,
        _what(
            "--peers",
            of="PEER",
            help="hf: also Hugging Face's generate, its prompt lookup and, with a draft model, assisted generation.",
        ),
    ] = None

    def settings(self) -> BenchSettings:
        from ..lab.bench_record import BenchSettings
        from ..lab.peers import check_peers

        check_peers(self.peers or ())
        return BenchSettings(
            tokens=self.tokens,
            rows=self.rows,
            temperature=self.temperature,
            verification=self.verification,
            ignore_eos=self.ignore_eos,
            turns=self.turns,
            drafters=tuple(self.drafter or ()),
            peers=tuple(self.peers or ()),
        )


def bench(*, model: ModelOptions, options: BenchOptions, texts: TextOptions, report: ReportOptions) -> None:
    """Measure how much faster speculation is, on prompts by task.

    Plain and speculative decoding take turns, a few tokens each, so that what else the machine does falls on both. The
    speed-up is that of writing, behind the first token, with a 90% interval. Ctrl-C ends it with what there is.
    """
    time = report.begin()
    with measuring(model) as tell:
        from ..lab.benching import Bencher

        settings, asked = options.settings(), texts.read()
        with Bencher(system_options(model, max_rows=options.rows), asked, settings, tell=tell) as bencher:
            measure(bencher, time, report, tell, show)


def show(console: Console, found: Bench) -> None:
    """As tables: every way in all, then every draft by task."""
    from ..lab.bench_record import ALL

    rows = [(way.name, *_cells(way.figures[ALL]), *_gain(way, ALL)) for way in found.ways]
    columns = ("", "first token", "a token", "tok/s", "alpha", "tau", "speed-up", "with prompts")
    show_table(console, f"Over {_count(found)}", columns, rows)
    for way in found.ways[1:]:
        if len(found.tasks) > 1:
            lines = [(task, *_cells(way.figures[task]), *_gain(way, task)) for task in found.tasks]
            show_table(console, f"{way.name}, by task", columns, lines)
        if way.figures[ALL].acceptance:
            held = "  ".join(f"{share:.2f}" for share in way.figures[ALL].acceptance[:12])
            console.print(f"{way.name}: accepted by position in the draft: {held}", markup=False)
        if way.inactive:
            console.print(f"{way.name}: speculation inactive at the end: {way.inactive}", markup=False)
    console.print(
        "speed-up: time for a token behind the first, plain over this, with its 90% interval for these prompts; "
        "'with prompts' counts the reading of prompts, too.",
        markup=False,
    )
    for said in found.notes:
        console.print(f"note: {said}", markup=False)


def _count(found: Bench) -> str:
    prompts = sum(found.prompts.values())
    tasks = f" of {len(found.tasks)} tasks" if len(found.tasks) > 1 else ""
    return f"{prompts} prompts{tasks}, {found.turns:.1f} times each, in {found.seconds:.0f} s"


def _cells(of: Figures) -> tuple[str, ...]:
    return (
        _seconds(of.ttft),
        _seconds(of.tpot),
        f"{of.tokens_per_second:.1f}",
        f"{of.alpha:.2f}" if of.alpha is not None else "-",
        f"{of.tau:.2f}" if of.tau is not None else "-",
    )


def _gain(way: Way, task: str) -> tuple[str, str]:
    first, second = way.speedup.get(task), way.end_to_end.get(task)
    return str(first) if first is not None else "", f"{second.value:.2f}x" if second is not None else ""


def _seconds(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.0f} ms" if value >= 0.01 else f"{value * 1e3:.2f} ms"
