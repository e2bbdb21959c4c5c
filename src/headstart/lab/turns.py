"""Engines that answer the same prompts in turn, so that what else a machine does falls on all of them alike.

Knows: requests, steps, whose turn it is, and each engine's own clock. Does not know: which engines, or what their rates
mean.

On a shared CPU the rate of one and the same engine changes by a third within seconds. Two runs one after the other then
differ by more than what is looked for; steps in turn, some tens of milliseconds each, do not. The engine that is the
furthest behind in its answers steps next, so that all of them are at the same place at the same time, to the end.
A GPU works while the host is elsewhere, so that steps in turn would be timed in each other's place: there whole answers
take turns.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from time import perf_counter

import torch

from ..engine.engine import Engine
from ..engine.handle import Handle
from ..types import Choice, Request, Round, SamplingParams
from .figures import Measured

__all__ = ["Answer", "Run", "in_turn", "side_by_side", "uncollected"]

STRIDE = 8  # tokens of each answer that an engine writes before another has its turn: caches stay warm for most of them


@dataclass(frozen=True)
class Answer:
    """One answer and its times, by the clock of its engine alone: it stands while others step."""

    prompt_tokens: int
    choice: Choice
    first_token_seconds: float  # from submitting to the first token, the line included
    seconds: float  # from submitting to the last token
    rounds: tuple[Round, ...]
    first_tokens: int  # tokens that the first round brought, the one that read the prompt's end
    decode_seconds: float  # behind that round

    @property
    def tokens(self) -> int:
        return len(self.choice.token_ids)

    @property
    def decode_tokens(self) -> int:
        """Tokens that came behind the first round."""
        return self.tokens - self.first_tokens


class Run:
    """One engine's answers to some prompts, a step at a time."""

    def __init__(
        self,
        engine: Engine,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        learnt: bool = False,
    ) -> None:
        """``params``: for all, or for each. ``learnt``: what the controller learnt before stays; no prompt is warm in
        any case (see ``Engine.cold``)."""
        self.engine, self.prompts, self.learnt = engine, prompts, learnt
        self.params = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        self.seconds = 0.0  # spent by this engine alone, prompts included
        self.tokens = 0  # so far
        self.answers: list[Answer] = []
        self._handles: list[Handle] = []
        self._records: dict[str, list[Round]] = defaultdict(list)  # by sequence
        self._times: dict[str, list[float]] = defaultdict(list)  # when each of them was over
        self.rounds: list[tuple[float, list[Round]]] = []  # every round, and when it was over
        self._open = ExitStack()
        self._started = 0.0

    def begin(self) -> None:
        self.engine.cold(learnt=self.learnt)
        _settle(self.engine)
        self._open.enter_context(self.engine.listen(self._note))
        self._started = perf_counter()
        for index, (prompt, params) in enumerate(zip(self.prompts, self.params, strict=True)):
            self._handles.append(self.engine.submit(self.request(f"lab-{index}", prompt, params)))
        self.seconds += perf_counter() - self._started

    def request(self, name: str, prompt: Sequence[int], params: SamplingParams) -> Request:
        return Request(name, tuple(prompt), params)

    @property
    def done(self) -> bool:
        return self.engine.idle

    def step(self) -> None:
        self._started = perf_counter()
        self.engine.step()
        self.seconds += perf_counter() - self._started

    def _note(self, records: list[Round]) -> None:
        """Called by the engine in the middle of a step."""
        now = self.seconds + perf_counter() - self._started
        self.rounds.append((now, records))
        for record in records:
            self._records[record.sequence].append(record)
            self._times[record.sequence].append(now)
            self.tokens += record.emitted

    def end(self) -> float:
        """Tokens a second, prompts included. Raises if an answer failed."""
        self._open.close()
        for handle in self._handles:
            handle.raise_failure()
        self.answers = [self._answer(handle) for handle in self._handles]
        self.tokens = sum(answer.tokens for answer in self.answers)
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def decoding(self) -> tuple[int, float]:
        """Tokens and seconds from when every row had its first token on."""
        begun = self._begun
        tokens = sum(record.emitted for record in self.decoding_rounds)
        return tokens, (self.rounds[-1][0] if self.rounds else 0.0) - begun

    @property
    def decoding_rounds(self) -> list[Round]:
        """The rounds of that time, one record for each row."""
        begun = self._begun
        return [record for time, records in self.rounds if time > begun for record in records]

    def measured(self) -> Measured:
        """What it came to, behind ``end``."""
        tokens, seconds = self.decoding
        return Measured(
            first_tokens=tuple(answer.first_token_seconds for answer in self.answers),
            tokens=self.tokens,
            seconds=self.seconds,
            decode_tokens=tokens,
            decode_seconds=seconds,
            rounds=tuple(record for _, records in self.rounds for record in records if not record.prefill),
            ids=tuple(answer.choice.token_ids for answer in self.answers),
            decoding=tuple(self.decoding_rounds),
        )

    @property
    def _begun(self) -> float:
        """When every row had its first token."""
        return max((times[0] for times in self._times.values()), default=0.0)

    def abort(self) -> None:
        """Stop in the middle, so that the engine can be used again."""
        self._open.close()
        for handle in self._handles:
            self.engine.abort(handle)

    def _answer(self, handle: Handle) -> Answer:
        [sequence] = handle.sequences
        times = self._times.get(sequence.id, [0.0])
        records = self._records.get(sequence.id, [])
        return Answer(
            prompt_tokens=len(handle.request.prompt),
            choice=handle.completion().choices[0],
            first_token_seconds=times[0],
            seconds=times[-1],
            rounds=tuple(records),
            first_tokens=records[0].emitted if records else 0,
            decode_seconds=times[-1] - times[0],
        )


def in_turn(runs: Mapping[str, Run]) -> dict[str, list[Answer]]:
    """The answers of each. If it is interrupted or fails, every engine is left idle."""
    if len({id(run.engine) for run in runs.values()}) != len(runs):
        raise ValueError("two runs share an engine")
    try:
        with uncollected():
            if any(run.engine.parts.runner.device.type == "cuda" for run in runs.values()):
                for run in runs.values():
                    _whole(run)
            else:
                _by_steps(list(runs.values()))
    except BaseException:
        for run in runs.values():
            run.abort()
        raise
    for run in runs.values():
        run.end()
    return {name: run.answers for name, run in runs.items()}


@contextmanager
def uncollected() -> Iterator[None]:
    """Python collects no garbage within, which would fall on one engine. What is young is collected before: to look at
    everything takes as long as many rounds."""
    on = gc.isenabled()
    gc.collect(1)
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


def side_by_side(runs: Mapping[str, Run]) -> dict[str, float]:
    """The rate of each: tokens a second, prompts included."""
    in_turn(runs)
    return {name: run.tokens / run.seconds for name, run in runs.items()}


def _whole(run: Run) -> None:
    run.begin()
    while not run.done:
        run.step()
    started = perf_counter()
    _settle(run.engine)
    run.seconds += perf_counter() - started


def _by_steps(left: list[Run]) -> None:
    for run in left:
        run.begin()
    while left:
        run = min(left, key=lambda run: run.tokens)
        goal = run.tokens + STRIDE * len(run.prompts)
        while not run.done and run.tokens < goal:
            run.step()
        if run.done:
            left.remove(run)


def _settle(engine: Engine) -> None:
    """Wait for what the device still works at."""
    device = engine.parts.runner.device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
