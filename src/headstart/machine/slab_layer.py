"""One layer of the slab: its keys and values, and where a forward's new ones go.

Knows: how to allocate and write a layer. Does not know: rows' owners, lengths or tokens.
"""

from __future__ import annotations

import math
import mmap
import sys
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

__all__ = ["LINE", "SlabLayer", "on_cache_line", "zeros"]

LINE = 64  # bytes of a cache line


class Place(Protocol):
    """What a layer asks its slab: the sizes, and where the forward in progress writes (see ``Slab.begin``)."""

    rows: int
    capacity: int
    first: int
    last: int
    start: int
    live: int
    slots: Tensor | None

    def scatter_index(self, device: torch.device) -> tuple[Tensor, Tensor]: ...


def on_cache_line(size: int, *, zero: bool = False) -> Tensor:
    """Bytes [size] of the CPU's memory for kernels of our own: they begin on a cache line.

    ``zero``: torch would write all of them, a gigabyte and more before the first token; the system hands out zero
    pages, which cost nothing until they are used. Small pages: numpy asks for huge ones, and then the first tokens of
    a row, which lie in as many places as there are layers and heads, bring hundreds of megabytes in.
    """
    count = size + LINE
    try:
        memory = (
            torch.frombuffer(_zero_pages(count), dtype=torch.uint8) if zero else torch.empty(count, dtype=torch.uint8)
        )
    except (OSError, OverflowError, RuntimeError) as error:  # a system's, Python's and torch's words for it
        raise MemoryError(f"{size / 1e9:.2f} GB of memory cannot be had in one piece") from error
    return memory[-memory.data_ptr() % LINE :][:size]


def _zero_pages(count: int) -> mmap.mmap:
    if sys.platform == "win32":
        return mmap.mmap(-1, count)
    # Private: a forked child writes into a copy of its own.
    return mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def zeros(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Zeros, not garbage: a masked key still enters 0 * value, and 0 * NaN is NaN."""
    if like.device.type != "cpu":
        return like.new_zeros(shape)
    return on_cache_line(math.prod(shape) * like.element_size(), zero=True).view(like.dtype).view(shape)


class SlabLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped for us
    """One layer's keys and values: [rows, kv_heads, capacity, head_dim] each, allocated on the first update."""

    is_sliding = False  # sliding layers keep everything too: the mask hides what is out of the window

    def __init__(self, slab: Place) -> None:
        super().__init__()
        self._slab = slab

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate in the shape, dtype and on the device that the model just used."""
        # Not as inference tensors, because rows are also moved outside inference mode.
        with torch.inference_mode(False):
            rows, capacity = self._slab.rows, self._slab.capacity
            keys = zeros(key_states, (rows, key_states.shape[1], capacity, key_states.shape[3]))
            values = zeros(value_states, (rows, value_states.shape[1], capacity, value_states.shape[3]))
        self.use(keys, values)

    def use(self, keys: Tensor, values: Tensor) -> None:
        """These, from now on."""
        self.keys, self.values = keys, values
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write this forward's keys [R, heads, N, dim] where ``begin`` said, and return all live ones."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        slab = self._slab
        keys, values = self.keys[slab.first : slab.last], self.values[slab.first : slab.last]
        if slab.slots is None:  # every row starts at the same slot: a plain copy
            keys[:, :, slab.start : slab.live].copy_(key_states)
            values[:, :, slab.start : slab.live].copy_(value_states)
        else:
            # The full slice between the two index tensors puts their [R, N] in front: [R, N, heads, dim].
            row, slots = slab.scatter_index(key_states.device)
            keys[row, :, slots] = key_states.transpose(1, 2)
            values[row, :, slots] = value_states.transpose(1, 2)
        return keys[:, :, : slab.live], values[:, :, : slab.live]

    def get_seq_length(self) -> int:
        return self._slab.start

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._slab.live, 0

    def get_max_length(self) -> int:
        return self._slab.capacity

    get_max_cache_shape = get_max_length  # the name before transformers 5.20
