"""Who is asked for guesses, and how often, where asking takes time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from controller_tools import ROUND, View, play

from headstart.control.adaptive import AdaptiveController
from headstart.types import Proposal, Round


@pytest.mark.parametrize(("asking", "seldom"), [(0.06, True), (0.0, False)])
def test_guesses_that_bring_less_than_asking_takes_are_asked_for_less_often(asking: float, seldom: bool) -> None:
    """One row of eight has a guess, and a wide round takes six plain ones: looking every round is time lost."""
    controller = AdaptiveController(10, free=True)
    views = [View(str(i)) for i in range(8)]
    asked = 0
    for _ in range(200):
        budgets = controller.budgets(views, [8] * 8)
        asked += any(budgets)
        guesses = [Proposal.chain([1] * 8, strength=1) if b and not i else None for i, b in enumerate(budgets)]
        kept = [len(p) if p is not None else 0 for p in controller.trim(views, guesses)]
        width, took = 1 + max(kept), asking * any(budgets)
        seconds = {1: 1.0}.get(width, 6.0)
        record = replace(ROUND, rows=8, width=width, draft_seconds=took, verify_seconds=seconds)
        record = replace(record, round_seconds=seconds + took)
        controller.observe(
            [
                replace(record, sequence=view.id, drafted=n, outcomes=(False,) * bool(n), strength=1)
                for view, n in zip(views, kept, strict=True)
            ]
        )
    assert 8 < asked < 40 if seldom else asked == 200


def test_free_guesses_are_asked_for_while_costly_ones_rest() -> None:
    """A head beside lookup: the head does not pay, and is thought about now and then; lookup is asked all the same."""
    controller = AdaptiveController(10, free=True)
    rested = 0
    for _ in range(40):
        assert any(controller.budgets([View()], [8]))
        before = controller._rest._rounds
        assert not any(controller.paid_budgets([View()], [8])) or controller._why
        rested += before > controller._rest._rounds
        slow = replace(ROUND, width=2, drafted=1, draft_seconds=5.0, verify_seconds=1.0, round_seconds=6.0)
        drafts = controller._why != 0
        controller.observe([replace(slow, paid=True, outcomes=(False,)) if drafts else ROUND])
    assert rested > 10


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside a head"])
def test_a_text_that_begins_to_repeat_itself_is_noticed(beside: bool) -> None:
    """Nothing was found for long, so that guesses are seldom asked for; then every guess holds."""
    controller, view, asked = AdaptiveController(8, free=True), View("a"), []
    for number in range(400):
        repeats = number >= 200
        (budget,) = controller.budgets([view], [8])
        asked.append(budget > 0)
        if budget and beside:
            controller.paid_budgets([view], [0 if repeats else 8])
        (kept,) = controller.trim([view], [Proposal.chain([1] * 8, strength=16) if budget and repeats else None])
        n = len(kept) if kept is not None else 0
        seconds, took = 1.0 + 0.1 * n, 0.05 * bool(budget)
        record = replace(ROUND, drafted=n, accepted=n, emitted=1 + n, outcomes=(True,) * n, strength=16, width=1 + n)
        controller.observe([replace(record, draft_seconds=took, verify_seconds=seconds, round_seconds=seconds + took)])
    assert sum(asked[50:200]) < (60 if beside else 20), "asking takes time"
    assert sum(asked[200:248]) > 0, "but it is never given up"
    assert all(asked[256:]), "and while guesses hold, each round asks"


def test_a_drafter_that_is_asked_and_has_nothing_is_charged_for_its_time() -> None:
    """Its time is no part of a plain round, and it is not asked for ever."""
    controller, view, asked = AdaptiveController(8), View("a"), 0
    for _ in range(200):
        slow = 0.004 * any(controller.budgets([view], [8]))
        asked += bool(slow)
        controller.observe([Round("a", 0, 0, 1, 1, 1, 0, slow, 0.001, 0.001 + slow)])
    assert asked < 12
    assert controller.beliefs().forwards[0] == pytest.approx(0.001)


@pytest.mark.parametrize("paid", [False, True])
def test_one_stall_while_guesses_are_asked_for_ends_nothing(paid: bool) -> None:
    """A machine that slept for a second, in rounds of 5 ms: thousands of rounds would have to pay for that."""
    controller, view, drafts = AdaptiveController(8, free=not paid), View("a"), []
    controller.meet(free=not paid, ends_itself=False, ragged=True)
    for number in range(300):
        (budget,) = controller.budgets([view], [8])
        found = budget > 0 and (number % 3 > 0 or not paid)
        (kept,) = controller.trim([view], [Proposal.chain([1] * min(budget, 8), strength=8) if found else None])
        n = len(kept) if kept is not None else 0
        drafts.append(n > 0)
        forward, took = 0.005 * (1 + 0.1 * n), 0.0001 * (budget > 0) + (number == 150) * 1.0
        record = replace(ROUND, drafted=n, accepted=n, emitted=1 + n, outcomes=(True,) * n, width=1 + n, tokens=1 + n)
        record = replace(record, strength=8, draft_seconds=took, verify_seconds=forward, round_seconds=forward + took)
        controller.observe([record])
    assert sum(drafts[100:150]) > 30
    assert sum(drafts[200:250]) > 30


def test_while_drafts_win_what_their_reading_took_does_not_end_them() -> None:
    """It is lost already. The drafter that stops for that has it to read again, and is never asked."""
    controller, cost = AdaptiveController(8), {n: 0.005 * (1 + 0.1 * (n - 1)) for n in range(1, 12)}
    assert all(play(controller, 0.9, cost, 60, step=0.0005)[40:])
    controller._account._lost += 40  # a prompt that took so many rounds to read again
    assert all(play(controller, 0.9, cost, 20, step=0.0005))
    controller._account._lost += 40
    assert sum(map(bool, play(controller, 0.0, cost, 20, step=0.0005))) < 4, "but they must win"
