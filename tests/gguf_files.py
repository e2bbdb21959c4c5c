"""Writes GGUF files of tiny models, for tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

__all__ = ["write_gguf"]


def interleaved(weight: torch.Tensor, heads: int) -> np.ndarray:
    """llama.cpp keeps the two halves of each rotary pair side by side; Hugging Face keeps them half a head apart."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns).numpy()


def write_gguf(
    path: Path, model: LlamaForCausalLM, *, kind: str = "F32", table: str = "F32", leave_out: str = "nothing"
) -> Path:
    """A Llama GGUF file with a small byte-level tokenizer, as llama.cpp's converter writes it.

    ``kind`` and ``table``: what the layers' matrices, and the embedding and the output head, are quantized to.
    """
    gguf = pytest.importorskip("gguf")
    config = model.config
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    tokens = ["<unk>", "<s>", "</s>", *(chr(33 + i) for i in range(90)), "!!", "AB"]
    tokens += [f"<spare{i}>" for i in range(config.vocab_size - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(tokens))
    writer.add_token_merges(["! !", "A B"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    vocab_ops = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v"}
    vocab_ops |= {"self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up"}
    vocab_ops |= {"mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    for layer in range(config.num_hidden_layers):
        names |= {f"model.layers.{layer}.{ours}": f"blk.{layer}.{theirs}" for ours, theirs in vocab_ops.items()}
    weights = model.state_dict()
    for ours, theirs in names.items():
        weight = weights[f"{ours}.weight"]
        if theirs.endswith("attn_q"):
            array = interleaved(weight, config.num_attention_heads)
        elif theirs.endswith("attn_k"):
            array = interleaved(weight, config.num_key_value_heads)
        else:
            array = weight.numpy()
        if leave_out in theirs:
            continue
        sort = gguf.GGMLQuantizationType[("F32" if "norm" in theirs else kind) if "blk" in theirs else table]
        if sort.name == "F32" or weight.dim() == 1:
            writer.add_tensor(f"{theirs}.weight", np.ascontiguousarray(array))
        else:
            packed = gguf.quants.quantize(np.ascontiguousarray(array), sort)
            writer.add_tensor(f"{theirs}.weight", packed, raw_dtype=sort)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
