"""How much of what a grammar forces is worth verifying at once.

Knows: that such tokens hold, and that all rows of a round wait for each other. Does not know: grammars.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..types import DraftView, Proposal
from .choices import Choices
from .costs import Costs

__all__ = ["cut_forced", "widened"]

GUARD = 2.0  # what rows without a grammar lose by it counts so many times


def cut_forced(costs: Costs, views: Sequence[DraftView], proposals: Sequence[Proposal | None]) -> list[Proposal | None]:
    """Forced guesses cut to the length that gives the most tokens a second. Rows without a grammar only wait for them:
    they get no more than one token of a wider round."""
    forced = [len(p) if p is not None and p.forced else 0 for p in proposals]
    if not any(forced):
        return list(proposals)
    certain = [[1.0] * length for length in forced]
    padded = not costs.ragged or not all(p is None or p.is_chain for p in proposals)
    choices = Choices.by_length(certain, 1.0, ragged=costs.ragged) if padded else Choices.by_guess(certain, 1.0)
    tokens = choices.tokens
    most, times = len(tokens) - 1, costs.seconds(len(forced), choices.widths)
    if times:
        change = 0.0 if costs.wide else 2 * costs.switch
        seconds = [times[0], *(each + change for each in times[1:])]
        guard = GUARD if any(view.params.structured is None for view in views) else 0.0
        alone = tokens[0] / seconds[0]
        lost = [max(0.0, 1 - seconds[0] / each) for each in seconds]
        speeds = [t / each - guard * loss * alone for t, each, loss in zip(tokens, seconds, lost, strict=True)]
        most = speeds.index(max(speeds))
    cut = zip(proposals, choices.lengths(most), strict=True)
    return [p.cut(length) if p is not None and p.forced else p for p, length in cut]


def widened(whole: Sequence[Proposal | None], cut: Sequence[Proposal | None]) -> list[Proposal | None]:
    """Forced guesses as long as they were, up to what the round verifies anyhow."""
    widest = max((len(p) for p in cut if p is not None), default=0)
    pairs = zip(whole, cut, strict=True)
    return [before.cut(widest) if before is not None and before.forced else after for before, after in pairs]
