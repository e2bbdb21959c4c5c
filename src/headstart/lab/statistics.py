"""What repeated measurements say of a ratio, and how surely.

Knows: paired measurements in blocks, their ratio and its interval; means and quantiles. Does not know: what was
measured.

A block is one prompt in one turn: two engines answer it side by side, so that what slows the machine down slows both.
The speed-up is the time of all answers by the one over that by the other, each prompt with its mean over the turns; its
logarithm is as good as normal. Two kinds of chance are in it, and each has an interval:

    these prompts    the same prompts again: only the noise of time, seen in what blocks of one prompt differ by
    other prompts    prompts like these: also what prompts differ by, seen in what they differ by here

Noise of time comes in spells, so that blocks that follow each other are off together. The variance therefore counts
neighbours in time with each other: by Bartlett's weights (as Newey and West do) and by the sums of a few long
stretches, the larger of the two, and never less than the blocks alone say. What is slower still, such as another
program that wants memory for minutes, a short measurement cannot see: all of it lies within. ``DRIFT`` stands for that.

A controller that drafts a prompt at one time and not at another makes spells, too, and a short measurement has few of
them. The interval then is as wide as it has to be for the number of long stretches, not for that of blocks.

On a shared machine something else has the processor for a tenth of a second now and then, and one of the two answers
gets all of it. A block whose ratio is far from what its prompt's other blocks say counts as if the slower side had been
just so slow (``_without_stalls``): one stall in a hundred rounds would else make the interval twice as wide.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

__all__ = ["LEVEL", "Block", "Interval", "Ratio", "geometric_mean", "median", "quantile", "ratio", "t_quantile"]

LEVEL = 0.9  # how sure an interval is
REACH = 2.5  # usual deviations of a block's ratio from its prompt's median, from where on it was stalled
LIKE = 3  # blocks of a prompt that are needed to say so
STRETCHES = 8  # of the whole time at the most, each of STRETCH blocks at least, whose sums tell of long spells
STRETCH = 4
DRIFT = 0.02  # standard error of a ratio that was measured within a moment, by what it is a minute later
SPELL = 60.0  # seconds for which such a thing lasts: in a longer time there are several
_NORMAL = 1.4826  # a normal law's standard deviation, in medians of absolute deviations


@dataclass(frozen=True)
class Interval:
    """Where a value lies."""

    low: float
    mid: float
    high: float

    @property
    def width(self) -> float:
        """Over the value."""
        return (self.high - self.low) / self.mid if self.mid else 0.0

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high

    def to_json(self) -> dict[str, float]:
        return {"low": self.low, "mid": self.mid, "high": self.high}

    def __str__(self) -> str:
        return f"{self.mid:.2f} [{self.low:.2f}, {self.high:.2f}]"


@dataclass(frozen=True)
class Block:
    """One prompt in one turn, measured of two. Blocks are kept in the order in which they were measured."""

    prompt: int
    base_tokens: int
    base_seconds: float
    tokens: int
    seconds: float
    drafted: bool = True  # by the second one


@dataclass(frozen=True)
class Ratio:
    """How many times faster the second is than the base."""

    value: float
    interval: Interval | None  # for these prompts; None: too little was measured to say
    others: Interval | None  # for prompts like these
    blocks: int

    def to_json(self) -> dict[str, object]:
        return {
            "value": self.value,
            "interval": self.interval.to_json() if self.interval is not None else None,
            "interval_other_prompts": self.others.to_json() if self.others is not None else None,
            "level": LEVEL,
            "blocks": self.blocks,
        }

    def __str__(self) -> str:
        if self.interval is None:
            return f"{self.value:.2f}x"
        return f"{self.value:.2f}x [{self.interval.low:.2f}, {self.interval.high:.2f}]"


def ratio(blocks: Sequence[Block], level: float = LEVEL) -> Ratio | None:
    """The speed-up over these blocks; None if there is nothing to tell it from."""
    blocks = [b for b in blocks if b.base_tokens > 0 and b.tokens > 0 and b.base_seconds > 0 and b.seconds > 0]
    if not blocks:
        return None
    blocks = _without_stalls(blocks)
    turns: dict[int, int] = defaultdict(int)  # of each prompt
    for block in blocks:
        turns[block.prompt] += 1
    weights = [1 / turns[block.prompt] for block in blocks]
    base = _sum(weights, [b.base_seconds for b in blocks])
    mine = _sum(weights, [b.seconds for b in blocks])
    base_rate = base / _sum(weights, [b.base_tokens for b in blocks])
    rate = mine / _sum(weights, [b.tokens for b in blocks])
    value = base_rate / rate
    # How far each block pulls the logarithm of the ratio up (they add up to zero).
    pulls = [
        weight * ((b.base_seconds - base_rate * b.base_tokens) / base - (b.seconds - rate * b.tokens) / mine)
        for weight, b in zip(weights, blocks, strict=True)
    ]
    groups = [b.prompt for b in blocks]
    drift = DRIFT**2 / (1 + sum(b.base_seconds + b.seconds for b in blocks) / SPELL)
    noise, spread = _noise(pulls, groups), _spread(pulls, groups)
    if noise is not None and _comes_and_goes(blocks):
        noise = noise[0], max(1, min(noise[1], _stretches(len(blocks)) - 1))
    here, others = (
        _interval(value, math.sqrt(each[0] + drift), each[1], level) if each is not None else None
        for each in (noise, spread)
    )
    return Ratio(value, here, others, len(blocks))


def _without_stalls(blocks: Sequence[Block]) -> list[Block]:
    """The same blocks, those of a ratio that cannot be right brought back to where it could be."""
    logs = [math.log(b.base_seconds / b.base_tokens * b.tokens / b.seconds) for b in blocks]
    members: dict[int, list[float]] = defaultdict(list)
    for log, block in zip(logs, blocks, strict=True):
        members[block.prompt].append(log)
    middles = {prompt: median(each) for prompt, each in members.items() if len(each) >= LIKE}
    off = [sorted(abs(log - middles[prompt]) for log in members[prompt]) for prompt in middles]
    # The median itself is no deviation: of an odd number of blocks one is off by nothing.
    usual = [each for prompt in off for each in prompt[len(prompt) % 2 :]]
    if not usual:
        return list(blocks)
    most = REACH * _NORMAL * median(usual)
    found = []
    for log, block in zip(logs, blocks, strict=True):
        away = log - middles.get(block.prompt, log)
        if away > most:  # the base was stalled
            block = replace(block, base_seconds=block.base_seconds * math.exp(most - away))
        elif away < -most:
            block = replace(block, seconds=block.seconds * math.exp(most + away))
        found.append(block)
    return found


def _comes_and_goes(blocks: Sequence[Block]) -> bool:
    """Was some prompt answered with drafts at one time, and without at another?"""
    return len({block.prompt for block in blocks}) < len({(block.prompt, block.drafted) for block in blocks})


def _noise(pulls: Sequence[float], groups: Sequence[int]) -> tuple[float, int] | None:
    """The variance from what blocks of one prompt differ by, and its degrees of freedom."""
    members: dict[int, list[float]] = defaultdict(list)
    for pull, group in zip(pulls, groups, strict=True):
        members[group].append(pull)
    free = sum(len(each) - 1 for each in members.values())
    if free < 2:
        return None
    errors = []  # in the order of time; a prompt that was measured once has none of its own
    for pull, group in zip(pulls, groups, strict=True):
        each = members[group]
        if len(each) > 1:
            errors.append((pull - sum(each) / len(each)) * math.sqrt(len(each) / (len(each) - 1)))
    single = len(pulls) - len(errors)
    variance = _long_run(errors)
    if single:  # blocks of prompts that were measured once err as the others do
        variance *= len(pulls) / len(errors)
    return variance, free


def _long_run(errors: Sequence[float]) -> float:
    """The variance of the errors' sum, neighbours in time counted with each other."""
    alone = sum(error * error for error in errors)
    reach = max(1, round(1.5 * len(errors) ** (1 / 3)))
    total = alone
    for lag in range(1, reach + 1):
        pairs = sum(a * b for a, b in zip(errors, errors[lag:], strict=False))
        total += 2 * (1 - lag / (reach + 1)) * pairs
    return max(alone, total, _by_stretches(errors))


