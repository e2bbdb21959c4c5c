"""Replies in pieces of any size say what they say whole; what is no call stays text; calls and thoughts are found."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("fastapi")

from hypothesis import given, settings
from hypothesis import strategies as st

from headstart.server.replies import Part, Reading, Reply, Thinking, hermes, llama3, mistral, plain

READINGS: dict[str, Reading] = {"hermes": hermes, "llama3": llama3, "mistral": mistral, "plain": plain}
NAMES = ("add", "look_up")
THOUGHTS = (None, Thinking(), Thinking(opened=True))
BITS = st.sampled_from(
    [
        *(
            "<tool_call>",
            "</tool_call>",
            "[TOOL_CALLS]",
            "<|python_tag|>",
            "<think>",
            "</think>",
            "\n",
            " ",
            ";",
            ",",
            "]",
        ),
        *("[", "{", "}", '"', "\\", ":", "<", "<tool", "</", "x", "null", "1", "é"),
        *('{"name": "add", "arguments": {"a": 1}}', '{"name": "look_up", "parameters": {"q": "}\\"{"}}'),
        *('{"arguments": [1, "]"], "name": "add"}', '{"name": "add"}', '{"name": "add", "arguments": "{\\"a\\": 2}"}'),
        *('{"name": 5}', '{"name": "other", "arguments": {}}', '{"a": {"name": "add"}}', '{"name": "add", "argum'),
    ]
)
TEXTS = st.lists(BITS, max_size=9).map("".join)


def joined(parts: list[Part]) -> list[Part]:
    found: list[Part] = []
    for part in parts:
        if found and part.kind != "call" and (found[-1].kind, found[-1].index) == (part.kind, part.index):
            found[-1] = Part(part.kind, found[-1].text + part.text, part.index)
        else:
            found.append(part)
    return found


def parsed(read: Reading, *pieces: str, thinking: Thinking | None = None) -> list[Part]:
    reply = Reply(read, NAMES, thinking)
    found = [part for piece in pieces for part in reply.push(piece)]
    return joined(found + reply.finish())


def said(read: Reading, text: str, thinking: Thinking | None = None) -> tuple[str, str, list[tuple[str, Any]]]:
    """What was thought, what is said, and the calls with their arguments."""
    found = parsed(read, text, thinking=thinking)
    texts = ["".join(part.text for part in found if part.kind == kind) for kind in ("reasoning", "content")]
    calls = [part for part in found if part.kind == "call"]
    arguments = ["".join(p.text for p in found if p.kind == "arguments" and p.index == call.index) for call in calls]
    return texts[0], texts[1], [(call.text, json.loads(text)) for call, text in zip(calls, arguments, strict=True)]


@pytest.mark.parametrize("thinking", THOUGHTS)
@pytest.mark.parametrize("kind", READINGS)
@settings(max_examples=60, deadline=None)
@given(text=TEXTS, data=st.data())
def test_pieces_say_what_the_whole_says(kind: str, thinking: Thinking | None, text: str, data: st.DataObject) -> None:
    read = READINGS[kind]
    whole = parsed(read, text, thinking=thinking)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parsed(read, *pieces, thinking=thinking) == whole
    assert parsed(read, *text, thinking=thinking) == whole
    assert [part.index for part in whole if part.kind == "call"] == list(range(sum(p.kind == "call" for p in whole)))


CALLS = {
    "hermes": 'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "<tool_call>}"}}\n</tool_call>\n'
    '<tool_call>{"name": "look_up", "arguments": {}}</tool_call>',
    "llama3": '{"name": "add", "parameters": {"a": 1, "b": "<tool_call>}"}}; {"name": "look_up", "parameters": {}}',
    "mistral": 'Let me see. [TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": "<tool_call>}"}, "id": "x"}, '
    '{"name": "look_up", "arguments": {}}]',
}


@pytest.mark.parametrize("kind", CALLS)
def test_every_way_to_cut_a_reply_in_three(kind: str) -> None:
    read, text = READINGS[kind], CALLS[kind]
    whole = parsed(read, text)
    assert [part.text for part in whole if part.kind == "call"] == ["add", "look_up"]
    for a in range(len(text) + 1):
        for b in range(a, len(text) + 1, 13):
            assert parsed(read, text[:a], text[a:b], text[b:]) == whole


@pytest.mark.parametrize("kind", CALLS)
def test_calls_are_found(kind: str) -> None:
    calls = [("add", {"a": 1, "b": "<tool_call>}"}), ("look_up", {})]
    content = "" if kind == "llama3" else "Let me see."
    assert said(READINGS[kind], CALLS[kind]) == ("", content, calls)
    thought = f"<think>\nadd? [TOOL_CALLS]<tool_call> {{\n</think>\n\n{CALLS[kind]}"
    assert said(READINGS[kind], thought, Thinking()) == ("add? [TOOL_CALLS]<tool_call> {", content, calls)


@pytest.mark.parametrize(
    ("kind", "text", "content", "calls"),
    [
        ("hermes", "<tool_call>no</tool_call>", "<tool_call>no</tool_call>", []),
        ("hermes", 'a <tool_call>{"name": "add"} b', "a", [("add", {})]),
        ("hermes", '<tool_call><tool_call>{"name": "add"}</tool_call> b', "<tool_call> b", [("add", {})]),
        ("hermes", '<tool_call>{"name": "add"}<tool_call>{"name": "add"}', "", [("add", {}), ("add", {})]),
        ("hermes", "a < b <tool", "a < b <tool", []),
        ("hermes", 'x <tool_call>{"nam', 'x <tool_call>{"nam', []),
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>', "", [("add", {"a": 1})]),
        ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("add", {"a": 1})]),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}, "parameters": {}}', "", [("add", {"a": 1})]),
        ("llama3", '{"a": 1}', '{"a": 1}', []),
        ("llama3", '{"name": "Ada", "age": 3}', '{"name": "Ada", "age": 3}', []),
        ("llama3", ' <|python_tag|>{"name": "add", "parameters": {"a": 1}}', "", [("add", {"a": 1})]),
        ("llama3", '<|py{"name": "add"}', '<|py{"name": "add"}', []),
        ("llama3", '<|python_tag|>print("hi")', '<|python_tag|>print("hi")', []),
        ("llama3", 'Sure: {"name": "add"}', 'Sure: {"name": "add"}', []),
        ("llama3", '{"name": "add"}; thanks', "; thanks", [("add", {})]),
        ("mistral", "[TOOL_CALLS] none [1]", "[TOOL_CALLS] none [1]", []),
        ("mistral", '[TOOL_CALLS][{"name": "add"}] done', " done", [("add", {})]),
        ("mistral", "[TOOL_CALLS][]", "[TOOL_CALLS][]", []),
        ("plain", "<tool_call>{\n", "<tool_call>{\n", []),
    ],
)
def test_what_is_no_call_stays_text(kind: str, text: str, content: str, calls: Any) -> None:
    assert said(READINGS[kind], text) == ("", content, calls)


@pytest.mark.parametrize(
    ("kind", "text", "content"),
    [
        ("hermes", 'x <tool_call>\n{"name', "x"),
        ("hermes", "x <tool_call>", "x"),
        ("hermes", "a < b <tool", "a < b <tool"),  # it may as well be text
        ("hermes", "x <tool_call>no", "x <tool_call>no"),
        ("hermes", '<tool_call>{"name": 5, ', '<tool_call>{"name": 5, '),
        ("llama3", '{"name": "ad', ""),
        ("llama3", '{"name": "Ada", ', '{"name": "Ada", '),
        ("mistral", "x [TOOL_CALLS]", "x"),
        ("mistral", 'x [TOOL_CALLS] [{"na', "x"),
        ("mistral", "x [TOOL_CALLS] no", "x [TOOL_CALLS] no"),
    ],
)
def test_what_was_cut_and_may_be_a_call_is_no_text(kind: str, text: str, content: str) -> None:
    for required in (False, True):
        reply = Reply(READINGS[kind], NAMES, required=required)
        found = reply.push(text) + reply.finish(truncated=True)
        assert "".join(part.text for part in found).rstrip() == ("" if required else content.rstrip())
        assert not reply.calls


@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "content"),
    [
        ("<think>\nwhy\n\nnot\n</think>\n\nso\n", False, "why\n\nnot", "so\n"),
        ("\n<think></think>so", False, "", "so"),
        ("so <think>no</think>", False, "", "so <think>no</think>"),
        (" <thin", False, "", " <thin"),
        ("<think>never ends </thi", False, "never ends </thi", ""),
        ("why</think>so", True, "why", "so"),
        ("\nwhy", True, "why", ""),
    ],
)
def test_thoughts_are_apart(text: str, opened: bool, reasoning: str, content: str) -> None:
    assert said(plain, text, Thinking(opened=opened)) == (reasoning, content, [])


def test_arguments_come_as_they_are_written() -> None:
    reply = Reply(hermes, NAMES)
    assert reply.push('<tool_call>{"name": "add", "arg') == [Part("call", "add")]
    assert reply.push('uments": {"a"') == [Part("arguments", '{"a"')]
    assert reply.push(": 1") == [Part("arguments", ": 1")]
    assert reply.push("}}</tool") == [Part("arguments", "}")]
    assert reply.calls == 1
