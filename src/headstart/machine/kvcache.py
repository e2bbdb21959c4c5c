"""The slab: every sequence's keys and values in one preallocated buffer a layer, and a length per row.

Knows: where each row's keys lie, which tokens they belong to, and how rows are handed out and kept warm.
Does not know: what a model, a mask or a request is.

Rollback costs nothing: keys past a row's length are dead and will be overwritten, so forgetting a rejected
draft is setting a length. Rows are always packed in three zones, so that a batch is a slice and never a gather:

    row   0 ... ready-1 | ready ... ready+filling-1 | ... rows-1
          ready           filling (being prefilled)   free (still warm)

A row's number therefore changes when its neighbours come and go: ask ``row(key)`` again in every round.

Whatever interrupts a move (an error, Ctrl-C), a row's length never says more than its memory holds: rows count as empty
while their keys are on the way. Which row belongs to whom may be torn then; ``reset`` starts over.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from .reading import shared_beginning
from .slab_layer import SlabLayer, zeros

__all__ = ["MARGIN", "Slab", "SlabLayer"]

# Slots past max_len. A padded batch writes at length .. length + width - 1 in every row, also in rows that
# asked for fewer tokens; those writes must land somewhere.
MARGIN = 72
LEAST_MARGIN = 16


class Slab(Cache):  # type: ignore[misc]
    """Rows of keys and values for up to ``rows`` sequences of up to ``max_len`` tokens.

    ``lengths[row]`` is how many keys of the row are live and ``tokens[row]`` whose they are: always as many.
    """

    def __init__(self, rows: int, max_len: int, *, margin: int = MARGIN) -> None:
        super().__init__(layer_class_to_replicate=partial(SlabLayer, self))  # ``update`` adds layers when it meets them
        self.rows = rows
        self.max_len = max_len
        self.capacity = max_len + max(margin, LEAST_MARGIN)
        self.lengths: list[int] = [0] * rows
        self.tokens: list[list[int]] = [[] for _ in range(rows)]
        self._keys: list[str | None] = [None] * rows  # who owns the row; None in the free zone
        self._row_of: dict[str, int] = {}
        self._ready = 0
        self._filling = 0
        self._released: list[int] = [0] * rows  # when the row was last let go, for choosing which to overwrite
        self._clock = 0
        self._written: list[int] = [0] * rows  # slots that a forward may ever have written, where ``begin`` was told
        # The forward in progress, set by ``begin``.
        self.first, self.last, self.start, self.live = 0, rows, 0, 0
        self.slots: Tensor | None = None  # [R, N] where each token's keys go; None: start .. live in every row
        self._index: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self.reads_dead = False  # does the model look at dead slots too, and multiply them by zero?
        self._memory: Tensor | None = None  # [layers, 2, rows, kv_heads, capacity, head_dim], see ``allocate``
        self._together = 0  # layers that lie in it

    # -- one forward ------------------------------------------------------------------------------------------

    def begin(self, rows: slice, starts: Sequence[int], width: int, slots: Tensor | None = None) -> None:
        """Say where the next forward's keys go: row i's tokens at slots starts[i] .. starts[i] + width - 1.

        ``slots`` [R, N] is the same on the device; needed only when the starts differ.
        """
        low, high = min(starts), max(starts)
        if low < 0 or high + width > self.capacity:
            raise ValueError(f"tokens {low}..{high + width} do not fit a row of {self.capacity} slots")
        self.first, self.last = rows.start, rows.stop
        self.start, self.live = high, high + width
        if low == high:
            self.slots = None
        elif slots is None:
            raise ValueError("rows that start at different slots need the slots tensor")
        else:
            self.slots = slots
            self._index.clear()
        self._note_written()

    def begin_on_device(self, slots: Tensor, live: int) -> None:
        """The same where only the device knows: slots [R, N] of rows 0 .. R-1, of whose keys ``live`` are returned."""
        self.first, self.last = 0, slots.shape[0]
        self.start, self.live = live - slots.shape[1], live
        self._note_written()
        self.slots = slots
        self._index.clear()

    def _note_written(self) -> None:
        for row in range(self.first, self.last):
            self._written[row] = max(self._written[row], self.live)

    def allocate(self, like: Iterable[tuple[Tensor, Tensor] | None]) -> None:
        """Make layers now, for keys and values as in ``like`` [.., kv_heads, .., head_dim]; None: one without any.

        Layers of one shape lie in one piece of memory, so that a row is moved by one copy and not by two a layer.
        """
        pairs = list(like)
        kinds = {(x.shape[1], x.shape[3], x.dtype, x.device) for pair in pairs if pair is not None for x in pair}
        memory = None
        if not self.layers and None not in pairs and len(kinds) == 1:
            with torch.inference_mode(False):  # as in ``SlabLayer.lazy_initialization``
                heads, dim, _, _ = kinds.pop()
                memory = zeros(pairs[0][0], (len(pairs), 2, self.rows, heads, self.capacity, dim))  # type: ignore[index]
            self._memory, self._together = memory, len(pairs)
        for index, pair in enumerate(pairs):
            layer = SlabLayer(self)
            if memory is not None:
                layer.use(memory[index, 0], memory[index, 1])
            elif pair is not None:
                layer.lazy_initialization(*pair)
            self.layers.append(layer)

    def _memories(self) -> list[Tensor]:
        """All there is, as tensors [.., rows, kv_heads, capacity, head_dim]."""
        apart = [layer for layer in self.layers[self._together :] if layer.is_initialized]
        shared = [self._memory] if self._memory is not None else []
        return [*shared, *(buffer for layer in apart for buffer in (layer.keys, layer.values))]

    @property
    def token_bytes(self) -> int:
        """Memory for the keys and values of a token, in all layers; 0 before the first forward has made them."""
        return sum(m.numel() * m.element_size() for m in self._memories()) // (self.rows * self.capacity)

    def scatter_index(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Row numbers [R, 1] and slots [R, N] of the forward in progress, made once a device."""
        found = self._index.get(device)
        if found is None:
            assert self.slots is not None
            slots = self.slots.to(device)
            row = torch.arange(slots.shape[0], device=device)[:, None]
            found = self._index[device] = (row, slots)
        return found

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.start

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.live, 0

    # -- what a row holds -------------------------------------------------------------------------------------

    def start_features(self) -> None:
        """A layer of features is about to be added: no token here has any, so none may be in use or stay warm."""
        if self.free_rows < self.rows:
            raise ValueError("sequences are running, and their tokens so far have no features")
        for row in range(self.rows):
            self.truncate(row, 0)

    def add_features(self, like: Tensor) -> Tensor:
        """Room for one vector of ``like`` [1, 1, 1, F] a token, as one layer more: [rows, 1, capacity, F]."""
        self.start_features()
        self.allocate([(like, like[..., :0])])
        keys: Tensor = self.layers[-1].keys
        return keys

    def truncate(self, row: int, length: int) -> None:
        """Roll back: only the first ``length`` keys stay live."""
        if not 0 <= length <= self.lengths[row]:
            raise ValueError(f"row {row} holds {self.lengths[row]} tokens and cannot be cut to {length}")
        self.lengths[row] = length
        del self.tokens[row][length:]

    def extend(self, row: int, tokens: Sequence[int]) -> None:
        """The keys of ``tokens``, already written past the row's end by a forward, become live."""
        if self.lengths[row] + len(tokens) > self.max_len:
            raise ValueError(f"row {row} would hold {self.lengths[row] + len(tokens)} tokens of {self.max_len}")
        self.tokens[row].extend(tokens)
        self.lengths[row] += len(tokens)

    def keep(self, row: int, start_length: int, path: Sequence[int]) -> None:
        """After a tree round: move the accepted nodes' keys together, behind the root's.

        The round wrote node i at slot start_length + i (node 0 is the root, the last committed token).
        ``path`` holds the accepted nodes, root excluded, so 1 <= path[0] < path[1] < ...; node path[i] ends
        at slot start_length + 1 + i. Does not touch ``lengths``. For a chain there is nothing to move.
        """
        count = len(path)
        if any(node <= before for before, node in zip((0, *path), path, strict=False)):
            raise ValueError(f"a path holds node numbers above 0 in rising order, not {list(path)}")
        if not count or path[-1] == count:
            return
        target = slice(start_length + 1, start_length + 1 + count)
        for buffer in self._memories():
            source = torch.tensor(path, device=buffer.device) + start_length
            buffer[..., row, :, target, :] = buffer[..., row, :, :, :].index_select(-2, source)

    def swap(self, a: int, b: int) -> None:
        """Exchange two rows of one zone, where any order will do; live keys only."""
        if a == b:
            return
        if self.lengths[a] < self.lengths[b]:
            a, b = b, a
        long, short = self.lengths[a], self.lengths[b]
        tokens_a, tokens_b = self._emptied(a), self._emptied(b)
        for buffer in self._memories() if long else ():
            kept = buffer[..., b, :, :short, :].clone() if short else None
            buffer[..., b, :, :long, :] = buffer[..., a, :, :long, :]
            if kept is not None:
                buffer[..., a, :, :short, :] = kept
            if self.reads_dead:  # what is left of the longer row may hold NaN, see ``scrub``
                buffer[..., a, :, short : self._written[a], :].zero_()
        self._written[a] = self._written[b] = max(self._written[a], self._written[b])  # only live keys have moved
        columns: tuple[list[Any], ...] = (self._keys, self._released)
        for column in columns:
            column[a], column[b] = column[b], column[a]
        for row in (a, b):
            key = self._keys[row]
            if key is not None:
                self._row_of[key] = row
        self._fill(a, tokens_b)
        self._fill(b, tokens_a)

    def _emptied(self, row: int) -> list[int]:
        """The row counts as empty from here on; whose keys it held."""
        held, self.lengths[row], self.tokens[row] = self.tokens[row], 0, []
        return held

    def _fill(self, row: int, tokens: list[int]) -> None:
        """The keys of these tokens are all there."""
        self.tokens[row] = tokens
        self.lengths[row] = len(tokens)

    def scrub(self, row: int) -> None:
        """Zero a row and forget its tokens. For a row that met NaN: as a masked key it would poison others' sums."""
        self.truncate(row, 0)
        for buffer in self._memories():
            buffer[..., row, :, :, :].zero_()

    def reset(self) -> None:
        """Forget every token and every owner. What was written is zeroed: it may hold NaN (see ``scrub``)."""
        self.lengths = [0] * self.rows
        self.tokens = [[] for _ in range(self.rows)]
        self._keys, self._row_of = [None] * self.rows, {}
        self._ready = self._filling = 0
        for buffer in self._memories():
            for row, end in enumerate(self._written):
                buffer[..., row, :, :end, :].zero_()
        self._written = [0] * self.rows

    # -- who owns a row ---------------------------------------------------------------------------------------

    @property
    def ready_keys(self) -> list[str]:
        """The sequences in the ready zone, in row order: they are rows 0, 1, 2 ..."""
        return [key for key in self._keys[: self._ready] if key is not None]

    @property
    def free_rows(self) -> int:
        return self.rows - self._active

    @property
    def _active(self) -> int:
        return self._ready + self._filling

    def row(self, key: str) -> int:
        return self._row_of[key]

    def __contains__(self, key: object) -> bool:
        return key in self._row_of

    def acquire(self, key: str, prompt: Sequence[int]) -> int:
        """Give ``key`` a row in the filling zone; returns how many leading prompt tokens are warm in it.

        At most len(prompt) - 1, because the last token must be fed to get logits.
        """
        if key in self._row_of:
            raise ValueError(f"{key!r} already owns row {self._row_of[key]}")
        if not self.free_rows:
            raise ValueError("no free row")
        source, warm = self._warmest(prompt)
        row = self._victim(source, warm)
        self._emptied(row)
        if warm and row != source:
            self._copy(source, row, warm)
        self._fill(row, list(prompt[:warm]))
        self._keys[row] = key
        self._row_of[key] = row
        self.swap(row, self._active)
        self._filling += 1
        return warm

    def warm(self, prompt: Sequence[int]) -> int:
        """How many leading tokens of the prompt ``acquire`` would find."""
        return self._warmest(prompt)[1]

    def promote(self, key: str) -> None:
        """From filling to ready."""
        row = self._row_of[key]
        if row < self._ready:
            raise ValueError(f"{key!r} is already ready")
        self.swap(row, self._ready)
        self._ready += 1
        self._filling -= 1

    def release(self, key: str, *, scrub: bool = False) -> None:
        """Let the row go. It keeps its tokens, so that a prompt with the same beginning starts warm; see ``scrub``."""
        row = self._row_of[key]
        if scrub:
            self.scrub(row)
        if row < self._ready:  # to the end of the ready zone, which then ends one row earlier
            self.swap(row, self._ready - 1)
            row = self._ready - 1
            self._ready -= 1
        else:
            self._filling -= 1
        self.swap(row, self._active)  # and behind the filling zone
        row = self._active
        self._clock += 1
        self._released[row] = self._clock
        self._keys[row] = None
        del self._row_of[key]

    def _warmest(self, prompt: Sequence[int]) -> tuple[int, int]:
        """The row that shares the longest beginning with the prompt, free ones first, and how long it is."""
        limit = len(prompt) - 1
        best_row, best = self._active, 0
        order = sorted(range(self._active, self.rows), key=self._released.__getitem__)
        for row in (*order, *range(self._active)):
            held = self.tokens[row]
            most = min(limit, len(held))
            if most > best and (shared := min(shared_beginning(prompt, held), most)) > best:
                best_row, best = row, shared
        return best_row, best

    def _victim(self, source: int, warm: int) -> int:
        """The free row to use: the source itself if most of it is reused, else the one let go the longest ago."""
        if source >= self._active and warm and 2 * warm >= self.lengths[source]:
            return source
        return min(range(self._active, self.rows), key=self._released.__getitem__)

    def _copy(self, source: int, target: int, length: int) -> None:
        self._written[target] = max(self._written[target], length)
        for buffer in self._memories():
            buffer[..., target, :, :length, :] = buffer[..., source, :, :length, :]
