"""Tools that a client offers, and which of them are to be called.

Knows: OpenAI's fields. Does not know: how a model writes a call (``tool_formats``), or how one is read (``replies``).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, StrictBool, field_validator

from .errors import Refused
from .records import Record

__all__ = ["MAX_TOOLS", "Tool", "ToolChoice", "Toolbox"]

MAX_TOOLS = 128
_Name: TypeAlias = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class Function(Record):
    name: _Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: StrictBool | None = None  # calls are always held to their schema

    @field_validator("parameters")
    @classmethod
    def _an_object(cls, given: dict[str, Any] | None) -> dict[str, Any] | None:
        kinds = (given or {}).get("type", "object")
        if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
            raise ValueError(f"arguments are an object, so its type must be 'object', not {kinds!r:.60}")
        return given


class Tool(Record):
    type: Literal["function"]
    function: Function

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        """Always an object. Without one: no arguments."""
        given = self.function.parameters
        if not given:
            return {"type": "object", "properties": {}, "additionalProperties": False}
        return given | {"type": "object"}

    def as_dict(self) -> dict[str, Any]:
        """As chat templates expect it."""
        function = {"name": self.function.name, "description": self.function.description or ""}
        return {"type": "function", "function": function | {"parameters": self.schema_of_arguments}}


class _Named(Record):
    name: _Name


class _ToolNamed(Record):
    type: Literal["function"]
    function: _Named


ToolChoice: TypeAlias = Literal["none", "auto", "required"] | _ToolNamed


@dataclass(frozen=True)
class Toolbox:
    """The tools of one request, and what is asked of the model."""

    tools: Sequence[Tool]  # that may be called
    shown: Sequence[Tool]  # that the model is told of
    required: bool  # it has to call one
    many: bool  # it may call several
    named: bool  # the client said which

    @staticmethod
    def of(tools: Sequence[Tool] | None, choice: ToolChoice | None, parallel: bool | None) -> Toolbox | None:
        """None: there is nothing to call."""
        tools = tools or ()
        named = None if choice is None or isinstance(choice, str) else choice.function.name
        if not tools:
            if named is not None or choice == "required":
                raise Refused(400, "tool_choice: needs tools", "tool_choice")
            return None
        try:
            json.dumps([tool.as_dict() for tool in tools], ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise Refused(400, "tools: hold half of a surrogate pair, which is no character", "tools") from None
        names = [tool.function.name for tool in tools]
        if twice := next((name for place, name in enumerate(names) if name in names[:place]), None):
            raise Refused(400, f"tools: holds {twice!r} twice", "tools")
        if choice == "none":
            return None
        chosen = tools if named is None else [tool for tool in tools if tool.function.name == named]
        if not chosen:
            raise Refused(400, f"tool_choice: names {named!r}, which is not among the tools", "tool_choice")
        many = parallel is not False and named is None
        return Toolbox(chosen, tools, required=named is not None or choice == "required", many=many, named=bool(named))

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tool.function.name for tool in self.tools)
