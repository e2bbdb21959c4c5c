"""The page of an advice: what is recommended, and the figures that it rests on.

Knows: how an ``Advice`` is told and drawn. Does not know: how anything was measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from ..advice_record import COLUMNS, Advice, Outlook
from ..statistics import Ratio
from .page import Html, closing, drawn, facts, html_page, note, opening, section, table
from .plots import Bars, Series, bars, lines, stacked

__all__ = ["page"]

_EXPLAINED = (
    "First guess: how often the first drafted token holds. tau: tokens for each forward of the target. Predicted: the "
    "speed-up over plain decoding with gamma auto, from what rounds cost and the text that the target wrote; its 90% "
    "interval is for other prompts like these. Best gamma: the best fixed draft length, predicted. Measured: gamma "
    "auto, run beside plain decoding on prompts that nothing was predicted from. Off: predicted over measured."
)


def page(found: Advice) -> str:
    """The whole page."""
    return html_page("Headstart advise", [*_parts(found)])


def _parts(found: Advice) -> Iterator[Html]:
    best = found.recommendation
    yield opening(best.sentence, found.notes)
    yield Html(f"{_code(best.command)}{_code(best.python)}")
    for rows, temperature in _cells(found):
        title = f"Speed-up with {rows} row{'s' * (rows > 1)}, temperature {temperature:g}"
        known = [outlook for outlook in found.outlooks if outlook.predictions]
        yield section(title, table(COLUMNS, [outlook.row(rows, temperature) for outlook in known], _EXPLAINED))
    yield drawn(_pictures(found))
    yield from _lengths(found)
    if found.symptoms:
        yield section("What holds drafts back", *(note(symptom) for symptom in found.symptoms))
    said_of = [(outlook.name, line) for outlook in found.outlooks for line in (*outlook.notes, *_refusal(outlook))]
    if said_of:
        yield section("About the candidates", table(("draft", "note"), said_of, text=(1,)))
    if found.proposals:
        yield section("Known for this model, and not on this machine", *(note(line) for line in found.proposals))
    yield section(
        "What it rests on",
        f"{_texts(found)} of {found.tokens} tokens that the target wrote, {found.seconds:.0f} s of measuring.",
        facts(found.about),
    )
    yield closing(found.settings, found.machine)


def _texts(found: Advice) -> str:
    count = sum(found.texts.values())
    return f"{count} text{'s' * (count != 1)}"


def _code(text: str) -> Html:
    from html import escape

    return Html(f"<pre>{escape(text)}</pre>")


def _refusal(outlook: Outlook) -> tuple[str, ...]:
    return () if outlook.refused is None else (f"not measured: {outlook.refused}",)


def _cells(found: Advice) -> list[tuple[int, float]]:
    return [(rows, heat) for rows in found.settings["rows"] for heat in found.settings["temperatures"]]


def _lengths(found: Advice) -> Iterator[Html]:
    """Predicted by draft length, as numbers."""
    rows, temperature = _cells(found)[0]
    gammas = sorted({p.gamma for o in found.outlooks for p in o.predictions if p.gamma != "auto"})
    lines_ = []
    for outlook in found.outlooks:
        each = {p.gamma: p for p in outlook.predictions if (p.rows, p.temperature) == (rows, temperature)}
        if len(each) > 1:
            auto = each.get("auto")
            cells = (f"{each[g].speedup.mid:.2f}x" if g in each else "-" for g in gammas)
            lines_.append((outlook.name, *cells, f"{auto.speedup.mid:.2f}x" if auto is not None else "-"))
    if lines_:
        title = f"Predicted by draft length, {rows} row{'s' * (rows > 1)}, temperature {temperature:g}"
        yield section(title, table(("draft", *(f"gamma {g}" for g in gammas), "auto"), lines_))


def _by_length(outlooks: Sequence[Outlook], rows: int, temperature: float) -> list[Series]:
    """Predicted speed-up by draft length, a line for each draft that has such predictions."""
    found = []
    for outlook in outlooks:
        points = sorted(
            (int(p.gamma), p.speedup.mid)
            for p in outlook.predictions
            if p.gamma != "auto" and (p.rows, p.temperature) == (rows, temperature)
        )
        if points:
            found.append(Series(outlook.name, [x for x, _ in points], [y for _, y in points]))
    return found


def _pictures(found: Advice) -> Iterator[tuple[str, str]]:
    rows, temperature = _cells(found)[0]
    known = [outlook for outlook in found.outlooks if outlook.prediction(rows, temperature) is not None]
    if known:
        groups = [_predicted(known, rows, temperature)]
        measured = [outlook.measured.get((rows, temperature)) for outlook in known]
        if any(measured):
            groups.append(_measured(measured))
        names, x = [outlook.name for outlook in known], "speed-up over plain decoding (times)"
        yield (
            bars(names, groups, x, of="draft", title="predicted and measured", level=1),
            "Speed-up of each draft, predicted and (where it was run) measured, with 90% intervals.",
        )
    fixed = [outlook for outlook in known if len(outlook.predictions) > 1]
    if fixed:
        yield (
            lines(
                _by_length(fixed, rows, temperature),
                "draft length gamma (tokens)",
                "predicted speed-up (times)",
                title="by gamma",
                level=1,
                whole=True,
            ),
            "Predicted speed-up by draft length.",
        )
    with_places = [outlook for outlook in known if outlook.acceptance.get(f"{temperature:g}")]
    if with_places:
        yield (
            lines(
                [
                    Series(
                        o.name, range(1, len(o.acceptance[f"{temperature:g}"]) + 1), o.acceptance[f"{temperature:g}"]
                    )
                    for o in with_places
                ],
                "position in the draft (token)",
                "share accepted",
                title="acceptance by position",
                whole=True,
            ),
            "Acceptance by position, given that all before it were accepted.",
        )
    yield from _costs(known, rows)


def _costs(known: list[Outlook], rows: int) -> Iterator[tuple[str, str]]:
    told = [(o, o.costs[str(rows)], o.costs["plain"][str(rows)]) for o in known if str(rows) in o.costs]
    if not told:
        return
    widths = [
        Series(
            o.name,
            [int(w) for w in mine["forward_ms"]],
            [ms / plain["forward_ms"]["1"] for ms in mine["forward_ms"].values()],
        )
        for o, mine, plain in told
        if len(mine["forward_ms"]) > 1
    ]
    yield (
        lines(widths, "tokens checked at once", "v(n), in plain rounds", title="verify curve", whole=True),
        "What a round takes that checks n tokens, without drafting, in plain rounds.",
    )
    length = 4
    parts = {
        "draft": [m["draft_start_ms"] + length * m["draft_step_ms"] for _, m, _ in told],
        "the rest, verifying": [_at(m["forward_ms"], length + 1) for _, m, _ in told],
    }
    yield (
        stacked(
            [o.name for o, _, _ in told],
            parts,
            "time of a round that drafts 4 tokens (ms)",
            of="draft",
            title="a round",
        ),
        "A round that drafts four tokens, split in drafting and everything else.",
    )


def _at(forwards: dict[str, float], width: int) -> float:
    """The measured width nearest to this one."""
    return forwards[min(forwards, key=lambda known: abs(int(known) - width))]


def _predicted(known: list[Outlook], rows: int, temperature: float) -> Bars:
    found = [p.speedup for o in known if (p := o.prediction(rows, temperature)) is not None]
    return Bars("predicted", [i.mid for i in found], [i.low for i in found], [i.high for i in found])


def _measured(ratios: list[Ratio | None]) -> Bars:
    values = [ratio.value if ratio is not None else math.nan for ratio in ratios]  # no bar
    sure = [ratio.others or ratio.interval if ratio is not None else None for ratio in ratios]
    low = [one.low if one is not None else value for one, value in zip(sure, values, strict=True)]
    high = [one.high if one is not None else value for one, value in zip(sure, values, strict=True)]
    return Bars("measured", values, low, high)
