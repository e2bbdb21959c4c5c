"""Which models can be lowered, and their weights in the form the fused kernels read.

Knows: where Llama, Mistral, Qwen2, Qwen3 and Phi3 keep their weights in transformers, and what they have in common.
Does not know: how the kernels work. Needs neither Triton nor a GPU.

Packing makes one matrix of the query, key and value weights and one of gate and up. The model's own modules are then
pointed into the packed matrix, so the memory is not doubled and the modules go on working. Rounded matrices are copies;
what they were made from can be given back, and then the modules cannot be called any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from .quantize import GROUP, MAKERS, Matrix, grouped, rounded

__all__ = ["CLASSES", "TRITON_PARTS", "Layer", "Weights", "head_dim_of", "lower", "parts_of", "why_not", "window_of"]

# What a rotary table may depend on: the position only. "dynamic" and "longrope" also look at the longest position.
_STATIC_ROPE = frozenset({"default", "linear", "llama3", "yarn"})
CLASSES = frozenset(
    {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Phi3ForCausalLM"}
)
# What the Triton kernels do of ``parts_of``. Other kernels have lists of their own.
TRITON_PARTS = frozenset({"norms its heads", "has sliding windows", "turns some channels only"})
_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Layer:
    """One decoder layer."""

    input_norm: Tensor  # [H]
    qkv: Matrix  # [(heads + 2 * kv_heads) * head_dim, H]
    qkv_bias: Tensor | None
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None
    o: Matrix  # [H, heads * head_dim]
    o_bias: Tensor | None
    post_norm: Tensor  # [H]
    gate_up: Matrix  # [2 * F, H], gate first
    down: Matrix  # [H, F]
    window: int | None  # how many positions back, itself included, a token sees; None: all

    @cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that it has, but for the first norm's weight, which is read where its input is made: a layer earlier."""
        parts = [self.qkv_bias, self.q_norm, self.k_norm, self.o_bias, self.post_norm]
        for matrix in (self.qkv, self.o, self.gate_up, self.down):
            parts += [matrix.data, matrix.scales]
        return tuple(part for part in parts if part is not None)

    @cached_property
    def head_norms(self) -> tuple[Tensor, ...]:
        return tuple(x for x in (self.q_norm, self.k_norm) if x is not None)

    @cached_property
    def kind(self) -> tuple[object, ...]:
        """What two layers have in common where every kernel can take the one for the other."""
        absent = tuple(x is None for x in (self.qkv_bias, self.q_norm, self.k_norm, self.o_bias))
        return (self.window, *absent, *((x.dtype, x.shape) for x in self.tensors))


@dataclass(frozen=True)
class Weights:
    """A lowered model: its tensors and its sizes."""

    embedding: Tensor  # [V, H]
    layers: tuple[Layer, ...]
    norm: Tensor  # [H]
    head: Matrix  # [V, H]
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rotary: nn.Module  # the model's own rotary module
    parts: frozenset[str]  # see ``parts_of``

    @property
    def hidden(self) -> int:
        return self.embedding.shape[1]

    @property
    def ffn(self) -> int:
        return self.layers[0].down.shape[1]

    @property
    def vocab_size(self) -> int:
        return self.head.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def step_bytes(self) -> int:
        """Bytes of weights one forward must read: everything but the embedding table."""
        matrices = [self.head]
        for layer in self.layers:
            matrices += [layer.qkv, layer.o, layer.gate_up, layer.down]
        return sum(m.bytes for m in matrices)

    @property
    def bytes(self) -> int:
        """Bytes of all matrices; norms and biases are too small to count."""
        tied = self.head.data.data_ptr() == self.embedding.data_ptr()
        return self.step_bytes + (0 if tied else self.embedding.numel() * self.embedding.element_size())

    def rotary_table(self, positions: int) -> tuple[Tensor, Tensor, int]:
        """cos and sin, float32 [positions, head_dim / 2], and how many channel pairs turn.

        Pairs that do not turn (partial rotary) have cos 1 and sin 0, so that kernels need no special case.
        """
        at = torch.arange(positions, device=self.device)[None]
        with torch.inference_mode(False), torch.no_grad():
            cos, sin = self.rotary(torch.zeros(1, device=self.device), at)
        turning = cos.shape[-1] // 2
        full_cos = torch.ones(positions, self.head_dim // 2, device=self.device)
        full_sin = torch.zeros_like(full_cos)
        full_cos[:, :turning] = cos[0, :, :turning]
        full_sin[:, :turning] = sin[0, :, :turning]
        return full_cos, full_sin, turning

    def buffers(self, rows: int, capacity: int) -> list[tuple[Tensor, Tensor]]:
        """Key and value buffers [rows, kv_heads, capacity, head_dim] for each layer, in the slab's layout."""
        shape = (rows, self.kv_heads, capacity, self.head_dim)
        return [(self.embedding.new_zeros(shape), self.embedding.new_zeros(shape)) for _ in self.layers]


def why_not(model: nn.Module, kind: str | None = None) -> str | None:
    """None if the model can be lowered (and its weights rounded to ``kind``), else the reason in words."""
    name = type(model).__name__
    if kind not in (None, *MAKERS):
        return f"its weights cannot be rounded to {kind}"
    if name not in CLASSES:
        return f"{name} is not one of {', '.join(sorted(CLASSES))}"
    live: Any = model
    config = live.config
    head_dim = head_dim_of(config)
    parameters = list(model.parameters())
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}, not silu"
    if getattr(config, "mlp_bias", False):
        return "its feed-forward layers have biases"
    if live.model.rotary_emb.rope_type not in _STATIC_ROPE:
        return f"its rotary scaling ({live.model.rotary_emb.rope_type}) changes with the length of the text"
    if head_dim % 32 or head_dim > 256:
        return f"its head width {head_dim} is not a multiple of 32 up to 256"
    if config.hidden_size % 16 or config.intermediate_size % 16 or config.hidden_size > 16384:
        return "its widths are not multiples of 16"
    if len({p.device for p in parameters}) > 1:
        return "it is spread over several devices"
    if {p.dtype for p in parameters} - set(_DTYPES) or len({p.dtype for p in parameters}) > 1:
        return "its weights are not all float32 or all bfloat16"
    for module in (live.model.layers[0].self_attn, live.model.layers[0].mlp):
        for child in module.children():
            if "Linear" in type(child).__name__ and type(child) is not nn.Linear:
                return f"its layers are {type(child).__name__}, not plain linear layers"
    if grouped(kind) and (config.hidden_size % GROUP or config.intermediate_size % GROUP):
        return f"its widths are not multiples of {GROUP}, and {kind} weights come in groups of {GROUP}"
    return None


