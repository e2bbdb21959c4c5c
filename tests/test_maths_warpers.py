"""Losslessness with every kind of processing: the target's distributions go through ``probabilities`` in float64, at
every node of a draft with its own drafted prefix, and the law of whole sequences is the one of plain decoding."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from enumerate_rules import RULES, NotLossless, Table, all_drafts, by_table, check_law, random_table, round_law
from slow_distribution import probabilities_slowly
from torch import Tensor

from headstart.maths.distribution import History, Warp, probabilities
from headstart.maths.tree import Topology
from headstart.types import SamplingParams

SIZE, VOCAB = 5, 4  # the head has one row more than the tokenizer has tokens
PROMPT, OUTPUT, EOS = [0, 0], [3, 3], [0, 3]  # tokens 1 and 2 can only have been drafted

WARPERS = {
    "plain": SamplingParams(),
    "temperature": SamplingParams(temperature=0.6),
    "hot": SamplingParams(temperature=1.9),
    "greedy": SamplingParams(temperature=0),
    "top_k": SamplingParams(top_k=2),
    "top_p": SamplingParams(top_p=0.7),
    "min_p": SamplingParams(min_p=0.3),
    "repetition": SamplingParams(repetition_penalty=1.7),
    "frequency": SamplingParams(frequency_penalty=1.1),
    "presence": SamplingParams(presence_penalty=0.8),
    "rewards": SamplingParams(repetition_penalty=0.6, frequency_penalty=-0.9, presence_penalty=-0.4),
    "logit_bias": SamplingParams(logit_bias={1: 1.5, 2: -100.0}),
    "min_tokens": SamplingParams(min_tokens=4),  # two are out: the limit is crossed in the middle of the draft
    "all": SamplingParams(
        temperature=0.8,
        top_k=3,
        top_p=0.9,
        min_p=0.05,
        repetition_penalty=1.3,
        frequency_penalty=0.4,
        presence_penalty=0.3,
        logit_bias={0: 0.7},
        min_tokens=3,
    ),
}
SHAPES = {"chain": (-1, 0), "tree": (-1, -1, 0)}


def logit_table(seed: int) -> Table:
    return [p.log() * 1.5 + 1 for p in random_table(3, SIZE, seed)]


def truth(raw: Table, params: SamplingParams) -> Table:
    """Plain decoding, one prefix at a time."""
    table = []
    for depth, logits in enumerate(raw):
        rows = []
        for code in range(len(logits)):
            drafted = [code // SIZE**place % SIZE for place in reversed(range(depth))]
            known = [*OUTPUT, *drafted]
            rows.append(probabilities_slowly(logits[code].tolist(), params, PROMPT, known, VOCAB, EOS))
        table.append(torch.tensor(rows, dtype=torch.float64))
    return table


def through_probabilities(
    raw: Table, params: SamplingParams, parents: tuple[int, ...], spoil=lambda topology: topology
):
    """What the engine does: all nodes of all rows in one call."""

    def p_of(tokens: Tensor, topology: Topology) -> Tensor:
        rows = len(tokens)
        return probabilities(
            by_table(raw, parents)(tokens, topology),
            Warp.of([params] * rows, vocab_size=VOCAB, eos=[EOS] * rows, device="cpu", dtype=torch.float64),
            outputs=torch.full((rows,), len(OUTPUT)),
            tokens=tokens,
            topology=spoil(topology),
            history=History.of([PROMPT] * rows, [OUTPUT] * rows, SIZE, "cpu"),
        )

    return p_of


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", WARPERS)
def test_every_warper_leaves_the_law_of_plain_decoding(name: str, shape: str) -> None:
    parents, params = SHAPES[shape], WARPERS[name]
    raw, draft = logit_table(4), random_table(3, SIZE, 9)
    target = truth(raw, params)
    kinds = ["iid"] if shape == "chain" else ["point", "distinct"]
    for kind in kinds:
        for rule in RULES.values():
            p_of = through_probabilities(raw, params, parents)
            law, _ = round_law(rule, parents, all_drafts(parents, draft, kind), target, p_of)
            check_law(law, target)
            assert float(law.view(SIZE, -1)[VOCAB:].sum()) == 0  # padding is never emitted


def no_ancestors(topology: Topology) -> Topology:
    width = topology.width
    return dataclasses.replace(
        topology, ancestors=torch.eye(width, dtype=torch.bool).expand(len(topology.parent), -1, -1)
    )


def own_line_only(topology: Topology) -> Topology:
    """Every earlier node counts, ancestor or not: right for a chain, wrong for a tree."""
    width = topology.width
    return dataclasses.replace(topology, ancestors=torch.ones(width, width).tril().bool().expand_as(topology.ancestors))


def no_depth(topology: Topology) -> Topology:
    return dataclasses.replace(topology, depth=torch.zeros_like(topology.depth))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["repetition", "frequency", "presence"])
@pytest.mark.parametrize(("shape", "bug"), [("chain", no_ancestors), ("tree", no_ancestors), ("tree", own_line_only)])
def test_planted_penalties_that_miss_the_drafted_prefix_are_caught(rule: str, name: str, shape: str, bug) -> None:
    parents, params = SHAPES[shape], WARPERS[name]
    raw, draft = logit_table(4), random_table(3, SIZE, 9)
    p_of = through_probabilities(raw, params, parents, bug)
    law, _ = round_law(RULES[rule], parents, all_drafts(parents, draft, "iid"), truth(raw, params), p_of)
    with pytest.raises(NotLossless):
        check_law(law, truth(raw, params))


@pytest.mark.parametrize("rule", RULES)
def test_planted_min_tokens_that_miss_the_drafted_prefix_are_caught(rule: str) -> None:
    parents, params = SHAPES["chain"], WARPERS["min_tokens"]
    raw, draft = logit_table(4), random_table(3, SIZE, 9)
    p_of = through_probabilities(raw, params, parents, no_depth)
    law, _ = round_law(RULES[rule], parents, all_drafts(parents, draft, "iid"), truth(raw, params), p_of)
    with pytest.raises(NotLossless):
        check_law(law, truth(raw, params))
