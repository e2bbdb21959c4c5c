"""Proof 4: in float32 the emitted ids are the target's own, token for token.

Greedy: equal to Hugging Face ``generate(do_sample=False)`` and to plain decoding, for every architecture, drafter,
draft length and batch size. Sampling with the coupled rule: equal to plain decoding under the same seed.
"""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from headstart import LLM, SamplingParams
from headstart.drafters.base import Drafter
from headstart.testing import ARCHITECTURES, TINY_VOCABULARY, ScriptedDrafter, tiny_model
from headstart.types import DraftView, Proposal

TOKENS = 14
LONGEST = 96


def prompts(count: int) -> list[list[int]]:
    """Prompts of different lengths, some longer than the sliding windows, with repeats for lookup to find."""
    generator = torch.Generator().manual_seed(7)
    found = []
    for i in range(count):
        part = torch.randint(3, TINY_VOCABULARY, (4 + 3 * i,), generator=generator).tolist()
        found.append(part + part[: 2 + i])
    return found


@lru_cache(maxsize=1)
def models(architecture: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A target, and a draft that is the target with some noise: it agrees often, and not always."""
    target, draft = tiny_model(architecture), tiny_model(architecture)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.dim() > 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.15 * parameter.std())
    return target, draft


def trees(draft: PreTrainedModel) -> Drafter:
    """Drafts a tree with the draft model, without any cache: two children, each with a chain below it."""

    @torch.inference_mode()
    def best(tokens: list[int], k: int) -> list[int]:
        return draft(torch.tensor([tokens])).logits[0, -1].topk(k).indices.tolist()  # type: ignore[no-any-return]

    def guess(view: DraftView, budget: int) -> Proposal | None:
        if budget < 4:
            return None
        first, second = best(view.tokens, 2)
        below = best([*view.tokens, second], 1)[0]
        under = best([*view.tokens, first], 1)[0]
        return Proposal((second, first, below, under), (-1, -1, 0, 1))

    return ScriptedDrafter(guess)


def made(architecture: str, kind: str, gamma: int, rows: int) -> LLM:
    target, draft = models(architecture)
    chosen: Any = {"none": None, "lookup": "lookup", "model": draft}.get(kind) if kind != "tree" else trees(draft)
    return LLM(target, chosen, gamma=gamma, max_rows=rows, max_model_len=LONGEST, check=False)


def plain(architecture: str, params: SamplingParams, count: int) -> list[tuple[int, ...]]:
    """One prompt at a time, without drafting."""
    llm = made(architecture, "none", 1, 1)
    return [llm.generate(prompt, params).token_ids for prompt in prompts(count)]


@lru_cache(maxsize=1)
def by_hugging_face(architecture: str) -> list[tuple[int, ...]]:
    target, _ = models(architecture)
    found = []
    for prompt in prompts(5):
        ids = torch.tensor([prompt])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out = target.generate(  # type: ignore[operator]
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=TOKENS, pad_token_id=0
            )
        found.append(tuple(out[0, len(prompt) :].tolist()))
    return found


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_equals_hugging_face(architecture: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=TOKENS)
    expected = by_hugging_face(architecture)
    assert plain(architecture, params, 5) == expected
    accepted = 0
    for kind in ("lookup", "model", "tree"):
        for gamma in (1, 3, 8) if kind != "tree" else (8,):
            for batch in (1, 5):
                llm = made(architecture, kind, gamma, batch)
                count = max(2, batch)  # two on one row: one after the other
                got = [a.token_ids for a in llm.generate(prompts(count), params)]
                assert got == expected[:count], (kind, gamma, batch)
                accepted += llm.stats.accepted
    assert accepted > 40, "hardly anything was accepted, so hardly anything was tested"


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt2"])
def test_coupled_equals_plain_sampling(architecture: str) -> None:
    params = [
        SamplingParams(temperature=0.8, top_p=0.9, seed=seed, max_tokens=TOKENS, verification="coupled")
        for seed in range(5)
    ]
    single = made(architecture, "none", 1, 1)
    expected = [single.generate(p, s).token_ids for p, s in zip(prompts(5), params, strict=True)]
    assert len(set(expected)) == 5
    accepted = 0
    for kind in ("none", "lookup", "model", "tree"):
        for gamma in (1, 3, 8) if kind != "tree" else (8,):
            for batch in (1, 5):
                llm = made(architecture, kind, gamma, batch)
                got = [a.token_ids for a in llm.generate(prompts(5), params)]
                assert got == expected, (kind, gamma, batch)
                accepted += llm.stats.accepted
    assert accepted > 50


def test_switching_speculation_off_changes_nothing() -> None:
    """One engine, one batch, requests with and without speculation side by side."""
    llm = made("llama", "model", 3, 4)
    params = [SamplingParams(temperature=0, max_tokens=TOKENS, speculate=i % 2 == 0) for i in range(5)]
    answers = llm.generate(prompts(5), params)
    assert [a.token_ids for a in answers] == by_hugging_face("llama")
    assert [a.stats.drafted > 0 for a in answers] == [True, False, True, False, True]
