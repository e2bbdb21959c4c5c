"""GGUF files: what their header says, and reading one into an ordinary model.

Knows: the file format's header, and which of our own kinds of weights keep a file's numbers.
Does not know: how packed weights are made or run, or who asks.

The header is read here before anything else reads it. It is checked against the file's size at every step, because the
reader in the package gguf goes on past the end of a damaged file, for ever if a count in it is large enough.
"""

from __future__ import annotations

import io
import math
import mmap
import struct
from collections import Counter
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers import PreTrainedTokenizerFast

from ...errors import HeadstartError, MissingExtra, ModelRefused
from .quiet import quiet
from .refusals import model_class, refusals, refuse

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["Header", "is_gguf", "read_gguf", "read_header"]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # type -> bytes
_UINT16, _UINT32, _STRING, _ARRAY = 2, 4, 8, 9
_MOST_DIMENSIONS, _MOST_NESTED = 8, 4
_FLOATS = ("F32", "F16", "BF16", "F64")
_LAYER = "blk."  # how the names of a layer's tensors begin
_OWN = {"Q4_1": "int4", "Q8_0": "int8"}  # kinds whose numbers our kernels' weights keep exactly


@dataclass(frozen=True)
class Header:
    """What a file says of itself."""

    architecture: str
    numbers: int  # weights, in all its tensors
    kind: str  # of most of its layers' weights
    kinds: tuple[str, ...]  # of all its tensors, the largest part first

    def weights(self, dtype: str) -> str:
        """Which weights a model has that was read from it."""
        others = [kind for kind in self.kinds if kind != self.kind]
        beside = f" (and {', '.join(others)})" if others else ""
        how = "read" if self.kind in _FLOATS else "spelt out"
        return f"the file's weights are {self.kind}{beside}, {how} as {dtype}"

    def own_bits(self) -> str | None:
        """The kind of our CPU kernels' weights that keeps the file's own numbers; None if there is none."""
        return _OWN.get(self.kind)

    def advice(self, *, exact: bool) -> str | None:
        """How to run fewer bits than are spelt out; None if they are floats. ``exact``: on kernels that keep them."""
        if self.kind in _FLOATS:
            return None
        own = self.own_bits()
        if exact and own is not None:
            return f"quantization={own!r} runs the file's own {own.removeprefix('int')} bits"
        return "quantization='int4' or 'int8' rounds them anew"


def is_gguf(source: object) -> bool:
    """Does this name a GGUF file, be it there or not?"""
    return isinstance(source, (str, Path)) and Path(source).suffix == ".gguf"


