"""The kernels' records and functions, as Python sees them.

Knows: the memory layout of csrc/decoder.h, field by field. Does not know: what is in the records.
"""

from __future__ import annotations

import ctypes
import logging
import os
from ctypes import POINTER, Structure, c_char_p, c_float, c_int, c_int32, c_int64, c_void_p
from functools import cache
from typing import Any

from .build import isa, load_kernels

__all__ = [
    "CallRecord",
    "LayerRecord",
    "MatrixRecord",
    "ModelRecord",
    "declared",
    "each",
    "instructions",
    "kernels",
    "pool",
]


log = logging.getLogger(__name__)


def each(kind: Any, names: str) -> list[tuple[str, Any]]:
    """Fields of one type, as C++ declares them in one line."""
    return [(name, kind) for name in names.split()]


class MatrixRecord(Structure):
    _fields_ = [*each(c_int32, "kind outputs inputs"), *each(c_void_p, "data bias")]


class LayerRecord(Structure):
    _fields_ = [
        *each(MatrixRecord, "qkv out gate_up down"),
        *each(c_void_p, "input_norm post_norm q_norm k_norm keys values"),
        ("window", c_int64),
        *each(MatrixRecord, "k v up"),  # empty, unless they are of another kind than what they would lie in
    ]


class ModelRecord(Structure):
    _fields_ = [
        *each(c_int32, "hidden heads kv_heads head_dim ffn vocab layers positions"),
        ("eps", c_float),
        *each(c_int32, "float_keys capacity"),
        *each(c_int64, "row_stride head_stride"),
        *each(MatrixRecord, "embedding head"),
        *each(c_void_p, "norm cosines sines"),
        ("layer", POINTER(LayerRecord)),
    ]


class CallRecord(Structure):
    _fields_ = [
        *each(c_int32, "rows width first_row keep"),
        *each(c_void_p, "tokens lengths ancestors depths logits"),
        ("watched", c_int32),
        *each(c_void_p, "watch features slab_rows widths"),
    ]


_SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "hs_packed_bytes": (c_int64, [c_int, c_int, c_int]),
    "hs_pack": (None, [c_int, c_void_p, c_void_p, c_int, c_int, c_void_p]),
    "hs_pack_gguf": (c_int, [c_int, c_int, c_void_p, c_int64, c_void_p, c_int, c_int, c_void_p]),
    "hs_unpack": (None, [POINTER(MatrixRecord), c_void_p, c_int, c_void_p]),
    "hs_advise": (None, [c_void_p, c_int64]),
    "hs_instructions": (c_char_p, []),
    "hs_pool_new": (c_void_p, [c_int]),
    "hs_pool_size": (c_int, [c_void_p]),
    "hs_product": (None, [c_void_p, POINTER(MatrixRecord), c_void_p, c_int, c_void_p]),
    "hs_read": (None, [c_void_p, c_void_p, c_int64]),
    "hs_multiply": (c_int64, [c_void_p, c_int64]),
    "hs_model_new": (c_void_p, [POINTER(ModelRecord)]),
    "hs_model_free": (None, [c_void_p]),
    "hs_forward": (c_int, [c_void_p, c_void_p, POINTER(CallRecord)]),
    "hs_head_new": (c_void_p, [c_void_p]),
    "hs_head_free": (None, [c_void_p]),
    "hs_head": (c_int, [c_void_p] * 3),
    "hs_judge": (
        None,
        [*[c_void_p] * 3, c_int64, c_int, c_int, c_void_p, c_void_p, c_int64, c_void_p, c_int, c_void_p],
    ),
    "hs_keys": (None, [*[c_void_p] * 4, c_int, c_void_p, c_void_p]),
    "hs_process": (None, [c_void_p, c_void_p, c_int64, c_int, c_void_p]),
    "hs_sample": (None, [c_void_p, c_void_p, c_int, c_int, c_int, *[c_void_p] * 8]),
}


@cache
def _declared(level: str) -> ctypes.CDLL:
    library = load_kernels(level)
    if isinstance(library, str):
        raise OSError(library)
    return declared(library)


def declared(library: ctypes.CDLL) -> ctypes.CDLL:
    """Tell ctypes what the library's functions take and return."""
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def kernels(level: str | None = None) -> ctypes.CDLL:
    """The library with its functions declared. Raises OSError with the reason if there is none here."""
    return _declared(level or isa())


def instructions(level: str | None = None) -> str:
    """Which instructions of the processor the kernels use, in words."""
    found: bytes = kernels(level).hs_instructions()
    return found.decode()


@cache
def _pool(level: str, threads: int, process: int) -> int:
    found = int(kernels(level).hs_pool_new(threads))
    there = int(kernels(level).hs_pool_size(found))
    if there < threads:
        log.warning("only %d of %d threads could be started (a limit of processes, or of memory?)", there, threads)
    return found


def pool(threads: int, level: str | None = None) -> int:
    """The process's threads, shared by all models that use as many. A forked child gets threads of its own."""
    return _pool(level or isa(), threads, os.getpid())
