"""Grow a small Llama into a big one that says the same things.

Knows: how to widen and deepen a Llama so that its function stays the same.
Does not know: how to train, how to run a model fast, where weights come from.

Why: a benchmark of speculation needs a target of a real size with real weights, and a draft that agrees with it.
A grown model has the memory traffic of the big shape and the text of the small one.

How the function is kept:
    copies      Each unit of the small model (residual channel, head, feed-forward unit, value channel) stands several
                times in the big one. Readers of copies take a share of each; the shares are powers of two that add
                up to 1, so that no weight is rounded. Residual shares live in the norm weights, the others in the
                columns of the output projections.
    norms       With c copies of H channels among H' the mean square is c * H / H' of the small one. The norm weights
                take the square root of that, epsilon the ratio itself. c is chosen so that the root is exact in
                bfloat16 if any c makes it so (4 for 576 -> 4096, 5 for 576 -> 5120).
    heads       Query heads move only within copies of their own key-value head. A wider head places rotary pair i at
                pair m * i (m = new / old width), which turns at the same rate under the same theta; the key channels
                between are zero, and queries are scaled by sqrt(m) against the new 1 / sqrt(width).
    leftovers   Channels that nothing of the small model fills: zero where something reads them, noise where only
                zeros are multiplied or a zero follows. So the weights that a step reads are nowhere plain zeros
                unless they must be.
    layers      Added layers have noise everywhere and zero output projections: they compute, and add nothing.
    vocabulary  A padded id's row is minus the mean of the others, so its logit is minus the mean logit: in a trained
                model far below the largest.
    biases      A shape with biases makes a Qwen2, which has them on queries, keys and values; they are zero.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

__all__ = ["SHAPES", "Shape", "grow", "grow_tensors"]


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama, or of a Qwen2. The rotary base is kept from the small model."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int | None = None  # None: as many as the small model has
    biases: bool = False  # on queries, keys and values: a Qwen2


SHAPES: Mapping[str, Shape] = {
    "llama-3-8b": Shape(layers=32, hidden=4096, ffn=14336, heads=32, kv_heads=8, head_dim=128),
    "mistral-7b": Shape(layers=32, hidden=4096, ffn=14336, heads=32, kv_heads=8, head_dim=128),
    "qwen3-8b": Shape(layers=36, hidden=4096, ffn=12288, heads=32, kv_heads=8, head_dim=128),
    "llama-2-13b": Shape(layers=40, hidden=5120, ffn=13824, heads=40, kv_heads=40, head_dim=128),
    "qwen2.5-14b": Shape(layers=48, hidden=5120, ffn=13824, heads=40, kv_heads=8, head_dim=128),
    "phi-4": Shape(layers=40, hidden=5120, ffn=17920, heads=40, kv_heads=10, head_dim=128),
    "llama-3-70b": Shape(layers=80, hidden=8192, ffn=28672, heads=64, kv_heads=8, head_dim=128),
    "third-of-8b": Shape(layers=30, hidden=2304, ffn=8192, heads=18, kv_heads=6, head_dim=128),  # a draft's
    "qwen2.5-32b": Shape(layers=64, hidden=5120, ffn=27648, heads=40, kv_heads=8, head_dim=128),
    # For CPUs: widths in multiples of 256, which k-quants need, and the 30 layers that SmolLM2-135M has.
    "1.5b": Shape(layers=30, hidden=1536, ffn=8960, heads=12, kv_heads=4, head_dim=128),
    "0.5b": Shape(layers=30, hidden=1024, ffn=4096, heads=16, kv_heads=4, head_dim=64),  # a third of it
    "qwen2-1.5b": Shape(
        layers=30, hidden=1536, ffn=8960, heads=12, kv_heads=4, head_dim=128, vocab=152_000, biases=True
    ),
}


def shares(copies: int) -> list[float]:
    """Powers of two that add up to one: 1; 1/2 1/2; 1/2 1/4 1/4; ..."""
    return [2.0 ** -min(i + 1, copies - 1) if copies > 1 else 1.0 for i in range(copies)]


@dataclass(frozen=True)
class _Axis:
    """Where each new index of one axis comes from, and what share of its source a reader takes."""

    source: Tensor  # [new] int64, index in the small model; -1: nothing
    share: Tensor  # [new] float32; 0 where source is -1

    @staticmethod
    def of(source: Sequence[int]) -> _Axis:
        count: dict[int, int] = {}
        for s in source:
            count[s] = count.get(s, 0) + 1
        queue = {s: shares(n) for s, n in count.items()}
        share = [queue[s].pop(0) if s >= 0 else 0.0 for s in source]
        return _Axis(torch.tensor(source, dtype=torch.int64), torch.tensor(share))

    @staticmethod
    def repeat(old: int, new: int, copies: int | None = None) -> _Axis:
        copies = new // old if copies is None else copies
        return _Axis.of([i % old if i < copies * old else -1 for i in range(new)])


def _copies(old: int, new: int) -> int:
    """How often the residual stream is copied: the most copies whose norm scale is exact in bfloat16, else the most."""
    most = new // old
    for c in range(most, 0, -1):
        root = torch.tensor(math.sqrt(c * old / new), dtype=torch.float64)
        if float(root.to(torch.bfloat16)) ** 2 == c * old / new:
            return c
    return most


@dataclass(frozen=True)
class _Plan:
    """Every axis of the growth."""

    hidden: _Axis
    ffn: _Axis
    query: _Axis  # query rows; -1 means noise (the key is zero there)
    key: _Axis  # key rows; -1 means zero
    value: _Axis  # value rows; -1 cannot happen unless the width is no multiple
    output: _Axis  # columns of the output projection, with shares
    layers: list[int]  # new layer -> small layer, -1: added
    norm_scale: float
    eps_scale: float
    query_scale: float


def _head_sources(small: Shape, big: Shape) -> tuple[list[int], list[int]]:
    """New query head -> old query head, new key-value head -> old key-value head."""
    old_group, new_group = small.heads // small.kv_heads, big.heads // big.kv_heads
    kv = [b % small.kv_heads for b in range(big.kv_heads)]
    seen = [0] * small.kv_heads
    query = []
    for a in kv:
        for _ in range(new_group):
            query.append(a * old_group + seen[a] % old_group)
            seen[a] += 1
    return query, kv


def _check(small: Shape, big: Shape) -> None:
    for name in ("layers", "hidden", "ffn", "heads", "kv_heads"):
        if getattr(big, name) < getattr(small, name):
            raise ValueError(f"cannot grow {name} from {getattr(small, name)} down to {getattr(big, name)}")
    if big.head_dim % small.head_dim:
        raise ValueError(f"head_dim {big.head_dim} must be a multiple of {small.head_dim}, so that rotary pairs fit")
    if big.heads % big.kv_heads:
        raise ValueError(f"{big.heads} heads must be a multiple of {big.kv_heads} key-value heads")
    fewest = big.kv_heads // small.kv_heads * (big.heads // big.kv_heads)
    if fewest < small.heads // small.kv_heads:
        raise ValueError(
            f"{big.heads}/{big.kv_heads} heads leave no room for groups of {small.heads // small.kv_heads}"
        )


def _plan(small: Shape, big: Shape) -> _Plan:
    _check(small, big)
    d, new_d = small.head_dim, big.head_dim
    m, half, new_half = new_d // d, d // 2, new_d // 2
    rotary = [-1] * new_d  # where channel c of a wide head comes from
    for i in range(half):
        rotary[m * i], rotary[new_half + m * i] = i, half + i
    q_heads, kv_heads = _head_sources(small, big)
    rows = {
        "query": [h * d + c if c >= 0 else -1 for h in q_heads for c in rotary],
        "key": [h * d + c if c >= 0 else -1 for h in kv_heads for c in rotary],
        "value": [h * d + c % d for h in kv_heads for c in range(new_d)],
        "output": [h * d + c % d for h in q_heads for c in range(new_d)],
    }
    copies = _copies(small.hidden, big.hidden)
    ratio = copies * small.hidden / big.hidden
    layers: list[int] = []
    for i in range(big.layers):  # spread the added layers, so that no stretch of the model is all identity
        source = i * small.layers // big.layers
        layers.append(-1 if layers and source == max(layers) else source)
    return _Plan(
        hidden=_Axis.repeat(small.hidden, big.hidden, copies),
        ffn=_Axis.repeat(small.ffn, big.ffn),
        **{name: _Axis.of(source) for name, source in rows.items()},
        layers=layers,
        norm_scale=math.sqrt(ratio),
        eps_scale=ratio,
        query_scale=math.sqrt(m),
    )


class _Grower:
    """Makes the new tensors, one at a time, on the target device."""

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int) -> None:
        self.device, self.dtype = device, dtype
        self.random = torch.Generator(device=device).manual_seed(seed)

    def noise(self, shape: Sequence[int], std: float) -> Tensor:
        return torch.empty(*shape, device=self.device, dtype=self.dtype).normal_(0, std, generator=self.random)

    def matrix(
        self, old: Tensor, rows: _Axis, columns: _Axis, *, zero_rows: bool, share: bool = False, scale: float = 1.0
    ) -> Tensor:
        """[rows, columns] from old [r, c]. Leftover columns read zeros, so they get noise (with shares: zero)."""
        old = old.detach().to(self.device, self.dtype)
        r, c = rows.source.to(self.device), columns.source.to(self.device)
        # A gather and two masks: at most two tensors of this one matrix's size live at a time.
        new = old[r.clamp(min=0)].index_select(1, c.clamp(min=0))
        if scale != 1.0:
            new = (new.float() * scale).to(self.dtype)
        if share:
            new *= columns.share.to(self.device, self.dtype)
        std = float(old.float().std())
        if not share and bool((c < 0).any()):
            new[:, c < 0] = self.noise((new.shape[0], int((c < 0).sum())), std)
        if bool((r < 0).any()):
            count = int((r < 0).sum())
            new[r < 0] = torch.zeros_like(new[:count]) if zero_rows else self.noise((count, new.shape[1]), std)
        return new

    def vocabulary(self, old: Tensor, rows: _Axis, hidden: _Axis) -> Tensor:
        """[vocabulary, hidden] for an embedding or a head; see the module's text for padded ids."""
        new = self.matrix(old, rows, hidden, zero_rows=True)
        padded = rows.source.to(self.device) < 0
        if bool(padded.any()):
            new[padded] = -new[~padded].float().mean(0).to(self.dtype)
        return new

    def norm(self, old: Tensor, hidden: _Axis, scale: float) -> Tensor:
        """[hidden], float32: the weight with its share of each copy; one where nothing arrives."""
        weight = old.detach().to(self.device).float()
        source, share = hidden.source.to(self.device), hidden.share.to(self.device)
        new = weight[source.clamp(min=0)] * share * scale
        return torch.where(source < 0, torch.ones_like(new), new)


