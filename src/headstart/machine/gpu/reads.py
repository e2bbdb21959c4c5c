"""Reading prompts without the host: a read's launches are captured for a few numbers of tokens, and replayed.

Knows: which sizes are captured, and how a read of fewer tokens is made up to one. Does not know: what a model's layers
do, or who owns a row.

A read takes the host some hundred launches, which is longer than a small model needs for the work, and than a large
one needs for a short prompt. Tokens that only fill a size up stand behind the end of the cache: nothing is stored for
them. Tiles of attention that only fill the table up see no key, and end at once. The head is not captured: it is a
kernel or two, and depends on how many pieces there are.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from .graphs import Graphs
from .model import FusedModel
from .ragged import Packed, Piece, cut, on_host, parts_of
from .step import Step

__all__ = ["SIZES", "CapturedReads"]

SIZES = (32, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)  # tokens
_MOST_PIECES = 64


class CapturedReads:
    """The reads of one model, captured when this is made. It must not change afterwards."""

    def __init__(self, model: FusedModel, rows: int, warm: Callable[[Callable[[], None]], None]) -> None:
        """``rows`` of the cache. ``warm``: runs what it is given, as briefly as it takes to have run every kernel."""
        self._model, self._tile = model, model.tokens_in_tile
        device = model.weights.device
        self._pieces = min(rows, _MOST_PIECES)
        self._table = torch.zeros(sum(self._parts(SIZES[-1])), dtype=torch.int64, device=device)
        self._x = torch.zeros(SIZES[-1], model.weights.hidden, dtype=model.weights.dtype, device=device)
        graphs = Graphs(device)
        self._replay: dict[int, Callable[[], None]] = {}
        for size in reversed(SIZES):  # the largest first, so that the others find their memory there
            self._write(size, ((), (), (), ()))
            body = partial(self._stream, size)
            self._replay[size] = graphs.capture(body, (), partial(warm, body))

    def takes(self, pieces: Sequence[Piece], keep: int = 1) -> bool:
        fits = 0 < len(pieces) <= self._pieces and sum(len(tokens) for _, _, tokens in pieces) <= SIZES[-1]
        return fits and keep <= _MOST_PIECES

    @torch.inference_mode()
    def read(self, pieces: Sequence[Piece], keep: int) -> Tensor:
        """Logits float32 [P, keep, V] of the last ``keep`` tokens of each piece; 0: none. More than one only of a
        single piece."""
        parts = parts_of(pieces, self._tile)
        tokens = len(parts[0])
        if keep > 1:
            parts = *parts[:3], list(range(tokens - keep, tokens))
        size = SIZES[bisect_left(SIZES, tokens)]
        self._write(size, parts)
        self._replay[size]()
        packed = self._packed(size, [len(part) for part in parts])
        rows = len(parts[3])
        logits = self._model.last_logits(self._x[:tokens], Step(rows, 0, packed.places, packed=packed), min(keep, 1))
        return logits if keep <= 1 else logits.transpose(0, 1)

    def _stream(self, size: int) -> None:
        packed = self._packed(size, self._parts(size))
        self._model.stream(packed.tokens, Step(0, 0, packed.places, packed=packed), self._x[:size])

    def _parts(self, size: int) -> tuple[int, int, int, int]:
        """How long the parts of the table are: tokens, places, tiles of attention, last tokens. All even."""
        return size, 2 * size, 4 * (size // self._tile + self._pieces), _MOST_PIECES

    def _packed(self, size: int, lengths: Sequence[int]) -> Packed:
        sizes = self._parts(size)
        return cut(self._table[: sum(sizes)], sizes, lengths)

    def _write(self, size: int, parts: Sequence[Sequence[int]]) -> None:
        sizes, nowhere = self._parts(size), (0, self._model.capacity)
        host = on_host(parts, sizes, self._table.device, ((0,), nowhere, (0,), (0,)))
        self._table[: len(host)].copy_(host, non_blocking=True)
