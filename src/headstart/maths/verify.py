"""The three verification rules. Chains and trees; point, iid and distinct drafts; all rows of a batch: one code.

Knows: the target's distributions p, the draft's distributions q, the drafted tokens and the shape of the draft.
Does not know: who drafted, what a token means, or where randomness comes from (a ``Chance`` is passed in; the tests
pass one that enumerates every outcome, and so prove this very code).

Words: a node is a token of the draft, node 0 the last committed one. p[node] is the target's distribution of the token
that follows it, q of a node the distribution its own token was drawn from. The residual of a node is what is left of
p[node] for the target's own token once rejected children have had their share.

A node whose parent's p, or whose own q, is not a distribution (NaN, say) is not considered, whatever its token: so a
broken q costs only speed, and a row fails (``ok``) exactly when its next token would have to come from a broken p.
Both are float32 (a bfloat16 q does not sum to 1 closely enough to count as a distribution), float64 in exact tests.

Nothing here waits for the device or branches on a value, so a round can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor

from ..types import Draw
from . import noise
from .tree import Topology

__all__ = ["Chance", "CounterChance", "Verdicts", "block_rule", "coupled_rule", "effective_q", "token_rule"]

Node = int | Tensor  # the same node in every row, or one for each row [R]

_TOLERANCE = 1e-3  # how far from 1 a distribution may sum; float32 rounding stays far below for any vocabulary


class Chance(Protocol):
    """Where the rules get their randomness."""

    def accept(self, node: Tensor, probability: Tensor) -> Tensor:
        """Decide about one node of each row: node [R], probability [R] -> [R] bool.

        Each node is asked about once in a round; node 0 stands for nothing to decide, and has probability 0.
        """

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
        self._round = noise.round_key(seeds, base)
        self._uniform: Tensor | None = None  # [R, width], made when first asked for

    def accept(self, node: Tensor, probability: Tensor) -> Tensor:
        if self._uniform is None:
            nodes = torch.arange(self._width, device=node.device).expand(len(node), -1)
            self._uniform = noise.uniform(noise.keys_in(self._round, nodes, noise.ACCEPT))
        return self._uniform.gather(1, node.unsqueeze(1)).squeeze(1) < probability

    def draw(self, weights: Tensor, drafted: Tensor | None = None) -> Tensor:
        # A round without a draft uses the position's own noise: what plain and coupled decoding use.
        stream: Tensor | int = noise.RESIDUAL
        if drafted is not None:
            stream = torch.where(drafted, noise.RESIDUAL, noise.COUPLED)
        return noise.race(weights, noise.keys_in(self._round, 0, stream))

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


def _at(x: Tensor, node: Node) -> Tensor:
    """x [R, M, ..] at one place of each row, or (a view) at the same place of all rows -> [R, ..]."""
    return x[:, node] if isinstance(node, int) else x[torch.arange(len(x), device=x.device), node]


def _put(x: Tensor, node: Node, value: Tensor) -> None:
    """Write value [R, ..] into x [R, M, ..] at one place of each row."""
    if isinstance(node, int):
        x[:, node] = value
    else:
        x[torch.arange(len(x), device=x.device), node] = value


def _quotient(a: Tensor, b: Tensor) -> Tensor:
    """a / b for a, b >= 0, with 0 / 0 = 0. A token with q = 0 cannot be drawn, so a / 0 never decides anything."""
    return torch.where(a > 0, a / b, 0.0)


def effective_q(q: Tensor | None, tokens: Tensor, topology: Topology, draw_kinds: Sequence[Draw]) -> Tensor | None:
    """The distribution each token was really drawn from [R, N, V] (row i: node i+1); no rule asks for the kind then.

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
    drafted = tokens[:, 1:].clamp(0, q.shape[2] - 1)  # [R, N]
    parent, valid = topology.parent[:, 1:], topology.valid[:, 1:]
    node = torch.arange(q.shape[1], device=q.device)
    elder = (parent.unsqueeze(2) == parent.unsqueeze(1)) & (node.unsqueeze(1) > node) & valid.unsqueeze(1)  # [R, N, N]
    # One factor for each pair (node, other node): 0 at an elder sibling's token, 1 at any other.
    keep = torch.where(elder, 0.0, 1.0).to(q.dtype)
    index = drafted.unsqueeze(1).expand_as(keep)
    first = 0
    for kind, run in groupby(draw_kinds):  # slices: a mask made on the host would have to be copied to the device
        rows = slice(first, first + len(list(run)))
        first = rows.stop
        if kind == "point":
            q[rows].zero_().scatter_(2, drafted[rows].unsqueeze(2), 1.0)
        elif kind == "distinct" and distinct:
            q[rows].scatter_reduce_(2, index[rows], keep[rows], "prod")
            q[rows].div_(q[rows].sum(2, keepdim=True))
    return q


