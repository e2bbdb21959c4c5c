"""What a model wrote, taken apart as it comes: what it thought, what it says, and which tools it calls.

Knows: tags in a text, and the ways in which models write calls. Does not know: tokens, requests, or OpenAI's shapes.

A reply may be pushed in pieces of any size: what comes out, joined, is the same, because it is read character by
character. Text that may be the beginning of a tag is held back until that is known. What turns out to be no call stays
what it was: text. What was cut while it could still become a call is neither.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass
from typing import TypeAlias

from .call_objects import CallObject, Part

__all__ = ["PYTHON_TAG", "Part", "Reading", "Reply", "Thinking", "hermes", "llama3", "mistral", "plain"]

_BLANK = " \t\r\n"
_END = ""  # in the place of a character: nothing more comes
PYTHON_TAG = "<|python_tag|>"
TOOL_CALL = "<tool_call>", "</tool_call>"
TOOL_CALLS = "[TOOL_CALLS]"


class _Out:
    """Collects the parts. Blanks before a call are no content, nor are line breaks around what was thought."""

    def __init__(self, required: bool = False) -> None:
        self.calls = 0
        self.cut = False  # the last of them has no end
        self.truncated = False  # the end is none: more was to come
        self._required = required  # calls, and nothing else
        self.thought = False  # something was, and its end was found
        self._parts: list[Part] = []
        self._blank = self._breaks = ""
        self._begun: set[str] = set()

    def content(self, text: str) -> None:
        if self._required:
            return  # a mark of a call that was cut
        if self.thought and "content" not in self._begun:
            text = text.lstrip("\n")
        whole = self._blank + text
        shown = whole.rstrip(_BLANK)
        self._blank = whole[len(shown) :]
        self._add("content", shown)

    def reasoning(self, text: str) -> None:
        whole = self._breaks + text if "reasoning" in self._begun else text.lstrip("\n")
        shown = whole.rstrip("\n")
        self._breaks = whole[len(shown) :]
        self._add("reasoning", shown)

    def no_call(self, text: str, char: str) -> None:
        """This was not read as a call, because of the character behind it. At an end that is none it may be one."""
        if char != _END or not self.truncated:
            self.content(text)

    def call(self, parts: list[Part]) -> None:
        for part in parts:
            self._blank = ""
            self._add(part.kind, part.text, part.index)

    def _add(self, kind: str, text: str, index: int = 0) -> None:
        if not text:
            return
        self._begun.add(kind)
        last = self._parts[-1] if self._parts else None
        if last is not None and (last.kind, last.index) == (kind, index) and kind != "call":
            self._parts[-1] = Part(last.kind, last.text + text, index)
        else:
            self._parts.append(Part(kind, text, index))  # type: ignore[arg-type]  # one of them

    def taken(self) -> list[Part]:
        found, self._parts = self._parts, []
        return found

    def end(self) -> None:
        self._add("content", self._blank)
        self._blank = ""


#: is sent one character after the other, and ``_END``; says what it finds to an ``_Out``
_Reader: TypeAlias = Generator[None, str, None]
#: makes one, of which calls to other names than these may be none
Reading: TypeAlias = Callable[[_Out, Collection[str]], _Reader]


@dataclass(frozen=True)
class Thinking:
    """How a model marks what it thinks. ``opened``: the prompt's end has the opening mark already."""

    opening: str = "<think>"
    closing: str = "</think>"
    opened: bool = False


class Reply:
    """One reply. ``names``: of the tools that may be called; ``required``: it is made of calls."""

    def __init__(
        self,
        read: Reading,
        names: Collection[str] = (),
        thinking: Thinking | None = None,
        *,
        required: bool = False,
    ) -> None:
        self._out = _Out(required)
        reader = read(self._out, names)
        self._reader = reader if thinking is None else _thinking(self._out, thinking, reader)
        next(self._reader)

    @property
    def calls(self) -> int:
        """Calls that were found so far."""
        return self._out.calls

    @property
    def cut(self) -> bool:
        """Does the last of them lack its end?"""
        return self._out.cut

    def push(self, text: str) -> list[Part]:
        """The parts that the text makes known."""
        for char in text:
            self._reader.send(char)
        return self._out.taken()

    def finish(self, *, truncated: bool = False) -> list[Part]:
        """The last parts, when nothing more comes. ``truncated``: more was to come."""
        self._out.truncated = truncated
        with contextlib.suppress(StopIteration):
            self._reader.send(_END)
        self._out.end()
        return self._out.taken()


