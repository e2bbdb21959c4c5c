"""Structured answers beside each other: coming, going, cancelled, of many choices. Each is what it would be alone."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest

pytest.importorskip("llguidance")

from headstart import LLM, SamplingParams, Structured
from headstart.testing import tiny_model, tiny_tokenizer

MODEL, TOKENIZER = tiny_model("llama"), tiny_tokenizer()


def llm(draft: Any = None, **settings: Any) -> LLM:
    return LLM(MODEL, draft, tokenizer=TOKENIZER, check=False, **{"max_model_len": 192, "gamma": 4} | settings)


PLAIN = llm()


def asked(number: int) -> SamplingParams:
    """No two have the same shape; every third is free."""
    shapes: list[Structured | None] = [
        Structured(
            json={"type": "object", "properties": {f"key{number}": {"enum": ["a", "bb"]}, "n": {"type": "null"}}}
        ),
        Structured(regex=f"[a-c]{{2,6}}-{number}+"),
        None,
        Structured(choice=[f"yes {number}", f"no {number}"], after=">" if number % 2 else None),
    ]
    chosen = {"temperature": 0} if number % 2 else {"seed": number}
    return SamplingParams(max_tokens=40, structured=shapes[number % 4], **chosen)


@pytest.mark.parametrize("draft", ["lookup", "model"])
def test_eight_shapes_come_and_go_and_some_are_cancelled(draft: str) -> None:
    expected = {number: PLAIN.generate(f"hello {number}", asked(number)) for number in range(8)}
    drafted = llm(tiny_model("llama", seed=1) if draft == "model" else draft, max_rows=3)
    cancelled = whole = 0
    for seed in range(3):
        chance = Random(seed)
        waiting, running = list(range(8)), dict[int, Any]()
        while waiting or any(not each.done for each in running.values()):
            if waiting and chance.random() < 0.4:
                number = waiting.pop(chance.randrange(len(waiting)))
                request = drafted.request(f"hello {number}", asked(number), id=f"{seed}/{number}")
                running[number] = drafted.engine.submit(request)
            live = [number for number, each in running.items() if not each.done]
            if live and chance.random() < 0.12:
                cancelled += drafted.abort(f"{seed}/{chance.choice(live)}")
            drafted.engine.step()
        assert drafted.engine.idle
        for number, each in running.items():
            found = each.completion()
            if found.finish_reason == "abort":
                line = tuple(found.token_ids)
                assert line == tuple(expected[number].token_ids[: len(line)])
            else:
                whole += 1
                assert (found.text, found.finish_reason) == (expected[number].text, expected[number].finish_reason)
    assert cancelled > 2
    assert whole > 9
    assert drafted.engine.inactive_reason is None


def test_many_choices_with_logprobs_and_penalties_are_the_same_with_a_draft() -> None:
    shape = {"type": "array", "items": {"enum": ["ab", "ba", "abba"]}, "minItems": 3, "maxItems": 5}
    params = SamplingParams(
        max_tokens=60,
        seed=11,
        n=4,
        logprobs=3,
        temperature=1.3,
        top_p=0.95,
        presence_penalty=0.7,
        frequency_penalty=0.4,
        repetition_penalty=1.2,
        logit_bias={TOKENIZER.convert_tokens_to_ids("b"): 1.5},
        min_tokens=12,
        structured=Structured(json=shape),
    )
    expected = PLAIN.generate("hello", params)
    assert len({choice.text for choice in expected.choices}) > 1
    for draft in ("lookup", MODEL, tiny_model("llama", seed=1)):
        found = llm(draft).generate("hello", params)
        for mine, theirs in zip(found.choices, expected.choices, strict=True):
            assert 3 <= len(json.loads(mine.text)) <= 5
            assert (mine.text, mine.token_ids) == (theirs.text, theirs.token_ids)
            assert mine.logprobs is not None
            assert theirs.logprobs is not None
            for a, b in zip(mine.logprobs, theirs.logprobs, strict=True):
                assert (a.token_id, a.logprob) == (b.token_id, pytest.approx(b.logprob, abs=1e-4))
                assert list(a.top) == list(b.top)
        assert sum(choice.stats.forced for choice in found.choices) > 4
