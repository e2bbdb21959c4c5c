"""What a grammar forces is verified at once where that pays, and where it does not hold the other rows up."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_controller import View as Anybody

from headstart.control.adaptive import AdaptiveController
from headstart.control.costs import Costs
from headstart.control.forced import cut_forced, widened
from headstart.types import Proposal, SamplingParams, Structured

HELD = SamplingParams(structured=Structured(choice=["a"]))


class View(Anybody):
    """Of a request that asks for a shape, or of one that does not."""

    def __init__(self, name: str, held: bool) -> None:
        super().__init__(name)
        self._held = held

    @property
    def params(self) -> SamplingParams:
        return HELD if self._held else SamplingParams()


def forced(length: int) -> Proposal:
    return replace(Proposal.chain(range(length)), forced=True)


def costs(wider: float) -> Costs:
    """A plain round takes a second, and any other ``wider``."""
    found = Costs()
    for _ in range(5):
        for width in (1, *range(2, 10)):
            found.add(8, width, 1.0 if width == 1 else wider)
    found.add(8, 2, wider)  # no change of kind lies ahead
    return found


def views(held: int) -> list[View]:
    return [View(str(i), i < held) for i in range(8)]


@pytest.mark.parametrize(
    ("held", "length", "wider", "left"),
    [
        (1, 8, 1.05, 8),  # little waiting for much
        (1, 8, 1.5, 0),  # seven rows would wait half a round for eight tokens of another
        (1, 2, 1.2, 0),
        (8, 2, 1.2, 2),  # nobody but rows that have such rounds, too
        (8, 1, 1.2, 0),
    ],
)
def test_how_much_is_worth_the_wait(held: int, length: int, wider: float, left: int) -> None:
    guesses: list[Proposal | None] = [forced(length), *[None] * 7]
    (first, *_) = cut_forced(costs(wider), views(held), guesses)
    assert (0 if first is None else len(first)) == left


def test_a_change_to_wider_rounds_is_paid_for() -> None:
    found, guesses = costs(1.05), [forced(8), *[None] * 7]
    found._switches.extend([0.6] * 7)
    found.add(8, 1, 1.0)
    assert not found.wide
    assert cut_forced(found, views(1), guesses)[0] is None
    found.add(8, 2, 1.05)
    assert cut_forced(found, views(1), guesses)[0] == forced(8)


def test_what_is_verified_anyhow_costs_nothing() -> None:
    whole: list[Proposal | None] = [forced(8), Proposal.chain(range(5))]
    assert widened(whole, [None, Proposal.chain(range(3))])[0] == forced(3)
    assert widened(whole, [None, None]) == [None, None]
    assert widened(whole, [forced(6), Proposal.chain(range(3))])[0] == forced(6)


def test_guesses_that_are_dropped_keep_no_forced_ones() -> None:
    """Seven rows have guesses that hold hardly ever; beside them what is forced makes all rows wait."""
    controller = AdaptiveController(8)
    controller.meet(free=True, ends_itself=False)
    controller._costs = costs(1.5)
    for _ in range(40):
        controller._acceptance.learn([(str(i), 1, (False,)) for i in range(1, 8)], probe=False)
    guesses: list[Proposal | None] = [forced(8), *[Proposal.chain(range(8), strength=1)] * 7]
    assert controller.trim(views(1), guesses) == [None] * 8
    assert controller.trim(views(8), [forced(8)] * 8) == [forced(8)] * 8
