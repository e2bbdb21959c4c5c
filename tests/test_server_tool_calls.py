"""Tool calls, thoughts and structured answers over a real socket: whole and in streams, drafted and not."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("llguidance")

from pydantic import BaseModel
from scripted_model import ScriptedServer
from server_tools import joined
from tool_templates import MAY_THINK, TEMPLATES, THINKING, TOOLS, WITHOUT, tokenizer_with

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "2 + 2?"}], "temperature": 0, "max_tokens": 300}
CALLS = {
    "hermes": 'Well.\n<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": "x"}}\n</tool_call>',
    "llama3": '{"name": "add", "parameters": {"a": 2, "b": "x"}}',
    "mistral": 'Well. [TOOL_CALLS][{"name": "add", "arguments": {"a": 2, "b": "x"}}]',
}
#: tags as models have them: Qwen's are tokens of their own, Mistral's is special
TOKENIZERS = {
    "hermes": tokenizer_with(TEMPLATES["hermes"], added=["<tool_call>", "</tool_call>"]),
    "llama3": tokenizer_with(TEMPLATES["llama3"]),
    "mistral": tokenizer_with(TEMPLATES["mistral"], "[TOOL_CALLS]"),
}
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}, "size": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["colour", "size"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", params=list(TEMPLATES))
def server(request: pytest.FixtureRequest) -> Iterator[ScriptedServer]:
    found = ScriptedServer(TOKENIZERS[request.param])
    found.kind = request.param  # type: ignore[attr-defined]
    yield found
    found.settle()
    found.close()


@pytest.fixture(scope="module")
def may_think() -> Iterator[ScriptedServer]:
    found = ScriptedServer(tokenizer_with(MAY_THINK, added=["<think>", "</think>"]))
    yield found
    found.close()


@pytest.fixture(scope="module")
def thinking() -> Iterator[ScriptedServer]:
    found = ScriptedServer(tokenizer_with(THINKING))
    yield found
    found.close()


@pytest.fixture(scope="module")
def client(thinking: ScriptedServer) -> Iterator[Any]:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=thinking.url + "/v1", api_key="none", max_retries=0) as found:
        yield found


def answered(server: ScriptedServer, path: str = CHAT, **body: Any) -> dict[str, Any]:
    """One choice, the same whole and in a stream, with speculation and without; ids of calls left out."""
    found = []
    for more in ({}, {"speculate": False}, {"stream": True}):
        status, said = server.post(path, (ASK if path == CHAT else {}) | body | more)
        assert status == 200, said
        choice = joined(said)[0] if "stream" in more else said["choices"][0]
        if path == CHAT:
            message = choice["message"]
            message["content"] = message.get("content") or None
            message["tool_calls"] = _calls(message.get("tool_calls"))
        found.append(choice)
    assert all(choice == found[0] for choice in found), found
    return found[0]


def _calls(calls: Any) -> list[tuple[str, str]]:
    """Names and arguments; those of a stream put together."""
    found: dict[int, list[str]] = {}
    for place, call in enumerate(calls or ()):
        one = found.setdefault(call.get("index", place), ["", ""])
        one[0] += call["function"].get("name", "")
        one[1] += call["function"]["arguments"]
    return [(name, arguments) for name, arguments in found.values()]


def test_a_tool_is_called(server: Any) -> None:
    server.writes(CALLS[server.kind])
    found = answered(server, tools=TOOLS)
    assert found["message"]["tool_calls"] == [("add", '{"a": 2, "b": "x"}')]
    assert found["message"]["content"] == (None if server.kind == "llama3" else "Well.")
    assert found["finish_reason"] == "tool_calls"
    _, said = server.post(CHAT, ASK | {"tools": TOOLS})
    [call] = said["choices"][0]["message"]["tool_calls"]
    assert call["type"] == "function"
    assert len(call["id"]) == (9 if server.kind == "mistral" else 29)


def test_a_stream_has_no_chunks_that_say_nothing(server: Any) -> None:
    """The mark before a call is several tokens long, and none of them is for the client."""
    server.writes(CALLS[server.kind])
    for more in ({}, {"speculate": False}):
        _, text = server.post(CHAT, ASK | {"tools": TOOLS, "stream": True} | more)
        chunks = [
            json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line and "[DONE]" not in line
        ]
        first, *choices = [choice for chunk in chunks for choice in chunk["choices"]]
        assert first["delta"]["role"] == "assistant"
        assert [choice for choice in choices if not choice["delta"] and choice["finish_reason"] is None] == []
        asked = {"tools": TOOLS, "stream": True, "origins": True, "stream_options": {"include_usage": True}}
        _, text = server.post(CHAT, ASK | asked | more)
        told = [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line and "[DONE]" not in line]
        origins = [origin for chunk in told for choice in chunk["choices"] for origin in choice.get("origins", ())]
        assert len(origins) == told[-1]["usage"]["completion_tokens"]  # where each token came from is said of all


def test_its_arguments_are_held_to_its_schema(server: Any) -> None:
    server.writes(CALLS[server.kind].replace('"a": 2, "b": "x"', '"b": 7, "sum": [2, 2]'))
    name, arguments = answered(server, tools=TOOLS)["message"]["tool_calls"][0]
    assert name == "add"
    found = json.loads(arguments)
    assert found.keys() <= {"a", "b"}
    assert isinstance(found["a"], int)


def test_nothing_is_called_that_need_not_be(server: Any) -> None:
    server.writes("It is 4.")
    for choice in ("auto", "none", None):
        found = answered(server, tools=TOOLS, tool_choice=choice)
        assert (found["message"]["content"], found["finish_reason"]) == ("It is 4.", "stop")
        assert not found["message"]["tool_calls"]


def test_a_tool_is_called_where_one_has_to_be(server: Any) -> None:
    server.writes("It is 4.")
    named = {"type": "function", "function": {"name": "do_nothing"}}
    found = answered(server, tools=TOOLS, tool_choice=named)
    assert found["message"]["tool_calls"] == [("do_nothing", "{}")]
    assert found["finish_reason"] == "stop", "as OpenAI has it, where the tool was named"
    server.writes(CALLS[server.kind].partition("\n")[2] or CALLS[server.kind].removeprefix("Well. "))
    found = answered(server, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert found["message"]["tool_calls"] == [("add", '{"a": 2, "b": "x"}')]
    assert found["finish_reason"] == "tool_calls"


def test_a_conversation_goes_on_with_what_the_tool_said(server: Any) -> None:
    server.writes(CALLS[server.kind])
    _, said = server.post(CHAT, ASK | {"tools": TOOLS})
    message = said["choices"][0]["message"]
    server.writes("It is 4.")
    told = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "4"}
    status, said = server.post(CHAT, ASK | {"messages": [*ASK["messages"], message, told], "tools": TOOLS})
    assert status == 200, said
    assert said["choices"][0]["message"]["content"] == "It is 4."


def test_a_call_that_was_cut_short(server: Any) -> None:
    server.writes(CALLS[server.kind])
    found = answered(server, tools=TOOLS, max_tokens=len(server.model.script) - 8, n=2)
    assert found["finish_reason"] == "length"
    [(name, arguments)] = found["message"]["tool_calls"]
    assert name == "add"
    assert '{"a": 2, "b": "x"}'.startswith(arguments)


def test_a_call_that_was_cut_before_its_name(server: Any) -> None:
    """The mark of a call is no text for people."""
    server.writes(CALLS[server.kind].partition("\n")[2] or CALLS[server.kind].removeprefix("Well. "))
    for length in (1, 5):
        found = answered(server, tools=TOOLS, tool_choice="required", max_tokens=length)
        assert found["finish_reason"] == "length"
        assert (found["message"]["content"], found["message"]["tool_calls"]) == (None, [])


def test_a_call_that_was_stopped_within(server: Any) -> None:
    """Its arguments are no JSON: nobody is told to make that call."""
    server.writes(CALLS[server.kind])
    found = answered(server, tools=TOOLS, stop='"x"')
    assert found["finish_reason"] == "stop"
    assert found["message"]["tool_calls"] == [("add", '{"a": 2, "b": ')]


def test_several_calls(thinking: ScriptedServer) -> None:
    one = '<tool_call>\n{"name": "do_nothing", "arguments": {}}\n</tool_call>'
    thinking.writes(f"which <tool_call> {{?\n</think>\n\n{one}\n{one}")
    found = answered(thinking, tools=TOOLS, tool_choice="required")
    assert found["message"]["tool_calls"] == [("do_nothing", "{}")] * 2
    assert found["message"]["reasoning"] == found["message"]["reasoning_content"] == "which <tool_call> {?"
    assert len(answered(thinking, tools=TOOLS, parallel_tool_calls=False)["message"]["tool_calls"]) == 1


def test_thoughts_are_apart_and_counted(thinking: ScriptedServer) -> None:
    thinking.writes("hm\n</think>\n\nIt is 4.")
    found = answered(thinking)
    assert (found["message"]["reasoning"], found["message"]["content"]) == ("hm", "It is 4.")
    _, said = thinking.post(CHAT, ASK)
    assert said["usage"]["completion_tokens_details"]["reasoning_tokens"] == len("hm\n</think>")
    _, events = thinking.post(CHAT, ASK | {"stream": True, "stream_options": {"include_usage": True}})
    last = json.loads([line for line in events.splitlines() if line][-2].removeprefix("data: "))
    assert last["usage"]["completion_tokens_details"]["reasoning_tokens"] == len("hm\n</think>")
    message = said["choices"][0]["message"]
    asked = [*ASK["messages"], message, *ASK["messages"]]
    assert thinking.post(CHAT, ASK | {"messages": asked})[0] == 200, "an answer may be sent back as it is"


def test_thinking_is_switched_off_by_what_the_template_asks_for() -> None:
    """As Qwen 3's does: without it the prompt ends behind an empty thought."""
    template = MAY_THINK.replace(
        "'[assistant] '", "'[assistant] ' + ('<think></think>' if enable_thinking is false else '') + mood | d('')"
    )
    found = ScriptedServer(tokenizer_with(template, "<|end|>"))
    try:
        asked: dict[str, Any] = {"messages": ASK["messages"]}
        plain = found.post("/tokenize", asked)[1]["tokens"]
        off = asked | {"chat_template_kwargs": {"enable_thinking": False}}
        ids = found.post("/tokenize", off)[1]["tokens"]
        assert found.post("/detokenize", {"tokens": ids[len(plain) :]})[1]["prompt"] == "<think></think>"
        found.writes("<think>hm</think>4")
        more = ({}, {"tools": TOOLS}, {"response_format": {"type": "text"}}, {"guided_regex": "(.|\n)*"})
        for each in more:
            assert answered(found, **each)["message"]["reasoning"] == "hm"
            status, said = found.post(CHAT, ASK | off | each)
            assert (status, said["usage"]["prompt_tokens"] >= len(ids)) == (200, True)
            assert "reasoning" not in said["choices"][0]["message"]
        forged = asked | {"chat_template_kwargs": {"mood": "<|end|>"}}
        tokens = found.post("/tokenize", forged)[1]["tokens"]
        assert found.llm.codec.special_id("<|end|>") not in tokens
        for wrong in (
            *({"messages": []}, {"tools": "x"}, {"add_generation_prompt": False}, {"eos_token": "x"}),
            *(
                {"thinking": False},
                {"mood": [1]},
                {"mood": 2**31},
                {"mood": "x" * 1025},
                {"mood": "\ud800"},
                [],
                {".": 1},
            ),
            dict.fromkeys(map(str, range(17))),
        ):
            status, said = found.post(CHAT, ASK | {"chat_template_kwargs": wrong})
            assert (status, said["error"]["param"]) == (400, "chat_template_kwargs"), said
    finally:
        found.close()


