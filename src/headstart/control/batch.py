"""What a draft length is worth to rows that write together, while no request waits for the row that a fast one leaves.

Knows: expected tokens and times of rounds by draft length, and what is left to write. Does not know: where they come
from, or what is decided.

All rows wait for the wider round, and the batch ends with its last row. A row loses where its guesses hold less often
than those of others, and by bad luck alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..maths.cost import longer_for_the_last, slowest_tokens

__all__ = ["shared_speeds"]

SLOWEST, GUARD = 0.25, 2.0  # of the rows: what they lose counts so many times


def shared_speeds(
    chances: Sequence[Sequence[float]],
    tokens: Sequence[float],
    times: Sequence[float],
    left: Sequence[float],
    apart: float | None,
) -> tuple[list[float], float]:
    """Tokens a second by draft length, less what single rows lose; and more that must hold of each row's first guess so
    that the slowest ones do not.

    ``chances``, ``left``: of each row, as in ``longer_for_the_last``; ``tokens``, ``times``: of a round. ``apart``: the
    share of the difference between rows that is no chance; None: guesses that cost nothing, which come and go, so that
    those of a round say little of the next one's.
    """
    rows, paid = len(chances), apart is not None
    share = apart if apart is not None else 1.0
    means = [each / rows for each in tokens]
    found = slowest_tokens(chances, SLOWEST)
    slowest = [mean + share * (slow - mean) for mean, slow in zip(means, found, strict=True)]
    loss = [max(0.0, 1 - each * times[0] / time) for each, time in zip(slowest, times, strict=True)]
    late = longer_for_the_last(chances, left) if paid else [1.0] * len(times)
    alone = tokens[0] / times[0]
    speeds = [
        each / time / longer - GUARD * lost * alone
        for each, time, longer, lost in zip(tokens, times, late, loss, strict=True)
    ]
    return speeds, (means[1] - slowest[1]) * GUARD / (1 + GUARD) * paid
