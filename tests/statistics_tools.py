"""A chi-squared test for counts against a known law."""

from __future__ import annotations

from collections import Counter

import torch


def chi_squared(counts: Counter[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> float:
    """The p-value; cells with an expectation under 5 are put together. An impossible outcome gives 0."""
    total = sum(counts.values())
    if any(law.get(outcome, 0.0) <= 0 for outcome in counts):
        return 0.0
    cells: list[tuple[float, float]] = []
    rest_seen = rest_expected = 0.0
    for outcome, chance in law.items():
        if chance * total >= 5:
            cells.append((counts[outcome], chance * total))
        else:
            rest_seen += counts[outcome]
            rest_expected += chance * total
    if rest_expected > 0.5:
        cells.append((rest_seen, rest_expected))
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in cells)
    degrees = torch.tensor((len(cells) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(degrees, torch.tensor(statistic / 2, dtype=torch.float64)))
