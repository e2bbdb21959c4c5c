"""Two guessers at once: who is asked for what, and who hears what became of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from engines import run, table, table_draft, table_engine
from statistics_tools import chi_squared
from test_drafters_lookup import indexed_tokens

from headstart.config import DraftConfig
from headstart.control.controller import controller_for
from headstart.drafters.base import Drafter
from headstart.drafters.portfolio import PortfolioDrafter
from headstart.engine.engine import Engine
from headstart.maths.limits import LONG_MATCH
from headstart.testing import ScriptedDrafter
from headstart.types import DraftView, Proposal, Request, SamplingParams, Verdict

V = 8
TARGET, DRAFT = table(V, seed=5), table(V, seed=5) + 0.7 * table(V, seed=6)
GREEDY = SamplingParams(temperature=0, max_tokens=30)


@dataclass
class View:
    id: str
    tokens: list[int]
    params: SamplingParams = GREEDY
    prediction: tuple[int, ...] = ()
    seed: int = 0

    @property
    def prompt_length(self) -> int:
        return len(self.tokens)


@dataclass
class Costly(Drafter):
    """Says 7 as often as it may, and remembers what it was asked and told."""

    name = "costly"
    ends_itself = True
    sound_q = True
    asked: list[list[int]] = field(default_factory=list)
    told: list[list[Verdict | None]] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    resets: int = 0

    def propose(self, views: Sequence[DraftView], budgets: Sequence[int]) -> list[Proposal | None]:
        self.asked.append(list(budgets))
        return [Proposal.chain([7] * budget) if budget else None for budget in budgets]

    def commit(self, views: Sequence[DraftView], verdicts: Sequence[Verdict | None]) -> None:
        self.told.append(list(verdicts))

    def release(self, sequence_id: str) -> None:
        self.released.append(sequence_id)

    def reset(self) -> None:
        self.resets += 1


def half(views: Sequence[DraftView], limits: Sequence[int]) -> list[int]:
    return [limit // 2 for limit in limits]


REPEATS = [1, 2, 3, 4, 5, 1, 2, 3, 4]
NEW = [1, 2, 3, 4, 5, 6]


def test_a_long_match_is_copied_and_the_rest_is_drafted() -> None:
    costly = Costly()
    both = PortfolioDrafter(costly, half)
    copied, drafted, idle = both.propose([View("a", REPEATS), View("b", NEW), View("c", REPEATS)], [6, 6, 0])
    assert copied == Proposal.chain([5, 1, 2, 3, 4, 5], strength=4)
    assert not copied.paid
    assert drafted is not None
    assert (drafted.tokens, drafted.paid) == ((7, 7, 7), True)
    assert idle is None
    assert costly.asked == [[0, 3, 0]], "as many tokens as are worth their time, for the row without a match only"


def test_nobody_costly_is_asked_where_all_rows_repeat_themselves() -> None:
    costly = Costly()
    PortfolioDrafter(costly, half).propose([View("a", REPEATS), View("b", REPEATS)], [6, 2])
    assert costly.asked == []


def test_how_long_a_match_must_be() -> None:
    text = [9, *range(LONG_MATCH), 9, 8, *range(LONG_MATCH)]
    for length, taken in ((LONG_MATCH, True), (LONG_MATCH + 1, False)):
        costly = Costly()
        (guess,) = PortfolioDrafter(costly, half, long_match=length).propose([View("a", text)], [4])
        assert guess is not None
        assert guess.paid is not taken
        assert bool(costly.asked) is not taken


def test_what_it_says_of_itself_is_what_its_costly_half_says() -> None:
    both = PortfolioDrafter(Costly(), half)
    assert (both.name, both.free, both.ends_itself, both.sound_q) == ("costly+lookup", True, True, True)
    plain = PortfolioDrafter(ScriptedDrafter(lambda view, budget: None), half)
    assert (plain.name, plain.ends_itself, plain.sound_q) == ("scripted+lookup", False, False)


def test_both_hear_of_the_end_and_the_costly_one_of_every_round() -> None:
    costly = Costly()
    both = PortfolioDrafter(costly, half)
    both.propose([View("a", REPEATS), View("b", NEW)], [6, 6])
    verdicts = [Verdict((0,), 5, "correction"), None]
    both.commit([View("a", REPEATS), View("b", NEW)], verdicts)
    assert costly.told == [verdicts]
    assert indexed_tokens(both.lookup) == len(REPEATS) + len(NEW)
    both.release("a")
    assert costly.released == ["a"]
    assert indexed_tokens(both.lookup) == len(NEW)
    both.reset()
    assert costly.resets == 1
    assert indexed_tokens(both.lookup) == 0


def portfolio_engine(long_match: int, *, rows: int = 16) -> Engine:
    """With the controller that measures; the costly half is another table."""
    made: list[Engine] = []

    def worth(views: Sequence[DraftView], limits: Sequence[int]) -> list[int]:
        return made[0].parts.controller.paid_budgets(views, limits)

    both = PortfolioDrafter(table_draft(DRAFT, rows=rows), worth, long_match=long_match)
    controller = controller_for(DraftConfig(max_gamma=3), free=both.free, ends_itself=both.ends_itself)
    made.append(table_engine(TARGET, both, gamma=3, rows=rows, max_waiting=2000, controller=controller))
    return made[0]


def test_a_portfolio_changes_no_text() -> None:
    prompts = [(1, 2, 3, 4, 1, 2, 3), (5, 1, 5, 1, 5), (6, 2), (7, 7, 7, 7)]
    coupled = SamplingParams(seed=3, max_tokens=30, verification="coupled")
    for params in (GREEDY, coupled):
        asked = [Request(str(i), prompt, params) for i, prompt in enumerate(prompts)]
        expected = [c.token_ids for c in run(table_engine(TARGET, None), asked)]
        made = portfolio_engine(2)
        seen = []
        made.listen(seen.extend)
        assert [c.token_ids for c in run(made, asked)] == expected
        assert made.parts.inactive is None
        assert {(r.paid, r.strength > 0) for r in seen if r.drafted} >= {(False, True)}


@pytest.mark.parametrize("rule", ["token", "block"])
def test_a_portfolio_follows_the_target(rule: str) -> None:
    """Copied guesses, which may be cut, beside drawn ones, which may not: the law of the text stays the target's."""
    prompt = (1, 2, 1, 2, 1)
    made = portfolio_engine(2)
    seen = []
    made.listen(seen.extend)
    params = [SamplingParams(max_tokens=12, seed=seed, verification=rule) for seed in range(500)]  # type: ignore[arg-type]
    found = run(made, [Request(str(i), prompt, p) for i, p in enumerate(params)])
    law: dict[tuple[int, ...], float] = made.parts.runner.probabilities(prompt, 2)  # type: ignore[attr-defined]
    assert chi_squared(Counter(c.token_ids[:2] for c in found), law) > 1e-4
    assert {r.paid for r in seen if r.drafted} == {False, True}
