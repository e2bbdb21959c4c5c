"""Where the largest value of each row stands.

Knows: that the first index wins a tie, and that NaN counts as the largest value (so that it is never overlooked).
Does not know: whether the values are logits, probabilities or noisy scores.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

__all__ = ["argmax"]

_NUMPY = (torch.float32, torch.float64)
_SMALL = 2048  # below this the plain reduction is the faster one


def argmax(x: Tensor) -> Tensor:
    """First index of the largest value: x [.., V] -> [..] int64.

    torch.argmax on the CPU is ten times slower than torch.amax, because it is not vectorised; numpy's is, and wakes no
    threads. Types that numpy lacks become float32 row by row, so that the copy stays in the cache.
    """
    size = x.shape[-1]
    if x.device.type != "cpu" or size < _SMALL:
        return x.argmax(-1)
    flat = x.detach().reshape(-1, size)
    rows = flat.numpy() if x.dtype in _NUMPY else (row.float().numpy() for row in flat)
    return torch.tensor([int(np.argmax(row)) for row in rows], dtype=torch.int64).view(x.shape[:-1])