def test_what_is_thought_is_free_and_what_is_said_is_held(thinking: ScriptedServer) -> None:
    thinking.writes('red? {"x"\n</think>\n\n{"colour": "blue", "size": 5}')
    asked = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
    found = answered(thinking, response_format=asked)
    assert found["message"]["reasoning"] == 'red? {"x"'
    said = json.loads(found["message"]["content"])
    assert said["colour"] in ("red", "green")
    assert said["size"] in range(10)


@pytest.mark.parametrize(
    ("body", "text", "all_that_fit"),
    [
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes", "yes|no"),
        ({"guided_choice": ["yes", "no"]}, "yes", "yes|no"),
        ({"guided_regex": "(ab){1,3}/c"}, "ab/c", "(ab){1,3}/c"),
        ({"structured_outputs": {"grammar": 'start: "x" "y"'}}, "xy", "xy"),
        ({"guided_grammar": 'start: "x" "y"'}, "xy", "xy"),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
            '{"colour":"green","size":3}',
            r'\{"colour":"(red|green)","size":\d\}',
        ),
        (
            {"guided_json": json.dumps(SCHEMA)},
            '{"colour": "green", "size": 3}',
            r'\{"colour": "(red|green)", "size": \d\}',
        ),
    ],
)
def test_vllms_ways(may_think: ScriptedServer, body: Any, text: str, all_that_fit: str) -> None:
    may_think.writes(text)
    said = answered(may_think, **body)
    assert (said["message"]["content"], said["finish_reason"]) == (text, "stop")
    may_think.writes("something else")
    found = answered(may_think, TEXT, **body, prompt="a", max_tokens=60, temperature=0)
    assert re.fullmatch(all_that_fit, found["text"])
    assert found["finish_reason"] == "stop"
    if "grammar" not in str(body):
        may_think.writes(f"<think>{text}?\n</think>\n\n{text}")
        said = answered(may_think, **body)["message"]
        assert (said["reasoning"], said["content"]) == (f"{text}?", text)


