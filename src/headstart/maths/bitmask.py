"""Masks of tokens as packed bits, and as tensors.

Knows: where a token's bit is. Does not know: which grammar a mask comes from.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..types import Mask

__all__ = ["allows", "only", "unpacked"]


def allows(mask: Mask, token: int) -> bool:
    """Is the token's bit set?"""
    return token >> 5 < len(mask) and bool(mask[token >> 5] >> np.uint32(token & 31) & np.uint32(1))


def only(mask: Mask) -> int | None:
    """The token, where a mask has a single one."""
    words = np.flatnonzero(mask)
    if len(words) != 1 or (word := int(mask[words[0]])) & (word - 1):
        return None
    return int(words[0]) * 32 + word.bit_length() - 1


def unpacked(masks: Sequence[Sequence[Mask | None]], nodes: int, width: int, device: torch.device | str) -> Tensor:
    """Masks of R rows with at most N nodes each, None for anything -> [R, N, width] bool. What a row lacks is anything,
    too; tokens past the end of a mask are not allowed by it."""
    found = np.ones((len(masks), nodes, width), np.uint8)
    for row, line in enumerate(masks):
        for node, mask in enumerate(line):
            if mask is not None:
                bits = np.unpackbits(mask.astype("<u4", copy=False).view(np.uint8), bitorder="little")[:width]
                found[row, node, : len(bits)], found[row, node, len(bits) :] = bits, 0
    return torch.from_numpy(found).to(device).bool()
