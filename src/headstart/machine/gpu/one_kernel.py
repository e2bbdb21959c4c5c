"""A small draft's layers in one kernel, compiled for the model's sizes while it is loaded.

Knows: which models and steps that kernel takes, and what ``one_kernel.cu`` is told. Does not know: what is drafted.

The kernel is CUDA C++, because programs of a Triton kernel cannot talk to each other. Models and steps that it does not
take, and machines without NVRTC, go on with five kernels a layer.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from ..lower import Weights
from .compile.nvrtc import Kernel, binary
from .compile.precompile import rehearsing
from .tiles import pieces

__all__ = ["WholeModel", "open_whole", "why_not_whole"]

log = logging.getLogger(__name__)

WARPS = 8  # of a program
KEYS = 128  # a program's share of a head's keys
SPLITS = (4, 8)  # such shares of a head: a kernel for each, and for each number of tokens
TOKENS = (1, 2)
_VALUES = 6  # of a quad, as in parts.cuh
_SLICES = (1, 2, 4, 8)  # up to one for each warp
_COPIES = 8  # of a board: measured, 1 makes a step 7% slower, 32 5%
_WORDS = 96  # registers that a thread has for weights: half of all


class _Sizes:
    """How a model is dealt to programs."""

    def __init__(self, weights: Weights, programs: int) -> None:
        w = weights
        self.programs = programs
        vocab_ops, qkv = w.heads * w.head_dim, (w.heads + 2 * w.kv_heads) * w.head_dim
        rows_qkv, rows_x, rows_f = self.rows = [2 * pieces(n, 2 * programs) for n in (qkv, w.hidden, w.ffn)]
        self.with_x = pieces(w.hidden, rows_x)
        self.products = [(rows_qkv, w.hidden), (rows_x, vocab_ops), (2 * rows_f, w.hidden), (rows_x, w.ffn)]
        x = self.with_x * pieces(rows_x, _VALUES)
        heads = w.heads * max(SPLITS) * w.head_dim // 4
        quads = [
            pieces(qkv, rows_qkv) * pieces(rows_qkv, _VALUES),
            heads,
            x,
            pieces(w.ffn, rows_f) * pieces(rows_f, _VALUES),
            x,
        ]
        self.boards = [_COPIES * max(TOKENS) * count for count in quads]

        self.slices = [_slices(rows, inputs) for rows, inputs in self.products]

    @property
    def words(self) -> int:
        """The most registers a thread has for weights: those of one product and of the next."""
        each = [_words(*product, slices) for product, slices in zip(self.products, self.slices, strict=True)]
        return max(a + b for a, b in zip(each, each[1:] + each[:1], strict=True))


def _words(rows: int, inputs: int, slices: int) -> int:
    return pieces(rows * slices, WARPS) * (inputs // slices // 64)


def _slices(rows: int, inputs: int) -> int:
    """Into how many slices a row is cut for the warps to share: what leaves the least to each of them."""
    return min((s for s in _SLICES if s == 1 or inputs % (64 * s) == 0), key=lambda s: _words(rows, inputs, s))


def why_not_whole(weights: Weights, programs: int) -> str | None:
    """None if the kernel can run this model with so many programs, else the reason."""
    w, sizes = weights, _Sizes(weights, programs)
    if w.dtype != torch.bfloat16 or any(m.bits != 16 for m in (w.layers[0].qkv, w.layers[0].down)):
        return "its weights are not bfloat16"
    if any(n % 64 for n in (w.hidden, w.ffn, w.heads * w.head_dim)):
        return "its widths are not multiples of 64"
    if w.head_dim not in (32, 64, 128):
        return "its heads are not 32, 64 or 128 wide"
    if w.parts:  # none of them is here
        return f"it {' and '.join(sorted(w.parts))}"
    if max(sizes.rows) > 64 or sizes.words > _WORDS:
        return "it is too large"
    if w.heads * max(SPLITS) > programs:
        return "it has too many heads"
    return None


class _Boards(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("qkv", "attended", "middle", "hidden", "x")]


class WholeModel:
    """All layers of a lowered model, for one row of its buffers and one or two tokens."""

    def __init__(
        self, weights: Weights, buffers: Sequence[tuple[Tensor, Tensor]], rotary: tuple[Tensor, Tensor], programs: int
    ) -> None:
        """Compiling begins, on threads of its own; ``takes`` waits for it, but in a rehearsal."""
        w, device = weights, weights.device
        self._weights, self._rotary = weights, rotary
        self._sizes = _Sizes(weights, programs)
        self._row, self._capacity = buffers[0][0].stride(0), buffers[0][0].shape[2]
        self._layers = torch.tensor(pointers(w, buffers), dtype=torch.int64, device=device)
        self._quads = torch.zeros(sum(self._sizes.boards), 4, dtype=torch.int32, device=device)
        parts = torch.split(self._quads, self._sizes.boards)
        self._boards = _Boards(*(part.data_ptr() for part in parts))
        self._epoch = torch.zeros(1, dtype=torch.int32, device=device)
        self._kernels: dict[tuple[int, int], Kernel] = {}
        architecture = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
        with_threads = ThreadPoolExecutor(len(TOKENS) * len(SPLITS))
        self._binaries: dict[tuple[int, int], Future[bytes]] | None = {
            (tokens, splits): with_threads.submit(
                binary, "one_kernel", source(w, programs, tokens, splits), architecture
            )
            for tokens in TOKENS
            for splits in SPLITS
        }
        with_threads.shutdown(wait=False)

    def takes(self, tokens: int, bound: int) -> bool:
        """Can this be a step of so many tokens, where the row will not have more than ``bound`` keys?"""
        return tokens in TOKENS and bound <= KEYS * max(SPLITS) and (self._expected() or self._ready())

    def _expected(self) -> bool:
        """In a rehearsal, while it is being compiled: it is not waited for."""
        if self._binaries is None or not rehearsing():
            return False
        return not any(made.done() and made.exception() is not None for made in self._binaries.values())

    def _ready(self) -> bool:
        """Load what was compiled. False if that failed."""
        if self._binaries is not None:
            try:
                for key, made in self._binaries.items():
                    self._kernels[key] = Kernel(made.result(), "step", self._weights.device)
            except (OSError, RuntimeError) as error:
                self._kernels = {}
                log.warning("the draft runs layer by layer: %s", error)
            self._binaries = None
        return bool(self._kernels)

    def step(self, tokens: Tensor, lengths: Tensor, row: int, bound: int) -> tuple[Tensor, Tensor]:
        """Tokens [N] to slots lengths[0] and on of a row. Of the last: scaled [1, H] and squares [1, parts].

        Those are what ``matmul`` wants for the head. tokens, lengths: int64, contiguous. Ask ``takes`` first.
        """
        w, splits = self._weights, next(s for s in SPLITS if bound <= KEYS * s)
        scaled = torch.empty(1, w.hidden, device=w.device, dtype=w.dtype)
        squares = torch.empty(1, self._sizes.with_x, device=w.device)
        if self._expected():
            return scaled, squares
        arguments = [
            self._layers, w.embedding, w.norm, tokens, lengths, *self._rotary, ctypes.c_int64(self._capacity),
            ctypes.c_int64(row * self._row), self._boards, self._epoch, scaled, squares,
        ]  # fmt: skip
        self._kernels[len(tokens), splits].launch(self._sizes.programs, 32 * WARPS, arguments)
        return scaled, squares


def pointers(weights: Weights, buffers: Sequence[tuple[Tensor, Tensor]]) -> list[list[int]]:
    """Where each layer's tensors are, in the order of ``struct Layer`` in one_kernel.cu."""
    return [
        [
            0 if tensor is None else tensor.data_ptr()
            for tensor in (
                a.input_norm, a.qkv.data, a.qkv_bias, a.o.data, a.o_bias, a.post_norm, a.gate_up.data, a.down.data,
                *pair,
            )
        ]
        for a, pair in zip(weights.layers, buffers, strict=True)
    ]  # fmt: skip


