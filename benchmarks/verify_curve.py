"""What forwards of several tokens cost on the CPU kernels: in forwards of one, and as a share of the peak.

Knows: how to time a runner's forwards and to count their products. Does not know: models, other engines, results.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from common import median

from headstart.machine.cpu.plan import Plan

WIDTHS = list(range(1, 17))
BEHIND = 200  # tokens in the cache while forwards are timed


class Turn(NamedTuple):
    """Seconds of one forward of each width, and of forwards of one token just before and after it, their mean."""

    seconds: list[float]
    ones: list[float]


def our_widths(runner: Any) -> Turn:
    """In the middle of an answer. One token is timed beside every width, because a machine whose memory others use is
    faster one moment than the next."""
    ids = (torch.arange(BEHIND + WIDTHS[-1]) % 1000 + 100)[None]
    runner.forward(slice(0, 1), ids[:, :BEHIND], [0], keep=1)

    def timed(width: int) -> float:
        started = time.perf_counter()
        runner.forward(slice(0, 1), ids[:, BEHIND : BEHIND + width], [BEHIND])
        return time.perf_counter() - started

    found, ones = [], [timed(1)]
    for width in WIDTHS:
        found.append(timed(width))
        ones.append(timed(1))
    return Turn(found, [(before + after) / 2 for before, after in pairwise(ones)])


def medians(rounds: Sequence[Sequence[float]]) -> dict[int, float]:
    """Seconds by width, medians over the rounds."""
    return {width: median(column) for width, column in zip(WIDTHS, zip(*rounds, strict=True), strict=True)}


def curve(turns: Sequence[Turn]) -> dict[int, float]:
    """v(n), in forwards of one token: medians of the ratios within turns."""
    ratios = [[each / one for each, one in zip(turn.seconds, turn.ones, strict=True)] for turn in turns]
    return medians(ratios) | {1: 1.0}


def curve_of_medians(rounds: Sequence[Sequence[float]]) -> dict[int, float]:
    """The same of systems that time no token beside each width."""
    times = medians(rounds)
    return {width: seconds / times[1] for width, seconds in times.items()}


def largest_fall(v: dict[int, float]) -> float:
    """By how much a forward takes less than one of a token fewer, at the most."""
    return max(0.0, *(1 - v[width + 1] / v[width] for width in WIDTHS[:-1]))


def products(plan: Plan) -> int:
    """Products of two numbers that a token needs: one for each weight of a matrix. Attention's are not among them, nor
    those of outputs that only pad a tile."""
    looked_up = set() if plan.tied else {"embedding"}
    return sum(matrix.outputs * matrix.inputs for matrix in plan.matrices() if matrix.name not in looked_up)


def shares(plan: Plan, seconds: dict[int, float], peak: float) -> dict[int, float] | None:
    """Which share of ``peak`` (products a second, in registers) forwards of so many seconds reach, whatever else they
    do besides multiplying; None: there is no peak."""
    return {width: width * products(plan) / each / peak for width, each in seconds.items()} if peak else None
