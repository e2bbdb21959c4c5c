"""Costs of rounds: lines between what was measured, and a sweep of a tiny engine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from statistics import median
from time import sleep
from types import SimpleNamespace
from typing import Any

import pytest

from headstart.config import EngineConfig
from headstart.control.adaptive import AdaptiveController
from headstart.control.controller import FixedController, GreedyAndSampled
from headstart.drafters.model import ModelDrafter
from headstart.engine.captured import CapturedRounds
from headstart.engine.engine import Engine
from headstart.errors import InvalidParameter
from headstart.lab.round_costs import RoundCosts, RowCosts, _Blocks, _costs, _Seen, measure_rounds, with_widths
from headstart.lab.sweep import Filler
from headstart.lab.system import System
from headstart.lab.what_if import WhatIfSettings, supposed_texts
from headstart.machine.runner import EagerRunner
from headstart.testing import TINY_VOCABULARY, tiny_model
from headstart.types import Round

ONE = RowCosts(((1, 1.0, 3), (3, 1.4, 3), (5, 1.6, 3)), start=0.1, step=0.2)
EIGHT = RowCosts(((1, 2.0, 3), (5, 4.0, 3)), start=0.2, step=0.3)
COSTS = RoundCosts({1: ONE, 8: EIGHT})


def test_between_and_beyond_what_was_measured() -> None:
    assert COSTS.forward(1, 2) == pytest.approx(1.2)
    assert COSTS.forward(1, 9) == pytest.approx(1.6 + 4 * 0.15)  # the middle slope of all pairs of points
    assert COSTS.forward(8, 1) == 2.0
    assert COSTS.forward(4, 1) == pytest.approx(1 + 3 / 7)
    assert COSTS.forward(32, 5) == 4.0, "beyond the last number of rows, as there"
    assert COSTS.draft(1, 0) == 0.0
    assert COSTS.draft(1, 3) == pytest.approx(0.7)
    assert COSTS.times(1, 2) == pytest.approx([1.0, 1.2 + 0.3, 1.4 + 0.5])


def test_many_rows_read_together_are_cheaper_a_token() -> None:
    costs = RoundCosts({1: replace(ONE, reading=0.05, prefill=0.03), 8: replace(EIGHT, reading=0.01, prefill=0.02)})
    assert (costs.reading(1), costs.reading(8), costs.prefill(8)) == (0.05, 0.01, 0.02)
    assert costs.reading(32) == 0.01, "not what a row alone takes for each: drafts would never pay in a batch"


def test_the_cost_model_says_the_same() -> None:
    model = COSTS.model(1)
    assert (model.c, model.overhead) == (pytest.approx(0.2), pytest.approx(0.1))
    assert model.speedup(2, 0.8) == pytest.approx((1 + 0.8 + 0.64) / (1.4 + 0.4 + 0.1))


def test_widths_of_another_system_are_taken_in_its_plain_rounds() -> None:
    narrow = RoundCosts({1: RowCosts(((1, 2.0, 3),))}, free=True)
    assert with_widths(narrow, COSTS).forward(1, 3) == pytest.approx(2.8)


def test_a_sweep_measures_every_length_and_leaves_nothing_behind() -> None:
    options = {"quantization": None, "draft_quantization": None, "max_model_len": 192, "max_rows": 2, "check": False}
    target, draft = tiny_model("llama"), tiny_model("llama", seed=1)
    with (
        System.open(model=target, draft=None, **options) as plain,
        System.open(model=target, draft=draft, **options) as drafted,
        System.open(model=target, draft=Filler(), **options) as filler,
    ):
        systems = {"plain": plain, "draft": drafted, "filler": filler}
        lines = [[5, 6, 7, 8], [9, 10, 11], [12, 13, 14, 15, 16]]
        found = measure_rounds(systems, lines, rows=(1, 2), lengths=(0, 1, 3), turns=2)
        for name in ("draft", "filler"):
            assert [width for width, _, _ in found[name].rows[2].forwards] == [1, 2, 4]
        assert found["draft"].rows[1].step > 0
        assert found["draft"].reading(2) > 0
        assert found["draft"].reads_apart
        assert found["filler"].rows[1].step < found["draft"].rows[1].step
        assert [width for width, _, _ in found["plain"].rows[1].forwards] == [1]
        for system in systems.values():
            controller = system.engine.parts.controller
            assert isinstance(controller, GreedyAndSampled)
            assert isinstance(controller._greedy, AdaptiveController), "its own controller decides again"
            assert system.engine.idle
            assert not system.engine.parts.runner.slab.ready_keys


def test_with_little_room_every_length_is_measured_by_fewer_rounds() -> None:
    """As many plain rounds as others, and none of them behind the end of a row."""
    options = {"quantization": None, "draft_quantization": None, "max_model_len": 64, "max_rows": 1, "check": False}
    target = tiny_model("llama")
    with (
        System.open(model=target, draft=None, **options) as plain,
        System.open(model=target, draft=Filler(), **options) as filler,
    ):
        lengths = (0, 1, 2, 3, 4, 6, 8, 10)
        found = measure_rounds({"plain": plain, "filler": filler}, [[5, 6, 7, 8]], lengths=lengths, turns=1)
        assert [width for width, _, _ in found["filler"].rows[1].forwards] == [length + 1 for length in lengths]
        blocks = _Blocks(plain, [[5, 6, 7, 8]])
        blocks.begin()
        assert blocks.fitting(7) == (2, 5)
        assert blocks.fitting(9) == (1, 5)
        assert blocks.fitting(40) == (1, 1)
        blocks.end()


def test_a_round_without_a_draft_is_a_plain_one() -> None:
    """What few turns say beside that is noise, and would be all that is predicted of a draft that is not used."""
    seen = _Seen(defaultdict(list, {1: [0.88], 2: [0.97], 3: [1.3]}))
    system: Any = SimpleNamespace(
        engine=SimpleNamespace(parts=SimpleNamespace(drafter=None, captured=None, runner=SimpleNamespace(ragged=False)))
    )
    found = _costs(system, {1: seen, 2: _Seen(defaultdict(list, {1: [1.2]}))}, {1: [2.0], 2: [2.0]})
    assert [found.forward(1, width) for width in (1, 2, 3)] == [2.0, 2.0, 2.6]
    assert found.forward(2, 1) == pytest.approx(2.04)


def test_a_controller_that_is_replaced_comes_back() -> None:
    controller = GreedyAndSampled(FixedController(3), FixedController(2))
    with controller.replaced(FixedController(0)):
        assert "gamma is 0" in str(controller.reason())
    assert controller.reason() is None


def test_supposed_texts_hold_as_often_as_was_said() -> None:
    found = supposed_texts(0.7, 20)
    held = [value for agreement in found.values() for value in agreement.ratio[0]]
    assert len(found) == 20
    assert sum(held) / len(held) == pytest.approx(0.7, abs=0.03)


def test_what_cannot_be_supposed_is_refused() -> None:
    for wrong in ({"shape": "gpt-9"}, {"draft": "gpt-9"}, {"alphas": (1.5,)}, {"rows": ()}):
        with pytest.raises(InvalidParameter):
            WhatIfSettings(**wrong)  # type: ignore[arg-type]


class Captured:
    """As much of a ``System`` as a sweep needs, whose engine plays captured rounds on this CPU."""

    max_len = 96

    def __init__(self, gamma: int, rows: int, seed: int) -> None:
        target, runner = (
            EagerRunner(tiny_model("llama", seed=each), rows=rows, max_len=96, margin=40) for each in (0, seed)
        )
        drafter = ModelDrafter(runner, vocab_size=TINY_VOCABULARY, width=TINY_VOCABULARY)
        rounds = CapturedRounds(target, drafter, vocab_size=TINY_VOCABULARY, lengths=(0, gamma))
        rounds.warm_up()
        controller = GreedyAndSampled(FixedController(gamma), FixedController(gamma))
        config = EngineConfig(max_rows=rows)
        self.engine = Engine(
            target, drafter, controller, config, vocab_size=TINY_VOCABULARY, eos=(2,), captured=rounds, max_gamma=gamma
        )

    def cold(self) -> None:
        self.engine.cold()

    def listen(self, rounds: Callable[[list[Round]], object]) -> ExitStack:
        return self.engine.listen(rounds)


@pytest.mark.parametrize("seed", [0, 1], ids=["a draft that is always right", "another draft"])
def test_captured_rounds_that_wait_for_the_host_are_timed_apart(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    system: Any = Captured(2, 3, seed)
    captured = system.engine.parts.captured
    advanced = captured._state.advanced

    def slow_host(*arguments: Any) -> None:
        if not captured.in_flight:  # the device has nothing to do meanwhile
            sleep(0.08)
        advanced(*arguments)

    monkeypatch.setattr(captured._state, "advanced", slow_host)
    blocks = _Blocks(system, [[5, 6, 7, 8], [9, 10, 11], [12, 13, 14]])
    blocks.begin()
    blocks.wait_for_host(2)
    blocks.end()
    assert len(blocks.gaps) >= 4
    assert median(blocks.gaps) > 0.02, "on a busy machine, too"
    assert system.engine.idle


def test_numbers_of_rows_that_were_not_captured_run_as_the_next_larger_one() -> None:
    costs = replace(COSTS, buckets=(1, 2, 4, 8))
    assert costs.forward(5, 1) == costs.forward(8, 1) == 2.0
    assert costs.forward(3, 1) == COSTS.forward(4, 1)
