"""What clients get: whole answers and chunks of streams, in OpenAI's shapes.

Knows: the shapes, and which of a request's choices are shown. Does not know: HTTP, who asks, or how log-probabilities
and statistics are written (``figures``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ..types import Choice, Completion, Piece, TokenLogprob
from .figures import Spelling, said_in_chat, said_in_text, said_of_prompt, statistics_of, usage_of
from .reasoning import Reasoning
from .replies import Part, Reply
from .tool_formats import ToolFormat

__all__ = ["Chats", "Prompt", "Texts", "Writer"]


@dataclass
class Writer:
    """Writes the answers to one call."""

    id: str
    model: str
    spelling: Spelling
    n: int = 1  # choices of each prompt that are shown
    logprobs: bool = False
    prompt_logprobs: int | None = None  # vLLM's field: so many of the likeliest tokens
    statistics: bool = False
    origins: bool = False
    echo: Sequence[str] | None = None  # the prompts' texts, where they stand before the answers
    created: int = field(default_factory=lambda: int(time.time()))
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    prompt_field: ClassVar[str]  # in which clients send their prompts

    def whole(self, answers: Sequence[Completion]) -> dict[str, Any]:
        choices = [
            self._choice(number * self.n + place, number, choice, answer)
            for number, answer in enumerate(answers)
            for place, choice in enumerate(best(answer.choices, self.n))
        ]
        return self._head(self.kind) | {"choices": choices} | self._spent(answers)

    def chunks(self, number: int, pieces: Sequence[Piece], prompt: Prompt | None = None) -> list[dict[str, Any]]:
        """What a round wrote of the answer to one prompt, given by its number: a chunk for each of its choices.
        ``prompt``: for those who repeat it."""
        by_choice: dict[int, list[Piece]] = {}
        for piece in pieces:
            by_choice.setdefault(piece.index, []).append(piece)
        found = []
        for index, own in by_choice.items():
            choice = self._delta(number * self.n + index, number, own, prompt)
            if self.origins:
                choice["origins"] = [piece.origin for piece in own if piece.token_id is not None]
            if self.origins or _says(choice):
                found.append(self._head(self.chunk_kind) | {"choices": [choice]})
        return found

    def last(self, answers: Sequence[Completion]) -> dict[str, Any]:
        """The chunk behind all choices, with what was used."""
        return self._head(self.chunk_kind) | {"choices": []} | self._spent(answers)

    def metrics(self, answers: Sequence[Completion]) -> dict[str, Any]:
        """What speculation did, where that was asked for."""
        every = (choice for answer in answers for choice in answer.choices)
        return {"metrics": statistics_of(every)} if self.statistics else {}

    def first(self, choices: int) -> list[dict[str, Any]]:
        """Chunks before anything was written."""
        return []

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _spent(self, answers: Sequence[Completion]) -> dict[str, Any]:
        return {"usage": usage_of(answers, self._thought(answers))} | self.metrics(answers)

    def _thought(self, answers: Sequence[Completion]) -> int:
        """Tokens that were spent on thinking."""
        return 0

    def _choice(self, index: int, number: int, choice: Choice, answer: Completion) -> dict[str, Any]:
        raise NotImplementedError

    def _delta(self, index: int, number: int, pieces: Sequence[Piece], prompt: Prompt | None) -> dict[str, Any]:
        raise NotImplementedError


def _says(choice: dict[str, Any]) -> bool:
    """Is there anything in it? Not where all that was written is the mark before a tool call, or half a character."""
    written = choice.get("delta") or choice.get("text")
    return bool(written) or choice["finish_reason"] is not None or choice["logprobs"] is not None


@dataclass(frozen=True)
class Prompt:
    """A prompt, to be repeated."""

    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprob | None] | None


def best(choices: Sequence[Choice], n: int) -> Sequence[Choice]:
    """``best_of``: the n choices whose tokens are likeliest on average, the best first; the earlier of two alike."""
    if n >= len(choices):
        return choices

    def mean(choice: Choice) -> float:
        known = choice.logprobs or ()
        return sum(each.logprob for each in known) / len(known) if known else 0.0

    return sorted(choices, key=mean, reverse=True)[:n]


@dataclass
class Chats(Writer):
    """``/v1/chat/completions``. ``reply``: takes an answer apart, given its prompt; None: all of it is content."""

    kind, chunk_kind, prompt_field = "chat.completion", "chat.completion.chunk", "messages"
    reply: Callable[[Sequence[int]], Reply] | None = None
    reasoning: Reasoning | None = None
    format: ToolFormat | None = None
    named: bool = False  # the client said which tool to call
    _replies: dict[int, Reply] = field(default_factory=dict)  # of streams, by choice

    def whole(self, answers: Sequence[Completion]) -> dict[str, Any]:
        found = super().whole(answers)
        if self.prompt_logprobs is not None:
            found["prompt_logprobs"] = said_of_prompt(self.spelling, answers[0].prompt_logprobs, self.prompt_logprobs)
        return found

    def first(self, choices: int) -> list[dict[str, Any]]:
        start = {"role": "assistant", "content": "", "refusal": None}
        return [
            self._head(self.chunk_kind)
            | {"choices": [{"index": index, "delta": start, "logprobs": None, "finish_reason": None}]}
            for index in range(choices)
        ]

    def _thought(self, answers: Sequence[Completion]) -> int:
        if self.reasoning is None:
            return 0
        each = [(answer.prompt_token_ids, choice) for answer in answers for choice in answer.choices]
        return sum(self.reasoning.tokens(prompt, choice.text, choice.token_ids) for prompt, choice in each)

    def _choice(self, index: int, number: int, choice: Choice, answer: Completion) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        reason: str | None = choice.finish_reason
        if self.reply is not None:
            reply = self.reply(answer.prompt_token_ids)
            parts = self._written([*reply.push(choice.text), *reply.finish(truncated=reason == "length")])
            calls = parts.pop("tool_calls", [])
            message |= {"content": None if calls else "", **parts}
            if calls:
                message["tool_calls"] = [{k: v for k, v in call.items() if k != "index"} for call in calls]
            reason = self._reason(reason, reply)
        return {
            "index": index,
            "message": message,
            "logprobs": said_in_chat(self.spelling, choice.logprobs or ()) if self.logprobs else None,
            "finish_reason": reason,
        }

    def _delta(self, index: int, number: int, pieces: Sequence[Piece], prompt: Prompt | None) -> dict[str, Any]:
        text = "".join(piece.text for piece in pieces)
        known = [piece.logprob for piece in pieces if piece.logprob is not None]
        delta: dict[str, Any] = {"content": text} if text or known else {}
        reason: str | None = pieces[-1].finish_reason
        if self.reply is not None:
            assert prompt is not None
            if index not in self._replies:
                self._replies[index] = self.reply(prompt.token_ids)
            reply = self._replies[index]
            parts = reply.push(text)
            parts += reply.finish(truncated=reason == "length") if reason is not None else []
            delta = self._written(parts) or ({"content": ""} if known else {})
            reason = self._reason(reason, reply)
        return {
            "index": index,
            "delta": delta,
            "logprobs": said_in_chat(self.spelling, known) if self.logprobs and known else None,
            "finish_reason": reason,
        }

    def _written(self, parts: Sequence[Part]) -> dict[str, Any]:
        """Parts of a reply as fields of a message, whole or not."""
        found: dict[str, Any] = {}
        calls: dict[int, dict[str, Any]] = {}
        for part in parts:
            if part.kind == "call":
                assert self.format is not None
                function = {"name": part.text, "arguments": ""}
                calls[part.index] = {
                    "index": part.index,
                    "id": self.format.new_id(),
                    "type": "function",
                    "function": function,
                }
            elif part.kind == "arguments":
                call = calls.setdefault(part.index, {"index": part.index, "function": {"arguments": ""}})
                call["function"]["arguments"] += part.text
            else:
                for name in ("reasoning", "reasoning_content") if part.kind == "reasoning" else ("content",):
                    found[name] = found.get(name, "") + part.text
        return found | ({"tool_calls": list(calls.values())} if calls else {})

    def _reason(self, reason: str | None, reply: Reply) -> str | None:
        """OpenAI's: an answer that called the tool it was told to call has just stopped. So has one that was stopped
        within a call, by a text of the client's: nobody can make that call."""
        called = reply.calls and not reply.cut and not self.named
        return "tool_calls" if reason == "stop" and called else reason


