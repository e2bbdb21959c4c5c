"""Engines at work for a certificate: the same requests alone, together, and coming and going.

Knows: requests and steps, and what rounds tell of them. Does not know: whether what comes out is right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Literal

from ...engine.engine import Engine
from ...engine.handle import Handle
from ...types import Grammar, Request, Round, SamplingParams
from .audit import Answer

__all__ = ["COMPANIES", "Asked", "Company", "Exercise", "answers", "requests"]

Company = Literal["alone", "together", "coming and going"]
COMPANIES: tuple[Company, ...] = ("alone", "together", "coming and going")

_STEPS_APART = 2  # between two that come


@dataclass(frozen=True)
class Asked:
    """A prompt, and how it is to be answered."""

    prompt: tuple[int, ...]
    params: SamplingParams
    grammar: Grammar | None = None


@dataclass
class Exercise:
    """What the rounds of a check did: a check in which nothing was drafted has tested nothing."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    rejections: int = 0  # rounds that rolled back
    widest: int = 0  # rows in one forward
    drafters: set[str] = field(default_factory=set)

    def note(self, records: Iterable[Round]) -> None:
        for record in records:
            self.rounds += 1
            self.drafted += record.drafted
            self.accepted += record.accepted
            self.rejections += record.accepted < record.drafted
            self.widest = max(self.widest, record.rows)
            if record.drafted:
                self.drafters.add(record.drafter)

    def add(self, other: Exercise) -> None:
        self.rounds += other.rounds
        self.drafted += other.drafted
        self.accepted += other.accepted
        self.rejections += other.rejections
        self.widest = max(self.widest, other.widest)
        self.drafters |= other.drafters


_numbers = count()  # ids of requests; their order tells nothing


def requests(asked: Sequence[Asked]) -> list[Request]:
    return [Request(f"certify-{next(_numbers)}", one.prompt, one.params, (), one.grammar) for one in asked]


def answers(
    engine: Engine, asked: Sequence[Asked], company: Company = "together", step: Callable[[], None] = lambda: None
) -> tuple[list[Answer], Exercise]:
    """Every request's answer, in order. ``step``: called behind every step, so that whoever waits can be told."""
    exercise = Exercise()
    engine.cold()
    with engine.listen(exercise.note):
        handles = _COMPANY[company](engine, asked, step)
    for handle in handles:
        handle.raise_failure()
    return [_answer(handle, one) for handle, one in zip(handles, asked, strict=True)], exercise


def _answer(handle: Handle, asked: Asked) -> Answer:
    choice = handle.completion().choices[0]
    [sequence] = handle.sequences
    return Answer(
        asked.prompt, asked.params, choice.token_ids, sequence.seed, sequence.ending_ids, choice.logprobs, asked.grammar
    )


def _work(engine: Engine, step: Callable[[], None]) -> None:
    while not engine.idle:
        engine.step()
        step()


def _alone(engine: Engine, asked: Sequence[Asked], step: Callable[[], None]) -> list[Handle]:
    handles = []
    for request in requests(asked):
        handles.append(engine.submit(request))
        _work(engine, step)
    return handles


def _together(engine: Engine, asked: Sequence[Asked], step: Callable[[], None]) -> list[Handle]:
    handles, waiting = [], requests(asked)
    while waiting or not engine.idle:
        while waiting and not engine.full():
            handles.append(engine.submit(waiting.pop(0)))
        engine.step()
        step()
    return handles


def _coming_and_going(engine: Engine, asked: Sequence[Asked], step: Callable[[], None]) -> list[Handle]:
    """One every few steps; and between them others, that are broken off before they are done."""
    handles: list[Handle] = []
    passing: list[Handle] = []
    others = requests(asked)
    for number, request in enumerate(requests(asked)):
        handles.append(engine.submit(request))
        if number % 2:
            passing.append(engine.submit(others[number]))
        for _ in range(_STEPS_APART):
            engine.step()
            step()
        if len(passing) > 1:
            engine.abort(passing.pop(0))
    for handle in passing:
        engine.abort(handle)
    _work(engine, step)
    return handles


_COMPANY: dict[Company, Callable[[Engine, Sequence[Asked], Callable[[], None]], list[Handle]]] = {
    "alone": _alone,
    "together": _together,
    "coming and going": _coming_and_going,
}