class _Draft:
    """A checked proposal, and what is left of p at its nodes while children are rejected."""

    def __init__(self, p: Tensor, q: Tensor | None, tokens: Tensor, topology: Topology) -> None:
        rows, width, size = p.shape
        if tokens.shape != (rows, width) or topology.parent.shape != (rows, width):
            raise ValueError(f"p {list(p.shape)} needs tokens and topology [{rows}, {width}], not {list(tokens.shape)}")
        if q is not None and q.shape != (rows, width - 1, size):
            raise ValueError(f"q must be [{rows}, {width - 1}, {size}], not {list(q.shape)}")
        self.p, self.q = p, q
        self.tokens = tokens.clamp(0, size - 1)  # padding may hold anything
        self.sound = _sound(p)  # [R, N+1]
        self.drawn = p.new_ones(rows, width)  # q of each node's own token; 1 in a point draft
        broken = ~self.sound.gather(1, topology.parent)
        if q is not None:
            self.drawn[:, 1:] = q.gather(2, self.tokens[:, 1:].unsqueeze(2)).squeeze(2)
            broken[:, 1:] |= ~_sound(q)
        broken |= self.tokens != tokens  # no such token
        broken[:, 0] = False
        # A node counts if it is valid and nothing is broken on the way down to it. The root is no guess.
        self.usable = topology.valid & ~(topology.ancestors & broken.unsqueeze(1)).any(2)
        self.usable[:, 0] = False

    def rest(self, weights: Tensor, node: Node, scale: Tensor) -> Tensor:
        """max(scale * weights - q of the node, 0): weights [R, V], scale [R] -> a new [R, V]."""
        weights = weights * scale.unsqueeze(1)
        if self.q is None:  # q is 1 at the token and 0 elsewhere, and no weight is above 1
            return weights.scatter_(1, _at(self.tokens, node).unsqueeze(1), 0.0)
        return weights.sub_(_at(self.q, node - 1)).clamp_min_(0)

    def ratio(self, node: Node, parent: Node) -> Tensor:
        """The parent's residual over the node's q, both at the node's token [R]."""
        raise NotImplementedError

    def reject(self, node: Node, parent: Node, scale: Tensor, where: Tensor, *, weigh: bool) -> Tensor:
        """Reject the node in the rows ``where`` [R] says: the parent's residual P becomes max(scale * P - q, 0),
        normalised. Returns the sum before that [R]; with ``weigh=False`` nobody wants it, and it may be anything."""
        raise NotImplementedError

    def last(self, node: Tensor) -> Tensor:
        """The residual of the last accepted node [R], as weights [R, V].

        Rounding alone can leave nothing of it (p and q are then equal but for the last bits): p itself will do.
        """
        raise NotImplementedError


