"""A sample of the schemas that benchmarks/structured_valid.py goes through whole, on the embedded model: answers that
end are valid by the package ``jsonschema``, and the same whoever drafts and whoever is answered beside them."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("llguidance")
pytest.importorskip("jsonschema")

from jsonschema.validators import validator_for
from llguidance import LLMatcher, LLTokenizer
from tokenizer_tools import smollm

from headstart import LLM, Structured
from headstart.machine.grammar import Grammars, _source_of

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SOME = (0, 3, 4, 5, 8, 10, 11, 13, 14, 16, 18, 20)  # of so many families


@pytest.fixture
def valid(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import structured_valid

    monkeypatch.setattr(structured_valid, "MAX_TOKENS", 90)
    return structured_valid


@pytest.mark.parametrize("greedy", [True, False])
def test_answers_are_valid_and_the_same_in_every_way(valid: ModuleType, greedy: bool) -> None:
    llm, cases = LLM(), valid.cases(21)
    numbers = SOME[0::2] if greedy else SOME[1::2]  # half of them each: the benchmark answers all in both ways
    chosen = [cases[number] for number in numbers]
    group = list(zip(numbers, chosen, strict=True))
    drafted, plain = (valid.answers(llm, group, greedy=greedy, drafted=way, together=True) for way in (True, False))
    alone = valid.answers(llm, group[:2], greedy=greedy, drafted=True, together=False)
    assert [each.token_ids for each in drafted] == [each.token_ids for each in plain]
    assert [each.token_ids for each in drafted[:2]] == [each.token_ids for each in alone]
    ended = [(case, each.text) for case, each in zip(chosen, drafted, strict=True) if each.finish_reason == "stop"]
    assert len(ended) >= 4
    assert {case.name: why for case, text in ended if (why := valid.why_invalid(case.schema, text))} == {}
    assert sum(each.stats.forced for each in drafted) > 20


def test_the_schemas_are_what_they_say(valid: ModuleType) -> None:
    """All of them are schemas, no two are the same, and each depends on its number alone."""
    found = valid.cases()
    assert len({json.dumps(case.schema) for case in found}) > 395
    assert valid.cases(30) == found[:30]
    for case in found:
        validator_for(case.schema).check_schema(case.schema)


def walk(source: str, chance: Random) -> str | None:
    """A text that a grammar lets through, byte by byte at random; None: it got too long."""
    matcher, text = LLMatcher(LLTokenizer("byte"), source, log_level=0), b""
    while not matcher.is_stopped():
        step = matcher.compute_ff_bytes()
        if not step:
            mask = matcher.compute_bitmask()
            allowed = [byte for byte in range(256) if mask[byte >> 3] >> (byte & 7) & 1]
            if not allowed or (matcher.is_accepting() and chance.random() < 0.3):
                break
            ends = [byte for byte in allowed if byte in b'"}],0123456789-:TZ']
            plain = [byte for byte in allowed if 32 <= byte < 127]
            step = bytes([chance.choice(ends if ends and chance.random() < 0.5 else plain or allowed)])
        if len(text) > 400:
            return None
        matcher.consume_tokens(list(step))
        text += step
    assert matcher.is_accepting()
    return text.decode()


def test_whatever_a_grammar_lets_through_is_valid(valid: ModuleType) -> None:
    """Whatever model writes it: every schema, a random text each."""
    wrong, ended = {}, 0
    for case in valid.cases():
        text = walk(_source_of(Structured(json=case.schema)), Random(case.name))
        if text is not None:
            ended += 1
            if why := valid.why_invalid(case.schema, text):
                wrong[case.name] = text, why
    assert wrong == {}
    assert ended > 350


@pytest.mark.parametrize(
    ("schema", "text", "why"),
    [
        ({"type": "integer"}, "1.5", "is not of type"),
        ({"type": "string", "format": "date"}, '"2026-02-30"', "is not a 'date'"),
        ({"type": "string"}, '"a', "not JSON"),
        ({"type": "string"}, '"a"', None),
    ],
)
def test_what_is_wrong_is_noticed(valid: ModuleType, schema: dict[str, Any], text: str, why: str | None) -> None:
    found = valid.why_invalid(schema, text)
    assert found is None if why is None else why in found


def test_a_larger_vocabulary_spells_the_same_texts(valid: ModuleType) -> None:
    import structured_vocabulary

    large = structured_vocabulary.enlarged(smollm(), 60_000)
    assert len(large) == 60_000
    grammar = Grammars(large, width=60_000, eos=(2,)).compile(Structured(choice=["yes", "no, not at all"]))
    text = b"no, not at all"
    assert b"".join(map(grammar.tokens.spelt, grammar.tokens.split(text))) == text
    state = grammar.begin(endings=frozenset({2}), min_tokens=0)
    for token in grammar.tokens.split(text):
        assert not state.over
        state.take(token)
    assert state.over
