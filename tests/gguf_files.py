"""Writes GGUF files of tiny models, for tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

__all__ = ["write_gguf", "written"]

_TABLES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_LAYER = {
    **{"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v"},
    **{"self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"},
    **{"mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"},
    **{"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
    **{"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"},
}


def interleaved(weight: torch.Tensor, heads: int) -> np.ndarray:
    """llama.cpp keeps the two halves of each rotary pair side by side; Hugging Face keeps them half a head apart."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape).numpy()


def written(array: np.ndarray, kind: str) -> np.ndarray:
    """Numbers in one of GGUF's ways. The package gguf cannot write K's: blocks of 256 with a scale (and a minimum) for
    each 16 or 32, here by the plainest rule."""
    gguf = pytest.importorskip("gguf")
    if kind in ("Q4_K", "Q5_K"):
        return _written_k(array, 4 if kind == "Q4_K" else 5)
    if kind == "Q6_K":
        return _written_q6_k(array)
    sort = gguf.GGMLQuantizationType[kind]
    if kind.startswith("IQ") or kind in ("Q2_K", "Q3_K"):  # none of these can be written, or need be
        return np.zeros(gguf.quant_shape_to_byte_shape(array.shape, sort), dtype=np.uint8)
    return np.asarray(gguf.quants.quantize(np.ascontiguousarray(array), sort))


def _half(values: np.ndarray) -> np.ndarray:
    return values.astype("<f2")[:, None].view(np.uint8)


def _written_k(array: np.ndarray, bits: int) -> np.ndarray:
    """value = d * scale * number - e * minimum, with eight 6-bit scales and minima a block."""
    groups = array.reshape(-1, 8, 32).astype(np.float32)
    low, high = np.minimum(groups.min(2), 0), groups.max(2)
    steps = (high - low) / (2**bits - 1)
    d, e = steps.max(1) / 63 + 1e-12, (-low).max(1) / 63 + 1e-12
    d, e = (x.astype("<f2").astype(np.float32) for x in (d, e))
    s = np.rint(steps / d[:, None]).clip(1, 63).astype(np.uint8)
    m = np.rint(-low / e[:, None]).clip(0, 63).astype(np.uint8)
    scale, least = d[:, None, None] * s[..., None], e[:, None, None] * m[..., None]
    n = np.rint((groups + least) / scale).clip(0, 2**bits - 1).astype(np.uint8)
    first = [s[:, :4] | (s[:, 4:] >> 4) << 6, m[:, :4] | (m[:, 4:] >> 4) << 6, (s[:, 4:] & 15) | (m[:, 4:] & 15) << 4]
    both = (n[:, 0::2] & 15) | (n[:, 1::2] & 15) << 4
    top = np.bitwise_or.reduce((n >> 4) << np.arange(8, dtype=np.uint8)[:, None], axis=1)
    parts = [_half(d), _half(e), *first, *([top] if bits == 5 else []), both.reshape(len(n), -1)]
    return np.concatenate(parts, axis=1).astype(np.uint8).reshape(*array.shape[:-1], -1)


def _written_q6_k(array: np.ndarray) -> np.ndarray:
    """value = d * scale * (number - 32), with sixteen signed scales a block."""
    groups = array.reshape(-1, 16, 16).astype(np.float32)
    steps = np.abs(groups).max(2) / 31
    d = (steps.max(1) / 127 + 1e-12).astype("<f2").astype(np.float32)
    s = np.rint(steps / d[:, None]).clip(1, 127).astype(np.int8)
    s[:, ::3] *= -1  # scales have signs
    n = (np.rint(groups / (d[:, None] * s)[..., None]).clip(-32, 31) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low = (n[:, :, :2] & 15) | (n[:, :, 2:] & 15) << 4
    high = np.bitwise_or.reduce((n >> 4) << (2 * np.arange(4, dtype=np.uint8))[:, None], axis=2)
    parts = [low.reshape(len(n), -1), high.reshape(len(n), -1), s.view(np.uint8), _half(d)]
    return np.concatenate(parts, axis=1).astype(np.uint8).reshape(*array.shape[:-1], -1)


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    *,
    kind: str = "F32",
    table: str = "F32",
    leave_out: str = "nothing",
    kinds: Callable[[str], str | None] = lambda name: None,
    more: dict[str, np.ndarray] | None = None,
    split: int = 0,
    name: str = "",
    special: tuple[str, ...] = (),
    filling: int = 0,
    about: dict[str, bool | int | str] | None = None,
    **settings: Any,
) -> Path:
    """A GGUF file with a small byte-level tokenizer, as llama.cpp's converter writes it.

    ``kind`` and ``table``: what the layers' matrices, and the embedding and the output head, are quantized to;
    ``kinds``: exceptions, by a tensor's name. ``more``: further tensors. ``split``: how many go into each of several
    files. ``name``: the model's. ``special``: control tokens, from number 95 on. ``filling``: tokens at the end of the
    vocabulary that only fill it up. ``about``: what else the header says of the tokenizer. ``settings``: further ones
    of the architecture.
    """
    gguf = pytest.importorskip("gguf")
    config: Any = model.config
    arch = config.model_type
    writer = gguf.GGUFWriter(str(path), arch, split_max_tensors=split)
    if name:
        writer.add_name(name)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
    for key, value in settings.items():
        ways = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
        add = ways[type(value)]
        add(f"{arch}.{key}", value)
    tokens = ["<unk>", "<s>", "</s>", *(chr(33 + i) for i in range(90)), "!!", "AB"]
    types = [gguf.TokenType.NORMAL] * len(tokens) + [gguf.TokenType.CONTROL] * len(special)
    tokens += special
    tokens += [f"<spare{i}>" for i in range(config.vocab_size - filling - len(tokens))]
    types += [gguf.TokenType.NORMAL] * (len(tokens) - len(types)) + [gguf.TokenType.UNUSED] * filling
    tokens += [f"[PAD{i}]" for i in range(len(tokens), config.vocab_size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for key, said in (about or {}).items():
        put = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}[type(said)]
        put(f"tokenizer.ggml.{key}", said)
    writer.add_token_merges(["! !", "A B"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    for tensor, array in _tensors(model, arch):
        if leave_out in tensor:
            continue
        plain = "norm" in tensor or array.ndim == 1
        sort = "F32" if plain else kinds(tensor) or (kind if "blk" in tensor else table)
        if sort == "F32":
            writer.add_tensor(tensor, np.ascontiguousarray(array))
        else:
            writer.add_tensor(tensor, written(array, sort), raw_dtype=gguf.GGMLQuantizationType[sort])
    for tensor, array in (more or {}).items():
        writer.add_tensor(tensor, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tensors(model: PreTrainedModel, arch: str) -> Any:
    config: Any = model.config
    tied = config.tie_word_embeddings
    for name, weight in model.state_dict().items():
        whole, sort = name.rsplit(".", 1)
        if whole in _TABLES:
            theirs = _TABLES[whole]
        else:
            layer, part = whole.removeprefix("model.layers.").split(".", 1)
            theirs = f"blk.{layer}.{_LAYER[part]}"
        if theirs == "output" and tied:
            continue
        array = weight.numpy()
        if arch == "llama" and theirs.endswith("attn_q"):
            array = interleaved(weight, config.num_attention_heads)
        elif arch == "llama" and theirs.endswith("attn_k"):
            array = interleaved(weight, config.num_key_value_heads)
        yield f"{theirs}.{sort}", array
