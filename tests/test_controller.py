"""The controller: chooses by measured cost and acceptance, says why not, notices a change, never climbs its limits."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from controller_tools import ROUND, View, accepted, play

from headstart.config import DraftConfig
from headstart.control.acceptance import PAID, Acceptance
from headstart.control.adaptive import AdaptiveController
from headstart.control.controller import FixedController, GreedyAndSampled, controller_for
from headstart.types import Proposal, SamplingParams

FLAT = {width: 1.0 + 0.01 * width for width in range(1, 12)}
STEEP = {width: float(width) for width in range(1, 12)}


def test_fixed_is_fixed() -> None:
    controller = controller_for(DraftConfig(gamma=4))
    assert isinstance(controller, FixedController)
    assert controller.budgets([View(), View("b")], [10, 2]) == [4, 2]


def test_good_guesses_at_flat_cost_are_drafted_far() -> None:
    chosen = play(AdaptiveController(10), holds=0.95, cost=FLAT, rounds=60, step=0.02)
    assert chosen[0] == 0, "a plain round first, to compare with"
    assert min(chosen[-20:]) >= 6


def test_bad_guesses_are_given_up_and_it_says_why() -> None:
    controller = AdaptiveController(10)
    chosen = play(controller, holds=0.1, cost=STEEP, rounds=80, step=0.1)
    assert sum(chosen[-40:]) <= 4, "only the rare probe"
    assert "does not pay" in (controller.reason() or "")


def test_it_comes_back_when_guesses_get_better() -> None:
    controller = AdaptiveController(10)
    play(controller, holds=0.05, cost=FLAT, rounds=60, step=0.3)
    chosen = play(controller, holds=0.98, cost=FLAT, rounds=300, step=0.05)
    assert max(chosen[-20:]) >= 4


def test_a_slow_draft_is_not_used() -> None:
    chosen = play(AdaptiveController(10), holds=0.9, cost=FLAT, rounds=60, step=1.5)
    assert sum(chosen[-30:]) <= 4


def test_drawn_tokens_do_not_put_greedy_ones_off() -> None:
    """Sampled requests whose drafts fail leave the greedy ones' draft length alone, and the other way round."""

    class Drawn(View):
        @property
        def params(self) -> SamplingParams:
            return SamplingParams(temperature=1.0)

    class Greedy(View):
        @property
        def params(self) -> SamplingParams:
            return SamplingParams(temperature=0.0)

    controller = controller_for(DraftConfig())
    assert isinstance(controller, GreedyAndSampled)
    views = {True: Greedy(), False: Drawn()}
    chosen: dict[bool, list[int]] = {True: [], False: []}
    for i in range(200):
        greedy = i % 2 == 0
        (gamma,) = controller.budgets([views[greedy]], [10])
        chosen[greedy].append(gamma)
        held = gamma if greedy else 0
        seconds = FLAT[gamma + 1]
        outcomes = (True,) * held + (False,) * (held < gamma)
        spent = replace(ROUND, draft_seconds=0.1 * gamma, verify_seconds=seconds, round_seconds=seconds + 0.1 * gamma)
        controller.observe(
            [replace(spent, drafted=gamma, accepted=held, emitted=held + 1, width=gamma + 1, outcomes=outcomes)]
        )
    assert min(chosen[True][-40:]) >= 6
    assert sum(chosen[False][-40:]) <= 8


def test_how_likely_one_more_token_must_be() -> None:
    """Dearer draft steps ask for more hope; nothing is asked before anything was measured."""
    asked = []
    for step in (0.02, 0.2):
        controller = AdaptiveController(10, ends_itself=True)
        assert controller.min_chance_to_extend() == 0.0
        play(controller, holds=0.9, cost=FLAT, rounds=60, step=step)
        asked.append(controller.min_chance_to_extend())
    assert 0 < asked[0] < asked[1]
    assert FixedController(4).min_chance_to_extend() == 0.0, "a fixed draft length is kept"


