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

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from ..types import Draw
from .chance import Chance, CounterChance, sound
from .limits import CPU_CACHE
from .tree import Topology

__all__ = [
    "Chance",
    "CounterChance",
    "Verdicts",
    "block_rule",
    "chain_rules",
    "coupled_rule",
    "effective_q",
    "token_rule",
]

Node = int | Tensor | slice  # the same node in every row, one for each row [R], or several of every row


@dataclass(frozen=True)
class Verdicts:
    """What the target says of R drafts. Lives on the device."""

    path: Tensor  # [R, N+1] int64: accepted nodes in order, padded with 0
    accepted: Tensor  # [R] int64: how many
    token: Tensor  # [R] int64: the one token the target adds
    ok: Tensor  # [R] bool: False if p was broken where the token comes from; that row's request must fail


def _at(x: Tensor, node: Node) -> Tensor:
    """x [R, M, ..] at one place of each row, or (a view) at the same place of all rows -> [R, ..]."""
    return x[torch.arange(len(x), device=x.device), node] if isinstance(node, Tensor) else x[:, node]


def _put(x: Tensor, node: Tensor, value: Tensor) -> None:
    """Write value [R, ..] into x [R, M, ..] at one place of each row."""
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
        self.sound = sound(p)  # [R, N+1]
        self.drawn = p.new_ones(rows, width)  # q of each node's own token; 1 in a point draft
        broken = ~self.sound.gather(1, topology.parent)
        if q is not None:
            self.drawn[:, 1:] = q.gather(2, self.tokens[:, 1:].unsqueeze(2)).squeeze(2)
            broken[:, 1:] |= ~sound(q)
        broken |= self.tokens != tokens  # no such token
        broken[:, 0] = False
        # A node counts if it is valid and nothing is broken on the way down to it. The root is no guess.
        self.usable = topology.valid & ~(topology.ancestors & broken.unsqueeze(1)).any(2)
        self.usable[:, 0] = False

    def rest(self, weights: Tensor, node: Node, scale: Tensor) -> Tensor:
        """max(scale * weights - q of the node, 0): weights [R, V], scale [R] -> a new [R, V]; of a slice of nodes
        [R, M, V], scale [R, M]."""
        weights = weights * scale.unsqueeze(-1)
        if self.q is None:  # q is 1 at the token and 0 elsewhere, and no weight is above 1
            return weights.scatter_(-1, _at(self.tokens, node).unsqueeze(-1), 0.0)
        above = slice(node.start - 1, None) if isinstance(node, slice) else node - 1
        return weights.sub_(_at(self.q, above)).clamp_min_(0)

    def last(self, node: Tensor) -> Tensor:
        """The residual of the last accepted node [R], as weights [R, V].

        Rounding alone can leave nothing of it (p and q are then equal but for the last bits): p itself will do.
        """
        raise NotImplementedError


class _Chains(_Draft):
    """A node of a chain has one child, so the only residual that is ever wanted is the one the last token is drawn
    from: the subtraction is done once, at the end. Nothing depends on a decision, so all nodes are worked out at once.
    """

    def __init__(self, p: Tensor, q: Tensor | None, tokens: Tensor, topology: Topology) -> None:
        super().__init__(p, q, tokens, topology)
        self.scale = torch.ones_like(self.drawn)  # the factor before p in a node's residual
        above = p[:, :-1].gather(2, self.tokens[:, 1:].unsqueeze(2)).squeeze(2)  # [R, N]
        self.ratios = _quotient(above, self.drawn[:, 1:])

    def masses(self) -> Tensor:
        """What the residuals of nodes 1 .. N-1 sum up to, if their children are rejected [R, N-1]."""
        p, scale = self.p[:, 1:-1], self.scale[:, 1:-1]
        if self.q is None:  # all but the token itself stays
            return scale * (1 - self.ratios[:, 1:]).clamp_min(0)
        if p.is_cuda or p.numel() <= CPU_CACHE:
            return self.rest(p, slice(2, None), scale).sum(-1)
        # On a CPU, a piece that stays in its cache at a time.
        parts = [self.rest(p[:, i], i + 2, scale[:, i]).sum(-1) for i in range(p.shape[1])]
        return torch.stack(parts, 1)

    def last(self, node: Tensor) -> Tensor:
        weights = _at(self.p, node)
        if self.p.shape[1] == 1:
            return weights
        child = (node + 1).clamp_max(self.p.shape[1] - 1)
        rest = self.rest(weights, child, _at(self.scale, node))
        # A usable child that was not accepted was rejected.
        some = (child > node) & _at(self.usable, child) & (rest.sum(-1) > 0)
        return torch.where(some.unsqueeze(1), rest, weights)