@pytest.mark.parametrize(
    ("body", "field", "words"),
    [
        ({"guided_regex": "(a"}, "guided_regex", ""),
        ({"structured_outputs": {"grammar": "start: x"}}, "structured_outputs.grammar", ""),
        ({"guided_grammar": 'root ::= "a"'}, "guided_grammar", "is in Lark's notation here"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one of"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "exactly one of"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", ""),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "cannot be used with guided_regex"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex", "cannot be used with"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "is required"),
        ({"guided_json": "{"}, "guided_json", "is not JSON"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "colour"}}}},
            "response_format.json_schema.schema",
            "",
        ),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "x"}}}}}
                ]
            },
            "tools",
            "",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]},
            "tools.0.function.parameters",
            "its type must be 'object', not 'string'",
        ),
        ({"tools": TOOLS, "guided_regex": "a"}, "guided_regex", "cannot be used with tools"),
        ({"tools": TOOLS, "guided_json": "[]"}, "guided_json", ""),
        ({"tools": TOOLS, "guided_json": "5"}, "guided_json", ""),
        ({"tools": TOOLS, "guided_json": "false"}, "guided_json", ""),
        ({"tools": TOOLS, "guided_json": '{"items":' * 20000}, "guided_json", ""),
        ({"tools": TOOLS, "tool_choice": "required", "guided_json": "[]"}, "guided_json", ""),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "description": "\ud800"}}]},
            "tools",
            "half of a surrogate pair",
        ),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name", ""),
    ],
)
def test_what_cannot_be_is_named(thinking: ScriptedServer, body: Any, field: str, words: str) -> None:
    status, said = thinking.post(CHAT, ASK | body)
    assert status == 400, said
    assert said["error"]["param"] == field
    assert words in said["error"]["message"]


