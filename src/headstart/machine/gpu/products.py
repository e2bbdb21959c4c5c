"""Matrix products of many tokens, by cuBLAS.

Knows: how a matrix, rounded or not, is handed to it. Does not know: what a model is. Few tokens have kernels of their
own (``kernels.matmul``).
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ..quantize import Matrix
from .compile.launching import Repeats
from .kernels.dequant import spell_out

__all__ = ["Products"]


class Products:
    """The products of one forward. Rounded weights are spelt out first, into memory that the next matrix uses again."""

    def __init__(self, repeats: Repeats) -> None:
        self._repeats = repeats
        self._room: Tensor | None = None

    def linear(self, x: Tensor, matrix: Matrix, out: Tensor, bias: Tensor | None = None) -> Tensor:
        """out [M, N] = x [M, K] W^T + bias."""
        weight = matrix.data if matrix.scales is None else self._spelt_out(matrix, matrix.scales, x)
        return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)

    def _spelt_out(self, matrix: Matrix, scales: Tensor, like: Tensor) -> Tensor:
        outputs, inputs = matrix.shape
        if self._room is None or self._room.numel() < outputs * inputs:
            self._room = like.new_empty(outputs * inputs)
        floats = self._room[: outputs * inputs].view(outputs, inputs)
        kind = (matrix.bits, matrix.shape, floats.data_ptr())  # launches that are made again write where they wrote
        self._repeats.do(kind, partial(spell_out, matrix, floats), (matrix.data, scales))
        return floats
