"""Bounds of numbers and of formats: whatever a grammar lets through is within them, next to the bounds too."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import pytest

pytest.importorskip("llguidance")

from headstart import InvalidParameter, Structured
from headstart.machine.grammar import Grammars
from headstart.machine.schemas import adapted
from headstart.maths.bitmask import allows
from headstart.testing import TINY_VOCABULARY, tiny_tokenizer

LOWS, HIGHS = (-10, -1.5, -0.25, 0, 0.5, 9.75, 10), (-9.75, -1, 0, 0.25, 10, 10.25, 11, 10010)


def near(bound: float) -> list[str]:
    """Texts of numbers at a bound and about it."""
    found = [bound, bound - 1, bound + 1, bound - 0.25, bound + 0.25, bound - 0.001, bound + 0.001]
    texts = {f"{round(value, 4):g}" for value in found} | {f"{round(value, 4):.4f}" for value in found}
    return sorted(text for text in texts if not text.startswith("-0.0000") and text != "-0")


def within(value: float, schema: dict[str, Any]) -> bool:
    return (
        value >= schema.get("minimum", value)
        and value <= schema.get("maximum", value)
        and value > schema.get("exclusiveMinimum", float("-inf"))
        and value < schema.get("exclusiveMaximum", float("inf"))
    )


def lets_through(grammar: Any, text: str) -> bool:
    """May an answer be this text, and end there?"""
    state, line = grammar.begin(endings=frozenset({2}), min_tokens=0), grammar.tokens.split(text.encode())
    if state.fits(line) < len(line):
        return False
    for token in line:
        state.take(token)
    return state.over or allows(state.mask(()), 2)


@pytest.mark.parametrize("lower", ["minimum", "exclusiveMinimum"])
@pytest.mark.parametrize("upper", ["maximum", "exclusiveMaximum"])
def test_numbers_are_within_their_bounds(lower: str, upper: str) -> None:
    grammars = Grammars(tiny_tokenizer(), width=TINY_VOCABULARY, eos=(2,))
    wrong, lost, taken = [], [], 0
    for low, high in product(LOWS, HIGHS):
        if low >= high:
            continue
        schema = {"type": "number", lower: low, upper: high}
        grammar = grammars.compile(Structured(json=schema))
        for text in near(low) + near(high):
            accepted = lets_through(grammar, text)
            taken += accepted
            if accepted and not within(float(text), schema):
                wrong.append((schema, text))
            if not accepted and within(float(text), schema) and not text.endswith("0"):  # zeros may be too many
                lost.append((schema, text))
    assert wrong == []
    assert lost == []
    assert taken > 100


def test_only_what_is_taken_otherwise_is_said_otherwise() -> None:
    schema = {
        "properties": {
            "exclusiveMinimum": {"type": "integer"},
            "a": {"type": "integer", "exclusiveMinimum": 1, "maximum": 3},
            "b": {"exclusiveMinimum": 1, "multipleOf": 0.5},
        },
        "exclusiveMinimum": True,  # draft 4's
        "const": {"exclusiveMinimum": 1, "maximum": 1.5},
        "anyOf": [{"maximum": 0.5, "minimum": 0.25}, {"exclusiveMinimum": 1e300}, {"maximum": 9e14}],
    }
    assert json.loads(adapted(json.dumps(schema))) == schema
    assert json.loads(adapted('{"items": [{"exclusiveMinimum": 1, "maximum": 1.5}]}')) == {
        "items": [{"minimum": 1.0000000000000002, "maximum": 1.5}]
    }
    assert json.loads(adapted('{"exclusiveMaximum": 0, "minimum": -0.5}')) == {"maximum": -1e-15, "minimum": -0.5}
    assert json.loads(adapted('{"exclusiveMinimum": 10, "minimum": 11}')) == {"minimum": 11}
    named = {"properties": {"default": {"exclusiveMinimum": 1, "maximum": 1.5}}}  # a property of that name
    assert json.loads(adapted(json.dumps(named)))["properties"]["default"] == {
        "minimum": 1.0000000000000002,
        "maximum": 1.5,
    }


@pytest.mark.parametrize(
    ("schema", "wrong", "right"),
    [
        ({"exclusiveMinimum": 10, "maximum": 11}, "10.0000000000000001", "10.000000000000002"),
        ({"exclusiveMinimum": 10}, "10.0000000000000000001", "10.001"),
        ({"minimum": -99, "exclusiveMaximum": -7.65}, "-7.65000000000000000001", "-7.6501"),
        ({"exclusiveMinimum": 0.5, "maximum": 3}, "0.50000000000000000001", "0.5001"),
        ({"exclusiveMinimum": 0, "maximum": 3}, "0." + "0" * 400 + "1", "0.0001"),
        ({"exclusiveMaximum": 0, "minimum": -3}, "-0." + "0" * 400 + "1", "-0.0001"),
        ({"exclusiveMinimum": 1e-20, "maximum": 3}, "0.00000000000000000001", "0.0001"),
    ],
)
def test_what_a_double_takes_for_the_bound_is_not_let_through(schema: dict[str, Any], wrong: str, right: str) -> None:
    grammar = Grammars(tiny_tokenizer(), width=TINY_VOCABULARY, eos=(2,)).compile(
        Structured(json=schema | {"type": "number"})
    )
    assert not within(float(wrong), schema)
    assert not lets_through(grammar, wrong)
    assert lets_through(grammar, right)


LARGE = (
    10**15,
    1e15 + 0.5,
    1.5e15,
    2**53 - 1,
    2**53,
    2**53 + 1,
    1e16,
    123456789012345678,
    1234567890123450000,
    2**63 - 1,
)


@pytest.mark.parametrize("kind", ["number", "integer"])
@pytest.mark.parametrize("bound", ["minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"])
def test_large_bounds(bound: str, kind: str) -> None:
    """llguidance rounds them to doubles, writes those with fewer digits, and counts in 64 bits."""
    grammars = Grammars(tiny_tokenizer(), width=TINY_VOCABULARY, eos=(2,))
    inwards = 1 if "inimum" in bound else -1
    for value in (*LARGE, *(-each for each in LARGE)):
        if abs(value) > 9e17 and value * inwards > 0:
            continue  # there is too little left inwards, and it is refused
        schema = {"type": kind, bound: value}
        grammar, whole = grammars.compile(Structured(json=schema)), int(value)
        texts = [str(whole + each) for each in (-100, -2, -1, 0, 1, 2, 100)]
        texts += [f"{whole + i}.{part}" for i in (-1, 0, 1) for part in ("0", "0000000001", "125", "5", "99999999999")]
        for text in texts if kind == "number" else texts[:7]:
            assert within(json.loads(text), schema) or not lets_through(grammar, text), (schema, text)
        beyond = min(max(whole + inwards * abs(whole) // 10**9, -89 * 10**16), 89 * 10**16)
        assert lets_through(grammar, str(beyond)), (schema, beyond)
        assert lets_through(grammar, "7") == within(7, schema)
    with pytest.raises(InvalidParameter):
        grammars.compile(Structured(json={"type": kind, bound: inwards * 1e19}))
    assert lets_through(grammars.compile(Structured(json={"type": kind, bound: -inwards * 1e300})), "-7")


@pytest.mark.parametrize(
    ("form", "longest", "too_long"),
    [
        ("uri", "a" * 40 + ":b", "a" * 41),
        ("uri", "http://u:p@h:80/" + "x" * 300, "texture-based-" * 3),
        ("email", "a" * 64 + "@b.c", "a" * 65),
        ("hostname", "a." * 126 + "a", "a." * 127),
        ("date-time", "2026-01-02T03:04:05.123456789Z", "2026-01-02T03:04:05.1234567890"),
        ("date-time", "2026-01-02T03:04:05+02:00", "2026-01-02T03:04:05.1234567890"),
        ("time", "03:04:05.123456789Z", "03:04:05.1234567890"),
        ("duration", "P123456789Y2M3DT4H5M6S", "P1234567890"),
        ("duration", "P1W", "PT1234567890"),
    ],
)
def test_texts_of_a_format_come_to_an_end(form: str, longest: str, too_long: str) -> None:
    """What models would otherwise go on with for as long as they may: words before a URI's colon, zeros of a second."""
    grammars = Grammars(tiny_tokenizer(), width=TINY_VOCABULARY, eos=(2,))
    grammar = grammars.compile(Structured(json={"type": "string", "format": form, "pattern": "^[^ ]"}))
    assert lets_through(grammar, f'"{longest}"')
    line = grammar.tokens.split(f'"{too_long}'.encode())
    assert grammar.begin(endings=frozenset({2}), min_tokens=0).fits(line) < len(line)


