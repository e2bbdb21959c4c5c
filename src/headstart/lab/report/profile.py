"""The page of a profile: what steps cost, what checking costs, what drafting could win, and memory.

Knows: how a ``Profile`` is told and drawn. Does not know: how it was measured.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..profile_record import ALPHAS, WIDEST, Costs, Profile
from .page import Html, closing, drawn, facts, html_page, opening, section, table
from .plots import Series, lines, stacked

__all__ = ["page"]


def page(found: Profile) -> str:
    """The whole page."""
    return html_page("Headstart profile", [*_parts(found)])


def _parts(found: Profile) -> Iterator[Html]:
    yield opening(_sentence(found), found.warnings, found.notes)
    drafts = found.about.get("draft") != "none"
    yield section("Steps", _steps(found))
    yield drawn(_pictures(found, drafts=drafts))
    yield section("Checking n tokens at once, in plain steps: v(n)", _curves(found))
    if drafts:
        yield section("What drafting wins, by the cost model", _gains(found))
    yield section("Memory", _memory(found))
    yield section("What ran", facts(found.about))
    yield closing(found.settings, found.machine)


def _sentence(found: Profile) -> str:
    first = found.costs[0]
    said = f"A plain step of the target takes {_ms(first.target_step)}; checking four drafted tokens takes "
    said += f"{first.verify(5):.2f} of it"
    if found.about.get("draft") == "none":
        return said + "."
    if first.faster is None:
        return said + "; drafting takes no time worth counting."
    return said + f"; a draft step takes {_ms(first.draft_step)}, {first.faster:.1f} times less than a plain step."


def _name(costs: Costs) -> str:
    return f"{costs.rows} row{'s' * (costs.rows > 1)}, {costs.context} tokens"


def _steps(found: Profile) -> Html:
    columns = ("rows and context", "plain step", "draft start", "draft step", "times faster", "prompt tokens/s")
    rows = [
        (
            _name(c),
            _ms(c.target_step),
            _ms(c.draft_start),
            _ms(c.draft_step),
            f"{c.faster:.1f}" if c.faster is not None else "-",
            f"{c.prefill:.0f}",
        )
        for c in found.costs
    ]
    told = "Draft start: what any draft takes, however short; draft step: what each of its tokens takes more."
    return table(columns, rows, told)


def _curves(found: Profile) -> Html:
    rows = [(_name(c), *(f"{c.verify(width):.2f}" for width in range(1, WIDEST + 1))) for c in found.costs]
    measured = ", ".join(str(width) for width in found.costs[0].rounds)
    told = f"Measured at {measured} tokens; straight lines between."
    return table(("tokens", *(str(width) for width in range(1, WIDEST + 1))), rows, told)


def _gains(found: Profile) -> Html:
    columns = ("rows and context", *(f"alpha {a:g}" for a in ALPHAS), "pays from alpha")
    rows = []
    for c in found.costs:
        best = [c.best(a, found.most) for a in ALPHAS]
        least = c.break_even(found.most)
        cells = (f"{speed:.2f}x, {gamma}" if gamma else "1.00x, none" for gamma, speed in best)
        rows.append((_name(c), *cells, f"{least:.2f}" if least is not None else "never"))
    told = (
        f"Speed-up at the best draft length up to {found.most} tokens, and that length. alpha: share of drafted tokens "
        "that are accepted; headstart advise measures it."
    )
    return table(columns, rows, told)


def _memory(found: Profile) -> Html:
    m = found.memory
    fits = m.more_rows(m.max_len)
    return facts(
        {
            "target's weights": _bytes(m.target),
            "draft's weights": _bytes(m.draft) if m.draft else None,
            "keys and values a token": _bytes(m.token),
            "keys and values": f"{_bytes(m.held)} for {m.rows} rows of {m.max_len} tokens",
            "captured rounds": _bytes(m.captured) if m.captured else None,
            "free now": f"{_bytes(m.free)} of {_bytes(m.total)}" if m.free is not None else None,
            "what fits": f"{fits} further rows of {m.max_len} tokens" if fits is not None else None,
        }
    )


def _pictures(found: Profile, *, drafts: bool) -> Iterator[tuple[str, str]]:
    widths = range(1, WIDEST + 1)
    series = [Series(_name(c), widths, [c.verify(w) for w in widths], marker=False) for c in found.costs]
    yield (
        lines(series, "tokens checked at once", "time (plain steps)", title="v(n)", whole=True),
        "v(n): what the target takes to check n tokens at once.",
    )
    first = found.costs[0]
    if drafts:
        gammas = range(found.most + 1)
        model = first.model()
        gains = [
            Series(f"alpha {a:g}", gammas, [1.0 if not g else model.speedup(g, a) for g in gammas], marker=False)
            for a in ALPHAS
        ]
        yield (
            lines(gains, "tokens drafted a round (gamma)", "speed-up (times)", title="speed-up", level=1, whole=True),
            f"Speed-up by draft length and acceptance rate, predicted: {_name(first)}.",
        )
        shown = [g for g in (0, 1, 2, 4, 8) if g <= found.most]
        forwards = [first.rounds[1] * first.verify(g + 1) for g in shown]
        pure = [_forward(first, g + 1) for g in shown]
        parts = {
            "draft": [(first.draft_start + g * first.draft_step) * 1e3 if g else 0.0 for g in shown],
            "verify": [min(a, b) * 1e3 for a, b in zip(pure, forwards, strict=True)],
            "rest": [max(0.0, b - a) * 1e3 for a, b in zip(pure, forwards, strict=True)],
        }
        yield (
            stacked(
                [str(g) for g in shown], parts, "time of a round (ms)", of="tokens drafted (gamma)", title="a round"
            ),
            f"A round split in drafting, the target's forward, and the rest: {_name(first)}.",
        )


def _forward(costs: Costs, width: int) -> float:
    """Seconds of the target's forward alone, at the nearest measured width, drawn out by v."""
    known = min(costs.forwards, key=lambda w: abs(w - width))
    return costs.forwards[known] * costs.verify(width) / costs.verify(known)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def _bytes(count: int | None) -> str | None:
    if count is None:
        return None
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} bytes"
