"""Exact proofs for the verification rules: every outcome of one round, with its probability.

A round has finitely many outcomes: which tokens were drafted, which nodes were accepted, which token the target added.
All of them become rows of one batch, so the very code that serves requests runs on every outcome at once; the
``Enumerator`` tells each row what chance decides there and multiplies up how likely that is.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headstart.maths.tree import Topology
from headstart.maths.verify import Verdicts, block_rule, coupled_rule, token_rule

RULES = {"token": token_rule, "block": block_rule}

SHAPES: dict[str, tuple[int, ...]] = {
    "chain-1": (-1,),
    "chain-2": (-1, 0),
    "chain-3": (-1, 0, 1),
    "two-siblings": (-1, -1),
    "three-siblings": (-1, -1, -1),
    "uneven": (-1, 0, -1, 1, 0),  # a branch of depth 3 with a fork, and a leaf; siblings do not stand together
    "two-by-two": (-1, -1, 0, 0, 1, 1),
}

Table = list[Tensor]  # [d]: [V^d, V], the conditional distribution after each prefix of d tokens
Target = Callable[[Tensor, Topology], Tensor]  # node tokens [D, N+1] -> p [D, N+1, V]


def random_table(depth: int, size: int, seed: int, possible: int | None = None) -> Table:
    """Random conditionals for every prefix shorter than ``depth``. ``possible``: at least so many tokens have mass,
    and about half of the others have none."""
    gen = torch.Generator().manual_seed(seed)
    table = []
    for d in range(depth):
        p = torch.rand(size**d, size, dtype=torch.float64, generator=gen) ** 2 + 1e-3
        if possible is not None:
            order = torch.rand(size**d, size, generator=gen).argsort(1)
            p[(order >= possible) & (torch.rand(size**d, size, generator=gen) < 0.5)] = 0
        table.append(p / p.sum(1, keepdim=True))
    return table


def repeated(parents: tuple[int, ...], rows: int) -> Topology:
    """The same tree in every row, without building it row by row."""
    one = Topology.of([parents], "cpu")
    wide = (x.expand(rows, *x.shape[1:]) for x in (one.parent, one.depth, one.valid, one.ancestors, one.events))
    return Topology(*wide, is_chain=one.is_chain)


def depths(parents: Sequence[int]) -> list[int]:
    found: list[int] = []
    for parent in parents:
        found.append(1 if parent < 0 else found[parent] + 1)
    return found


def prefix_codes(tokens: Tensor, parents: Sequence[int], size: int) -> Tensor:
    """The path to each node as one number in base V: tokens [D, N+1] -> [D, N+1]; the root's is 0."""
    codes = torch.zeros_like(tokens)
    for i, parent in enumerate(parents):
        codes[:, i + 1] = codes[:, parent + 1] * size + tokens[:, i + 1]
    return codes


def by_table(table: Table, parents: Sequence[int]) -> Target:
    """A target that looks its distributions up."""
    level = [0, *depths(parents)]

    def look_up(tokens: Tensor, _: Topology) -> Tensor:
        codes = prefix_codes(tokens, parents, table[0].shape[1])
        return torch.stack([table[level[i]][codes[:, i]] for i in range(len(level))], 1)

    return look_up


@dataclass
class Drafts:
    """Every draft there can be, and how likely it is."""

    tokens: Tensor  # [D, N+1], column 0 the root
    weight: Tensor  # [D]
    q: Tensor | None  # [D, N, V]
    kind: str


def all_drafts(parents: Sequence[int], draft: Table, kind: str, seed: int = 0) -> Drafts:
    """iid, distinct: every assignment of tokens to nodes. point: one deterministic draft (which one, the seed says)."""
    size, n = draft[0].shape[1], len(parents)
    level = depths(parents)
    if kind == "point":
        # Siblings of a deterministic draft differ, as a drafter's would; which tokens they are is arbitrary.
        gen = torch.Generator().manual_seed(seed)
        order = torch.stack([torch.randperm(size, generator=gen) for _ in range(n + 1)])
        rank = [sum(parents[j] == parents[i] for j in range(i)) for i in range(n)]
        picked = [int(order[parents[i] + 1, rank[i] % size]) for i in range(n)]
        return Drafts(torch.tensor([[0, *picked]]), torch.ones(1, dtype=torch.float64), None, kind)
    tokens = torch.tensor(list(itertools.product(range(size), repeat=n))).reshape(-1, n)
    tokens = torch.cat([torch.zeros_like(tokens[:, :1]), tokens], 1)
    codes = prefix_codes(tokens, parents, size)
    q = torch.stack([draft[level[i] - 1][codes[:, parents[i] + 1]] for i in range(n)], 1)
    weight = torch.ones(len(tokens), dtype=torch.float64)
    for i in range(n):
        law = q[:, i].clone()
        if kind == "distinct":
            for j in range(i):
                if parents[j] == parents[i]:
                    law.scatter_(1, tokens[:, j + 1 : j + 2], 0.0)
            law = law / law.sum(1, keepdim=True)
        weight *= law.gather(1, tokens[:, i + 1 : i + 2]).squeeze(1).nan_to_num(0.0)
    possible = weight > 0
    return Drafts(tokens[possible], weight[possible], q[possible], kind)


