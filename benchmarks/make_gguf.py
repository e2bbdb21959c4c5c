"""Model files of the sizes people run on CPUs, for our engine and llama.cpp alike: grown from the embedded model.

    python benchmarks/make_gguf.py /tmp/models --peers-python /tmp/peers/bin/python          # all of them, some minutes
    python benchmarks/make_gguf.py /tmp/models --peers-python ... --only grown-0.5b --kind Q4_0

Each is grown (``headstart.lab.grow``: the embedded model's function at another size), written as GGUF in float16 tensor
by tensor, and rounded by llama.cpp's own ``llama_model_quantize``. The draft has noise on its weights, so that it
agrees with the target about as often as real pairs do. The tokenizer is that of the embedded file; ids past it are
unused.

Knows: GGUF's names for a Llama's and a Qwen2's tensors and settings. Does not know: who reads the files.
"""

from __future__ import annotations

import argparse
import os
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from common import log
from k_quants import write_q4_k_m
from pairs import Noise
from torch import Tensor
from transformers import AutoModelForCausalLM

from headstart.lab.grow import grow_tensors
from headstart.machine.load.loading import read_gguf


@dataclass(frozen=True)
class Recipe:
    shape: str
    noise: float = 0.0  # on the small model's weights, see ``pairs.Noise``


RECIPES = {
    "grown-1.5b": Recipe("1.5b"),
    "grown-0.5b": Recipe("0.5b", noise=0.07),
    "grown-1.5b-152k": Recipe("qwen2-1.5b"),
}
_PARTS = {  # a layer's tensors
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_OTHERS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str) -> str:
    """A tensor's name in GGUF, from its name in transformers."""
    module, _, kind = name.rpartition(".")
    if module.startswith("model.layers."):
        layer, part = module.removeprefix("model.layers.").split(".", 1)
        return f"blk.{layer}.{_PARTS[part]}.{kind}"
    return f"{_OTHERS[module]}.{kind}"


def permuted(weight: Tensor, heads: int) -> Tensor:
    """[heads * d, n] with each head's rotary pairs (i, i + d / 2) side by side, as a llama has them in GGUF."""
    return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def in_order(names: Iterable[str], tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The tensors in the order of ``names``. What comes early is held until its turn."""
    early: dict[str, Tensor] = {}
    for name in names:
        while name not in early:
            found, tensor = next(tensors)
            early[found] = tensor
        yield name, early.pop(name)


def _settings(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


def _tokenizer(writer: gguf.GGUFWriter, like: Path, vocab_size: int) -> None:
    """The tokenizer's fields as they are in another file; ids past it get names of their own and are marked unused."""
    for name, field in gguf.GGUFReader(like).fields.items():
        if not name.startswith("tokenizer."):
            continue
        value, kind = field.contents(), field.types[0]
        if name == "tokenizer.ggml.tokens":
            value = [*value, *(f"[PAD{i}]" for i in range(len(value), vocab_size))]
        elif name == "tokenizer.ggml.token_type":
            value = [*value, *[int(gguf.TokenType.UNUSED)] * (vocab_size - len(value))]
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, value, kind, sub_type=inner)


def write_gguf(path: Path, name: str, config: Any, tensors: Iterator[tuple[str, Tensor]], like: Path) -> None:
    """A GGUF file of a model in float16 (norms and biases: float32), tensor by tensor. ``like``: has the tokenizer."""
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    shapes = {n: p.shape for n, p in empty.named_parameters()}
    writer = gguf.GGUFWriter(path, config.model_type)
    writer.add_name(name)
    _settings(writer, config)
    _tokenizer(writer, like, config.vocab_size)
    for tensor, shape in shapes.items():
        dtype = np.dtype(np.float32 if len(shape) == 1 else np.float16)
        writer.add_tensor_info(gguf_name(tensor), tuple(shape), dtype, shape.numel() * dtype.itemsize)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for number, (tensor, found) in enumerate(in_order(shapes, tensors), 1):
        part = tensor.split(".")[-2]
        # A Qwen2's rotary pairs stay (i, i + d / 2) in GGUF too.
        if part in heads and config.model_type == "llama":
            found = permuted(found, heads[part])
        data = found.contiguous().to(torch.float32 if found.dim() == 1 else torch.float16).numpy()
        if data.shape != tuple(shapes[tensor]):
            raise ValueError(f"{tensor} is {data.shape}, not {tuple(shapes[tensor])}")
        writer.write_tensor_data(data)
        if part == "down_proj":
            log(f"{path.name}: {number} of {len(shapes)} tensors")
    writer.close()


_QUANTIZE = """
import sys, llama_cpp as c
source, out, kind, threads = sys.argv[1:]
params = c.llama_model_quantize_default_params()
params.ftype, params.allow_requantize, params.nthread = getattr(c, "LLAMA_FTYPE_MOSTLY_" + kind), True, int(threads)
sys.exit(c.llama_model_quantize(source.encode(), out.encode(), params))
"""


def quantize(python: str, source: Path, out: Path, kind: str, threads: int = 2) -> None:
    """llama.cpp's own rounding of one file into another, by a python that has llama-cpp-python."""
    part = out.with_suffix(".part")
    command = [python, "-c", _QUANTIZE, str(source), str(part), kind, str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        part.unlink(missing_ok=True)
        raise RuntimeError(f"{out.name} cannot be made: {' '.join(done.stderr.splitlines()[-3:])}")
    part.rename(out)


def make(name: str, recipe: Recipe, folder: Path, kind: str, python: str, like: Path, threads: int = 2) -> Path:
    """One file of the given kind in ``folder``, unless it is there."""
    out, exact = folder / f"{name}-{kind}.gguf", folder / f"{name}-F16.gguf"
    if out.exists():
        return out
    if not exact.exists():
        small: Any = read_gguf(like)[0]
        if recipe.noise:
            small = Noise(small).model(recipe.noise)
        config, tensors = grow_tensors(small, recipe.shape, torch.device("cpu"), torch.float16)
        part = exact.with_suffix(".part")
        write_gguf(part, name, config, tensors, like)
        part.rename(exact)
    if kind != "F16":
        log(f"{out.name}: rounding")
        if python == "none" and kind == "Q4_K_M":
            part = out.with_suffix(".part")
            write_q4_k_m(exact, part)
            part.rename(out)
        else:
            quantize(python, exact, out, kind, threads)
        exact.unlink()
    log(f"{out.name}: {out.stat().st_size / 1e9:.2f} GB")
    return out


def main() -> None:
    from peers import wheel_gguf

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--peers-python", required=True, help="that has llama-cpp-python; or none (k_quants.py)")
    parser.add_argument("--only", nargs="*", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--kind", default="Q4_K_M", help="as llama.cpp calls it; F16: not rounded")
    parser.add_argument("--draft-noise", type=float, help="for the draft, in standard deviations of each weight matrix")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="that round")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for name in arguments.only:
        recipe = RECIPES[name]
        if recipe.noise and arguments.draft_noise is not None:
            recipe = Recipe(recipe.shape, arguments.draft_noise)
        python, threads = arguments.peers_python, arguments.threads
        make(name, recipe, arguments.folder, arguments.kind, python, wheel_gguf(), threads)


if __name__ == "__main__":
    main()
