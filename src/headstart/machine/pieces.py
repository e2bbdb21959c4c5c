"""Tokens to read into several rows at once: what is refused, and which rows may share a forward.

Knows: rows, widths and the slab's room. Does not know: models.
"""

from __future__ import annotations

from collections.abc import Sequence

from .kvcache import Slab

__all__ = ["Pieces", "batches", "check_pieces"]

Pieces = Sequence[tuple[int, Sequence[int]]]  # (row, tokens), each row once, in any order

FEW = 16  # tokens that take a forward on a CPU little longer than one does: it has to read the weights anyway


def check_pieces(slab: Slab, pieces: Pieces) -> None:
    """What is read must have a row of its own, and fit there."""
    rows = [row for row, _ in pieces]
    if len(set(rows)) < len(rows) or not all(0 <= row < slab.rows for row in rows):
        raise ValueError(f"rows {rows} to read into: each must be one of the slab's {slab.rows}, and only once")
    for row, tokens in pieces:
        if not tokens:
            raise ValueError(f"nothing to read into row {row}")
        if slab.lengths[row] + len(tokens) > slab.max_len:
            raise ValueError(f"row {row} would hold {slab.lengths[row] + len(tokens)} tokens of {slab.max_len}")


def batches(slab: Slab, pieces: Pieces, *, wide: bool) -> list[list[int]]:
    """Numbers of the pieces that are read in one forward each: consecutive rows, the shorter pieces padded.

    ``wide``: the device takes many tokens about as quickly as few, so that up to half of them may be padding. Otherwise
    only a few tokens go together.
    """
    found: list[list[int]] = []
    for i in sorted(range(len(pieces)), key=lambda i: pieces[i][0]):
        batch = [*found[-1], i] if found else [i]
        widths = [len(pieces[j][1]) for j in batch]
        padded, end = max(widths) * len(batch), max(slab.lengths[pieces[j][0]] for j in batch) + max(widths)
        cheap = padded <= FEW or (wide and padded < 2 * sum(widths))
        together = len(batch) > 1 and pieces[batch[-2]][0] == pieces[i][0] - 1
        if together and cheap and end <= slab.capacity:
            found[-1] = batch
        else:
            found.append([i])
    return found
