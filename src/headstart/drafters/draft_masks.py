"""Grammars while a draft is drawn: a guess that its request's grammar forbids would be for nothing.

Knows: which tokens each row has drafted in this round. Does not know: where the logits come from.

The masks are those that the target will be held to; they are worked out once (``types.Constraint`` keeps them). Where a
grammar leaves one token only, that is the guess, with q = 1, whether the draft knows the token or not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..maths.bitmask import only, unpacked
from ..types import DraftView, Mask

__all__ = ["DraftMasks"]


class DraftMasks:
    """The grammars of a draft's rows."""

    def __init__(self, views: Sequence[DraftView], live: Sequence[bool] | None = None) -> None:
        """``live``: rows whose guess counts; the others come along."""
        asked = live if live is not None else [True] * len(views)
        self._rows = [view.constraint if wanted else None for view, wanted in zip(views, asked, strict=True)]
        self._drafted: list[tuple[int, ...]] = [() for _ in views]
        self._ended = [False] * len(views)  # nothing of the grammar's can be drafted any more

    @property
    def masked(self) -> list[bool]:
        """Which rows have a grammar."""
        return [constraint is not None for constraint in self._rows]

    def mask(self, row: int) -> Mask | None:
        """What may follow what a row drafted; None: anything."""
        constraint = self._rows[row]
        return None if constraint is None or self._ended[row] else constraint.mask(self._drafted[row])

    def only(self, row: int) -> int | None:
        """The only token that may follow, where the grammar forces one."""
        constraint = self._rows[row]
        forced = () if constraint is None or self._ended[row] else constraint.forced(1, self._drafted[row])
        return forced[0] if forced else None

    def allows(self, row: int, token: int) -> bool:
        """May this token follow?"""
        constraint = self._rows[row]
        return constraint is None or self._ended[row] or constraint.allows(self._drafted[row], token)

    def take(self, row: int, token: int) -> None:
        """A row drafted a token; -1: none."""
        self._ended[row] |= token < 0
        self._drafted[row] += (token,)

    def applied(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [R, V] that say all there is to say where only one token may follow, and what may follow [R, V] bool.
        A row that knows no token that may follow has all of them, and its guess does not count (``took``)."""
        masks = [self.mask(row) for row in range(len(self._rows))]
        allowed = unpacked([[mask] for mask in masks], 1, logits.shape[-1], logits.device)[:, 0]
        single = {row: only(mask) for row, mask in enumerate(masks) if mask is not None}
        if any(token is not None for token in single.values()):
            logits = logits.clone()
        for row, token in single.items():
            if token is not None and token < logits.shape[-1]:
                logits[row, token] = 0.0
        dead = ~(allowed & logits.isfinite()).any(-1)  # [R]
        for row in dead.nonzero()[:, 0].tolist():
            self._ended[row] = True
            allowed[row] = True
        return logits, allowed

    def took(self, tokens: Tensor) -> Tensor:
        """The tokens [R] that were drawn; -1 where a row could draw none."""
        if any(self._ended):
            tokens = torch.where(torch.tensor(self._ended, device=tokens.device), -1, tokens)
        for row, token in enumerate(tokens.tolist()):
            if self._rows[row] is not None:
                self.take(row, token)
        return tokens
