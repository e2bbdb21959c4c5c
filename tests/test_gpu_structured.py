"""Rows with a grammar in captured rounds on a GPU: the same tokens as alone and step by step, in graphs that were
captured at load."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from grammars import Toy
from test_gpu_captured import DEEP, PROMPTS, pair

from headstart import LLM, SamplingParams
from headstart.engine.players import StepByStep
from headstart.machine.grammar import Grammars
from headstart.testing import TINY_VOCABULARY
from headstart.types import Request, Structured

pytestmark = pytest.mark.gpu
ASKED = Structured(regex="x")  # the grammar is given as an object; this only says that there is one


def steps(text: tuple[int, ...]) -> tuple[int, ...] | None:
    """Three kinds of tokens take turns, the third of which is free; behind 7 and 9 tokens the text ends."""
    if len(text) > 9 and text[-1] == 7:
        return ()
    return (None, tuple(range(3, 40, 2)), tuple(range(4, 60, 3)))[len(text) % 3]


SETTINGS: dict[str, list[dict[str, Any]]] = {
    "greedy": [{"temperature": 0}],
    "coupled": [{"temperature": 0.8, "top_p": 0.9}],
    "full": [{"temperature": 0, "logprobs": 2}, {"temperature": 0.8, "top_k": 7, "repetition_penalty": 1.2}],
}


def requests(kind: str) -> list[Request]:
    found = []
    for i, prompt in enumerate(PROMPTS):
        given = SETTINGS[kind][i % len(SETTINGS[kind])] | ({"structured": ASKED} if i % 2 else {})
        params = SamplingParams(max_tokens=20 + 5 * i, seed=i, **given)
        found.append(Request(str(i), tuple(prompt), params, (), Toy(steps, TINY_VOCABULARY) if i % 2 else None))
    return found


def answers(llm: LLM, asked: list[Request]) -> list[tuple[int, ...]]:
    handles = [llm.engine.submit(each) for each in asked]
    while not llm.engine.idle:
        llm.engine.step()
    return [handle.completion().token_ids for handle in handles]


@pytest.mark.parametrize("draft", ["model", "lookup", None])
@pytest.mark.parametrize("kind", sorted(SETTINGS))
def test_the_same_tokens_as_step_by_step(kind: str, draft: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Grammars, "possible", True)
    target, model = pair("llama", DEEP)
    made = partial(LLM, target, max_model_len=128, check=False)
    alone = made(None, max_rows=1)
    alone.engine.players = alone.engine.players[-1:]
    assert isinstance(alone.engine.players[0], StepByStep)
    expected = [answers(alone, [each])[0] for each in requests(kind)]
    stepped: list[bool] = []
    verify = StepByStep.verify

    def noted(self: Any, rows: Any, drafted: Any) -> Any:
        stepped.append(rows.reading or rows.first > 0)
        return verify(self, rows, drafted)

    monkeypatch.setattr(StepByStep, "verify", noted)
    llm = made(model if draft == "model" else draft, max_rows=4, **({"gamma": 3} if draft else {}))
    rounds = llm.engine.parts.captured
    assert rounds is not None
    before = rounds.captured_programs
    assert answers(llm, requests(kind)) == expected
    assert rounds.captured_programs == before  # nothing is captured while serving
    assert all(stepped)
    assert draft != "model" or llm.stats.accepted > 10


@pytest.mark.parametrize("rule", ["token", "block"])
def test_drawn_drafts_stay_inside_the_grammar(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Grammars, "possible", True)
    target, model = pair("llama", DEEP)
    llm = LLM(target, model, gamma=3, max_rows=4, max_model_len=128, check=False)
    asked = []
    for i in range(12):
        params = SamplingParams(max_tokens=40, seed=i, verification=rule, structured=ASKED if i % 3 else None)  # type: ignore[arg-type]
        grammar = Toy(steps, TINY_VOCABULARY) if i % 3 else None
        asked.append(Request(str(i), tuple(PROMPTS[i % 5]), params, (), grammar))
    for i, text in enumerate(answers(llm, asked)):
        for place, token in enumerate(text):
            allowed = steps(text[:place]) if i % 3 else None
            assert allowed is None or token in allowed
    assert llm.stats.accepted > 10
