"""Every value that ``SamplingParams`` accepts goes through the real arithmetic: at the bounds it stays sound."""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from itertools import product
from typing import Any

import pytest
import torch
from slow_distribution import probabilities_slowly

from headstart import LLM, InvalidParameter, SamplingParams
from headstart.machine.cpu import build
from headstart.machine.cpu.sampling import vocab_ops_for
from headstart.maths.distribution import History, argmaxes, probabilities
from headstart.maths.vocab_ops import PLAIN, VocabOps
from headstart.maths.warp import Warp
from headstart.testing import tiny_model
from headstart.values import INT64

DENORMAL = 5e-324  # the smallest positive number there is; 0 as a float32

REFUSED: list[tuple[str, Any]] = [
    ("temperature", 1e39),
    ("temperature", 100.1),
    ("temperature", 1e-31),
    ("temperature", 1e-40),
    ("temperature", DENORMAL),
    ("temperature", 10**400),
    ("repetition_penalty", 1e39),
    ("repetition_penalty", 1e-50),
    ("repetition_penalty", 0.0099),
    ("repetition_penalty", 100.1),
    ("top_k", 2**63),
    ("top_k", 10**5000),
    ("max_tokens", 2**63),
    ("max_tokens", 10**5000),
    ("min_tokens", 2**63),
    ("seed", 10**5000),
    ("stop_token_ids", [2**63]),
    ("logit_bias", {2**63: 1.0}),
    ("logit_bias", {1: 1e39}),
    ("logit_bias", [10**5000]),
    ("presence_penalty", 10**400),
]


@pytest.mark.parametrize(("field", "value"), REFUSED, ids=[field for field, _ in REFUSED])
def test_what_would_break_the_numbers_is_refused(field: str, value: Any) -> None:
    with pytest.raises(InvalidParameter) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field
    assert len(str(caught.value)) < 160


# One value at its bound, all else as usual; then bounds of several settings at once.
ONE: list[dict[str, Any]] = [
    {"temperature": 1e-30},
    {"temperature": 1e-5},
    {"temperature": 100.0},
    {"top_p": DENORMAL},
    {"top_p": 1e-45},
    {"top_p": 1 - 2**-53},
    {"min_p": DENORMAL},
    {"min_p": 1e-45},
    {"min_p": 1.0},
    {"top_k": INT64},
    {"repetition_penalty": 0.01},
    {"repetition_penalty": 100.0},
    {"presence_penalty": -2.0, "frequency_penalty": -2.0},
    {"presence_penalty": 2.0, "frequency_penalty": 2.0},
    {"logit_bias": {3: 100.0, 4: -100.0}},
]
CORNERS: list[dict[str, Any]] = [
    {
        "temperature": temperature,
        "top_p": top_p,
        "repetition_penalty": factor,
        "logit_bias": {3: 100.0, 4: -100.0},
        **rest,
    }
    for temperature, top_p, factor in product((1e-30, 100.0), (DENORMAL, 1.0), (0.01, 100.0))
    for rest in (
        {"presence_penalty": 2.0, "frequency_penalty": 2.0, "min_p": DENORMAL, "top_k": INT64},
        {"presence_penalty": -2.0, "frequency_penalty": -2.0, "min_p": 1.0, "top_k": 1},
    )
]

SIZE, PROMPT, OUTPUT = 40, [3, 7, 7, 12], [9, 9, 9, 20]


@lru_cache
def loops() -> dict[str, VocabOps]:
    return {"tensors": PLAIN} | ({"kernels": vocab_ops_for(1)} if build.why_not() is None else {})


@pytest.mark.parametrize("settings", ONE + CORNERS, ids=str)
@pytest.mark.parametrize("spread", [4.0, 80.0])
def test_at_the_bounds_the_distribution_is_the_exact_one(settings: dict[str, Any], spread: float) -> None:
    params = SamplingParams(**settings)
    x = torch.randn(1, 1, SIZE, generator=torch.Generator().manual_seed(5)) * spread
    x[0, 0, [1, 30]] = -torch.inf  # a mask is no fault
    warp = Warp.of([params], vocab_size=SIZE, eos=[()], device="cpu")
    history = History.of([PROMPT], [OUTPUT], SIZE, "cpu")
    exact = torch.tensor(probabilities_slowly(x[0, 0].double().tolist(), params, PROMPT, OUTPUT, SIZE)).double()
    for name, vocab_ops in loops().items():
        p = probabilities(x, warp, outputs=torch.tensor([len(OUTPUT)]), history=history, vocab_ops=vocab_ops)[
            0, 0
        ].double()
        assert bool(p.isfinite().all()), name
        assert float(p.sum()) == pytest.approx(1.0, abs=1e-5), name
        assert float((p - exact).abs().sum()) < 2e-3, name
    if params.temperature == 1e-30:  # the limit of sampling is greedy decoding
        cold = Warp.of([dataclasses.replace(params, temperature=0)], vocab_size=SIZE, eos=[()], device="cpu")
        best = argmaxes(x, cold, outputs=torch.tensor([len(OUTPUT)]), history=history)
        assert float(exact[int(best)]) == 1.0


@lru_cache
def served(kind: str) -> LLM:
    model = tiny_model("llama", hidden_size=64, intermediate_size=96, head_dim=32)
    quantization: Any = "int8" if kind == "int8" else None
    draft = tiny_model("llama", hidden_size=64, intermediate_size=96, head_dim=32, seed=1)
    return LLM(model, draft, quantization=quantization, gamma=3, max_rows=4, max_model_len=64, check=False)


@pytest.mark.parametrize("kind", ["float32", "int8"])
def test_at_the_bounds_answers_are_whole_and_right(kind: str) -> None:
    """Through the engine: no request fails for its settings, and a temperature of almost 0 is greedy."""
    if kind == "int8" and build.why_not() is not None:
        pytest.skip(str(build.why_not()))
    llm = served(kind)
    usual: dict[str, Any] = {"max_tokens": 9, "ignore_eos": True, "seed": 2**64 - 1, "logprobs": 1}
    asked = [
        (prompt, SamplingParams(**usual, **settings, verification=rule))  # type: ignore[arg-type]
        for rule, settings, prompt in product(("token", "block", "coupled"), ONE + CORNERS, ([3, 7, 12, 3, 7], [5]))
    ]
    prompts, params = [prompt for prompt, _ in asked], [each for _, each in asked]
    answers = llm.generate(prompts, params)
    for each, answer in zip(params, answers, strict=True):
        assert answer.error is None, each
        assert len(answer.token_ids) == 9, each
    frozen = [i for i, each in enumerate(params) if each.temperature == 1e-30]
    cold = [dataclasses.replace(params[i], temperature=0) for i in frozen]
    for i, greedy in zip(frozen, llm.generate([prompts[i] for i in frozen], cold), strict=True):
        assert answers[i].token_ids == greedy.token_ids, params[i]
    assert llm.stats.accepted > 0
    assert llm.stats.failed == 0


def test_numbers_too_large_for_the_context_are_said_so() -> None:
    llm = served("float32")
    for params, field in (
        (SamplingParams(max_tokens=INT64), "max_tokens"),
        (SamplingParams(max_tokens=None, min_tokens=INT64), "min_tokens"),
        (SamplingParams(max_tokens=None, min_tokens=2**32), "min_tokens"),  # 0, in a kernel's 32 bits
    ):
        with pytest.raises(InvalidParameter, match="max_model_len is 64") as caught:
            llm.generate([3, 4], params)
        assert caught.value.field == field
