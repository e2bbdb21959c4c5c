"""Q4_K and Q6_K without llama.cpp: a file as large and as fast as its Q4_K_M, on machines that have none.

Knows: the bytes of both blocks, and which tensors of a Q4_K_M are which. Does not know: llama.cpp's search for scales
that keep more of a model; these are by the least and the greatest number, so perplexities are not to be measured here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["q4_k", "q6_k", "write_q4_k_m"]


def _halves(x: Tensor) -> Tensor:
    return x.to(torch.float16).contiguous().view(torch.uint8)


def q4_k(x: Tensor) -> Tensor:
    """[rows, n] -> [rows, n / 256 * 144] bytes."""
    groups = x.float().reshape(-1, 8, 32)
    low, high = groups.amin(-1).clamp_max(0), groups.amax(-1)
    scale, least = (high - low).clamp_min(0) / 15, -low
    d, e = ((v.amax(-1, keepdim=True) / 63).to(torch.float16) for v in (scale, least))
    s, m = ((v / of.float().clamp_min(1e-12)).round().clamp(0, 63) for v, of in ((scale, d), (least, e)))
    step, offset = (d.float() * s)[..., None], (e.float() * m)[..., None]
    q = ((groups + offset) / step.clamp_min(1e-12)).round().clamp(0, 15).to(torch.uint8)
    s, m = s.to(torch.uint8), m.to(torch.uint8)
    packed = [s[:, :4] | s[:, 4:] >> 4 << 6, m[:, :4] | m[:, 4:] >> 4 << 6, s[:, 4:] & 15 | (m[:, 4:] & 15) << 4]
    pairs = q.view(-1, 4, 2, 32)
    numbers = (pairs[:, :, 0] | pairs[:, :, 1] << 4).flatten(1)
    return torch.cat([_halves(d), _halves(e), *packed, numbers], 1).view(len(x), -1)


def q6_k(x: Tensor) -> Tensor:
    """[rows, n] -> [rows, n / 256 * 210] bytes."""
    groups = x.float().reshape(-1, 16, 16)
    most = groups.abs().amax(-1) / 31
    d = (most.amax(-1, keepdim=True) / 127).to(torch.float16)
    s = (most / d.float().clamp_min(1e-12)).round().clamp(0, 127)
    step = (d.float() * s)[..., None]
    q = ((groups / step.clamp_min(1e-12)).round().clamp(-32, 31) + 32).to(torch.uint8).view(-1, 2, 4, 32)
    low = torch.stack([q[:, :, 0] & 15 | (q[:, :, 2] & 15) << 4, q[:, :, 1] & 15 | (q[:, :, 3] & 15) << 4], 2)
    high = q[:, :, 0] >> 4 | q[:, :, 1] >> 4 << 2 | q[:, :, 2] >> 4 << 4 | q[:, :, 3] >> 4 << 6
    return torch.cat([low.flatten(1), high.flatten(1), s.to(torch.uint8), _halves(d)], 1).view(len(x), -1)


def _kind(name: str, layers: int) -> Any:
    from gguf import GGMLQuantizationType as kinds

    if name in ("output.weight", "token_embd.weight"):
        return kinds.Q6_K
    if name.endswith(("attn_v.weight", "ffn_down.weight")):
        layer, eighth = int(name.split(".")[1]), layers // 8
        return kinds.Q6_K if layer < eighth or layer >= 7 * eighth or (layer - eighth) % 3 == 2 else kinds.Q4_K
    return kinds.Q4_K


def write_q4_k_m(source: Path, out: Path) -> None:
    """A float16 GGUF file as Q4_K_M."""
    import gguf  # an extra: machines without it may import this file

    reader = gguf.GGUFReader(source)
    fields = reader.fields
    architecture = str(fields["general.architecture"].contents())
    layers = int(fields[f"{architecture}.block_count"].contents())
    writer = gguf.GGUFWriter(out, architecture)
    for name, field in fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], sub_type=inner)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_K_M)
    for tensor in reader.tensors:
        if len(tensor.shape) == 1:
            writer.add_tensor(tensor.name, np.array(tensor.data))
            continue
        kind, numbers = _kind(tensor.name, layers), torch.from_numpy(np.array(tensor.data))
        parts = [(q6_k if kind.name == "Q6_K" else q4_k)(part) for part in numbers.split(2048)]
        writer.add_tensor(tensor.name, torch.cat(parts).numpy(), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
