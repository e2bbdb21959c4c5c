"""Weights where they lie: in a file that is mapped, or in a live model's memory.

Knows: bytes, shapes, and what the ways to write numbers are called. Does not know: what a weight is for, who reads it.

A mapped file takes memory only for what was read of it and not let go again, and nothing at all of the process's own.
"""

from __future__ import annotations

import json
import mmap
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

__all__ = ["Bytes", "MappedFile", "Rows", "Stored", "in_memory", "safetensors_in"]

Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
Rows: TypeAlias = np.ndarray[Any, np.dtype[np.int32]]  # numbers of rows; -1: none

# GGUF's names, of the types in PyTorch and in safetensors' headers.
_TORCH = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_SAFETENSORS = {"F32": 4, "F16": 2, "BF16": 2}  # -> bytes a number
_LONGEST_HEADER = 100 << 20  # bytes; safetensors' own limit


class MappedFile:
    """A file's bytes, read when they are looked at. Lives as long as anything that looks into it."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.bytes: Bytes = np.frombuffer(self._map, dtype=np.uint8)

    def advise(self, at: int, count: int, *, needed: bool) -> None:
        """Tell the system that these bytes are wanted soon, or no longer: a wish."""
        start = at // mmap.PAGESIZE * mmap.PAGESIZE
        if sys.platform != "win32" and count:
            wish = mmap.MADV_WILLNEED if needed else mmap.MADV_DONTNEED
            self._map.madvise(wish, start, at + count - start)


class Stored(NamedTuple):
    """A tensor as it is written."""

    kind: str  # GGUF's name for how its numbers are written: "F32", "BF16", "Q4_K"
    shape: tuple[int, ...]  # [outputs, inputs] or [n]
    bytes: Bytes
    order: Rows | None = None  # which row of it is meant by the first, the second and so on; None: as they are
    file: MappedFile | None = None
    at: int = 0  # of its first byte in the file

    def advise(self, *, needed: bool) -> None:
        """See ``MappedFile.advise``."""
        if self.file is not None:
            self.file.advise(self.at, len(self.bytes), needed=needed)


def in_memory(tensor: Tensor) -> Stored:
    """A live tensor on the CPU, in float32, float16 or bfloat16."""
    flat = tensor.detach().contiguous().view(torch.uint8).flatten()
    return Stored(_TORCH[tensor.dtype], tuple(tensor.shape), flat.numpy())


def safetensors_in(paths: Mapping[str, Path]) -> dict[str, Stored] | None:
    """The tensors of safetensors files. ``paths``: which file holds which tensor. None if a file is not as it should
    be, or holds numbers of other types: whoever reads it in the ordinary way says what is wrong."""
    found: dict[str, Stored] = {}
    try:
        files = {path: MappedFile(path) for path in dict.fromkeys(paths.values())}
    except (OSError, ValueError):  # one is empty, or may not be read
        return None
    for path, file in files.items():
        header = _header(file.bytes)
        if header is None:
            return None
        start, entries = header
        for name, entry in entries.items():
            if paths.get(name) != path:
                continue
            stored = _entry(entry, file, start)
            if stored is None:
                return None
            found[name] = stored
    return found if len(found) == len(paths) else None


def _header(data: Bytes) -> tuple[int, dict[str, object]] | None:
    """Where the tensors begin, and what the header says of each."""
    length = int.from_bytes(data[:8].tobytes(), "little")
    if length > min(len(data) - 8, _LONGEST_HEADER):
        return None
    try:
        entries = json.loads(data[8 : 8 + length].tobytes())
    except (ValueError, RecursionError):
        return None
    return (8 + length, entries) if isinstance(entries, dict) else None


def _entry(entry: object, file: MappedFile, start: int) -> Stored | None:
    try:
        assert isinstance(entry, dict)
        kind, shape, (first, last) = entry["dtype"], tuple(map(int, entry["shape"])), map(int, entry["data_offsets"])
        size = _SAFETENSORS[kind] * int(np.prod(shape, dtype=np.int64))
    except (AssertionError, LookupError, TypeError, ValueError):
        return None
    if first < 0 or last - first != size or start + last > len(file.bytes):
        return None
    return Stored(kind, shape, file.bytes[start + first : start + last], file=file, at=start + first)
