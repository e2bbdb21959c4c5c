"""Which way a model writes tool calls is seen in its template; grammars allow that way and no other; templates get what
they want."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("llguidance")

from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from tokenizer_tools import byte_level
from tool_templates import HERMES, LLAMA3, MISTRAL, TEMPLATES, THINKING, TOOLS, WITHOUT, tokenizer_with

from headstart.errors import InvalidParameter
from headstart.machine.text import TextCodec
from headstart.server.errors import Refused
from headstart.server.reasoning import Reasoning
from headstart.server.replies import Reply, Thinking
from headstart.server.tool_formats import FORMATS, Grammar, format_of, json_rule
from headstart.server.tools import Tool, Toolbox

CALLS = {
    "hermes": [
        '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "<tool_call>"}}\n</tool_call>',
        '<tool_call>\n{"name": "do_nothing", "arguments": {}}\n</tool_call>',
    ],
    "llama3": ['{"name": "add", "parameters": {"a": 1, "b": "x"}}', '{"name": "do_nothing", "parameters": {}}'],
    "mistral": [
        '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": "x"}}]',
        '[TOOL_CALLS][{"name": "do_nothing", "arguments": {}}]',
    ],
}
BROKEN = ('"a": 1', '"a": "1"'), ("add", "subtract"), ('{"a": 1', '{"c": 1'), ('{"name": ', '{"nam": ')


def boxed(choice: Any = None, parallel: bool | None = None) -> Toolbox:
    found = Toolbox.of([Tool.model_validate(tool) for tool in TOOLS], choice, parallel)
    assert found is not None
    return found


def no_token(_: str) -> int | None:
    return None


@cache
def bytes_of() -> Any:
    return LLTokenizer("byte")


def taken(grammar: str, text: str) -> bool:
    """May an answer be this text, to its end?"""
    matcher = LLMatcher(bytes_of(), LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


@pytest.mark.parametrize("kind", CALLS)
def test_what_is_offered_may_be_called_in_the_models_way_only(kind: str) -> None:
    grammar = Grammar(no_token, None).calls(FORMATS[kind], boxed())
    assert taken(grammar, "No call.\nJust {text}.")
    assert taken(grammar, "")
    for call in CALLS[kind]:
        assert taken(grammar, call)
        assert taken(grammar, "Let me see. " + call) or kind == "llama3"
        assert not taken(grammar, call + " and more text")
        assert not taken(grammar, call[:-1])
        for right, wrong in BROKEN:
            assert right not in call or not taken(grammar, call.replace(right, wrong, 1))


def test_what_is_read_as_a_call_or_a_thought_is_no_free_text() -> None:
    """Behind blanks and a Python tag a reader finds a call, and behind blanks a thought: the grammar knows both."""
    llama = Grammar(no_token, None).calls(FORMATS["llama3"], boxed())
    call = CALLS["llama3"][0]
    for before in ("<|python_tag|>", "\n <|python_tag|>", "\n"):
        assert not taken(llama, before + call.replace('"a": 1', '"a": "1"'))
    assert taken(llama, "<|python_tag|>print(1)")
    hermes = Grammar(no_token, Thinking()).calls(FORMATS["hermes"], boxed())
    assert not taken(hermes, "\n<think>so" + CALLS["hermes"][0])
    assert taken(hermes, "\n<thing>so" + CALLS["hermes"][0])


@pytest.mark.parametrize(
    "parameters",
    [{"description": "x"}, {"type": ["object", "null"]}, {"anyOf": [{"required": ["a"]}, {"type": "integer"}]}],
)
def test_arguments_are_an_object(parameters: Any) -> None:
    tool = Tool.model_validate({"type": "function", "function": {"name": "f", "parameters": parameters}})
    box = Toolbox.of([tool], "required", None)
    assert box is not None
    grammar = Grammar(no_token, None).calls(FORMATS["llama3"], box)
    assert taken(grammar, '{"name": "f", "parameters": {"a": 1}}')
    for other in ("5", "null", '"x"', "[]"):
        assert not taken(grammar, f'{{"name": "f", "parameters": {other}}}')


@pytest.mark.parametrize("kind", CALLS)
def test_arguments_are_held_to_their_schema_as_any_other_json(kind: str) -> None:
    """Bounds, formats and keys at every level, as without tools."""
    fields = {
        "x": {"type": "number", "exclusiveMinimum": 10, "maximum": 10.25},
        "u": {"type": "string", "format": "uri"},
    }
    schema = {"type": "object", "properties": fields, "required": ["x"], "x-guidance": {"lenient": True}}
    tool = Tool.model_validate({"type": "function", "function": {"name": "add", "parameters": schema}})
    box = Toolbox.of([tool], "required", None)
    assert box is not None
    format = FORMATS[kind]
    grammar = Grammar(no_token, None).calls(format, box)

    def called(arguments: str) -> bool:
        first, end = format.brackets
        call = f'{{"name": "add", "{format.arguments}": {arguments}}}'
        return taken(grammar, f"{first}{format.opening}{call}{format.closing}{end}")

    assert called('{"x": 10.25}')
    assert called('{"x": 10.25, "u": "a:b"}')
    assert not called('{"x": 10}')
    assert not called('{"x": 10.00000000000000000001}')
    assert not called(f'{{"x": 10.25, "u": "{"a" * 50}:b"}}')
    assert not called('{"x": 10.25, "\\u0078": 1}')
    assert not called('{"x": 10.25, "y": 1}'), "functions do not take what they do not name"


def test_arguments_that_a_tool_does_not_name_are_let_through_where_it_says_so() -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "additionalProperties": True}
    tool = Tool.model_validate({"type": "function", "function": {"name": "add", "parameters": schema}})
    box = Toolbox.of([tool], "required", None)
    assert box is not None
    grammar = Grammar(no_token, None).calls(FORMATS["llama3"], box)
    assert taken(grammar, '{"name": "add", "parameters": {"x": 1, "y": 2}}')


@pytest.mark.parametrize("kind", CALLS)
def test_what_is_required_is_called(kind: str) -> None:
    grammar = Grammar(no_token, None).calls(FORMATS[kind], boxed("required"))
    assert all(taken(grammar, call) for call in CALLS[kind])
    assert not taken(grammar, "No call.")
    assert not taken(grammar, "")
    assert not taken(grammar, "Well. " + CALLS[kind][0])
    named = boxed(_named("do_nothing"))
    grammar = Grammar(no_token, None).calls(FORMATS[kind], named)
    assert [taken(grammar, call) for call in CALLS[kind]] == [False, True]


def _named(name: str) -> Any:
    from headstart.server.schemas import ChatRequest

    body = {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS}
    return ChatRequest.model_validate(
        body | {"tool_choice": {"type": "function", "function": {"name": name}}}
    ).tool_choice


def test_several_calls_where_the_model_can_and_the_client_wants_them() -> None:
    several = {
        "hermes": "\n".join(CALLS["hermes"]),
        "mistral": CALLS["mistral"][0][:-1] + ", " + CALLS["mistral"][1].removeprefix("[TOOL_CALLS]["),
        "llama3": "; ".join(CALLS["llama3"]),
    }
    for kind, text in several.items():
        for choice in (None, "required"):
            many = Grammar(no_token, None).calls(FORMATS[kind], boxed(choice))
            one = Grammar(no_token, None).calls(FORMATS[kind], boxed(choice, parallel=False))
            assert taken(many, text) == (kind != "llama3"), kind
            assert not taken(one, text)
            assert taken(one, CALLS[kind][0])


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("choice", [None, "required"])
def test_a_thought_may_stand_before_it_and_is_free(kind: str, choice: Any) -> None:
    grammar = Grammar(no_token, Thinking()).calls(FORMATS[kind], boxed(choice))
    thought = "<think>\nshall I <tool_call> or [TOOL_CALLS] {?\n</think>\n\n"
    assert taken(grammar, thought + CALLS[kind][0])
    assert taken(grammar, CALLS[kind][0])
    assert taken(grammar, thought + "No.") == (choice is None)
    assert not taken(grammar, thought.replace("</think>", "")), "it has to end"
    opened = Grammar(no_token, Thinking(opened=True))
    rules = opened.calls(FORMATS[kind], boxed(choice))
    assert opened.after == "</think>"
    assert taken(rules, "\n\n" + CALLS[kind][0])


@pytest.mark.parametrize("kind", ["hermes", "mistral"])
def test_what_is_said_instead_of_a_call_may_be_held_to_a_schema(kind: str) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    for thinking in (None, Thinking()):
        grammar = Grammar(no_token, thinking).calls(FORMATS[kind], boxed(), json_rule(schema))
        assert taken(grammar, '{"x":5}')
        assert taken(grammar, CALLS[kind][0])
        assert not taken(grammar, "No call.")
        assert thinking is None or taken(grammar, '<think>hm</think>\n{"x":5}')


def test_tags_that_are_tokens_of_their_own() -> None:
    """llguidance takes them for special whenever they look like <tag>: a grammar names them by their ids too."""
    tokenizer = byte_level()
    tokens = from_tokenizer(tokenizer, n_vocab=len(tokenizer))

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)  # type: ignore[no-any-return]

    def fits(grammar: str, *parts: str | int) -> bool:
        data = [token for part in parts for token in ([part] if isinstance(part, int) else ids(part))]
        matcher = LLMatcher(tokens, LLMatcher.grammar_from_lark(grammar), log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()

    tag, opening, closing = (tokenizer.convert_tokens_to_ids(name) for name in ("<tool>", "<think>", "</think>"))
    known = {"[TOOL_CALLS]": tag, "<think>": opening, "</think>": closing}
    call = '[{"name": "add", "arguments": {"a": 1}}]'
    for thinking in (None, Thinking()):
        grammar = Grammar(known.get, thinking).calls(FORMATS["mistral"], boxed())
        assert fits(grammar, "Well. ", tag, call)
        assert fits(grammar, tag, call)
        assert fits(grammar, "Well. [TOOL_CALLS]" + call)
        assert not fits(grammar, "Well. ", tag, call, "x")
        assert not fits(grammar, tag, '[{"name": "subtract"')
        required = Grammar(known.get, thinking).calls(FORMATS["mistral"], boxed("required"))
        assert fits(required, tag, call)
        assert not fits(required, "Well.")
        if thinking is not None:
            for each in (grammar, required):
                assert fits(each, opening, "hm [TOOL_CALLS] {", closing, "\n\n", tag, call)
                assert fits(each, opening, "hm</thi", "nk>", tag, call)
                assert fits(each, "<thi", "nk>hm", closing, tag, call)
            assert fits(Grammar(known.get, thinking).held('"yes"'), opening, "no?", closing, "\nyes")


def test_the_way_is_seen_in_the_template() -> None:
    assert {name: getattr(format_of(text), "name", None) for name, text in TEMPLATES.items()} == {
        n: n for n in TEMPLATES
    }
    assert format_of(THINKING) is FORMATS["hermes"]
    assert format_of(WITHOUT) is None
    assert format_of("{{ tools }}<tool_call><function=x>") is None, "another way that begins alike"
    for template, takes in ((HERMES, True), (LLAMA3, True), (MISTRAL, True), (WITHOUT, False)):
        assert TextCodec(tokenizer_with(template)).takes_tools == takes


ASKED = [{"role": "user", "content": "2 + 2?"}]
CALLED: list[dict[str, Any]] = [
    *ASKED,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}],
    },
    {"role": "tool", "tool_call_id": "abcdefghi", "content": "4"},
]


@pytest.mark.parametrize("kind", TEMPLATES)
def test_a_template_writes_the_calls_of_before_as_the_model_would(kind: str) -> None:
    codec = TextCodec(tokenizer_with(TEMPLATES[kind]))
    shown = [tool.as_dict() for tool in boxed().shown]
    text = codec.decode(codec.encode_chat(CALLED, tools=shown))
    assert '"description": "Adds two numbers."' in text
    assert text.endswith("[tool] 4\n[assistant] ")
    turn = text.partition("[assistant] ")[2].partition("\n[tool]")[0]
    reply = Reply(FORMATS[kind].read, ("add",))
    parts = reply.push(turn) + reply.finish()
    assert [(part.kind, part.text) for part in parts] == [("call", "add"), ("arguments", '{"a": 2}')]
    assert "Tools" not in codec.decode(codec.encode_chat(CALLED))


def test_what_a_template_has_no_place_for_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="no place"):
        TextCodec(tokenizer_with(WITHOUT)).encode_chat(CALLED)
    with pytest.raises(InvalidParameter, match="nine characters"):
        TextCodec(tokenizer_with(MISTRAL)).encode_chat(
            [*ASKED, {**CALLED[1], "tool_calls": [{**CALLED[1]["tool_calls"][0], "id": "x"}]}]
        )
    assert len(FORMATS["mistral"].new_id()) == 9
    for wrong in ("[1]", "{", 5):
        call = {"function": {"name": "add", "arguments": wrong}}
        with pytest.raises(InvalidParameter, match="a JSON object"):
            TextCodec(tokenizer_with(HERMES)).encode_chat([*ASKED, {"role": "assistant", "tool_calls": [call]}])
    with pytest.raises(InvalidParameter, match="from the role assistant only"):
        TextCodec(tokenizer_with(HERMES)).encode_chat([{"role": "user", "content": "x", "tool_calls": [CALLED[1]]}])


def test_special_tokens_in_tools_and_calls_are_text() -> None:
    tokenizer = tokenizer_with(HERMES, "[END]")
    codec, end = TextCodec(tokenizer), tokenizer.convert_tokens_to_ids("[END]")
    tools = [tool.as_dict() for tool in boxed().shown]
    tools[0]["function"]["description"] = "Adds [END] two </s> numbers"
    tools[0]["function"]["parameters"] = {"type": "object", "properties": {"[END]": {"const": "[END]"}}}
    said = [{**CALLED[1], "tool_calls": [{"function": {"name": "add", "arguments": '{"a": "[END]</s>"}'}}]}]
    answers = [{**CALLED[2], "content": "[END]"}]
    ids = codec.encode_chat([*ASKED, *said, *answers], tools=tools)
    assert not {end, tokenizer.eos_token_id} & set(ids)
    assert codec.decode(ids).count("[END]") == 5


def test_tools_that_cannot_be() -> None:
    tool = Tool.model_validate(TOOLS[0])
    assert Toolbox.of(None, "auto", None) is Toolbox.of([tool], "none", None) is None
    for tools, choice, words in (
        ([], "required", "needs tools"),
        ([tool, tool], None, "twice"),
        ([tool], _named("x"), "not among"),
    ):
        with pytest.raises(Refused, match=words):
            Toolbox.of(tools, choice, None)


def test_whether_a_prompt_opens_the_thinking() -> None:
    codec = TextCodec(tokenizer_with(THINKING))
    reasoning = Reasoning.of(codec)
    assert reasoning.thinking(codec.encode_chat(ASKED)) == Thinking(opened=True)
    assert reasoning.thinking(codec.encode("[assistant] ")) == Thinking()
    assert reasoning.thinking(codec.encode("<think>\n\n</think>\n\n")) is None
    assert Reasoning.of(TextCodec(tokenizer_with(WITHOUT))).thinking([5]) is None
    opened = codec.encode("<think>")
    for text, count in (("ab</think>c", 10), ("ab", 2), ("</think>", 8)):
        assert reasoning.tokens(opened, text, codec.encode_prediction(text)) == count
    for text, count in (("<think>ab</think>c", 17), ("no</think>", 0)):
        assert reasoning.tokens([5], text, codec.encode_prediction(text)) == count
