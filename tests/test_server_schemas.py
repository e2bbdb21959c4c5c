"""Requests over HTTP know every sampling parameter."""

from __future__ import annotations

from dataclasses import fields

import pytest

pytest.importorskip("pydantic")

from headstart import SamplingParams
from headstart.server.schemas import ChatRequest, CompletionRequest


@pytest.mark.parametrize("request_kind", [ChatRequest, CompletionRequest])
def test_no_sampling_parameter_is_forgotten(request_kind: type) -> None:
    assert {field.name for field in fields(SamplingParams)} <= set(request_kind.model_fields)  # type: ignore[attr-defined]


def test_values_that_are_sent_arrive_and_null_is_the_default() -> None:
    sent = {"temperature": 0.5, "top_k": 3, "min_p": 0.1, "ignore_eos": True, "seed": 4, "speculate": False}
    params = CompletionRequest.model_validate({"prompt": "a", "max_tokens": 5} | sent).params()
    assert {name: getattr(params, name) for name in sent} == sent
    assert CompletionRequest.model_validate({"prompt": "a"} | dict.fromkeys(sent)).params() == SamplingParams(
        max_tokens=16
    )