class _Trees(_Draft):
    """In a tree elder siblings change what younger ones meet: p is copied, and the copy kept up to date and
    normalised. Parents are tensors [R], one for each row."""

    def __init__(self, p: Tensor, q: Tensor | None, tokens: Tensor, topology: Topology) -> None:
        super().__init__(p, q, tokens, topology)
        self.left = p.clone()  # [R, N+1, V]
        self.rows = torch.arange(len(p), device=p.device)

    def ratio(self, node: Node, parent: Tensor) -> Tensor:
        """The parent's residual over the node's q, both at the node's token [R]."""
        return _quotient(self.left[self.rows, parent, _at(self.tokens, node)], _at(self.drawn, node))

    def reject(self, node: Node, parent: Tensor, scale: Tensor, where: Tensor) -> Tensor:
        """Reject the node in the rows ``where`` [R] says: the parent's residual P becomes max(scale * P - q, 0),
        normalised. Returns the sum before that [R]."""
        before = _at(self.left, parent)
        rest = self.rest(before, node, scale)
        mass = rest.sum(-1)
        rest.div_(torch.where(mass > 0, mass, 1.0).unsqueeze(1))
        _put(self.left, parent, torch.where(where.unsqueeze(1), rest, before))
        return mass

    def last(self, node: Tensor) -> Tensor:
        rest = _at(self.left, node)
        return torch.where(rest.sum(-1, keepdim=True) > 0, rest, _at(self.p, node))


def _verdicts(state: _Draft, last: Tensor, topology: Topology, chance: Chance) -> Verdicts:
    """Draw the target's own token after the last accepted node [R]."""
    token = chance.draw(state.last(last), topology.valid[:, 1:].any(1))
    path, accepted = _path(last, topology)
    return Verdicts(path, accepted, token, _at(state.sound, last))


def _path(last: Tensor, topology: Topology) -> tuple[Tensor, Tensor]:
    """The nodes from the root (left out) down to the last one, in order: last [R] -> [R, N+1], and how many [R]."""
    node = torch.arange(topology.width, device=last.device)
    if topology.is_chain:
        return torch.where(node < last.unsqueeze(1), node + 1, 0), last
    on_it = _at(topology.ancestors, last) & (node > 0)
    # A node of depth d goes to place d - 1; the others write a 0 to the last place, for which no path is long enough.
    place = torch.where(on_it, topology.depth - 1, topology.width - 1)
    path = torch.zeros_like(topology.parent).scatter_(1, place, torch.where(on_it, node, 0))
    return path, on_it.sum(1)


