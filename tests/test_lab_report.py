"""Reports: pages that need nothing else and believe nobody, JSON without folders, files whole or not at all."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from headstart.errors import InvalidParameter
from headstart.lab.report import plots, store
from headstart.lab.report.page import Html, details, facts, figures, html_page, lead, note, section, table
from headstart.lab.report.plots import Bars, Series, bars, lines, stacked

EVIL = "<script>alert('x')</script> \"&' </style>"


class Tags(HTMLParser):
    """Are all tags closed? And which are there?"""

    EMPTY = ("meta", "path", "use", "line")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.seen.add(tag)
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.EMPTY:
            assert self.open.pop() == tag


def checked(text: str) -> Tags:
    tags = Tags()
    tags.feed(text)
    assert not tags.open
    assert "script" not in tags.seen
    # Nothing is fetched; the names of SVG's own grammar are no addresses to go to.
    assert not re.findall(r"(?:src|href)=\"(?!#)", text.replace("xmlns:xlink", ""))
    assert "@import" not in text
    return tags


def test_whatever_is_told_is_escaped() -> None:
    parts = [
        lead(EVIL),
        note(EVIL, 'x" onload="y'),
        section(EVIL, EVIL, table((EVIL, "b"), [(EVIL, 1)], EVIL, text=(0,)), facts({EVIL: EVIL, "none": None})),
        details(EVIL, EVIL),
        figures([(lines([Series(EVIL, [1, 2], [1, 2])], EVIL, EVIL, title=EVIL), EVIL)]),
    ]
    text = html_page(EVIL, parts)
    checked(text)
    assert "alert('x')" not in text
    assert "<!--" not in text
    assert text.count("&lt;script&gt;") >= 10
    assert 'onload="y"' not in text
    assert "<dt>none" not in text
    assert Html("<b>") in section("x", Html("<b>"))


def test_pictures_take_the_pages_colours_and_name_their_axes() -> None:
    series = [Series("a", [1, 2], [1, 3], [0.5, 2], [2, 4]), Series("b", [1, 2], [2, 1], dashed=True)]
    sure = Bars("a", [1, 2], [0.5, 1.5], [1.5, 2.5])
    drawn = (
        lines(series, "x", "y", title="L"),
        bars(["one", "a very long name of a task, indeed"], [sure], "x", of="task", title="B", level=1),
        stacked(["p", "q"], {"draft": [1, 2], "rest": [2, 1]}, "ms", of="way", title="S"),
    )
    for name, svg in zip("LBS", drawn, strict=True):
        assert svg.startswith(f'<svg role="img" aria-label="{name}"')
        assert "var(--fg)" in svg
        assert "var(--s0)" in svg
        assert not re.search(r"(?:fill|stroke): #(?!none)", svg), "a colour that is not the page's"
        checked(html_page("x", figures([(svg, "c")])))
    assert lines([], "x", "y", title="none") == bars([], [], "x", of="y", title="none") == ""


def test_the_page_has_all_colours_for_light_dark_and_paper() -> None:
    style = html_page("x", [])
    light, dark, paper = (part for part in re.split(r"@media \(prefers-color-scheme: dark\)|@media print", style))
    names = set(re.findall(r"(--[a-z0-9-]+):", light))
    assert {f"--s{i}" for i in range(7)} < names
    assert names == set(re.findall(r"(--[a-z0-9-]+):", dark)) == set(re.findall(r"(--[a-z0-9-]+):", paper))


def test_without_matplotlib_there_are_no_pictures_and_a_word_about_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plots.missing() is None
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    assert "headstart[plot]" in str(plots.missing())
    assert lines([Series("a", [1], [1])], "x", "y", title="t") == ""
    assert bars(["a"], [Bars("a", [1])], "x", of="y", title="t") == ""
    assert stacked(["a"], {"b": [1]}, "x", of="y", title="t") == ""
    assert figures([("", "c")]) == ""


class Fake:
    kind = "fake"

    def to_json(self) -> dict[str, Any]:
        return {"settings": {"model": "/secret/folder/model", "hub": "org/name"}, "results": {"x": float("nan")}}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    monkeypatch.setattr(store, "page_of", lambda record: "<p>page</p>")
    return Fake()


def test_json_says_what_it_is_and_names_no_folder(tmp_path: Path, fake: Fake) -> None:
    paths = store.save(fake, tmp_path / "new" / "deep")
    assert [path.name for path in paths] == ["fake.json", "fake.html"]
    found = json.loads(paths[0].read_text())
    assert found == {
        "kind": "fake", "version": 1, "settings": {"model": "model", "hub": "org/name"}, "results": {"x": None}
    }  # fmt: skip
    assert paths[1].read_text() == "<p>page</p>"


def test_unnamed_reports_have_the_time_in_their_names(
    tmp_path: Path, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = store.save(fake)
    assert re.fullmatch(r"headstart-reports/fake-\d{8}-\d{6}\.json", first.as_posix())
    assert first.with_suffix("") == second.with_suffix("")


def test_a_page_that_cannot_be_made_leaves_no_json_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(record: object) -> str:
        raise RuntimeError("no page")

    monkeypatch.setattr(store, "page_of", broken)
    with pytest.raises(RuntimeError, match="no page"):
        store.save(Fake(), tmp_path)
    assert not list(tmp_path.iterdir())


def test_folders_that_cannot_be_written_to(tmp_path: Path, fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    for place in (file, file / "below"):
        with pytest.raises(InvalidParameter, match=r"out must be a folder, and .*file is a file"):
            store.check_out(place)
    with pytest.raises(InvalidParameter, match="out cannot be written to"):
        store.save(fake, file)
    store.check_out(tmp_path / "not" / "there" / "yet")
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "looking leaves nothing"

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryDirectory", refused)  # root may write anywhere
    with pytest.raises(InvalidParameter, match="out cannot be written to: Permission denied"):
        store.check_out(tmp_path)


LONG = [f"a very long name of something, number {i}" for i in range(12)]


@pytest.mark.parametrize(
    "draw",
    [
        lambda: lines(
            [Series(name, range(1, 17), [i * 1e5] * 16) for i, name in enumerate(LONG[:7])],
            "position in the draft (token)", "v(n), in plain rounds", title="many lines", whole=True,
        ),
        lambda: lines([Series("a", [1, 2], [1e-7, 2e-7])], "x", "share accepted", title="small numbers"),
        lambda: lines([Series("a", [1, 1_000_000], [1, 2])], "tokens", "speed-up (times)", title="far apart"),
        lambda: bars(LONG, [Bars(n, [1e4] * 12, [9e3] * 12, [2e4] * 12) for n in LONG[:4]], "x", of="task", title="b"),
        lambda: bars(["one"], [Bars("a", [1.0])], "speed-up over plain decoding (times)", of="task", title="one"),
        lambda: stacked(LONG, {n: [1e4] * 12 for n in LONG[:3]}, "time of a round (ms)", of="draft", title="many"),
        lambda: stacked(["one"], {"draft": [1.0], "rest": [0.1]}, "ms", of="tokens drafted (gamma)", title="one"),
    ],
)  # fmt: skip
def test_no_words_of_a_picture_overlap_or_are_cut_off(draw: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    finish = plots._svg

    def kept(figure: Any, *rest: Any, **more: Any) -> str:
        found.append(figure)
        return finish(figure, *rest, **more)

    monkeypatch.setattr(plots, "_svg", kept)
    assert draw()
    [figure] = found
    figure.draw_without_rendering()
    boxes = {text.get_text(): text.get_window_extent() for text in _words(figure)}
    assert {figure.axes[0].get_xlabel(), figure.axes[0].get_ylabel()} < set(boxes)
    for one, box in boxes.items():
        assert box.x0 >= 0, one
        assert box.y0 >= 0, one
        assert box.x1 <= figure.bbox.x1 + 1, one
        assert box.y1 <= figure.bbox.y1 + 1, one
        for other, second in boxes.items():
            assert one == other or not box.overlaps(second), f"{one!r} and {other!r}"


def _words(figure: Any) -> list[Any]:
    """All texts of a drawn figure that can be seen."""
    axes = figure.axes[0]
    found = [axes.xaxis.label, axes.yaxis.label, *(text for legend in figure.legends for text in legend.get_texts())]
    for axis in (axes.xaxis, axes.yaxis):
        low, high = sorted(axis.get_view_interval())
        found += [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
        found += [axis.get_offset_text()]
    return [text for text in found if text.get_text().strip()]
