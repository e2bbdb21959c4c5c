"""A lowered model as a runner over the slab, eager or on the device's own terms.

Knows: how to hand the slab's buffers to the fused kernels. Does not know: kernels, rounds, sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
from .reads import CapturedReads
from .step import MAX_NODES
from .tiles import BOUNDS

__all__ = ["FusedRunner"]

_CHUNK = 512  # bounds are rounded up to this, so that few different launches occur


class FusedRunner(EagerRunner):
    """A ``ModelRunner`` on fused kernels."""

    BOUNDS = BOUNDS
    compiled = True
    most_nodes = MAX_NODES

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
        self._reads: CapturedReads | None = None

    @torch.inference_mode()
    def capture_reads(self) -> None:
        """See ``DeviceRunner``. Where the model is invariant, prompts are read by the kernels that decode."""
        if not self.invariant:
            self._reads = CapturedReads(self.fused, self.slab.rows, self._briefly)

    def _briefly(self, work: Callable[[], None]) -> None:
        with self.brief():
            work()

    def _keep_from_now_on(self, layers: tuple[int, ...]) -> None:
        self._reads = None  # they keep nothing
        weights = self.fused.weights
        like = torch.empty(1, 1, 1, len(layers) * weights.hidden, device=self.device, dtype=weights.dtype)
        self.fused.keep_features(layers, self.slab.add_features(like)[:, 0])

    def _forward(
        self, rows: slice, tokens: Tensor, lengths: Sequence[int], tree: Topology | None, keep: int | None
    ) -> Tensor:
        width = tokens.shape[1]
        alone = len(lengths) == 1 and tree is None and not skinny_rows(width)
        if self._reads is not None and alone and keep is not None:
            piece = (rows.start, lengths[0], tokens[0].tolist())  # a prompt's end: the host has just sent it
            if self._reads.takes([piece], keep):
                return self._reads.read([piece], keep)
        longest = max(lengths) + width
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
        short = len(pieces) == 1 and skinny_rows(len(pieces[0][1]))
        if short and not logits and self._reads is not None:
            short = len(pieces[0][1]) <= 2
        if not pieces or self.invariant or short:
            # With logits, wanted or not: a draft's steps of a token or two are one kernel then, and that is compiled.
            found = ModelRunner.read(self, pieces)
            return found if logits else found[:, :0]
        check_pieces(self.slab, pieces)
        placed = [(row, self.slab.lengths[row], tokens) for row, tokens in pieces]
        if self._reads is not None and self._reads.takes(placed):
            found = self._reads.read(placed, int(logits)).flatten(1)
        else:
            found = self.fused.read(placed, logits=logits)
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
