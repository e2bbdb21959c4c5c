"""The certificate's statistics: p-values, stated power, and the false-alarm rate that is promised."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from headstart.lab.certifying.evidence import FIRST, Plan, along_texts, chi_tail, critical, noncentral_tail, pearson

LAW = {0: 0.45, 1: 0.3, 2: 0.15, 3: 0.07, 4: 0.03}


def drawn(law: dict[int, float], count: int, seed: int) -> Counter[int]:
    found = np.random.default_rng(seed).multinomial(count, list(law.values()))
    return Counter(dict(zip(law, map(int, found), strict=True)))


def away(distance: float) -> dict[int, float]:
    """A law so far from LAW in total variation: the hardest to see, spread in proportion."""
    up, down = {0, 3}, {1, 2, 4}
    gain, loss = sum(LAW[i] for i in up), sum(LAW[i] for i in down)
    return {i: p * (1 + distance / gain) if i in up else p * (1 - distance / loss) for i, p in LAW.items()}


def test_tails_are_those_of_tables() -> None:
    assert chi_tail(11.07, 5) == pytest.approx(0.05, abs=1e-4)
    assert critical(5, 0.05) == pytest.approx(11.0705, abs=1e-3)
    assert noncentral_tail(11.0705, 5, 0.0) == pytest.approx(0.05, abs=1e-4)
    normal = np.random.default_rng(0).standard_normal((100_000, 5))
    normal[:, 0] += np.sqrt(12.0)
    assert noncentral_tail(11.0705, 5, 12.0) == pytest.approx(((normal**2).sum(1) > 11.0705).mean(), abs=0.01)


def test_p_values_are_even_for_the_right_law() -> None:
    values = [pearson(drawn(LAW, 400, seed), LAW, strict=True).p_value for seed in range(600)]
    assert 0.03 < np.mean(np.array(values) < 0.05) < 0.08
    assert 0.4 < np.mean(values) < 0.6


def test_the_stated_power_holds() -> None:
    plan, distance = Plan(7), 0.09
    samples, degrees = 500, 4
    promised = plan.power(samples, degrees, distance)
    assert 0.4 < promised < 0.99, "else this test says little"
    caught = 0
    for seed in range(300):
        first = pearson(drawn(away(distance), samples, seed), LAW, strict=True)
        assert first.degrees == degrees
        again = None
        if first.p_value < FIRST and not plan.fails(first.p_value):
            again = pearson(drawn(away(distance), 3 * samples, seed + 10_000), LAW, strict=True).p_value
        caught += plan.fails(first.p_value, again)
    assert caught / 300 > promised - 0.08  # it is a lower bound
    assert plan.power(samples, degrees, plan.detectable(samples, degrees)) >= 0.99


def test_false_alarms_are_as_rare_as_promised() -> None:
    plan = Plan(5, alpha=0.2)  # a larger one can be counted
    alarms = 0
    for seed in range(2000):
        first = pearson(drawn(LAW, 300, seed), LAW, strict=True).p_value
        again = pearson(drawn(LAW, 900, seed + 50_000), LAW, strict=True).p_value if first < FIRST else None
        alarms += plan.fails(first, again)
    assert alarms / 2000 < 0.2 / 5 + 0.012
    assert plan.at_once + FIRST * plan.second <= plan.alpha / plan.tests + 1e-12


def test_what_cannot_come_fails_at_once_where_numbers_are_exact() -> None:
    counts = drawn(LAW, 400, 1) + Counter({9: 1})
    assert pearson(counts, LAW, strict=True).p_value == 0.0
    assert pearson(counts, LAW, strict=False).p_value > 1e-4


def test_tokens_along_texts() -> None:
    source = np.random.default_rng(3)
    laws = source.dirichlet([2.0, 1.0, 0.5, 0.3], 3000)
    right = [int(source.choice(4, p=law)) for law in laws]
    assert along_texts(right, laws).p_value > 1e-3
    sharper = [law**2 / (law**2).sum() for law in laws]
    assert along_texts([int(source.choice(4, p=law)) for law in sharper], laws).p_value < 1e-6
    assert along_texts(right, laws, impossible=1).p_value == 0.0
    assert along_texts([0, 0, 0], [[1.0, 0.0]] * 3).degrees == 0, "nothing to see where nothing can vary"


def test_what_rounding_does_is_excused_and_no_more() -> None:
    """A law at a known distance counts as the same; one that is further away does not."""
    near, far = away(0.06), away(0.2)
    distance = sum((near[i] - p) ** 2 / p for i, p in LAW.items())
    plan, accused, often, held = Plan(7), 0, 0, 0
    for seed in range(200):
        rounded = pearson(drawn(near, 2000, seed), LAW, strict=False, excused=distance)
        accused += rounded.p_value < 0.05
        often += rounded.p_value < 0.3
        held += pearson(drawn(near, 2000, seed), LAW, strict=False).p_value < 0.05
        assert plan.fails(pearson(drawn(far, 2000, seed), LAW, strict=False, excused=distance).p_value)
    assert accused / 200 < 0.09
    assert 0.2 < often / 200 < 0.4, "not more is excused than that"
    assert held / 200 > 0.9, "without the excuse"
    assert plan.power(2000, 4, 0.1, excused=distance) < plan.power(2000, 4, 0.1)
    assert plan.detectable(2000, 4, excused=distance) > plan.detectable(2000, 4) + 0.02
    assert critical(5, 0.05, 12.0) > critical(5, 0.05)
    assert noncentral_tail(critical(5, 0.05, 12.0), 5, 12.0) == pytest.approx(0.05, abs=1e-6)
