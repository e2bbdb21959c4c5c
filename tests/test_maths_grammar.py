"""Masks are part of the distribution: every outcome of a round under a grammar, added up, is the masked target's law.

The masks are the engine's own (``node_masks``), at every node of every draft there can be, and so is what is left of a
draft that the grammar does not allow (``held``). Planted: the mask of another position, and a drawn token that is
left out because of what it is.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from enumerate_rules import (
    RULES,
    Drafts,
    Enumerator,
    NotLossless,
    Table,
    _spread,
    all_drafts,
    by_table,
    check_law,
    coupled_rule,
    random_table,
    repeated,
    round_law,
)
from grammars import Toy, packed
from torch import Tensor

from headstart.engine.node_masks import held, node_masks
from headstart.engine.sequence import Sequence
from headstart.maths.bitmask import allows, only, unpacked
from headstart.maths.distribution import Warp, probabilities
from headstart.maths.tree import Topology
from headstart.types import Mask, Proposal, Request, SamplingParams, Structured, Verdict

V = 3
SHAPES: dict[str, tuple[int, ...]] = {"chain-2": (-1, 0), "chain-3": (-1, 0, 1), "tree": (-1, -1, 0, 1)}


def follow(text: tuple[int, ...]) -> tuple[int, ...] | None:
    """Never the same token twice; 1 only behind 0; behind 2, 0 anything. No two prefixes in a row have one mask."""
    if text[-2:] == (2, 0):
        return None
    left = {0, 1, 2} - set(text[-1:]) - (set() if text[-1:] == (0,) else {1})
    return tuple(sorted(left)) or (0,)


def sequence() -> Sequence:
    request = Request("a", (0,), SamplingParams(structured=Structured(regex="x")), grammar=Toy(follow, V))
    return Sequence(request, 0, 0, eos=(), text=None, limit=9)


def masked(raw: Table) -> Table:
    """Plain decoding under the grammar, a prefix at a time."""
    found = []
    for depth, logits in enumerate(raw):
        law = logits.clone()
        for code in range(len(law)):
            text = tuple(code // V**place % V for place in reversed(range(depth)))
            allowed = follow(text)
            for token in range(V):
                if allowed is not None and token not in allowed:
                    law[code, token] = -torch.inf
        found.append(law.softmax(-1))
    return found


def under_the_grammar(
    raw: Table, parents: tuple[int, ...], spoil: Callable[[list[Mask | None]], list[Mask | None]] = lambda row: row
) -> Any:
    """What the engine does: the masks of all nodes, as part of the warp."""

    def p_of(tokens: Tensor, topology: Topology) -> Tensor:
        masks = [
            spoil(node_masks(sequence(), Proposal(tuple(line), parents))) if parents else []
            for line in tokens[:, 1:].tolist()
        ]
        warp = Warp.of([SamplingParams()] * len(tokens), vocab_size=V, eos=None, device="cpu", dtype=torch.float64)
        object.__setattr__(warp, "allowed", unpacked(masks, len(parents) + 1, V, "cpu"))
        return probabilities(by_table(raw, parents)(tokens, topology), warp)

    return p_of


def tables(shape: str, seed: int) -> tuple[Table, Table]:
    depth = 4
    raw = [p.log() for p in random_table(depth, V, seed)]
    return raw, random_table(depth, V, seed + 1000, 2)


@pytest.mark.parametrize("kind", ["point", "iid", "distinct"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rule", RULES)
def test_every_outcome_together_gives_the_masked_targets_law(rule: str, shape: str, kind: str) -> None:
    raw, draft = tables(shape, 3)
    drafts = all_drafts(SHAPES[shape], draft, kind, 3)
    target = masked(raw)[: max(2, len(set(SHAPES[shape])) + 1)]
    law, _ = round_law(RULES[rule], SHAPES[shape], drafts, target, under_the_grammar(raw, SHAPES[shape]))
    check_law(law, target)


@pytest.mark.parametrize("shape", SHAPES)
def test_coupled_gives_the_masked_targets_law(shape: str) -> None:
    raw, _ = tables(shape, 5)
    parents, target = SHAPES[shape], masked(raw)[: max(2, len(set(SHAPES[shape])) + 1)]
    width = len(parents) + 1
    fall = torch.tensor(list(itertools.product(range(V), repeat=width)))
    for tokens in (torch.tensor([0, 0, 2, 1, 0][:width]), torch.tensor([0, 1, 0, 2, 2][:width])):
        p = under_the_grammar(raw, parents)(tokens.unsqueeze(0), repeated(parents, 1))[0]
        rows = tokens.expand(len(fall), -1)
        verdicts = coupled_rule(fall, rows, repeated(parents, len(fall)))
        check_law(_spread(verdicts, rows, p.gather(1, fall.T).prod(0), target), target)


@pytest.mark.parametrize("rule", RULES)
def test_the_mask_of_another_position_is_caught(rule: str) -> None:
    raw, draft = tables("chain-2", 3)
    parents, target = SHAPES["chain-2"], masked(raw)[:3]
    shifted = under_the_grammar(raw, parents, lambda row: [row[0], *row[:-1]])
    with pytest.raises(NotLossless):
        check_law(round_law(RULES[rule], parents, all_drafts(parents, draft, "iid"), target, shifted)[0], target)


def cut_law(rule: str, raw: Table, drafts: Drafts, cut: Callable[[Sequence, Proposal], Proposal | None]) -> Tensor:
    """The law of a round with every draft cut as the engine does."""
    parents = SHAPES["chain-3"]
    found = [
        cut(sequence(), Proposal(tuple(line), parents, q, "iid"))
        for line, q in zip(drafts.tokens[:, 1:].tolist(), drafts.q, strict=True)  # type: ignore[arg-type]
    ]
    n = len(parents)
    bits = torch.tensor([[False, *line] for line in itertools.product([False, True], repeat=n)])
    outcomes = len(bits) * V
    lines = [p.parents if p is not None else () for p in found for _ in range(outcomes)]
    topology = Topology.of(lines, "cpu")
    width = topology.width
    tokens = torch.zeros(len(found), width, dtype=torch.int64)
    q = torch.zeros(len(found), width - 1, V, dtype=torch.float64)
    for row, p in enumerate(found):
        if p is not None:
            tokens[row, 1 : len(p) + 1] = torch.tensor(p.tokens)
            q[row, : len(p)] = p.q
    p = under_the_grammar(raw, parents)(drafts.tokens, repeated(parents, len(tokens)))[:, :width]
    chance = Enumerator(
        bits.repeat_interleave(V, 0).repeat(len(found), 1)[:, :width], torch.arange(V).repeat(len(found) * len(bits))
    )
    wide = [x.repeat_interleave(outcomes, 0) for x in (p, q, tokens, drafts.weight)]
    verdicts = RULES[rule](wide[0], wide[1], wide[2], topology, ["iid"] * len(lines), chance)
    weight = wide[3] * chance.weight  # nodes that are not there are rejected with probability 1
    assert abs(float(weight.sum()) - 1) < 1e-12
    return _spread(verdicts, wide[2], weight, masked(raw))


@pytest.mark.parametrize("rule", RULES)
def test_drafts_that_are_cut_to_the_grammar_keep_the_law(rule: str) -> None:
    raw, draft = tables("chain-3", 7)
    drafts = all_drafts(SHAPES["chain-3"], draft, "iid")
    check_law(cut_law(rule, raw, drafts, held), masked(raw))


@pytest.mark.parametrize("rule", RULES)
def test_leaving_out_a_drawn_token_because_of_what_it_is_is_caught(rule: str) -> None:
    def short(sequence: Sequence, proposal: Proposal) -> Proposal | None:
        assert sequence.constraint is not None
        return proposal.cut(sequence.constraint.fits(proposal.tokens))

    raw, draft = tables("chain-3", 7)
    with pytest.raises(NotLossless):
        check_law(cut_law(rule, raw, all_drafts(SHAPES["chain-3"], draft, "iid"), short), masked(raw))


def test_what_is_left_of_a_draft() -> None:
    q = torch.eye(4)
    assert held(sequence(), Proposal.chain([0, 1, 1, 0])) == Proposal.chain([0, 1])
    drawn = held(sequence(), Proposal.chain([0, 1, 1, 0], q))
    assert drawn is not None
    assert (drawn.tokens, len(drawn.q)) == ((0, 1, 1), 3)  # type: ignore[arg-type]
    assert held(sequence(), Proposal.chain([1, 0])) is None
    tree = Proposal((0, 1, 2, 2, 0), (-1, -1, 0, 1, 2))  # 1 cannot begin
    assert held(sequence(), tree) == Proposal((0, 2, 0), (-1, 0, 1))
    kept = held(sequence(), Proposal(tree.tokens, tree.parents, torch.eye(5), "iid"))
    assert kept is not None
    assert (kept.tokens, kept.parents) == ((0, 1, 2, 0), (-1, -1, 0, 2))
    assert torch.equal(kept.q, torch.eye(5)[[0, 1, 2, 4]])  # type: ignore[arg-type]


def test_only_committed_tokens_move_a_grammar_and_the_end_of_a_grammar_ends_the_text() -> None:
    grammar = Toy(lambda text: () if text[-1:] == (2,) else (0, 2), V)
    request = Request("a", (0,), SamplingParams(structured=Structured(regex="x"), min_tokens=5), grammar=grammar)
    running = Sequence(request, 0, 0, eos=(), text=None, limit=9)
    proposal = Proposal.chain([0, 2, 0])
    assert [None if m is None else m.tolist() for m in node_masks(running, proposal)] == [[5], [5], None, [5]]
    (state,) = grammar.made
    assert state.text == ()
    assert running.commit([0, 2, 0], "bonus", ()) == 2
    assert state.text == (0, 2)
    assert running.finish_reason == "stop"
    assert Verdict.on(proposal, (), 1).origin == "correction"


def test_bits() -> None:
    row = packed([0, 31, 32, 69], 70)
    assert [t for t in range(200) if allows(row, t)] == [0, 31, 32, 69]
    assert only(packed([41], 70)) == 41
    assert only(packed([31], 70)) == 31
    assert only(packed([1, 41], 70)) is only(packed([], 70)) is only(packed([3, 5], 70)) is None
    found = unpacked([[row, None], []], 3, 100, "cpu")
    assert found.shape == (2, 3, 100)
    assert found[0, 0].nonzero()[:, 0].tolist() == [0, 31, 32, 69]
    assert bool(found[0, 1:].all())
    assert bool(found[1].all())
    assert np.array_equal(unpacked([[row]], 1, 33, "cpu")[0, 0].nonzero()[:, 0], [0, 31, 32])
