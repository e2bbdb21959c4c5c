"""A lowered model as a runner over the slab, eager or on the device's own terms.

Knows: how to hand the slab's buffers to the fused kernels. Does not know: kernels, rounds, sampling.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...maths.tree import Topology
from ..kvcache import MARGIN
from ..lower import lower
from ..model_runner import ModelRunner
from ..pieces import Pieces, check_pieces
from ..runner import EagerRunner
from .kernels.matmul import skinny_rows
from .model import FusedModel
from .tiles import BOUNDS

__all__ = ["FusedRunner"]

_CHUNK = 512  # bounds are rounded up to this, so that few different launches occur


class FusedRunner(EagerRunner):
    """A ``ModelRunner`` on fused kernels."""

    BOUNDS = BOUNDS
    compiled = True

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        rows: int = 1,
        max_len: int = 2048,
        margin: int = MARGIN,
        draft: bool = False,
        quantization: str | None = None,
        release: bool = False,
        invariant: bool = False,
    ) -> None:
        """``draft``, ``invariant``: see ``FusedModel``; ``quantization``, ``release``: see ``lower``.

        There is no probe: that is for modules that may not follow their masks, and these do not run.
        """
        super().__init__(model, rows=rows, max_len=max_len, margin=margin, probe=False)
        self.slab.reads_dead = False  # the kernels read live keys only
        weights = lower(model, quantization, release=release)
        self.slab.allocate(weights.buffers(1, 1))
        cache = [(layer.keys, layer.values) for layer in self.slab.layers]
        self.quantization = quantization
        self.fused = FusedModel(weights, cache, draft=draft, invariant=invariant)
        self.invariant = invariant

    def _keep_from_now_on(self, layers: tuple[int, ...]) -> None:
        weights = self.fused.weights
        like = torch.empty(1, 1, 1, len(layers) * weights.hidden, device=self.device, dtype=weights.dtype)
        self.fused.keep_features(layers, self.slab.add_features(like)[:, 0])

    def _forward(
        self, rows: slice, tokens: Tensor, lengths: Sequence[int], tree: Topology | None, keep: int | None
    ) -> Tensor:
        longest = max(lengths) + tokens.shape[1]
        return self.fused.forward(
            tokens.contiguous(),
            torch.tensor(lengths, device=self.device),
            None if tree is None else tree.ancestors,
            keep,
            first_row=rows.start,
            bound=-(-longest // _CHUNK) * _CHUNK,
        )

    def read(self, pieces: Pieces, *, logits: bool = True) -> Tensor:
        """See ``ModelRunner.read``. A short piece by itself is read by the kernels that decode; so is every piece, one
        after another, where the model is invariant."""
        if not pieces or self.invariant or (len(pieces) == 1 and skinny_rows(len(pieces[0][1]))):
            # With logits, wanted or not: a draft's steps of a token or two are one kernel then, and that is compiled.
            found = ModelRunner.read(self, pieces)
            return found if logits else found[:, :0]
        check_pieces(self.slab, pieces)
        lengths = self.slab.lengths
        found = self.fused.read([(row, lengths[row], tokens) for row, tokens in pieces], logits=logits)
        for row, tokens in pieces:
            self.slab.extend(row, tokens)
        return found

    def device_forward(self, tokens: Tensor, lengths: Tensor, keep: int, bound: int) -> Tensor:
        """See ``EagerRunner.device_forward``; here only live keys are read, whatever the bound."""
        # A column of a wider tensor looks like one row after another to a kernel only once it is copied.
        return self.fused.forward(tokens.contiguous(), lengths, None, keep, bound=bound)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """See ``EagerRunner.beside``."""
        self.fused.beside = True
        try:
            yield
        finally:
            self.fused.beside = False

    @contextmanager
    def brief(self) -> Iterator[None]:
        """Run a few layers only, which warms every kernel up in a fraction of the time."""
        whole = self.fused.weights
        layers = list(whole.layers[:2])  # the first one meets sums of another shape than the others
        for layer in whole.layers:
            if all(layer.kind != other.kind for other in layers):
                layers.append(layer)
        kept = self.fused.kept
        self.fused.weights = replace(whole, layers=tuple(layers))
        self.fused.kept = tuple((0, channel) for _, channel in kept)
        try:
            yield
        finally:
            self.fused.weights, self.fused.kept = whole, kept
