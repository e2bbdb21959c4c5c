"""How much of what a grammar forces is worth verifying at once.

Knows: that such tokens hold, and that all rows of a round wait for the widest. Does not know: grammars.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..maths.cost import round_tokens
from ..types import Proposal
from .costs import Costs

__all__ = ["cut_forced"]


def cut_forced(costs: Costs, proposals: Sequence[Proposal | None]) -> list[Proposal | None]:
    """Forced guesses cut to the length that gives the most tokens a second, and not below what the round verifies
    anyhow for other rows."""
    forced = [len(p) if p is not None and p.forced else 0 for p in proposals]
    if not any(forced):
        return list(proposals)
    tokens = round_tokens([[1.0] * length for length in forced])
    forwards = costs.forwards(len(forced), len(tokens))
    speeds = [gained / seconds for gained, seconds in zip(tokens, forwards, strict=True)] if forwards else tokens
    others = (len(p) for p in proposals if p is not None and not p.forced)
    most = max(speeds.index(max(speeds)), *others, 0)
    return [p.cut(most) if p is not None and p.forced else p for p in proposals]
