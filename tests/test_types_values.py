"""What people pass as settings: None where vLLM takes it, NumPy's and torch's scalars, arrays; kept as plain Python."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from headstart import LLM, InvalidParameter, SamplingParams
from headstart.config import Config
from headstart.testing import tiny_model, tiny_tokenizer
from headstart.types import Request
from headstart.values import ids, shown

SCALARS: list[tuple[str, Any, Any]] = [
    ("temperature", np.float32(0.5), 0.5),
    ("temperature", torch.tensor(0.5), 0.5),
    ("temperature", 1, 1.0),
    ("top_p", np.float64(0.25), 0.25),
    ("min_p", np.float16(0.125), 0.125),
    ("top_k", np.int32(7), 7),
    ("top_k", np.int64(-1), 0),
    ("presence_penalty", np.array(0.5), 0.5),
    ("frequency_penalty", torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
    ("repetition_penalty", np.float32(1.5), 1.5),
    ("max_tokens", np.int64(9), 9),
    ("max_tokens", torch.tensor(9), 9),
    ("min_tokens", np.uint8(4), 4),
    ("n", np.int16(3), 3),
    ("logprobs", np.int64(2), 2),
    ("seed", np.uint64(2**64 - 1), 2**64 - 1),
    ("seed", np.int64(-5), -5),
    ("ignore_eos", np.bool_(True), True),
    ("speculate", torch.tensor(False), False),
    ("stop_token_ids", np.array([2, 5]), (2, 5)),
    ("stop_token_ids", torch.tensor([2, 5]), (2, 5)),
    ("stop_token_ids", [np.int64(2)], (2,)),
    ("stop_token_ids", {7}, {7}),
    ("stop_token_ids", range(3), (0, 1, 2)),
    ("stop", np.array(["a", "b"]), ("a", "b")),
    ("logit_bias", {np.int64(3): np.float32(0.5), 4: torch.tensor(1)}, {3: 0.5, 4: 1.0}),
]


@pytest.mark.parametrize(("field", "value", "kept"), SCALARS)
def test_scalars_and_arrays_are_kept_as_plain_python(field: str, value: Any, kept: Any) -> None:
    found = getattr(SamplingParams(**{field: value}), field)
    assert (set(found) if isinstance(kept, set) else found) == kept
    if not isinstance(kept, set):
        assert type(found) is type(kept)
    for part in [*found, *found.values()] if isinstance(found, dict) else found if isinstance(found, tuple) else ():
        assert type(part) in (int, float, str)


@pytest.mark.parametrize("field", ["stop", "stop_token_ids", "seed", "logit_bias", "logprobs", "max_tokens"])
def test_none_is_taken_where_vllm_takes_it(field: str) -> None:
    params = SamplingParams(**{field: None})  # type: ignore[arg-type]
    assert getattr(params, field) == {"stop": (), "stop_token_ids": ()}.get(field)


WRONG: list[tuple[str, Any]] = [
    ("temperature", None),
    ("temperature", np.float32("nan")),
    ("temperature", np.bool_(True)),
    ("temperature", np.array([0.5])),
    ("temperature", np.str_("0.5")),
    ("top_k", np.float64(3)),
    ("top_k", np.array([1, 2])),
    ("seed", torch.tensor(1.0)),
    ("ignore_eos", np.int64(1)),
    ("ignore_eos", None),
    ("stop", b"bytes"),
    ("stop", {"a": 1}),
    ("stop_token_ids", 5),
    ("stop_token_ids", "5"),
    ("stop_token_ids", np.array([1.0])),
    ("stop_token_ids", np.array([[1]])),
    ("stop_token_ids", [True]),
    ("stop_token_ids", [None]),
    ("logit_bias", [3, 4]),
    ("logit_bias", {"3": 1.0}),
    ("logit_bias", {3: None}),
]


@pytest.mark.parametrize(("field", "value"), WRONG)
def test_what_stands_for_no_value_is_one_clear_error(field: str, value: Any) -> None:
    with pytest.raises(InvalidParameter) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field


def test_settings_of_the_engine_take_scalars_too() -> None:
    config = Config.of({"gamma": np.int64(3), "max_rows": np.int32(2), "max_model_len": torch.tensor(64)})
    assert (config.draft.gamma, config.engine.max_rows, config.engine.max_model_len) == (3, 2, 64)
    assert all(type(n) is int for n in (config.draft.gamma, config.engine.max_rows, config.engine.max_model_len))


def test_ids_are_read_from_anything_that_lists_them() -> None:
    for value in (
        [1, 2],
        (1, 2),
        range(1, 3),
        np.array([1, 2], np.uint16),
        torch.tensor([1, 2]),
        iter([1, np.int8(2)]),
    ):
        found = ids("prompt", value)
        assert found == [1, 2]
        assert all(type(token) is int for token in found)
    assert ids("prompt", []) == []
    assert ids("prompt", [torch.tensor(4)]) == [4]


class Broken:
    def __repr__(self) -> str:
        raise RuntimeError


def test_an_error_shows_any_value_in_a_few_words() -> None:
    for value in ("x" * 10_000, list(range(10_000)), torch.zeros(5000), 10**9000, [10**9000], Broken(), np.zeros(9999)):
        assert len(shown(value)) < 120, type(value)
        assert "\n" not in shown(value)


# -- max_tokens=None: to the end of the context


def test_no_limit_is_the_end_of_the_context() -> None:
    request = Request("r", (1, 2, 3), SamplingParams(max_tokens=None))
    assert request.longest(10) == 10
    assert Request("r", (1, 2, 3), SamplingParams(max_tokens=4)).longest(10) == 7
    assert Request("r", (1, 2, 3), SamplingParams(max_tokens=None, min_tokens=7)).longest(10) == 10


@pytest.mark.parametrize(
    ("length", "params", "field", "words"),
    [
        (10, SamplingParams(max_tokens=None), "prompt", "prompt has 10 tokens; max_model_len is 10"),
        (11, SamplingParams(max_tokens=1), "prompt", "prompt has 11 tokens; max_model_len is 10"),
        (8, SamplingParams(max_tokens=3), "max_tokens", "8 prompt tokens leave room for 2"),
        (8, SamplingParams(max_tokens=None, min_tokens=3), "min_tokens", "8 prompt tokens leave room for 2"),
    ],
)
def test_what_does_not_fit_names_max_model_len(length: int, params: SamplingParams, field: str, words: str) -> None:
    with pytest.raises(InvalidParameter, match="max_model_len is 10") as caught:
        Request("r", tuple(range(length)), params).longest(10)
    assert caught.value.field == field
    assert words in str(caught.value)


def test_an_answer_without_a_limit_fills_the_context() -> None:
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    for draft in (None, "lookup"):
        llm = LLM(tiny_model("llama"), draft, gamma=4, max_rows=2, max_model_len=40, check=False)
        answers = llm.generate([[5, 6, 5, 6, 5], [7] * 39], params)
        assert [len(a.token_ids) for a in answers] == [35, 1]
        assert {a.finish_reason for a in answers} == {"length"}


def test_stop_strings_need_a_tokenizer() -> None:
    params = SamplingParams(stop="e", max_tokens=4)
    bare = LLM(tiny_model("llama"), None, max_model_len=40, check=False)
    with pytest.raises(InvalidParameter, match="stop needs a tokenizer") as caught:
        bare.generate([5, 6], params)
    assert caught.value.field == "stop"
    assert bare.engine.idle
    LLM(tiny_model("llama"), None, tokenizer=tiny_tokenizer(), max_model_len=40, check=False).generate([5, 6], params)
