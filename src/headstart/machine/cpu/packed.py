"""A decoder's weights in the kernels' form: one block of memory, and a plan of what lies where.

Knows: how tensors are brought there on all cores, and the file that keeps them. Does not know: where tensors come from,
how rows are packed (``formats``) or multiplied.

``int8``: a scale for 32 weights, 8.5 bits a weight. ``int4``: a scale and a minimum for 32 weights, 5 bits a weight;
where a model is rounded to it, embedding and output head are int8. ``q4_k``, ``q5_k`` and ``q6_k`` are GGUF's. A file's
own numbers in Q4_0 and Q4_1 (int4), Q8_0 and Q5_0 (int8) and these three are copied, not rounded.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ..files import open_guarded, replacing
from ..slab_layer import on_cache_line
from ..stored import Rows, Stored, in_memory
from .formats import KINDS, as_floats, pack_rows
from .library import MatrixRecord, kernels
from .names import Parts, parts_from
from .plan import LANES, Matrix, Plan, plan_from, plan_of, plan_text, why_not

__all__ = ["Packed", "Plan", "load_packed", "pack_model", "said_about", "save_packed", "why_not"]

VERSION = "2"  # of the file
_PIECE = 1 << 20  # bytes of weights that a thread packs at a time
_AHEAD = 3  # matrices that are under way at once


class Packed:
    """A plan and the memory it describes."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._offsets, self.bytes = plan.layout()
        # On a cache line, in large pages where the system has them: asked for before the memory is touched.
        self.data = on_cache_line(self.bytes)
        kernels().hs_advise(self.data.data_ptr(), self.bytes)
        self._matrices = {matrix.name: matrix for matrix in plan.matrices()}
        self._lengths = dict(plan.vectors())

    def address(self, name: str) -> int | None:
        """Where a part lies; None if the model has no such part."""
        offset = self._offsets.get(name)
        return None if offset is None else self.data.data_ptr() + offset

    def matrix(self, name: str) -> MatrixRecord:
        """A matrix as the kernels know it, with its part of a bias; an empty one if the model has no such matrix."""
        matrix = self._matrices.get(name)
        if matrix is None:
            return MatrixRecord()
        at = self.address(f"{matrix.part}_bias")
        own = None if at is None else at + 4 * matrix.first
        return MatrixRecord(KINDS[matrix.kind], matrix.padded, matrix.inputs, self.address(name), own)

    def rows(self, name: str, which: Tensor) -> Tensor:
        """Rows of a matrix as floats [len(which), inputs], as the kernels see them."""
        record = self.matrix(name)
        found = torch.empty(len(which), record.inputs)
        numbers = which.to(torch.int32).contiguous()
        kernels().hs_unpack(ctypes.byref(record), numbers.data_ptr(), len(which), found.data_ptr())
        return found

    def fill(self, parts: Parts, tell: Callable[[float], None] = lambda share: None) -> None:
        """Pack a model's tensors, each from where it lies into its place, on all cores. ``tell``: how much is done.

        Nothing of a file is held but what is being packed.
        """
        for name in self._lengths:
            self._put_vector(name, parts[name])
        left = Counter(matrix.part for matrix in self.plan.matrices())
        done, total = 0, sum(stored.size for part in left for stored in parts[part])
        pending: deque[tuple[Matrix, list[Future[None]]]] = deque()
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            for matrix in (*self.plan.matrices(), None):
                if matrix is not None:
                    for stored in parts[matrix.part]:
                        stored.expect()
                    pieces = self._pieces(matrix, parts[matrix.part])
                    pending.append((matrix, [pool.submit(_pack_pieces, *piece) for piece in pieces]))
                while pending and (matrix is None or len(pending) > _AHEAD):
                    finished, futures = pending.popleft()
                    for future in futures:
                        future.result()
                    left[finished.part] -= 1
                    if not left[finished.part]:
                        done += sum(stored.size for stored in parts[finished.part])
                        tell(done / total)

    def _put_vector(self, name: str, stored: Sequence[Stored]) -> None:
        at, length = self._offsets[name], self._lengths[name]
        found = torch.cat([as_floats(each) for each in stored])
        found = found[torch.from_numpy(self.plan.lying(name, np.arange(length, dtype=np.int32)))]
        self.data[at : at + 4 * length].view(torch.float32).copy_(found)

    def _pieces(self, matrix: Matrix, sources: Sequence[Stored]) -> Iterator[tuple[str, list[_Piece]]]:
        """A matrix cut into what one thread packs at a time: its kind, and runs of outputs that have one source."""
        start, rows = self.address(matrix.name), self.plan.rows(matrix)
        assert start is not None
        ends = np.cumsum([stored.shape[0] for stored in sources])
        which = np.searchsorted(ends, np.maximum(rows, 0), side="right")
        own = np.where(rows < 0, -1, rows - np.array([0, *ends[:-1]])[which]).astype(np.int32)
        for number, stored in enumerate(sources):
            if stored.order is not None:
                mine = (which == number) & (rows >= 0)
                own[mine] = stored.order[own[mine]]
        tile = int(kernels().hs_packed_bytes(KINDS[matrix.kind], LANES, matrix.inputs))
        most = max(_PIECE // tile, 1) * LANES  # outputs
        edges = sorted({0, len(rows), *(np.flatnonzero(np.diff(which)) + 1).tolist(), *range(0, len(rows), most)})
        found: list[_Piece] = []
        for first, last in pairwise(edges):
            found.append((sources[which[first]], own[first:last], start + first // LANES * tile))
            if last % most == 0 or last == len(rows):
                yield matrix.kind, found
                found = []


_Piece: TypeAlias = tuple[Stored, Rows, int]  # rows of a source, and the address of the first tile


def _pack_pieces(kind: str, pieces: list[_Piece]) -> None:
    """Each source is read once: gate and up lie in turn, a few rows of each."""
    held: dict[int, tuple[int, Stored]] = {}
    for stored, rows, address in pieces:
        if id(stored) not in held:
            held[id(stored)] = stored.held(np.concatenate([more for each, more, _ in pieces if each is stored]))
        first, near = held[id(stored)]
        pack_rows(kind, near, np.where(rows < 0, rows, rows - first) if first else rows, address)


@torch.no_grad()
def pack_model(model: nn.Module, kind: str) -> Packed:
    """Round and pack a live model's weights. Call ``why_not`` first."""
    packed = Packed(plan_of(model, kind))
    weights = {name: in_memory(weight) for name, weight in model.state_dict().items() if weight.is_floating_point()}
    packed.fill(parts_from(packed.plan, weights, live=True))
    return packed


# -- on disk ------------------------------------------------------------------------------------------------------


def save_packed(packed: Packed, path: Path, about: str = "") -> None:
    """One safetensors file; the plan, and what there is to say ``about`` the model, are in its header."""
    header = {
        "version": VERSION,
        "plan": plan_text(packed.plan),
        "about": about,
        "sha256": _digest(packed.data),
    }
    header["sha256_plan"] = hashlib.sha256(header["plan"].encode()).hexdigest()
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
    except (SafetensorError, ArithmeticError, LookupError, TypeError, ValueError, RecursionError):  # in its header
        return None


def _digest(data: Tensor) -> str:
    return hashlib.sha256(data.numpy().data).hexdigest()


def _read_packed(path: Path) -> Packed | None:
    with safe_open(path, "pt") as file:
        about = file.metadata() or {}
        if about.get("version") != VERSION:
            return None
        plan, digest = plan_from(about["plan"]), hashlib.sha256(about["plan"].encode()).hexdigest()
        if plan is None or about.get("sha256_plan", digest) != digest:
            return None
        if file.get_slice("data").get_shape() != [plan.layout()[1]]:  # before there is memory for it
            return None
        packed = Packed(plan)
        stored = file.get_tensor("data")
        # Files of versions that noted no digest are taken as they are.
        if about.get("sha256", "") not in ("", _digest(stored)):
            return None
        packed.data.copy_(stored)
    return packed
