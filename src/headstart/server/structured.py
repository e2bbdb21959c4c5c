"""What clients say of what an answer must look like, and what it becomes: ``Structured``.

Knows: OpenAI's ``response_format``, vLLM's ``structured_outputs`` and its older ``guided_*``. Does not know: how an
answer is held to it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, StrictBool

from ..errors import InvalidParameter
from ..structured import Structured
from .errors import Refused
from .records import Many, Record
from .replies import Thinking
from .tool_formats import SPACED, Grammar, Token, json_rule

__all__ = ["ResponseFormat", "StructuredOutputs", "Wanted"]

_OBJECT: dict[str, Any] = {"type": "object"}
_GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")


class _JsonSchema(Record):
    name: str | None = None  # nothing depends on it
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: StrictBool | None = None  # answers are always held to it


class ResponseFormat(Record):
    """OpenAI's."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: _JsonSchema | None = None


class StructuredOutputs(Record):
    """vLLM's."""

    json_: str | dict[str, Any] | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Many[str] | None = None
    grammar: str | None = None
    json_object: StrictBool | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: StrictBool | None = None
    disable_additional_properties: Literal[False] | None = None
    structural_tag: None = None


@dataclass(frozen=True)
class Wanted:
    """What an answer must look like: ``Structured``'s arguments, and what the client calls each."""

    given: Mapping[str, Any]
    called: Mapping[str, str]
    field: str

    @staticmethod
    def of(body: Any) -> Wanted | None:
        """What a request's fields say; None: nothing."""
        found = [
            each for each in (_response_format(body), _structured_outputs(body), _guided(body)) if each is not None
        ]
        if len(found) > 1:
            first, second = found[:2]
            raise Refused(400, f"{second.field}: cannot be used with {first.field}", second.field)
        return found[0] if found else None

    @property
    def json(self) -> Any:
        """The schema, where it is JSON that is wanted, with how its parts are spaced; None: it is something else."""
        if not (self.given.get("json_object") or "json" in self.given):
            return None
        schema = self.given.get("json", _OBJECT)
        try:
            schema = json.loads(schema) if isinstance(schema, str) else schema
        except ValueError as error:
            raise Refused(400, f"{self.field}: is not JSON: {error}", self.field) from None
        schema = {} if schema is True else schema
        if not isinstance(schema, dict):
            raise Refused(400, f"{self.field}: is no schema: {schema!r:.60}", self.field)
        if "whitespace_pattern" in self.given:
            spaced = {"whitespace_pattern": self.given["whitespace_pattern"]}
        else:
            tight = self.given.get("disable_any_whitespace")
            spaced = SPACED | ({"item_separator": ",", "key_separator": ":"} if tight else {})
        return {**schema, "x-guidance": spaced}

    def structured(self, thinking: Thinking | None, token: Token) -> Structured:
        """``thinking``: what may stand before it. A grammar of the client's own begins at once, unless the prompt opens
        the thinking."""
        try:
            if thinking is None or self.given.get("grammar"):
                after = thinking.closing if thinking is not None and thinking.opened else None
                return Structured(**self.given, after=after)
            Structured(**self.given)  # its faults are the client's
            grammar = Grammar(token, thinking)
            if grammar.after is not None:
                return Structured(**self.given, after=grammar.after)
            return Structured(grammar=grammar.held(self._rule()))
        except InvalidParameter as error:
            raise self.renamed(error) from None

    def renamed(self, error: InvalidParameter) -> Refused:
        """An error about ``structured`` as one about what the client sent."""
        field = self.named(error.field)
        return Refused(400, f"{field}: {str(error).removeprefix(error.field).strip()}", field)

    def named(self, field: str) -> str:
        """One of ``Structured``'s arguments ("structured.json"), as the client calls it."""
        return self.called.get(field.removeprefix("structured."), self.field)

    def _rule(self) -> str:
        """The same as a rule of a grammar."""
        if self.given.get("json_object") or "json" in self.given:
            return json_rule(self.json)
        if "choice" in self.given:
            return " | ".join(json.dumps(each) for each in self.given["choice"])
        return f"/{_slashed(self.given['regex'])}/"


def _slashed(regex: str) -> str:
    """With every slash escaped that is not."""
    found, escaped = "", False
    for char in regex:
        found += "\\/" if char == "/" and not escaped else "\\n" if char == "\n" else char
        escaped = char == "\\" and not escaped
    return found


def _response_format(body: Any) -> Wanted | None:
    asked: ResponseFormat | None = body.response_format
    if asked is None or asked.type == "text":
        return None
    field = "response_format"
    if asked.type == "json_object":
        return Wanted({"json_object": True}, {}, field)
    if asked.json_schema is None:
        raise Refused(400, f"{field}.json_schema: is required", f"{field}.json_schema")
    field += ".json_schema.schema"
    if asked.json_schema.schema_ is None:
        return Wanted({"json_object": True}, {}, field)
    return Wanted({"json": asked.json_schema.schema_}, {}, field)


def _structured_outputs(body: Any) -> Wanted | None:
    asked: StructuredOutputs | None = body.structured_outputs
    if asked is None:
        return None
    apart = ("disable_additional_properties", "structural_tag")
    given = {name: value for name, value in asked.model_dump(by_alias=True).items() if value not in (None, False)}
    given = {name: value for name, value in given.items() if name not in apart}
    return Wanted(given, {name: f"structured_outputs.{name}" for name in given}, "structured_outputs")


def _guided(body: Any) -> Wanted | None:
    given = {name: value for name in _GUIDED if (value := getattr(body, name)) is not None}
    if len(given) > 1:
        first, second = list(given)[:2]
        raise Refused(400, f"{second}: cannot be used with {first}", second)
    if not given:
        if body.guided_whitespace_pattern is not None:
            raise Refused(400, "guided_whitespace_pattern: needs guided_json", "guided_whitespace_pattern")
        return None
    [(name, value)] = given.items()
    more = {} if body.guided_whitespace_pattern is None else {"whitespace_pattern": body.guided_whitespace_pattern}
    called = {"whitespace_pattern": "guided_whitespace_pattern"}
    return Wanted({name.removeprefix("guided_"): value} | more, called, name)
