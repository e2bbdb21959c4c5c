"""Requests over HTTP know every sampling parameter, and are refused for the first thing that is wrong."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

pytest.importorskip("pydantic")

from pydantic import ValidationError

from headstart import SamplingParams
from headstart.server.errors import Refused
from headstart.server.schemas import ChatRequest, CompletionRequest, Detokenize, Tokenize


@pytest.mark.parametrize("request_kind", [ChatRequest, CompletionRequest])
def test_no_sampling_parameter_is_forgotten(request_kind: type) -> None:
    assert {field.name for field in fields(SamplingParams)} - {"structured"} <= set(request_kind.model_fields)  # type: ignore[attr-defined]


def test_values_that_are_sent_arrive_and_null_is_the_default() -> None:
    sent = {"temperature": 0.5, "top_k": 3, "min_p": 0.1, "ignore_eos": True, "seed": 4, "speculate": False}
    params = CompletionRequest.model_validate({"prompt": "a", "max_tokens": 5} | sent).params()
    assert {name: getattr(params, name) for name in sent} == sent
    assert CompletionRequest.model_validate({"prompt": "a"} | dict.fromkeys(sent)).params() == SamplingParams(
        max_tokens=16
    )


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionRequest, {"prompt": [0.5] * 2000}),
        (CompletionRequest, {"prompt": [[0.5]] * 2000}),
        (CompletionRequest, {"prompt": "a", "stop": [1] * 2000}),
        (CompletionRequest, {"prompt": "a", "stop_token_ids": ["x"] * 2000}),
        (CompletionRequest, {"prompt": "a", "logit_bias": {str(i): "x" for i in range(2000)}}),
        (Tokenize, {"prompt": "a"} | {f"x{i}": 1 for i in range(2000)}),
        (CompletionRequest, {"prompt": "a", "prediction": {"type": "content", "content": [{}] * 2000}}),
        (ChatRequest, {"messages": [{}] * 2000}),
        (ChatRequest, {"messages": [{"role": "user", "content": [{}] * 2000}]}),
        (ChatRequest, {"messages": [{"role": "user", "content": "a"} | {f"x{i}": 1 for i in range(2000)}]}),
        (Tokenize, {"messages": [{}] * 2000}),
        (Detokenize, {"tokens": [0.5] * 2000}),
    ],
)
def test_one_fault_is_enough(kind: Any, body: Any) -> None:
    """A record of each fault takes kilobytes: a body of megabytes, wrong all over, took gigabytes and minutes."""
    with pytest.raises(ValidationError) as found:
        kind.model_validate(body)
    assert found.value.error_count() < 10


def test_the_first_unknown_field_is_told_and_numbers_as_text_are_numbers() -> None:
    with pytest.raises(ValidationError) as found:
        Tokenize.model_validate({"prompt": "a", "first": 1, "model": "tiny", "second": 1})
    assert [error["loc"] for error in found.value.errors()] == [("first",)]
    kept = CompletionRequest.model_validate({"prompt": "a", "logit_bias": {"1": "0.5", "2": 2}})
    assert kept.params().logit_bias == {1: 0.5, 2: 2.0}


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionRequest, {"prompt": "a", "logit_bias": {str(i): 1 for i in range(16385)}}),
        (CompletionRequest, {"prompt": "a", "stop_token_ids": [1] * 16385}),
        (CompletionRequest, {"prompt": "a", "stop": ["x"] * 17}),
        (ChatRequest, {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 4097}]}),
    ],
)
def test_every_list_has_an_end(kind: Any, body: Any) -> None:
    with pytest.raises((ValidationError, Refused), match="at most"):
        kind.model_validate(body)
