"""Ways to write numbers in files, and the kinds of packed matrices that keep them.

Knows: which kind holds which way's numbers exactly, and how to pack rows of any. Does not know: files, models.

What no kind keeps exactly becomes int8: Q5_1, which loses a little by it. Whoever asks is told, and says so.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch import Tensor

from ..stored import Bytes, Rows, Stored
from .library import MatrixRecord, kernels

__all__ = ["KINDS", "as_floats", "kind_for", "known", "pack_rows", "row_bytes"]

#: Kinds of packed matrices (csrc/layout.h). The K kinds want inputs in multiples of 256.
KINDS = {"int8": 0, "int4": 1, "float32": 2, "q4_k": 3, "q5_k": 4, "q6_k": 5, "bfloat16": 6, "float16": 7}
#: way -> its number in GGUF, inputs of a block, bytes of a block, and the kind that keeps it ("": none does)
_WAYS = {
    "F32": (0, 1, 4, "float32"),
    "F16": (1, 1, 2, "float16"),
    "BF16": (30, 1, 2, "bfloat16"),
    "Q4_0": (2, 32, 18, "int4"),
    "Q4_1": (3, 32, 20, "int4"),
    "Q5_0": (6, 32, 22, "int8"),
    "Q5_1": (7, 32, 24, ""),
    "Q8_0": (8, 32, 34, "int8"),
    "Q4_K": (12, 256, 144, "q4_k"),
    "Q5_K": (13, 256, 176, "q5_k"),
    "Q6_K": (14, 256, 210, "q6_k"),
}
_LANES = 16


def known(way: str) -> bool:
    """Can numbers that are written in this way be packed?"""
    return way in _WAYS


def kind_for(way: str) -> tuple[str, bool]:
    """The kind that numbers of this way are packed as, and whether it keeps them exactly."""
    kept = _WAYS[way][3]
    return kept or "int8", bool(kept)


def row_bytes(way: str, inputs: int) -> int:
    """How many bytes a row takes; 0 if rows of so many inputs cannot be written in this way."""
    _, block, size, _ = _WAYS[way]
    return 0 if inputs % block else inputs // block * size


def pack_rows(kind: str, stored: Stored, rows: Rows, address: int) -> None:
    """Pack some rows of a tensor [.., inputs]: row ``rows[i]`` (int32; -1: zeros) as output i, from ``address`` on."""
    inputs, raw, way = stored.shape[1], stored.bytes, stored.kind
    if way == "Q5_0" and kind == "int8":
        raw, way, rows = _chosen(stored, rows, _as_q8_0), "Q8_0", _in_order(rows)
    elif way not in ("F32", "F16", "BF16") and kind_for(way) != (kind, True):
        raw, way, rows = _chosen(stored, rows, _spelt_out), "F32", _in_order(rows)
    rows = np.ascontiguousarray(rows, dtype=np.int32)
    wrong = kernels().hs_pack_gguf(
        *(KINDS[kind], _WAYS[way][0], raw.ctypes.data, row_bytes(way, inputs)),
        *(rows.ctypes.data, len(rows), inputs, address),
    )
    assert not wrong, f"{way} does not become {kind} with {inputs} inputs"


def as_floats(stored: Stored) -> Tensor:
    """A vector [n], or a matrix [outputs, inputs], as float32."""
    way, shape = stored.kind, stored.shape
    if way == "F32":
        found = torch.from_numpy(stored.bytes.copy()).view(torch.float32)
    elif way in ("F16", "BF16"):
        half = torch.float16 if way == "F16" else torch.bfloat16
        found = torch.from_numpy(stored.bytes.copy()).view(half).float()
    else:
        whole = stored._replace(shape=(stored.size // row_bytes(way, shape[-1]), shape[-1]))
        found = torch.from_numpy(_spelt_out(whole, whole.bytes.reshape(whole.shape[0], -1))).view(torch.float32)
    found = found.view(shape)
    return found if stored.order is None else found[torch.from_numpy(stored.order)]


def _in_order(rows: Rows) -> Rows:
    """The numbers of rows that were chosen already."""
    return np.where(rows < 0, rows, np.cumsum(rows >= 0, dtype=np.int32) - 1).astype(np.int32)


def _chosen(stored: Stored, rows: Rows, how: object) -> Bytes:
    """The rows that are wanted, written in another way."""
    assert callable(how)
    lines = stored.bytes.reshape(stored.shape[0], -1)[rows[rows >= 0]]
    found: Bytes = how(stored, lines)
    return found


def _as_q8_0(stored: Stored, lines: Bytes) -> Bytes:
    """Q5_0 as Q8_0, exactly: the same scale, and five bits in eight."""
    blocks = lines.reshape(-1, 22)
    scale, high, both = blocks[:, :2], blocks[:, 2:6].copy().view("<u4"), blocks[:, 6:]
    low = np.concatenate([both & 15, both >> 4], axis=1)
    bit = (high >> np.arange(32, dtype=np.uint32) & 1).astype(np.uint8)
    numbers = (low | bit << 4).astype(np.int8) - np.int8(16)
    return np.concatenate([scale, numbers.view(np.uint8)], axis=1).reshape(-1)


def _spelt_out(stored: Stored, lines: Bytes) -> Bytes:
    """Rows as float32: by way of the kind that keeps them, which is many times as fast as the package gguf."""
    way, inputs, count = stored.kind, stored.shape[1], len(lines)
    kind, exact = kind_for(way)
    if not exact or way == "Q5_0":
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        return np.ascontiguousarray(dequantize(lines, GGMLQuantizationType[way])).view(np.uint8).reshape(-1)
    padded = -(-count // _LANES) * _LANES
    packed = np.empty(int(kernels().hs_packed_bytes(KINDS[kind], padded, inputs)), dtype=np.uint8)
    rows = np.full(padded, -1, dtype=np.int32)
    rows[:count] = np.arange(count)
    pack_rows(kind, Stored(way, (count, inputs), lines.reshape(-1)), rows, packed.ctypes.data)
    record = MatrixRecord(KINDS[kind], padded, inputs, packed.ctypes.data, None)
    found = np.empty((count, inputs), dtype=np.float32)
    kernels().hs_unpack(ctypes.byref(record), rows.ctypes.data, count, found.ctypes.data)
    return found.view(np.uint8).reshape(-1)
