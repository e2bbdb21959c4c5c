"""Answers to many questions, in order, and an answer as JSON.

Knows: how requests are kept going together, and the names in the JSON. Does not know: terminals.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..config import EngineConfig
from ..errors import GenerationFailed, InvalidParameter
from ..types import Choice, Completion, SamplingParams, Stats
from .prompts import Question

__all__ = ["answered", "as_json", "ask", "in_order"]

_AHEAD = 256  # questions handed to the engine before the answer that is waited for


def ask(llm: Any, question: Question, params: SamplingParams, *, raw: bool) -> Any:
    """The stream of one answer. ``raw``: continue the prompt as it is, without the chat template."""
    prompt: Any = question.prompt
    if raw and not isinstance(prompt, str):
        raise InvalidParameter("messages", "need the chat template, which --raw leaves out")
    if isinstance(prompt, str) and not raw and llm.has_chat_template:
        prompt = [{"role": "user", "content": prompt}]
    return llm.stream(prompt, params, prediction=question.prediction)


def in_order(
    llm: Any, questions: Sequence[Question], params: SamplingParams, *, raw: bool
) -> Iterator[Completion | str]:
    """Each question's answer, or why it has none. Later ones are worked on while an earlier one is waited for."""
    ahead = max(1, min(_AHEAD, EngineConfig.max_waiting // params.n))
    running: deque[Any] = deque()
    waiting = iter(questions)
    try:
        while True:
            for question in waiting:
                running.append(_or_why(ask, llm, question, params, raw=raw))
                if len(running) >= ahead:
                    break
            if not running:
                return
            stream = running.popleft()
            yield stream if isinstance(stream, str) else _or_why(answered, stream)
    finally:
        for stream in running:
            if not isinstance(stream, str):
                stream.close()


def _or_why(action: Callable[..., Any], *given: Any, **more: Any) -> Any:
    """What comes of it, or what is wrong with the question: the others are not to suffer for one."""
    try:
        return action(*given, **more)
    except (InvalidParameter, GenerationFailed) as error:
        return str(error)


def answered(stream: Any) -> Completion:
    """A stream to its end."""
    with stream:
        for _ in stream:
            pass
    completion: Completion = stream.completion()
    return completion


def as_json(completion: Completion, inactive: str | None, model: dict[str, Any]) -> dict[str, Any]:
    """One answer's JSON object; with several choices they are a list under "choices"."""
    if len(completion.choices) == 1:
        found = _choice(completion.choices[0])
    else:
        found = {"choices": [{"index": choice.index} | _choice(choice) for choice in completion.choices]}
    return found | {"speculation_inactive": inactive, "model": model}


def _choice(choice: Choice) -> dict[str, Any]:
    found: dict[str, Any] = {
        "text": choice.text,
        "token_ids": list(choice.token_ids),
        "origins": list(choice.origins),
        "finish_reason": choice.finish_reason,
        "stats": _stats(choice.stats),
    }
    if choice.logprobs is not None:
        found["logprobs"] = [{"id": p.token_id, "logprob": p.logprob, "top": dict(p.top)} for p in choice.logprobs]
    return found


def _stats(stats: Stats) -> dict[str, Any]:
    return {
        "acceptance_rate": round(stats.acceptance_rate, 4),
        "acceptance_length": round(stats.acceptance_length, 4),
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "rounds": stats.rounds,
        "tokens": stats.tokens,
        "prompt_tokens": stats.prompt_tokens,
        "tokens_per_second": round(stats.tokens_per_second, 2),
        "first_token_seconds": round(stats.first_token_seconds, 4),
        "waiting_seconds": round(stats.waiting_seconds, 4),
        "seconds": round(stats.seconds, 4),
    }
