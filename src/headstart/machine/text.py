"""Text to token ids and back: prompts, chats, and the text of a running answer.

Knows: one Hugging Face tokenizer and its chat template; how to turn a stream of ids into a stream of text that is
never taken back; how to find a stop string before any of it has left the house.
Does not know: models, requests, sampling, which ids end an answer (``machine/load/loading.py`` does), what a message
may be (``machine/messages.py`` does), or how a chat is kept from being forged (``machine/control_tokens.py`` does).

A character that is split over tokens is shown when it is complete. U+FFFD appears only where the ids really hold
broken UTF-8, or that very character. tokenizers' own DecodeStream was tried against the same tests: it has no flush, so
it loses what it holds when an answer ends, it holds broken bytes back for ever, and it needs a Rust tokenizer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from inspect import signature
from typing import Any

from ..errors import InvalidParameter, ModelRefused, PromptTooLong
from .control_tokens import ControlGuard
from .infill import Infill
from .messages import check_text, read_messages
from .token_bytes import TokenBytes

__all__ = ["Detokenizer", "StopChecker", "TextCodec", "TextStream"]

_REPLACEMENT = "\ufffd"
_CONTEXT = 8  # prompt ids in front of the answer: enough to know that its first word is not the first of a text
_HOLD = 32  # ids that may wait for the rest of a character. A character is at most 4 bytes; more than this is garbage
_OPTIONS = "chat_template_kwargs"  # as vLLM and its clients call them
_NAMED = ("arguments", "parameters")  # what stands below these, in tool calls and tools, has keys of somebody's own


class TextCodec:
    """One tokenizer, as the rest of Headstart uses it. Never changes the tokenizer; threads may share it."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # None for tokenizers that are written in Python
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        added = tokenizer.added_tokens_decoder
        special = {token for token, each in added.items() if each.special}
        self.special_ids: frozenset[int] = frozenset(special | set(tokenizer.all_special_ids))
        self._added = {each.content: int(token) for token, each in added.items()}

    @property
    def vocab_size(self) -> int:
        """Ids the tokenizer has; the model's output head may have more (padding)."""
        return len(self._tokenizer)

    def encode(self, text: str, *, most: int | None = None) -> list[int]:
        """A raw prompt, the way the tokenizer does it by default: BOS and the like are added, control tokens count.
        ``most``: see ``check_length``."""
        check_text("prompt", text)
        self.check_length(text, most)
        return list(self._tokenizer.encode(text))

    def encode_prediction(self, text: str) -> list[int]:
        """Text expected in the answer: no BOS, nothing in front of it."""
        check_text("prediction", text)
        return self._encode_bare(text)

    def check_length(self, text: str, most: int | None) -> None:
        """Refuse a text that has more than ``most`` tokens, whatever they are, without tokenizing it: megabytes take
        seconds. Many a text that is too long passes."""
        if most is None or len(text) <= most or self._token_bytes is None:
            return
        if (fewest := self._token_bytes.fewest(text)) > most:
            raise PromptTooLong(
                "prompt", f"has {fewest} tokens or more; max_model_len is {most} and counts the answer too"
            )

    def check_ids(self, field: str, ids: Sequence[int]) -> None:
        """Refuse ids that the tokenizer does not have, and could not spell."""
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise InvalidParameter(field, f"holds token ids outside the vocabulary of {self.vocab_size}")

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Text of these ids, with or without the special ones. Spaces are left as they are: HF's clean-up is off."""
        if self._backend is not None:
            text: str = self._backend.decode(list(ids), skip_special_tokens=not special)
        else:
            text = self._tokenizer.decode(
                list(ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False
            )
        return text

    def spell(self, token: int) -> str:
        """The text of one token by itself, special ones too. Part of a character is a replacement character."""
        return str(self._tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False))

    @cached_property
    def template(self) -> str | None:
        """The chat template, that for tools where there are several; None: there is none."""
        if not getattr(self._tokenizer, "chat_template", None):
            return None
        try:
            return str(self._tokenizer.get_chat_template(tools=[{}]))
        except ValueError:  # several, and none of them is the default
            return None

    @property
    def takes_tools(self) -> bool:
        """Has the chat template a place for tools?"""
        return re.search(r"\btools\b", self.template or "") is not None

    def added_id(self, text: str) -> int | None:
        """The token of that spelling beside the tokenizer's vocabulary proper, special or not, if there is one."""
        return self._added.get(text)

    def special_id(self, text: str) -> int | None:
        """The special token of that spelling, if there is one."""
        token = self._added.get(text)
        return token if token in self.special_ids else None

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
        most: int | None = None,
    ) -> list[int]:
        """Messages through the tokenizer's own chat template, up to where the assistant's answer begins.
        ``tools``: those that the model is told of, as templates want them. ``options``: variables of the template, such
        as ``enable_thinking``. ``most``: see ``check_length``."""
        if not getattr(self._tokenizer, "chat_template", None):
            raise ModelRefused("this model has no chat template: use generate with a raw prompt instead of chat")
        read = read_messages(messages)
        if any("tool_calls" in message for message in read) and "tool_calls" not in (self.template or "tool_calls"):
            raise InvalidParameter("messages", "hold tool calls, for which this model's chat template has no place")
        found: set[str] = set()
        marked = [
            {k: v if k == "role" else self._marked(v, message["role"], k, found) for k, v in message.items()}
            for message in read
        ]
        told = self._marked(list(tools), "user", "tools", found)
        set_to = self._marked(self._options(options or {}), "user", "options", found)
        if not found:
            text = self._render(read, tools, set_to)
            self.check_length(text, most)
            return self._encode_bare(text)
        text = self._render(marked, told, set_to)
        self.check_length(self._guard.unmarked(text), most)
        return self._guard.encode(text, found)

    def _options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The same, if the template asks for each of them, and none of them is for others to give."""
        if not options:
            return {}
        given = signature(self._tokenizer.apply_chat_template).parameters.keys() | {"messages"}
        for name, value in options.items():
            if name in given or name.endswith("_token"):
                raise InvalidParameter(_OPTIONS, f"may not hold {name!r:.70}, which every chat has by itself")
            if not name.isidentifier() or re.search(rf"\b{name}\b", self.template or "") is None:
                raise InvalidParameter(
                    _OPTIONS, f"holds {name!r:.70}, for which this model's chat template has no place; leave it out"
                )
            if isinstance(value, str):
                check_text(_OPTIONS, value)
        return dict(options)

    def _marked(self, value: Any, role: str, key: str, found: set[str], *, named: bool = False) -> Any:
        """The same with marks in all that somebody wrote (see ``ControlGuard``); ``found``: what was marked.
        ``named``: somebody chose the keys, too. Others are the form's own, and templates look for them."""
        if isinstance(value, str):
            own_words = role == "assistant" and key != "name"
            text, suspects = self._guard.mark(value, own_words=own_words)
            found |= suspects
            return text
        if isinstance(value, Mapping):
            return {
                self._marked(k, role, key, found) if named else k: self._marked(
                    v, role, key, found, named=named or k in _NAMED
                )
                for k, v in value.items()
            }
        if isinstance(value, list):
            return [self._marked(each, role, key, found, named=named) for each in value]
        return value

    @cached_property
    def infill(self) -> Infill:
        """How it fills in the middle. ``InvalidParameter`` where it has no tokens for that."""
        return Infill.of(self._tokenizer)

    @cached_property
    def _token_bytes(self) -> TokenBytes | None:
        return None if self._backend is None else TokenBytes.of(self._backend)

    @cached_property
    def _guard(self) -> ControlGuard:
        try:
            return ControlGuard(self._tokenizer)
        except ValueError as error:  # several templates, and none of them is the default
            raise ModelRefused(f"this model's chat template cannot be chosen: {error}") from error

    def _encode_bare(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> str:
        fixed = {"tools": list(tools) or None, "tokenize": False, "add_generation_prompt": True}
        try:
            text = self._tokenizer.apply_chat_template(list(messages), **{**options, **fixed})
        except ImportError:
            raise  # transformers says what to install
        except Exception as error:  # the template's own complaint (the order of roles, say), or its own fault
            raise InvalidParameter("messages", f"do not fit the model's chat template: {error}") from error
        return str(text)


class Detokenizer:
    """The text of one growing sequence. What ``push`` returns is final.

    Decodes a short window: the ids behind the last text shown (they tell the tokenizer that the next word is not
    the first of a text, so that its space is kept) and the ids since. Special ids are skipped, unless ``special``.
    """

    def __init__(self, codec: TextCodec, prompt_ids: Sequence[int] = (), *, special: bool = False) -> None:
        self._codec, self._special = codec, special
        self._window: list[int] = []
        self._rebase([token for token in prompt_ids[-_CONTEXT:] if token not in codec.special_ids])

    def _rebase(self, context: list[int]) -> None:
        """Start a new window with ids whose text has been shown."""
        self._window = context
        self._context = len(context)
        self._base = self._shown = len(self._decode(context).rstrip(_REPLACEMENT)) if context else 0

    def push(self, token_id: int) -> str:
        """The text that this id settles; empty while a character is incomplete."""
        if not self._special and token_id in self._codec.special_ids:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        stable = text.rstrip(_REPLACEMENT)  # any of these may be the beginning of a character
        piece, held = stable[self._shown :], text[max(self._shown, len(stable)) :]
        if piece and not held:  # without new text the id may be half a character that the tokenizer shows as nothing
            self._rebase(self._window[self._context :])
        elif len(self._window) - self._context > _HOLD:  # broken UTF-8: show it, but for the last character
            piece += held[:-1]
            self._rebase(self._window[-4:])
            self._shown = len(self._decode(self._window)) - len(held[-1:])
        else:
            self._shown = max(self._shown, len(stable))
        return piece

    def _decode(self, ids: list[int]) -> str:
        return self._codec.decode(ids, special=self._special)

    def flush(self) -> str:
        """What is left at the end: a real U+FFFD, if that is what the ids spell. Half a character is dropped."""
        text, pending = self._decode(self._window), self._window[self._context :]
        held = text[self._shown :]
        if held and self._codec.encode_prediction(text[self._base :]) != pending:
            held = ""
        self._rebase([])
        return held


class StopChecker:
    """Finds stop strings in a text that comes in pieces, and shows nothing that may still become one.

    The stop string that is complete first ends the text, whatever the pieces are; where two end at one character,
    the longer. Neither it nor anything behind it is shown.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._failure = [_failure_table(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)  # how much of each stop string the text ends with
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> tuple[str, bool]:
        """The text that can be shown now, and whether a stop string has been found."""
        if self.stopped:
            return "", True
        if not self._stops:
            return text, False
        whole = self._held + text
        for position, character in enumerate(text, start=len(self._held) + 1):
            found = self._step(character)
            if found:
                self.stopped, self._held = True, ""
                return whole[: position - found], True
        keep = len(whole) - max(self._matched)
        self._held = whole[keep:]
        return whole[:keep], False

    def _step(self, character: str) -> int:
        """One character on, by Knuth, Morris and Pratt; the length of the stop string it completes, or 0."""
        found = 0
        for index, (stop, table) in enumerate(zip(self._stops, self._failure, strict=True)):
            self._matched[index] = length = _longer(stop, table, self._matched[index], character)
            if length == len(stop):
                found = max(found, length)
        return found

    def flush(self) -> str:
        """The text held back, once it is known that no more will come."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held


def _failure_table(text: str) -> list[int]:
    """For each beginning of the text: the length of its longest proper ending that is a beginning, too."""
    table = [0]
    for character in text[1:]:
        table.append(_longer(text, table, table[-1], character))
    return table


def _longer(text: str, table: Sequence[int], length: int, character: str) -> int:
    """How much of the text's beginning stands at an end that held ``length`` of it, with one character more."""
    while length and text[length] != character:
        length = table[length - 1]
    return length + (text[length] == character)


class TextStream:
    """Ids in, text out, for one running sequence."""

    def __init__(
        self, codec: TextCodec, prompt_ids: Sequence[int], stops: Sequence[str] = (), *, special: bool = False
    ) -> None:
        self._detokenizer = Detokenizer(codec, prompt_ids, special=special)
        self._checker = StopChecker(stops)

    def push(self, token_id: int, *, check_stop: bool = True) -> tuple[str, bool]:
        """The text this id lets out, and whether a stop string ends the sequence with it.

        ``check_stop`` False: too early to stop (min_tokens). The text goes out, and no stop string can begin in it.
        """
        if self._checker.stopped:
            return "", True
        text = self._detokenizer.push(token_id)
        return self._checker.push(text) if check_stop else (self._checker.flush() + text, False)

    def finish(self) -> str:
        """The last text, when the sequence ends for another reason than a stop string."""
        text, stopped = self._checker.push(self._detokenizer.flush())
        return text if stopped else text + self._checker.flush()
