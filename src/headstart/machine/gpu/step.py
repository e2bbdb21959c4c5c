"""One forward: which rows, how many tokens of each, behind how many keys, and what a tree's tokens see.

Knows: shapes, and the tensors that say where tokens stand. Does not know: kernels, models.
Needs neither Triton nor a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .ragged import Packed

__all__ = ["MAX_NODES", "Step", "Tree", "pack_ancestors"]

MAX_NODES = 64  # a tree's ancestors are the bits of one int64


class Tree(NamedTuple):
    """What a node of a tree sees of its tree, and how deep it stands."""

    bits: Tensor  # [R, N] int64: bit j set = node j is an ancestor of this node, or the node itself
    depths: Tensor  # [R, N] int32


def pack_ancestors(ancestors: Tensor) -> Tree:
    """From ancestors [R, N, N] bool ([r, i, j]: j lies on the path to i). At most 64 nodes."""
    nodes = ancestors.shape[-1]
    if nodes > MAX_NODES:
        raise ValueError(f"a tree has at most {MAX_NODES} nodes, not {nodes}")
    # A node always sees itself: a padding node that saw nothing would store NaN in the cache.
    own = torch.eye(nodes, dtype=torch.bool, device=ancestors.device)
    seen = ancestors | own
    bits = (seen.to(torch.int64) << torch.arange(nodes, device=ancestors.device)).sum(-1)
    return Tree(bits, (seen.sum(-1) - 1).to(torch.int32))


@dataclass(frozen=True)
class Step:
    """One forward's shape and place."""

    rows: int  # or pieces, where packed
    width: int  # 0: packed
    lengths: Tensor  # [R], or where packed the tokens' places [T, 2]
    first: int = 0  # first row of the cache
    tree: Tree | None = None
    bound: int = 0  # no row has more keys than this, the new ones included
    work: tuple[Tensor, Tensor] | None = None  # for split attention
    packed: Packed | None = None  # any tokens of any rows

    @property
    def count(self) -> int:
        return self.rows * self.width if self.packed is None else len(self.packed.tokens)

    @property
    def places(self) -> slice:
        """The rows of the cache that ``lengths`` speaks of."""
        return slice(self.first, self.first + self.rows) if self.packed is None else slice(None)

    def last(self, x: Tensor, keep: int) -> Tensor:
        """Of x [tokens, C] what belongs to the last ``keep`` tokens of each row (or piece), in memory of its own."""
        if self.packed is not None:
            return x[self.packed.last]
        if keep == self.width:
            return x
        kept = x.view(self.rows, self.width, -1)[:, self.width - keep :]
        return kept.clone(memory_format=torch.contiguous_format).flatten(0, 1)
