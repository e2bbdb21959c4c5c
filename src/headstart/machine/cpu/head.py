"""A draft head on the CPU's own kernels: a whole drafted chain in one call.

Knows: how to pack a head's matrices and how to hand slots, tokens and features to the kernel. Does not know: the head's
arithmetic (``machine.head`` says it in torch, csrc/head.cpp does it here), rounds, or who asks.

The matrices are rounded: a guess may be a little off, since the target checks it. The pairs of channels that a head
turns together lie side by side in ``machine.head`` and half a head apart in the kernels, so they are reordered here.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from ctypes import CFUNCTYPE, POINTER, Structure, c_float, c_int32, c_int64, c_uint8, c_void_p
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ...maths.bitmask import only
from ...types import Mask
from ..head import HeadNet
from ..kvcache import Slab
from ..slab_layer import on_cache_line
from .formats import KINDS
from .library import MatrixRecord, each, kernels, pool
from .plan import GROUP, LANES
from .sampling import REJECTING, Knobs

__all__ = ["HeadKernel", "Masks", "why_not"]

MOST_ROWS = 64  # of one call
_UNSAID = -2  # where no token was drafted; -1 is one whose numbers broke down


class _HeadRecord(Structure):  # see csrc/head.cpp
    _fields_ = [
        *each(c_int32, "target_hidden parts width heads kv_heads head_dim ffn vocab capacity positions window"),
        ("eps", c_float),
        *each(c_int64, "row_stride head_stride"),
        *each(MatrixRecord, "fuse embed qkv out gate_up down head embedding"),
        ("plain_embedding", c_void_p),
        ("tokens", c_int32),
        *each(c_void_p, "ids cosines sines ones keys values"),
    ]


class _CallRecord(Structure):
    _fields_ = [
        *each(c_int32, "first_row rows reading answering"),
        *each(c_void_p, "counts starts tokens features y logits"),
        ("most", c_int32),
        ("budgets", c_void_p),
        *each(c_float, "min_chance_to_extend least_next least_first temperature"),
        *each(c_void_p, "drafted knobs q follow masked"),
        ("words", c_int32),
    ]


_FOLLOW = CFUNCTYPE(c_int64, c_int32, c_int32, c_int64, c_int64, POINTER(c_void_p))


def why_not(net: HeadNet) -> str | None:
    """None if the kernels can run such a head, where there are kernels; else the reason in words."""
    c = net.config
    if net.fuse.device.type != "cpu":
        return "it is not on the CPU"
    if any(size % GROUP for size in (c.target_hidden, c.width, c.head_dim, c.ffn)) or c.head_dim > 16 * LANES:
        return f"its sizes are not multiples of {GROUP}"
    return None


class HeadKernel:
    """A head, packed, over the keys and values of a slab that it makes its own layer in."""

    def __init__(
        self, net: HeadNet, slab: Slab, embedding: Tensor | MatrixRecord, *, threads: int, kind: str = "int8"
    ) -> None:
        """``embedding``: the target's, [tokens, hidden] or packed. Whoever passes it keeps the memory alive."""
        c = net.config
        self._kernels, self._threads, self.config = kernels(), threads, c
        like = torch.empty(1, c.kv_heads, 1, c.head_dim, dtype=torch.float16)
        slab.allocate([(like, like)])
        layer = slab.layers[-1]
        self._memory: list[Tensor] = [layer.keys, layer.values]
        paired = torch.arange(c.ffn).view(-1, GROUP)
        paired = torch.stack([paired, paired + c.ffn], dim=1).flatten()
        turn = net.rotary(slab.capacity, torch.device("cpu"))[:, 0]  # [capacity, dim / 2]
        record = _HeadRecord(
            target_hidden=c.target_hidden,
            parts=len(c.watch),
            width=c.width,
            heads=c.heads,
            kv_heads=c.kv_heads,
            head_dim=c.head_dim,
            ffn=c.ffn,
            vocab=c.vocab,
            capacity=slab.capacity,
            positions=slab.capacity,
            window=c.window,
            eps=c.eps,
            row_stride=layer.keys.stride(0),
            head_stride=layer.keys.stride(1),
            fuse=self._packed(net.fuse, kind),
            embed=self._packed(net.embed, kind),
            qkv=self._packed(net.qkv, kind, _halved(net)),
            out=self._packed(net.out, kind),
            gate_up=self._packed(net.gate_up, kind, paired),
            down=self._packed(net.down, kind),
            head=self._packed(net.head, kind),
            tokens=c.target_vocab,
            ids=self._kept(net.ids.to(torch.int32)),
            cosines=self._kept(turn.real.float()),
            sines=self._kept(turn.imag.float()),
            ones=self._kept(torch.ones(max(c.target_hidden, c.width))),
            keys=layer.keys.data_ptr(),
            values=layer.values.data_ptr(),
        )
        if isinstance(embedding, MatrixRecord):
            record.embedding = embedding
        else:
            record.plain_embedding = self._kept(embedding.detach().float())
        self._handle = int(self._kernels.hs_head_new(ctypes.addressof(record)))
        weakref.finalize(self, self._kernels.hs_head_free, self._handle).atexit = False  # as in ``CpuRunner``
        self.steps = 0  # of the last chains, one whose token was not kept included
        self._y = torch.zeros(slab.rows, c.width)
        self._logits = torch.zeros(slab.rows, c.vocab)

    # -- what a drafter asks for. A row's ``feed``: tokens of its slots from ``start`` on. ``features`` [n, F]: those
    # of the tokens before them (one less where the first slot is the text's first).

    def remember(self, row: int, start: int, feed: Sequence[int], features: Tensor | None) -> None:
        """Store the keys and values of a row's slots, and no more."""
        self._read(row, [start], [feed], [features], answering=False)

    def read(self, starts: Sequence[int], feed: Sequence[Sequence[int]], features: Sequence[Tensor | None]) -> Tensor:
        """Store the slots of rows 0 .. and return what the last one of each says: logits [R, vocab], overwritten by the
        next call. A row without a feed only comes along."""
        self._read(0, starts, feed, features)
        return self._logits[: len(starts)]

    def step(self, slots: Sequence[int], tokens: Sequence[int]) -> Tensor:
        """The same for one slot more a row, on the head's own output of the step before."""
        rows = len(slots)
        starts, ids = (c_int32 * rows)(*slots), (c_int64 * rows)(*tokens)
        self._run(
            rows=rows, answering=1, starts=ctypes.addressof(starts), tokens=ctypes.addressof(ids), **self._answers()
        )
        return self._logits[:rows]

    def chains(
        self,
        starts: Sequence[int],
        feed: Sequence[Sequence[int]],
        features: Sequence[Tensor | None],
        budgets: Sequence[int],
        *,
        temperature: float,
        min_chance_to_extend: float = 0.0,
        least_next: float = 0.0,
        least_first: float = 0.0,
        knobs: Sequence[Knobs] = (),
        q: Tensor | None = None,
        masks: Masks | None = None,
    ) -> list[list[int]]:
        """Read as ``read`` does, and draft at most ``budgets[r]`` tokens a row: none but the first that is reached
        with less than ``min_chance_to_extend``, and none behind one that is reached with less than ``least_next``, by
        the probabilities at ``temperature``. ``least_first``: what a row's first token needs, unless it is the
        likeliest of all rows' first ones.

        ``knobs``: how each row draws its tokens; without, all take the likeliest. ``q`` [R, most, V], float32 and
        contiguous: to be filled with what they were drawn from, for rows that follow the token or the block rule.
        ``masks``: what grammars allow behind each row's drafted tokens.
        """
        rows, most = len(starts), max(budgets)
        drafted, wanted = (c_int64 * (rows * most))(*[_UNSAID] * (rows * most)), (c_int32 * rows)(*budgets)
        settings = (Knobs * len(knobs))(*knobs)
        asked = _Asked(masks, self.config.target_vocab) if masks is not None else None
        if q is None and any(row.rule in REJECTING for row in knobs):
            raise ValueError("rejection sampling needs a place for q")
        if q is not None and (q.shape != (rows, most, self.config.target_vocab) or q.stride(1) != q.shape[2]):
            raise ValueError(f"q must be [{rows}, {most}, {self.config.target_vocab}] and contiguous")
        self._read(
            0,
            starts,
            feed,
            features,
            most=most,
            budgets=ctypes.addressof(wanted),
            min_chance_to_extend=min_chance_to_extend,
            least_next=least_next,
            least_first=least_first,
            temperature=temperature,
            drafted=ctypes.addressof(drafted),
            knobs=ctypes.addressof(settings) if knobs else None,
            q=q.data_ptr() if q is not None else None,
            **(asked.fields if asked is not None else {}),
        )
        self.steps = next((n for n in range(most) if drafted[n] == _UNSAID), most)  # all rows take them together
        return [drafted[row * most : row * most + wanted[row]] for row in range(rows)]

    # -- the call

    def _read(
        self,
        first: int,
        starts: Sequence[int],
        feed: Sequence[Sequence[int]],
        features: Sequence[Tensor | None],
        *,
        answering: bool = True,
        **chain: float | None,
    ) -> None:
        rows, size = len(starts), self.config.features
        for start, line, seen in zip(starts, feed, features, strict=True):
            wanted = max(0, len(line) - (start == 0))
            if seen is not None and (seen.shape != (wanted, size) or seen.dtype != torch.float32):
                raise ValueError(f"{len(line)} slots from {start} need features [{wanted}, {size}], float32")
            if seen is None and wanted:
                raise ValueError(f"{len(line)} slots from {start} have no features")
        kept = [None if seen is None else seen.contiguous() for seen in features]
        at = (c_void_p * rows)(*(None if seen is None else seen.data_ptr() for seen in kept))
        counts, begins = (c_int32 * rows)(*map(len, feed)), (c_int32 * rows)(*starts)
        ids = (c_int64 * max(1, sum(map(len, feed))))(*(token for line in feed for token in line))
        self._run(
            first_row=first,
            rows=rows,
            reading=1,
            answering=answering,
            counts=ctypes.addressof(counts),
            starts=ctypes.addressof(begins),
            tokens=ctypes.addressof(ids),
            features=ctypes.addressof(at),
            **self._answers(),
            **chain,
        )

    def _answers(self) -> dict[str, int]:
        return {"y": self._y.data_ptr(), "logits": self._logits.data_ptr()}

    def _run(self, **call: float | None) -> None:
        record = _CallRecord(**call)
        if self._kernels.hs_head(self._handle, pool(self._threads), ctypes.addressof(record)):
            raise ValueError(f"{record.rows} rows; one call takes {MOST_ROWS}")

    # -- memory that the kernel reads

    def _kept(self, tensor: Tensor) -> int:
        self._memory.append(tensor.contiguous())
        return self._memory[-1].data_ptr()

    def _packed(self, weight: Tensor, kind: str, order: Tensor | None = None) -> MatrixRecord:
        rows, inputs = weight.shape
        outputs = -(-rows // LANES) * LANES
        memory = on_cache_line(int(self._kernels.hs_packed_bytes(KINDS[kind], outputs, inputs)))
        numbers = torch.full((outputs,), -1, dtype=torch.int32)
        numbers[:rows] = torch.arange(rows) if order is None else order
        source = weight.detach().float().contiguous()
        self._kernels.hs_pack(KINDS[kind], source.data_ptr(), numbers.data_ptr(), outputs, inputs, memory.data_ptr())
        return MatrixRecord(KINDS[kind], outputs, inputs, self._kept(memory), None)


class Masks(Protocol):
    """Grammars of a draft's rows (``drafters.draft_masks``)."""

    @property
    def masked(self) -> Sequence[bool]:
        """Which rows have one."""

    def mask(self, row: int) -> Mask | None: ...
    def only(self, row: int) -> int | None: ...
    def allows(self, row: int, token: int) -> bool: ...
    def take(self, row: int, token: int) -> None: ...


class _Asked:
    """Masks for the kernel, which asks for them token by token."""

    def __init__(self, masks: Masks, tokens: int) -> None:
        """``tokens``: of the target's vocabulary; a mask has a bit for each."""
        self._masks, self._kept = masks, list[Mask]()
        self._call = _FOLLOW(self._follow)
        self._rows = (c_uint8 * len(masks.masked))(*masks.masked)
        self._words = (tokens + 31) // 32
        self.fields: dict[str, Any] = {
            "follow": ctypes.cast(self._call, c_void_p).value,
            "masked": ctypes.addressof(self._rows),
            "words": self._words,
        }

    def _follow(self, row: int, offset: int, before: int, likely: int, found: Any) -> int:
        if offset:
            self._masks.take(row, before)
        if likely >= 0:
            if (token := self._masks.only(row)) is not None:
                return token
            if self._masks.allows(row, likely):
                return -1
        mask = self._masks.mask(row)
        if mask is None:
            return -1
        if (token := only(mask)) is not None:
            return token
        if len(mask) < self._words:
            mask = np.pad(mask, (0, self._words - len(mask)))
        self._kept.append(mask)  # until the draft is made
        found[0] = mask.ctypes.data
        return -1


def _halved(net: HeadNet) -> Tensor:
    """Rows of qkv, each head of queries and keys with its even channels first."""
    c = net.config
    head = torch.cat([torch.arange(0, c.head_dim, 2), torch.arange(1, c.head_dim, 2)])
    turned = (torch.arange(c.heads + c.kv_heads)[:, None] * c.head_dim + head).flatten()
    return torch.cat([turned, torch.arange(len(turned), len(net.qkv))])
