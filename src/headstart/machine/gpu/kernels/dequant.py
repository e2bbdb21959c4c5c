"""Rounded matrices spelt out as floats, for products that are not ours (prefill).

Knows: how rounded weights lie in memory (``quantize``). Does not know: what they are multiplied with.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...quantize import GROUP, MINIMUM_UP, SCALE_UP, Matrix
from ..compile.launching import launch
from ..tiles import pieces

__all__ = ["spell_out"]

_BLOCK = 2048


@triton.jit
def _bytes_kernel(data, scales, out, inputs, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    q = tl.load(data + row * inputs + k, mask=k < inputs, other=0)
    value = q.to(tl.float32) * tl.load(scales + row)
    tl.store(out + row * inputs + k, value.to(out.dtype.element_ty), mask=k < inputs)


@triton.jit
def _halves_kernel(data, scales, out, inputs, SCALE_UP: tl.constexpr, MINIMUM_UP: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = j < inputs // 2
    q = tl.load(data + row * (inputs // 2) + j, mask=mask, other=0)
    group = scales + (row * (inputs // 32) + j // 16) * 2
    scale = tl.load(group, mask=mask, other=0.0).to(tl.float32) / SCALE_UP
    minimum = tl.load(group + 1, mask=mask, other=0.0).to(tl.float32) / MINIMUM_UP
    at = out + row * inputs + j // 16 * 32 + j % 16
    kind = out.dtype.element_ty
    tl.store(at, ((q & 15).to(tl.float32) * scale + minimum).to(kind), mask=mask)
    tl.store(at + 16, ((q >> 4).to(tl.float32) * scale + minimum).to(kind), mask=mask)


def spell_out(matrix: Matrix, out: Tensor) -> None:
    """out [outputs, inputs] = ``matrix.floats(out.dtype)``, in one pass over the memory."""
    assert matrix.scales is not None
    assert GROUP == 32
    outputs, inputs = matrix.shape
    grid = (outputs, pieces(matrix.data.shape[1], _BLOCK))
    if matrix.bits == 8:
        launch(_bytes_kernel, grid, matrix.data, matrix.scales, out, inputs, BLOCK=_BLOCK)
    else:
        ups = {"SCALE_UP": SCALE_UP, "MINIMUM_UP": MINIMUM_UP}
        launch(_halves_kernel, grid, matrix.data, matrix.scales, out, inputs, **ups, BLOCK=_BLOCK)
