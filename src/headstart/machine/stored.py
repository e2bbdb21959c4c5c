"""Weights where they lie: in an open file, or in a live model's memory.

Knows: bytes, shapes, and what the ways to write numbers are called. Does not know: what a weight is for, who reads it.

Files are read piece by piece, not mapped: a mapped one that is cut short meanwhile, or lies on a disk that fails, ends
the process without a word.
"""

from __future__ import annotations

import json
import os
import sys
import weakref
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ..errors import ModelRefused

__all__ = ["Bytes", "OpenFile", "Rows", "Stored", "in_memory", "safetensors_in", "safetensors_names", "same_numbers"]

Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
Rows: TypeAlias = np.ndarray[Any, np.dtype[np.int32]]  # numbers of rows; -1: none

# GGUF's names, of the types in PyTorch and in safetensors' headers.
_TORCH = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_SAFETENSORS = {"F32": 4, "F16": 2, "BF16": 2}  # -> bytes a number
_LONGEST_HEADER = 100 << 20  # bytes; safetensors' own limit
_AT_ONCE = 16 << 20  # bytes of a comparison


class OpenFile:
    """A file's bytes, as they were when it was opened. Open as long as anything wants to read from it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0))
        weakref.finalize(self, os.close, self._file)
        self._lock = Lock()
        self.size, self._changed = self._state()

    def _state(self) -> tuple[int, int]:
        about = os.fstat(self._file)
        return about.st_size, about.st_mtime_ns

    def read(self, at: int, count: int) -> Bytes:
        """Some of them. Several threads may read at once."""
        found = np.empty(count, dtype=np.uint8)
        left = found.data
        try:
            while left and (got := self._read_into(left, at)):
                left, at = left[got:], at + got
        except OSError as error:
            raise ModelRefused(f"{self.path} cannot be read: {error.strerror}") from error
        if left:
            raise self._other()
        return found

    def _read_into(self, to: memoryview, at: int) -> int:
        if sys.platform != "linux":
            with self._lock:  # what every system has: one place where the file is read
                os.lseek(self._file, at, os.SEEK_SET)
                found = os.read(self._file, len(to))
            to[: len(found)] = found
            return len(found)
        return os.preadv(self._file, [to], at)

    def expect(self, at: int, count: int) -> None:
        """Tell the system that these bytes are wanted soon: a wish."""
        if sys.platform == "linux" and count:
            with suppress(OSError):  # not every disk takes wishes
                os.posix_fadvise(self._file, at, count, os.POSIX_FADV_WILLNEED)

    def check_unchanged(self) -> None:
        """Refuse it if it was written to since it was opened: some of what was read is old, and some new."""
        if self._state() != (self.size, self._changed):
            raise self._other()

    def _other(self) -> ModelRefused:
        return ModelRefused(f"{self.path} was changed while it was read: load it again when it is whole")


class Stored(NamedTuple):
    """A tensor as it is written."""

    kind: str  # GGUF's name for how its numbers are written: "F32", "BF16", "Q4_K"
    shape: tuple[int, ...]  # [outputs, inputs] or [n]
    memory: Bytes | None  # None: it lies in the file
    order: Rows | None = None  # which row of it is meant by the first, the second and so on; None: as they are
    file: OpenFile | None = None
    at: int = 0  # of its first byte in the file
    length: int = 0  # of its bytes there

    @property
    def size(self) -> int:
        """Bytes."""
        return self.length if self.memory is None else len(self.memory)

    @property
    def bytes(self) -> Bytes:
        """All of it."""
        return self.part(0, self.size)

    def part(self, first: int, count: int) -> Bytes:
        """Some of its bytes."""
        if self.memory is not None:
            return self.memory[first : first + count]
        assert self.file is not None
        return self.file.read(self.at + first, count)

    def held(self, rows: Rows) -> tuple[int, Stored]:
        """The tensor's rows from the first of these to the last, in memory, and the number of the first."""
        if self.memory is not None:
            return 0, self
        wanted = rows[rows >= 0]
        first, last = (int(wanted.min()), int(wanted.max()) + 1) if len(wanted) else (0, 0)
        each = self.length // self.shape[0]
        found = self.part(first * each, (last - first) * each)
        return first, Stored(self.kind, (last - first, *self.shape[1:]), found)

    def expect(self) -> None:
        """See ``OpenFile.expect``."""
        if self.file is not None:
            self.file.expect(self.at, self.length)


def in_memory(tensor: Tensor) -> Stored:
    """A live tensor on the CPU, in float32, float16 or bfloat16."""
    flat = tensor.detach().contiguous().view(torch.uint8).flatten()
    return Stored(_TORCH[tensor.dtype], tuple(tensor.shape), flat.numpy())


def same_numbers(one: Stored, other: Stored) -> bool:
    """Are two tensors written alike, to the last bit?"""
    if (one.kind, one.shape, one.size) != (other.kind, other.shape, other.size):
        return False
    steps = ((at, min(_AT_ONCE, one.size - at)) for at in range(0, one.size, _AT_ONCE))
    return all(np.array_equal(one.part(*step), other.part(*step)) for step in steps)


def safetensors_names(path: Path) -> Iterable[str] | None:
    """What the tensors in a safetensors file are called; None if it is not as it should be."""
    header = _header(OpenFile(path))
    return None if header is None else (name for name in header[1] if name != "__metadata__")


def safetensors_in(paths: Mapping[str, Path]) -> dict[str, Stored] | None:
    """The tensors of safetensors files. ``paths``: which file holds which tensor. None if a file is not as it should
    be, or holds numbers of other types: whoever reads it in the ordinary way says what is wrong."""
    found: dict[str, Stored] = {}
    try:
        files = {path: OpenFile(path) for path in dict.fromkeys(paths.values())}
    except OSError:  # one may not be read
        return None
    for path, file in files.items():
        header = _header(file)
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


def _header(file: OpenFile) -> tuple[int, dict[str, object]] | None:
    """Where the tensors begin, and what the header says of each."""
    if file.size < 8:
        return None
    length = int.from_bytes(file.read(0, 8).tobytes(), "little")
    if length > min(file.size - 8, _LONGEST_HEADER):
        return None
    try:
        entries = json.loads(file.read(8, length).tobytes())
    except (ValueError, RecursionError):
        return None
    return (8 + length, entries) if isinstance(entries, dict) else None


def _entry(entry: object, file: OpenFile, start: int) -> Stored | None:
    try:
        assert isinstance(entry, dict)
        kind, shape, (first, last) = entry["dtype"], tuple(map(int, entry["shape"])), map(int, entry["data_offsets"])
        size = _SAFETENSORS[kind] * int(np.prod(shape, dtype=np.int64))
    except (AssertionError, LookupError, TypeError, ValueError, OverflowError):
        return None
    if first < 0 or last - first != size or start + last > file.size:
        return None
    return Stored(kind, shape, None, None, file, start + first, size)
