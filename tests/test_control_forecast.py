"""What was measured of a pair before it serves: the controller begins with it, and believes its own rounds more."""

from __future__ import annotations

from dataclasses import replace
from statistics import mean, median
from typing import Any

import pytest
from controller_world import Machine, Played, View, World, cpu, curve, plain_speed, played, same

from headstart.config import DraftConfig
from headstart.control.acceptance import PAID, Acceptance
from headstart.control.adaptive import AdaptiveController
from headstart.control.controller import controller_for
from headstart.maths.cost import CostModel, Forecast
from headstart.types import Round, SamplingParams

WORLDS = 12


def forecast(machine: Machine, alpha: float) -> Forecast:
    """As a measurement of the machine at load would give it."""
    plain = machine.forward(1, 1)
    v = {width: machine.forward(1, width) / plain for width in (1, 3, 5, 9)}
    return Forecast(CostModel(c=machine.ratio, v=v), alpha, alpha)


def worlds(machine: Machine, alpha: float, tokens: int, told: float | None) -> list[Played]:
    known = {} if told is None else {"forecast": forecast(machine, told)}
    return [played(machine, 1, same(alpha), seed, tokens, **known) for seed in range(WORLDS)]


def test_a_short_answer_is_drafted_where_the_forecast_says_that_it_pays() -> None:
    """1.5B and 0.5B as measured on two cores: reading the prompt takes the draft as long as four plain rounds."""
    forward = curve((1, 36), (3, 40), (5, 46), (9, 66), (64, 500))
    machine = Machine(lambda r, w: forward(r * w), 0.37, (0.0, 1.0, 0.18), ahead=False, noise=0.03)
    speeds = []
    for told in (0.76, None):
        found = []
        for seed in range(WORLDS):
            controller, world = AdaptiveController(10), World(machine, 1, same(0.76), seed)
            known = forecast(machine, told) if told is not None else None
            controller.meet(free=False, ends_itself=False, cost=1 / 3, forecast=known)
            world.views[0].params = SamplingParams(max_tokens=96)
            found.append(world.play(controller, 96).speed() / plain_speed(machine, 1))
        speeds.append(mean(found))
    assert speeds[0] >= 1.06, "with what is left of 1.2 after the reading"
    assert speeds[0] >= 1.03 * speeds[1], "without it nobody dares to"


@pytest.mark.parametrize("ratio", [1 / 10, 1 / 3])
def test_a_forecast_that_is_wrong_costs_little(ratio: float) -> None:
    machine = cpu(ratio)
    speeds = [each.speed() / plain_speed(machine, 1) for each in worlds(machine, 0.02, 256, 0.8)]
    assert median(speeds) >= 0.97
    assert min(speeds) >= 0.96


@pytest.mark.parametrize("ratio", [1 / 10, 1 / 3])
def test_a_draft_that_measured_useless_is_hardly_asked(ratio: float) -> None:
    machine = cpu(ratio)
    found = worlds(machine, 0.02, 256, 0.02)
    assert min(each.speed() for each in found) >= 0.985 * plain_speed(machine, 1)


def test_a_draft_that_measured_useless_and_is_not_is_found_out() -> None:
    machine = cpu(1 / 10)
    found = worlds(machine, 0.9, 1500, 0.02)
    assert median(each.speed(1000) for each in found) >= 1.3 * plain_speed(machine, 1)


def test_greedy_and_drawn_rounds_begin_with_their_own_rate() -> None:
    controller = controller_for(DraftConfig())
    cost = CostModel(c=0.1, v={9: 1.2})
    controller.meet(free=False, ends_itself=False, forecast=Forecast(cost, 0.9, 0.3))
    controller.meet(free=False, ends_itself=False)  # a cold start: what was measured stays
    rates = [each._acceptance.rate(PAID) for each in (controller._greedy, controller._drawn)]  # type: ignore[attr-defined]
    assert rates == pytest.approx([0.9, 0.3])


def test_a_place_that_failed_a_few_times_is_tried_again() -> None:
    """Drafts that end before it teach nothing about it, so what it showed must fade while they hold."""
    found = Acceptance()
    for _ in range(20):
        found.learn([("a", PAID, (True,))])
    for _ in range(4):
        found.learn([("a", PAID, (True, False))])
    low = found.rate(PAID - 1)
    for _ in range(20):
        found.learn([("a", PAID, (True,))])
    assert low < 0.6 < 0.85 < found.rate(PAID - 1)
    for _ in range(30):
        found.learn([("a", PAID, (False,))])
    assert found.rate(PAID - 1) < 0.85, "a draft that failed says nothing for the next place"


def test_while_nothing_is_drafted_hardly_anything_is_decided() -> None:
    """Deciding takes a fiftieth of a small model's round. Nothing but what it asks for tells how often it is done."""
    machine, controller = cpu(1 / 3), AdaptiveController(10)
    controller.meet(free=False, ends_itself=False, cost=1 / 3, forecast=forecast(machine, 0.02))
    asked = [0]
    inner = controller._acceptance.chances

    def chances(*arguments: Any) -> list[float]:
        asked[0] += 1
        return inner(*arguments)

    controller._acceptance.chances = chances  # type: ignore[method-assign]
    world = World(machine, 1, same(0.02), 0)
    rounds = len(world.play(controller, 200).gammas)
    assert 4 <= asked[0] < 0.2 * rounds
    world.views = [View("new")]  # somebody else is another matter, at once
    before = asked[0]
    controller.budgets(world.views, [10])
    assert asked[0] == before + 1


def test_a_first_draft_in_a_bad_moment_does_not_undo_the_forecast() -> None:
    """Three drafts that took twice as long as they should: not enough to end what was measured to pay."""
    machine = cpu(1 / 3)
    plain, gammas = machine.forward(1, 1) / 1e3, []
    for known in (forecast(machine, 0.76), None):
        controller = AdaptiveController(10)
        controller.meet(free=False, ends_itself=False, cost=1 / 3, forecast=known)
        view, round_ = View("0", [1] * 4, 4), Round("0", 0, 0, 1, 1, 1, 0, 0.0, plain, plain)
        for _ in range(4):
            controller.budgets([view], [10])
            controller.observe([round_])
        slow = replace(round_, drafted=1, accepted=1, emitted=2, width=2, outcomes=(True,))
        drafting, verify = 2 * plain / 3, 1.6 * plain
        slow = replace(slow, draft_seconds=drafting, verify_seconds=verify, round_seconds=drafting + verify)
        for _ in range(3):
            controller.observe([slow])
        gammas.append(controller.budgets([view], [10])[0])
    assert gammas[0] > 0, "with the forecast it goes on"
    assert gammas[1] == 0, "without one nothing else is known"
