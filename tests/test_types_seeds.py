"""A seed gives one text: whatever drafts, however far ahead, in whatever batch, warm or cold."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
from engines import drafters, run, table, table_engine

from headstart import LLM, SamplingParams
from headstart.control.adaptive import AdaptiveController
from headstart.testing import TableRunner, tiny_model
from headstart.types import Request

# -- which rule is in force


def test_a_seed_without_a_rule_is_coupled() -> None:
    assert SamplingParams().verification is None
    assert SamplingParams().rule == "block"
    assert SamplingParams(seed=0).rule == "coupled"
    for rule in ("block", "token", "coupled"):
        assert SamplingParams(verification=rule).rule == rule  # type: ignore[arg-type]
        assert SamplingParams(verification=rule, seed=3).rule == rule  # type: ignore[arg-type]


def test_the_rule_follows_when_the_seed_is_replaced() -> None:
    assert replace(SamplingParams(seed=1), seed=None).rule == "block"
    assert replace(SamplingParams(), seed=3).rule == "coupled"
    assert replace(SamplingParams(seed=1, verification="block"), seed=2).rule == "block"
    assert replace(SamplingParams(seed=1, verification="token"), verification=None).rule == "coupled"


# -- on a model with known probabilities

V = 9
TARGET = table(V, seed=3)
DRAFT = TARGET + 0.6 * table(V, seed=4)
PROMPTS = [(1, 3, 2), (4, 4, 4, 1, 3, 2), (2,), (7, 8, 7, 8, 7, 8), (5, 6)]
SETTINGS = [SamplingParams(seed=seed, max_tokens=30) for seed in (0, 7, -3, 2**64 - 1, 7)]


def asked(name: str, which: list[int]) -> list[Request]:
    return [Request(f"{name}-{i}", PROMPTS[i], SETTINGS[i]) for i in which]


WAYS = [("none", 1), *((kind, gamma) for kind in ("lookup", "model") for gamma in (1, 4, "auto"))]


@lru_cache
def on_a_table() -> list[tuple[int, ...]]:
    alone = table_engine(TARGET, None, rows=1)
    return [run(alone, [request])[0].token_ids for request in asked("plain", list(range(5)))]


@pytest.mark.parametrize(("kind", "gamma"), WAYS)
def test_a_seed_gives_one_text_on_a_table(kind: str, gamma: Any) -> None:
    expected = on_a_table()
    assert len(set(expected)) == 5
    accepted = 0
    for rows in (1, 5):
        made = drafters(lambda: TableRunner(DRAFT, rows=5, max_len=64, margin=24), V)[kind]()
        controller = AdaptiveController(4, free=kind == "lookup") if gamma == "auto" else None
        engine = table_engine(TARGET, made, gamma=4 if gamma == "auto" else gamma, rows=rows, controller=controller)
        for name in ("cold", "warm"):
            assert [c.token_ids for c in run(engine, asked(name, list(range(5))))] == expected, (rows, name)
        assert [c.token_ids for c in run(engine, asked("other order", [3, 1]))] == [expected[3], expected[1]]
        accepted += engine.stats.accepted
    assert kind == "none" or accepted > 0


# -- on real models

TOKENS = 14
LINES = [[5, 6, 7, 8, 5, 6, 7], [9, 3, 9, 3, 9], [11], [40, 41, 42, 40, 41], [60, 61]]


@lru_cache
def target() -> Any:
    return tiny_model("llama")


def served(kind: str, gamma: Any, rows: int) -> LLM:
    draft: Any = {"none": None, "lookup": "lookup", "model": tiny_model("llama")}[kind]
    return LLM(target(), draft, gamma=gamma, max_rows=rows, max_model_len=64, check=False)


PARAMS = [SamplingParams(temperature=0.9, seed=seed, max_tokens=TOKENS) for seed in range(5)]


@lru_cache
def on_a_model() -> list[tuple[int, ...]]:
    plain = served("none", 1, 1)
    return [plain.generate(line, each).token_ids for line, each in zip(LINES, PARAMS, strict=True)]


@pytest.mark.parametrize(("kind", "gamma"), WAYS)
def test_a_seed_gives_one_text_on_a_model(kind: str, gamma: Any) -> None:
    params, expected = PARAMS, on_a_model()
    for rows in (1, 5):
        llm = served(kind, gamma, rows)
        for _ in ("cold", "warm"):
            assert [a.token_ids for a in llm.generate(LINES, params)] == expected, rows
        again = [llm.generate(line, each).token_ids for line, each in zip(LINES, params, strict=True)]
        assert again == expected, rows
        streamed = [p.token_id for p in llm.stream(LINES[0], params[0])]
        assert tuple(streamed) == expected[0]
    if kind == "model" and gamma != "auto":
        assert llm.stats.accepted > 0


def test_choices_of_one_seed_differ_and_repeat() -> None:
    params = SamplingParams(seed=4, n=3, max_tokens=TOKENS)
    texts = [
        [choice.token_ids for choice in served(kind, gamma, rows).generate(LINES[0], params).choices]
        for kind, gamma, rows in (("none", 1, 1), ("lookup", 4, 3), ("model", 2, 2))
    ]
    assert len(set(texts[0])) == 3
    assert texts[1] == texts[2] == texts[0]


def test_without_a_seed_two_answers_differ() -> None:
    llm = served("lookup", 4, 2)
    params = SamplingParams(max_tokens=TOKENS)
    assert llm.generate(LINES[0], params).token_ids != llm.generate(LINES[0], params).token_ids