OPEN: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("schema", "text", "taken"),
    [
        # a key that is named may not be written again in another way
        (OPEN, '{"a": 1, "\\u0061": "x"}', False),
        (OPEN, '{"a": 1, "b": "x"}', True),
        ({"type": "object", "properties": {"a": False}}, '{"\\u0061": "x"}', False),
        ({"type": "object", "patternProperties": {"^a": {"type": "integer"}}}, '{"\\u0061": "x"}', False),
        ({"type": "string"}, '"\\n\\""', True),
        ({"enum": ["\u0001"]}, '"\\u0001"', True),  # here there is no other way
        # llguidance's own options are not a client's to set
        ({"x-guidance": {"lenient": True}, "enum": [1, 2], "items": {"x-guidance": {"lenient": True}}}, "1", True),
        ({"x-guidance": {"item_separator": ";"}, "enum": [[1, 2]]}, "[1;2]", False),
        ({"items": {"x-guidance": {"item_separator": ";"}, "enum": [[1, 2]]}, "type": "array"}, "[[1, 2]]", True),
        ({"type": "object", "properties": {"x-guidance": {"type": "integer"}}}, '{"x-guidance": 1}', True),
        # days that there are not
        ({"type": "string", "format": "date"}, '"2024-02-29"', True),
        ({"type": "string", "format": "date"}, '"2023-02-29"', False),
        ({"type": "string", "format": "date"}, '"1900-02-29"', False),
        ({"type": "string", "format": "date"}, '"2000-02-29"', True),
        ({"type": "string", "format": "date"}, '"0000-01-01"', False),
        ({"type": "string", "format": "date"}, '"2023-12-31"', True),
        ({"type": "string", "format": "date"}, '"2023-02-28"', True),
        ({"type": "string", "format": "date-time"}, '"2023-02-29T01:02:03Z"', False),
        ({"type": "string", "format": "date-time"}, '"2024-02-29T01:02:03.5Z"', True),
    ],
)
def test_what_is_let_through(schema: dict[str, Any], text: str, taken: bool) -> None:
    grammars = Grammars(tiny_tokenizer(), width=TINY_VOCABULARY, eos=(2,))
    assert lets_through(grammars.compile(Structured(json=schema)), text) == taken


def test_options_of_llguidance_make_no_schema_easier() -> None:
    grammars = Grammars(tiny_tokenizer(), width=TINY_VOCABULARY, eos=(2,))
    with pytest.raises(InvalidParameter, match="uniqueItems"):
        grammars.compile(Structured(json={"x-guidance": {"lenient": True}, "type": "array", "uniqueItems": True}))
