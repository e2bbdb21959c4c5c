"""The header of a GGUF file: what it says of itself, and where its tensors lie, in one file or in several parts.

Knows: the file format. Does not know: what a tensor is for, how weights are packed or run, or who asks.

It is read here before anything else reads it, and checked against the file's size at every step: the reader in the
package gguf goes on past the end of a damaged file, for ever if a count in it is large enough, and takes half a minute
for a vocabulary of 150,000.
"""

from __future__ import annotations

import math
import re
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from ...errors import MissingExtra, ModelRefused

__all__ = ["FLOATS", "Entry", "Header", "gguf_parts", "is_gguf", "is_quantized", "read_header"]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
# type -> how it is written
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_MOST_DIMENSIONS, _MOST_NESTED = 8, 4
_AT_LEAST = 1 << 20  # bytes that are read at once
_LAYER = "blk."  # how the names of a layer's tensors begin
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")

FLOATS = ("F32", "F16", "BF16", "F64")


class Entry(NamedTuple):
    """A tensor in a file."""

    name: str
    kind: str  # the package gguf's name for how its numbers are written: "F32", "Q4_K"
    shape: tuple[int, ...]  # as Hugging Face has it: [outputs, inputs]
    file: Path
    at: int  # of its first byte
    bytes: int

    @property
    def numbers(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Header:
    """What a file says of itself, and its other parts if it has any."""

    settings: dict[str, Any]  # numbers and strings; of a list, how long it is
    tensors: dict[str, Entry]

    @property
    def architecture(self) -> str:
        return str(self.settings["general.architecture"])

    @property
    def numbers(self) -> int:
        """Weights, in all its tensors."""
        return sum(entry.numbers for entry in self.tensors.values())

    @property
    def kind(self) -> str:
        """Of most of its layers' weights."""
        inside = Counter[str]()
        for entry in self.tensors.values():
            inside[entry.kind] += entry.bytes if entry.name.startswith(_LAYER) else 0
        return inside.most_common(1)[0][0] if inside.total() else self.kinds[0]

    @property
    def kinds(self) -> tuple[str, ...]:
        """Of all its tensors, the largest part first."""
        everything = Counter[str]()
        for entry in self.tensors.values():
            everything[entry.kind] += entry.bytes
        return tuple(kind for kind, _ in everything.most_common())

    def named(self, key: str) -> Any:
        """A setting of its architecture; None if it has no such."""
        return self.settings.get(f"{self.architecture}.{key}")

    def weights(self, how: str) -> str:
        """Its weights in words, and ``how`` they are taken."""
        others = [kind for kind in self.kinds if kind != self.kind]
        beside = f" (and {', '.join(others)})" if others else ""
        return f"the file's weights are {self.kind}{beside}, {how}"


def is_gguf(source: object) -> bool:
    """Does this name a GGUF file, be it there or not? Ollama keeps such files under names without an ending."""
    if not isinstance(source, (str, Path)):
        return False
    if Path(source).suffix.lower() == ".gguf":
        return True
    try:
        with Path(source).expanduser().open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except (OSError, ValueError):  # no file, or a folder
        return False


def is_quantized(source: str | Path) -> bool:
    """Is it a GGUF file, and are its weights quantized?"""
    path = Path(source).expanduser()
    return is_gguf(path) and path.is_file() and read_header(path).kind not in FLOATS


def gguf_parts(path: Path) -> list[Path]:
    """All files of a model that is named by one of them."""
    found = _PART.fullmatch(path.name)
    if found is None or not 0 < int(found["number"]) <= int(found["count"]):
        return [path]
    count = int(found["count"])
    return [path.with_name(f"{found['stem']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]


def read_header(path: Path) -> Header:
    """What the file says of itself, whichever of its parts is named. Raises ModelRefused, in one sentence, if it is
    damaged or nothing can read it."""
    if find_spec("gguf") is None:
        raise MissingExtra("gguf", "gguf")
    first, *others = files = gguf_parts(path)
    for file in files:
        if len(files) > 1 and not file.exists():
            raise ModelRefused(f"{path} is one of {len(files)} parts of a model, and {file.name} is not beside it")
    settings, entries = _of_one(first)
    parts = settings.get("split.count") or 1
    if parts != len(files):
        raise ModelRefused(
            f"{path} is one of {parts} parts of a model, and its name does not tell the others': call them "
            f"NAME-00001-of-{parts:05}.gguf and so on, or join them (llama-gguf-split --merge)"
        )
    for file in others:
        entries = [*entries, *_of_one(file)[1]]
    total = settings.get("split.tensors.count", len(entries))
    if total != len(entries):
        raise ModelRefused(f"the parts of {path} do not belong together: {len(entries)} tensors of {total}")
    if not entries or "general.architecture" not in settings:
        raise ModelRefused(f"{path} holds no model: it has {len(entries)} tensors, or names no architecture")
    header = Header(settings, {entry.name: entry for entry in entries})
    layers, named = _layers(entries), header.named("block_count")
    if isinstance(named, int) and not 0 < named <= layers:
        raise ModelRefused(f"{path} is damaged: it describes {named} layers and has {layers}")
    return header


def _of_one(path: Path) -> tuple[dict[str, Any], list[Entry]]:
    """One file's settings and tensors."""
    try:
        about = path.stat()
        return _read(path, about.st_size, about.st_mtime_ns)
    except _CutShort:
        raise ModelRefused(f"{path} is cut short or damaged (its header ends nowhere): fetch it again") from None
    except OSError as error:
        raise ModelRefused(f"{path} cannot be read: {error}") from error


@lru_cache(maxsize=8)  # a load asks several times; named by the file's state, so that a changed one is read again
def _read(path: Path, size: int, changed: int) -> tuple[dict[str, Any], list[Entry]]:
    if not size:
        raise ModelRefused(f"{path} is empty: fetch it again")
    with path.open("rb") as file:
        return _parsed(path, _Cursor(file, size))


class _CutShort(Exception):
    """The file ends before what it speaks of."""


class _Cursor:
    """Walks through the header, and never past the end. Not mapped: a file that is cut short meanwhile would end the
    process."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self.file, self.size, self.at = file, size, 0
        self.data = b""  # what was read so far, from the beginning on

    def need(self, end: int) -> bytes:
        """What was read, with all up to ``end``."""
        if end > self.size:
            raise _CutShort
        if end > len(self.data):
            more = max(end - len(self.data), len(self.data), _AT_LEAST)
            self.data += self.file.read(more)
            if end > len(self.data):
                raise _CutShort
        return self.data

    def take(self, count: int) -> bytes:
        start = self.at
        self.skip(count)
        return self.need(self.at)[start : self.at]

    def skip(self, count: int) -> None:
        if count > self.size - self.at:
            raise _CutShort
        self.at += count

    def number(self, form: str = "<Q") -> int:
        return int(self.scalar(form))

    def scalar(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def text(self) -> str:
        return self.take(self.number()).decode(errors="replace")

    def value(self, kind: int, depth: int = 0) -> Any:
        """One value of a kind; of a list, how long it is."""
        if kind == _STRING:
            return self.text()
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind != _ARRAY or depth >= _MOST_NESTED:
            raise _CutShort
        inner, count = self.number("<I"), self.number()
        if inner in _SCALARS:
            self.skip(struct.calcsize(_SCALARS[inner]) * count)
        elif inner == _STRING:
            self._skip_strings(count)
        else:
            for _ in range(count):
                self.value(inner, depth + 1)
        return count

    def _skip_strings(self, count: int) -> None:
        """A vocabulary has hundreds of thousands, so this is the one loop here that is kept short."""
        length, data, at, last = struct.Struct("<Q").unpack_from, b"", self.at, -1
        for _ in range(count):
            if at > last:
                data = self.need(at + 8)
                last = len(data) - 8
            at += 8 + length(data, at)[0]
        self.at = 0
        self.skip(at)


def _parsed(path: Path, cursor: _Cursor) -> tuple[dict[str, Any], list[Entry]]:
    if cursor.take(min(4, cursor.size)) != _MAGIC:
        raise ModelRefused(f"{path} is no GGUF file: it does not begin as one")
    version = cursor.number("<I")
    if version not in _VERSIONS:
        odd = "is in the byte order of another machine" if version & 0xFFFF == 0 else f"is of GGUF version {version}"
        raise ModelRefused(f"{path} {odd}, which cannot be read here: convert it again with a present llama.cpp")
    tensors, pairs = cursor.number(), cursor.number()
    settings: dict[str, Any] = {}
    for _ in range(pairs):
        name, kind = cursor.text(), cursor.number("<I")
        settings[name] = cursor.value(kind)
    entries = list(_entries(path, cursor, tensors))
    alignment = settings.get("general.alignment") or 32
    if not isinstance(alignment, int):
        raise _CutShort
    start = -(-cursor.at // alignment) * alignment
    entries = [entry._replace(at=start + entry.at) for entry in entries]
    end = max((entry.at + entry.bytes for entry in entries), default=0)
    if end > cursor.size:
        raise ModelRefused(f"{path} is cut short: it has {cursor.size} bytes of {end}; fetch it again")
    return settings, entries


def _layers(entries: Sequence[Entry]) -> int:
    return len({entry.name.split(".")[1] for entry in entries if entry.name.startswith(_LAYER)})


def _entries(path: Path, cursor: _Cursor, count: int) -> Iterator[Entry]:
    """The tensors' entries, each with its place from where tensors begin."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    for _ in range(count):
        name, dimensions = cursor.text(), cursor.number("<I")
        if not 0 < dimensions <= _MOST_DIMENSIONS:
            raise _CutShort
        shape = tuple(cursor.number() for _ in range(dimensions))[::-1]
        number, offset = cursor.number("<I"), cursor.number()
        try:
            kind = GGMLQuantizationType(number)
            block, size = GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            raise ModelRefused(
                f"{path} has weights of a kind (number {number}, in {name}) that the package gguf does not know: "
                "pip install -U gguf, or use another quantization of the model"
            ) from None
        yield Entry(name, kind.name, shape, path, offset, math.prod(shape) // block * size)
