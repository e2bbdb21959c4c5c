"""The shape of a batch of drafts.

Knows: who is whose parent, how deep, and in which order a tree is walked.
Does not know: tokens or probabilities.

Node 0 is the last committed token (the root), node i + 1 is drafted token i. Rows shorter than the longest are padded
with invalid nodes. A chain is a tree with one branch; it is the common case and is built without a loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

__all__ = ["Topology"]


@dataclass(frozen=True)
class Topology:
    """R drafts of at most N tokens. Padding nodes hang from the root and see only themselves and it (in a chain: all
    that stands before them); nothing that is valid ever sees them."""

    parent: Tensor  # [R, N+1] int64: parent node; parent[:, 0] = 0
    depth: Tensor  # [R, N+1] int64: root 0
    valid: Tensor  # [R, N+1] bool
    ancestors: Tensor  # [R, N+1, N+1] bool: [r, i, j] = node j lies on the path root..i, both ends included
    events: Tensor  # [R, 2N] int64: depth-first order: +i enter node i, -i leave node i, 0 nothing
    is_chain: bool  # every row is a chain (maybe of different lengths)

    @staticmethod
    def chain(lengths: Sequence[int], device: torch.device | str) -> Topology:
        """Chains of these many drafted tokens."""
        if min(lengths, default=0) < 0:
            raise ValueError(f"draft lengths must not be negative: {list(lengths)}")
        if torch.device(device).type == "cpu":  # a dozen small tensors, the same ones round after round
            return _chain_on_cpu(tuple(lengths))
        return Topology._chain(lengths, device)

    @staticmethod
    def _chain(lengths: Sequence[int], device: torch.device | str) -> Topology:
        rows = len(lengths)
        node = torch.arange(max(lengths, default=0) + 1, device=device)
        valid = node <= torch.tensor(lengths, dtype=torch.int64, device=device).unsqueeze(1)
        inside = valid[:, 1:]
        down = torch.where(inside, node[1:], 0)
        square = node.unsqueeze(0) <= node.unsqueeze(1)
        return Topology(
            parent=(node - 1).clamp_min(0).expand(rows, -1),
            depth=node.expand(rows, -1),
            valid=valid,
            ancestors=square.expand(rows, -1, -1),
            events=torch.cat([down, -down.flip(1)], 1),
            is_chain=True,
        )

    @staticmethod
    def of(parents: Sequence[tuple[int, ...]], device: torch.device | str) -> Topology:
        """Trees in ``Proposal.parents``' convention: the parent's index among the drafted tokens, -1 for the root."""
        shapes = [_tree(tuple(row)) for row in parents]
        if all(shape.is_chain for shape in shapes):
            return Topology.chain([len(row) for row in parents], device)
        rows, width = len(parents), max(len(row) for row in parents) + 1
        parent = torch.zeros(rows, width, dtype=torch.int64)
        depth = torch.zeros(rows, width, dtype=torch.int64)
        valid = torch.zeros(rows, width, dtype=torch.bool)
        ancestors = torch.eye(width, dtype=torch.bool).repeat(rows, 1, 1)
        ancestors[:, :, 0] = True
        events = torch.zeros(rows, 2 * (width - 1), dtype=torch.int64)
        for row, shape in enumerate(shapes):
            n = shape.width
            parent[row, :n], depth[row, :n], valid[row, :n] = shape.parent, shape.depth, shape.valid
            ancestors[row, :n, :n], events[row, : 2 * (n - 1)] = shape.ancestors, shape.events
        move = (parent.to(device), depth.to(device), valid.to(device), ancestors.to(device), events.to(device))
        return Topology(*move, is_chain=False)

    @property
    def width(self) -> int:
        """Nodes a row, the root included: N + 1."""
        return self.parent.shape[1]


@lru_cache(maxsize=256)  # drafters with a fixed tree ask for the same one every round
def _tree(parents: tuple[int, ...]) -> Topology:
    """One row's."""
    for child, above in enumerate(parents):
        if not -1 <= above < child:
            raise ValueError(f"token {child} names parent {above}; a parent must stand before its child")
    parent = [0, *(above + 1 for above in parents)]
    children: list[list[int]] = [[] for _ in parent]
    ancestors = torch.eye(len(parent), dtype=torch.bool)
    for node, above in enumerate(parent[1:], start=1):
        children[above].append(node)
        ancestors[node] |= ancestors[above]
    events: list[int] = []
    waiting = children[0][::-1]  # a stack, so that a deep chain cannot exhaust Python's own
    while waiting:
        node = waiting.pop()
        events.append(node)
        if node > 0:
            waiting.append(-node)
            waiting.extend(reversed(children[node]))
    return Topology(
        parent=torch.tensor([parent]),
        depth=ancestors.sum(1)[None] - 1,
        valid=torch.ones(1, len(parent), dtype=torch.bool),
        ancestors=ancestors[None],
        events=torch.tensor([events], dtype=torch.int64),
        is_chain=parents == tuple(range(-1, len(parents) - 1)),
    )


@lru_cache(maxsize=256)
def _chain_on_cpu(lengths: tuple[int, ...]) -> Topology:
    with torch.inference_mode(False):
        return Topology._chain(lengths, "cpu")