def test_one_bad_moment_does_not_make_tokens_dear() -> None:
    """The longest draft was timed once, while something else ran: one more token still takes what the others say."""

    def price(slow: float) -> float:
        controller = AdaptiveController(10, ends_itself=True)
        for _ in range(7):
            controller.observe([replace(ROUND, verify_seconds=FLAT[1], round_seconds=FLAT[1])])
            for gamma in (1, 2, 3):
                controller.observe([accepted(gamma, FLAT[gamma + 1], 0.1)])
        for seconds in (FLAT[9], slow):  # the first of a width is not counted
            controller.observe([accepted(8, seconds, 0.1)])
        return controller._pace_and_price()[1]

    assert price(FLAT[9]) == pytest.approx(0.01, rel=0.01)
    assert price(4.0) < 0.02


def test_drafts_that_were_slow_in_a_bad_moment_are_tried_again() -> None:
    controller = AdaptiveController(10)
    play(controller, holds=0.9, cost=FLAT, rounds=40, step=5.0)  # something else ran
    held_back = play(controller, holds=0.9, cost=FLAT, rounds=40, step=0.01)
    assert max(held_back) <= 2, "but for a probe now and then"
    later = play(controller, holds=0.9, cost=FLAT, rounds=250, step=0.01)
    assert min(later[-20:]) >= 4


def test_a_drafter_that_ends_itself_gets_a_ceiling() -> None:
    chosen = play(AdaptiveController(10, ends_itself=True), holds=0.9, cost=FLAT, rounds=60, step=0.2)
    assert set(chosen[-20:]) == {10}
    chosen = play(AdaptiveController(10, ends_itself=True), holds=0.9, cost=FLAT, rounds=60, step=1.5)
    assert sum(chosen[-30:]) <= 4, "and nothing where drafting does not pay"


def test_reading_the_prompt_is_no_draft_step() -> None:
    """The first draft of a sequence takes long, because the drafter reads the prompt; that must not scare it off."""
    controller = AdaptiveController(10)
    for name in "abc":
        for i in range(12):
            (gamma,) = controller.budgets([View(name)], [10])
            seconds = FLAT[gamma + 1]
            first = gamma and i <= 1
            draft = 50.0 if first else 0.05 * gamma
            controller.observe([accepted(gamma, seconds, draft, name)])
        assert gamma >= 6, "drafting pays, and it goes on"
        controller.forget(name)


def test_free_guesses_are_trimmed_by_their_strength() -> None:
    controller = AdaptiveController(10, free=True)
    cost = {width: 1.0 if width == 1 else 1.6 for width in range(1, 12)}
    for i in range(120):  # strong matches hold, weak ones do not
        strong = i % 2 == 0
        proposal = Proposal.chain([1] * 8, strength=8 if strong else 1)
        (kept,) = controller.trim([View()], [proposal])
        n = len(kept) if kept is not None else 0
        outcomes = (True,) * n if strong else (False,) * min(n, 1)
        seconds = cost[n + 1]
        controller.observe(
            [
                replace(
                    ROUND,
                    drafted=n,
                    accepted=sum(outcomes),
                    emitted=sum(outcomes) + 1,
                    width=n + 1,
                    verify_seconds=seconds,
                    round_seconds=seconds,
                    outcomes=outcomes,
                    strength=proposal.strength,
                )
            ]
        )
    strong, weak = (controller.trim([View()], [Proposal.chain([1] * 8, strength=s)])[0] for s in (8, 1))
    assert strong is not None
    assert len(strong) == 8
    assert weak is None


def test_the_first_round_of_a_width_may_be_slow() -> None:
    """What is done for the first time takes longer: that must not put the controller off for hundreds of rounds."""
    controller, met = AdaptiveController(10), set()
    chosen = []
    for _ in range(40):
        (gamma,) = controller.budgets([View()], [10])
        chosen.append(gamma)
        seconds = 1.0 + 0.01 * gamma + (20.0 if gamma and gamma not in met else 0.0)
        met.add(gamma)
        controller.observe([accepted(gamma, seconds, 0.08 * gamma)])
    assert chosen[-20:] == [10] * 20


