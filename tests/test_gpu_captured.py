"""Recorded rounds on a GPU: the same tokens as the eager runner in float32, and the target's law when sampling."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from statistics_tools import chi_squared

from headstart import LLM, SamplingParams
from headstart.machine.runner import EagerRunner
from headstart.testing import tiny_model

pytestmark = pytest.mark.gpu

# Sizes that the fused kernels take: head widths of 64, hidden sizes that are multiples of 64.
SIZE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
PROMPTS = [[5, 6, 7, 8, 5, 6], [9, 9, 4], [3, 4, 5, 6, 7, 8, 9, 10, 11], [40, 41], [50, 3, 50, 3, 50]]


def pair(architecture: str, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    target = tiny_model(architecture, dtype=dtype, **SIZE).to("cuda")
    draft = tiny_model(architecture, dtype=dtype, **SIZE).to("cuda")
    generator = torch.Generator("cuda").manual_seed(1)
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.dim() > 1:
                noise = torch.randn(parameter.shape, generator=generator, device="cuda")
                parameter.add_((noise * 0.15 * parameter.std()).to(dtype))
    return target, draft


def eager(target: Any, params: list[SamplingParams]) -> list[tuple[int, ...]]:
    """One prompt at a time through the model's own modules, without speculation."""
    llm = LLM(target, None, max_model_len=128, check=False)
    runner = EagerRunner(target, rows=8, max_len=128, probe=False)
    llm.engine.parts.runner, llm.engine.parts.captured = runner, None
    llm.engine._slab = llm.engine._scheduler._slab = runner.slab
    return [llm.generate(p, s).token_ids for p, s in zip(PROMPTS, params, strict=True)]


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_float32_equality_with_the_eager_runner(architecture: str, temperature: float) -> None:
    target, draft = pair(architecture)
    params = [
        SamplingParams(temperature=temperature, top_p=0.9, seed=i, max_tokens=20 + 5 * i, verification="coupled")
        for i in range(5)
    ]
    expected = eager(target, params)
    for gamma in (1, 3, 8):
        for rows in (1, 4):
            llm = LLM(target, draft, gamma=gamma, max_rows=rows, max_model_len=128, check=False)
            assert llm.engine.parts.captured is not None
            assert [a.token_ids for a in llm.generate(PROMPTS, params)] == expected, (gamma, rows)
            assert llm.stats.accepted > 10
            assert llm.engine.parts.captured._plans


@pytest.mark.parametrize("rows", [1, 4])
def test_a_draft_that_is_the_target_is_always_accepted(rows: int) -> None:
    """Losslessness hides a draft that reads the wrong tokens; acceptance does not."""
    target, _ = pair("llama")
    draft = tiny_model("llama", **SIZE).to("cuda")
    llm = LLM(target, draft, gamma=4, max_rows=rows, max_model_len=128, check=False)
    llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    assert llm.stats.acceptance_rate > 0.95


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
def test_the_recorded_sampler_follows_the_target(rule: str) -> None:
    """The joint law of two tokens under top_k = 3, against the target's own probabilities."""
    target, draft = pair("llama")
    prompt, k, samples = [5, 6, 7, 8], 3, 1200
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer = {}
        for prefix, mass in law.items():
            with torch.inference_mode():
                logits = target(torch.tensor([[*prompt, *prefix]], device="cuda")).logits[0, -1].double()
            best = logits.topk(k)
            for token, chance in zip(best.indices.tolist(), best.values.softmax(-1).tolist(), strict=True):
                longer[(*prefix, token)] = mass * chance
        law = longer
    llm = LLM(target, draft, gamma=3, max_rows=32, max_model_len=64, max_waiting=5000, check=False)
    params = [
        SamplingParams(top_k=k, seed=i, max_tokens=6, ignore_eos=True, verification=rule)  # type: ignore[arg-type]
        for i in range(samples)
    ]
    answers = llm.generate([prompt] * samples, params)
    assert 0.1 < llm.stats.acceptance_rate < 0.98
    assert chi_squared(Counter(a.token_ids[:3] for a in answers), law) > 1e-4
