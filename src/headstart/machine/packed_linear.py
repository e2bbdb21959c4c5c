"""Matrix products with a few rows on the CPU: weights packed beforehand, so that nine tokens cost little more than one.

Knows: when packed weights pay, and how to prove that they give the same numbers. Does not know: what a layer is for.

A product with one row streams the weights once. For 4 to 16 rows (a verified draft, a small batch) the CPU library
lays the weights out anew at every call, which costs more than the product itself: nine tokens take 2.2 steps'
time. With the layout done once at load they take 1.4. Packed weights are a second copy in memory, so they are used
only where memory is plentiful, where they measure faster, and for shapes on which they were seen to agree.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from timeit import repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

__all__ = ["PackedLinear", "lend_packed", "pack"]

LEAST_ROWS, MOST_ROWS = 4, 16  # below, streaming is as fast; above, the library's own way is
LEAST_BYTES = 64 << 20  # smaller models live in the cache and gain nothing
MEMORY_SHARE = 4  # packed weights may take a quarter of the machine's memory
WORTH_IT = 0.9  # packed time / ordinary time that makes packing worth its memory


class _Lent(threading.local):
    """Whether packed weights may be used now, by this thread: only inside a runner's forward, without gradients."""

    depth = 0


_lent = _Lent()


class _Packed:
    """Packed weights and what they were made from. Not copied or saved with the model."""

    def __init__(self, weight: Tensor | None = None) -> None:
        self.made_from = _state(weight) if weight is not None else None
        self.weight: Tensor | None = None
        if weight is not None:
            self.weight = torch.ops.mkl._mkl_reorder_linear_weight(weight.detach(), MOST_ROWS)

    def fits(self, weight: Tensor) -> bool:
        """False once the weights were trained, loaded or moved."""
        return self.weight is not None and self.made_from == _state(weight)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Packed:
        return _Packed()

    def __reduce__(self) -> tuple[type[_Packed], tuple[()]]:
        return (_Packed, ())


def _state(weight: Tensor) -> tuple[int, int]:
    return (weight.data_ptr(), weight._version)


class PackedLinear(nn.Linear):
    """An ordinary linear layer that knows a faster way for a few rows. Made by ``pack``, never constructed."""

    packed: _Packed

    def forward(self, input: Tensor) -> Tensor:
        if _lent.depth and not torch.is_grad_enabled():
            rows = input.numel() // self.in_features
            if LEAST_ROWS <= rows <= MOST_ROWS and self.packed.fits(self.weight):
                return _product(input, self.packed, self.weight, self.bias, rows)
        return linear(input, self.weight, self.bias)


def _product(x: Tensor, packed: _Packed, weight: Tensor, bias: Tensor | None, rows: int) -> Tensor:
    # The last argument is the number of rows that the packing was made for. It is MOST_ROWS, but the layout is the
    # same for fewer rows; ``_agrees`` has checked that for this shape on this machine.
    found: Tensor = torch.ops.mkl._mkl_linear(x.contiguous(), packed.weight, weight, bias, rows)
    return found


@contextmanager
def lend_packed() -> Iterator[None]:
    """Inside, packed layers may use their packed weights."""
    _lent.depth += 1
    try:
        yield
    finally:
        _lent.depth -= 1


def pack(model: nn.Module, *, least_bytes: int = LEAST_BYTES, measure: bool = True) -> int:
    """Pack a model's linear layers where that pays; returns how many are packed.

    ``measure=False`` trusts that it pays (for tests; the agreement is always checked).
    """
    layers = [m for m in model.modules() if isinstance(m, nn.Linear) and _packable(m)]
    size = sum(layer.weight.numel() * 4 for layer in layers)
    if not layers or not least_bytes <= size <= _memory() // MEMORY_SHARE:
        return 0
    with torch.inference_mode(False), torch.no_grad():
        largest = max(layers, key=lambda layer: layer.weight.numel())
        if measure and not _pays(largest):
            return 0
        agreed: dict[tuple[int, ...], bool] = {}
        count = 0
        for layer in layers:
            shape = tuple(layer.weight.shape)
            if isinstance(layer, PackedLinear) and layer.packed.fits(layer.weight):
                count += 1  # another runner over the same model
                continue
            if shape not in agreed:
                agreed[shape] = _agrees(layer)
            if agreed[shape]:
                layer.__class__ = PackedLinear
                assert isinstance(layer, PackedLinear)
                layer.packed = _Packed(layer.weight)
                count += 1
    return count


def _memory() -> int:
    """The machine's memory in bytes; 0 where it cannot be asked."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0


def _packable(layer: nn.Linear) -> bool:
    weight = layer.weight
    return (
        type(layer) in (nn.Linear, PackedLinear)  # a subclass may do anything
        and torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
        and weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and weight.is_contiguous()
        and not weight.is_inference()  # these keep no version, so a change would go unnoticed
    )


def _agrees(layer: nn.Linear) -> bool:
    """Do packed products of this shape equal ordinary ones, for every number of rows they are used with?"""
    packed = _Packed(layer.weight)
    x = torch.randn(MOST_ROWS, layer.in_features, generator=torch.Generator().manual_seed(0))
    expected = linear(x, layer.weight, layer.bias)
    for rows in range(LEAST_ROWS, MOST_ROWS + 1):
        found = _product(x[:rows], packed, layer.weight, layer.bias, rows)
        if not torch.allclose(found, expected[:rows], rtol=1e-4, atol=1e-4 * float(expected.abs().max())):
            return False
    return True


def _pays(layer: nn.Linear) -> bool:
    packed = _Packed(layer.weight)
    x = torch.zeros(MOST_ROWS // 2, layer.in_features)
    ways = (lambda: linear(x, layer.weight), lambda: _product(x, packed, layer.weight, None, len(x)))
    # The first of four warms up; the best of the rest is the least disturbed.
    ordinary, ours = (min(repeat(way, number=1, repeat=4)) for way in ways)
    return ours < WORTH_IT * ordinary
