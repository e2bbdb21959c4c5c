"""The record by which a request asks for structured output: one way, hashable, refused by a sentence that helps."""

from __future__ import annotations

import json
from dataclasses import replace
from enum import Enum
from typing import Any

import pytest

from headstart import InvalidParameter, SamplingParams, Structured


def test_a_dict_and_its_text_are_the_same_schema_with_the_keys_in_their_order() -> None:
    schema = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"enum": ["ä"]}}}
    one, other = Structured(json=schema), Structured(json=json.dumps(schema, indent=4))
    assert one == other
    assert hash(one) == hash(other)
    assert json.loads(str(one.json)) == schema
    assert str(one.json).index('"b"') < str(one.json).index('"a"')
    assert len({SamplingParams(structured=one), SamplingParams(structured=other)}) == 1


def test_what_may_be_written_once_only_counts() -> None:
    Structured(json={"minProperties": 2, "properties": {"a": {}, "b": {}}, "additionalProperties": False})
    Structured(json={"minProperties": 2, "required": ["a"]})
    Structured(json={"properties": {"minProperties": {"type": "integer"}}, "const": {"minProperties": 9}})


def test_steps_that_may_be() -> None:
    for step in (1, 7, 997, 7_500, 10_000, 0.01, 0.125, 2.5, 1e-9, 1e4):
        assert Structured(json={"multipleOf": step}).json
    assert Structured(json={"properties": {"multipleOf": {"type": "integer"}}}).json  # a property of that name


class Colour(str, Enum):  # noqa: UP042 - what people have
    RED = "red"
    GREEN = "green"


def test_texts_of_an_enum_are_texts() -> None:
    assert Structured(choice=list(Colour)).choice == ("red", "green")
    assert type(Structured(choice=[Colour.RED]).choice[0]) is str  # type: ignore[index]
    assert Structured(regex=Colour.RED).regex == "red"


def test_choices_are_kept_once_each() -> None:
    assert Structured(choice=["yes", "no", "yes"]).choice == ("yes", "no")
    assert Structured(choice=("a",)).kind == "choice"
    assert replace(Structured(regex="a"), after="</think>").after == "</think>"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "exactly one of json, json_object, regex, choice, grammar; none of them was given"),
        ({"regex": "a", "choice": ["b"]}, "regex and choice were given"),
        ({"json": "{"}, "structured.json is not JSON"),
        ({"json": "[1]"}, "must be a JSON schema"),
        ({"json": '{"minimum": NaN}'}, "NaN is no JSON number"),
        ({"json": {"minimum": float("inf")}}, "cannot be written as JSON"),
        ({"json": {"x": object()}}, "cannot be written as JSON"),
        ({"json": "[" * 100_000}, "nested too deeply"),
        ({"json": {"x": "a" * (1 << 18)}}, "at most 262144 characters"),
        ({"json": {"items": [{"minProperties": 2}]}}, "asks for minProperties 2, which could not be kept"),
        ({"json": {"minProperties": 3, "required": ["a"], "patternProperties": {"b": {}}}}, "minProperties 3"),
        ({"json": {"minProperties": 3, "required": ["a", "a"]}}, "structured.json asks for minProperties 3"),
        ({"json": {"minProperties": 3, "x": "a" * (1 << 18)}}, "at most 262144 characters"),
        (
            {"json": {"items": {"multipleOf": 99989}}},
            "asks for multipleOf 99989, which takes too long: use a smaller step",
        ),
        ({"json": {"multipleOf": 0.12345}}, "asks for multipleOf 0.12345"),
        ({"json": {"multipleOf": 9973}}, "asks for multipleOf 9973"),
        ({"json_object": 1}, "structured.json_object must be true or false"),
        ({"regex": ""}, "not empty"),
        ({"regex": "\ud800"}, "surrogate"),
        ({"regex": 3}, "structured.regex must be a text"),
        ({"choice": "yes"}, "must be a list of texts"),
        ({"choice": []}, "takes 1 to 4096 texts, not 0"),
        ({"choice": ["a", ""]}, "not empty"),
        ({"regex": "a", "after": ""}, "structured.after"),
        ({"regex": "a", "disable_any_whitespace": True}, "is for json and json_object, not for regex"),
        ({"json_object": True, "whitespace_pattern": " ", "disable_any_whitespace": True}, "cannot be used with"),
    ],
)
def test_what_is_wrong_is_said(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidParameter) as error:
        Structured(**given)
    assert said in str(error.value)
    assert error.value.field.startswith("structured")


def test_a_schema_that_holds_itself() -> None:
    schema: dict[str, Any] = {}
    schema["self"] = schema
    with pytest.raises(InvalidParameter, match=r"structured\.json"):
        Structured(json=schema)


def test_sampling_params_take_nothing_else() -> None:
    with pytest.raises(InvalidParameter, match=r"must be a Structured, as in headstart\.Structured"):
        SamplingParams(structured={"json": {}})  # type: ignore[arg-type]
