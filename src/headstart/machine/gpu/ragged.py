"""Tokens of several rows, packed for one forward: as many of each row as there may be.

Knows: what the kernels must know of each token and of each tile of attention. Does not know: kernels, models.
Needs neither Triton nor a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Packed", "pack"]


class Packed(NamedTuple):
    """T tokens of P pieces, one piece behind the other. All int64, on the device."""

    tokens: Tensor  # [T]
    places: Tensor  # [T, 2]: each token's row and slot
    tiles: (
        Tensor  # [n, 4]: a row, the slot of a token there, that token's number, and how many of the row follow from it
    )
    last: Tensor  # [P]: the number of each piece's last token


def pack(pieces: Sequence[tuple[int, int, Sequence[int]]], tile: int, device: torch.device) -> Packed:
    """``pieces``: (row, live keys there, tokens). ``tile``: tokens in a tile of attention, at most."""
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
    # One copy for all. Kernels are compiled for addresses that are multiples of 16: each part is of an even length.
    parts = [places, tiles, tokens + [0] * (len(tokens) % 2), last]
    flat = [number for part in parts for number in part]
    table = torch.tensor(flat, dtype=torch.int64, pin_memory=device.type == "cuda").to(device, non_blocking=True)
    at_places, at_tiles, at_tokens, at_last = torch.split(table, [len(part) for part in parts])
    return Packed(at_tokens[: len(tokens)], at_places.view(-1, 2), at_tiles.view(-1, 4), at_last)