def test_rows_share_one_width() -> None:
    """One row's long shot does not widen the forward of seven others."""
    controller = AdaptiveController(10, free=True)
    for width, seconds in ((1, 1.0), (9, 6.0), (9, 6.0)):
        controller.observe([replace(ROUND, rows=8, width=width, verify_seconds=seconds, round_seconds=seconds)])
    views = [View(str(i)) for i in range(8)]
    proposals: list[Proposal | None] = [Proposal.chain([1] * 8, strength=4), *[None] * 7]
    assert controller.trim(views, proposals) == [None] * 8
    everyone: list[Proposal | None] = [Proposal.chain([1] * 8, strength=16) for _ in range(8)]
    kept = controller.trim(views, everyone)
    assert all(p is not None for p in kept)


def test_the_one_that_drafts_alone_is_one_that_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two choices of one prompt have as much to read; one of them has all that is forced, and no room for a guess."""
    controller = AdaptiveController(8)
    controller.meet(free=False, ends_itself=False)
    controller._behind = {"a": 500, "b": 500, "c": 900}
    for affordable, expected in ((1, [0, 1, 0]), (0, [0, 0, 0])):
        answers = iter([[0] * 3, [affordable] * 3])  # not all together; one alone
        monkeypatch.setattr(controller, "_choose", lambda *_, answers=answers: next(answers))
        assert controller.budgets([View("a"), View("b"), View("c")], [0, 3, 3]) == expected


def test_a_forgotten_sequence_leaves_nothing_behind() -> None:
    controller = AdaptiveController(10)
    play(controller, holds=0.5, cost=FLAT, rounds=10)
    controller.forget("a")
    assert "a" not in controller._acceptance._own
    assert not controller._behind
    assert not controller._answers._emitted


def test_a_slow_moment_of_plain_rounds_does_not_keep_useless_drafts() -> None:
    """While drafts are made no plain round is timed: one that looked slower than a wider one would do so for ever."""
    controller = AdaptiveController(10, free=True)
    for _ in range(7):
        controller.observe([replace(ROUND, verify_seconds=3.0, round_seconds=3.0)])
    cost = {width: 1.0 + 0.1 * width for width in range(1, 12)}
    drafted = []
    for _ in range(200):
        (kept,) = controller.trim([View()], [Proposal.chain([1] * 8)])
        n = len(kept) if kept is not None else 0
        drafted.append(n)
        seconds = cost[n + 1]
        record = replace(ROUND, drafted=n, width=n + 1, verify_seconds=seconds, round_seconds=seconds)
        controller.observe([replace(record, outcomes=(False,) * bool(n))])
    assert sum(drafted[-100:]) <= 10, "only the rare probe"


def test_the_old_name_still_works() -> None:
    from headstart import controller as old
    from headstart.control import adaptive, controller

    for name in old.__all__:
        assert getattr(old, name) is getattr(adaptive if name == "AdaptiveController" else controller, name)


def test_records_of_sequences_are_told_apart_from_chance() -> None:
    """Ten that differ: most of it is believed. Ten that are alike: little of it."""
    found = {}
    for apart in (0.0, 0.35):
        acceptance, chance = Acceptance(), random.Random(0)
        for _ in range(40):
            rates = [(str(i), 0.6 + apart * (2 * i / 9 - 1)) for i in range(10)]
            acceptance.learn([(name, PAID, (chance.random() < rate,)) for name, rate in rates])
        found[apart] = acceptance.apart([str(i) for i in range(10)])
    assert found[0.0] < 0.5 < found[0.35]
    assert Acceptance().apart(["a", "b"]) == 0.0


def test_with_more_rows_than_were_timed_plain_rounds_come_first() -> None:
    """What fewer rows cost says little, and a batch that grows while it drafts would never see a plain round
    of its own. The first one behind a draft is slow, and does not count."""
    controller = AdaptiveController(4)
    widths = {width: 1.0 + 0.01 * width for width in range(1, 6)}
    assert play(controller, 1.0, widths, 12, step=0.05)[-1] == 4
    both = [View("a"), View("b")]
    for seconds in (9.0, 1.5):
        assert controller.budgets(both, [4, 4]) == [0, 0]
        plain = replace(ROUND, rows=2, verify_seconds=seconds, round_seconds=seconds)
        controller.observe([replace(plain, sequence=view.id) for view in both])
    assert all(controller.budgets(both, [4, 4]))
    assert controller.beliefs().forwards[0] == pytest.approx(1.5)
