"""The kernels' records and functions, as Python sees them.

Knows: the memory layout of csrc/decoder.h, field by field. Does not know: what is in the records.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, Structure, c_char_p, c_float, c_int, c_int32, c_int64, c_void_p
from functools import cache

from .build import isa, load_kernels

__all__ = [
    "KINDS",
    "CallRecord",
    "LayerRecord",
    "MatrixRecord",
    "ModelRecord",
    "declared",
    "instructions",
    "kernels",
    "pool",
]

KINDS = {"int8": 0, "int4": 1, "float32": 2}


class MatrixRecord(Structure):
    _fields_ = [
        ("kind", c_int32),
        ("outputs", c_int32),
        ("inputs", c_int32),
        ("data", c_void_p),
        ("bias", c_void_p),
    ]


class LayerRecord(Structure):
    _fields_ = [
        ("qkv", MatrixRecord),
        ("out", MatrixRecord),
        ("gate_up", MatrixRecord),
        ("down", MatrixRecord),
        ("input_norm", c_void_p),
        ("post_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("window", c_int64),
    ]


class ModelRecord(Structure):
    _fields_ = [
        ("hidden", c_int32),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("ffn", c_int32),
        ("vocab", c_int32),
        ("layers", c_int32),
        ("positions", c_int32),
        ("eps", c_float),
        ("capacity", c_int32),
        ("row_stride", c_int64),
        ("head_stride", c_int64),
        ("embedding", MatrixRecord),
        ("head", MatrixRecord),
        ("norm", c_void_p),
        ("cosines", c_void_p),
        ("sines", c_void_p),
        ("layer", POINTER(LayerRecord)),
    ]


class CallRecord(Structure):
    _fields_ = [
        ("rows", c_int32),
        ("width", c_int32),
        ("first_row", c_int32),
        ("keep", c_int32),
        ("tokens", c_void_p),
        ("lengths", c_void_p),
        ("ancestors", c_void_p),
        ("depths", c_void_p),
        ("logits", c_void_p),
        ("watched", c_int32),
        ("watch", c_void_p),
        ("features", c_void_p),
        ("slab_rows", c_void_p),
        ("widths", c_void_p),
    ]


_SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "hs_packed_bytes": (c_int64, [c_int, c_int, c_int]),
    "hs_pack": (None, [c_int, c_void_p, c_void_p, c_int, c_int, c_void_p]),
    "hs_unpack": (None, [POINTER(MatrixRecord), c_void_p, c_int, c_void_p]),
    "hs_advise": (None, [c_void_p, c_int64]),
    "hs_instructions": (c_char_p, []),
    "hs_pool_new": (c_void_p, [c_int]),
    "hs_pool_free": (None, [c_void_p]),
    "hs_product": (None, [c_void_p, POINTER(MatrixRecord), c_void_p, c_int, c_void_p]),
    "hs_model_new": (c_void_p, [POINTER(ModelRecord)]),
    "hs_model_free": (None, [c_void_p]),
    "hs_forward": (c_int, [c_void_p, c_void_p, POINTER(CallRecord)]),
    "hs_judge": (
        None,
        [c_void_p, c_void_p, c_void_p, c_int64, c_int, c_int, c_void_p, c_void_p, c_int64, c_void_p],
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
    return int(kernels(level).hs_pool_new(threads))


def pool(threads: int, level: str | None = None) -> int:
    """The process's threads, shared by all models that use as many. A forked child gets threads of its own."""
    return _pool(level or isa(), threads, os.getpid())
