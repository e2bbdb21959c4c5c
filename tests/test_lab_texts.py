"""Prompts that measurements are made on: every form of file, and what is said of a bad one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headstart.errors import InvalidParameter
from headstart.lab.texts import Text, by_task, choose, read_texts, shipped


def written(folder: Path, name: str, *lines: object) -> Path:
    path = folder / name
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines) + "\n", encoding="utf-8")
    return path


def test_ours_ship_with_the_package() -> None:
    assert {task: len(texts) for task, texts in by_task(shipped()).items()} == dict.fromkeys(
        ("dialogue", "translation", "summary", "question", "arithmetic", "code_edit"), 10
    )


def test_a_prompt_a_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes(b"\xef\xbb\xbfWhy?\r\n\r\n  {curly braces}\r\nHow \xc3\xa4?")
    assert [text.turns for text in read_texts(path)] == [("Why?",), ("  {curly braces}",), ("How ä?",)]
    assert all(text.raw for text in read_texts(path, raw=True))


def test_json_lines_by_any_name(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Short."}, {"role": "user", "content": "Why?"}]
    lines = ({"prompt": "One", "task": "sum  up"}, {"messages": messages, "category": "chat"}, {"prompt": "Two"})
    for name in ("p.jsonl", "question.txt"):
        one, chat, two = read_texts(written(tmp_path, name, *lines))
        assert (one.task, one.turns) == ("sum up", ("One",))
        assert (chat.task, chat.conversation()) == ("chat", messages)
        assert two.task == "prompts"


def test_one_json_list(tmp_path: Path) -> None:
    """Not a prompt for each of its lines, whatever it is called."""
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps([{"prompt": "One", "task": "a"}, {"turns": ["Two", "Three"]}], indent=1))
    assert [(text.task, text.turns) for text in read_texts(path)] == [("a", ("One",)), ("prompts", ("Two", "Three"))]
    path.write_text('[{"prompt": "One"}, {"text": "Two"}]')
    with pytest.raises(InvalidParameter, match=r"prompts\.json, object 2, must be a JSON object with one of"):
        read_texts(path)
    path.write_text('["a", "b"]\n[1]\n')
    assert [text.turns for text in read_texts(path)] == [('["a", "b"]',), ("[1]",)], "texts like any other"


def test_spec_bench_questions_have_categories_and_turns(tmp_path: Path) -> None:
    lines = (
        {"question_id": 81, "category": "writing", "turns": ["Write a poem.", "Now shorter."]},
        {"question_id": 161, "category": "translation", "turns": ["Translate: ja"]},
    )
    poem, other = read_texts(written(tmp_path, "question.jsonl", *lines))
    assert (poem.task, poem.turns) == ("writing", ("Write a poem.", "Now shorter."))
    assert poem.conversation() == [{"role": "user", "content": "Write a poem."}]
    assert [m["content"] for m in poem.conversation(["Roses"])] == ["Write a poem.", "Roses", "Now shorter."]
    assert other.conversation() == [{"role": "user", "content": "Translate: ja"}]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"prompt": "x"', "line 2, is no JSON"),
        ('["x"]', "line 2, must be a JSON object with one of 'prompt', 'messages' and 'turns'"),
        ('{"prompt": "x", "turns": ["y"]}', "line 2, must be a JSON object with one of"),
        ('{"prompt": "  "}', "line 2, has a 'prompt' that is no text, or empty"),
        ('{"turns": ["a", 3]}', "line 2, has 'turns' that are no list of texts"),
        ('{"prompt": "a", "task": 3}', "line 2, has a task that is no text"),
        ('{"messages": [{"content": "a"}]}', "line 2, has 'messages' that are no list"),
        ('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}', "nothing is left"),
        ('{"prompt": "half \\ud800"}', "line 2, has half a character"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, said: str) -> None:
    with pytest.raises(InvalidParameter, match=f"p.jsonl, {said}" if said.startswith("line") else said):
        read_texts(written(tmp_path, "p.jsonl", {"prompt": "fine"}, line))


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match="cannot be read: No such file"):
        read_texts(tmp_path / "none.txt")
    with pytest.raises(InvalidParameter, match="cannot be read"):
        read_texts(tmp_path)
    (tmp_path / "empty.txt").write_text(" \n\n")
    with pytest.raises(InvalidParameter, match=r"hold nothing: empty\.txt is empty"):
        read_texts(tmp_path / "empty.txt")
    (tmp_path / "bytes.txt").write_bytes(b"ok\nno: \xff")
    with pytest.raises(InvalidParameter, match=r"not valid UTF-8 .*byte 7 is 0xff"):
        read_texts(tmp_path / "bytes.txt")


def test_tasks_come_in_turn() -> None:
    texts = [Text(task, (f"{task}{i}",)) for task in "ab" for i in range(3)] + [Text("c", ("c0",))]
    assert [text.turns[0] for text in choose(texts, 2)] == ["a0", "b0", "c0", "a1", "b1"]
    assert [text.turns[0] for text in choose(texts, tasks=["b"])] == ["b0", "b1", "b2"]
    with pytest.raises(InvalidParameter, match="tasks must be among a, b, c, not d"):
        choose(texts, tasks=["a", "d"])


def test_long_prompts_are_told_apart_by_their_beginning() -> None:
    assert Text("t", ("Short\n prompt",)).beginning == "Short prompt"
    assert len(Text("t", ("long " * 50,)).beginning) == 60
