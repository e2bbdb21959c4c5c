"""Tile sizes of the fused kernels.

Knows: what was measured to be fast on a Hopper GPU for each size of matrix. Does not know: any kernel.

A tile is the same for all steps of up to 16 rows (tokens), so that a row's sums are added in the same order whether it
is decoded alone or verified with eight others: speculative and plain decoding then agree bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..quantize import STORED, grouped

__all__ = [
    "ALONE_CHUNK",
    "ALONE_SPLITS",
    "BOUNDS",
    "LATE",
    "PROGRAMS",
    "AttentionTile",
    "Tile",
    "attention_tile",
    "fitting_stages",
    "pieces",
    "power_of_two",
    "tile",
]


# The most keys of a row in a captured round. Up to 512 and 1,024 keys attention is one kernel a layer, or two; beyond,
# a bound only says how many programs there are.
BOUNDS = (512, 1024, 16384, 131072)
PROGRAMS = 132  # multiprocessors of a Hopper GPU: as many programs stream weights at a time

LATE = 4  # loop steps before its end at which a streaming kernel lets the next one start
_SHORT = 1024  # keys
_SHARED = 227 * 1024  # bytes of shared memory that a program can have
ALONE_CHUNK = 64  # keys a program takes in a draft's attention for a single token
ALONE_SPLITS = 16  # with more of them (longer rows) joining them costs more than it saves


def pieces(n: int, size: int) -> int:
    """How many pieces of this size make n, the last one perhaps a part. (``triton.cdiv`` takes far longer.)"""
    return -(-n // size)


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


@dataclass(frozen=True)
class Tile:
    """How one skinny matrix product is cut up."""

    rows: int  # weight rows a program takes at a time (twice, for kernels that take pairs)
    depth: int  # input channels a loop step takes; at least K: the whole row is loaded before the wait
    slices: int  # warps that share the channels of a loop step; 0: plain multiply-adds, for one token or two
    warps: int
    stages: int
    prefetch: int  # bytes of weights a program asks into L2 while the kernel before is still running
    together: int = 1  # tiles that share a loop step's inputs


def tile(
    outputs: int,
    inputs: int,
    *,
    pair: int = 0,
    dtype: torch.dtype,
    bits: int = 16,
    alone: bool = False,
    many: bool = False,
) -> Tile:
    """The tile for a matrix [outputs, inputs] of ``bits`` a weight (16: as the activations).

    ``pair``: the kernel takes rows in two halves (rotary, gate and up), and the tile's rows must divide this number.
    ``alone``: for a draft's step of one token or two, where latency is all and sums need not be those of a wider step.
    ``many``: for more than 16 tokens, which are as many bytes as the weights, so that more weights should meet them.
    """
    if dtype == torch.float32:  # for exactness, not for speed
        return Tile(rows=16, depth=128 if grouped(bits) else 64, slices=4, warps=4, stages=2, prefetch=0)
    if alone and inputs <= 2048:
        depth = power_of_two(inputs)
        if outputs * inputs > 1 << 23:
            return Tile(rows=8, depth=depth, slices=0, warps=2, stages=1, prefetch=0)
        if pair and outputs >= 2048:
            return Tile(rows=4, depth=depth, slices=0, warps=2, stages=1, prefetch=0)
        return Tile(rows=4, depth=depth, slices=0, warps=4 if inputs < 1024 and not pair else 1, stages=1, prefetch=0)
    if inputs <= 1024 and outputs * inputs <= 1 << 22:
        return Tile(rows=16, depth=power_of_two(inputs), slices=4, warps=4, stages=1, prefetch=0)
    if pair and bits == 16 and not many:
        rows = 8
    else:
        rows = _balanced(outputs // 2 if pair else outputs, 16 if pair else 32)
    while pair and pair % rows:
        rows //= 2
    small = (2 * rows if pair else rows) <= 16
    # Two kernels on one multiprocessor slow each other down, so a tile's stages take about half of its memory.
    if bits < 16:
        # Rounded weights are few bytes beside their inputs: long steps, and where tiles are small several share them.
        together = min(-(-outputs // (2 * rows if pair else rows) // PROGRAMS) or 1, 3) if small else 1
        depth, stages = (512, 5) if small and bits == 8 else (1024, 4 if bits == 8 or together > 1 else 5)
        return Tile(rows=rows, depth=depth, slices=4, warps=4, stages=stages, prefetch=32768, together=together)
    if not pair and outputs * inputs <= 1 << 25:  # a program has one short tile: more and smaller steps
        return Tile(rows=rows, depth=256, slices=4, warps=4, stages=8 if small else 6, prefetch=32768)
    return Tile(rows=rows, depth=512, slices=4, warps=4, stages=6 if small else 4, prefetch=32768)


def fitting_stages(t: Tile, rows: int, together: int, tokens: int, *, bits: int, size: int) -> int:
    """The tile's stages, or as many as fit into a multiprocessor's shared memory.

    ``rows``: weight rows of a tile, of which ``together`` make a step; ``tokens``: padded; ``size``: bytes of an
    activation. Stages change no sum.
    """
    stored = STORED.get(bits, 8 * size)
    weights = together * rows * t.depth * stored // 8
    sums = t.slices * rows * tokens * 4
    return max(min(t.stages, 1 + (_SHARED - sums) // (weights + tokens * t.depth * size)), 1)


def _balanced(outputs: int, most: int) -> int:
    """The rows of a tile, ``most`` or half of that: whichever keeps more programs busy, the larger if it is close."""

    def busy(rows: int) -> float:
        tiles = pieces(outputs, rows)
        return tiles / (pieces(tiles, PROGRAMS) * PROGRAMS)

    return most if busy(most) > 0.9 * busy(most // 2) else most // 2


@dataclass(frozen=True)
class AttentionTile:
    """How the attention over one row's keys is cut up. Fixed for a model: see the module's docstring."""

    chunk: int  # keys one program reads
    keys: int  # of these at a time
    warps: int
    stages: int  # where there is one row, and it is short ...
    deep: int  # ... and elsewhere
    queries: int  # queries (tokens x heads of a group) in a tile, for steps of up to 32 tokens
    most: int  # queries in a tile of any step
    one: int  # for a draft's steps of one token a row: keys at a time in the kernel made for them; 0: as any other step

    def stages_for(self, rows: int, splits: int) -> int:
        """Changes no sum. What it depends on must not take a value while serving that no captured round has."""
        return self.stages if rows == 1 and splits * self.chunk <= _SHORT else self.deep

    def packed(self, group: int) -> tuple[int, int]:
        """Where rows have different numbers of new tokens: queries in a tile, and the whole tokens that these are."""
        queries = max(self.most, power_of_two(group))
        return queries, queries // group


def attention_tile(head_dim: int, dtype: torch.dtype, *, draft: bool = False) -> AttentionTile:
    """The tile for heads of this width. ``draft``: latency is all, and one token's sums need not be a wider step's."""
    chunk = 1024 if head_dim <= 64 else 512
    most = 64 if head_dim <= 128 else 32
    if dtype == torch.float32:
        one = 32 if draft else 0
        return AttentionTile(chunk, keys=32, warps=4, stages=2, deep=2, queries=most, most=most, one=one)
    if draft:
        one = 256 if head_dim <= 64 else 128
        return AttentionTile(chunk, keys=64, warps=8, stages=2, deep=2, queries=16, most=most, one=one)
    # Heads of 128 on an H200: a fourth stage makes a step 3.5% shorter at 2,000 and 8,000 keys, 0.3% longer at 100.
    stages, deep = (3, 4) if head_dim <= 128 else (2, 2)
    return AttentionTile(chunk, keys=64, warps=4, stages=stages, deep=deep, queries=most, most=most, one=0)
