"""Where the largest value of each row stands.

Knows: that the first index wins a tie, and that NaN counts as the largest value (so that it is never overlooked).
Does not know: whether the values are logits, probabilities or noisy scores.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

__all__ = ["argmax"]

_BLOCK = 256
_NUMPY = (torch.float32, torch.float64)
_SMALL = 2048  # below this the plain reduction is the faster one


def argmax(x: Tensor) -> Tensor:
    """First index of the largest value: x [.., V] -> [..] int64.

    torch.argmax on the CPU is ten times slower than torch.amax, because it is not vectorised; numpy's is, and wakes no
    threads. Where numpy lacks the type, the vocabulary is cut in blocks: the fast reduction finds the largest value of
    each, and only the winning block is searched.
    """
    size = x.shape[-1]
    if x.device.type != "cpu" or size < _SMALL:
        return x.argmax(-1)
    if x.dtype in _NUMPY and x.stride(-1) == 1:
        rows = x.detach().numpy().reshape(-1, size) if x.is_contiguous() else x.detach().flatten(0, -2).numpy()
        return torch.tensor([int(np.argmax(row)) for row in rows]).view(x.shape[:-1])
    whole = size - size % _BLOCK
    blocks = x[..., :whole].reshape(*x.shape[:-1], whole // _BLOCK, _BLOCK)  # a view, even of a slice of the vocabulary
    peaks = blocks.amax(-1)  # [.., V // 256]
    if whole < size:
        peaks = torch.cat([peaks, x[..., whole:].amax(-1, keepdim=True)], -1)
    start = peaks.argmax(-1, keepdim=True) * _BLOCK  # [.., 1]
    # A short last block repeats the last token; the first index wins, so the copies never do.
    places = (start + torch.arange(_BLOCK, device=x.device)).clamp_max_(size - 1)
    inside = x.gather(-1, places).argmax(-1)
    return start.squeeze(-1) + inside
