"""Heads of queries, keys and values: how their channels turn, and where they are stored.

Knows: rotary tables, partial rotation, and the slots of the cache. Does not know: how the heads were made.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..step import Step

__all__ = ["Heads", "pair", "places_of", "store_heads", "turns_of"]


class Heads(NamedTuple):
    """Where a layer's queries, keys and values go: turned queries to ``query``, turned keys and values into the cache
    at slot length + index."""

    query: Tensor  # [M, heads, D]
    cache: tuple[Tensor, Tensor]  # keys and values [R, kv_heads, capacity, D]
    rotary: tuple[Tensor, Tensor, int]  # cos and sin [positions, D / 2], and how many channel pairs turn
    step: Step

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """As kernels take them: query, keys, values, cos, sin, lengths, depths."""
        lengths, tree = self.step.lengths, self.step.tree
        return (self.query, *self.cache, *self.rotary[:2], lengths, lengths if tree is None else tree.depths)

    @property
    def capacity(self) -> int:
        return self.cache[0].shape[2]

    @property
    def sizes(self) -> dict[str, Any]:
        """Kernels' constants."""
        (heads, d), kv = self.query.shape[1:], self.cache[0].shape[1]
        return {"HEADS": heads, "KV": kv, "D": d, "TURN": self.rotary[2], "TREE": self.step.tree is not None}


@triton.jit
def pair(i, TURN: tl.constexpr, HALF: tl.constexpr):
    """The two channels of pair i in a head of 2 * HALF channels whose first 2 * TURN turn."""
    a = tl.where(i < TURN, i, TURN + i)
    b = tl.where(i < TURN, TURN + i, HALF + i)
    return a, b


@triton.jit
def places_of(lengths, depths, m, live, width, capacity, TREE: tl.constexpr):
    """Of tokens m [BM]: the slots where their keys go, and their places in the rotary table."""
    length = tl.load(lengths + m // width, mask=live, other=0, cache_modifier=".cg").to(tl.int64)
    slot = length + m % width
    if TREE:
        position = length + tl.load(depths + m, mask=live, other=0, cache_modifier=".cg").to(tl.int64)
    else:
        position = slot
    return slot, tl.minimum(position, capacity - 1)  # the table ends where the cache does


@triton.jit
def turns_of(cos, sin, position, i, turns, HALF: tl.constexpr):
    """[HB, BM] cosines and sines of channel pairs i at ``position`` [BM], for tokens that turn."""
    at = position[None, :] * HALF + i[:, None]
    c = tl.load(cos + at, mask=turns[None, :], other=1.0)
    return c, tl.load(sin + at, mask=turns[None, :], other=0.0)


@triton.jit
def _store_pair(base, ca, cb, a, b, mask):
    kind = base.dtype.element_ty
    tl.store(base + ca[:, None], a.to(kind), mask=mask)
    tl.store(base + cb[:, None], b.to(kind), mask=mask)


@triton.jit
def store_heads(
    a, b, head, ca, cb, m, live, slot, width, query, keys, values, capacity, HEADS: tl.constexpr, KV: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    """Channels ca and cb [HB] of one head [HB, BM] to the queries, or into the cache at ``slot`` [BM]."""
    at = ((m // width).to(tl.int64) * KV * capacity + slot)[None, :] * D
    fits = (live & (slot < capacity))[None, :]
    if head < HEADS:
        _store_pair(query + m[None, :] * (HEADS * D) + head * D, ca, cb, a, b, live[None, :])
    elif head < HEADS + KV:
        _store_pair(keys + at + (head - HEADS).to(tl.int64) * capacity * D, ca, cb, a, b, fits)
    else:
        _store_pair(values + at + (head - HEADS - KV).to(tl.int64) * capacity * D, ca, cb, a, b, fits)
