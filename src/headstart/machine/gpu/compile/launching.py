"""Launching kernels, and launching them again for the next layer.

Knows: how Triton starts a kernel that it has compiled. Does not know: any kernel, or what a layer is.

Triton takes some 50 us to get from Python to a kernel: it works out from all arguments which of its compiled forms is
meant. That form can be launched itself (``compiled[grid]``), in a few us. Layers of a model launch the same kernels
with the same numbers, and only their weights and caches lie elsewhere; so one layer's launches are noted, and made
again with other addresses. Launching is most of the time that capturing takes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Repeats", "launch", "overlap", "supports_overlap"]


class _Note(NamedTuple):
    compiled: Any
    grid: tuple[int, ...]
    arguments: list[Any]  # all of them, as the kernel lists them


class _Notes(threading.local):
    taken: list[_Note] | None = None


_notes = _Notes()


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """``kernel[grid](*args, **options)``. What runs in a layer must be launched by this."""
    compiled = kernel[grid](*args, **options)
    if _notes.taken is not None:
        rest = [options[name] for name in getattr(kernel, "arg_names", ())[len(args) :]]
        _notes.taken.append(_Note(compiled, grid, [*args, *rest]))


def supports_overlap(device: torch.device) -> bool:
    """Whether the GPU can start a kernel before the one in front of it ends."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def overlap(pdl: int) -> dict[str, object]:
    """A launch's options that say when the next kernel may start: see ``kernels.blocks.wait``."""
    return {"PDL": pdl, "launch_pdl": True} if pdl else {"PDL": 0}


class Repeats:
    """Work that is done several times over, each time on other tensors."""

    def __init__(self) -> None:
        self._known: dict[Hashable, _Launches | None] = {}

    def do(self, kind: Hashable, work: Callable[[], None], own: Sequence[Tensor]) -> None:
        """Do it. Work of the same kind has launched the same kernels, with the same arguments but for ``own``: there
        each time stands a tensor of the same dtype and shape. Nothing but launches may be in it."""
        if kind not in self._known:
            self._known[kind] = _noted(work, own)
            return
        known = self._known[kind]
        if known is None or not known.again(own):
            work()


class _Launches:
    def __init__(self, notes: list[_Note], own: Sequence[Tensor]) -> None:
        self._own = [tensor.data_ptr() for tensor in own]
        self._kept = notes  # the memory that these tensors have must stay theirs
        self._starts = []
        for compiled, grid, arguments in notes:
            values = [x.data_ptr() if isinstance(x, Tensor) else x for x in arguments]
            tensors = [(i, values[i]) for i, x in enumerate(arguments) if isinstance(x, Tensor)]
            places = [(i, self._own.index(address)) for i, address in tensors if address in self._own]
            self._starts.append((compiled[(*grid, 1, 1)[:3]], values, places))

    def again(self, own: Sequence[Tensor]) -> bool:
        """False if it cannot be: a kernel is compiled for addresses that are multiples of 16, or for any."""
        at = [tensor.data_ptr() for tensor in own]
        if any((here ^ there) & 15 for here, there in zip(at, self._own, strict=True)):
            return False
        for start, values, places in self._starts:
            for place, index in places:
                values[place] = at[index]
            start(*values)
        return True


def _noted(work: Callable[[], None], own: Sequence[Tensor]) -> _Launches | None:
    """Do it; what it launched, or None if that cannot be told."""
    _notes.taken = []
    try:
        work()
        notes = _notes.taken
    finally:
        _notes.taken = None
    if not all(isinstance(getattr(note.compiled, "function", None), int) for note in notes):
        return None  # interpreted, or not compiled yet
    # A tensor that only begins elsewhere in the memory of one of ``own`` would not be found, and stay what it is.
    memory, addresses = {x.untyped_storage().data_ptr() for x in own}, [x.data_ptr() for x in own]
    tensors = [x for note in notes for x in note.arguments if isinstance(x, Tensor)]
    inside = any(x.untyped_storage().data_ptr() in memory and x.data_ptr() not in addresses for x in tensors)
    return None if inside or len(set(addresses)) < len(addresses) else _Launches(notes, own)
