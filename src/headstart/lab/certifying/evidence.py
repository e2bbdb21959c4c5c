"""How sure a test is: p-values, what it would have noticed, and how often a sound engine is accused.

Knows: chi-squared statistics and the plan by which several tests share one false-alarm rate. Does not know: tokens,
engines, or where counts come from.

The plan is fixed before anything is drawn. Each of k tests is taken once. A p-value under ``at_once`` fails it. One
under ``FIRST`` that is not so small is a reason to look again: the test is repeated with other seeds and
``MORE`` times the samples, and fails if the second p-value is under ``second``. A sound engine fails a test with
probability at most at_once + FIRST * second = alpha / k, so a certificate with probability at most alpha.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

__all__ = ["ALPHA", "FIRST", "MORE", "Plan", "Tested", "along_texts", "chi_tail", "noncentral_tail", "pearson"]

ALPHA = 1e-4  # how often the certificate of a sound engine may fail
FIRST = 0.01  # a smaller p-value is looked at again
MORE = 3  # times as many samples then
LEAST = 10.0  # expected in a cell; those with less are put together
SURE = 0.99  # the power that detectable distances are given for

T = TypeVar("T")


@dataclass(frozen=True)
class Tested:
    """One chi-squared test."""

    statistic: float
    degrees: int
    p_value: float
    samples: int  # outcomes, or tokens along texts
    impossible: int = 0  # outcomes that the target never gives
    excused: float = 0.0  # of the statistic's mean: what rounding alone may do to it, for each sample


def chi_tail(x: float, degrees: float) -> float:
    """P(chi-squared with so many degrees of freedom > x)."""
    if degrees <= 0:
        return 1.0
    half = torch.tensor([degrees / 2, max(x, 0.0) / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def noncentral_tail(x: float, degrees: float, shift: float) -> float:
    """The same where the mean is ``shift`` too large: a mixture, by a Poisson law, of more degrees of freedom."""
    if degrees <= 0:
        return 0.0
    middle = shift / 2
    reach = int(10 * math.sqrt(middle) + 40)
    j = torch.arange(max(0, int(middle) - reach), int(middle) + reach + 1, dtype=torch.float64)
    weights = torch.exp(j * math.log(middle) - middle - torch.lgamma(j + 1)) if middle > 0 else (j == 0).double()
    tails = torch.special.gammaincc(degrees / 2 + j, torch.full_like(j, max(x, 0.0) / 2))
    return float((weights * tails).sum().clamp(0, 1))


def critical(degrees: int, level: float, shift: float = 0.0) -> float:
    """What a chi-squared statistic exceeds with probability ``level``; ``shift``: see ``noncentral_tail``."""

    def tail(x: float) -> float:
        return noncentral_tail(x, degrees, shift) if shift else chi_tail(x, degrees)

    low, high = 0.0, 1.0
    while tail(high) > level:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if tail(middle) > level else (low, middle)
    return high


@dataclass(frozen=True)
class Plan:
    """How k tests share one false-alarm rate; see above."""

    tests: int
    alpha: float = ALPHA

    @property
    def at_once(self) -> float:
        return self.alpha / (2 * max(self.tests, 1))

    @property
    def second(self) -> float:
        return min(1.0, self.at_once / FIRST)

    def fails(self, first: float, again: float | None = None) -> bool:
        """``again``: the p-value of the repetition, where there was one."""
        return first < self.at_once or (first < FIRST and again is not None and again < self.second)

    def power(self, samples: int, degrees: int, distance: float, excused: float = 0.0) -> float:
        """The least probability that a test notices a law that is ``distance`` away in total variation (over its
        cells). Of all such laws the hardest has a noncentrality of 4 n d^2, by Cauchy and Schwarz. ``excused``: see
        ``Tested``."""
        if degrees < 1:
            return 0.0
        shift, free = 4.0 * samples * distance**2, samples * excused
        at_once = noncentral_tail(critical(degrees, self.at_once, free), degrees, shift)
        looked = noncentral_tail(critical(degrees, FIRST, free), degrees, shift)
        again = noncentral_tail(critical(degrees, self.second, MORE * free), degrees, MORE * shift)
        return at_once + max(looked - at_once, 0.0) * again

    def detectable(self, samples: int, degrees: int, power: float = SURE, excused: float = 0.0) -> float:
        """The total variation that a test notices with this probability, at least."""
        if degrees < 1:
            return 1.0
        low, high = 0.0, 1.0
        for _ in range(30):
            middle = (low + high) / 2
            low, high = (low, middle) if self.power(samples, degrees, middle, excused) >= power else (middle, high)
        return high


def pearson(counts: Mapping[T, int], law: Mapping[T, float], *, strict: bool, excused: float = 0.0) -> Tested:
    """Counts against a law over all their outcomes. Cells in which less than ``LEAST`` are expected are put together.
    ``excused``: a law whose chi-squared distance from this one is no larger counts as the same.

    ``strict``: an outcome to which the law gives nothing cannot come, and fails the test; else (where rounding moves
    the edge of a truncated distribution) it counts among the rare ones.
    """
    total = sum(counts.values())
    impossible = sum(count for outcome, count in counts.items() if law.get(outcome, 0.0) <= 0)
    cells: list[tuple[float, float]] = []
    for outcome, chance in sorted(law.items(), key=lambda item: item[1]):
        seen, expected = float(counts.get(outcome, 0)), chance * total
        if cells and cells[-1][1] < LEAST:
            cells[-1] = cells[-1][0] + seen, cells[-1][1] + expected
        else:
            cells.append((seen, expected))
    if impossible and cells:
        cells[0] = cells[0][0] + impossible, cells[0][1]
    if len(cells) > 1 and cells[-1][1] < LEAST:
        last = cells.pop()
        cells[-1] = cells[-1][0] + last[0], cells[-1][1] + last[1]
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in cells if expected > 0)
    degrees = len(cells) - 1
    tail = noncentral_tail(statistic, degrees, total * excused) if excused and degrees else chi_tail(statistic, degrees)
    return Tested(statistic, degrees, 0.0 if impossible and strict else tail, total, impossible, excused)


def along_texts(seen: Sequence[int], laws: Sequence[Sequence[float]], *, impossible: int = 0) -> Tested:
    """Tokens along texts, each in one of C classes, against the target's probabilities [n, C] of the classes, given
    what stands before the token. The differences are a martingale: their sum, over its covariance, is chi-squared."""
    p = np.asarray(laws, dtype=np.float64)
    found = np.zeros_like(p)
    found[np.arange(len(seen)), np.asarray(seen, dtype=np.int64)] = 1.0
    expected = p.sum(0)
    order = np.argsort(expected)
    groups: list[list[int]] = [[]]
    for index in order:  # classes that hardly come are put together
        if sum(expected[i] for i in groups[-1]) >= LEAST:
            groups.append([])
        groups[-1].append(int(index))
    if len(groups) > 1 and sum(expected[i] for i in groups[-1]) < LEAST:
        groups[-2] += groups.pop()
    p = np.stack([p[:, group].sum(1) for group in groups], 1)
    found = np.stack([found[:, group].sum(1) for group in groups], 1)
    degrees = len(groups) - 1
    if degrees < 1:
        return Tested(0.0, 0, 1.0, len(seen), impossible)
    difference = (found - p).sum(0)[:-1]  # the last one follows from the others
    covariance = np.diag(p.sum(0)) - p.T @ p
    covariance = covariance[:-1, :-1]
    scale = float(np.trace(covariance)) / degrees
    if scale <= 0:
        return Tested(0.0, 0, 1.0, len(seen), impossible)
    inverse = np.linalg.pinv(covariance, rcond=1e-9)
    statistic = float(difference @ inverse @ difference)
    return Tested(statistic, degrees, 0.0 if impossible else chi_tail(statistic, degrees), len(seen), impossible)
