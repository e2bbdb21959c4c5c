"""Ratios of paired measurements: right, and as sure as they say, also where noise comes in spells."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import pytest

from headstart.lab.statistics import Block, geometric_mean, median, quantile, ratio, t_quantile

TRUE = {0: 1.6, 1: 2.4, 2: 1.2, 3: 1.9, 4: 1.5, 5: 3.0}  # the speed-up of each prompt


def blocks(
    random: Random, turns: int, noise: float, spells: float, *, moving: float | None = None, scale: float = 10.0
) -> list[Block]:
    """Measurements with noise of its own in each, and noise of the pair that goes on from one block to the next:
    ``spells`` of it, of the size ``moving``. ``scale``: seconds of a block, about."""
    moving = noise if moving is None else moving
    found, level = [], random.gauss(0, moving) if spells else 0.0
    for _ in range(turns):
        for prompt, speed in TRUE.items():
            level = spells * level + math.sqrt(1 - spells**2) * random.gauss(0, moving)
            seconds = scale * (1 + 0.3 * prompt)
            common = math.exp(random.gauss(0, 0.2))  # what slows both down
            own = [math.exp(random.gauss(0, noise)) for _ in "ab"]
            base, mine = common * seconds * own[0] * math.exp(level / 2), common * seconds / speed * own[1]
            tokens = 40 + 4 * prompt
            found.append(Block(prompt, tokens, base, tokens, mine * math.exp(-level / 2)))
    return found


def truth() -> float:
    seconds = {prompt: 10.0 * (1 + 0.3 * prompt) for prompt in TRUE}
    return sum(seconds.values()) / sum(seconds[prompt] / speed for prompt, speed in TRUE.items())


def held(turns: int, noise: float, spells: float, times: int = 400, **more: float) -> tuple[float, float]:
    """How often the interval of such measurements holds the true value, and its median width."""
    random, found = Random(turns), []
    for _ in range(times):
        each = ratio(blocks(random, turns, noise, spells, **more))
        assert each is not None
        assert each.interval is not None
        found.append(each.interval)
    return sum(interval.holds(truth()) for interval in found) / times, median(interval.width for interval in found)


@pytest.mark.parametrize(("turns", "spells"), [(3, 0.0), (6, 0.0), (4, 0.6), (8, 0.6)])
def test_the_interval_holds_the_true_value_as_often_as_it_says(turns: int, spells: float) -> None:
    share, width = held(turns, 0.05, spells)
    assert share > 0.84
    assert width < 0.12


@pytest.mark.parametrize(("turns", "spells", "moving"), [(3, 0.9, 0.03), (4, 0.97, 0.02), (8, 0.98, 0.02)])
def test_it_does_so_where_the_machine_changes_slowly(turns: int, spells: float, moving: float) -> None:
    """Spells as long as the whole measurement, which it cannot see: half a second a block, a minute a spell."""
    share, width = held(turns, 0.03, spells, moving=moving, scale=0.2)
    assert share > 0.87
    assert width < 0.11


def test_what_slows_both_down_is_no_part_of_the_interval() -> None:
    """The same noise in both of a pair cancels, but for the weight that a slow moment has."""
    random = Random(1)
    found = ratio(blocks(random, 6, 0.0, 0.0))
    assert found is not None
    assert found.interval is not None
    assert found.interval.width < 0.06


def test_prompts_that_were_measured_more_often_do_not_count_more() -> None:
    exact = [Block(0, 10, 4.0, 10, 1.0)] * 5 + [Block(1, 10, 4.0, 10, 4.0)]
    found = ratio(exact)
    assert found is not None
    assert found.value == pytest.approx(8 / 5)


def test_where_drafts_come_and_go_there_are_as_many_measurements_as_spells() -> None:
    measured = blocks(Random(2), 4, 0.02, 0.0)
    steady = ratio(measured)
    fickle = ratio([replace(block, drafted=number < 12) for number, block in enumerate(measured)])
    once = ratio([replace(block, drafted=block.prompt < 3) for block in measured])
    assert steady is not None
    assert fickle is not None
    assert once is not None
    assert steady.interval is not None
    assert fickle.interval is not None
    assert once.interval == steady.interval, "some prompts are drafted and others not: that is no chance"
    assert fickle.value == steady.value
    # Twenty-four blocks of six prompts, or six stretches.
    wider = math.log(fickle.interval.high / fickle.value) / math.log(steady.interval.high / steady.value)
    assert wider == pytest.approx(t_quantile(0.95, 5) / t_quantile(0.95, 18))


def test_other_prompts_are_less_sure_than_these() -> None:
    found = ratio(blocks(Random(2), 5, 0.02, 0.0))
    assert found is not None
    assert found.interval is not None
    assert found.others is not None
    assert found.others.width > 3 * found.interval.width
    assert found.to_json()["blocks"] == 30


def test_too_little_is_not_called_sure() -> None:
    assert ratio([]) is None
    assert ratio([Block(0, 0, 0.0, 0, 0.0)]) is None
    once = ratio([Block(i, 10, 2.0, 10, 1.0) for i in range(6)])
    assert once is not None
    assert once.value == pytest.approx(2)
    assert once.interval is None
    assert str(once) == "2.00x"


def test_quantiles_of_students_distribution() -> None:
    for free, value in ((1, 6.3138), (2, 2.9200), (5, 2.0150), (30, 1.6973)):
        assert t_quantile(0.95, free) == pytest.approx(value, abs=1e-4)
    with pytest.raises(ValueError, match="no quantile"):
        t_quantile(0.4, 3)


def test_means_and_quantiles() -> None:
    assert geometric_mean([1, 4]) == pytest.approx(2)
    assert median([3, 1, 2]) == 2
    assert median([4, 1, 2, 3]) == 2.5
    assert quantile(range(1, 11), 0.9) == 9