def _grow_layer(old: Mapping[str, Tensor], plan: _Plan, make: _Grower) -> dict[str, Tensor]:
    """One layer's tensors by name, from the small layer's tensors by name."""

    def reader(name: str, rows: _Axis, *, zero_rows: bool = False, scale: float = 1.0) -> Tensor:
        return make.matrix(old[name], rows, plan.hidden, zero_rows=zero_rows, scale=scale)

    def writer(name: str, columns: _Axis) -> Tensor:
        return make.matrix(old[name], plan.hidden, columns, zero_rows=True, share=True)

    layer = {
        "self_attn.q_proj.weight": reader("self_attn.q_proj.weight", plan.query, scale=plan.query_scale),
        "self_attn.k_proj.weight": reader("self_attn.k_proj.weight", plan.key, zero_rows=True),
        "self_attn.v_proj.weight": reader("self_attn.v_proj.weight", plan.value),
        "self_attn.o_proj.weight": writer("self_attn.o_proj.weight", plan.output),
        "mlp.gate_proj.weight": reader("mlp.gate_proj.weight", plan.ffn),
        "mlp.up_proj.weight": reader("mlp.up_proj.weight", plan.ffn),
        "mlp.down_proj.weight": writer("mlp.down_proj.weight", plan.ffn),
    }
    for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
        layer[name] = make.norm(old[name], plan.hidden, plan.norm_scale)
    return layer