class _Chains(_Draft):
    """A node of a chain has one child, so the only residual that is ever wanted is the one the last token is drawn
    from: a rejection is noted, and the subtraction done once, at the end. Nodes are plain numbers, the same for all
    rows, so that the distributions of a node are a view."""

    def __init__(self, p: Tensor, q: Tensor | None, tokens: Tensor, topology: Topology) -> None:
        super().__init__(p, q, tokens, topology)
        self.rejected = torch.zeros_like(self.usable)  # the node's child was rejected ...
        self.scale = torch.ones_like(self.drawn)  # ... with this factor before p
        above = p[:, :-1].gather(2, self.tokens[:, 1:].unsqueeze(2)).squeeze(2)  # [R, N]
        self.ratios = _quotient(above, self.drawn[:, 1:])

    def ratio(self, node: Node, parent: Node) -> Tensor:
        return _at(self.ratios, node - 1)

    def reject(self, node: Node, parent: Node, scale: Tensor, where: Tensor, *, weigh: bool) -> Tensor:
        _put(self.scale, parent, torch.where(where, scale, _at(self.scale, parent)))
        _put(self.rejected, parent, where | _at(self.rejected, parent))
        if not weigh:
            return scale
        if self.q is None:  # all but the token itself stays
            return scale * (1 - self.ratio(node, parent)).clamp_min(0)
        return self.rest(_at(self.p, parent), node, scale).sum(-1)

    def last(self, node: Tensor) -> Tensor:
        weights = _at(self.p, node)
        if self.p.shape[1] == 1:
            return weights
        child = (node + 1).clamp_max(self.p.shape[1] - 1)
        rest = self.rest(weights, child, _at(self.scale, node))
        some = _at(self.rejected, node) & (rest.sum(-1) > 0)
        return torch.where(some.unsqueeze(1), rest, weights)


class _Trees(_Draft):
    """In a tree elder siblings change what younger ones meet: p is copied, and the copy kept up to date and
    normalised. Parents are tensors [R], one for each row."""

    def __init__(self, p: Tensor, q: Tensor | None, tokens: Tensor, topology: Topology) -> None:
        super().__init__(p, q, tokens, topology)
        self.left = p.clone()  # [R, N+1, V]
        self.rows = torch.arange(len(p), device=p.device)

    def ratio(self, node: Node, parent: Node) -> Tensor:
        return _quotient(self.left[self.rows, parent, _at(self.tokens, node)], _at(self.drawn, node))

    def reject(self, node: Node, parent: Node, scale: Tensor, where: Tensor, *, weigh: bool) -> Tensor:
        before = _at(self.left, parent)
        rest = self.rest(before, node, scale)
        mass = rest.sum(-1)
        rest.div_(torch.where(mass > 0, mass, 1.0).unsqueeze(1))
        _put(self.left, parent, torch.where(where.unsqueeze(1), rest, before))
        return mass

    def last(self, node: Tensor) -> Tensor:
        rest = _at(self.left, node)
        return torch.where(rest.sum(-1, keepdim=True) > 0, rest, _at(self.p, node))


def _begin(p: Tensor, q: Tensor | None, tokens: Tensor, topology: Topology, draw_kinds: Sequence[Draw]) -> _Draft:
    kind: type[_Draft] = _Chains if topology.is_chain else _Trees
    return kind(p, effective_q(q, tokens, topology, draw_kinds), tokens, topology)


def _verdicts(state: _Draft, last: Tensor, topology: Topology, chance: Chance) -> Verdicts:
    """Draw the target's own token after the last accepted node [R]."""
    token = chance.draw(state.last(last), topology.valid[:, 1:].any(1))
    path, accepted = _path(last, topology)
    return Verdicts(path, accepted, token, _at(state.sound, last))


def _path(last: Tensor, topology: Topology) -> tuple[Tensor, Tensor]:
    """The nodes from the root (left out) down to the last one, in order: last [R] -> [R, N+1], and how many [R]."""
    node = torch.arange(topology.width, device=last.device)
    on_it = _at(topology.ancestors, last) & (node > 0)
    # A node of depth d goes to place d - 1; the others write a 0 to the last place, for which no path is long enough.
    place = torch.where(on_it, topology.depth - 1, topology.width - 1)
    path = torch.zeros_like(topology.parent).scatter_(1, place, torch.where(on_it, node, 0))
    return path, on_it.sum(1)


def token_rule(
    p: Tensor, q: Tensor | None, tokens: Tensor, topology: Topology, draw_kinds: Sequence[Draw], chance: Chance
) -> Verdicts:
    """Accept a child of the current node with min(1, residual / q) and go on below it, or reject it and go on with
    the residual it leaves. p [R, N+1, V]; q [R, N, V] (row i belongs to node i+1) or None; tokens [R, N+1], column 0
    the root."""
    state = _begin(p, q, tokens, topology, draw_kinds)
    current = torch.zeros(len(p), dtype=torch.int64, device=p.device)
    one = p.new_ones(len(p))
    for i in range(1, topology.width):
        node = torch.full_like(current, i)
        parent: Node = i - 1 if topology.is_chain else current
        asked = state.usable[:, i] & (topology.parent[:, i] == current)
        chances = torch.where(asked, state.ratio(i, parent).clamp_max(1), 0.0)
        yes = chance.accept(node, chances) & asked
        state.reject(i, parent, one, asked & ~yes, weigh=False)
        current = torch.where(yes, node, current)
    return _verdicts(state, current, topology, chance)


