"""Where the verification rules get their randomness.

Knows: the questions a rule may ask (``Chance``), and the answers that production gives (``CounterChance``).
Does not know: what is decided with them.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from . import noise
from .vocab_ops import PLAIN, VocabOps

__all__ = ["Chance", "CounterChance", "sound"]

_TOLERANCE = 1e-3  # how far from 1 a distribution may sum; float32 rounding stays far below for any vocabulary


def sound(p: Tensor) -> Tensor:
    """Is it a distribution? p [.., V] -> [..] bool. NaN compares False."""
    return (p.sum(-1) - 1).abs() < _TOLERANCE


class Chance(Protocol):
    """Where the rules get their randomness."""

    def accept(self, node: Tensor, probability: Tensor) -> Tensor:
        """Decide about one node of each row: node [R], probability [R] -> [R] bool.

        Each node is asked about once in a round; node 0 stands for nothing to decide, and has probability 0. Of a
        chain all nodes are asked about at once: both [R, N].
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

    def __init__(self, seeds: Tensor, base: Tensor, width: int = 256, vocab_ops: VocabOps = PLAIN) -> None:
        self._seeds, self._base, self._width, self._inner = seeds, base, width, vocab_ops
        self._uniform: Tensor | None = None  # [R, width], made when first asked for

    def accept(self, node: Tensor, probability: Tensor) -> Tensor:
        if self._uniform is None:
            nodes = torch.arange(self._width, device=node.device).expand(len(node), -1)
            self._uniform = noise.uniform(self._inner.keys(self._seeds, self._base, nodes, noise.ACCEPT))
        found = self._uniform.gather(1, node.view(len(node), -1))
        return found.view(node.shape) < probability

    def draw(self, weights: Tensor, drafted: Tensor | None = None) -> Tensor:
        # A round without a draft uses the position's own noise: what plain and coupled decoding use.
        stream: Tensor | int = noise.RESIDUAL
        if drafted is not None:
            stream = torch.where(drafted, noise.RESIDUAL, noise.COUPLED)
        return self._inner.race(weights, self._inner.keys(self._seeds, self._base, 0, stream))

    def targets(self, p: Tensor, depth: Tensor) -> Tensor:
        keys = self._inner.keys(self._seeds, self._base.unsqueeze(1) + depth, 0, noise.COUPLED)
        return torch.where(sound(p), self._inner.race(p, keys), -1)
