"""One forward of a causal language model over the slab: ragged rows, chains and trees.

Knows: positions, masks, and how to call any Hugging Face causal LM with them.
Does not know: why these tokens are asked about, or what becomes of the logits.

The slab hands the model all live keys of a slice of rows. What a token may see is said by one additive mask,
what it is rotated or embedded by is said by explicit position ids; transformers passes both through
untouched. That is enough for rows of different lengths, padded drafts, rolled-back rows and trees.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import HeadstartError, ModelRefused
from ..maths.tree import Topology
from ..maths.vocab_ops import PLAIN, VocabOps
from .attention import evaluating, lend, lock_of, wants_grouped
from .hidden_states import Watch, Watched
from .kvcache import MARGIN, Slab
from .model_runner import DeviceRunner, ModelRunner
from .packed_linear import lend_packed, pack
from .pieces import Pieces, batches, check_pieces

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["EagerRunner", "ModelRunner", "attention_kinds", "context_limit"]


_PROBE_LENGTH = 12

# How far slab logits may stray from a fresh pass, in standard deviations of the logits (rms). A wrong mask or
# position gives 0.3 and more; rounding gives 1e-6 in float32 and a few hundredths in bfloat16.
_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3, torch.float16: 0.05}
_HALF_TOLERANCE = 0.2


def attention_kinds(config: Any) -> dict[str, int | None]:
    """Which masks a model needs: kind of layer -> how far back it sees (None: everything).

    ``config`` is a text config. A kind that is neither full, sliding nor chunked attention is left in for the
    capability report to refuse.
    """
    window = getattr(config, "sliding_window", None)
    chunk = getattr(config, "attention_chunk_size", None)
    types = getattr(config, "layer_types", None)
    if not types:
        types = ["sliding_attention" if window else "chunked_attention" if chunk else "full_attention"]
    reach = {"sliding_attention": window, "chunked_attention": chunk}
    return {kind: reach.get(kind) for kind in dict.fromkeys(types)}


def context_limit(config: Any) -> int | None:
    """The longest context that gives the same logits however it is cut into forwards; None: no known limit.

    "longrope" changes the rotation of all positions once any row passes the original context, also of keys that
    are already cached, so a row's logits would depend on its neighbours' lengths: it is served up to there.
    """
    limit = getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None)
    rope = getattr(config, "rope_parameters", None) or {}
    for part in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if part.get("rope_type") == "longrope":
            original = part.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            limit = min(filter(None, (original, limit)), default=None)
    return int(limit) if limit else None


class EagerRunner(Watched, DeviceRunner):
    """Any Hugging Face causal LM over the slab, through its own modules, under ``torch.inference_mode``."""

    vocab_ops: VocabOps = PLAIN

    def __init__(
        self, model: PreTrainedModel, *, rows: int = 1, max_len: int = 2048, margin: int = MARGIN, probe: bool = True
    ) -> None:
        """``margin``: at least the widest round. ``probe=False`` skips the check described at ``probe``."""
        self.model = model
        model.eval()
        config = model.config.get_text_config(decoder=True)
        if config._attn_implementation not in ("sdpa", "eager"):
            # Flash and flex kernels take no additive mask, and the mask is how raggedness and trees are said.
            model.set_attn_implementation("sdpa" if getattr(model, "_supports_sdpa", False) else "eager")
        self._sdpa = config._attn_implementation == "sdpa"
        pack(model)
        self._attention = partial(lend, config) if wants_grouped(config, model.device) else nullcontext
        self.slab = Slab(rows, max_len, margin=margin)
        self.slab.reads_dead = True
        self.max_len = max_len
        embedding = model.get_input_embeddings().weight
        self.device, self.dtype = embedding.device, model.dtype
        self._wide = self.device.type == "cuda"
        head = model.get_output_embeddings()
        self.vocab_size = int(getattr(head, "out_features", 0) or config.vocab_size)
        self.kinds = attention_kinds(config)
        # One mask for all layers, or a dict of masks where the model's forward looks for one.
        self._by_kind = len(self.kinds) > 1
        accepted = inspect.signature(model.forward).parameters
        self._accepts_keep = "logits_to_keep" in accepted
        self._accepts_positions = self._accepts_keep and "Tensor" in str(accepted["logits_to_keep"].annotation)
        takes_any = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
        if "position_ids" not in accepted and not takes_any:
            raise ModelRefused(
                f"{type(model).__name__} takes no position_ids, so rows of different lengths cannot be run together; "
                "use a model whose forward accepts them"
            )
        # Learned position tables end here, and padding may point past the end.
        self._last_position = (context_limit(config) or 1 << 30) - 1
        self._count = torch.arange(max(self.slab.capacity, 4 * _PROBE_LENGTH), device=self.device)
        self._zero = torch.zeros((), dtype=self.dtype, device=self.device)
        self._hidden = torch.full((), torch.finfo(self.dtype).min, dtype=self.dtype, device=self.device)
        self._watch: Watch | None = None
        self._one_at_a_time = lock_of(model)
        self.depth = int(config.num_hidden_layers)
        if probe:
            self.probe()

    def _forward(
        self, rows: slice, tokens: Tensor, lengths: Sequence[int], tree: Topology | None, keep: int | None
    ) -> Tensor:
        return self._over_slab(rows, tokens, lengths, tree, keep)

    def _over_slab(
        self, rows: slice, tokens: Tensor, lengths: Sequence[int], tree: Topology | None, keep: int | Tensor | None
    ) -> Tensor:
        """``keep`` may also be a tensor of the positions whose logits are wanted."""
        count, width = tokens.shape
        low, high = min(lengths), max(lengths)
        if low == high and tree is None:  # the common case: positions are a view, no arithmetic at all
            slots = positions = self._count[None, low : low + width].expand(count, width)
            starts = None
        else:
            starts = torch.tensor(lengths, device=self.device)[:, None]  # [R, 1]
            slots = starts + self._count[:width]
            positions = slots if tree is None else starts + tree.depth
        self.slab.begin(rows, lengths, width, slots)
        mask = self._masks(positions, starts, low, high, tree)
        if high + width > self._last_position + 1:
            positions = positions.clamp(max=self._last_position)
        return self._run(tokens, mask, positions, keep)

    @torch.inference_mode()
    def read(self, pieces: Pieces, *, logits: bool = True) -> Tensor:
        """See ``ModelRunner.read``. Pieces that cost less together (see ``batches``) are padded at their end."""
        check_pieces(self.slab, pieces)
        found: dict[int, Tensor] = {}
        for batch in batches(self.slab, pieces, wide=self._wide):
            chosen = [pieces[i] for i in batch]
            rows, widths = slice(chosen[0][0], chosen[-1][0] + 1), [len(tokens) for _, tokens in chosen]
            ends = sorted(set(widths))
            ids = [[*tokens, *[0] * (ends[-1] - len(tokens))] for _, tokens in chosen]
            keep = torch.tensor(ends, device=self.device) - 1 if logits and len(ends) > 1 else int(logits)
            got = self._over_slab(rows, torch.tensor(ids, device=self.device), self.slab.lengths[rows], None, keep)
            for i, width, line in zip(batch, widths, got, strict=True):
                if logits:
                    found[i] = line[ends.index(width)]
                self.slab.extend(*pieces[i])
        if not found:
            return self._zero.new_empty((len(pieces), self.vocab_size if logits else 0))
        return torch.stack([found[i] for i in range(len(pieces))])

    @torch.inference_mode()
    def device_forward(self, tokens: Tensor, lengths: Tensor, keep: int, bound: int) -> Tensor:
        """See ``DeviceRunner``. All rows are masked over ``bound`` keys, so that the same work is done whatever the
        lengths are: it can be captured. A row that gets past the bound computes nonsense, but writes where it should.
        """
        width = tokens.shape[1]
        slots = lengths[:, None] + self._count[:width]
        self.slab.begin_on_device(slots, bound)
        mask = self._masks(slots, None, -1, bound - width, None)
        return self._run(tokens, mask, slots.clamp(max=self._last_position), keep)

    def on_device(self) -> DeviceRunner | None:
        """See ``ModelRunner``: one graph cannot run on several devices."""
        return self if len(set((getattr(self.model, "hf_device_map", None) or {}).values())) < 2 else None

    def _run(
        self,
        tokens: Tensor,
        mask: Tensor | dict[str, Tensor | None] | None,
        positions: Tensor,
        keep: int | Tensor | None,
    ) -> Tensor:
        """The model itself, over the slab as ``begin`` has set it."""
        arguments: dict[str, Any] = {
            "input_ids": tokens,
            "attention_mask": mask,
            "position_ids": positions,
            "past_key_values": self.slab,
            "use_cache": True,
        }
        no_head = isinstance(keep, int) and keep == 0
        limited = self._accepts_positions if isinstance(keep, Tensor) else keep is not None and self._accepts_keep
        if limited and not no_head:
            arguments["logits_to_keep"] = keep
        model = self.model.base_model if no_head else self.model
        # Another engine in another thread may run over the same model, with a slab of its own.
        with self._one_at_a_time, evaluating(self.model), self._attention(), lend_packed():
            output = model(**arguments)
            self._keep_features()
        if no_head:
            return self._zero.new_empty((len(tokens), 0, self.vocab_size))
        logits: Tensor = output.logits
        if isinstance(keep, Tensor):
            return logits if limited else logits[:, keep]
        return logits if keep is None else logits[:, -keep:]

    # -- for drafters that read the target (``drafters.base.TargetView``)

    @property
    def hidden_size(self) -> int:
        return int(self.model.config.get_text_config(decoder=True).hidden_size)

    @property
    def threads(self) -> int:
        return torch.get_num_threads()

    @property
    def embedding(self) -> Tensor:
        weight: Tensor = self.model.get_input_embeddings().weight
        return weight

    def embed(self, tokens: Tensor) -> Tensor:
        return self.embedding[tokens]

    def _keep_from_now_on(self, layers: tuple[int, ...]) -> None:
        self.slab.start_features()
        self._watch = Watch(self.model, layers)

    def _keep_features(self) -> None:
        if self._watch is not None:
            found = self._watch.take(self.device)[:, None]  # [R, 1, N, F]
            self.slab.update(found, found[..., :0], self.depth)

    @torch.inference_mode()
    def probe(self) -> None:
        """Refuse the model unless logits over the slab equal those of one fresh pass. Also allocates the slab.

        Two ragged rows, garbage drafts, a rollback, a continuation and a tree with a second-branch path: a
        model that ignores its mask or its positions (many do, for good reasons) cannot get through.
        """
        name = type(self.model).__name__
        served, self.slab = self.slab, Slab(2, _PROBE_LENGTH, margin=_PROBE_LENGTH)
        try:
            worst = _probe_error(self)
        except (HeadstartError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise ModelRefused(
                f"{name} cannot be run over a cache with rows of different lengths ({type(error).__name__}: {error}); "
                "use a decoder-only model with ordinary attention layers"
            ) from error
        finally:
            probed, self.slab = self.slab, served
        limit = _TOLERANCE.get(self.dtype, _HALF_TOLERANCE)
        if not worst <= limit:  # also true for NaN
            raise ModelRefused(
                f"{name} gives other logits when rows of different lengths share a cache than in one fresh pass "
                f"(they differ by {worst:.2g} standard deviations, allowed is {limit:.2g}): it does not follow the "
                "mask and the positions it is given, so drafts could not be verified; use a decoder-only model with "
                "rotary or learned positions and ordinary attention layers"
            )
        # All of the memory now, so that its lack is noticed early.
        self.slab.allocate((layer.keys, layer.values) if layer.is_initialized else None for layer in probed.layers)

    def _masks(
        self, positions: Tensor, starts: Tensor | None, low: int, high: int, tree: Topology | None
    ) -> Tensor | dict[str, Tensor | None] | None:
        """What each token may see, for the one or more kinds of layers the model has."""
        width = positions.shape[1]
        live = high + width
        # Without a mask, SDPA lets one token see every key and many tokens behind nothing see causally.
        plain = self._sdpa and tree is None and low == high and (width == 1 or high == 0)
        narrow = {kind: reach for kind, reach in self.kinds.items() if reach is not None and live > reach}
        found: dict[str, Tensor | None] = dict.fromkeys(self.kinds)
        if narrow or not plain:
            keys, asked = self._count[:live][None], positions  # [1 or R, live], [1 or R, N]
            if tree is None:
                asked = positions[:1] if low == high else positions
                seen = keys[:, None] <= asked[:, :, None]  # [1 or R, N, live]
            else:
                assert starts is not None
                seen, keys = _tree_sight(keys, starts, tree)
            for kind in narrow if plain else found:
                mask = seen
                if kind in narrow:  # of what causality lets a token see, what its layer's window or chunk leaves
                    reach, there, here = narrow[kind], keys[:, None], asked[:, :, None]
                    chunked = kind == "chunked_attention"
                    mask = seen & (there // reach == here // reach if chunked else there > here - reach)
                found[kind] = torch.where(mask, self._zero, self._hidden)[:, None].expand(len(positions), 1, -1, -1)
        return found if self._by_kind else next(iter(found.values()))


def _tree_sight(count: Tensor, starts: Tensor, tree: Topology) -> tuple[Tensor, Tensor]:
    """Trees: a node sees the live prefix and its own ancestors, itself included.

    ``count`` [1, live] is 0, 1, 2 ..., ``starts`` [R, 1]. Returns what is seen [R, N, live] and every key's
    position [R, live]: a node's position follows from its depth, not from its slot.
    """
    offset = count - starts  # [R, live]; negative in the prefix, else the node's number
    nodes = tree.width
    node = offset.clamp(0, nodes - 1)
    inside = (offset >= 0) & (offset < nodes)
    ancestors = tree.ancestors.gather(2, node[:, None].expand(-1, nodes, -1))  # [R, N, live]
    seen = torch.where(inside[:, None], ancestors, (offset < 0)[:, None])
    positions = torch.where(inside, starts + tree.depth.gather(1, node), count)
    return seen, positions


def _probe_error(runner: EagerRunner) -> float:
    """The largest error over the rows of four awkward forwards, in standard deviations of the fresh logits."""
    generator = torch.Generator().manual_seed(0)
    # Low ids are often special (padding, images), so they are left out where the vocabulary allows.
    low = min(runner.vocab_size // 4, 256)
    drawn = torch.randint(low, min(runner.vocab_size, 32000), (2 * _PROBE_LENGTH,), generator=generator).tolist()
    x, junk = drawn[:_PROBE_LENGTH], drawn[_PROBE_LENGTH:]
    fresh = runner.model(input_ids=torch.tensor([x], device=runner.device), use_cache=False).logits[0].float()
    j = junk[0]
    tree = Topology.of([(-1, -1, 1, 0), (-1, -1, 0, 1)], runner.device)
    # tokens of both rows, where they start, tree, and (index in the row, position in x) of what must be right
    steps: list[tuple[list[list[int]], list[int], Topology | None, list[list[tuple[int, int]]]]] = [
        ([x[:5], x[:3] + junk[:2]], [0, 0], None, [[(i, i) for i in range(5)], [(i, i) for i in range(3)]]),
        ([[x[5], *junk[:3]], [*x[3:6], j]], [5, 3], None, [[(0, 5)], [(0, 3), (1, 4), (2, 5)]]),
        ([x[6:9], x[5:8]], [6, 5], None, [[(0, 6), (1, 7), (2, 8)], [(0, 5), (1, 6), (2, 7)]]),
        (
            [[x[9], j, x[10], x[11], junk[1]], [x[8], x[9], j, x[10], junk[1]]],
            [9, 8],
            tree,
            [[(0, 9), (2, 10), (3, 11)], [(0, 8), (1, 9), (3, 10)]],
        ),
    ]
    spread = fresh.std()
    worst = torch.zeros((), device=fresh.device)
    for tokens, lengths, topology, expected in steps:
        logits = runner.forward(slice(0, 2), torch.tensor(tokens, device=runner.device), lengths, topology).float()
        for row, pairs in enumerate(expected):
            got = logits[row, [i for i, _ in pairs]].to(fresh.device)
            error = (got - fresh[[at for _, at in pairs]]).square().mean().sqrt() / spread
            worst = torch.maximum(worst, error)  # NaN stays NaN
    return float(worst)
