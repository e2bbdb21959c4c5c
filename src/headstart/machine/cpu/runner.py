"""A packed decoder as a runner over the slab: one call into the kernels for each forward.

Knows: how to hand tokens, lengths and the slab's memory to the kernels. Does not know: kernels, rounds, sampling.

A token's logits are the same bits however the forward is cut up: alone, with a draft behind it, beside other rows, as
part of a prompt, or as a branch of a tree. So speculation on this runner is lossless to the last bit.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import asdict
from operator import add
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...errors import ModelRefused
from ...maths.tree import Topology
from ...maths.vocab_ops import VocabOps
from ..hidden_states import Watched
from ..kvcache import MARGIN, Slab
from ..model_runner import ModelRunner
from ..pieces import Pieces, check_pieces
from .library import CallRecord, LayerRecord, MatrixRecord, ModelRecord, kernels, pool
from .packed import Packed
from .sampling import vocab_ops_for
from .thread_count import threads_for
from .threads import Pace

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["CpuRunner"]

_PROBE_LENGTH = 12


class CpuRunner(Watched, ModelRunner):
    """A ``ModelRunner`` on the CPU's own kernels. Logits are float32; keys and values too, or half floats."""

    device = torch.device("cpu")
    dtype = torch.float32
    own_threads = True
    packed: Packed
    invariant = True
    ragged = True
    enough_to_read = 64  # one prompt of a chat takes 0.85 ms a token on two cores, eight of them 0.81

    def __init__(
        self,
        packed: Packed,
        model: PreTrainedModel,
        *,
        rows: int = 1,
        max_len: int = 2048,
        margin: int = MARGIN,
        probe: bool = True,
        threads: int = 1,
    ) -> None:
        """``model``: what was packed; for those who ask about its configuration or its embedding."""
        plan = packed.plan
        self.packed, self.model = packed, model
        self.vocab_size, self.max_len = plan.vocab, max_len
        self.depth, self.hidden_size = plan.layers, plan.hidden
        self._pace = Pace(threads)
        self.slab = Slab(rows, max_len, margin=margin)
        self._watch_numbers: ctypes.Array[ctypes.c_int32] | None = None
        like = torch.empty(1, plan.kv_heads, 1, plan.head_dim, dtype=torch.float32 if plan.exact else torch.float16)
        self.slab.allocate([(like, like)] * plan.layers)
        self._kernels = kernels()
        self._cosines, self._sines = _rotation(packed, self.slab.capacity)
        self._handle = self._build()
        self._call = CallRecord()
        # Not at exit: another thread may be in the kernels then, and the memory goes with the process anyway.
        weakref.finalize(self, self._kernels.hs_model_free, self._handle).atexit = False
        if probe:
            self.probe()

    def _build(self) -> int:
        """Tell the kernels where everything lies. They keep the addresses; we keep the memory alive."""
        packed, plan, slab = self.packed, self.packed.plan, self.slab
        layers = (LayerRecord * plan.layers)()
        for i, layer in enumerate(slab.layers):
            cache = {"keys": layer.keys.data_ptr(), "values": layer.values.data_ptr()}
            layers[i] = LayerRecord(**self._layer(i) | cache)
        keys = slab.layers[0].keys
        record = ModelRecord(
            **{name: getattr(plan, name) for name, *_ in ModelRecord._fields_ if hasattr(plan, name)},
            positions=len(self._cosines),
            float_keys=int(plan.exact),
            capacity=slab.capacity,
            row_stride=keys.stride(0),
            head_stride=keys.stride(1),
            embedding=packed.matrix("embedding"),
            head=packed.matrix("embedding" if plan.tied else "head"),
            norm=packed.address("norm"),
            cosines=self._cosines.data_ptr(),
            sines=self._sines.data_ptr(),
            layer=layers,
        )
        return int(self._kernels.hs_model_new(ctypes.byref(record)))

    def _layer(self, number: int) -> dict[str, Any]:
        """What a layer's record has by its name: a matrix or vector of the plan, or a number of its own ("windows")."""
        packed, plan, found = self.packed, self.packed.plan, dict[str, Any]()
        for name, kind, *_ in LayerRecord._fields_:
            if kind is MatrixRecord:
                found[name] = packed.matrix(f"{number}.{name}")
            elif hasattr(plan, f"{name}s"):
                found[name] = getattr(plan, f"{name}s")[number]
            else:
                found[name] = packed.address(f"{number}.{name}")
        return found

    def _forward(
        self, rows: slice, tokens: Tensor, lengths: Sequence[int], tree: Topology | None, keep: int | None
    ) -> Tensor:
        count, width = tokens.shape
        if min(lengths) < 0 or max(lengths) + width > self.slab.capacity:
            raise ValueError(f"tokens up to {max(lengths) + width} do not fit a row of {self.slab.capacity} slots")
        kept = width if keep is None else min(keep, width)
        logits = torch.empty(count, kept, self.vocab_size)
        tokens = tokens.contiguous()
        starts = (ctypes.c_int32 * count)(*lengths)
        call = self._call
        call.rows, call.width, call.first_row, call.keep = count, width, rows.start, kept
        call.tokens, call.lengths, call.logits = tokens.data_ptr(), ctypes.addressof(starts), logits.data_ptr()
        call.ancestors = call.depths = call.slab_rows = call.widths = None
        if tree is not None:
            ancestors = tree.ancestors.expand(count, width, width).to(torch.uint8).contiguous()
            depths = tree.depth.expand(count, width).to(torch.int32).contiguous()
            call.ancestors, call.depths = ancestors.data_ptr(), depths.data_ptr()
        self._run(count * width, max(lengths) + width)
        return logits

    @torch.inference_mode()
    def forward_ragged(self, rows: slice, lines: Sequence[Sequence[int]], lengths: Sequence[int]) -> list[Tensor]:
        """See ``ModelRunner.forward_ragged``; no token is computed that nobody asked for."""
        if len(lines) != len(lengths) or len(lines) != rows.stop - rows.start or rows.stop > self.slab.rows:
            raise ValueError(f"{len(lines)} rows of tokens, {len(lengths)} lengths and rows {rows} do not agree")
        furthest = max(map(add, lengths, map(len, lines)))
        if min(lengths) < 0 or furthest > self.slab.capacity:
            raise ValueError(f"tokens up to {furthest} do not fit a row of {self.slab.capacity} slots")
        return self._every_token(range(rows.start, rows.stop), lines, lengths)

    @torch.inference_mode()
    def read(self, pieces: Pieces, *, logits: bool = True) -> Tensor:
        """See ``ModelRunner.read``; all pieces in one call, whatever their widths and rows."""
        check_pieces(self.slab, pieces)
        found = torch.empty(len(pieces), self.vocab_size if logits else 0)
        numbers, lines = [row for row, _ in pieces], [tokens for _, tokens in pieces]
        self._pieces(numbers, lines, [self.slab.lengths[row] for row in numbers], found, keep=int(logits))
        self._extend(pieces)
        return found

    @torch.inference_mode()
    def read_all(self, pieces: Pieces) -> list[Tensor]:
        """See ``ModelRunner.read_all``; all pieces in one call."""
        check_pieces(self.slab, pieces)
        numbers, lines = [row for row, _ in pieces], [tokens for _, tokens in pieces]
        found = self._every_token(numbers, lines, [self.slab.lengths[row] for row in numbers])
        self._extend(pieces)
        return found

    def _extend(self, pieces: Pieces) -> None:
        for row, tokens in pieces:
            self.slab.extend(row, tokens)

    def _every_token(
        self, numbers: Sequence[int], lines: Sequence[Sequence[int]], lengths: Sequence[int]
    ) -> list[Tensor]:
        """The logits of all tokens of each line; see ``_pieces``."""
        widths = [len(line) for line in lines]
        found = torch.empty(sum(widths), self.vocab_size)
        self._pieces(numbers, lines, lengths, found, keep=-1)
        return list(torch.split(found, widths))

    def _pieces(
        self,
        numbers: Sequence[int],
        lines: Sequence[Sequence[int]],
        lengths: Sequence[int],
        logits: Tensor,
        keep: int,
    ) -> None:
        """``lines[i]`` behind the first ``lengths[i]`` keys of row ``numbers[i]``. ``keep``: logits of so many tokens
        of each line, its last; -1: of all."""
        count = len(lines)
        if not count:
            return
        ids = torch.tensor([token for line in lines for token in line])
        widths = [len(line) for line in lines]
        said = (ctypes.c_int32 * (3 * count))(*lengths, *widths, *numbers)
        call, at = self._call, ctypes.addressof(said)
        call.rows, call.width, call.first_row, call.keep = count, 0, 0, keep
        call.tokens, call.lengths, call.logits = ids.data_ptr(), at, logits.data_ptr()
        call.ancestors = call.depths = None
        call.widths, call.slab_rows = at + 4 * count, at + 8 * count
        self._run(len(ids), max(map(add, lengths, widths)))

    def _run(self, tokens: int, longest: int) -> None:
        """The kernels, as ``_call`` says; how long they took is told to ``_pace``."""
        begun = perf_counter()
        wrong = self._kernels.hs_forward(self._handle, pool(self._pace.threads()), ctypes.byref(self._call))
        if wrong == 2:
            raise MemoryError(f"there is no memory for a forward of {tokens} tokens")
        if wrong:
            raise ValueError(f"a token id lies outside the vocabulary of {self.vocab_size}")
        # The longer the text, the more there is to read.
        self._pace.took((tokens, longest.bit_length()), perf_counter() - begun)

    @property
    def vocab_ops(self) -> VocabOps:
        """See ``ModelRunner.vocab_ops``."""
        return vocab_ops_for(self._pace.threads())

    @property
    def threads(self) -> int:
        """How many threads a step may use; it gets fewer while the machine has other work (see ``threads``)."""
        return self._pace.now

    @threads.setter
    def threads(self, count: int) -> None:
        self._pace = Pace(count, fixed=True)

    def choose_threads(self, most: int) -> None:
        """Measure how many threads are fastest, of at most ``most`` (see ``thread_count``); steps adapt from there."""
        token = torch.tensor([[0]])

        def step(count: int) -> None:
            self.threads = count
            self.forward(slice(0, 1), token, [0])

        plan = asdict(self.packed.plan) | {"inverse_frequencies": None, "eps": None}
        self._pace = Pace(most, start=threads_for(step, plan, most))

    # -- for drafters that read the target (``drafters.base.TargetView``)

    @property
    def embedding(self) -> MatrixRecord:
        return self.packed.matrix("embedding")

    def embed(self, tokens: Tensor) -> Tensor:
        return self.packed.rows("embedding", tokens.flatten()).view(*tokens.shape, -1)

    def _keep_from_now_on(self, layers: tuple[int, ...]) -> None:
        features = self.slab.add_features(torch.empty(1, 1, 1, len(layers) * self.hidden_size))
        self._watch_numbers = (ctypes.c_int32 * len(layers))(*layers)
        self._call.watched = len(layers)
        self._call.watch = ctypes.addressof(self._watch_numbers)
        self._call.features = features.data_ptr()

    # -- self-test

    def probe(self) -> None:
        """Refuse to serve unless ragged rows, rolled-back drafts and a tree give the bits of one fresh pass."""
        if self.slab.rows < 1 or self.max_len < _PROBE_LENGTH:
            return
        spread = self.vocab_size // _PROBE_LENGTH or 1
        x = [(7 + 5 * i * spread) % self.vocab_size for i in range(_PROBE_LENGTH)]
        fresh = self.forward(slice(0, 1), torch.tensor([x]), [0])[0]
        self.forward(slice(0, 1), torch.tensor([x[:5]]), [0])
        self.forward(slice(0, 1), torch.tensor([[x[5], x[0], x[1], x[2]]]), [5])  # a draft that is rejected
        chain = self.forward(slice(0, 1), torch.tensor([x[6:9]]), [6])[0]
        tree = Topology.of([(-1, -1, 1)], self.device)
        branch = self.forward(slice(0, 1), torch.tensor([[x[9], x[0], x[10], x[11]]]), [9], tree)[0]
        found = torch.cat([chain, branch[[0, 2, 3]]])
        name = getattr(self.model, "architecture", type(self.model).__name__)
        if not bool(torch.isfinite(fresh).all()):
            raise ModelRefused(
                f"{name} gives logits that are no numbers (NaN or infinity): its weights are damaged, or too large for "
                f"{self.packed.plan.kind}; fetch it again, or use dtype='float32' and quantization=None"
            )
        if not torch.equal(found, fresh[6:]):
            raise ModelRefused(
                f"{name} gives other logits on the CPU kernels when its text comes in pieces than in one pass, so "
                "drafts could not be verified; use quantization=None"
            )


def _rotation(packed: Packed, positions: int) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 [positions, head_dim / 2]; channel pairs that do not turn have 1 and 0."""
    plan = packed.plan
    speeds = torch.tensor(plan.inverse_frequencies)
    angles = torch.outer(torch.arange(positions).float(), speeds)
    cosines = torch.ones(positions, plan.head_dim // 2)
    sines = torch.zeros_like(cosines)
    cosines[:, : len(speeds)] = angles.cos() * plan.rotary_scale
    sines[:, : len(speeds)] = angles.sin() * plan.rotary_scale
    return cosines, sines