def block_rule(
    p: Tensor, q: Tensor | None, tokens: Tensor, topology: Topology, draw_kinds: Sequence[Draw], chance: Chance
) -> Verdicts:
    """Decide from the leaves up, so that a weak token is saved by strong ones after it; never accepts less than the
    token rule on average. On a chain this is block verification, on a tree its traversal from the leaves.

    r[node] is the probability that the target's text goes through the node, as far as is known: 1 at the root, and
    min(1, r[parent] * P[parent](x) / q(x)) below, where P is the residual. Leaving a node after all its children were
    rejected, accept it with r[node]. If not, its parent has S = sum max(r P - q, 0) left to give, out of the
    S + 1 - r that were not accepted: r[parent] becomes S / (S + 1 - r), and its P what S sums up. Arguments as for
    ``token_rule``.
    """
    state = _begin(p, q, tokens, topology, draw_kinds)
    last = torch.zeros(len(p), dtype=torch.int64, device=p.device)
    done = torch.zeros_like(last, dtype=torch.bool)
    r = p.new_ones(len(p), topology.width)
    for node, parent, entering, leaving in _walk(topology):
        above = _at(r, parent)
        if entering is not None:
            below = (above * state.ratio(node, parent)).clamp_max(1)
            _put(r, node, torch.where(entering, below, _at(r, node)))
        if leaving is not None:
            asked = leaving & _at(state.usable, node) & ~done
            place = torch.where(leaving, node, 0)
            yes = chance.accept(place, torch.where(asked, _at(r, node), 0.0)) & asked
            done = done | yes
            last = torch.where(yes, place, last)
            no = asked & ~yes
            mass = state.reject(node, parent, above, no, weigh=True)
            lost = mass + (1 - above)
            _put(r, parent, torch.where(no, torch.where(lost > 0, mass / lost, 1.0), above))
    return _verdicts(state, last, topology, chance)


def _walk(topology: Topology) -> Iterator[tuple[Node, Node, Tensor | None, Tensor | None]]:
    """Depth-first: (node, parent, rows that enter the node, rows that leave it); None if no row can."""
    if topology.is_chain:
        everywhere = torch.ones_like(topology.valid[:, 0])  # also in rows that are shorter: they have no use for it
        for i in range(1, topology.width):
            yield i, i - 1, everywhere, None
        for i in range(topology.width - 1, 0, -1):
            yield i, i - 1, None, everywhere
        return
    for event in topology.events.unbind(1):
        node = event.abs()
        yield node, _at(topology.parent, node), event > 0, event < 0


def coupled_rule(target_tokens: Tensor, tokens: Tensor, topology: Topology) -> Verdicts:
    """Follow the target's own tokens as far as the draft has them; also the greedy rule, where those are the argmaxes.

    target_tokens [R, N+1]: the token the target puts after each node, -1 where its distribution is broken;
    tokens [R, N+1], column 0 the root.
    """
    agrees = topology.valid & (tokens == target_tokens.gather(1, topology.parent))
    agrees[:, 0] = True
    if not topology.is_chain:
        # Of equal siblings only the first counts. To look which one goes on further would be to choose by what the
        # target says next, and its two answers can differ in the last bits.
        node = torch.arange(topology.width, device=tokens.device)
        siblings = (topology.parent.unsqueeze(2) == topology.parent.unsqueeze(1)) & (node.unsqueeze(1) > node)
        siblings[:, :, 0] = False  # the root is nobody's sibling
        agrees = agrees & ~(siblings & agrees.unsqueeze(1)).any(2)
    reached = (agrees.unsqueeze(1) | ~topology.ancestors).all(2)  # agreed with all the way from the root
    last = torch.where(reached, topology.depth, -1).argmax(1)
    path, accepted = _path(last, topology)
    token = _at(target_tokens, last)
    return Verdicts(path, accepted, token, token >= 0)
