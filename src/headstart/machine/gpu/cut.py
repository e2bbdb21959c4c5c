"""Cuts a forward into parts of few tokens, each of which the kernels that decode can take.

Knows: rows and widths. Does not know: kernels, models. Needs neither Triton nor a GPU.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Part", "cut"]


class Part(NamedTuple):
    """Some tokens of some neighbouring rows."""

    first: int  # row
    rows: int
    start: int  # token of each row
    width: int
    keep: int  # of how many of its last tokens logits are wanted

    def of(self, tensor: Tensor) -> Tensor:
        """Its own of [R, N], in memory of its own: kernels are compiled for addresses that are multiples of 16."""
        mine = tensor[self.first : self.first + self.rows, self.start : self.start + self.width]
        return mine.clone(memory_format=torch.contiguous_format)

    def lengths(self, lengths: Tensor) -> Tensor:
        """Keys before its tokens, of the lengths [R] before all of them."""
        return lengths[self.first : self.first + self.rows] + self.start


def cut(rows: int, width: int, keep: int, most: int) -> list[Part]:
    """Parts of at most ``most`` tokens: whole rows, or where those are longer, row by row from first token to last.

    The parts' logits, one behind the other, are those of the rows.
    """
    if width <= most:
        step = most // max(width, 1)
        return [Part(at, min(step, rows - at), 0, width, keep) for at in range(0, rows, step)]
    found = []
    for row in range(rows):
        for at in range(0, width, most):
            end = min(at + most, width)
            found.append(Part(row, 1, at, end - at, max(end - max(at, width - keep), 0)))
    return found
