"""Products of a few rows with a matrix on a CPU, by way of int8: a quarter of the bytes, and close enough for a guess.

Knows: the ways there are and which is fastest here. Does not know: what is multiplied, or why a small error is fine.

Not for a target: its numbers must not change. A row of the matrix has one scale; the error is about one percent.
"""

from __future__ import annotations

from collections.abc import Callable
from timeit import repeat

import torch
import torch.nn.functional as F
from torch import Tensor

from .quantize import int8

__all__ = ["MOST_ROWS", "Product", "quickest"]

Product = Callable[[Tensor], Tensor]  # x [n, columns] -> [n, rows], float32 or bfloat16

MOST_ROWS = 8  # with more rows the ordinary product is as fast
_MOST_ERROR = 0.05  # of the result's length: more is not rounding but a fault


def quickest(matrix: Tensor) -> Product | None:
    """The fastest int8 product with ``matrix`` [rows, columns]; None if the ordinary one is faster, or the only one."""
    small, scale = int8(matrix)
    x = torch.randn(1, matrix.shape[1], generator=torch.Generator().manual_seed(0))
    exact = F.linear(x, matrix)
    best, fastest = None, min(repeat(lambda: F.linear(x, matrix), number=1, repeat=8))
    for make in (_float_sums, _integer_sums):
        try:
            product = make(small, scale)
            error = (product(x).float() - exact).norm() / exact.norm()
            seconds = min(repeat(lambda: product(x), number=1, repeat=8))  # noqa: B023  # called at once
        except (AttributeError, RuntimeError, TypeError):  # this torch or this CPU lacks it
            continue
        if bool(error < _MOST_ERROR) and seconds < fastest:
            best, fastest = product, seconds
    return best


def _float_sums(small: Tensor, scale: Tensor) -> Product:
    """Weights become bfloat16 on the way; products and sums are floats. Little overhead: best for small matrices."""
    half = scale.bfloat16()
    return lambda x: torch._weight_int8pack_mm(x.bfloat16(), small, half)


def _integer_sums(small: Tensor, scale: Tensor) -> Product:
    """x becomes 8 bits too and the sums are integers, for which newer CPUs have instructions. Best for large ones."""
    packed = torch.ops.onednn.qlinear_prepack(small, [1, small.shape[1]])
    zeros = torch.zeros(small.shape[0], dtype=torch.int32)

    def product(x: Tensor) -> Tensor:
        step = float(x.abs().max()) / 127 + 1e-12
        rounded = (x * (1 / step)).round_().add_(128).clamp_(0, 255).to(torch.uint8)
        found: Tensor = torch.ops.onednn.qlinear_pointwise(
            rounded, step, 128, packed, scale, zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return found

    return product
