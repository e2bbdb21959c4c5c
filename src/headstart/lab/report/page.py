"""One page of HTML that needs nothing else: no network, no script, light or dark as the reader likes it, printable.

Knows: how headings, tables, notes and pictures look. Does not know: what they say. Whatever is handed over as text is
escaped here; only pictures (``plots``) are taken as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from .plots import missing

__all__ = [
    "Html",
    "closing",
    "details",
    "drawn",
    "facts",
    "figures",
    "html_page",
    "lead",
    "note",
    "opening",
    "section",
    "table",
]


class Html(str):
    """Text that is HTML already."""


_STYLE = """
:root { color-scheme: light dark; --bg: #ffffff; --fg: #1c1e21; --muted: #5d646d; --line: #d9dde2; --soft: #f4f5f7;
  --accent: #1f66c1; --warn: #9a5b00; --warn-bg: #fff4de; --bad: #b3261e; --good: #1a7f37;
  --s0: #1f66c1; --s1: #d1701b; --s2: #2b8a57; --s3: #8a4fbf; --s4: #b8860b; --s5: #c03d6b; --s6: #5d646d; }
@media (prefers-color-scheme: dark) { :root { --bg: #16181c; --fg: #e6e8eb; --muted: #9aa3ad; --line: #353a42;
  --soft: #1f2329; --accent: #7db3ff; --warn: #f0b45a; --warn-bg: #33290f; --bad: #ff8a80; --good: #6cd18a;
  --s0: #7db3ff; --s1: #ffa45c; --s2: #6fd09b; --s3: #c79bf2; --s4: #e5c558; --s5: #f58bb0; --s6: #9aa3ad; } }
@media print { :root { color-scheme: light; --bg: #fff; --fg: #000; --muted: #444; --line: #bbb; --soft: #f4f4f4;
  --accent: #0b4a9e; --warn: #7a4700; --warn-bg: #fff; --bad: #9a1b14; --good: #14632b; --s0: #1f66c1; --s1: #d1701b;
  --s2: #2b8a57; --s3: #8a4fbf; --s4: #b8860b; --s5: #c03d6b; --s6: #5d646d; }
  figure, table, .note { break-inside: avoid; } details > * { display: block; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem clamp(0.8rem, 3vw, 2.5rem) 3rem; max-width: 84rem; background: var(--bg);
  color: var(--fg); font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  overflow-wrap: break-word; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 0.3rem; }
h2 { font-size: 1.15rem; margin: 2rem 0 0.6rem; padding-top: 0.6rem; border-top: 1px solid var(--line); }
p { margin: 0.4rem 0; max-width: 62rem; }
.lead { font-size: 1.1rem; } .muted, figcaption { color: var(--muted); font-size: 0.9rem; }
.note { border-left: 4px solid var(--accent); background: var(--soft); padding: 0.5rem 0.8rem; margin: 0.6rem 0;
  max-width: 62rem; } .note.warning { border-color: var(--warn); background: var(--warn-bg); }
.note.bad { border-color: var(--bad); } .note.good { border-color: var(--good); }
.scroll { overflow-x: auto; max-width: 100%; /* a shadow where a table goes on */
  background: linear-gradient(to right, var(--bg) 30%, transparent) left / 3rem 100% no-repeat local,
    linear-gradient(to left, var(--bg) 30%, transparent) right / 3rem 100% no-repeat local,
    linear-gradient(to right, var(--line), transparent) left / 1rem 100% no-repeat scroll,
    linear-gradient(to left, var(--line), transparent) right / 1rem 100% no-repeat scroll; }
table { border-collapse: collapse; margin: 0.4rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: 0.28rem 0.7rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th { font-weight: 600; } th:first-child, td:first-child { text-align: left; padding-left: 0; }
td.text, th.text { text-align: left; white-space: normal; min-width: 12rem; }
dl { display: grid; grid-template-columns: minmax(7rem, max-content) 1fr; gap: 0.15rem 1rem; margin: 0.4rem 0; }
dt { color: var(--muted); } dd { margin: 0; overflow-wrap: anywhere; }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(25rem, 100%), 1fr)); gap: 1rem 2rem; }
figure { margin: 0.5rem 0; min-width: 0; } figure svg { width: 100%; max-width: 34rem; height: auto; display: block; }
pre, code { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: 0.9em; }
pre { background: var(--soft); padding: 0.6rem 0.8rem; overflow-x: auto; white-space: pre; margin: 0.4rem 0; }
summary { cursor: pointer; color: var(--muted); }
@media (max-width: 40rem) { th, td { padding: 0.28rem 0.4rem; font-size: 0.9rem; }
  td.text, th.text { min-width: 9rem; } }
"""


def html_page(title: str, parts: Iterable[str]) -> str:
    """The page. ``parts``: what the functions here make."""
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>\n"
        f"{body}\n</body>\n</html>\n"
    )


def _html(value: object) -> str:
    return value if isinstance(value, Html) else escape(str(value))


def lead(text: object) -> Html:
    """What the page has to say, in a sentence or two."""
    return Html(f'<p class="lead">{_html(text)}</p>')


def section(title: str, *parts: object) -> Html:
    """A heading and what stands under it; plain text is a paragraph."""
    inner = "\n".join(part if isinstance(part, Html) else f"<p>{_html(part)}</p>" for part in parts if part)
    return Html(f"<section>\n<h2>{escape(title)}</h2>\n{inner}\n</section>")


def note(text: object, kind: str = "") -> Html:
    """``kind``: "warning", "bad", "good", or nothing special."""
    return Html(f'<p class="note {escape(kind)}">{_html(text)}</p>')


def table(
    columns: Sequence[str], rows: Sequence[Sequence[object]], caption: str = "", text: Sequence[int] = ()
) -> Html:
    """``text``: the numbers of columns that hold sentences, which may wrap."""

    def cell(index: int, value: object) -> str:
        return f'<td class="text">{_html(value)}</td>' if index in text else f"<td>{_html(value)}</td>"

    words = (' class="text"' if i in text else "" for i in range(len(columns)))
    head = "".join(f'<th scope="col"{kind}>{_html(name)}</th>' for kind, name in zip(words, columns, strict=True))
    lines = ("<tr>" + "".join(cell(i, value) for i, value in enumerate(row)) + "</tr>" for row in rows)
    told = f'<p class="muted">{escape(caption)}</p>' if caption else ""  # not a caption, which is as wide as the table
    body = "\n".join(lines)
    return Html(
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>{told}'
    )


def facts(values: Mapping[str, Any]) -> Html:
    """Names and what they are; None is left out."""
    lines = (
        f"<dt>{escape(str(name).replace('_', ' '))}</dt><dd>{_html(_readable(value))}</dd>"
        for name, value in values.items()
        if value is not None
    )
    return Html(f"<dl>{''.join(lines)}</dl>")


def _readable(value: object) -> object:
    """Long numbers in groups, short ones without zeros behind, lists without brackets."""
    if isinstance(value, (list, tuple)):
        return ", ".join(str(_readable(each)) for each in value)
    if isinstance(value, float):
        return f"{value:g}"
    return f"{value:,}" if isinstance(value, int) and value >= 10_000 else value


def figures(pictures: Iterable[tuple[str, str]]) -> Html:
    """Pictures (SVG from ``plots``) and what each shows, side by side where there is room; nothing without any."""
    found = [f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>" for svg, caption in pictures if svg]
    return Html(f'<div class="figures">{"".join(found)}</div>' if found else "")


def opening(sentence: str, warnings: Iterable[str] = (), notes: Iterable[str] = ()) -> Html:
    """How a report of measurements begins: what it says, what to mind, and what to install for its pictures."""
    lacking = missing()
    parts = [lead(sentence), *(note(said, "warning") for said in warnings), *map(note, notes)]
    return Html("\n".join([*parts, *([note(lacking)] if lacking is not None else [])]))


def drawn(pictures: Iterable[tuple[str, str]]) -> Html:
    """A section of pictures; nothing where there are none."""
    found = figures(pictures)
    return section("Pictures", found) if found else Html("")


def closing(settings: Mapping[str, Any], machine: Mapping[str, Any], *more: object) -> Html:
    """How it ends: how it was measured, and on what."""
    return Html("\n".join((section("Settings", facts(settings), *more), section("Machine", facts(machine)))))


def details(summary: str, *parts: object) -> Html:
    """Something that is folded until it is wanted."""
    inner = "\n".join(part if isinstance(part, Html) else f"<p>{_html(part)}</p>" for part in parts if part)
    return Html(f"<details><summary>{escape(summary)}</summary>\n{inner}\n</details>")
