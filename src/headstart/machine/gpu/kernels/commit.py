"""The end of a round in one launch: what was accepted, what the host is told, and the table brought up to date.

Knows: chains, each row's limit, and where a round's outcome goes. Does not know: how the target's tokens or a
rejection rule's verdicts were found. What it does in one launch takes thirty as tensor operations of a few numbers,
each of which costs as much as a layer's attention.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..tiles import power_of_two

__all__ = ["Table", "close_round"]


class Table(NamedTuple):
    """What a round's end changes, and what it needs to know of the rows."""

    last: Tensor  # [R, 2] int64: the last two committed tokens
    places: Tensor  # [3, R] int64: lengths that grow by what was emitted
    result: Tensor  # [R, ..] int64: accepted, token, is it well, and the drafted tokens
    limits: Tensor  # [R] int64: how many drafted tokens the row takes
    advance: Tensor  # [R] int64: 1, or 0 for rows that stand still


@triton.jit(do_not_specialize=["N", "wide", "apart"])
def _close_kernel(
    targets, tokens, accepted, token, ok, emitted, last, places, result, limits, advance, N, wide, apart,
    B: tl.constexpr, FOLLOW: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0)
    n = tl.arange(0, B)
    drafted = tl.load(tokens + r * (N + 1) + n, mask=n <= N, other=0)
    if FOLLOW:  # as far as the draft has the target's own tokens
        before = tl.load(targets + r * (N + 1) + n - 1, mask=(n >= 1) & (n <= N), other=-1)
        agrees = (before == drafted) & (n <= tl.load(limits + r))
        held = tl.min(tl.where((n >= 1) & (n <= N) & (agrees == 0), n, N + 1), axis=0).to(tl.int64) - 1
        found = tl.load(targets + r * (N + 1) + held)
        well = (found >= 0).to(tl.int64)
        tl.store(accepted + r, held)
    else:
        held = tl.load(accepted + r)
        found = tl.load(token + r)
        well = tl.load(ok + r).to(tl.int64)
    found = tl.maximum(found, 0)
    tl.store(emitted + r, found)
    tl.store(result + r * wide, held)
    tl.store(result + r * wide + 1, found)
    tl.store(result + r * wide + 2, well)
    tl.store(result + r * wide + 2 + n, drafted, mask=(n >= 1) & (n <= N))
    tl.store(last + r * 2, tl.sum(tl.where(n == held, drafted, 0), axis=0))
    tl.store(last + r * 2 + 1, found)
    k = tl.arange(0, 4)
    place = places + k * apart + r
    grown = tl.load(place, mask=k < 3, other=0) + (held + 1) * tl.load(advance + r)
    tl.store(place, grown, mask=k < 3)


def close_round(
    tokens: Tensor,
    table: Table,
    *,
    targets: Tensor | None = None,
    verdicts: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Accepted drafts [R] and the target's own token [R] of each row, written wherever they belong.

    tokens [R, N+1]: the last committed token and the drafted ones. Either ``targets`` [R, N+1], the token that the
    target puts after each of these (-1: broken there), which the row follows; or ``verdicts``: accepted, token, ok.
    """
    rows, nodes = tokens.shape
    tokens = tokens.contiguous()
    if verdicts is not None:
        accepted, token, ok = (part.contiguous() for part in verdicts)
        source = tokens
    else:
        assert targets is not None
        accepted, source = torch.empty_like(tokens[:, 0]), targets.contiguous()
        token, ok = accepted, accepted
    emitted = torch.empty_like(accepted)
    _close_kernel[(rows,)](
        source, tokens, accepted, token, ok, emitted, table.last, table.places, table.result, table.limits,
        table.advance, nodes - 1, table.result.stride(0), table.places.stride(0), B=max(power_of_two(nodes), 16),
        FOLLOW=verdicts is None, num_warps=1,
    )  # fmt: skip
    return accepted, emitted
