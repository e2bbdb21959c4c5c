"""The three verification rules. Chains and trees; point, iid and distinct drafts; all rows of a batch: one code.

Knows: the target's distributions p, the draft's distributions q, the drafted tokens and the shape of the draft.
Does not know: who drafted, what a token means, or where randomness comes from (a ``Chance`` is passed in; the tests
pass one that enumerates every outcome, and so prove this very code).

Words: a node is a token of the draft, node 0 the last committed one. p[node] is the target's distribution of the token
that follows it, q of a node the distribution its own token was drawn from. The residual of a node is what is left of
p[node] for the target's own token once rejected children have had their share.

A node whose parent's p, or whose own q, is not a distribution (NaN, say) is not considered, whatever its token: so a
broken q costs only speed, and a row fails (``ok``) exactly when its next token would have to come from a broken p.

Nothing here waits for the device or branches on a value, so a round can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..types import Draw
from . import noise
from .tree import Topology

__all__ = ["Chance", "CounterChance", "Verdicts", "block_rule", "coupled_rule", "effective_q", "token_rule"]

_TOLERANCE = 1e-3  # how far from 1 a distribution may sum; float32 rounding stays far below for any vocabulary


class Chance(Protocol):
    """Where the rules get their randomness."""

    def accept(self, node: Tensor, probability: Tensor) -> Tensor:
        """Decide about one node of each row: node [R], probability [R] -> [R] bool. Each node is asked about once."""

    def draw(self, weights: Tensor, drafted: Tensor | None = None) -> Tensor:
        """The target's own token: weights [R, V] of any sum -> [R]. drafted [R] bool: the row had a draft."""

    def targets(self, p: Tensor, depth: Tensor) -> Tensor:
        """Coupled: the target's token at every node, p [R, N+1, V], depth [R, N+1] -> [R, N+1]; -1 if p is broken."""


class CounterChance:
    """Counter-based randomness (see ``noise``), which is what production uses.

    seeds [R] int64; base [R] int64: committed tokens, prompt included, so the absolute position of the next one;
    width: nodes a row can have (``Topology.width`` or more).
    """

    def __init__(self, seeds: Tensor, base: Tensor, width: int = 256) -> None:
        self._seeds, self._base, self._width = seeds, base, width
        self._uniform: Tensor | None = None  # [R, width], made when first asked for

    def accept(self, node: Tensor, probability: Tensor) -> Tensor:
        if self._uniform is None:
            nodes = torch.arange(self._width, device=node.device).expand(len(self._seeds), -1)
            self._uniform = noise.uniform(noise.keys(self._seeds, self._base, nodes, noise.ACCEPT))
        return self._uniform.gather(1, node.unsqueeze(1)).squeeze(1) < probability

    def draw(self, weights: Tensor, drafted: Tensor | None = None) -> Tensor:
        # A round without a draft uses the position's own noise: what plain and coupled decoding use.
        stream: Tensor | int = noise.RESIDUAL
        if drafted is not None:
            stream = torch.where(drafted, noise.RESIDUAL, noise.COUPLED)
        return noise.race(weights, noise.keys(self._seeds, self._base, 0, stream))

    def targets(self, p: Tensor, depth: Tensor) -> Tensor:
        keys = noise.keys(self._seeds, self._base.unsqueeze(1) + depth, 0, noise.COUPLED)
        return torch.where(_sound(p), noise.race(p, keys), -1)


@dataclass(frozen=True)
class Verdicts:
    """What the target says of R drafts. Lives on the device."""

    path: Tensor  # [R, N+1] int64: accepted nodes in order, padded with 0
    accepted: Tensor  # [R] int64: how many
    token: Tensor  # [R] int64: the one token the target adds
    ok: Tensor  # [R] bool: False if p was broken where the token comes from; that row's request must fail


def _sound(p: Tensor) -> Tensor:
    """Is it a distribution? p [.., V] -> [..] bool. NaN compares False."""
    return (p.sum(-1) - 1).abs() < _TOLERANCE


def _pick(x: Tensor, node: Tensor | int) -> Tensor:
    """x [R, N+1, ..] at one node of each row, or (a view) at the same node of all rows."""
    return x[:, node] if isinstance(node, int) else x[torch.arange(len(x), device=x.device), node]


