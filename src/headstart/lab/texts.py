"""What is measured on: prompts by task, from files or our own sixty.

Knows: the formats (a prompt a line, JSON lines with 'prompt' or 'messages', Spec-Bench's question.jsonl). Does not
know: models or tokenizers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import InvalidParameter

__all__ = ["SHIPPED", "Text", "by_task", "choose", "read_texts", "shipped"]

SHIPPED = Path(__file__).parent / "data" / "prompts.jsonl"
UNNAMED = "prompts"  # the task of prompts that do not say theirs
_TASK_FIELDS = ("task", "category")


@dataclass(frozen=True)
class Text:
    """One prompt, or a conversation of several turns."""

    task: str
    turns: tuple[str, ...] = ()  # what the user says, one after the other; answers come between
    messages: tuple[Mapping[str, Any], ...] | None = None  # a conversation as it stands, in the place of turns
    raw: bool = False  # the text as it is, without the model's chat template

    def __post_init__(self) -> None:
        if (self.messages is None) == (not self.turns):
            raise InvalidParameter("prompts", "must have either turns or messages")

    def conversation(self, answers: Sequence[str] = ()) -> list[dict[str, Any]]:
        """The messages up to the turn behind these answers."""
        if self.messages is not None:
            return [dict(message) for message in self.messages]
        found: list[dict[str, Any]] = []
        for index, turn in enumerate(self.turns[: len(answers) + 1]):
            found.append({"role": "user", "content": turn})
            if index < len(answers):
                found.append({"role": "assistant", "content": answers[index]})
        return found

    @property
    def beginning(self) -> str:
        """Its first words, for people who have to tell prompts apart."""
        text = self.turns[0] if self.turns else str((self.messages or ({},))[-1].get("content", ""))
        line = " ".join(text.split())
        return line if len(line) <= 60 else line[:59] + "…"


def shipped() -> list[Text]:
    """Our sixty prompts, ten of each of six tasks."""
    return read_texts(SHIPPED)


def by_task(texts: Sequence[Text]) -> dict[str, list[Text]]:
    """In the order in which tasks first come."""
    found: dict[str, list[Text]] = {}
    for text in texts:
        found.setdefault(text.task, []).append(text)
    return found


def choose(texts: Sequence[Text], per_task: int | None = None, tasks: Sequence[str] | None = None) -> list[Text]:
    """The first ``per_task`` of each task (None: all), of these tasks alone (None: of all), the tasks in turn."""
    groups = by_task(texts)
    if unknown := [task for task in tasks or () if task not in groups]:
        raise InvalidParameter("tasks", f"must be among {', '.join(groups)}, not {', '.join(unknown)}")
    wanted = [groups[task][:per_task] for task in (tasks or groups)]
    return [group[i] for i in range(max(map(len, wanted), default=0)) for group in wanted if i < len(group)]


def read_texts(path: str | Path, *, raw: bool = False) -> list[Text]:
    """The prompts of a file ("-": standard input): one a line, or, where the name ends in .jsonl or the first line is a
    JSON object, JSON lines with 'prompt', 'messages' or 'turns', and perhaps 'task' or 'category'; or all of it is one
    JSON list of such objects."""
    content = _content(path).removeprefix("\ufeff")
    name = "standard input" if str(path) == "-" else Path(path).name
    if (listed := _listed(content)) is not None:
        return [_text(record, f"{name}, object {number},", raw) for number, record in enumerate(listed, 1)]
    lines = [(number, line.removesuffix("\r")) for number, line in enumerate(content.split("\n"), 1)]
    lines = [(number, line) for number, line in lines if line.strip()]
    if not lines:
        raise InvalidParameter("prompts", f"hold nothing: {name} is empty")
    if str(path).lower().endswith(".jsonl") or _is_object(lines[0][1]):
        return [_record(line, f"{name}, line {number},", raw) for number, line in lines]
    return [Text(UNNAMED, (line,), raw=raw) for _, line in lines]


def _content(path: str | Path) -> str:
    try:
        data = sys.stdin.buffer.read() if str(path) == "-" else Path(path).expanduser().read_bytes()
    except OSError as error:
        raise InvalidParameter("prompts", f"cannot be read: {error.strerror or error} ({path})") from error
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        at = f"byte {error.start} is {data[error.start]:#04x}"
        raise InvalidParameter("prompts", f"are not valid UTF-8 in {path} ({at})") from None


def _listed(content: str) -> list[Any] | None:
    """What is in the list, if the whole text is a JSON list of objects."""
    if not content.lstrip().startswith("["):
        return None
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, list) and found and isinstance(found[0], dict) else None


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _record(line: str, where: str, raw: bool) -> Text:
    try:
        return _text(json.loads(line), where, raw)
    except InvalidParameter:
        raise
    except (ValueError, RecursionError) as error:
        raise InvalidParameter("prompts", f"{where} is no JSON: {error}") from error


def _text(record: object, where: str, raw: bool) -> Text:
    if not isinstance(record, dict) or sum(name in record for name in ("prompt", "messages", "turns")) != 1:
        raise InvalidParameter("prompts", f"{where} must be a JSON object with one of 'prompt', 'messages' and 'turns'")
    task = next((record[name] for name in _TASK_FIELDS if name in record), UNNAMED)
    if not isinstance(task, str) or not task.strip():
        raise InvalidParameter("prompts", f"{where} has a task that is no text, or empty")
    task = " ".join(task.split())
    if "messages" in record:
        return Text(task, messages=tuple(_messages(record["messages"], where)))
    given = record["turns"] if "turns" in record else [record["prompt"]]
    if not isinstance(given, list) or not given or not all(isinstance(t, str) and t.strip() for t in given):
        kind = "'turns' that are no list of texts" if "turns" in record else "a 'prompt' that is no text, or empty"
        raise InvalidParameter("prompts", f"{where} has {kind}")
    for turn in given:
        _check_unicode(turn, where)
    return Text(task, tuple(given), raw=raw)


def _messages(given: object, where: str) -> Iterator[Mapping[str, Any]]:
    good = isinstance(given, list) and given and all(isinstance(m, dict) and "role" in m for m in given)
    if not good or not isinstance(given, list):
        raise InvalidParameter("prompts", f"{where} has 'messages' that are no list of {{role, content}}")
    if given[-1]["role"] == "assistant":
        raise InvalidParameter("prompts", f"{where} ends with the model's own message: nothing is left to answer")
    for message in given:
        if isinstance(message.get("content"), str):
            _check_unicode(message["content"], where)
        yield message


def _check_unicode(text: str, where: str) -> None:
    """Halves of characters can be written in JSON, and no tokenizer takes them."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidParameter("prompts", f"{where} has half a character (a lone surrogate)") from None
