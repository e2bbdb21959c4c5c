"""What the floors above ask of a model that runs over a slab.

Knows: the calls, and what of them follows from ``forward`` alone. Does not know: how any model is run.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from ..maths.tree import Topology
from ..maths.vocab_ops import VocabOps
from .cpu.packed import Packed
from .kvcache import Slab
from .pieces import Pieces, check_pieces

__all__ = ["DeviceRunner", "ModelRunner"]


class ModelRunner(Protocol):
    """A model, its slab, and one call to run it. Rows of a batch are a slice of the slab.

    A runner derives from this and has a ``_forward``.
    """

    slab: Slab
    vocab_size: int  # rows of the output head; may exceed the tokenizer's
    device: torch.device  # where tokens go in and logits come out
    dtype: torch.dtype
    max_len: int
    #: runs on kernels with threads of their own, on whose cores torch's would wait in a busy loop
    own_threads: bool = False
    #: a token's logits are the same bits in every forward: alone, among others, behind keys made in any company
    invariant: bool = False
    #: prompt tokens from which on a wider forward takes hardly less time for each; None: not known
    enough_to_read: int | None = None
    #: weights that lie packed for kernels on a CPU: another runner may share them
    packed: Packed | None = None
    #: nodes that a tree may have in one forward, the root included; None: as many as there is room for
    most_nodes: int | None = None
    #: rows of a forward may differ in width, and it takes no longer than its tokens (``forward_ragged``)
    ragged: bool = False

    @property
    def vocab_ops(self) -> VocabOps:
        """The loops over the vocabulary that suit where the logits come out."""

    @torch.inference_mode()
    def forward(
        self,
        rows: slice,
        tokens: Tensor,
        lengths: Sequence[int],
        topology: Topology | None = None,
        keep: int | None = None,
    ) -> Tensor:
        """Run ``tokens`` [R, N] behind the first ``lengths[i]`` keys of each row; logits [R, keep or N, V].

        Tokens are left-aligned; padding at the end of short rows is harmless. ``keep=k`` returns the last k
        positions only; ``keep=0`` none, which may skip the output head. The new keys are written past the
        row's end and become live when the caller says so (``slab.extend``).
        """
        count, width = tokens.shape
        if count != len(lengths) or count != rows.stop - rows.start or rows.stop > self.slab.rows:
            raise ValueError(f"{count} rows of tokens, {len(lengths)} lengths and rows {rows} do not agree")
        tree = topology if topology is not None and not topology.is_chain else None
        if tree is not None and tree.width != width:
            raise ValueError(f"{width} tokens a row for a tree of {tree.width} nodes")
        return self._forward(rows, tokens, lengths, tree, keep)

    def _forward(
        self, rows: slice, tokens: Tensor, lengths: Sequence[int], tree: Topology | None, keep: int | None
    ) -> Tensor:
        """The same, of arguments that agree. ``tree``: None for chains."""

    def forward_ragged(self, rows: slice, lines: Sequence[Sequence[int]], lengths: Sequence[int]) -> list[Tensor]:
        """``forward`` for chains, each row with its own number of tokens: for each the logits [n, V] of its n tokens.
        Here: padded to the widest."""
        widest = max(map(len, lines))
        tokens = torch.tensor([[*line, *[0] * (widest - len(line))] for line in lines], device=self.device)
        found = self.forward(rows, tokens, lengths)
        return [logits[: len(line)] for logits, line in zip(found, lines, strict=True)]

    def read(self, pieces: Pieces, *, logits: bool = True) -> Tensor:
        """Read tokens into several rows in one forward; pieces are (row, tokens), each row once, in any order.

        Each row's tokens go behind its live keys and become live. Logits [P, V] of each piece's last token; [P, 0]
        without ``logits``, which may skip the output head. A piece that does not fit is a ValueError, and then nothing
        was read. Here: one forward after another.
        """
        check_pieces(self.slab, pieces)
        found = []
        for row, tokens in pieces:
            ids = torch.tensor([tokens], device=self.device)
            found.append(self.forward(slice(row, row + 1), ids, self.slab.lengths[row : row + 1], keep=int(logits)))
            self.slab.extend(row, tokens)
        if not found or not logits:
            return torch.empty(len(found), self.vocab_size if logits else 0, dtype=self.dtype, device=self.device)
        return torch.cat(found)[:, 0]

    def read_all(self, pieces: Pieces) -> list[Tensor]:
        """``read``, with the logits [n, V] of every one of a piece's n tokens. How many tokens there may be is the
        caller's business: their logits are all in memory at once. Here: one forward after another."""
        check_pieces(self.slab, pieces)
        found = []
        for row, tokens in pieces:
            ids = torch.tensor([tokens], device=self.device)
            found.append(self.forward(slice(row, row + 1), ids, self.slab.lengths[row : row + 1])[0])
            self.slab.extend(row, tokens)
        return found

    def prefill(self, row: int, tokens: Sequence[int], start: int | None = None, chunk: int = 512) -> Tensor:
        """Read a long list of tokens into one row, ``chunk`` at a time; logits [1, 1, V] of the last one.

        ``start`` defaults to the row's end; an earlier one rolls the row back.
        """
        if not tokens:
            raise ValueError("nothing to prefill")
        if start is not None:
            self.slab.truncate(row, start)
        last = range(0, len(tokens), chunk)[-1]
        for at in range(0, last, chunk):
            self.read([(row, tokens[at : at + chunk])], logits=False)
        return self.read([(row, tokens[last:])])[:, None]

    def on_device(self) -> DeviceRunner | None:
        """This runner, if its rounds can be captured."""
        return None


class DeviceRunner(ModelRunner, Protocol):
    """A runner that can also be told its rows' lengths by a tensor on the device, without the host knowing them."""

    #: contexts that captured rounds are made for, beside the slab's capacity; see ``device_forward``
    BOUNDS: tuple[int, ...] = (2048, 16384, 131072)
    #: runs on kernels that are compiled beforehand; capturing a model's own modules takes ten times as long
    compiled: bool = False

    def device_forward(self, tokens: Tensor, lengths: Tensor, keep: int, bound: int) -> Tensor:
        """Logits [R, keep, V] of tokens [R, N] in rows 0 .. R-1 behind lengths [R] keys.

        No running row gets past ``bound`` keys; an idle one may, and what it computes then may be anything.
        """

    def brief(self) -> AbstractContextManager[None]:
        """Inside, a forward may do as little as it takes to have run every kernel once. Here that is all of it."""
        return nullcontext()

    def capture_reads(self) -> None:
        """Prompts will be read: what can be captured of that is captured now. Here that is nothing."""
        return None

    def beside(self) -> AbstractContextManager[None]:
        """What is launched inside may run at the same time as something else on the device."""
        return nullcontext()

    def on_device(self) -> DeviceRunner | None:
        return self