def source(weights: Weights, programs: int, tokens: int, splits: int, machine: str | None = None) -> str:
    """The kernel for these sizes, as C++. ``machine``: instead of words.cuh."""
    w, layer, here = weights, weights.layers[0], Path(__file__).parent
    sizes = _Sizes(w, programs)
    values = {
        "LAYERS": len(w.layers), "H": w.hidden, "F": w.ffn, "HEADS": w.heads, "KV": w.kv_heads, "D": w.head_dim,
        "T": tokens, "PROGRAMS": programs, "WARPS": WARPS, "KEYS": KEYS, "SPLITS": splits, "COPIES": _COPIES,
        "QKV_BIAS": int(layer.qkv_bias is not None), "O_BIAS": int(layer.o_bias is not None),
        **dict(zip(("R_QKV", "R_X", "R_F"), sizes.rows, strict=True)),
        **dict(zip(("S_QKV", "S_O", "S_F", "S_DOWN"), sizes.slices, strict=True)),
    }  # fmt: skip
    told = [f"constexpr int {name} = {value};" for name, value in values.items()]
    words = machine if machine is not None else (here / "words.cuh").read_text(encoding="utf-8")
    files = [(here / name).read_text(encoding="utf-8") for name in ("parts.cuh", "one_kernel.cu")]
    return "\n".join([*told, f"constexpr float EPS = {w.eps:e}f;", words, *files])


def open_whole(
    weights: Weights, buffers: Sequence[tuple[Tensor, Tensor]], rotary: tuple[Tensor, Tensor, int]
) -> WholeModel | None:
    """The model in one kernel, or None where that cannot be."""
    if weights.device.type != "cuda":
        return None
    programs = torch.cuda.get_device_properties(weights.device).multi_processor_count
    reason = why_not_whole(weights, programs)
    if reason is not None:
        log.info("the draft runs layer by layer: %s", reason)
        return None
    return WholeModel(weights, buffers, rotary[:2], programs)
