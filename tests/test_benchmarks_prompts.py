"""The sixty prompts that everything is measured on: ours, of six kinds, and none twice."""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
SHARED = REPOSITORY.parent / "shared" / "data"
KINDS = ("dialogue", "translation", "summary", "question", "arithmetic", "code_edit")


def read(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def squeezed(prompt: str) -> str:
    return " ".join(prompt.lower().split())


ROWS = read(REPOSITORY / "src" / "headstart" / "lab" / "data" / "prompts.jsonl")


def test_ten_prompts_of_each_kind() -> None:
    assert all(set(row) == {"task", "prompt"} for row in ROWS)
    assert Counter(row["task"] for row in ROWS) == dict.fromkeys(KINDS, 10)


def test_no_prompt_twice() -> None:
    assert len({squeezed(row["prompt"]) for row in ROWS}) == 60


def test_prompts_are_clean_text() -> None:
    for row in ROWS:
        assert row["prompt"] == row["prompt"].strip()
        assert 40 < len(row["prompt"]) < 3000
        assert "<|" not in row["prompt"]


@pytest.mark.parametrize(("task", "low", "high"), [("summary", 120, 250), ("question", 100, 250)])
def test_given_texts_are_of_some_length(task: str, low: int, high: int) -> None:
    for row in ROWS:
        if row["task"] == task:
            longest = max(row["prompt"].split("\n\n"), key=len)
            assert low <= len(longest.split()) <= high


def test_given_code_is_python() -> None:
    for row in ROWS:
        if row["task"] == "code_edit":
            (code,) = re.findall(r"```python\n(.*?)\n```", row["prompt"], flags=re.DOTALL)
            assert 15 <= len(code.splitlines()) <= 40
            assert any(isinstance(node, (ast.FunctionDef, ast.ClassDef)) for node in ast.parse(code).body)


@pytest.mark.skipif(not SHARED.is_dir(), reason="the held-out prompts are not part of the repository")
def test_none_is_from_the_held_out_prompts() -> None:
    held_out = {squeezed(row["prompt"]) for path in SHARED.glob("*.jsonl") for row in read(path)}
    assert len(held_out) > 400
    assert not held_out & {squeezed(row["prompt"]) for row in ROWS}
