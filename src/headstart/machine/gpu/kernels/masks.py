"""Tokens that a grammar forbids, taken out of logits in one launch.

Knows: where a token's bit is (``maths.bitmask``). Does not know: which grammar a mask comes from.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["masked"]

_TOKENS = 1024  # that a program looks at


@triton.jit(do_not_specialize=["nodes"])
def _mask_kernel(logits, bits, out, nodes, V, apart, between, B: tl.constexpr):
    chunk, m = tl.program_id(0), tl.program_id(1).to(tl.int64)
    v = chunk * B + tl.arange(0, B)
    words = bits + (m // nodes) * apart + (m % nodes) * between
    word = tl.load(words + v // 32, mask=v < V, other=0)
    x = tl.load(logits + m * V + v, mask=v < V, other=0.0)
    tl.store(out + m * V + v, tl.where(((word >> (v % 32)) & 1) != 0, x, float("-inf")), mask=v < V)


def masked(logits: Tensor, bits: Tensor) -> Tensor:
    """As ``maths.bitmask.masked``: logits float32 [R, N, V], in one piece; bits int32 [R, N, W], perhaps lines of a
    wider tensor."""
    rows, nodes, size = logits.shape
    out = torch.empty_like(logits)
    grid = (triton.cdiv(size, _TOKENS), rows * nodes)
    _mask_kernel[grid](logits, bits, out, nodes, size, bits.stride(0), bits.stride(1), B=_TOKENS, num_warps=4)
    return out
