"""What is asked: prompts from the command line, standard input and files.

Knows: the formats (a prompt a line, JSON lines). Does not know: models, or how answers are made.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..errors import InvalidParameter

__all__ = ["Question", "one_question", "questions_in", "standard_input"]


@dataclass(frozen=True)
class Question:
    """A prompt or a conversation, and the text that is expected in its answer, if any."""

    prompt: str | list[dict[str, Any]]
    prediction: str | None = None


def one_question(prompt: str | None, prediction: str | None) -> Question:
    """The prompt of a command line; "-" or none at all reads standard input."""
    if prompt is None and sys.stdin.isatty():
        raise InvalidParameter(
            "prompt", "is missing: give it as an argument, on standard input, or with --prompts FILE"
        )
    text = standard_input().removesuffix("\n") if prompt is None or prompt == "-" else _clean("prompt", prompt)
    if not text.strip():
        raise InvalidParameter("prompt", "is empty")
    return Question(text, None if prediction is None else _clean("prediction", prediction))


def questions_in(path: str, prediction: str | None) -> list[Question]:
    """The prompts of a file ("-": standard input): one a line, or JSON lines if its name ends in .jsonl."""
    content = standard_input() if path == "-" else _read(path)
    found = list(_questions(content.removeprefix("\ufeff"), path, prediction))
    if not found:
        raise InvalidParameter("prompts", f"hold nothing: {path} is empty")
    return found


def standard_input() -> str:
    """All of it, as text."""
    return _text("standard input", sys.stdin.buffer.read())


def _questions(content: str, path: str, prediction: str | None) -> Iterator[Question]:
    for number, line in enumerate(content.split("\n"), start=1):
        line = line.removesuffix("\r")
        if not line.strip():
            continue
        yield (
            _parsed(line, f"{path}, line {number},", prediction)
            if path.lower().endswith(".jsonl")
            else Question(line, prediction)
        )


def _parsed(line: str, where: str, prediction: str | None) -> Question:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidParameter("prompts", f"{where} is no JSON: {error}") from error
    if not isinstance(record, dict) or ("prompt" in record) == ("messages" in record):
        raise InvalidParameter("prompts", f"{where} must be a JSON object with either 'prompt' or 'messages'")
    expected = record.get("prediction", prediction)
    if expected is not None and not isinstance(expected, str):
        raise InvalidParameter("prompts", f"{where} has a 'prediction' that is no text")
    if "prompt" in record:
        if not isinstance(record["prompt"], str) or not record["prompt"].strip():
            raise InvalidParameter("prompts", f"{where} has a 'prompt' that is no text, or empty")
        return Question(_clean("prompts", record["prompt"], where), expected)
    messages = record["messages"]
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        raise InvalidParameter("prompts", f"{where} has 'messages' that are no list of {{role, content}}")
    return Question(messages, expected)


def _read(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return _text(path, file.read())
    except OSError as error:
        raise InvalidParameter("prompts", f"cannot be read: {error.strerror} ({path})") from error


def _text(name: str, content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise InvalidParameter(
            name, f"is not valid UTF-8 (byte {error.start} is {content[error.start]:#04x})"
        ) from None


def _clean(name: str, text: str, where: str = "") -> str:
    """Bytes that were no text come in as lone surrogates, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidParameter(name, f"{where} is not valid UTF-8".lstrip()) from None
    return text
