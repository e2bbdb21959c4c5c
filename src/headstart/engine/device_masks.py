"""What grammars let each node of a captured round go on with: bits on the device, a line for each row and node.

Knows: which rows have bits that are not set, and how new ones get there. Does not know: where masks come from
(``node_masks``), or what is done with them (``programs``).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch

from ..types import Mask

__all__ = ["DeviceMasks"]


class DeviceMasks:
    """Captured programs read ``bits`` in place. Rows without a grammar, and idle ones, have all of theirs set."""

    def __init__(self, rows: int, nodes: int, width: int, device: torch.device) -> None:
        """``width``: V of the target's logits."""
        size = rows, nodes, -(-width // 32)
        self.bits = torch.full(size, -1, dtype=torch.int32, device=device)
        self._host = torch.full(size, -1, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._lines = self._host.numpy().view(np.uint32)
        self._narrow: set[int] = set()  # rows of which some bit may not be set

    def send(self, masks: Seq[Seq[Mask | None]], nodes: int) -> None:
        """The masks of each row's nodes, None for anything; nothing for a row without a grammar. What a row lacks up to
        ``nodes`` is anything, too; tokens past the end of a mask are not allowed by it.

        What was sent before must have arrived: whoever asks has read the result of the round that it was for.
        """
        wanted = {row for row, line in enumerate(masks) if any(mask is not None for mask in line)}
        wide = self._narrow - wanted
        self._narrow |= wanted  # before anything is sent: an interruption leaves too many, never too few
        for row in sorted(wide):
            self.bits[row].fill_(-1)
        self._narrow -= wide
        for row in sorted(wanted):
            lines = self._lines[row, :nodes]
            lines[:] = 0xFFFFFFFF
            for line, mask in zip(lines, masks[row], strict=False):
                if mask is not None:
                    line[: len(mask)] = mask[: len(line)]
                    line[len(mask) :] = 0
            self.bits[row, :nodes].copy_(self._host[row, :nodes], non_blocking=True)
