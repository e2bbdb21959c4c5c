"""Floor 0: every value out of range is one clear error that names its field."""

from __future__ import annotations

import math
from dataclasses import fields
from inspect import signature
from typing import Any

import pytest

from headstart.config import Config, DraftConfig, EngineConfig
from headstart.errors import HeadstartError, InvalidParameter
from headstart.types import Origin, Proposal, SamplingParams, Verdict

BAD: list[tuple[str, Any]] = [
    ("temperature", -0.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", "1"),
    ("temperature", True),
    ("top_p", 0),
    ("top_p", 1.01),
    ("top_p", math.nan),
    ("min_p", -0.01),
    ("min_p", 1.5),
    ("top_k", -2),
    ("top_k", 1.5),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("repetition_penalty", 0),
    ("repetition_penalty", math.nan),
    ("max_tokens", -1),
    ("max_tokens", True),
    ("min_tokens", -1),
    ("min_tokens", 129),
    ("n", 0),
    ("n", 65),
    ("logprobs", -1),
    ("logprobs", 51),
    ("prompt_logprobs", 51),
    ("seed", 2**64),
    ("seed", -(2**63) - 1),
    ("seed", 1.0),
    ("stop", [""]),
    ("stop", ["a"] * 17),
    ("stop", ["a" * 1001]),
    ("stop", [3]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", ["x"]),
    ("logit_bias", {1: 101.0}),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {1: math.nan}),
    ("verification", "exact"),
    ("ignore_eos", 1),
    ("speculate", "yes"),
]


@pytest.mark.parametrize(("field", "value"), BAD)
def test_bad_sampling_values_name_their_field(field: str, value: Any) -> None:
    with pytest.raises(InvalidParameter) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field
    assert str(caught.value).startswith(field)
    assert isinstance(caught.value, (HeadstartError, ValueError))


def test_good_sampling_values_pass() -> None:
    params = SamplingParams(temperature=0, top_k=-1, stop="end", logit_bias={3: -100}, seed=2**64 - 1, logprobs=0)
    assert params.greedy
    assert params.top_k == 0
    assert params.stop == ("end",)


def test_unknown_ids_are_refused_where_the_vocabulary_is_known() -> None:
    for params, field in (
        (SamplingParams(logit_bias={100: 1.0}), "logit_bias"),
        (SamplingParams(stop_token_ids=[100]), "stop_token_ids"),
    ):
        params.check_vocabulary(101)
        with pytest.raises(InvalidParameter) as caught:
            params.check_vocabulary(100)
        assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "value"),
    [("gamma", -1), ("gamma", 65), ("gamma", "fast"), ("max_rows", 0), ("max_model_len", 1), ("prefill_chunk", 0)],
)
def test_bad_settings_name_their_field(field: str, value: Any) -> None:
    with pytest.raises(InvalidParameter) as caught:
        Config.of({field: value})
    assert caught.value.field == field


def test_unknown_settings_are_an_error() -> None:
    with pytest.raises(InvalidParameter, match=r"max_row is not .* did you mean max_rows"):
        Config.of({"max_row": 3})


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("quantisation", "quantization"),
        ("devic", "device"),
        ("gama", "gamma"),
        ("max_len", "max_model_len"),
        ("drafter", "draft"),
        ("tensor_parallel_size", None),
    ],
)
def test_an_unknown_argument_is_told_the_nearest_of_all_that_there_are(wrong: str, meant: str | None) -> None:
    LLM = pytest.importorskip("headstart.api", reason="needs torch", exc_type=ImportError).LLM
    with pytest.raises(InvalidParameter) as caught:
        LLM(**{wrong: "int4"})
    assert caught.value.field == wrong
    told, known = str(caught.value).split("the settings are ")
    assert told.endswith(f"{wrong} is not a setting; " if meant is None else "? ")
    assert meant is None or f"did you mean {meant}" in told
    taken = {name for name, p in signature(LLM).parameters.items() if p.kind != p.VAR_KEYWORD}
    assert set(known.split(", ")) == taken | {f.name for part in (EngineConfig, DraftConfig) for f in fields(part)}


def test_a_chain_knows_that_it_is_one() -> None:
    assert Proposal.chain([4, 5, 6]).is_chain
    assert not Proposal((4, 5), (-1, -1)).is_chain


def test_a_proposal_is_cut_to_its_first_tokens() -> None:
    tree = Proposal((5, 6, 7, 8), (-1, -1, 1, 2), strength=3)
    assert tree.cut(9) is tree
    assert tree.cut(4) is tree
    assert tree.cut(3) == Proposal((5, 6, 7), (-1, -1, 1), strength=3)
    assert tree.cut(0) is None
    torch = pytest.importorskip("torch")
    q = torch.rand(3, 4)
    short = Proposal.chain([1, 2, 3], q).cut(2)
    assert short is not None
    assert (short.tokens, short.parents, short.draw) == ((1, 2), (-1, 0), "iid")
    assert torch.equal(short.q, q[:2])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("proposal", "path", "origin"),
    [
        (None, (), "plain"),
        (Proposal.chain([4, 5]), (), "correction"),
        (Proposal.chain([4, 5]), (0,), "correction"),
        (Proposal.chain([4, 5]), (0, 1), "bonus"),
        (Proposal((4, 5, 6), (-1, -1, 1)), (0,), "bonus"),  # nothing was drafted behind the first branch
        (Proposal((4, 5, 6), (-1, -1, 1)), (1,), "correction"),
    ],
)
def test_a_verdict_says_where_its_token_came_from(
    proposal: Proposal | None, path: tuple[int, ...], origin: Origin
) -> None:
    assert Verdict.on(proposal, path, 7) == Verdict(path, 7, origin)