def _put(x: Tensor, node: Tensor | int, value: Tensor) -> None:
    """Write value [R, ..] into x [R, N+1, ..] at one node of each row."""
    x[slice(None) if isinstance(node, int) else torch.arange(len(x), device=x.device), node] = value


def effective_q(q: Tensor | None, tokens: Tensor, topology: Topology, draw_kinds: Sequence[Draw]) -> Tensor | None:
    """The distribution each token was really drawn from; after this no rule asks for the kind. [R, N, V], row i of node i+1.

    point: all mass on the token. iid: q as it is. distinct: q without the tokens of elder siblings. None (every row is
    a point draft) stands for one-hot distributions that are never written out. The caller's q is not changed.
    """
    if len(draw_kinds) != len(tokens):
        raise ValueError(f"{len(draw_kinds)} kinds of draw for {len(tokens)} rows")
    if all(kind == "point" for kind in draw_kinds):
        return None
    if q is None:
        raise ValueError("drafts that were drawn at random need their q")
    kinds = set(draw_kinds)
    distinct = "distinct" in kinds and not topology.is_chain  # in a chain there are no siblings
    if not distinct and "point" not in kinds:
        return q
    q = q.clone()
    drafted = tokens[:, 1:].clamp_min(0)  # [R, N]
    parent, valid = topology.parent[:, 1:], topology.valid[:, 1:]
    node = torch.arange(q.shape[1], device=q.device)
    elder = (parent.unsqueeze(2) == parent.unsqueeze(1)) & (node.unsqueeze(1) > node) & valid.unsqueeze(1)  # [R, N, N]
    # One factor for each pair (node, other node): 0 at an elder sibling's token, 1 at any other.
    keep = torch.where(elder, 0.0, 1.0).to(q.dtype)
    index = drafted.unsqueeze(1).expand_as(keep)
    for row, kind in enumerate(draw_kinds):  # row by row: a mask made on the host would have to be copied to the device
        if kind == "point":
            q[row].zero_().scatter_(1, drafted[row].unsqueeze(1), 1.0)
        elif kind == "distinct" and distinct:
            q[row].scatter_reduce_(1, index[row], keep[row], "prod")
            q[row].div_(q[row].sum(-1, keepdim=True))
    return q


class _Residuals:
    """What is left of p at every node, as children are rejected one by one.

    A chain's nodes have one child each, so nothing need be stored but how much was asked of it: the residual is worked
    out once, at the end, for the one node where it is wanted. In a tree elder siblings change what younger ones meet,
    so there p is copied and updated. Weights are not normalised; ``norm`` is their sum.
    """

    def __init__(self, p: Tensor, q: Tensor | None, tokens: Tensor, topology: Topology) -> None:
        rows, width, size = p.shape
        if tokens.shape != (rows, width) or topology.parent.shape != (rows, width):
            raise ValueError(f"p {list(p.shape)} needs tokens and topology [{rows}, {width}], not {list(tokens.shape)}")
        if q is not None and q.shape != (rows, width - 1, size):
            raise ValueError(f"q must be [{rows}, {width - 1}, {size}], not {list(q.shape)}")
        self.p, self.q, self.chain = p, q, topology.is_chain
        self.tokens = tokens.clamp(0, size - 1)  # padding may hold anything
        self.weights = p if self.chain else p.clone()  # [R, N+1, V]
        self.norm = p.new_ones(rows, width)
        self.scale = p.new_ones(rows, width)  # chains: the factor that was in force when the child was rejected
        self.rejected = torch.zeros_like(topology.valid)  # chains: the child was rejected
        self.sound = _sound(p)  # [R, N+1]
        broken = ~self.sound.gather(1, topology.parent)
        if q is None:
            self.at_token = self.norm  # q of a point draft's own token is 1; norm's first values are never changed ...
        else:
            drawn = q.gather(2, self.tokens[:, 1:].unsqueeze(2)).squeeze(2)
            self.at_token = torch.cat([self.norm[:, :1], drawn], 1)  # [R, N+1]
            broken = broken | torch.cat([torch.zeros_like(broken[:, :1]), ~_sound(q)], 1)
        broken[:, 0] = False
        # Considered: valid, and nothing broken on the way down to it. The root is no guess.
        self.usable = topology.valid & ~(topology.ancestors & broken.unsqueeze(1)).any(2)
        self.usable[:, 0] = False
