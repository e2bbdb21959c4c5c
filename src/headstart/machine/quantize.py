"""Matrices of a lowered model: as they are, or rounded to 8 or 4 bits.

Knows: how weights are rounded and how the rounded ones lie in memory. Does not know: how they are multiplied.
Needs neither Triton nor a GPU.

``int8``: one scale for each output; the sums are scaled at the end, so the weights that are multiplied are whole
numbers, exact in bfloat16. ``int4``: a scale and a minimum for 32 inputs, value = scale * q + minimum. Byte j of a
group's sixteen holds channels j (low half) and j + 16, as in a GGUF file's Q4_1 blocks, so that a kernel needs no
shuffles. Scales and minima are kept in the activations' type: 5 bits a weight with bfloat16. Weights that come from
Q4_1 blocks are those blocks again, to that type's rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

__all__ = [
    "GROUP",
    "MAKERS",
    "MINIMUM_UP",
    "QUANTIZATIONS",
    "SCALE_UP",
    "STORED",
    "Matrix",
    "Quantization",
    "grouped",
    "int8",
    "rounded",
]

#: what people may ask for, and how such weights are kept on a GPU
QUANTIZATIONS = {
    "int8": "a scale for each output",
    "int4": "a scale and a minimum for 32 weights (output head int8)",
}
Quantization: TypeAlias = Literal["auto", "int8", "int4"] | None
STORED = {4: 5, 8: 8}  # bits that a weight takes with its share of the scales, by ``Matrix.bits``

GROUP = 32
SCALE_UP, MINIMUM_UP = 2.0**118, 2.0**-15  # how scales and minima of 4-bit groups are kept: as the kernels like them
_ROWS = 4096  # rounded at a time, so that float32 copies stay small


@dataclass(frozen=True)
class Matrix:
    """[outputs, inputs], row-major."""

    data: Tensor  # [outputs, inputs] floats or int8; 4 bits: uint8 [outputs, inputs / 2]
    scales: Tensor | None = None  # 8 bits: float32 [outputs]; 4 bits: [outputs, inputs / 32, 2], scale and minimum

    @property
    def bits(self) -> int:
        """4, 8, or 16 for any floats: what the kernels call it."""
        return {torch.uint8: 4, torch.int8: 8}.get(self.data.dtype, 16)

    @property
    def shape(self) -> tuple[int, int]:
        outputs, stored = self.data.shape
        return outputs, 2 * stored if self.bits == 4 else stored

    @property
    def bytes(self) -> int:
        parts = [self.data] if self.scales is None else [self.data, self.scales]
        return sum(t.numel() * t.element_size() for t in parts)

    def floats(self, dtype: torch.dtype) -> Tensor:
        """The matrix as the kernels see it."""
        if self.scales is None:
            return self.data.to(dtype)
        if self.bits == 8:
            return (self.data * self.scales[:, None]).to(dtype)
        outputs, inputs = self.shape
        bytes_ = self.data.view(outputs, inputs // GROUP, 1, GROUP // 2)
        q = torch.cat([bytes_ & 15, bytes_ >> 4], dim=2).view(outputs, inputs // GROUP, GROUP).float()
        scale, minimum = self.scales.float()[..., None].unbind(2)
        return (q * (scale / SCALE_UP) + minimum / MINIMUM_UP).view(outputs, inputs).to(dtype)


def rounded(weight: Tensor, kind: str) -> Matrix:
    """``weight`` [outputs, inputs] rounded to ``kind``: "int8" or "int4"."""
    make = MAKERS[kind]
    pieces = [make(weight[at : at + _ROWS]) for at in range(0, len(weight), _ROWS)]
    data, scales = (torch.cat(part) for part in zip(*pieces, strict=True))
    return Matrix(data, scales)


def int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """``weight`` in whole numbers [outputs, inputs], and the scale of each output."""
    wide = weight.float()
    scale = (wide.abs().amax(1) / 127).clamp_min(1e-30)
    return (wide / scale[:, None]).round().clamp(-127, 127).to(torch.int8), scale


def _int4(weight: Tensor) -> tuple[Tensor, Tensor]:
    outputs, inputs = weight.shape
    wide = weight.float().view(outputs, inputs // GROUP, GROUP)
    low, high = wide.aminmax(dim=2)
    # In the type they are kept in before anything is rounded by them, so that their own rounding costs little.
    minimum = low.to(weight.dtype).float()
    scale = ((high - minimum) / 15).to(weight.dtype).float()
    q = ((wide - minimum[..., None]) / scale.clamp_min(1e-30)[..., None]).round().clamp(0, 15).to(torch.uint8)
    packed = q[..., : GROUP // 2] | q[..., GROUP // 2 :] << 4
    return packed.view(outputs, inputs // 2), torch.stack([scale * SCALE_UP, minimum * MINIMUM_UP], dim=2).to(
        weight.dtype
    )


#: what weights can be rounded to on a GPU: a name of QUANTIZATIONS that only a CPU has is missing here
MAKERS = {"int8": int8, "int4": _int4}


def grouped(kind: str | int | None) -> bool:
    """Does this kind (or these ``Matrix.bits``) have scales for groups of inputs?"""
    return kind in ("int4", 4)