def _added_layer(like: dict[str, Tensor], make: _Grower) -> dict[str, Tensor]:
    """A layer of noise that adds nothing: its output projections are zero."""
    layer = {}
    for name, tensor in like.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            layer[name] = torch.zeros_like(tensor)
        elif tensor.dim() == 1:
            layer[name] = tensor.clone()
        else:
            layer[name] = make.noise(tensor.shape, float(tensor[:64].float().std()))
    return layer


def _shape_of(config: LlamaConfig) -> Shape:
    return Shape(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        ffn=config.intermediate_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
    )


def _grown_config(small: LlamaConfig, big: Shape, plan: _Plan, dtype: torch.dtype) -> LlamaConfig | Qwen2Config:
    config = copy.deepcopy(small)
    if big.biases:
        kept = {name: getattr(small, name) for name in _IN_QWEN2}
        config = Qwen2Config(**kept, num_hidden_layers=big.layers, architectures=["Qwen2ForCausalLM"])
    config.num_hidden_layers, config.hidden_size, config.intermediate_size = big.layers, big.hidden, big.ffn
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = big.heads, big.kv_heads, big.head_dim
    config.vocab_size = big.vocab or small.vocab_size
    config.rms_norm_eps = small.rms_norm_eps * plan.eps_scale
    config.dtype = dtype
    return config