def chain_rules(
    p: Tensor,
    q: Tensor | None,
    tokens: Tensor,
    topology: Topology,
    draw_kinds: Sequence[Draw],
    chance: Chance,
    block: Tensor | bool,
) -> Verdicts:
    """The token and the block rule on chains, all nodes at once. block [R] bool: which rows take the block rule.

    Token: accept a node with min(1, p / q), up to the first that is not. Block: r[node] = min(1, r[parent] p / q) is
    the probability that the target's text goes through the node, as far as is known; a node is accepted with r if
    nothing stands below it, and otherwise with S / (S + 1 - r), S the mass of max(r p - q, 0) below it; the last
    accepted one counts. Arguments as for ``token_rule``.
    """
    state = _Chains(p, effective_q(q, tokens, topology, draw_kinds), tokens, topology)
    usable, count = state.usable[:, 1:], topology.width - 1
    if not count:
        return _verdicts(state, torch.zeros_like(tokens[:, 0]), topology, chance)
    chances = state.ratios.clamp_max(1)
    if block is not False:
        r = [p.new_ones(len(p))]
        for i in range(count):
            r.append((r[-1] * state.ratios[:, i]).clamp_max(1))
        through = torch.stack(r, 1)  # [R, N+1]
        state.scale = through if block is True else torch.where(block.unsqueeze(1), through, state.scale)
        reach = state.scale[:, 1:]
        mass = state.masses()
        lost = mass + (1 - reach[:, :-1])
        saved = torch.where(lost > 0, mass / lost, 1.0)
        reach = torch.cat([torch.where(usable[:, 1:], saved, reach[:, :-1]), reach[:, -1:]], 1)
        chances = reach if block is True else torch.where(block.unsqueeze(1), reach, chances)
    node = torch.arange(1, count + 1, device=p.device).expand(len(p), -1)
    yes = chance.accept(node, torch.where(usable, chances, 0.0)) & usable
    leading = yes.to(torch.int64).cumprod(1).sum(1) if block is not True else None
    furthest = torch.where(yes, node, 0).amax(1) if block is not False else None
    if leading is None or furthest is None:
        last = furthest if leading is None else leading
    else:
        last = torch.where(torch.as_tensor(block), furthest, leading)
    assert last is not None
    return _verdicts(state, last, topology, chance)


def token_rule(
    p: Tensor, q: Tensor | None, tokens: Tensor, topology: Topology, draw_kinds: Sequence[Draw], chance: Chance
) -> Verdicts:
    """Accept a child of the current node with min(1, residual / q) and go on below it, or reject it and go on with
    the residual it leaves. p [R, N+1, V]; q [R, N, V] (row i belongs to node i+1) or None; tokens [R, N+1], column 0
    the root."""
    if topology.is_chain:
        return chain_rules(p, q, tokens, topology, draw_kinds, chance, block=False)
    state = _Trees(p, effective_q(q, tokens, topology, draw_kinds), tokens, topology)
    current = torch.zeros(len(p), dtype=torch.int64, device=p.device)
    one = p.new_ones(len(p))
    for i in range(1, topology.width):
        node = torch.full_like(current, i)
        asked = state.usable[:, i] & (topology.parent[:, i] == current)
        chances = torch.where(asked, state.ratio(i, current).clamp_max(1), 0.0)
        yes = chance.accept(node, chances) & asked
        state.reject(i, current, one, asked & ~yes)
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
    if topology.is_chain:
        return chain_rules(p, q, tokens, topology, draw_kinds, chance, block=True)
    state = _Trees(p, effective_q(q, tokens, topology, draw_kinds), tokens, topology)
    last = torch.zeros(len(p), dtype=torch.int64, device=p.device)
    done = torch.zeros_like(last, dtype=torch.bool)
    r = p.new_ones(len(p), topology.width)
    for event in topology.events.unbind(1):  # depth-first: enter node i, leave node -i
        node, entering, leaving = event.abs(), event > 0, event < 0
        parent = _at(topology.parent, node)
        above = _at(r, parent)
        below = (above * state.ratio(node, parent)).clamp_max(1)
        _put(r, node, torch.where(entering, below, _at(r, node)))
        asked = leaving & _at(state.usable, node) & ~done
        place = torch.where(leaving, node, 0)
        yes = chance.accept(place, torch.where(asked, _at(r, node), 0.0)) & asked
        done = done | yes
        last = torch.where(yes, place, last)
        no = asked & ~yes
        mass = state.reject(node, parent, above, no)
        lost = mass + (1 - above)
        _put(r, parent, torch.where(no, torch.where(lost > 0, mass / lost, 1.0), above))
    return _verdicts(state, last, topology, chance)


def coupled_rule(target_tokens: Tensor, tokens: Tensor, topology: Topology) -> Verdicts:
    """Follow the target's own tokens as far as the draft has them; also the greedy rule, where those are the argmaxes.

    target_tokens [R, N+1]: the token the target puts after each node, -1 where its distribution is broken;
    tokens [R, N+1], column 0 the root.
    """
    if topology.width == 1:
        none = torch.zeros_like(tokens)
        return Verdicts(none, none[:, 0], target_tokens[:, 0], target_tokens[:, 0] >= 0)
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
