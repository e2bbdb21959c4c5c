"""Verdicts on greedy chains: the quick way on a CPU says what the rule says."""

from __future__ import annotations

import pytest
import torch

from headstart.engine.judge import Batch, by_rule, follow, judge, likeliest
from headstart.engine.sequence import Sequence
from headstart.types import Proposal, Request, SamplingParams

V = 40


def sequence(params: SamplingParams, number: int) -> Sequence:
    return Sequence(Request(f"r{number}", (1, 2, 3), params), 0, 5, eos=(2,), text=None, limit=100)


def rounds(seed: int) -> tuple[Batch, torch.Tensor]:
    """Rows with drafts of all lengths, most of which hold for a while; now and then broken numbers or a tie."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(6, 5, V, generator=generator)
    logits[:, :, V - 3 :] += 5  # past the vocabulary: never to be chosen
    if seed % 3 == 0:
        logits[seed % 6, seed % 5, 7] = float("nan")
    if seed % 4 == 1:
        logits[seed % 6, 1] = float("-inf")
    if seed % 5 == 2:
        logits[:, :, [4, 9]] = 9.0  # a tie: the first wins
    best = logits[..., : V - 3].argmax(-1)
    proposals: list[Proposal | None] = [None]
    for row in range(1, 6):
        drafted = best[row, :4].tolist()
        wrong = int(torch.randint(0, 6, (), generator=generator))
        if wrong < 4:
            drafted[wrong] = (drafted[wrong] + 1) % (V - 3)
        proposals.append(Proposal.chain(drafted[: int(torch.randint(1, 5, (), generator=generator))]))
    sequences = [sequence(SamplingParams(temperature=0), row) for row in range(6)]
    return Batch.of(sequences, proposals, torch.device("cpu")), logits


@pytest.mark.parametrize("seed", range(30))
def test_the_quick_way_agrees_with_the_rule(seed: int) -> None:
    batch, logits = rounds(seed)
    quick = follow(logits[:, : batch.width], batch, V - 3)
    assert quick == by_rule(logits[:, : batch.width], batch, V - 3)


@pytest.mark.parametrize("seed", range(30))
def test_the_likeliest_are_the_rules_first_tokens(seed: int) -> None:
    batch, logits = rounds(seed)
    plain = Batch.of(batch.sequences, [None] * 6, torch.device("cpu"))
    assert likeliest(logits[:, :1], plain, V - 3) == by_rule(logits[:, :1], plain, V - 3)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, min_tokens=2),
        SamplingParams(temperature=0, logit_bias={5: 100.0}),
        SamplingParams(temperature=0, repetition_penalty=50.0),
    ],
    ids=["min_tokens", "bias", "penalty"],
)
def test_what_changes_the_logits_is_not_overlooked(params: SamplingParams) -> None:
    logits = torch.zeros(1, 1, V)
    logits[0, 0, 2] = 3.0  # the end token, which is also in the prompt
    logits[0, 0, 5] = 1.0
    plain = Batch.of([sequence(SamplingParams(temperature=0), 0)], [None], torch.device("cpu"))
    changed = Batch.of([sequence(params, 0)], [None], torch.device("cpu"))
    first, second = judge(logits, plain, V)[0], judge(logits, changed, V)[0]
    assert first is not None
    assert second is not None
    assert (first.token, second.token) == (2, 5)
