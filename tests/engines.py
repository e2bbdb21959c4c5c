"""Engines for tests: the real engine over a table model or tiny Hugging Face models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from headstart.config import MAX_GAMMA, EngineConfig
from headstart.control.adaptive import AdaptiveController
from headstart.control.controller import Controller, FixedController
from headstart.drafters.base import DraftContext, Drafter, TargetView
from headstart.drafters.lookup import LookupDrafter
from headstart.drafters.model import ModelDrafter
from headstart.engine.captured import CapturedRounds
from headstart.engine.engine import Engine
from headstart.engine.overlap import OverlappedRounds
from headstart.engine.sequence import TextSink
from headstart.machine.runner import ModelRunner
from headstart.testing import ScriptedDrafter, TableRunner
from headstart.types import Completion, DraftView, Proposal, Request, SamplingParams


def table(vocabulary: int, seed: int = 0, spread: float = 1.5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(vocabulary, vocabulary, vocabulary, generator=generator) * spread


class DeviceTable(TableRunner):
    """A table that rounds on the device can be played with. What is captured never comes back to Python, so it runs
    whatever a test does to ``forward``."""

    def device_forward(self, tokens: Any, lengths: Any, keep: int, bound: int) -> Any:
        return TableRunner.forward(self, slice(0, len(tokens)), tokens, lengths.tolist(), keep=keep)

    def brief(self) -> AbstractContextManager[None]:
        return nullcontext()

    beside = brief


def table_engine(
    target: torch.Tensor,
    drafter: Drafter | None,
    *,
    gamma: int = 3,
    rows: int = 4,
    max_len: int = 64,
    eos: Sequence[int] = (),
    vocab_size: int | None = None,
    controller: Controller | None = None,
    text: Callable[[Request], TextSink] | None = None,
    prefill_chunk: int = 16,
    max_waiting: int = 1024,
    rounds: type[CapturedRounds] | None = None,
) -> Engine:
    """``rounds``: played on the device, in this way."""
    runner = (DeviceTable if rounds else TableRunner)(target, rows=rows, max_len=max_len, margin=gamma + 20)
    size = vocab_size if vocab_size is not None else target.shape[-1]
    captured = None
    if rounds is not None:
        model = drafter if isinstance(drafter, ModelDrafter) else None
        captured = rounds(runner, model, vocab_size=size, lengths=(0, 1, gamma))
        captured.warm_up()
    return Engine(
        runner,
        drafter,
        controller if controller is not None else FixedController(gamma),
        EngineConfig(max_rows=rows, prefill_chunk=prefill_chunk, max_waiting=max_waiting),
        vocab_size=size,
        eos=eos,
        text=text,
        captured=captured,
        max_gamma=gamma if rounds is not None else MAX_GAMMA,
    )


def device_engine(target: torch.Tensor, drafter: Drafter | None, *, overlap: bool = False, **options: Any) -> Engine:
    """The same as ``table_engine``, with rounds on the device: drafted there by a draft model (``device_draft``), or
    guesses from the host judged there."""
    return table_engine(target, drafter, rounds=OverlappedRounds if overlap else CapturedRounds, **options)


def table_draft(
    draft: torch.Tensor,
    *,
    rows: int = 4,
    max_len: int = 64,
    gamma: int = 3,
    min_chance_to_extend: Callable[[], float] | None = None,
    runner: type[TableRunner] = TableRunner,
) -> ModelDrafter:
    """A draft language model that is another table."""
    return ModelDrafter(
        runner(draft, rows=rows, max_len=max_len, margin=gamma + 20),
        vocab_size=draft.shape[-1],
        width=draft.shape[-1],
        min_chance_to_extend=min_chance_to_extend,
    )


device_draft = partial(table_draft, runner=DeviceTable)  # for ``device_engine``


def tree_drafter(draft: torch.Tensor) -> ScriptedDrafter:
    """Draws a point tree: the two likeliest tokens, and below the second one its likeliest."""

    def guess(view: DraftView, budget: int) -> Proposal | None:
        if budget < 3:
            return None
        tokens = view.tokens
        before = tokens[-2] if len(tokens) > 1 else 0
        first, second = draft[before, tokens[-1]].topk(2).indices.tolist()
        below = int(draft[tokens[-1], second].argmax())
        last = int(draft[second, below].argmax())
        return Proposal((first, second, below, last)[:budget], (-1, -1, 1, 2)[:budget])

    return ScriptedDrafter(guess)


def run(engine: Engine, requests: Sequence[Request]) -> list[Completion]:
    handles = [engine.submit(request) for request in requests]
    while not engine.idle:
        engine.step()
    return [handle.completion() for handle in handles]


def draft_context(target: TargetView) -> DraftContext:
    """What a drafter is given that is built by name; there is no second model to be had."""

    def none(source: object) -> ModelRunner:
        raise AssertionError(f"{source} was asked for")

    return DraftContext(target, target.vocab_size, FixedController(3), none, "a name", prefill_chunk=16)


def drafters(draft_runner: Callable[[], ModelRunner], width: int) -> dict[str, Callable[[], Drafter | None]]:
    """Every drafter of the house, made fresh."""
    return {
        "none": lambda: None,
        "lookup": LookupDrafter,
        "model": lambda: ModelDrafter(draft_runner(), vocab_size=width, width=width),
    }


__all__ = [
    "AdaptiveController",
    "Completion",
    "DeviceTable",
    "Request",
    "SamplingParams",
    "device_draft",
    "device_engine",
    "draft_context",
    "drafters",
    "run",
    "table",
    "table_draft",
    "table_engine",
    "tree_drafter",
]
