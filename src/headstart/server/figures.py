"""Numbers in answers: log-probabilities, usage, and what speculation did.

Knows: how OpenAI and vLLM write them. Does not know: what stands around them in an answer (``answers``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from ..machine.text import TextCodec
from ..types import Choice, Completion, TokenLogprob

__all__ = ["Spelling", "said_in_chat", "said_in_text", "said_of_prompt", "statistics_of", "usage_of"]

_LEAST = -9999.0  # JSON has no infinity


@dataclass(frozen=True)
class Spelling:
    """Tokens as text, one by one."""

    spell: Callable[[int], str]
    special: frozenset[int] = field(default=frozenset())  # which are not in the text of an answer

    @staticmethod
    def of(codec: TextCodec) -> Spelling:
        return Spelling(lru_cache(maxsize=65536)(codec.spell), codec.special_ids)

    def width(self, token: int) -> int:
        """Characters that it adds to a text, as far as a token by itself can tell."""
        return 0 if token in self.special else len(self.spell(token))


def usage_of(answers: Sequence[Completion], reasoning: int = 0) -> dict[str, Any]:
    """Tokens of a prediction count where they were drafted: accepted ones are in the answer, rejected ones nowhere.
    ``reasoning``: tokens that were spent on thinking."""
    stats = [choice.stats for answer in answers for choice in answer.choices]
    accepted = sum(s.predicted_accepted for s in stats)
    prompt = sum(len(answer.prompt_token_ids) for answer in answers)
    written = sum(len(choice.token_ids) for answer in answers for choice in answer.choices)
    cached = sum(answer.choices[0].stats.cached_tokens for answer in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": sum(s.predicted for s in stats) - accepted,
            "reasoning_tokens": reasoning,
        },
    }


def statistics_of(choices: Iterable[Choice]) -> dict[str, Any]:
    """What speculation did, in vLLM's names: over rounds in which something was drafted. ``num_rounds`` and
    ``acceptance_length`` (tau) are ours, and over all rounds."""
    stats = [choice.stats for choice in choices]
    drafted, accepted, drafts = (sum(getattr(s, name) for s in stats) for name in ("drafted", "accepted", "drafts"))
    tokens, rounds = sum(s.tokens for s in stats), sum(s.rounds for s in stats)
    histogram = [0] * max((len(s.acceptance_histogram) for s in stats), default=0)
    for s in stats:
        for count, times in enumerate(s.acceptance_histogram):
            histogram[count] += times
    return {
        "speculative_decoding": {
            "mean_acceptance_length": 1 + accepted / drafts if drafts else None,
            "draft_acceptance_rate": accepted / drafted if drafted else None,
            "acceptance_histogram": histogram,
            "num_spec_steps": drafts,
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": drafted,
            "num_rounds": rounds,
            "acceptance_length": tokens / rounds if rounds else None,
        }
    }


def said_in_chat(spelling: Spelling, logprobs: Iterable[TokenLogprob]) -> dict[str, Any]:
    """Log-probabilities in a chat."""

    def token(token: int, logprob: float) -> dict[str, Any]:
        text = spelling.spell(token)
        return {"token": text, "logprob": max(logprob, _LEAST), "bytes": list(text.encode())}

    return {
        "content": [
            token(each.token_id, each.logprob) | {"top_logprobs": [token(*one) for one in each.top.items()]}
            for each in logprobs
        ],
        "refusal": None,
    }


def said_in_text(
    spelling: Spelling, logprobs: Sequence[tuple[int, TokenLogprob | None]], at: int
) -> tuple[dict[str, Any], int]:
    """Log-probabilities of tokens in a completion, the first of which begins at character ``at``; and where they end.

    ``text_offset`` counts the characters of the tokens as they are spelt one by one. The likeliest tokens of a place
    include its own, as OpenAI's do. Of two that are spelt alike (parts of characters) the likelier is told.
    """
    tokens, offsets = list[str](), list[int]()
    values, tops = list[float | None](), list[dict[str, float] | None]()
    for token, known in logprobs:
        tokens.append(spelling.spell(token))
        offsets.append(at)
        at += spelling.width(token)
        if known is None:  # a prompt's first token: nothing stands before it
            values.append(None)
            tops.append(None)
            continue
        values.append(max(known.logprob, _LEAST))
        top: dict[str, float] = {}
        for one, value in sorted({**known.top, token: known.logprob}.items(), key=lambda item: -item[1]):
            top.setdefault(spelling.spell(one), max(value, _LEAST))
        tops.append(top)
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}, at


def said_of_prompt(
    spelling: Spelling, logprobs: Sequence[TokenLogprob | None] | None, top: int
) -> list[dict[str, Any] | None]:
    """vLLM's ``prompt_logprobs``: for each token of a prompt, itself and the ``top`` likeliest by their ids."""
    found: list[dict[str, Any] | None] = []
    for each in logprobs or ():
        if each is None:
            found.append(None)
            continue
        ranks = {token: rank for rank, token in enumerate(each.top, 1)}
        chosen = {each.token_id: each.logprob, **dict(list(each.top.items())[:top])}
        found.append(
            {
                str(token): {
                    "logprob": max(value, _LEAST),
                    "rank": ranks.get(token),
                    "decoded_token": spelling.spell(token),
                }
                for token, value in chosen.items()
            }
        )
    return found