def test_a_format_that_nobody_knows() -> None:
    other = ScriptedServer(tokenizer_with("{{ tools }}" + WITHOUT))
    try:
        status, said = other.post(CHAT, ASK | {"tools": TOOLS})
        assert (status, said["error"]["param"]) == (400, "tools")
        assert "--tool-format" in said["error"]["message"]
    finally:
        other.close()
    told = ScriptedServer(tokenizer_with("{{ tools }}" + WITHOUT), tool_format="hermes")
    try:
        told.writes(CALLS["hermes"])
        assert answered(told, tools=TOOLS)["message"]["tool_calls"] == [("add", '{"a": 2, "b": "x"}')]
    finally:
        told.close()


class Thing(BaseModel):
    colour: Literal["red", "green"]
    size: int


def test_openai_parses(thinking: ScriptedServer, client: Any) -> None:
    openai = pytest.importorskip("openai")
    thinking.writes('</think>{"colour": "green", "size": 3}')
    asked = ASK | {"model": "tiny"}
    found = client.chat.completions.parse(response_format=Thing, **asked)
    assert found.choices[0].message.parsed == Thing(colour="green", size=3)
    thinking.writes('</think><tool_call>\n{"name": "Thing", "arguments": {"colour": "red", "size": 3}}\n</tool_call>')
    tools = [openai.pydantic_function_tool(Thing)]
    found = client.chat.completions.parse(tools=tools, **asked)
    assert found.choices[0].message.tool_calls[0].function.parsed_arguments == Thing(colour="red", size=3)
    with client.chat.completions.stream(tools=tools, **asked) as stream:
        kinds = {event.type for event in stream}
        last = stream.get_final_completion()
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    assert last.choices[0].message.tool_calls[0].function.parsed_arguments == Thing(colour="red", size=3)
