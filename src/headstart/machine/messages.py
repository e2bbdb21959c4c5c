"""What a conversation is made of: messages with a role, a content, and perhaps a name, thoughts or tool calls.

Knows: which forms of a message are taken, and what each comes to: plain text, and calls as chat templates want them.
Does not know: templates, tokenizers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..errors import InvalidParameter
from ..values import shown

__all__ = ["ROLES", "check_text", "read_messages"]

ROLES = ("system", "user", "assistant", "tool")
_KEYS = ("role", "content", "name")
_OF_ROLE = {"tool_calls": "assistant", "reasoning_content": "assistant", "tool_call_id": "tool"}
_FORM = "a list of {'role': ..., 'content': ...}"


def check_text(field: str, text: object) -> None:
    """Refuse what is no text, or text that no tokenizer can read."""
    if not isinstance(text, str):
        raise InvalidParameter(field, f"must be text, not {type(text).__name__}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidParameter(field, f"holds a lone surrogate at character {error.start}") from None


def read_messages(messages: object) -> list[dict[str, Any]]:
    """Each message as a role, a content and, where they were given, a name, a ``tool_call_id`` and
    ``reasoning_content``, all of them text, and ``tool_calls``, whose arguments are objects.

    A content may be a list of text parts, as in OpenAI's interface; they are joined by line breaks, as vLLM does. One
    that calls tools may do without.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise InvalidParameter("messages", f"must be {_FORM}, not {shown(messages)}")
    if not messages:
        raise InvalidParameter("messages", "must hold at least one message")
    found = []
    for index, message in enumerate(messages):
        try:
            found.append(_read(message))
        except InvalidParameter as error:
            error.about("message", index)
            raise
    return found


def _read(message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidParameter("messages", f"must be {_FORM}, not of {shown(message)}")
    # None or an empty list says the same as a key that is not there: clients send all the keys they know.
    absent = [key for key, value in message.items() if value is None or (isinstance(value, list) and not value)]
    given = {key: value for key, value in message.items() if key not in absent}
    if "function_call" in given:
        raise InvalidParameter("messages", "hold a function_call, which is not supported: use tool_calls")
    if unknown := [repr(key) for key in given if key not in _KEYS and key not in _OF_ROLE]:
        raise InvalidParameter("messages", f"take a role, a content and a name, not {', '.join(unknown)}")
    given = {"content": "", **given} if "tool_calls" in given else given
    if missing := [key for key in ("role", "content") if key not in given]:
        raise InvalidParameter("messages", f"need a {' and a '.join(missing)}")
    if given["role"] not in ROLES:
        raise InvalidParameter("messages", f"take the roles {', '.join(ROLES)}, not {shown(given['role'])}")
    for key, role in _OF_ROLE.items():
        if key in given and given["role"] != role:
            raise InvalidParameter("messages", f"take {key} from the role {role} only")
    found = {**given, "content": _text_of(given["content"])}
    if "tool_calls" in given:
        found["tool_calls"] = [_call(call) for call in given["tool_calls"]]
    for key, value in found.items():
        for text in _texts(value) if key == "tool_calls" else [value]:
            check_text("messages", text)
    return found


def _call(call: Any) -> dict[str, Any]:
    """A tool call, its arguments as an object: templates write them out themselves."""
    try:
        function = call["function"]
        name, arguments = function["name"], function["arguments"]
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        if not isinstance(name, str) or not isinstance(arguments, Mapping):
            raise ValueError
    except (KeyError, TypeError, ValueError, RecursionError):
        form = "{'function': {'name': ..., 'arguments': a JSON object}}"
        raise InvalidParameter("messages", f"need a tool call such as {form}, not {shown(call)}") from None
    found = {"type": "function", "function": {"name": name, "arguments": dict(arguments)}}
    return {"id": call["id"], **found} if call.get("id") is not None else found


def _texts(value: Any) -> Iterator[Any]:
    """All texts in it, those that name its parts too."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield key
            yield from _texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)
    elif isinstance(value, str):
        yield value


def _text_of(content: Any) -> Any:
    """A content as it is, or the text of its parts."""
    if not isinstance(content, (list, tuple)):
        return content
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else part
        if kind != "text" or not isinstance(part, Mapping):
            raise InvalidParameter(
                "messages", f"may only have parts like {{'type': 'text', 'text': ...}}, not {shown(kind)}"
            )
        if set(part) != {"type", "text"} or not isinstance(part["text"], str):
            raise InvalidParameter("messages", f"need a text and nothing else in a part of text, not {shown(part)}")
        texts.append(part["text"])
    return "\n".join(texts)
