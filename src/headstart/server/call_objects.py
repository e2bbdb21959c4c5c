"""One tool call as JSON, read as it is written: ``{"name": ..., "arguments": {...}}``.

Knows: JSON, character by character, and which keys a call has. Does not know: what stands around it, or who asked.

What is said of a text does not depend on how it is cut into pieces: every character is looked at once, in order.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

__all__ = ["CallObject", "Part"]

ARGUMENTS = ("arguments", "parameters")
_BLANK = " \t\r\n"


@dataclass(frozen=True)
class Part:
    """A part of an answer. ``call``: a call begins, and the text is its name; ``arguments``: more of its arguments."""

    kind: Literal["reasoning", "content", "call", "arguments"]
    text: str
    index: int = 0  # of the call


class _Value:
    """Finds the end of a JSON value. A scalar ends before the character behind it."""

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = self._escaped = self._scalar = False

    def take(self, char: str) -> tuple[bool, bool]:
        """Is the character part of the value, and does the value end with it (or before it)?"""
        if self._quoted:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._quoted = False
                return True, not self._depth
            return True, False
        if self._scalar and (char in ",}]" or char in _BLANK):
            return False, True
        if char == '"':
            self._quoted = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            return True, not self._depth
        elif not self._depth:
            self._scalar = True
        return True, False


class CallObject:
    """Reads one call. ``names``: it is none if its name is not among these; None: any name will do."""

    def __init__(self, index: int, names: Collection[str] | None = None) -> None:
        self._index, self._names = index, names
        self.raw = ""  # all of it, while it may turn out to be no call
        self.done = False
        self.begun = False  # its name is known
        self._step = self._open
        self._text = ""  # of the string or value that is being read
        self._key = ""
        self._value = _Value()
        self._early = ""  # arguments that came before the name
        self._argued = self._settled = False  # arguments began; they are whole, and others behind them do not count
        self._parts: list[Part] = []

    def take(self, char: str) -> bool:
        """One character more; False: it cannot be part of a call, and was not taken."""
        fits = self._step(char)
        if fits and not self.begun:
            self.raw += char
        return fits

    def parts(self) -> list[Part]:
        """What was found since the last time."""
        found, self._parts = self._parts, []
        return found

    # -- what may stand where: each says whether the character fits

    def _open(self, char: str) -> bool:
        if char == "{":
            self._step = self._before_key
        return char == "{" or char in _BLANK

    def _before_key(self, char: str) -> bool:
        if char == '"':
            self._text, self._value, self._step = "", _Value(), self._in_key
            return self._in_key(char)
        return self._close() if char == "}" and not self._key else char in _BLANK

    def _in_key(self, char: str) -> bool:
        _, ended = self._value.take(char)
        self._text += char
        if ended:
            key = _string(self._text)
            self._key, self._step = key or "", self._before_colon
            return bool(key)
        return True

    def _before_colon(self, char: str) -> bool:
        if char == ":":
            self._step = self._before_value
        return char == ":" or char in _BLANK

    def _before_value(self, char: str) -> bool:
        if char in _BLANK:
            return True
        self._text, self._value, self._step = "", _Value(), self._in_value
        return char not in ",}]:" and self._in_value(char)

    def _in_value(self, char: str) -> bool:
        part, ended = self._value.take(char)
        if part:
            self._text += char
            if self._key in ARGUMENTS and not self._text.startswith('"'):  # a text is written out when it is whole
                self._argue(char)
        if not ended:
            return True
        self._step = self._after_value
        return self._ended() and (part or self._after_value(char))

    def _after_value(self, char: str) -> bool:
        if char == ",":
            self._step = self._before_key
            return True
        return self._close() if char == "}" else char in _BLANK

    # -- what it says

    def _ended(self) -> bool:
        """A value is whole."""
        if self._key == "name" and not self.begun:
            name = _string(self._text)
            if not name or (self._names is not None and name not in self._names):
                return False
            self.begun = True
            self._parts.append(Part("call", name, self._index))
            if self._early:
                self._parts.append(Part("arguments", self._early, self._index))
        elif self._key in ARGUMENTS:
            if self._text.startswith('"'):  # JSON as a text, as OpenAI's own messages have it
                self._argue(_string(self._text) or "")
            self._settled = True
        return True

    def _argue(self, text: str) -> None:
        if self._settled:
            return
        self._argued = True
        if self.begun:
            self._parts.append(Part("arguments", text, self._index))
        else:
            self._early += text

    def _close(self) -> bool:
        if not self.begun:
            return False
        if not self._argued:
            self._parts.append(Part("arguments", "{}", self._index))
        self.done = True
        return True


def _string(text: str) -> str | None:
    """A JSON string's text; None: it is none."""
    try:
        found = json.loads(text, strict=False)
    except ValueError:
        return None
    return found if isinstance(found, str) else None
