"""Verdicts on greedy chains: the quick way on a CPU says what the rule says."""

from __future__ import annotations

from random import Random

import pytest
import torch
from grammars import Toy, ToyState

from headstart.engine.judge import Batch, by_rule, follow, judge, likeliest
from headstart.engine.sequence import Sequence
from headstart.types import Proposal, Request, SamplingParams, Structured

V = 40


def sequence(params: SamplingParams, number: int) -> Sequence:
    return Sequence(Request(f"r{number}", (1, 2, 3), params), 0, 5, eos=(2,), text=None, limit=100)


def held_to(grammar: Toy, number: int) -> Sequence:
    params = SamplingParams(temperature=0, structured=Structured(regex="x"))  # the grammar is given as an object
    return Sequence(Request(f"r{number}", (1, 2, 3), params, (), grammar), 0, 5, eos=(2,), text=None, limit=100)


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


def some_forbidden(seed: int, batch: Batch) -> list[Toy]:
    """A grammar for each row that forbids some of what is likely, broken numbers among it, and seldom what is drafted;
    at some places it allows one token only, or anything."""

    def follow(row: int, text: tuple[int, ...]) -> set[int] | None:
        chance, drafted = Random(hash((seed, row, text))), batch.proposals[row]
        kind = chance.randrange(8)
        if kind == 0:
            return None
        allowed = {chance.randrange(V)} if kind == 1 else {token for token in range(V) if chance.random() < 0.6}
        if drafted is not None and len(text) < len(drafted) and chance.random() < 0.7:
            allowed.add(drafted.tokens[len(text)])
        return allowed or {3}

    return [Toy(lambda text, row=row: follow(row, text), V) for row in range(len(batch.sequences))]


def followed_by_the_rule(seed: int) -> tuple[bool, bool]:
    """Are greedy rows with grammars decided as the rule decides; do the grammars change anything?"""
    batch, logits = rounds(seed)
    grammars = some_forbidden(seed, batch)
    sequences = [held_to(grammar, row) if row % 3 else batch.sequences[row] for row, grammar in enumerate(grammars)]
    held, logits = Batch.of(sequences, batch.proposals, torch.device("cpu")), logits[:, : batch.width]
    found = judge(logits, held, V - 3)
    return found == by_rule(logits, held, V - 3), found != follow(logits, batch, V - 3)


def test_grammars_are_asked_about_the_likeliest_first() -> None:
    results = [followed_by_the_rule(seed) for seed in range(60)]
    assert all(right for right, _ in results)
    assert sum(changed for _, changed in results) > 30


def test_a_forbidden_token_that_is_taken_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ToyState, "allows", lambda *_: True)
    assert sum(right for right, _ in map(followed_by_the_rule, range(60))) < 30


def test_most_masks_are_never_worked_out(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, ...]] = []
    right = ToyState.mask
    monkeypatch.setattr(ToyState, "mask", lambda state, drafted: [asked.append(drafted), right(state, drafted)][1])
    _, logits = rounds(4)
    best = logits[..., : V - 3].argmax(-1)
    wrong = int(best[1, 0])
    free, strict = Toy(lambda text: None, V), Toy(lambda text: set(range(V)) - {wrong}, V)
    held = Batch.of([held_to(free, 0), held_to(strict, 1)], [None, None], torch.device("cpu"))
    verdicts = judge(logits[:2, :1], held, V - 3)
    assert [None if v is None else v.token == int(best[i, 0]) for i, v in enumerate(verdicts)] == [True, False]
    assert asked == [()]


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
