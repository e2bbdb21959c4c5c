"""What clients get: whole answers and chunks of streams, in OpenAI's shapes.

Knows: the shapes, and how log-probabilities, usage and statistics are written. Does not know: HTTP, or who asks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ..types import Choice, Completion, Piece, TokenLogprob

__all__ = ["Chats", "Texts", "Writer", "usage_of"]

Spell = Callable[[int], str]  # a token's text


def usage_of(answers: Sequence[Completion]) -> dict[str, Any]:
    prompt = sum(len(answer.prompt_token_ids) for answer in answers)
    written = sum(len(choice.token_ids) for answer in answers for choice in answer.choices)
    cached = sum(answer.choices[0].stats.cached_tokens for answer in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def statistics_of(choices: Iterable[Choice]) -> dict[str, Any]:
    """What speculation did, in vLLM's names where it has one; ``acceptance_length`` (tau) is over all rounds."""
    stats = [choice.stats for choice in choices]
    drafted, accepted = sum(s.drafted for s in stats), sum(s.accepted for s in stats)
    tokens, rounds = sum(s.tokens for s in stats), sum(s.rounds for s in stats)
    return {
        "speculative_decoding": {
            "num_draft_tokens": drafted,
            "num_accepted_draft_tokens": accepted,
            "draft_acceptance_rate": accepted / drafted if drafted else None,
            "num_rounds": rounds,
            "acceptance_length": tokens / rounds if rounds else None,
        }
    }


@dataclass
class Writer:
    """Writes the answers to one call. ``offset``: the index of the first choice of each prompt's answer."""

    id: str
    model: str
    spell: Spell
    logprobs: bool = False
    statistics: bool = False
    origins: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def whole(self, answers: Sequence[Completion]) -> dict[str, Any]:
        choices, at = [], 0
        for answer in answers:
            for choice in answer.choices:
                choices.append(self._choice(at + choice.index, choice))
            at += len(answer.choices)
        return self._head(self.kind) | {"choices": choices} | self._spent(answers)

    def chunks(self, offset: int, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        """What a round wrote: a chunk for each of its choices."""
        by_choice: dict[int, list[Piece]] = {}
        for piece in pieces:
            by_choice.setdefault(piece.index, []).append(piece)
        found = []
        for index, own in by_choice.items():
            choice = self._delta(offset + index, own)
            if self.origins:
                choice["origins"] = [piece.origin for piece in own if piece.token_id is not None]
            found.append(self._head(self.chunk_kind) | {"choices": [choice]})
        return found

    def last(self, answers: Sequence[Completion]) -> dict[str, Any]:
        """The chunk behind all choices, with what was used."""
        return self._head(self.chunk_kind) | {"choices": []} | self._spent(answers)

    def first(self, choices: int) -> list[dict[str, Any]]:
        """Chunks before anything was written."""
        return []

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _spent(self, answers: Sequence[Completion]) -> dict[str, Any]:
        found = {"usage": usage_of(answers)}
        if self.statistics:
            found["metrics"] = statistics_of(choice for answer in answers for choice in answer.choices)
        return found

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        raise NotImplementedError

    def _delta(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        raise NotImplementedError


class Chats(Writer):
    """``/v1/chat/completions``"""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def first(self, choices: int) -> list[dict[str, Any]]:
        start = {"role": "assistant", "content": "", "refusal": None}
        return [
            self._head(self.chunk_kind)
            | {"choices": [{"index": index, "delta": start, "logprobs": None, "finish_reason": None}]}
            for index in range(choices)
        ]

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": self._said(choice.logprobs or ()) if self.logprobs else None,
            "finish_reason": choice.finish_reason,
        }

    def _delta(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        text = "".join(piece.text for piece in pieces)
        known = [piece.logprob for piece in pieces if piece.logprob is not None]
        return {
            "index": index,
            "delta": {"content": text} if text or known else {},
            "logprobs": self._said(known) if self.logprobs and known else None,
            "finish_reason": pieces[-1].finish_reason,
        }

    def _said(self, logprobs: Iterable[TokenLogprob]) -> dict[str, Any]:
        return {
            "content": [
                self._token(each.token_id, each.logprob)
                | {"top_logprobs": [self._token(token, value) for token, value in each.top.items()]}
                for each in logprobs
            ],
            "refusal": None,
        }

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.spell(token)
        return {"token": text, "logprob": max(logprob, -9999.0), "bytes": list(text.encode())}


@dataclass
class Texts(Writer):
    """``/v1/completions``"""

    kind = chunk_kind = "text_completion"
    _written: dict[int, int] = field(default_factory=dict)  # characters of each choice

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        logprobs = self._said(choice.logprobs or (), 0) if self.logprobs else None
        return {
            "index": index,
            "text": choice.text,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
        }

    def _delta(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        text = "".join(piece.text for piece in pieces)
        known = [piece.logprob for piece in pieces if piece.logprob is not None]
        at = self._written.get(index, 0)
        logprobs = self._said(known, at) if self.logprobs and known else None
        self._written[index] = at + sum(len(self.spell(each.token_id)) for each in known)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": pieces[-1].finish_reason}

    def _said(self, logprobs: Sequence[TokenLogprob], at: int) -> dict[str, Any]:
        """``text_offset`` counts the characters of the tokens as they are spelt one by one."""
        tokens = [self.spell(each.token_id) for each in logprobs]
        offsets = []
        for token in tokens:
            offsets.append(at)
            at += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [max(each.logprob, -9999.0) for each in logprobs],
            "top_logprobs": [
                {self.spell(token): max(value, -9999.0) for token, value in each.top.items()} for each in logprobs
            ],
            "text_offset": offsets,
        }
