"""Masks of tokens as packed bits, and as tensors.

Knows: where a token's bit is. Does not know: which grammar a mask comes from.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..types import Mask

__all__ = ["allows", "bits_of", "masked", "only", "unpacked"]


def allows(mask: Mask, token: int) -> bool:
    """Is the token's bit set?"""
    return token >> 5 < len(mask) and bool(mask[token >> 5] >> np.uint32(token & 31) & np.uint32(1))


def only(mask: Mask) -> int | None:
    """The token, where a mask has a single one."""
    words = np.flatnonzero(mask)
    if len(words) != 1 or (word := int(mask[words[0]])) & (word - 1):
        return None
    return int(words[0]) * 32 + word.bit_length() - 1


def bits_of(mask: Mask, width: int) -> np.ndarray:
    """Of the first ``width`` tokens, which are allowed [width] bool; none past the end of the mask."""
    found = np.unpackbits(mask.astype("<u4", copy=False).view(np.uint8), bitorder="little")[:width]
    return np.pad(found, (0, width - len(found))).view(np.bool_)


def masked(logits: Tensor, bits: Tensor) -> Tensor:
    """logits [R, N, V] without the tokens whose bits are not set: bits [R, N, W] int32, 32 tokens each -> a new tensor.
    What is not allowed does not count, broken numbers neither. Nothing here waits for a device."""
    places = torch.arange(32, device=bits.device, dtype=bits.dtype)
    allowed = (bits.unsqueeze(-1) >> places & 1).flatten(-2)[..., : logits.shape[-1]]
    return logits.masked_fill(allowed == 0, -torch.inf)


def unpacked(masks: Sequence[Sequence[Mask | None]], nodes: int, width: int, device: torch.device | str) -> Tensor:
    """Masks of R rows with at most N nodes each, None for anything -> [R, N, width] bool. What a row lacks is anything,
    too; tokens past the end of a mask are not allowed by it."""
    found = np.ones((len(masks), nodes, width), np.bool_)
    for row, line in enumerate(masks):
        for node, mask in enumerate(line):
            if mask is not None:
                found[row, node] = bits_of(mask, width)
    return torch.from_numpy(found).to(device)
