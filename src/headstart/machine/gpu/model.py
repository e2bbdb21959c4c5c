"""A lowered model's forward: about five kernels a layer, everything it needs to know on the device.

Knows: in which order the kernels run and which buffers they share. Does not know: Hugging Face modules, sampling,
who owns a row.

Nothing here reads a device tensor on the host, and no launch depends on a value on the device, so a forward (or a
whole round of them) can be captured in a CUDA graph. Up to 32 tokens take the skinny products (weights at memory
speed, see ``kernels.matmul``); more take cuBLAS, and so do prompts of several rows together (``read``).

The skinny kernels add a token's sums up in the same order whatever stands beside it; cuBLAS does not. A model that is
``invariant`` keeps to the skinny ones: more tokens are several forwards (``cut``), each of which streams the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..lower import Layer, Weights
from .compile.launching import Repeats, supports_overlap
from .cut import cut
from .kernels.attention import attend
from .kernels.draft import attend_alone, join_residual
from .kernels.heads import Heads
from .kernels.matmul import Residual, matmul, matmul_residual, matmul_rotary, matmul_swiglu, skinny_rows
from .kernels.pointwise import embed, norm, remember, rotate, swiglu
from .one_kernel import open_whole
from .products import Products
from .ragged import pack
from .step import MAX_NODES, Step, Tree, pack_ancestors
from .tiles import ALONE_CHUNK, ALONE_SPLITS, Tile, attention_tile, tile

__all__ = ["MAX_NODES", "FusedModel", "Tree", "pack_ancestors"]

_SPLIT_WIDTH = 64  # wider forwards (prefill) have enough queries to fill the GPU without splitting the keys


class _Places(NamedTuple):
    """Where a forward of few tokens leaves what its kernels hand on."""

    x: Tensor  # [R * N, H], the residual stream
    scaled: Tensor  # the same times the next norm's weight
    hidden: Tensor
    query: Tensor
    attended: Tensor
    first: Tensor  # parts of sum(x^2): of the embedding, and of what the two residual products leave
    after_o: Tensor
    after_down: Tensor
    alone: tuple[Tensor, Tensor] | None  # a draft's attention for a single token, see ``_alone_buffers``


class FusedModel:
    """Runs a lowered model over key-value buffers [rows, kv_heads, capacity, head_dim], one pair a layer."""

    def __init__(
        self, weights: Weights, cache: Sequence[tuple[Tensor, Tensor]], *, draft: bool = False, invariant: bool = False
    ) -> None:
        """``draft``: steps of one token may be rounded otherwise than wider ones, which makes small models faster.

        Without it a token's logits are the same to the bit in any step of up to 16 tokens, so that speculative and
        plain decoding of a target agree exactly. Nothing depends on a draft's last bit. ``invariant``: the same to the
        bit in any step whatever, but for trees, where a token's keys stand elsewhere than in plain decoding.
        """
        self.weights = w = weights
        self.cache = list(cache)
        self.capacity = self.cache[0][0].shape[2]
        if len(self.cache) != len(w.layers):
            raise ValueError(f"{len(self.cache)} layers of cache for {len(w.layers)} layers")
        self.rotary = w.rotary_table(self.capacity)
        self.attention = attention_tile(w.head_dim, w.dtype, draft=draft)
        # When the next kernel may start, see ``kernels.blocks.wait``. Measured on an H200: an early start halves a
        # 135M step and makes an 8B step a tenth slower, so there it comes late.
        self.overlap = 0 if not supports_overlap(w.device) else 2 if draft else 3
        self._draft = draft
        self.kept: tuple[tuple[int, int], ...] = ()  # (layer, channel of the features where its output goes)
        self._features: Tensor | None = None
        self._tiles = {alone: self._plan(alone=alone and draft) for alone in (False, True)}
        self._many = self._plan(many=True)
        # Tokens that an invariant model takes at a time (0: any number). Kernels that do not stream may add squares up
        # in another order for more than 16.
        self.part = 0 if not invariant else 32 if all(t.prefetch for t in self._many.values()) else 16
        self.whole = open_whole(w, self.cache, self.rotary) if draft else None
        self.beside = False  # may this run at the same time as other kernels?

    def keep_features(self, layers: Sequence[int], features: Tensor) -> None:
        """From now on store the outputs of these layers, side by side, in features [rows, capacity, F]."""
        self.kept = tuple((layer, i * self.weights.hidden) for i, layer in enumerate(layers))
        self._features = features

    def _tiles_for(self, tokens: int) -> dict[str, Tile]:
        return self._many if tokens > 16 else self._tiles[tokens <= 2]

    def _plan(self, *, alone: bool = False, many: bool = False) -> dict[str, Tile]:
        """The tile of each matrix, see ``tiles.tile``."""
        w, layer = self.weights, self.weights.layers[0]
        matrices = {
            "qkv": (layer.qkv, w.head_dim // 2 if layer.q_norm is None else 0),
            "o": (layer.o, 0),
            "gate_up": (layer.gate_up, w.ffn),
            "down": (layer.down, 0),
            "head": (w.head, 0),
        }
        return {
            name: tile(*m.shape, pair=pair, dtype=w.dtype, bits=m.bits, alone=alone, many=many)
            for name, (m, pair) in matrices.items()
        }

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        lengths: Tensor,
        ancestors: Tensor | Tree | None = None,
        keep: int | None = None,
        *,
        first_row: int = 0,
        bound: int | None = None,
    ) -> Tensor:
        """Logits float32 [R, keep or N, V] of tokens [R, N]; their keys go to slots lengths[r] + index.

        ``lengths`` [R] on the device: live keys of each row. ``ancestors``: for trees, bool [R, N, N] or packed.
        ``keep``: logits of the last ``keep`` tokens only; 0: none. The rows are cache rows first_row, first_row + 1 ...
        ``bound``: a promise that no row will have more keys than this; a smaller one launches fewer programs.
        """
        rows, width = tokens.shape
        keep = width if keep is None else keep
        tree = ancestors if ancestors is None or isinstance(ancestors, Tree) else pack_ancestors(ancestors)
        bound = min(bound or self.capacity, self.capacity)
        if not 0 < self.part < rows * width or (tree is not None and width > self.part):
            return self._forward(tokens, lengths, tree, keep, first_row, bound)
        found = []
        for part in cut(rows, width, keep, self.part):
            own = None if tree is None else Tree(*(part.of(tensor) for tensor in tree))
            at = first_row + part.first
            found.append(self._forward(part.of(tokens), part.lengths(lengths), own, part.keep, at, bound).flatten(0, 1))
        return torch.cat(found).view(rows, keep, -1)

    def _forward(
        self, tokens: Tensor, lengths: Tensor, tree: Tree | None, keep: int, first_row: int, bound: int
    ) -> Tensor:
        """``forward``, all at once."""
        rows, width = tokens.shape
        work = None
        if bound > self.attention.chunk and width <= _SPLIT_WIDTH:
            work = self._split_buffers(rows * width, -(-bound // self.attention.chunk))
        step = Step(rows, width, lengths.contiguous(), first_row, tree, bound, work)
        tokens = tokens.reshape(-1).contiguous()  # a column of a wider tensor stays strided through reshape
        if self._in_one(step, keep):
            assert self.whole is not None
            scaled, squares = self.whole.step(tokens.long(), step.lengths.long(), first_row, bound)
            return self._head(scaled, squares, 1, 1)
        if skinny_rows(step.count):
            return self._skinny(tokens, step, keep)
        return self._dense(tokens, step, keep)

    @torch.inference_mode()
    def read(self, pieces: Sequence[tuple[int, int, Sequence[int]]], *, logits: bool = True) -> Tensor:
        """Logits float32 [P, V] of the last token of each piece (row, live keys there, tokens); [P, 0] if not wanted.

        Rows are any rows of the cache, each once. A piece's attention and norms are the same in any company.
        """
        packed = pack(pieces, self.tokens_in_tile, self.weights.device)
        step = Step(len(pieces), 0, packed.places, packed=packed)
        return self._dense(packed.tokens, step, int(logits)).flatten(1)

    @property
    def tokens_in_tile(self) -> int:
        """Of a piece, in a tile of attention; see ``pack``."""
        return self.attention.packed(self.weights.heads // self.weights.kv_heads)[1]

    def _in_one(self, step: Step, keep: int) -> bool:
        """Can all layers be one kernel? It needs the whole GPU, and keeps no hidden states."""
        if self.whole is None or self.beside or self.kept or step.tree is not None or not step.rows == keep == 1:
            return False
        return self.whole.takes(step.width, step.bound)

    # -- up to 32 tokens --------------------------------------------------------------------------------------

    def _skinny(self, tokens: Tensor, step: Step, keep: int) -> Tensor:
        w, at = self.weights, self._places(step)
        gains = [layer.input_norm for layer in w.layers[1:]] + [w.norm]
        embed(tokens, w.embedding, w.layers[0].input_norm, at.x, at.scaled, at.first, pdl=self.overlap)
        repeats = Repeats()
        for i, layer in enumerate(w.layers):
            cache = self._cache_of(i, step)
            work = partial(self._layer, layer, gains[i], cache, step, at, at.after_down if i else at.first)
            if i == 0:
                work()
            else:
                repeats.do(layer.kind, work, (*layer.tensors, gains[i], *cache))
            self._remember(i, at.x, step)
        if keep == 0:
            return self._no_logits(step)
        return self._head(step.last(at.scaled, keep), step.last(at.after_down, keep), step.rows, keep)

    def _places(self, step: Step) -> _Places:
        w, count = self.weights, step.count
        after_o, after_down = (self._parts(name, count) for name in ("o", "down"))
        return _Places(
            x=self._new(count, w.hidden),
            scaled=self._new(count, w.hidden),
            hidden=self._new(count, w.ffn),
            query=self._new(count, w.heads, w.head_dim),
            attended=self._new(count, w.heads, w.head_dim),
            first=self._new(count, after_down, dtype=torch.float32),
            after_o=self._new(count, after_o, dtype=torch.float32),
            after_down=self._new(count, after_down, dtype=torch.float32),
            alone=self._alone_buffers(step),
        )

    def _parts(self, name: str, count: int) -> int:
        """In how many parts the product with this matrix leaves its sum of squares."""
        return -(-self.weights.hidden // self._tiles_for(count)[name].rows)

    def _layer(
        self, layer: Layer, gain: Tensor, cache: tuple[Tensor, Tensor], step: Step, at: _Places, squares: Tensor
    ) -> None:
        """One layer, launches only (see ``Repeats``). ``gain``: the next norm's; ``squares``: of the layer's input."""
        w, pdl, tiles = self.weights, self.overlap, self._tiles_for(step.count)
        self._queries(at.scaled, squares, layer, Heads(at.query, cache, self.rotary, step))
        after = Residual(at.x, layer.post_norm, at.scaled, at.after_o)
        if at.alone is not None and layer.window is None:
            attend_alone(at.query, cache, at.alone, step.lengths, pdl=pdl)
            join_residual(at.alone, step.lengths, layer.o, after, tiles["o"], bias=layer.o_bias, pdl=pdl)
        else:
            attend(at.query, cache, at.attended, step, window=layer.window, t=self.attention, pdl=pdl)
            attended = at.attended.view(step.count, -1)
            matmul_residual(attended, layer.o, after, tiles["o"], bias=layer.o_bias, pdl=pdl)
        matmul_swiglu(at.scaled, layer.gate_up, at.hidden, tiles["gate_up"], squares=at.after_o, eps=w.eps, pdl=pdl)
        after = Residual(at.x, gain, at.scaled, at.after_down)
        matmul_residual(at.hidden, layer.down, after, tiles["down"], bias=None, pdl=pdl)

    def _queries(self, scaled: Tensor, squares: Tensor, layer: Layer, to: Heads) -> None:
        w, t, pdl = self.weights, self._tiles_for(len(scaled))["qkv"], self.overlap
        if not layer.head_norms:
            matmul_rotary(scaled, layer.qkv, to, t, bias=layer.qkv_bias, squares=squares, eps=w.eps, pdl=pdl)
            return
        qkv = self._new(len(scaled), layer.qkv.shape[0])
        matmul(scaled, layer.qkv, qkv, t, bias=layer.qkv_bias, squares=squares, eps=w.eps, pdl=pdl)
        rotate(qkv, layer.head_norms, to, eps=w.eps, pdl=pdl)

    # -- more tokens ------------------------------------------------------------------------------------------

    def _dense(self, tokens: Tensor, step: Step, keep: int) -> Tensor:
        x = self._new(step.count, self.weights.hidden)
        self.stream(tokens, step, x)
        return self.last_logits(x, step, keep)

    def stream(self, tokens: Tensor, step: Step, x: Tensor) -> None:
        """All layers over tokens [M]; what they leave to x [M, H]."""
        w, pdl, count = self.weights, min(self.overlap, 1), step.count
        normed, add = (self._new(count, w.hidden) for _ in range(2))
        hidden, gate_up = self._new(count, w.ffn), self._new(count, 2 * w.ffn)
        qkv = self._new(count, w.layers[0].qkv.shape[0])
        query, attended = (self._new(count, w.heads, w.head_dim) for _ in range(2))
        if step.packed is not None:
            attended.zero_()  # tokens that only fill a captured read up are not attended: numbers all the same
        flat, repeats = attended.view(count, -1), Repeats()
        linear = Products(repeats).linear
        embed(tokens, w.embedding, w.norm, x, None, None, pdl=pdl)
        for i, layer in enumerate(w.layers):
            cache = self._cache_of(i, step)
            first = partial(norm, x, add if i else None, layer.input_norm, normed, eps=w.eps, pdl=pdl)
            repeats.do(("norm", i > 0), first, (layer.input_norm,))
            linear(normed, layer.qkv, qkv, layer.qkv_bias)
            heads = Heads(query, cache, self.rotary, step)
            turned = partial(self._turn_and_attend, qkv, heads, attended, layer, pdl)
            repeats.do(layer.kind, turned, (*cache, *layer.head_norms))
            linear(flat, layer.o, add, layer.o_bias)
            second = partial(norm, x, add, layer.post_norm, normed, eps=w.eps, pdl=pdl)
            repeats.do(("norm", True), second, (layer.post_norm,))
            linear(normed, layer.gate_up, gate_up)
            repeats.do("swiglu", partial(swiglu, gate_up, hidden), ())
            linear(hidden, layer.down, add)
            if any(i == kept for kept, _ in self.kept):
                self._remember(i, x + add, step)
        x.add_(add)

    def _turn_and_attend(self, qkv: Tensor, heads: Heads, out: Tensor, layer: Layer, pdl: int) -> None:
        """From one product to the next, launches only (see ``Repeats``)."""
        rotate(qkv, layer.head_norms, heads, eps=self.weights.eps, pdl=pdl)
        # The kernel that decoding has.
        attend(heads.query, heads.cache, out, heads.step, window=layer.window, t=self.attention, pdl=self.overlap)

    def _remember(self, index: int, x: Tensor, step: Step) -> None:
        """Store the layer's output x [R * N, H] where a head reads it, if one does."""
        for layer, channel in self.kept:
            if layer == index:
                assert self._features is not None
                remember(x, self._features[step.places], step, offset=channel)

    # -- shared parts -----------------------------------------------------------------------------------------

    def last_logits(self, x: Tensor, step: Step, keep: int) -> Tensor:
        """Logits of the last ``keep`` tokens of each row from the residual stream x [R * N, H]."""
        w = self.weights
        if keep == 0:
            return self._no_logits(step)
        if step.packed is not None and skinny_rows(step.rows):  # by decoding's own kernels
            own, scaled = self._new(step.rows, w.hidden), self._new(step.rows, w.hidden)
            squares = self._new(step.rows, self._parts("down", step.rows), dtype=torch.float32)
            embed(step.packed.last, x, w.norm, own, scaled, squares, pdl=self.overlap)
            return self._head(scaled, squares, step.rows, 1)
        x = step.last(x, keep)
        normed = torch.empty_like(x)
        norm(x, None, w.norm, normed, eps=w.eps, pdl=min(self.overlap, 1))
        return self._head(normed, None, step.rows, keep)

    def _no_logits(self, step: Step) -> Tensor:
        return self._new(step.rows, 0, self.weights.vocab_size, dtype=torch.float32)

    def _head(self, x: Tensor, squares: Tensor | None, rows: int, keep: int) -> Tensor:
        w = self.weights
        if not skinny_rows(rows * keep):
            out = self._new(rows * keep, w.vocab_size)
            return Products(Repeats()).linear(x, w.head, out).float().view(rows, keep, -1)
        logits = self._new(rows * keep, w.vocab_size, dtype=torch.float32)
        t = self._tiles_for(rows * keep)["head"]
        matmul(x, w.head, logits, t, bias=None, squares=squares, eps=w.eps, pdl=self.overlap)
        return logits.view(rows, keep, -1)

    def _cache_of(self, index: int, step: Step) -> tuple[Tensor, Tensor]:
        keys, values = self.cache[index]
        return keys[step.places], values[step.places]

    def _split_buffers(self, tokens: int, splits: int) -> tuple[Tensor, Tensor]:
        w = self.weights
        part = self._new(tokens, w.heads, splits, w.head_dim, dtype=torch.float32)
        return part, self._new(tokens, w.heads, splits, 2, dtype=torch.float32)

    def _alone_buffers(self, step: Step) -> tuple[Tensor, Tensor] | None:
        """Where a draft's attention for a single token is made, or None if it is made as any other."""
        splits = -(-step.bound // ALONE_CHUNK)
        if not (self._draft and step.count == 1 and splits <= ALONE_SPLITS and self._tiles[True]["o"].slices == 0):
            return None
        part, stats = self._split_buffers(1, splits)
        return part[0], stats[0]

    def _new(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(*shape, device=self.weights.device, dtype=dtype or self.weights.dtype)
