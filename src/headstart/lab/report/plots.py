"""Pictures for pages: matplotlib draws them, as SVG that stands in the page and takes the page's colours.

Knows: matplotlib, which nothing else here imports; without it every picture is empty, and ``missing`` says what to
install. Does not know: what is drawn, beyond axes, series and their names.

Colours are written as the page's own variables, so that one drawing is right in light, in dark and on paper. Letters
are drawn as shapes: they need no font, and nothing moves in another browser.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.util import find_spec
from typing import Any

__all__ = ["Bars", "Series", "bars", "lines", "missing", "stacked"]

WIDTH, HEIGHT = 4.6, 3.0  # inches of 96 pixels: readable on a telephone, two or three beside each other on a screen
LEGEND = 60  # letters of names that have room beside each other
_COLOURS = {"#010101": "--fg", "#020202": "--muted", "#030303": "--line", "#040404": "--bg"}
_SERIES = [f"#0{n}0{n}0{n}" for n in (5, 6, 7, 8, 9)] + ["#0a0a0a", "#0b0b0b"]
_COLOURS |= {colour: f"--s{index}" for index, colour in enumerate(_SERIES)}
_FG, _MUTED, _LINE, _BG = list(_COLOURS)[:4]
_COLOURS["#1f77b4"] = "--fg"  # matplotlib's own, in the ends of error bars


@dataclass(frozen=True)
class Series:
    """A line: its name, its points, and perhaps how far each may be off, up and down."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    dashed: bool = False
    marker: bool = True


@dataclass(frozen=True)
class Bars:
    """Bars of one colour: a value for each name, and perhaps how far each may be off."""

    name: str
    values: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None


def missing() -> str | None:
    """Why there are no pictures; None where there are."""
    if find_spec("matplotlib") is not None:
        return None
    return "Plots need matplotlib: pip install 'headstart[plot]'. The tables have every number."


def lines(
    series: Sequence[Series], x: str, y: str, *, title: str, level: float | None = None, whole: bool = False
) -> str:
    """Lines over numbers. ``x`` and ``y`` name the axes, units included; ``level``: a thin line across; ``whole``: only
    whole numbers on the x axis. Empty without matplotlib or without points."""
    series = [s for s in series if len(s.x)]
    if missing() or not series:
        return ""
    figure, axes = _axes(x, y)
    if level is not None:
        axes.axhline(level, color=_MUTED, linewidth=0.8, linestyle=":")
    for index, each in enumerate(series):
        colour = _SERIES[index % len(_SERIES)]
        if each.low is not None and each.high is not None:
            axes.fill_between(each.x, each.low, each.high, color=colour, alpha=0.18, linewidth=0)
        style = "--" if each.dashed else "-"
        axes.plot(
            each.x, each.y, style, color=colour, label=each.name, linewidth=1.6, markersize=3.5,
            marker="o" if each.marker else None,
        )  # fmt: skip
    if whole:
        from matplotlib.ticker import MaxNLocator

        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if axes.get_ylim()[0] > 0:
        axes.set_ylim(bottom=0)
    return _svg(figure, axes, title, named=len(series) > 1)


def bars(
    names: Sequence[str], groups: Sequence[Bars], x: str, *, of: str, title: str, level: float | None = None
) -> str:
    """Groups of bars beside each other, one for each name, drawn sideways so that names have room. ``x`` names what is
    measured, units included; ``of`` what there is a bar for."""
    if missing() or not names or not groups:
        return ""
    height = max(HEIGHT, 0.9 + len(names) * (0.2 * len(groups) + 0.14))
    figure, axes = _axes(x, of, height)
    thick = 0.8 / len(groups)
    for index, group in enumerate(groups):
        at = [i + (index - (len(groups) - 1) / 2) * thick for i in range(len(names))]
        off = None
        if group.low is not None and group.high is not None:
            off = [
                [v - low for v, low in zip(group.values, group.low, strict=True)],
                [high - v for v, high in zip(group.values, group.high, strict=True)],
            ]
        axes.barh(
            at, group.values, height=thick * 0.9, color=_SERIES[index % len(_SERIES)], label=group.name, xerr=off,
            error_kw={"ecolor": _FG, "elinewidth": 1, "capsize": 2},
        )  # fmt: skip
    _sideways(axes, names)
    if level is not None:
        axes.axvline(level, color=_MUTED, linewidth=0.8, linestyle=":")
    return _svg(figure, axes, title, named=len(groups) > 1)


def stacked(names: Sequence[str], parts: Mapping[str, Sequence[float]], x: str, *, of: str, title: str) -> str:
    """A bar for each name, made of parts behind each other. ``x`` and ``of``: as of ``bars``."""
    if missing() or not names or not parts:
        return ""
    figure, axes = _axes(x, of, max(1.7, 1.1 + 0.38 * len(names)))
    start = [0.0] * len(names)
    for index, (part, values) in enumerate(parts.items()):
        axes.barh(range(len(names)), values, left=start, height=0.6, color=_SERIES[index % len(_SERIES)], label=part)
        start = [a + b for a, b in zip(start, values, strict=True)]
    _sideways(axes, names)
    return _svg(figure, axes, title, named=True)


def _sideways(axes: Any, names: Sequence[str]) -> None:
    """Names down the side, the first on top; few numbers below, since names leave little room for them."""
    from matplotlib.ticker import MaxNLocator

    axes.set_yticks(range(len(names)), [_shortened(name) for name in names])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))


def _shortened(name: str) -> str:
    return name if len(name) <= 22 else name[:21] + "…"


def _axes(x: str, y: str, height: float = HEIGHT) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    if not x or not y:
        raise ValueError("an axis has no name")
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.add_subplot()
    axes.set_facecolor("none")
    axes.set_xlabel(x, fontsize=9, color=_FG)
    axes.set_ylabel(y, fontsize=9, color=_FG)
    axes.tick_params(labelsize=8.5, colors=_FG, length=3, width=0.6)
    axes.grid(color=_LINE, linewidth=0.6)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(_MUTED)
        spine.set_linewidth(0.8)
    return figure, axes


def _svg(figure: Any, axes: Any, title: str, *, named: bool) -> str:
    """The drawing with the page's colours; series are named above it, where no line can run through the names."""
    import matplotlib

    if named:
        handles, names = axes.get_legend_handles_labels()
        names = [_shortened(name) for name in names]
        beside = max(1, LEGEND // (max(map(len, names)) + 5))
        figure.legend(
            handles, names, loc="outside upper left", ncols=min(3, beside, len(names)), fontsize=8.5, frameon=False,
            labelcolor=_FG, handlelength=1.4, columnspacing=1.2, borderaxespad=0.2,
        )  # fmt: skip
    out = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "path", "svg.hashsalt": title, "figure.dpi": 96}):
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text, flags=re.DOTALL)
    for colour, variable in _COLOURS.items():
        text = text.replace(colour, f"var({variable})")
    named_svg = f'<svg role="img" aria-label="{escape(title)}" '
    return text.replace("<svg ", named_svg, 1)
