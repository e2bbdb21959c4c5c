"""What a decoder's parts are called in files, by Hugging Face and in GGUF, and how wide they must be there.

Knows: names of tensors, and which of them make which part of a plan. Does not know: what is in them, or where they lie.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeAlias

import numpy as np

from ..stored import Stored
from .plan import Plan

__all__ = ["GGUF", "HUGGING_FACE", "Names", "Parts", "Unfit", "parts_from"]

#: Stored tensors of a part ("3.qkv": queries, keys and values), whose rows follow each other.
Parts: TypeAlias = Mapping[str, list[Stored]]
#: part -> the tensors it is made of; where there are several ways, the first whose tensors are all there
Names: TypeAlias = Mapping[str, tuple[tuple[str, ...], ...]]

HUGGING_FACE: Names = {
    "embedding": (("model.embed_tokens",),),
    "head": (("lm_head",),),
    "norm": (("model.norm",),),
    "qkv": (
        tuple(f"model.layers.{{}}.self_attn.{name}_proj" for name in ("q", "k", "v")),
        ("model.layers.{}.self_attn.qkv_proj",),
    ),
    "out": (("model.layers.{}.self_attn.o_proj",),),
    "gate_up": (
        ("model.layers.{}.mlp.gate_proj", "model.layers.{}.mlp.up_proj"),
        ("model.layers.{}.mlp.gate_up_proj",),
    ),
    "down": (("model.layers.{}.mlp.down_proj",),),
    "input_norm": (("model.layers.{}.input_layernorm",),),
    "post_norm": (("model.layers.{}.post_attention_layernorm",),),
    "q_norm": (("model.layers.{}.self_attn.q_norm",),),
    "k_norm": (("model.layers.{}.self_attn.k_norm",),),
}

GGUF: Names = {
    "embedding": (("token_embd",),),
    "head": (("output",),),
    "norm": (("output_norm",),),
    "qkv": (("blk.{}.attn_q", "blk.{}.attn_k", "blk.{}.attn_v"), ("blk.{}.attn_qkv",)),
    "out": (("blk.{}.attn_output",),),
    "gate_up": (("blk.{}.ffn_gate", "blk.{}.ffn_up"), ("blk.{}.ffn_up",)),
    "down": (("blk.{}.ffn_down",),),
    "input_norm": (("blk.{}.attn_norm",),),
    "post_norm": (("blk.{}.ffn_norm",),),
    "q_norm": (("blk.{}.attn_q_norm",),),
    "k_norm": (("blk.{}.attn_k_norm",),),
}


class Unfit(Exception):
    """The tensors do not make the model, for a reason that goes on from the file's name: "lacks ...", "is damaged"."""


def parts_from(plan: Plan, weights: Mapping[str, Stored], names: Names = HUGGING_FACE, *, live: bool = False) -> Parts:
    """The tensors of each part of a plan. Raises Unfit if some are not there, or have other sizes. ``live``: they are a
    model's modules', so that a bias that is not there is none; in a file it is lost."""
    found: dict[str, list[Stored]] = {}
    for part, outputs, inputs in _sizes(plan):
        found[part] = list(_matrix(part, weights, names))
        shapes = [stored.shape for stored in found[part]]
        if any(len(shape) != 2 or shape[1] != inputs for shape in shapes) or sum(s[0] for s in shapes) != outputs:
            raise Unfit(f"is damaged: {part} is {' and '.join(map(str, shapes))} where [{outputs}, {inputs}] belongs")
    for part, length in plan.vectors():
        found[part] = list(_vector(part, weights, names, found, live))
        if sum(stored.shape[0] for stored in found[part]) != length or any(len(s.shape) > 1 for s in found[part]):
            raise Unfit(f"is damaged: {part} has not {length} numbers")
    return found


def _sizes(plan: Plan) -> Iterator[tuple[str, int, int]]:
    """Every part that is made of matrices: its name, outputs and inputs."""
    sizes: dict[str, tuple[int, int]] = {}
    for matrix in plan.matrices():
        sizes[matrix.part] = (sizes.get(matrix.part, (0, 0))[0] + matrix.outputs, matrix.inputs)
    for part, (outputs, inputs) in sizes.items():
        yield part, outputs, inputs


def _chosen(part: str, weights: Mapping[str, Stored], names: Names) -> list[str]:
    """What the part's tensors are called, without ".weight" or ".bias"."""
    layer, _, key = part.rpartition(".")
    ways = [[name.format(layer) for name in way] for way in names[key]]
    for way in ways:
        if all(f"{name}.weight" in weights for name in way):
            return way
    raise Unfit(f"lacks weights, such as {next(name for name in ways[0] if f'{name}.weight' not in weights)}.weight")


def _matrix(part: str, weights: Mapping[str, Stored], names: Names) -> Iterator[Stored]:
    for name in _chosen(part, weights, names):
        yield weights[f"{name}.weight"]


def _vector(part: str, weights: Mapping[str, Stored], names: Names, found: Parts, live: bool) -> Iterator[Stored]:
    if not part.endswith("_bias"):
        yield from _matrix(part, weights, names)
        return
    whole = part.removesuffix("_bias")
    for name, matrix in zip(_chosen(whole, weights, names), found[whole], strict=True):
        bias = weights.get(f"{name}.bias")
        if bias is None and not live:
            raise Unfit(f"lacks weights, such as {name}.bias")
        length = matrix.shape[0]
        yield bias or Stored("F32", (length,), np.zeros(4 * length, dtype=np.uint8))