class Enumerator:
    """A Chance whose every row is told what is decided: decisions [R, N+1], token [R]."""

    def __init__(self, decisions: Tensor, token: Tensor) -> None:
        self.decisions, self.token = decisions, token
        self.weight = torch.ones(len(token), dtype=torch.float64)

    def accept(self, node: Tensor, probability: Tensor) -> Tensor:
        assert bool(((probability >= 0) & (probability <= 1)).all()), "an acceptance probability outside [0, 1]"
        yes = self.decisions.gather(1, node.view(len(node), -1)).view(node.shape)
        likely = torch.where(yes, probability, 1 - probability)
        self.weight = self.weight * likely.view(len(node), -1).prod(1)
        return yes

    def draw(self, weights: Tensor, drafted: Tensor | None = None) -> Tensor:
        share = weights / weights.sum(1, keepdim=True)
        self.weight = self.weight * share.gather(1, self.token.unsqueeze(1)).squeeze(1)
        return self.token

    def targets(self, p: Tensor, depth: Tensor) -> Tensor:
        raise AssertionError("the coupled rule is enumerated by coupled_law")


def _spread(verdicts: Verdicts, tokens: Tensor, weight: Tensor, target: Table) -> Tensor:
    """Law [V^T] of the first T tokens: what the round emits, then the target's own law up to the horizon T."""
    size, horizon = target[0].shape[1], len(target)
    assert bool(verdicts.ok[weight > 0].all()), "a sound row was reported as broken"
    code = torch.zeros_like(verdicts.token)
    mass = [torch.zeros(size**d, dtype=torch.float64) for d in range(horizon + 1)]
    for place in range(horizon):
        ends = verdicts.accepted == place
        mass[place + 1].index_add_(0, (code * size + verdicts.token)[ends], weight[ends])
        if place < horizon - 1:
            code = code * size + tokens.gather(1, verdicts.path[:, place : place + 1]).squeeze(1)
    for d in range(1, horizon):
        mass[d + 1] += (mass[d].unsqueeze(1) * target[d]).reshape(-1)
    return mass[horizon]


def own_law(target: Table) -> Tensor:
    """The target's own law [V^T] of T tokens."""
    law = torch.ones(1, dtype=torch.float64)
    for table in target:
        law = (law.unsqueeze(1) * table).reshape(-1)
    return law


def round_law(
    rule: Callable[..., Verdicts],
    parents: tuple[int, ...],
    drafts: Drafts,
    target: Table,
    p_of: Target | None = None,
    kind: str | None = None,
) -> tuple[Tensor, float]:
    """The exact law of the emitted tokens under a rule, and the expected number of accepted ones.

    ``target`` is the truth; ``p_of`` what the rule is given (the same, unless a test says otherwise); ``kind`` what
    the rule is told about how the draft was drawn.
    """
    size, n, count = target[0].shape[1], len(parents), len(drafts.tokens)
    p = (p_of or by_table(target, parents))(drafts.tokens, repeated(parents, count))
    bits = torch.tensor(list(itertools.product([False, True], repeat=n))).reshape(-1, n)
    bits = torch.cat([torch.zeros_like(bits[:, :1]), bits], 1)
    outcomes = len(bits) * size

    def spread(x: Tensor) -> Tensor:
        return x.repeat_interleave(outcomes, 0)

    chance = Enumerator(bits.repeat_interleave(size, 0).repeat(count, 1), torch.arange(size).repeat(count * len(bits)))
    topology = repeated(parents, count * outcomes)
    tokens, q = spread(drafts.tokens), None if drafts.q is None else spread(drafts.q)
    verdicts = rule(spread(p), q, tokens, topology, [kind or drafts.kind] * len(tokens), chance)
    weight = spread(drafts.weight) * chance.weight
    assert abs(float(weight.sum()) - 1) < 1e-12, "the outcomes' probabilities do not sum to 1"
    return _spread(verdicts, tokens, weight, target), float((weight * verdicts.accepted).sum())


def coupled_law(parents: tuple[int, ...], tokens: Tensor, target: Table) -> Tensor:
    """The exact law under the coupled rule for one draft (tokens [N+1]): every way the target's own tokens can fall."""
    size, width = target[0].shape[1], len(parents) + 1
    fall = torch.tensor(list(itertools.product(range(size), repeat=width)))  # [V^W, W]
    p = by_table(target, parents)(tokens.unsqueeze(0), repeated(parents, 1))[0]  # [W, V]
    weight = p.gather(1, fall.T).prod(0)
    rows = tokens.expand(len(fall), -1)
    verdicts = coupled_rule(fall, rows, repeated(parents, len(fall)))
    return _spread(verdicts, rows, weight, target)


class NotLossless(AssertionError):
    """The emitted tokens do not follow the target's law."""


def check_law(law: Tensor, target: Table) -> None:
    """Raise unless the law is the target's own to 1e-12."""
    off = float((law - own_law(target)).abs().max())
    if not off < 1e-12:
        raise NotLossless(f"off by {off:.2e}")


def chi_squared(counts: Tensor, expected: Tensor) -> float:
    """How many standard deviations counts [K] are from what is expected [K]: about normal when they agree.

    The statistic's cube root is nearly normal (Wilson and Hilferty), so no table is needed.
    """
    keep = expected > 0
    assert not bool(counts[~keep].any()), "something impossible happened"
    counts, expected = counts[keep].double(), expected[keep].double()
    expected = expected * (counts.sum() / expected.sum())
    statistic = float(((counts - expected) ** 2 / expected).sum())
    k = len(counts) - 1
    return ((statistic / k) ** (1 / 3) - (1 - 2 / (9 * k))) / math.sqrt(2 / (9 * k))
