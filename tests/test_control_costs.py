"""What rounds and drafts cost, as measured: the lines through them."""

from __future__ import annotations

import random
from statistics import median

import pytest

from headstart.control.costs import LIFETIME, Costs
from headstart.control.draft_costs import DraftCosts, DraftSeconds
from headstart.maths.cost import CostModel, slope


def test_start_and_step_are_told_apart() -> None:
    cost = DraftSeconds()
    assert not cost
    assert cost.line() == (0.0, 0.0)
    for tokens in (1, 2, 4, 1, 3) * 6:
        cost.add(tokens, 0.7 + 0.3 * tokens)
    assert cost
    assert cost.line() == pytest.approx((0.7, 0.3))
    cost.add(2, 50.0)  # one slow moment
    assert cost.line() == pytest.approx((0.7, 0.3))


def test_one_length_has_no_start_and_nothing_is_below_zero() -> None:
    cost = DraftSeconds()
    for _ in "ab":
        cost.add(4, 2.0)
    assert cost.line() == (0.0, 0.5)
    for _ in "ab":
        cost.add(1, 3.0)  # longer for fewer tokens: all of it is the start
    assert cost.line() == pytest.approx((2.5, 0.0))
    steep = DraftSeconds()
    for _ in "ab":
        steep.add(1, 0.1)
        steep.add(2, 2.0)  # more than twice as long for twice as many: all of it is steps
    start, step = steep.line()
    assert start == pytest.approx(0.0)
    assert step == pytest.approx(0.7)


def test_of_few_drafts_the_fastest_counts() -> None:
    """Any one of them may have been disturbed, and none is asked for twice before it is known what it takes."""
    cost = DraftSeconds()
    cost.add(1, 0.3)
    cost.add(2, 5.0)
    assert cost.line() == (0.0, 0.3)


def test_old_drafts_are_forgotten() -> None:
    cost = DraftSeconds()
    cost.add(1, 9.0)
    for i in range(DraftSeconds.WINDOW):
        cost.add(i % 2 + 1, 0.1 * (i % 2 + 1))
    assert cost.line() == pytest.approx((0.0, 0.1))


def test_the_slope_of_a_line_is_its_own() -> None:
    assert slope([(n, 3.0 + 0.5 * n, n) for n in (4, 1, 2, 9)]) == pytest.approx(0.5)
    assert slope([(4, 1.0, 3)]) == 0.0
    assert slope([]) == 0.0


def test_a_point_of_little_weight_does_not_tilt_the_line() -> None:
    line = [(n, 0.1 * n, 7) for n in (1, 2, 3)]
    assert slope([*line, (10, 50.0, 1)]) == pytest.approx(0.1)
    assert slope([*line, (10, 50.0, 700)]) > 4, "but it does when it was seen often"


def test_what_was_timed_long_ago_is_kept_until_there_is_something_new() -> None:
    cost = DraftSeconds()
    assert cost.old()
    for _ in range(6):
        cost.add(2, 50.0)
    for _ in range(LIFETIME):
        cost.tick()
    assert not cost.old()
    cost.tick()
    assert cost.old()
    assert cost.line() == (0.0, 25.0)
    cost.add(2, 1.0)
    assert not cost.old()
    assert cost.line() == (0.0, 0.5)


def test_a_width_timed_long_ago_counts_for_little() -> None:
    costs = Costs()
    for _ in range(3):
        costs.add(1, 1, 1.0)
    for seconds in (9.0, 5.0, 9.0, 9.0, 9.0, 9.0):
        costs.add(1, 2, seconds)
    assert costs.table(1)[1][1] > 4
    for _ in range(LIFETIME + 1):
        costs.add(1, 1, 1.0)
    width, seconds, times = costs.table(1)[1]
    assert (width, times) == (2, 2)
    assert seconds < 2, "no longer trusted to cost far more than supposed"