def _by_stretches(errors: Sequence[float]) -> float:
    """The same from the sums of long stretches of time, which are as good as independent."""
    count = _stretches(len(errors))
    if count < 3:
        return 0.0
    ends = [len(errors) * i // count for i in range(count + 1)]
    return count / (count - 1) * sum(sum(errors[a:b]) ** 2 for a, b in pairwise(ends))


def _stretches(blocks: int) -> int:
    return min(STRETCHES, blocks // STRETCH)


def _spread(pulls: Sequence[float], groups: Sequence[int]) -> tuple[float, int] | None:
    """From what prompts differ by."""
    sums: dict[int, float] = defaultdict(float)
    for pull, group in zip(pulls, groups, strict=True):
        sums[group] += pull
    count = len(sums)
    if count < 3:
        return None
    return count / (count - 1) * sum(each * each for each in sums.values()), count - 1


def _interval(value: float, error: float, free: int, level: float) -> Interval:
    reach = math.exp(t_quantile(0.5 + level / 2, free) * error)
    return Interval(value / reach, value, value * reach)


def _sum(weights: Sequence[float], values: Sequence[float]) -> float:
    return sum(weight * value for weight, value in zip(weights, values, strict=True))


def t_quantile(share: float, free: int) -> float:
    """Of Student's distribution with so many degrees of freedom: what is exceeded with probability 1 - share."""
    if not 0.5 <= share < 1 or free < 1:
        raise ValueError(f"there is no quantile {share} with {free} degrees of freedom")
    low, high = 0.0, 1.0
    while _t_cdf(high, free) < share:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_cdf(middle, free) < share else (low, middle)
    return (low + high) / 2


def _t_cdf(x: float, free: int) -> float:
    """For x >= 0, by the finite sums for whole degrees of freedom."""
    angle = math.atan(x / math.sqrt(free))
    cosine = math.cos(angle) ** 2
    term, total = 1.0, 0.0
    if free % 2:
        for k in range(1, free // 2 + 1):
            total += term
            term *= cosine * 2 * k / (2 * k + 1)
        inside = 2 / math.pi * (angle + math.sin(angle) * math.cos(angle) * total)
    else:
        for k in range(1, free // 2 + 1):
            total += term
            term *= cosine * (2 * k - 1) / (2 * k)
        inside = math.sin(angle) * total
    return 0.5 + inside / 2


def geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def median(values: Iterable[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def quantile(values: Iterable[float], share: float) -> float:
    """The least value that so large a share of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