def read_gguf(path: Path, dtype: torch.dtype | None = None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Read a GGUF file into an ordinary model. Quantized weights become ordinary numbers again (``dtype``, float32)."""
    header = read_header(path)
    try:
        # The reader draws a bar that cannot be switched off.
        with quiet(), redirect_stderr(io.StringIO()):
            return _read(path, header, dtype or torch.float32)
    except (HeadstartError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # what a file can do to its reader has no one type
        text = " ".join(str(error).split())[:200]
        raise ModelRefused(f"{path} cannot be read as a model ({type(error).__name__}: {text})") from error


def _read(path: Path, header: Header, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    # Not from_pretrained(gguf_file=...), which wants the package accelerate for this; the reader itself does not.
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    settings = dict(load_gguf_checkpoint(str(path))["config"])
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    refuse(refusals(config, model_class(config)))
    model: PreTrainedModel
    with torch.device("meta"):  # without memory: a damaged number may ask for more than there is
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    if model.num_parameters() > 2 * header.numbers:
        raise ModelRefused(
            f"{path} is damaged: it describes a model of {model.num_parameters()} weights and has {header.numbers}"
        )
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    weights = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    missing, _ = model.load_state_dict(weights, strict=False)
    model.tie_weights()
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    lost = [name for name in missing if name not in tied]
    if lost:
        raise ModelRefused(f"{path.name} lacks weights that {type(model).__name__} needs, such as {lost[0]}")
    # Not AutoTokenizer: it reads the whole header once more, only to learn that it needs this class.
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(path.parent), gguf_file=path.name, trust_remote_code=False)
    tokenizer.clean_up_tokenization_spaces = False  # decoding must give back what was encoded
    for name in ("bos_token", "eos_token"):  # transformers 5.17 mixes them up; the header has them right
        number = getattr(config, f"{name}_id", None)
        if isinstance(number, int):
            setattr(tokenizer, name, tokenizer.convert_ids_to_tokens(number))
    return model, tokenizer


# -- the header ---------------------------------------------------------------------------------------------------


def read_header(path: Path) -> Header:
    """What the file says of itself. Raises ModelRefused, in one sentence, if it is damaged or nothing can read it."""
    if find_spec("gguf") is None:
        raise MissingExtra("gguf", "gguf")
    try:
        size = path.stat().st_size
        if not size:
            raise ModelRefused(f"{path} is empty: fetch it again")
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _header(path, _Cursor(data, size))
    except _CutShort:
        raise ModelRefused(f"{path} is cut short or damaged (its header ends nowhere): fetch it again") from None
    except OSError as error:
        raise ModelRefused(f"{path} cannot be read: {error}") from error


class _CutShort(Exception):
    """The file ends before what it speaks of."""


class _Cursor:
    """Walks through the header, and never past the end."""

    def __init__(self, data: mmap.mmap, size: int) -> None:
        self.data, self.size, self.at = data, size, 0

    def take(self, count: int) -> bytes:
        start = self.at
        self.skip(count)
        return self.data[start : self.at]

    def skip(self, count: int) -> None:
        if count > self.size - self.at:
            raise _CutShort
        self.at += count

    def number(self, form: str = "<Q") -> int:
        return int(struct.unpack(form, self.take(struct.calcsize(form)))[0])

    def text(self) -> str:
        return self.take(self.number()).decode(errors="replace")

    def value(self, kind: int, depth: int = 0) -> str | int | None:
        """One value of a kind: a string, a count, or None for whatever is only passed by."""
        if kind == _STRING:
            return self.text()
        if kind in (_UINT16, _UINT32):
            return self.number("<H" if kind == _UINT16 else "<I")
        if kind == _ARRAY and depth < _MOST_NESTED:
            inner, count = self.number("<I"), self.number()
            if inner in _SCALARS:
                self.skip(_SCALARS[inner] * count)
            elif inner == _STRING:
                for _ in range(count):
                    self.skip(self.number())
            else:
                for _ in range(count):
                    self.value(inner, depth + 1)
            return None
        if kind not in _SCALARS:
            raise _CutShort
        self.skip(_SCALARS[kind])
        return None


def _header(path: Path, cursor: _Cursor) -> Header:
    if cursor.take(min(4, cursor.size)) != _MAGIC:
        raise ModelRefused(f"{path} is no GGUF file: it does not begin as one")
    version = cursor.number("<I")
    if version not in _VERSIONS:
        odd = "is in the byte order of another machine" if version & 0xFFFF == 0 else f"is of GGUF version {version}"
        raise ModelRefused(f"{path} {odd}, which cannot be read here: convert it again with a present llama.cpp")
    tensors, pairs = cursor.number(), cursor.number()
    known: dict[str, Any] = {}
    for _ in range(pairs):
        name, kind = cursor.text(), cursor.number("<I")
        known[name] = cursor.value(kind)
    parts = known.get("split.count")
    if isinstance(parts, int) and parts > 1:
        raise ModelRefused(f"{path} is one of {parts} parts of a model: join them first (llama-gguf-split --merge)")
    entries = [_tensor(path, cursor) for _ in range(tensors)]
    if not entries or "general.architecture" not in known:
        raise ModelRefused(f"{path} holds no model: it has {len(entries)} tensors, or names no architecture")
    architecture = str(known["general.architecture"])
    layers, named = _layers(entries), known.get(f"{architecture}.block_count")
    if isinstance(named, int) and named > layers:
        raise ModelRefused(f"{path} is damaged: it describes {named} layers and has {layers}")
    alignment = known.get("general.alignment") or 32
    end = -(-cursor.at // alignment) * alignment + max(entry.offset + entry.bytes for entry in entries)
    if end > cursor.size:
        raise ModelRefused(f"{path} is cut short: it has {cursor.size} bytes of {end}; fetch it again")
    everything, inside = Counter[str](), Counter[str]()
    for entry in entries:
        everything[entry.kind] += entry.bytes
        inside[entry.kind] += entry.bytes if entry.name.startswith(_LAYER) else 0
    most = (inside if inside.total() else everything).most_common(1)[0][0]
    kinds = tuple(kind for kind, _ in everything.most_common())
    return Header(architecture, sum(entry.numbers for entry in entries), most, kinds)


def _layers(entries: Sequence[_Tensor]) -> int:
    return len({entry.name.split(".")[1] for entry in entries if entry.name.startswith(_LAYER)})


class _Tensor(NamedTuple):
    """A tensor's entry in the header."""

    name: str
    kind: str
    numbers: int
    offset: int  # from where tensors begin
    bytes: int


def _tensor(path: Path, cursor: _Cursor) -> _Tensor:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    name, dimensions = cursor.text(), cursor.number("<I")
    if dimensions > _MOST_DIMENSIONS:
        raise _CutShort
    count = math.prod(cursor.number() for _ in range(dimensions))
    number, offset = cursor.number("<I"), cursor.number()
    try:
        kind = GGMLQuantizationType(number)
        block, size = GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError):
        raise ModelRefused(
            f"{path} has weights of a kind (number {number}, in {name}) that the package gguf does not know: "
            "pip install -U gguf, or use another quantization of the model"
        ) from None
    return _Tensor(name, kind.name, count, offset, count // block * size)