@dataclass
class Texts(Writer):
    """``/v1/completions``"""

    kind = chunk_kind = "text_completion"
    prompt_field = "prompt"
    _written: dict[int, int] = field(default_factory=dict)  # characters of each choice's tokens

    def _choice(self, index: int, number: int, choice: Choice, answer: Completion) -> dict[str, Any]:
        prompt = Prompt(answer.prompt_token_ids, answer.prompt_logprobs)
        logprobs = self._said(index, choice.logprobs or (), prompt) if self.logprobs else None
        text = choice.text if self.echo is None else self.echo[number] + choice.text
        found = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": choice.finish_reason}
        if self.prompt_logprobs is not None:
            found["prompt_logprobs"] = said_of_prompt(self.spelling, answer.prompt_logprobs, self.prompt_logprobs)
        return found

    def _delta(self, index: int, number: int, pieces: Sequence[Piece], prompt: Prompt | None) -> dict[str, Any]:
        text = "".join(piece.text for piece in pieces)
        if self.echo is not None and index not in self._written:
            text = self.echo[number] + text
        known = [piece.logprob for piece in pieces if piece.logprob is not None]
        first = index not in self._written
        logprobs = self._said(index, known, prompt) if self.logprobs and (known or first) else None
        self._written.setdefault(index, 0)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": pieces[-1].finish_reason}

    def _said(self, index: int, logprobs: Sequence[TokenLogprob], prompt: Prompt | None) -> dict[str, Any]:
        """Those of the prompt stand before a choice's first ones, where it is repeated."""
        known: list[tuple[int, TokenLogprob | None]] = [(each.token_id, each) for each in logprobs]
        if self.echo is not None and index not in self._written and prompt is not None:
            said = prompt.logprobs or [None] * len(prompt.token_ids)
            known = [*zip(prompt.token_ids, said, strict=True), *known]
        found, self._written[index] = said_in_text(self.spelling, known, self._written.get(index, 0))
        return found