def test_costs_stay_numbers_on_a_noisy_machine() -> None:
    """What a round takes is a low value of the last ones, and the level follows their middle: it drifts."""
    costs, drafts, chance = Costs(), DraftSeconds(), random.Random(1)
    for tokens in (1, 2, 1, 2):
        drafts.add(tokens, 0.5 * tokens)
    for number in range(25_000):
        width = 1 + number // 100 % 2
        costs.add(1, width, width * chance.lognormvariate(0, 1))
        if (by := costs.settle()) != 1.0:
            drafts.scale(by)
            assert drafts.line()[1] == pytest.approx(0.5 * by)
            drafts.scale(1 / by)
    assert 1 / Costs.FAR < costs.level < Costs.FAR
    assert all(0.02 < seconds < 50 for _, seconds, _ in costs.table(1)[:2])


@pytest.mark.parametrize("noise", [0.1, 0.2])
def test_what_is_not_measured_does_not_drift_on_a_noisy_machine(noise: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain rounds go on for long; what a wider one costs is still known. Else drafting would never pay again."""
    monkeypatch.setattr(Costs, "FORGOTTEN", 10_000)
    chance, costs = random.Random(7), Costs()
    for _ in range(4):
        costs.add(1, 2, 1.5)
    found = []
    for number in range(3000):
        costs.add(1, 1, chance.lognormvariate(0, noise))
        costs.settle()
        if number > 50:
            found.append(costs.table(1)[1][1] / costs.table(1)[0][1])
    assert min(found) >= 1
    assert max(found) < 4


@pytest.mark.parametrize(("noise", "gap"), [(0.0, 0.0), (0.15, 0.0), (0.0, 0.3), (0.1, 0.3)])
def test_beginning_to_draft_costs_what_it_costs_and_not_the_noise(noise: float, gap: float) -> None:
    """Guesses that come alone, as lookup's do: now and then a round is stalled, and that is no price of the change."""
    chance, costs, wide, found = random.Random(3), Costs(), False, []
    for _ in range(600):
        before, wide = wide, chance.random() < 0.3
        stall = 2.5 if chance.random() < 0.04 else 1.0
        took = (1.2 if wide else 1.0) + gap * (wide != before)
        costs.add(1, 2 if wide else 1, took * stall * chance.lognormvariate(0, noise))
        found.append(costs.switch)
    assert median(found[100:]) == pytest.approx(gap, abs=0.055)


def test_a_plain_round_that_is_not_counted_is_no_measurement() -> None:
    """The first one behind drafts, with rows that were not timed yet: nothing is known of such a round then, not even
    that it took no time."""
    costs = Costs()
    costs.add(1, 1, 0.010)
    costs.add(8, 4, 0.020)
    costs.add(8, 1, 0.012)
    assert all(seconds > 0 for rows in (1, 8) for _, seconds, _ in costs.table(rows))
    assert all(seconds > 0 for seconds in costs.forwards(8, 5, curious=True))
    costs.add(8, 1, 0.013)
    assert costs.forwards(8, 5, curious=True)[0] == pytest.approx(0.013)


def test_most_rounds_disturbed_are_not_what_a_round_takes() -> None:
    """The first three of a width came in a bad moment. While they rule drafts out nothing measures that width again."""
    costs = Costs()
    costs.add(1, 1, 0.038)
    for seconds in (0.144, 0.084, 0.156, 0.041):
        costs.add(1, 2, seconds)
    assert costs.table(1)[1][1] == pytest.approx(0.041)
    costs = Costs()
    costs.add(1, 1, 0.038)
    for seconds in (0.050, 0.048, 0.049, 0.041):
        costs.add(1, 2, seconds)
    assert costs.table(1)[1][1] == pytest.approx(0.048), "but noise goes both ways"


def test_ragged_widths_that_were_seen_seldom_cost_what_all_say() -> None:
    """Of many noisy widths the one that looks cheapest is chosen, so it takes longer than it looks."""
    chance, costs = random.Random(5), Costs(ragged=True)
    for _ in range(12):
        costs.add(8, 1, 5.0)
    for width in [2, 3, 4, 5, 6, 7, 8, 9, 11, 13] * 3:
        costs.add(8, width, 5.0 + 0.3 * (width - 1))
    for _ in range(3):
        costs.add(8, 21, 5.1 + 0.1 * chance.random())  # three that seem to cost nothing
    assert costs.forwards(8, 21)[20] > 5.0 + 0.2 * 20


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("ragged", [False, True])
def test_what_a_bad_moment_said_is_forgotten_where_nothing_says_it_again(ragged: bool, rows: int) -> None:
    """A neighbour took the cores that wide rounds need, and went. While drafts seem not to pay, only plain rounds come,
    and now and then a narrow one."""
    costs = Costs(ragged=ragged)
    for _ in range(12):
        costs.add(rows, 1, 0.040)
        for width in (5, 9, 17, 33):
            costs.add(rows, width, 0.040 + 0.012 * (width - 1))
    bad = costs.forwards(rows, 33)[32]
    for number in range(Costs.FORGOTTEN + 2):
        costs.add(rows, 2 if number % 60 == 59 else 1, 0.040)
    assert bad > 0.2
    assert costs.forwards(rows, 33)[32] < 0.12


def test_a_wide_round_seen_in_a_good_moment_makes_no_plain_round_look_fast() -> None:
    """Plain rounds have been timed since, and often: then it is the wide one that does not hold any more."""
    costs = Costs(ragged=True)
    costs.add(4, 1, 0.045)
    for _ in range(2):
        costs.add(4, 17, 0.018)
    assert costs.forwards(4, 1)[0] == pytest.approx(0.018)
    for _ in range(20):
        costs.add(4, 1, 0.045)
    assert costs.forwards(4, 1)[0] == pytest.approx(0.045)
    assert costs.forwards(4, 17)[16] >= 0.045


@pytest.mark.parametrize("ragged", [False, True])
def test_wide_rounds_that_become_dearer_are_no_slower_machine(ragged: bool) -> None:
    """A neighbour takes a core: what is bound by memory goes on as before, and is not timed while drafts are made."""
    costs = Costs(ragged=ragged)
    for width in (1, 9) * 9:
        costs.add(8, width, 0.0075 if width == 1 else 0.0095)
    for _ in range(20):
        costs.add(8, 9, 0.020)
    assert costs.doubtful(8), "is a plain round as slow?"
    costs.add(8, 1, 0.0075)
    assert not costs.doubtful(8)
    assert costs.forwards(8, 9)[0] == pytest.approx(0.0075, rel=0.05)
    assert costs.forwards(8, 9)[8] == pytest.approx(0.020, rel=0.05)


@pytest.mark.parametrize(("begins", "change"), [("before", 1.45), ("behind", 1.45), ("before", 0.7), ("behind", 0.7)])
@pytest.mark.parametrize("ragged", [False, True])
def test_the_machine_changes_while_a_width_is_measured_for_the_first_time(
    begins: str, change: float, ragged: bool
) -> None:
    """Plain rounds tell of the change only when they are timed again: what was measured meanwhile may be from before it
    or behind it, which is told by what it should cost. Drafts of these rounds alike."""
    costs, plain, rng = Costs(CostModel(c=0.3, v={1: 1.0, 2: 1.04, 4: 1.1}), ragged=ragged), 0.020, random.Random(1)
    drafting = DraftCosts(costs, None, 0.3)

    def rounds(count: int, width: int, speed: float) -> None:
        for _ in range(count):
            noise = 1 + 0.01 * rng.random()
            costs.add(1, width, plain * speed * (1.04 if width > 1 else 1.0) * noise)
            drafting.tick()
            if width > 1:
                drafting.add(1, width - 1, 0.3 * plain * speed * noise, 0.0, level=True, missing=0)

    rounds(20, 1, 1.0)
    rounds(8, 2, change if begins == "before" else 1.0)
    rounds(12, 1, change)
    found = {width: seconds for width, seconds, _ in costs.table(1)}
    assert found[1] == pytest.approx(plain * change, rel=0.05)
    assert found[2] / found[1] == pytest.approx(1.04, abs=0.05)
    assert drafting.line(1)[1] / found[1] == pytest.approx(0.3, abs=0.03)


def test_rounds_that_take_no_time_at_all_break_nothing() -> None:
    """As clocks of a low resolution have them."""
    costs = Costs()
    for _ in range(6):
        costs.add(1, 1, 0.01)
    for _ in range(20):
        costs.add(1, 1, 0.0)
    assert costs.table(1)[0][1] < 0.01
