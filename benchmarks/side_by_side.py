"""Engines that answer at the same time, a step of each in turn, so that what else a machine does falls on all alike.

Knows: requests, steps, and whose turn it is. Does not know: which engines, or what their rates mean.

On a shared CPU the rate of one and the same engine changes by a third within seconds. Two runs one after the other then
differ by more than what is looked for; steps in turn, of some milliseconds each, do not.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headstart import LLM, SamplingParams


@dataclass
class Run:
    """One engine's answers to some prompts from a cold start, a step at a time."""

    llm: LLM
    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    seconds: float = 0.0  # spent by this engine alone, prompts included
    tokens: int = 0

    def begin(self) -> None:
        self.llm.cold()
        started = time.perf_counter()
        self._streams = [self.llm.submit(list(prompt), self.params) for prompt in self.prompts]
        self.seconds += time.perf_counter() - started

    @property
    def done(self) -> bool:
        return self.llm.engine.idle

    def step(self) -> None:
        started = time.perf_counter()
        self.llm.engine.step()
        self.seconds += time.perf_counter() - started

    def end(self) -> float:
        """Tokens a second."""
        self.tokens = sum(len(choice.token_ids) for stream in self._streams for choice in stream.result().choices)
        return self.tokens / self.seconds


def side_by_side(runs: Mapping[str, Run]) -> dict[str, float]:
    """The rate of each. The engine that has had the least time steps next, so that all are busy to the end."""
    engines = {id(run.llm) for run in runs.values()}
    if len(engines) != len(runs):
        raise ValueError("two runs share an engine")
    gc.collect()
    for run in runs.values():
        run.begin()
    left = list(runs.values())
    while left:
        run = min(left, key=lambda run: run.seconds)
        run.step()
        if run.done:
            left.remove(run)
    return {name: run.end() for name, run in runs.items()}
