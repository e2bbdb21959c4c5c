"""Messages of a conversation as clients send them, and what they set for the chat template.

Knows: OpenAI's roles, parts and tool calls. Does not know: what a chat template makes of them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field

from .errors import Refused
from .records import Count, Many, Record

__all__ = ["Message", "Part", "Parts", "TemplateOptions"]

MAX_PARTS = 4096  # of a message, and tool calls
MAX_OPTIONS, MAX_OPTION = 16, 1024  # of a chat template; characters of one


def _plain_values(values: Any) -> Any:
    """Names and plain values of a template's options. The template says which of them it has."""
    field, why = "chat_template_kwargs", None
    if not isinstance(values, dict):
        why = 'must be an object such as {"enable_thinking": false}'
    elif len(values) > MAX_OPTIONS:
        why = f"must hold at most {MAX_OPTIONS}"
    elif not all(value is None or type(value) in (bool, int, str) for value in values.values()):
        why = "its values must be text, whole numbers, true, false or null"
    elif any(type(value) is int and abs(value) >= 2**31 for value in values.values()):
        why = "holds a number beyond 32 bits"
    elif any(len(text) > MAX_OPTION for pair in values.items() for text in pair if isinstance(text, str)):
        why = f"holds a text of more than {MAX_OPTION} characters"
    if why is not None:
        raise Refused(400, f"{field}: {why}", field)
    return values


TemplateOptions: TypeAlias = Annotated[dict[str, Any], BeforeValidator(_plain_values)]


class Part(Record):
    type: Literal["text"]
    text: str


Parts: TypeAlias = Annotated[Many[Part], Field(max_length=MAX_PARTS)]


class _Called(Record):
    name: Annotated[str, Field(min_length=1)]
    arguments: str  # JSON


class _Call(Record):
    """A tool call that the model made before."""

    id: str | None = None
    type: Literal["function"] | None = None
    function: _Called
    index: Count | None = None  # of those that were put together from a stream


class Message(Record):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Parts | None = None
    name: str | None = None
    refusal: None = None
    audio: None = None
    tool_calls: Annotated[Many[_Call], Field(max_length=MAX_PARTS)] | None = None
    function_call: None = None
    tool_call_id: str | None = None
    reasoning: str | None = None  # as an answer has it
    reasoning_content: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """As ``LLM.chat`` takes it."""
        if self.content is None and not self.tool_calls:
            raise Refused(400, f"messages: a message of the role {self.role} has no content", "messages")
        content = (
            self.content if isinstance(self.content, (str, type(None))) else [p.model_dump() for p in self.content]
        )
        found: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": content}
        if self.tool_calls:
            found["tool_calls"] = [
                {"id": call.id, "type": "function", "function": call.function.model_dump()} for call in self.tool_calls
            ]
        thought = self.reasoning if self.reasoning is not None else self.reasoning_content
        more = {"name": self.name, "tool_call_id": self.tool_call_id, "reasoning_content": thought}
        return found | {name: value for name, value in more.items() if value is not None}
