"""What lies where in a packed decoder: sizes, kinds of matrices, and which rows of a model's weights make each of them.

Knows: the parts of a decoder and their order in memory. Does not know: where weights come from, how they are packed or
multiplied.

A layer's weights come as queries, keys and values, as gate and up. Where these are of one kind they lie in one matrix:
``qkv``; ``gate_up``, with 32 rows of the one and 32 of the other in turn. What is of another kind lies in a matrix of
its own (``k``, which then has the values too if they are of its kind; ``v``; ``up``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import MISSING, asdict, dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from torch import nn

from ..lower import head_dim_of, parts_of, window_of
from ..lower import why_not as why_not_lowered
from ..slab_layer import LINE
from ..stored import Rows
from .formats import KINDS
from .library import kernels

__all__ = ["EXACT", "GROUP", "LANES", "Matrix", "Plan", "plan_from", "plan_of", "plan_text", "why_not"]

LANES, GROUP = 16, 32
EXACT = ("float32", "bfloat16", "float16")  # kinds that keep a float's numbers as they are
PARTS = frozenset({"norms its heads", "has sliding windows", "turns some channels only"})  # see ``parts_of``
_QKV, _GATE_UP = ("q", "k", "v"), ("gate", "up")


class Matrix(NamedTuple):
    """A matrix of a plan."""

    name: str  # "3.qkv"
    kind: str  # a key of KINDS
    outputs: int
    inputs: int
    part: str  # the part of the model whose rows it has: "3.qkv", though some of these rows may lie in "3.v"
    first: int  # of these rows
    paired: bool = False  # half of the rows are gates, half are ups: they lie in turn, 32 and 32

    @property
    def padded(self) -> int:
        """Outputs with those that fill the last tile."""
        return -(-self.outputs // LANES) * LANES

    def rows(self) -> Rows:
        """Which row of the part becomes which output, [padded]; -1: none."""
        found = np.full(self.padded, -1, dtype=np.int32)
        numbers = np.arange(self.first, self.first + self.outputs, dtype=np.int32)
        found[: self.outputs] = numbers.reshape(2, -1, GROUP).swapaxes(0, 1).reshape(-1) if self.paired else numbers
        return found


@dataclass(frozen=True)
class Plan:
    """Sizes and kinds of a packed decoder: all that is needed to find its parts."""

    kind: str  # of the layers' matrices: a key of KINDS
    table_kind: str  # of embedding and output head
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    eps: float
    windows: tuple[int, ...]  # a layer each; 0: sees everything
    qkv_bias: bool
    out_bias: bool
    qk_norm: bool
    tied: bool  # the output head is the embedding
    inverse_frequencies: tuple[float, ...]  # of the rotation
    rotary_scale: float
    kinds: tuple[tuple[str, str], ...] = ()  # of what is of another kind: ("3.v", "q6_k"), ("embedding", "q6_k")
    half_apart: bool = False  # where some channels turn only: see ``channels``

    @property
    def layers(self) -> int:
        return len(self.windows)

    @property
    def exact(self) -> bool:
        """Nothing is rounded: neither weights nor activations, keys and values."""
        return all(kind in EXACT for kind in (self.kind, self.table_kind, *self._others.values()))

    @property
    def queries(self) -> int:
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        return self.kv_heads * self.head_dim

    @cached_property
    def _others(self) -> dict[str, str]:
        return dict(self.kinds)

    @cached_property
    def channels(self) -> Rows | None:
        """Which channel of a query or key lies where. The kernels turn channels that lie half a head apart; where some
        turn only, models have these in front, next to each other. None: all lie where the model has them."""
        half, turning = self.head_dim // 2, len(self.inverse_frequencies)
        if not self.half_apart:
            return None
        turned, rest = np.arange(2 * turning).reshape(2, -1), np.arange(2 * turning, self.head_dim).reshape(2, -1)
        assert turned.shape[1] + rest.shape[1] == half
        return np.concatenate([turned, rest], axis=1).reshape(-1).astype(np.int32)

    def rows(self, matrix: Matrix) -> Rows:
        """Which row of its part becomes which output of a matrix, [padded]; -1: none."""
        rows = matrix.rows()
        return self.lying("qkv_bias", rows) if matrix.part.endswith(".qkv") else rows

    def lying(self, vector: str, rows: Rows) -> Rows:
        """``rows`` of a vector, or of the matrix that it is added to, as the kernels have them."""
        if self.channels is None or vector.rpartition(".")[2] not in ("qkv_bias", "q_norm", "k_norm"):
            return rows
        head, channel = np.divmod(rows, self.head_dim)
        turned = (rows >= 0) & (rows < self.queries + self.keys)
        return np.where(turned, head * self.head_dim + self.channels[channel], rows)

    def matrices(self) -> Iterator[Matrix]:
        """Every matrix, in the order they lie in."""
        sizes = {"q": self.queries, "k": self.keys, "v": self.keys, "gate": self.ffn, "up": self.ffn}
        for i in range(self.layers):
            yield from self._joined(f"{i}.qkv", i, _QKV, sizes)
            yield self._matrix(f"{i}.out", self.hidden, self.queries)
            yield from self._joined(f"{i}.gate_up", i, _GATE_UP, sizes)
            yield self._matrix(f"{i}.down", self.hidden, self.ffn)
        for table in ("embedding",) if self.tied else ("embedding", "head"):
            yield self._matrix(table, self.vocab, self.hidden, self.table_kind)

    def _matrix(self, name: str, outputs: int, inputs: int, kind: str = "") -> Matrix:
        return Matrix(name, self._others.get(name, kind or self.kind), outputs, inputs, name, 0)

    def _joined(self, part: str, layer: int, pieces: tuple[str, ...], sizes: dict[str, int]) -> Iterator[Matrix]:
        """The pieces of a part, those that follow each other and are of one kind together."""
        at = 0
        runs: list[Matrix] = []
        for piece in pieces:
            kind = self._others.get(f"{layer}.{piece}", self.kind)
            if runs and runs[-1].kind == kind:
                runs[-1] = runs[-1]._replace(outputs=runs[-1].outputs + sizes[piece], paired=pieces is _GATE_UP)
            else:
                name = f"{layer}.{piece}" if runs else part
                runs.append(Matrix(name, kind, sizes[piece], self.hidden, part, at))
            at += sizes[piece]
        yield from runs

    def vectors(self) -> Iterator[tuple[str, int]]:
        """Name and length of every float32 vector."""
        for i in range(self.layers):
            yield f"{i}.input_norm", self.hidden
            yield f"{i}.post_norm", self.hidden
            if self.qk_norm:
                yield f"{i}.q_norm", self.head_dim
                yield f"{i}.k_norm", self.head_dim
            if self.qkv_bias:
                yield f"{i}.qkv_bias", self.queries + 2 * self.keys
            if self.out_bias:
                yield f"{i}.out_bias", self.hidden
        yield "norm", self.hidden

    def layout(self) -> tuple[dict[str, int], int]:
        """Where each part begins, and how many bytes there are."""
        offsets, end = {}, 0
        for matrix in self.matrices():
            offsets[matrix.name] = end
            size = int(kernels().hs_packed_bytes(KINDS[matrix.kind], matrix.padded, matrix.inputs))
            end += -(-size // LINE) * LINE
        for name, length in self.vectors():
            offsets[name] = end
            end += -(-length * 4 // LINE) * LINE
        return offsets, end


def plan_text(plan: Plan) -> str:
    return json.dumps(asdict(plan))


def plan_from(text: str) -> Plan | None:
    """What ``plan_text`` wrote, in this version or an older one, which did not know fields that have a default; None
    otherwise, and where some channels turn only and lie as the model has them: these were turned in wrong pairs."""
    values, known = json.loads(text), fields(Plan)
    needed = {field.name for field in known if field.default is MISSING}
    if not needed <= set(values) <= {field.name for field in known}:
        return None
    if 2 * len(values["inverse_frequencies"]) != values["head_dim"] and not values.get("half_apart"):
        return None
    lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    return Plan(**values | lists | {"kinds": tuple((name, kind) for name, kind in values.get("kinds", ()))})


def why_not(model: nn.Module) -> str | None:
    """None if the kernels can run the model, else the reason in words."""
    reason = why_not_lowered(model)
    if reason is not None:
        return reason
    if missing := parts_of(model) - PARTS:
        return f"it {' and '.join(sorted(missing))}, which the CPU kernels do not"
    config: Any = model.config
    if config.hidden_size % GROUP or config.intermediate_size % GROUP:
        return f"its widths are not multiples of {GROUP}"
    return None


def plan_of(model: nn.Module, kind: str) -> Plan:
    """The plan of a model whose matrices are all to be of one kind. Call ``why_not`` first. It may lie on "meta"."""
    live: Any = model
    config, first, rotary = live.config, live.model.layers[0].self_attn, live.model.rotary_emb
    if rotary.inv_freq.is_meta:  # made again, with memory: it has a few numbers only
        rotary = type(rotary)(config=config)
    embedding, head = live.model.embed_tokens.weight, live.lm_head.weight
    joined = [first.qkv_proj] if hasattr(first, "qkv_proj") else [first.q_proj, first.k_proj, first.v_proj]
    return Plan(
        kind=kind,
        table_kind=kind if kind in EXACT else "int8",
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=head_dim_of(config),
        ffn=config.intermediate_size,
        vocab=head.shape[0],
        eps=float(config.rms_norm_eps),
        windows=tuple(window_of(live, i) or 0 for i in range(config.num_hidden_layers)),
        qkv_bias=any(part.bias is not None for part in joined),
        out_bias=first.o_proj.bias is not None,
        qk_norm=hasattr(first, "q_norm"),
        tied=head is embedding or (not head.is_meta and head.data_ptr() == embedding.data_ptr()),
        inverse_frequencies=tuple(rotary.inv_freq.float().tolist()),
        rotary_scale=float(rotary.attention_scaling),
        half_apart=2 * rotary.inv_freq.numel() != head_dim_of(config),
    )