# What a Llama's settings and a Qwen2's have in common, besides the sizes.
_IN_QWEN2 = (
    *("hidden_act", "max_position_embeddings", "initializer_range", "rope_parameters", "tie_word_embeddings"),
    *("attention_dropout", "bos_token_id", "eos_token_id", "pad_token_id"),
)


def grow(
    small: LlamaForCausalLM,
    shape: str | Shape,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    seed: int = 0,
) -> LlamaForCausalLM | Qwen2ForCausalLM:
    """A model of the given shape that computes what ``small`` computes.

    The tensors are made one by one on ``device`` (default: where ``small`` is), so the peak is the grown model plus
    one of its matrices. Equal to the small model up to float rounding; in bfloat16 only the query weights are rounded
    (by the sqrt of the growth of the head width), and the norms where no exact scale exists.
    """
    device, dtype = torch.device(device or small.device), dtype or small.dtype
    config, tensors = grow_tensors(small, shape, device, dtype, seed)
    with torch.device("meta"):
        grown = (Qwen2ForCausalLM if isinstance(config, Qwen2Config) else LlamaForCausalLM)(config)
    grown.model.rotary_emb = type(grown.model.rotary_emb)(config).to(device)
    _check_rotary(small, grown)
    state = {name: tensor.to(dtype) for name, tensor in tensors}
    grown.load_state_dict(state, assign=True, strict=not config.tie_word_embeddings)
    grown.tie_weights()
    left = [name for name, tensor in (*grown.named_parameters(), *grown.named_buffers()) if tensor.is_meta]
    if left:
        raise ValueError(f"these tensors were not filled: {left}")
    return grown.eval().requires_grad_(False)


def grow_tensors(
    small: LlamaForCausalLM, shape: str | Shape, device: torch.device, dtype: torch.dtype, seed: int = 0
) -> tuple[LlamaConfig | Qwen2Config, Iterator[tuple[str, Tensor]]]:
    """What ``grow`` fills its model with: the settings, and the tensors by name, made one by one as they are asked for.

    For whoever writes them away: no more than a layer of them is held here. Norms and biases are float32.
    """
    if type(small).__name__ != "LlamaForCausalLM":
        raise ValueError(f"only Llama models can be grown, not {type(small).__name__}")
    if small.config.attention_bias or small.config.mlp_bias:
        raise ValueError("only Llama models without biases can be grown")
    big = SHAPES[shape] if isinstance(shape, str) else shape
    plan = _plan(_shape_of(small.config), big)
    config = _grown_config(small.config, big, plan, dtype)
    if config.vocab_size < small.config.vocab_size:
        raise ValueError(f"cannot grow the vocabulary from {small.config.vocab_size} down to {config.vocab_size}")
    return config, _tensors(small, big, plan, _Grower(device, dtype, seed))


def _tensors(small: LlamaForCausalLM, big: Shape, plan: _Plan, make: _Grower) -> Iterator[tuple[str, Tensor]]:
    vocabulary = _Axis.repeat(small.config.vocab_size, big.vocab or small.config.vocab_size, copies=1)
    embedding = make.vocabulary(small.model.embed_tokens.weight, vocabulary, plan.hidden)
    embedding[:, plan.hidden.source.to(make.device) < 0] = 0  # leftover channels of the residual stream stay zero
    yield "model.embed_tokens.weight", embedding
    del embedding
    layer: dict[str, Tensor] = {}
    for i, source in enumerate(plan.layers):
        layer = (
            _added_layer(layer, make)
            if source < 0
            else _grow_layer(small.model.layers[source].state_dict(), plan, make)
        )
        if big.biases:
            for name in ("q_proj", "k_proj", "v_proj"):
                rows = layer[f"self_attn.{name}.weight"].shape[0]
                layer[f"self_attn.{name}.bias"] = torch.zeros(rows, device=make.device)
        yield from ((f"model.layers.{i}.{name}", tensor) for name, tensor in layer.items())
    # The final norm takes its shares too: a tied head reads every copy in full.
    yield "model.norm.weight", make.norm(small.model.norm.weight, plan.hidden, plan.norm_scale)
    if not small.config.tie_word_embeddings:
        yield "lm_head.weight", make.vocabulary(small.lm_head.weight, vocabulary, plan.hidden)


def _check_rotary(small: LlamaForCausalLM, grown: PreTrainedModel) -> None:
    old, new = small.model.rotary_emb.inv_freq, grown.model.rotary_emb.inv_freq
    if not torch.allclose(old.float().cpu(), new.float().cpu()[:: len(new) // len(old)], rtol=1e-6):
        raise ValueError("this rotary scaling changes with the head width, so the head width cannot grow")
