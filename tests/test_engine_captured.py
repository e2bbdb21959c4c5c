"""Rounds on the device, played here without recording: the same program, the same books, the same tokens.

The recordings themselves are tested on a GPU (tests marked ``gpu``); what is recorded is what runs here.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from statistics_tools import chi_squared

from headstart import LLM, SamplingParams
from headstart.config import EngineConfig
from headstart.controller import FixedController
from headstart.drafters.model import ModelDrafter
from headstart.engine.captured import CapturedRounds
from headstart.engine.engine import Engine
from headstart.machine.runner import EagerRunner
from headstart.testing import TINY_VOCABULARY, TableRunner, tiny_model
from headstart.types import Request


class DeviceEager(EagerRunner):
    """The eager runner, told its lengths by a tensor."""

    def device_forward(self, tokens: Any, lengths: Any, keep: int, bound: int) -> Any:
        assert int(lengths.max()) + tokens.shape[1] <= bound
        return self.forward(slice(0, len(tokens)), tokens, lengths.tolist(), keep=keep)


class DeviceTable(TableRunner):
    def device_forward(self, tokens: Any, lengths: Any, keep: int, bound: int) -> Any:
        return self.forward(slice(0, len(tokens)), tokens, lengths.tolist(), keep=keep)


def noisy(model: Any) -> Any:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.15 * parameter.std())
    return model


def engine(gamma: int, rows: int, *, draft: bool = True) -> Engine:
    target = DeviceEager(tiny_model("llama"), rows=rows, max_len=96, margin=40, probe=False)
    drafter = None
    if draft:
        runner = DeviceEager(noisy(tiny_model("llama")), rows=rows, max_len=96, margin=40, probe=False)
        drafter = ModelDrafter(runner, vocab_size=TINY_VOCABULARY, width=TINY_VOCABULARY)
    return Engine(
        target,
        drafter,
        FixedController(gamma),
        EngineConfig(max_rows=rows, max_waiting=4000),
        vocab_size=TINY_VOCABULARY,
        eos=(2,),
        captured=CapturedRounds(target, drafter, vocab_size=TINY_VOCABULARY),
        max_gamma=gamma,
    )


PROMPTS = [[5, 6, 7, 8, 5, 6], [9, 9, 4], [3, 4, 5, 6, 7, 8, 9, 10, 11], [40, 41], [50, 3, 50, 3, 50]]


def run(made: Engine, params: list[SamplingParams]) -> list[tuple[int, ...]]:
    handles = [made.submit(Request(str(i), tuple(p), s)) for i, (p, s) in enumerate(zip(PROMPTS, params, strict=True))]
    while not made.idle:
        made.step()
        made.parts.runner.slab.check()
    assert made.parts.captured is not None
    assert not made.parts.captured.in_flight
    return [handle.completion().token_ids for handle in handles]


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM(tiny_model("llama"), None, max_model_len=96, check=False)


@pytest.mark.parametrize("rows", [1, 3, 5])
@pytest.mark.parametrize("gamma", [1, 3, 8])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_same_tokens_as_plain_decoding(plain: LLM, gamma: int, rows: int, temperature: float) -> None:
    """Greedy, and coupled sampling; sequences of different lengths come and go while rounds are in flight."""
    params = [
        SamplingParams(temperature=temperature, top_p=0.9, seed=i, max_tokens=9 + 5 * i, verification="coupled")
        for i in range(5)
    ]
    expected = [plain.generate(p, s).token_ids for p, s in zip(PROMPTS, params, strict=True)]
    made = engine(gamma, rows)
    assert run(made, params) == expected
    assert made.stats.accepted > 10
    assert len(made.parts.captured._plans) > 0  # type: ignore[union-attr]


def test_without_a_draft(plain: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=9 + 5 * i) for i in range(5)]
    expected = [plain.generate(p, s).token_ids for p, s in zip(PROMPTS, params, strict=True)]
    assert run(engine(1, 3, draft=False), params) == expected


def test_what_does_not_fit_takes_the_eager_path(plain: LLM) -> None:
    """Log-probabilities, penalties and switched-off speculation, mixed with rows that would fit."""
    params = [
        SamplingParams(temperature=0, max_tokens=12, logprobs=1),
        SamplingParams(temperature=0, max_tokens=20),
        SamplingParams(temperature=0, max_tokens=8, repetition_penalty=1.3),
        SamplingParams(temperature=0, max_tokens=16, speculate=False),
        SamplingParams(temperature=0.7, seed=3, max_tokens=16, verification="coupled"),
    ]
    expected = [plain.generate(p, s).token_ids for p, s in zip(PROMPTS, params, strict=True)]
    assert run(engine(3, 2), params) == expected


def test_aborting_while_a_round_is_in_flight(plain: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=30)
    made = engine(3, 2)
    first, second = (made.submit(Request(str(i), tuple(PROMPTS[i]), params)) for i in range(2))
    for _ in range(4):
        made.step()
    made.abort("0")
    assert first.done
    while not made.idle:
        made.step()
    assert second.completion().token_ids == plain.generate(PROMPTS[1], params).token_ids


@pytest.mark.parametrize("rule", ["token", "block"])
def test_sampling_follows_the_target(rule: str) -> None:
    generator = torch.Generator().manual_seed(1)
    table = torch.randn(4, 4, 4, generator=generator) * 1.5
    other = table + torch.randn(4, 4, 4, generator=generator) * 1.2
    target = DeviceTable(table, rows=8, max_len=32, margin=40)
    drafter = ModelDrafter(DeviceTable(other, rows=8, max_len=32, margin=40), vocab_size=4, width=4)
    made = Engine(
        target,
        drafter,
        FixedController(3),
        EngineConfig(max_rows=8, max_waiting=4000),
        vocab_size=4,
        captured=CapturedRounds(target, drafter, vocab_size=4),
        max_gamma=3,
    )
    handles = [
        made.submit(Request(str(i), (1, 3, 2), SamplingParams(max_tokens=5, seed=i, verification=rule)))  # type: ignore[arg-type]
        for i in range(700)
    ]
    while not made.idle:
        made.step()
    counts = Counter(h.completion().token_ids[1:4] for h in handles)
    whole = target.probabilities((1, 3, 2), 4)
    law: dict[tuple[int, ...], float] = {}
    for outcome, chance in whole.items():
        law[outcome[1:]] = law.get(outcome[1:], 0.0) + chance
    assert chi_squared(counts, law) > 1e-4
    assert 0.2 < made.stats.acceptance_rate < 0.95
