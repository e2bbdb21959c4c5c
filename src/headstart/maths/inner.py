"""The inner loops over the vocabulary, which a machine may have faster versions of.

Knows: their plain forms. Does not know: any machine; whoever has faster ones passes an ``Inner`` of its own, whose
functions must give what these give (a logarithm may differ in its last bit).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from . import noise
from .argmax import argmax
from .warp import Warp

__all__ = ["PLAIN", "Inner"]


def _keys(seed: Tensor, base: Tensor, offset: Tensor | int, stream: Tensor | int) -> noise.Keys:
    return noise.keys(seed, base, offset, stream)  # looked up at each call, so that a test can plant another


@dataclass(frozen=True)
class Inner:
    """Four loops that everything sampled goes through."""

    argmax: Callable[[Tensor], Tensor] = argmax
    race: Callable[[Tensor, noise.Keys], Tensor] = noise.race
    keys: Callable[[Tensor, Tensor, Tensor | int, Tensor | int], noise.Keys] = _keys
    #: temperature, truncation and softmax of logits [R, N, V]; None: ``distribution``'s own
    sampled: Callable[[Tensor, Warp], Tensor] | None = None
    #: the same of logits [R, V], and a token of each by ``race``; None: one after the other
    drawn: Callable[[Tensor, Warp, noise.Keys], tuple[Tensor, Tensor]] | None = None


PLAIN = Inner()
