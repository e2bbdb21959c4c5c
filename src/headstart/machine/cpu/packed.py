"""A decoder's weights in the kernels' form: one block of memory, and a plan of what lies where.

Knows: how weights are rounded, ordered and laid out, and their file. Does not know: how they are multiplied.

``int8``: a scale for 32 weights, 8.5 bits a weight. ``int4``: a scale and a minimum for 32 weights, 5 bits a weight;
embedding and output head stay int8. A group's extremes are kept exactly, so weights that come from a GGUF file in Q4_1
(int4) or Q8_0 (int8) are that file's own numbers again: packing them loses nothing.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ..files import open_guarded, replacing
from ..lower import Weights, lower, parts_of
from ..lower import why_not as why_not_lowered
from ..slab_layer import LINE, on_cache_line
from .library import KINDS, MatrixRecord, kernels

__all__ = ["Packed", "Plan", "load_packed", "pack_model", "said_about", "save_packed", "why_not"]

LANES, GROUP = 16, 32
VERSION = "2"  # of the file
PARTS = frozenset({"norms its heads", "has sliding windows", "turns some channels only"})  # see ``parts_of``


@dataclass(frozen=True)
class Plan:
    """Sizes and kind of a packed decoder: all that is needed to find its parts."""

    kind: str  # of the layers' matrices: a key of KINDS
    table_kind: str  # of embedding and output head
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    eps: float
    windows: tuple[int, ...]  # a layer each; 0: sees everything
    qkv_bias: bool
    out_bias: bool
    qk_norm: bool
    tied: bool  # the output head is the embedding
    inverse_frequencies: tuple[float, ...]  # of the rotation
    rotary_scale: float

    @property
    def layers(self) -> int:
        return len(self.windows)

    @property
    def queries(self) -> int:
        return self.heads * self.head_dim

    def matrices(self) -> Iterator[tuple[str, str, int, int]]:
        """Name, kind, outputs (padded) and inputs of every matrix, in the order they lie in."""
        for i in range(self.layers):
            yield f"{i}.qkv", self.kind, self.queries + 2 * self.kv_heads * self.head_dim, self.hidden
            yield f"{i}.out", self.kind, self.hidden, self.queries
            yield f"{i}.gate_up", self.kind, 2 * self.ffn, self.hidden
            yield f"{i}.down", self.kind, self.hidden, self.ffn
        yield "embedding", self.table_kind, _padded(self.vocab), self.hidden
        if not self.tied:
            yield "head", self.table_kind, _padded(self.vocab), self.hidden

    def vectors(self) -> Iterator[tuple[str, int]]:
        """Name and length of every float32 vector."""
        for i in range(self.layers):
            yield f"{i}.input_norm", self.hidden
            yield f"{i}.post_norm", self.hidden
            if self.qk_norm:
                yield f"{i}.q_norm", self.head_dim
                yield f"{i}.k_norm", self.head_dim
            if self.qkv_bias:
                yield f"{i}.qkv_bias", self.queries + 2 * self.kv_heads * self.head_dim
            if self.out_bias:
                yield f"{i}.out_bias", self.hidden
        yield "norm", self.hidden

    def layout(self) -> tuple[dict[str, int], int]:
        """Where each part begins, and how many bytes there are."""
        offsets, end = {}, 0
        for name, kind, outputs, inputs in self.matrices():
            offsets[name] = end
            end += -(-int(kernels().hs_packed_bytes(KINDS[kind], outputs, inputs)) // LINE) * LINE
        for name, length in self.vectors():
            offsets[name] = end
            end += -(-length * 4 // LINE) * LINE
        return offsets, end


class Packed:
    """A plan and the memory it describes."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._offsets, self.bytes = plan.layout()
        # On a cache line, in large pages where the system has them: asked for before the memory is touched.
        self.data = on_cache_line(self.bytes)
        kernels().hs_advise(self.data.data_ptr(), self.bytes)
        self._matrices = {name: (kind, outputs, inputs) for name, kind, outputs, inputs in plan.matrices()}
        self._lengths = dict(plan.vectors())

    def address(self, name: str) -> int | None:
        """Where a part lies; None if the model has no such part."""
        offset = self._offsets.get(name)
        return None if offset is None else self.data.data_ptr() + offset

    def matrix(self, name: str, bias: str | None = None) -> MatrixRecord:
        kind, outputs, inputs = self._matrices[name]
        return MatrixRecord(KINDS[kind], outputs, inputs, self.address(name), self.address(bias) if bias else None)

    def rows(self, name: str, which: Tensor) -> Tensor:
        """Rows of a matrix as floats [len(which), inputs], as the kernels see them."""
        record = self.matrix(name)
        found = torch.empty(len(which), record.inputs)
        numbers = which.to(torch.int32).contiguous()
        kernels().hs_unpack(ctypes.byref(record), numbers.data_ptr(), len(which), found.data_ptr())
        return found

    def put_matrix(self, name: str, weight: Tensor, order: Tensor | None = None) -> None:
        """Round and store a matrix [rows, inputs]. ``order``: which row becomes which output."""
        kind, outputs, inputs = self._matrices[name]
        source = weight.detach().to("cpu", torch.float32).contiguous()
        numbers = torch.full((outputs,), -1, dtype=torch.int32)
        numbers[: len(source)] = torch.arange(len(source)) if order is None else order
        kernels().hs_pack(KINDS[kind], source.data_ptr(), numbers.data_ptr(), outputs, inputs, self.address(name))

    def put_vector(self, name: str, vector: Tensor) -> None:
        at, length = self._offsets[name], self._lengths[name]
        self.data[at : at + 4 * length].view(torch.float32).copy_(vector.detach())