def parts_of(model: nn.Module) -> frozenset[str]:
    """What the model does that not every Llama does. Kernels list which of these they do, and take no other model."""
    live: Any = model
    layers, turning = live.model.layers, live.model.rotary_emb.inv_freq.numel()
    found = {
        "norms its heads": hasattr(layers[0].self_attn, "q_norm"),
        "has sliding windows": any(window_of(live, i) is not None for i in range(len(layers))),
        "turns some channels only": turning != head_dim_of(live.config) // 2,
    }
    return frozenset(part for part, there in found.items() if there)


def head_dim_of(config: Any) -> int:
    """How wide a head is."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _stack(parts: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """The parts' weights as one matrix, their biases as one vector. Afterwards the parts are views of it."""
    first = parts[0].weight
    if len(parts) == 1:
        return first.data, None if parts[0].bias is None else parts[0].bias.data
    rows = [p.weight.shape[0] for p in parts]
    starts = [sum(rows[:i]) for i in range(len(rows))]
    size = first.shape[1] * first.element_size()
    if all(
        p.weight.data_ptr() == first.data_ptr() + at * size
        and p.weight.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        and p.weight.is_contiguous()
        for p, at in zip(parts, starts, strict=True)
    ):  # lowered before
        packed = first.data.as_strided((sum(rows), first.shape[1]), (first.shape[1], 1))
    else:
        packed = torch.cat([p.weight.data for p in parts])
        for p, at, n in zip(parts, starts, rows, strict=True):
            p.weight.data = packed[at : at + n]
    biases = [p.bias for p in parts]
    if all(b is None for b in biases):
        return packed, None
    joined = [packed.new_zeros(n) if b is None else b.data for b, n in zip(biases, rows, strict=True)]
    return packed, torch.cat(joined)


def window_of(model: Any, index: int) -> int | None:
    """The sliding window of one layer, as transformers' own mask building reads it."""
    config = model.config
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if window is None or (types and types[index] != "sliding_attention") or type(model).__name__ == "LlamaForCausalLM":
        return None
    return int(window)


def _layer(model: Any, index: int, make: Callable[[Tensor], Matrix]) -> Layer:
    layer = model.model.layers[index]
    attn, mlp = layer.self_attn, layer.mlp
    joined = [attn.qkv_proj] if hasattr(attn, "qkv_proj") else [attn.q_proj, attn.k_proj, attn.v_proj]
    qkv, qkv_bias = _stack(joined)
    gate_up, _ = _stack([mlp.gate_up_proj] if hasattr(mlp, "gate_up_proj") else [mlp.gate_proj, mlp.up_proj])
    o_bias = attn.o_proj.bias
    return Layer(
        input_norm=layer.input_layernorm.weight.data,
        qkv=make(qkv),
        qkv_bias=qkv_bias,
        q_norm=attn.q_norm.weight.data if hasattr(attn, "q_norm") else None,
        k_norm=attn.k_norm.weight.data if hasattr(attn, "k_norm") else None,
        o=make(attn.o_proj.weight.data),
        o_bias=None if o_bias is None else o_bias.data,
        post_norm=layer.post_attention_layernorm.weight.data,
        gate_up=make(gate_up),
        down=make(mlp.down_proj.weight.data),
        window=window_of(model, index),
    )


@torch.no_grad()
def lower(model: nn.Module, kind: str | None = None, *, release: bool = False) -> Weights:
    """The model's weights, packed. Call ``why_not`` first. May be called twice on one model.

    ``kind``: round the matrices to "int8" or "int4"; the output head is then "int8", and the embedding stays as it is.
    ``release``: give the memory of what was rounded back, layer by layer. The model's own modules are then empty.
    """
    live: Any = model
    config = live.config
    make = Matrix if kind is None else partial(rounded, kind=kind)
    layers = []
    for i in range(config.num_hidden_layers):
        layers.append(_layer(live, i, make))
        if kind is not None and release:
            _empty(live.model.layers[i])
    head = live.lm_head.weight.data
    weights = Weights(
        embedding=live.model.embed_tokens.weight.data,
        layers=tuple(layers),
        norm=live.model.norm.weight.data,
        head=Matrix(head) if kind is None else rounded(head, "int8"),
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=head_dim_of(config),
        eps=float(config.rms_norm_eps),
        rotary=live.model.rotary_emb,
        parts=parts_of(model),
    )
    if kind is not None and release:
        _empty(live.lm_head)  # the embedding keeps the memory of a tied one
    return weights


def _empty(module: nn.Module) -> None:
    """Drop the weights of all linear layers in a module."""
    for part in module.modules():
        if isinstance(part, nn.Linear):
            part.weight = nn.Parameter(part.weight.new_empty(0), requires_grad=False)
