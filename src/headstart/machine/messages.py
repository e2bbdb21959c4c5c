"""What a conversation is made of: messages with a role, a content and perhaps a name.

Knows: which forms of a message are taken, and what each comes to: plain text. Does not know: templates, tokenizers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import InvalidParameter
from ..values import shown

__all__ = ["ROLES", "check_text", "read_messages"]

ROLES = ("system", "user", "assistant", "tool")
_KEYS = ("role", "content", "name")
_FORM = "a list of {'role': ..., 'content': ...}"


def check_text(field: str, text: object) -> None:
    """Refuse what is no text, or text that no tokenizer can read."""
    if not isinstance(text, str):
        raise InvalidParameter(field, f"must be text, not {type(text).__name__}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidParameter(field, f"holds a lone surrogate at character {error.start}") from None


def read_messages(messages: object) -> list[dict[str, str]]:
    """Each message as a role, a content and, where it was given, a name, all of them text.

    A content may be a list of text parts, as in OpenAI's interface; they are joined by line breaks, as vLLM does.
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


def _read(message: object) -> dict[str, str]:
    if not isinstance(message, Mapping):
        raise InvalidParameter("messages", f"must be {_FORM}, not of {shown(message)}")
    # None or an empty list says the same as a key that is not there: clients send all the keys they know.
    absent = [key for key, value in message.items() if value is None or (isinstance(value, list) and not value)]
    given = {key: value for key, value in message.items() if key not in absent}
    if "tool_calls" in given or "function_call" in given:
        raise InvalidParameter("messages", "hold a tool call, which is not supported: write it as text in the content")
    if unknown := [repr(key) for key in given if key not in _KEYS]:
        raise InvalidParameter("messages", f"take a role, a content and a name, not {', '.join(unknown)}")
    if missing := [key for key in ("role", "content") if key not in given]:
        raise InvalidParameter("messages", f"need a {' and a '.join(missing)}")
    if given["role"] not in ROLES:
        raise InvalidParameter("messages", f"take the roles {', '.join(ROLES)}, not {shown(given['role'])}")
    found = {**given, "content": _text_of(given["content"])}
    for text in found.values():
        check_text("messages", text)
    return found


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