def why_not(model: nn.Module) -> str | None:
    """None if the kernels can run the model, else the reason in words."""
    reason = why_not_lowered(model)
    if reason is not None:
        return reason
    if missing := parts_of(model) - PARTS:
        return f"it {' and '.join(sorted(missing))}, which the CPU kernels do not"
    config: Any = model.config
    if config.hidden_size % GROUP or config.intermediate_size % GROUP:
        return f"its widths are not multiples of {GROUP}"
    return None


@torch.no_grad()
def pack_model(model: nn.Module, kind: str) -> Packed:
    """Round and pack a model's weights. Call ``why_not`` first."""
    weights = lower(model)
    packed = Packed(_plan(weights, kind))
    block = torch.arange(weights.ffn).view(-1, GROUP)
    paired = torch.stack([block, block + weights.ffn], dim=1).flatten().to(torch.int32)
    for i, layer in enumerate(weights.layers):
        packed.put_matrix(f"{i}.qkv", layer.qkv.data)
        packed.put_matrix(f"{i}.out", layer.o.data)
        packed.put_matrix(f"{i}.gate_up", layer.gate_up.data, paired)
        packed.put_matrix(f"{i}.down", layer.down.data)
        for name, vector in (
            ("input_norm", layer.input_norm),
            ("post_norm", layer.post_norm),
            ("q_norm", layer.q_norm),
            ("k_norm", layer.k_norm),
            ("qkv_bias", layer.qkv_bias),
            ("out_bias", layer.o_bias),
        ):
            if vector is not None:
                packed.put_vector(f"{i}.{name}", vector)
    packed.put_vector("norm", weights.norm)
    packed.put_matrix("embedding", weights.embedding)
    if not packed.plan.tied:
        packed.put_matrix("head", weights.head.data)
    return packed


def _plan(weights: Weights, kind: str) -> Plan:
    first = weights.layers[0]
    rotary: nn.Module = weights.rotary
    frequencies = rotary.inv_freq
    assert isinstance(frequencies, Tensor)
    return Plan(
        kind=kind,
        table_kind="float32" if kind == "float32" else "int8",
        hidden=weights.hidden,
        heads=weights.heads,
        kv_heads=weights.kv_heads,
        head_dim=weights.head_dim,
        ffn=weights.ffn,
        vocab=weights.vocab_size,
        eps=weights.eps,
        windows=tuple(layer.window or 0 for layer in weights.layers),
        qkv_bias=first.qkv_bias is not None,
        out_bias=first.o_bias is not None,
        qk_norm=first.q_norm is not None,
        tied=weights.head.data.data_ptr() == weights.embedding.data_ptr(),
        inverse_frequencies=tuple(frequencies.float().tolist()),
        rotary_scale=float(rotary.attention_scaling),  # type: ignore[arg-type]
    )


def _padded(outputs: int) -> int:
    return -(-outputs // LANES) * LANES


# -- on disk ------------------------------------------------------------------------------------------------------


def save_packed(packed: Packed, path: Path, about: str = "") -> None:
    """One safetensors file; the plan, and what there is to say ``about`` the model, are in its header."""
    header = {
        "version": VERSION,
        "plan": json.dumps(asdict(packed.plan)),
        "about": about,
        "sha256": _digest(packed.data),
    }
    with replacing(path, guarded=True) as work:
        try:
            save_file({"data": packed.data}, work, metadata=header)
        except SafetensorError as error:  # what a full disk is called there
            raise OSError(str(error)) from error


def said_about(path: Path) -> str:
    """What ``save_packed`` was told about the model; nothing if the file is damaged."""
    try:
        with safe_open(path, "pt") as file:
            return str((file.metadata() or {}).get("about", ""))
    except SafetensorError:
        return ""


def load_packed(path: Path) -> Packed | None:
    """Read a file of ``save_packed``; None if it is of another version, or damaged. PermissionError if others can have
    written it: nothing in it is looked at but its size."""
    os.close(open_guarded(path))
    try:
        return _read_packed(path)
    except SafetensorError:
        return None


def _digest(data: Tensor) -> str:
    return hashlib.sha256(data.numpy().data).hexdigest()


def _read_packed(path: Path) -> Packed | None:
    with safe_open(path, "pt") as file:
        about = file.metadata() or {}
        if about.get("version") != VERSION:
            return None
        values = json.loads(about["plan"])
        if set(values) != {f.name for f in fields(Plan)}:
            return None
        lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        packed = Packed(Plan(**values | lists))
        stored = file.get_tensor("data")
        # Files of versions that noted no digest are taken as they are.
        if stored.numel() != packed.bytes or about.get("sha256", "") not in ("", _digest(stored)):
            return None
        packed.data.copy_(stored)
    return packed
