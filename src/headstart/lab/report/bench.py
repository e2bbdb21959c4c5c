"""The page of a bench: who is faster by how much, on which task, and where the time goes.

Knows: how a ``Bench`` is told and drawn. Does not know: how it was measured.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..bench_record import ALL, Bench, Way
from ..figures import Figures
from ..statistics import Ratio
from .page import Html, closing, drawn, facts, html_page, note, opening, section, table
from .plots import Bars, Series, bars, lines, stacked

__all__ = ["page"]

_COLUMNS = ("", "speed-up", "90% interval", "with prompts", "a token", "first token", "tokens/s", "alpha", "tau")
_EXPLAINED = (
    "Speed-up: time for a token behind the first, plain decoding over this one; its interval is for these prompts, "
    "measured again; with prompts: the same over whole answers. A token: time for each one behind the first, a row. "
    "First token: median time from the request to it. Tokens/s: all rows together, prompts included. alpha: share of "
    "drafted tokens that were accepted. tau: tokens for each forward of the target."
)


def page(found: Bench) -> str:
    """The whole page."""
    return html_page("Headstart bench", [*_parts(found)])


def _parts(found: Bench) -> Iterator[Html]:
    idle = [f"{way.name}: speculation was inactive at the end: {way.inactive}" for way in found.ways if way.inactive]
    yield opening(_sentence(found), [*found.notes, *idle])
    yield section("In all", table(_COLUMNS, [_row(way.name, way, ALL) for way in found.ways], _EXPLAINED))
    yield drawn(_pictures(found))
    if len(found.tasks) > 1:
        for way in found.ways[1:]:
            yield section(f"{way.name}, by task", table(_COLUMNS, [_row(task, way, task) for task in found.tasks]))
    for way in found.ways[1:]:
        if way.figures[ALL].acceptance:
            yield section(f"{way.name}: acceptance by position in the draft", _positions(way.figures[ALL]))
    yield section("What ran", *(Html(f"{note(way.name)}{facts(way.about)}") for way in found.ways))
    yield closing(found.settings, found.machine, _same(found))


def _sentence(found: Bench) -> str:
    prompts = sum(found.prompts.values())
    where = (
        f"{prompts} prompts of {len(found.tasks)} tasks"
        if len(found.tasks) > 1
        else f"{prompts} prompt{'s' * (prompts != 1)}"
    )
    measured = f"measured on {where}, {found.turns:.1f} times each, in {found.seconds:.0f} s"
    gain = found.speedup
    if gain is None or len(found.ways) < 2:
        return f"Plain decoding: {found.ways[0].figures[ALL].tokens_per_second:.1f} tokens a second, {measured}."
    sure = _interval(gain)
    between = f", between {sure} with 90%" if sure != "-" else ""
    return f"{found.ways[1].name} decodes {gain.value:.2f} times as fast as plain decoding{between}; {measured}."


def _row(name: str, way: Way, task: str) -> tuple[str, ...]:
    of, gain, whole = way.figures[task], way.speedup.get(task), way.end_to_end.get(task)
    return (
        name,
        f"{gain.value:.2f}x" if gain is not None else "-",
        _interval(gain),
        f"{whole.value:.2f}x" if whole is not None else "-",
        _time(of.tpot),
        _time(of.ttft),
        f"{of.tokens_per_second:.1f}",
        f"{of.alpha:.2f}" if of.alpha is not None else "-",
        f"{of.tau:.2f}" if of.tau is not None else "-",
    )


def _interval(gain: Ratio | None) -> str:
    if gain is None or gain.interval is None:
        return "-"
    return f"{gain.interval.low:.2f} to {gain.interval.high:.2f}"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _positions(of: Figures) -> Html:
    rows = [
        (str(i + 1), f"{share:.2f}", f"{of.reached[i]:.2f}" if i < len(of.reached) else "-", str(of.tried[i]))
        for i, share in enumerate(of.acceptance)
    ]
    told = "Accepted: where all tokens before it were. Up to here: of drafts that are so long, those accepted this far."
    return table(("position", "accepted", "up to here", "times"), rows, told)


def _same(found: Bench) -> str:
    if found.settings.get("temperature", 0):
        return ""
    told = (f"{way.name}: {way.same[0]} of {way.same[1]}" for way in found.ways[1:])
    return "Answers that are token for token those of plain decoding: " + "; ".join(told) + "."


def _pictures(found: Bench) -> Iterator[tuple[str, str]]:
    ways = [way for way in found.ways[1:] if way.speedup]
    if ways:
        tasks = [*(found.tasks if len(found.tasks) > 1 else ()), ALL]
        known = [task for task in tasks if all(task in way.speedup for way in ways)]
        each = [_bars(way, known) for way in ways]
        yield (
            bars(known, each, "speed-up over plain decoding (times)", of="task", title="speed-up", level=1),
            "Speed-up by task, with 90% intervals.",
        )
    drafting = [way for way in ways if way.figures[ALL].acceptance]
    if drafting:
        series = [
            Series(way.name, range(1, len(way.figures[ALL].acceptance) + 1), way.figures[ALL].acceptance)
            for way in drafting
        ]
        yield (
            lines(
                series, "position in the draft (token)", "share accepted", title="acceptance by position", whole=True
            ),
            "Acceptance by position: of the drafts that were accepted up to it, the share accepted there.",
        )
    told = [way for way in found.ways if way.figures[ALL].round_seconds is not None]
    if told:
        of = [way.figures[ALL] for way in told]
        parts = {
            "draft": [(f.draft_seconds or 0) * 1e3 for f in of],
            "verify": [(f.verify_seconds or 0) * 1e3 for f in of],
            "rest": [(f.rest_seconds or 0) * 1e3 for f in of],
        }
        yield (
            stacked([way.name for way in told], parts, "time of a round (ms)", of="decoding", title="a round"),
            "A round split in drafting, the target's forward, and the rest.",
        )


def _bars(way: Way, tasks: list[str]) -> Bars:
    gains = [way.speedup[task] for task in tasks]
    low = [g.interval.low if g.interval is not None else g.value for g in gains]
    high = [g.interval.high if g.interval is not None else g.value for g in gains]
    return Bars(way.name, [g.value for g in gains], low, high)
