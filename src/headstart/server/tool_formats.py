"""The ways in which models write tool calls: which a model has, and grammars that hold it to its tools.

Knows: Hermes, Llama 3 and Mistral; llguidance's dialect of Lark. Does not know: requests, or how a grammar is applied.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..machine.schemas import adapted, escapes
from ..structured import check_schema
from .replies import PYTHON_TAG, TOOL_CALL, TOOL_CALLS, Reading, Thinking, hermes, llama3, mistral
from .tools import Tool, Toolbox

__all__ = ["FORMATS", "SPACED", "Grammar", "ToolFormat", "format_of", "json_rule"]

#: the id of the token that is spelt so; None: there is none by itself
Token = Callable[[str], int | None]
#: between the parts of arguments: as templates and training texts have it
SPACED: dict[str, Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
#: what ``replies`` passes over, and takes for the beginning of a call without a tag
_BLANKS = r"[ \n\t\r]*"
_CALL = rf"{_BLANKS}({re.escape(PYTHON_TAG)})?\{{"


@dataclass(frozen=True)
class ToolFormat:
    """One way to write calls."""

    name: str
    read: Reading
    arguments: str  # the key of a call's arguments
    tag: str = ""  # by which calls are known; none: an answer that is a call is nothing else
    opening: str = ""  # of each call
    closing: str = ""
    brackets: tuple[str, str] = ("", "")  # around all calls
    between: str = ""  # calls
    several: bool = True  # calls in one answer
    short_ids: bool = False  # of calls: nine letters and digits

    def new_id(self) -> str:
        if self.short_ids:
            return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


FORMATS = {
    each.name: each
    for each in (
        ToolFormat("hermes", hermes, "arguments", TOOL_CALL[0], f"{TOOL_CALL[0]}\n", f"\n{TOOL_CALL[1]}", between="\n"),
        ToolFormat("llama3", llama3, "parameters", several=False),
        ToolFormat(
            "mistral",
            mistral,
            "arguments",
            TOOL_CALLS,
            brackets=(f"{TOOL_CALLS}[", "]"),
            between=", ",
            short_ids=True,
        ),
    )
}
#: what a template must have, and what it must not (others' calls begin alike), in the order in which they are tried
_KNOWN = (
    ("mistral", r"\[TOOL_CALLS\]", r"\[ARGS\]"),
    ("hermes", r"<tool_call>", r"<function=|<arg_key>|<tool_calls>"),
    ("llama3", r"<\|python_tag\|>|\"parameters\": *(dictionary|\{\{|')", None),
)


def format_of(template: str) -> ToolFormat | None:
    """How a model with this chat template writes calls; None: in none of the ways that are known here."""
    for name, has, lacks in _KNOWN:
        if re.search(has, template) and not (lacks and re.search(lacks, template)):
            return FORMATS[name]
    return None


class Grammar:
    """A grammar in the making, in rules of llguidance's Lark.

    A tag may be a token of its own, which no text spells for llguidance (special ones, and all that look like <tag>),
    or be spelt by others: both ways are allowed.
    """

    def __init__(self, token: Token, thinking: Thinking | None) -> None:
        """``thinking``: a thought may stand before everything."""
        self._token, self._thinking = token, thinking
        self._rules: dict[str, str] = {}
        #: the grammar begins behind this text (``Structured.after``): the prompt opened the thinking
        self.after = thinking.closing if thinking is not None and thinking.opened else None

    def calls(self, format: ToolFormat, box: Toolbox, content: str | None = None) -> str:
        """Calls, or content where they are not required. ``content``: its rule (calls must have a tag); None: any."""
        for place, tool in enumerate(box.tools):
            self._rules[f"call_{place}"] = self._call(format, tool)
        self._rules["call"] = " | ".join(f"call_{place}" for place in range(len(box.tools)))
        more = f"({self._joined(format.between)} one)*" if box.many and format.several else ""
        first, end = format.brackets
        self._rules["one"] = self._joined(format.opening, "call", format.closing)
        self._rules["calls"] = self._joined(first, f"one {more}", end)
        if box.required:
            return self._whole("calls", gap=True)
        return self._whole(*self._offered(format, content, more), gap=content is not None or not format.tag)

    def held(self, content: str) -> str:
        """Nothing but what this rule says."""
        return self._whole(content, gap=True)

    def _offered(self, format: ToolFormat, content: str | None, more: str) -> tuple[str, ...]:
        """The ways in which an answer may go that need not call anything."""
        tag = format.tag
        self._rules |= {"TEXT": "FREE", "FREE": self._free() if tag else self._free(_CALL)}
        if content is not None or not tag:
            # JSON could not stand beside calls without a tag: the lexer knows no way back.
            return content or "TEXT", "calls"
        self._rules["spelt[lazy]"] = f"FREE {_quoted(tag)}"
        token = self._token(tag)
        opened = "spelt" if token is None else f"(spelt | TEXT <[{token}]>)"
        first, end = format.brackets
        opening = (first + format.opening).removeprefix(tag)
        self._rules["led"] = f"{opened} {self._joined(opening, 'call', format.closing)} {more} {self._joined(end)}"
        return "TEXT", "led"

    def _free(self, *beginnings: str) -> str:
        """Any text, but for these beginnings; where a thought may come, none that begins like one."""
        tags, anything = self._thinking, r"(.|\n)*"
        if tags is not None and not tags.opened:
            beginnings = (*beginnings, _BLANKS + re.escape(tags.opening).replace("/", r"\/"))
        return " & ".join([f"/{anything}/", *(f"~/{each}{anything}/" for each in beginnings)])

    def _call(self, format: ToolFormat, tool: Tool) -> str:
        check_schema("tools", tool.schema_of_arguments)
        schema = {**_closed(tool.schema_of_arguments), "x-guidance": SPACED}
        opening = f'{{"name": {json.dumps(tool.function.name)}, "{format.arguments}": '
        return f'{_quoted(opening)} {json_rule(schema)} "}}"'

    def _joined(self, *texts: str) -> str:
        """Texts and names of rules, one after the other."""
        return " ".join(part for text in texts for part in self._spelt(text))

    def _spelt(self, text: str) -> list[str]:
        if not text:
            return []
        if re.match(r"[a-z]", text):  # rules
            return [text]
        for tag in (*TOOL_CALL, TOOL_CALLS):
            if tag in text and self._token(tag) is not None:
                before, _, behind = text.partition(tag)
                return [*self._spelt(before), self._either(tag), *self._spelt(behind)]
        return [_quoted(text)]

    def _either(self, tag: str) -> str:
        """The tag, in the ways in which it may be written."""
        token = self._token(tag)
        return _quoted(tag) if token is None else f"({_quoted(tag)} | <[{token}]>)"

    def _whole(self, *ways: str, gap: bool = False) -> str:
        """All rules, with the thought before them; ``gap``: line breaks may stand behind it."""
        found, tags = " | ".join(ways), self._thinking
        if tags is not None:
            found = f"GAP ({found})" if gap else f"({found})"
            self._rules |= {"GAP": r"/\n{0,2}/"} if gap else {}
        if tags is not None and not tags.opened:
            self._rules["thought_end[lazy]"] = f"THOUGHT {_quoted(tags.closing)}"
            self._rules["THOUGHT"] = r"/(.|\n)*/"
            token = self._token(tags.closing)
            end = "thought_end" if token is None else f"(thought_end | THOUGHT <[{token}]>)"
            self._rules["thought"] = f"{self._either(tags.opening)} {end}"
            found = f"thought? {found}"
        rules = {"start": found} | self._rules
        return "%llguidance {}\n" + "".join(f"{name}: {rule}\n" for name, rule in rules.items())


def _closed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Arguments that a tool does not name are let through only where its schema says so: small models go on with them,
    and functions do not take them."""
    names, required = schema.get("properties"), schema.get("required", [])
    others = ("additionalProperties", "patternProperties", "minProperties", "allOf", "anyOf", "oneOf", "$ref")
    if not isinstance(names, Mapping) or not isinstance(required, list) or any(key in schema for key in others):
        return schema
    return schema if set(map(str, required)) - set(names) else {**schema, "additionalProperties": False}


def json_rule(schema: Any) -> str:
    """``schema``: with what llguidance is told of its spaces."""
    told = schema.get("x-guidance", {})
    written = adapted(
        json.dumps({key: part for key, part in schema.items() if key != "x-guidance"}, ensure_ascii=False)
    )
    return f"%json {json.dumps(json.loads(written) | {'x-guidance': told | escapes(written)})}"


def _quoted(text: str) -> str:
    return json.dumps(text)