# -- readers: each function is given the character that is not read yet, and gives back the next such one


def _until(
    say: Callable[[str], None], tags: tuple[str, ...], char: str
) -> Generator[None, str, tuple[str | None, str]]:
    """Say what stands before one of the tags; which of them it was (None: it ended before any)."""
    held = ""
    while char != _END:
        held += char
        while held and not any(tag.startswith(held) for tag in tags):
            say(held[0])
            held = held[1:]
        char = yield
        if held in tags:
            return held, char
    say(held)
    return None, _END


def _blanks(char: str) -> Generator[None, str, tuple[str, str]]:
    """Blanks, and what stands behind them."""
    found = ""
    while char and char in _BLANK:
        found += char
        char = yield
    return found, char


def _begins(tag: str, char: str) -> Generator[None, str, tuple[str, str]]:
    """As much of the tag as stands here."""
    found = ""
    while char != _END and found != tag and tag.startswith(found + char):
        found += char
        char = yield
    return found, char


def _object(out: _Out, char: str, names: Collection[str] | None = None) -> Generator[None, str, tuple[CallObject, str]]:
    """A call as JSON, or what looks like one."""
    call = CallObject(out.calls, names)
    while char != _END:
        fits = call.take(char)
        out.call(call.parts())
        if not fits:
            break
        char = yield
        if call.done:
            break
    out.calls += call.begun
    out.cut = call.begun and not call.done
    return call, char


def _rest(out: _Out, char: str) -> _Reader:
    while char != _END:
        out.content(char)
        char = yield


def plain(out: _Out, names: Collection[str]) -> _Reader:
    """No calls are looked for."""
    yield from _rest(out, (yield))


def hermes(out: _Out, names: Collection[str]) -> _Reader:
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, any number of them: Hermes, Qwen."""
    opening, closing = TOOL_CALL
    tag, char = yield from _until(out.content, (opening,), (yield))
    while tag is not None:
        call, char = yield from _object(out, char)
        if not call.begun:
            out.no_call(opening + call.raw, char)
            tag, char = yield from _until(out.content, (opening,), char)
            continue
        tag, char = yield from _until(lambda _: None, TOOL_CALL, char)
        if tag == closing:
            tag, char = yield from _until(out.content, (opening,), char)


def mistral(out: _Out, names: Collection[str]) -> _Reader:
    """``[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]``"""
    char = yield
    while True:
        tag, char = yield from _until(out.content, (TOOL_CALLS,), char)
        if tag is None:
            return
        blank, char = yield from _blanks(char)
        raw = tag + blank
        if char != "[":
            out.no_call(raw, char)
            continue
        raw, char = raw + char, (yield)
        while True:
            call, char = yield from _object(out, char)
            if not call.begun:
                out.no_call(raw + call.raw, char)
                break
            blank, char = yield from _blanks(char)
            if char != ",":
                char = (yield) if char == "]" else char
                break
            raw, char = blank + char, (yield)


def llama3(out: _Out, names: Collection[str]) -> _Reader:
    """``{"name": ..., "parameters": {...}}`` and nothing else, ``;`` between several; perhaps ``<|python_tag|>`` before
    them. JSON that is no call to one of the tools is what the model has to say."""
    raw, char = yield from _blanks((yield))
    tag, char = yield from _begins(PYTHON_TAG, char)
    raw += tag
    while char == "{" and tag in ("", PYTHON_TAG):
        call, char = yield from _object(out, char, names)
        if not call.begun:
            out.no_call(raw + call.raw, char)
            raw = ""
            break
        raw, char = yield from _blanks(char)
        if char == ";":
            char = yield
            raw, char = yield from _blanks(char)
            raw = ";" + raw
    out.content(raw)
    yield from _rest(out, char)


def _thinking(out: _Out, tags: Thinking, reader: _Reader) -> _Reader:
    """What was thought; the reader is sent the rest."""
    next(reader)
    char = yield
    if not tags.opened:
        blank, char = yield from _blanks(char)
        opening, char = yield from _begins(tags.opening, char)
        if opening != tags.opening:
            yield from _sent(reader, blank + opening, char)
            return
    tag, char = yield from _until(out.reasoning, (tags.closing,), char)
    out.thought = tag is not None
    yield from _sent(reader, "", char)


def _sent(reader: _Reader, text: str, char: str) -> _Reader:
    for each in text:
        reader.send(each)
    while char != _END:
        reader.send(char)
        char = yield
    with contextlib.suppress(StopIteration):
        reader.send(_END)
