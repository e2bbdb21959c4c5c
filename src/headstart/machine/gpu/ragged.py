"""Tokens of several rows, packed for one forward: as many of each row as there may be.

Knows: what the kernels must know of each token and of each tile of attention. Does not know: kernels, models.
Needs neither Triton nor a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Packed", "Piece", "cut", "on_host", "pack", "parts_of"]

Piece = tuple[int, int, Sequence[int]]  # a row, how many live keys it has, and tokens to go behind them


class Packed(NamedTuple):
    """T tokens of P pieces, one piece behind the other. All int64, on the device."""

    tokens: Tensor  # [T]
    places: Tensor  # [T, 2]: each token's row and slot
    tiles: (
        Tensor  # [n, 4]: a row, the slot of a token there, that token's number, and how many of the row follow from it
    )
    last: Tensor  # [P]: the number of each piece's last token


def pack(pieces: Sequence[Piece], tile: int, device: torch.device) -> Packed:
    """``tile``: tokens in a tile of attention, at most."""
    parts = parts_of(pieces, tile)
    # One copy for all. Kernels are compiled for addresses that are multiples of 16: each part is of an even length.
    sizes = [len(part) + len(part) % 2 for part in parts]
    table = on_host(parts, sizes, device).to(device, non_blocking=True)
    return cut(table, sizes, [len(part) for part in parts])


def parts_of(pieces: Sequence[Piece], tile: int) -> tuple[list[int], list[int], list[int], list[int]]:
    """The tensors of ``Packed``, flat."""
    tokens: list[int] = []
    places: list[int] = []
    tiles: list[int] = []
    last: list[int] = []
    for row, start, piece in pieces:
        first, count = len(tokens), len(piece)
        tokens += piece
        for at in range(count):
            places += (row, start + at)
        for at in range(0, count, tile):
            tiles += (row, start + at, first + at, min(tile, count - at))
        last.append(len(tokens) - 1)
    return tokens, places, tiles, last


def on_host(
    parts: Sequence[Sequence[int]],
    sizes: Sequence[int],
    device: torch.device,
    filling: Sequence[Sequence[int]] = ((0,),) * 4,
) -> Tensor:
    """The parts one behind the other, each made up to its size with ``filling``; in memory that is quickly copied."""
    flat: list[int] = []
    for part, size, more in zip(parts, sizes, filling, strict=True):
        flat += part
        flat += list(more) * ((size - len(part)) // len(more))
    return torch.tensor(flat, dtype=torch.int64, pin_memory=device.type == "cuda")


def cut(table: Tensor, sizes: Sequence[int], lengths: Sequence[int]) -> Packed:
    """Of parts that have these sizes in the table, so much of each."""
    tokens, places, tiles, last = (part[:n] for part, n in zip(torch.split(table, list(sizes)), lengths, strict=True))
    return Packed(tokens, places.view(-1, 2), tiles.view(-1, 4), last)
