"""docs/internals/where.md: ten questions, at most five files for each, and the files are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
QUESTIONS = re.split(r"^## ", (ROOT / "docs" / "internals" / "where.md").read_text(encoding="utf-8"), flags=re.M)[1:]
PATH = r"`([\w./-]+\.(?:py|cpp|h|cu|cuh|md|toml))`"


def exists(name: str) -> bool:
    return (ROOT / "src" / "headstart" / name).is_file() or (ROOT / name).is_file()


def test_there_are_ten_questions() -> None:
    assert [question.split(".")[0] for question in QUESTIONS] == [str(n) for n in range(1, 11)]


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.splitlines()[0])
def test_each_is_answered_by_files_that_are_there(question: str) -> None:
    question = question.partition("\n")[2]
    steps = re.findall(rf"^\d\. {PATH}( \*\(new\)\*)?: \S", question, flags=re.M)
    assert 1 <= len(steps) <= 5
    assert len(steps) == len(re.findall(r"^\d+\. ", question, flags=re.M)), "a step names its file and what to do there"
    assert len({name for name, _ in steps}) == len(steps), "a file twice"
    new = {name for name, mark in steps if mark}
    for name in new:
        assert not exists(name), f"{name} is there by now: say so"
    for name in set(re.findall(PATH, question)) - new:
        assert exists(name), f"{name} is not there"


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.splitlines()[0])
def test_what_is_named_in_a_file_is_in_it(question: str) -> None:
    """A name in backquotes stands in one of the question's files (or the page would send people to the wrong place)."""
    files = [name for name in re.findall(PATH, question) if exists(name)]
    text = "".join(
        path.read_text(encoding="utf-8")
        for name in files
        for path in (ROOT / "src" / "headstart" / name, ROOT / name)
        if path.is_file()
    )
    for name in re.findall(r"`([A-Za-z_]\w*(?:\.\w+)?)`", re.sub(PATH, "", question)):
        last = name.split(".")[-1]
        assert re.search(rf"\b{last}\b", text), f"none of {files} has {last}"
