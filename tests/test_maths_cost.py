"""The cost model against its formulas, and against what the rules really accept."""

from __future__ import annotations

import itertools

import pytest
import torch
from enumerate_rules import SHAPES, all_drafts, round_law

from headstart.maths.cost import (
    CostModel,
    best_length,
    break_even,
    conditional,
    reach,
    round_tokens,
    slowest_tokens,
    tau,
)
from headstart.maths.verify import token_rule


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.8, 0.999, 1.0])
@pytest.mark.parametrize("gamma", [0, 1, 4, 9])
def test_tau_of_one_alpha_is_the_geometric_sum(alpha: float, gamma: int) -> None:
    expected = gamma + 1 if alpha == 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)
    assert tau(alpha, gamma) == pytest.approx(expected, rel=1e-12)


def test_tau_of_conditional_acceptances() -> None:
    assert tau([0.9, 0.5, 0.2], 3) == pytest.approx(1 + 0.9 + 0.45 + 0.09)
    assert tau([0.9, 0.5, 0.2], 1) == pytest.approx(1.9)
    assert tau([0.9, 0.5], 3) == pytest.approx(1 + 0.9 + 0.45 + 0.225)  # the last one goes on
    assert reach([], 2) == [0.0, 0.0]


@pytest.mark.parametrize("bad", [-0.1, 1.1, [0.5, 2.0], float("nan")])
def test_acceptance_outside_the_unit_interval_is_refused(bad: float | list[float]) -> None:
    with pytest.raises(ValueError, match="acceptance rates"):
        tau(bad, 2)


def test_a_negative_draft_length_is_refused() -> None:
    with pytest.raises(ValueError, match="not negative"):
        tau(0.5, -1)


def test_tau_is_what_the_token_rule_emits() -> None:
    """alpha = 1 - TV(p, q); the rule and the formula know nothing of each other."""
    p = torch.tensor([0.1, 0.2, 0.7], dtype=torch.float64)
    q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    alpha = float(torch.minimum(p, q).sum())
    for gamma in (1, 2, 3):
        shape = SHAPES[f"chain-{gamma}"]
        target, draft = ([law.repeat(3**d, 1) for d in range(gamma + 1)] for law in (p, q))
        accepted = round_law(token_rule, shape, all_drafts(shape, draft, "iid"), target)[1]
        assert 1 + accepted == pytest.approx(tau(alpha, gamma), abs=1e-12)


def test_verify_interpolates_between_measured_widths() -> None:
    model = CostModel(0.1, {8: 2.4, 4: 1.6})
    assert model.verify(1) == 1.0
    assert model.verify(4) == 1.6
    assert model.verify(2) == pytest.approx(1.2)
    assert model.verify(6) == pytest.approx(2.0)
    assert model.verify(10) == pytest.approx(2.8)  # the last slope goes on
    assert CostModel(0.1).verify(7) == 1.0
    assert CostModel(0.1, {1: 1.1, 3: 1.5}).verify(2) == pytest.approx(1.3)
    with pytest.raises(ValueError, match="at least one token"):
        CostModel(0.1, {0: 1.0})


def test_speedup_is_its_formula() -> None:
    model = CostModel(c=0.2, v={5: 1.4}, overhead=0.05)
    assert model.speedup(4, 0.7) == pytest.approx(tau(0.7, 4) / (4 * 0.2 + 1.4 + 0.05))
    assert model.speedup(0, 0.7) == pytest.approx(1 / 1.05)


def best_gamma(model: CostModel, longest: int, alpha: float) -> int:
    return best_length([model.speedup(gamma, alpha) for gamma in range(longest + 1)])


def test_the_best_length_is_the_fastest() -> None:
    assert best_gamma(CostModel(c=0.05, v={9: 1.1}), 8, 1.0) == 8
    assert best_gamma(CostModel(c=0.05, v={9: 1.1}), 8, 0.0) == 0
    assert best_gamma(CostModel(c=1.2, v={9: 1.1}), 8, 0.9) == 0  # a draft slower than the target
    steps = CostModel(c=0.0, v={1: 1.0, 2: 1.5, 3: 1.5, 4: 1.5, 5: 1.5})
    assert best_gamma(steps, 4, 0.6) == 4  # past a step that one token alone would not pay for
    assert steps.speedup(1, 0.45) < steps.speedup(0, 0.45)
    assert best_gamma(steps, 4, 0.45) == 4


def test_one_more_token_is_drafted_while_it_pays() -> None:
    """Where v is convex, going on while it pays ends at the best length."""
    for c, slope, alpha in itertools.product((0.02, 0.2), (0.01, 0.1), (0.2, 0.6, 0.9)):
        model = CostModel(c, {1: 1.0, 16: 1.0 + 15 * slope}, overhead=0.03)
        gamma = 0
        while gamma < 12:
            price = c + model.verify(gamma + 2) - model.verify(gamma + 1)
            if reach(alpha, gamma + 1)[-1] <= break_even(price, model.speedup(gamma, alpha)):
                break
            gamma += 1
        assert gamma == best_gamma(model, 12, alpha)


def test_rows_of_different_lengths_share_a_round() -> None:
    """Expected tokens by draft length: a row that is not drafted for any further still adds its own one."""
    found = round_tokens([reach(0.5, 3), [], reach(0.9, 1)])
    assert found == pytest.approx([3, 3 + 0.5 + 0.9, 3 + 0.5 + 0.9 + 0.25, 3 + 0.5 + 0.9 + 0.25 + 0.125])
    assert round_tokens([reach([0.9, 0.5], 4)])[-1] == pytest.approx(tau([0.9, 0.5], 4))
    assert round_tokens([]) == [0.0]


def test_a_draft_must_be_worth_it() -> None:
    assert best_length([10.0, 10.2, 10.1]) == 1
    assert best_length([10.0, 10.2, 10.4], worth=1.03) == 2
    assert best_length([10.0, 10.2, 10.25], worth=1.03) == 0
    assert best_length([10.0, 11.0, 11.0], worth=1.03) == 1, "the shortest of equals"


def test_break_even_is_where_one_more_token_leaves_the_speed_as_it_is() -> None:
    """tokens / time = (tokens + gain) / (time + price)."""
    tokens, time, price = 2.4, 1.7, 0.3
    gain = break_even(price, tokens / time)
    assert (tokens + gain) / (time + price) == pytest.approx(tokens / time)


def test_conditional_acceptances_are_what_was_reached() -> None:
    given = [0.9, 0.5, 0.25]
    assert conditional(reach(given, 3)) == pytest.approx(given)
    assert conditional([0.5, 0.0, 0.0]) == [0.5, 0.0, 0.0]


def test_the_best_speedup_is_that_of_the_best_length() -> None:
    model = CostModel(c=0.1, v={4: 1.3, 8: 1.4}, overhead=0.05)
    for alpha in (0.1, 0.5, 0.8):
        assert model.best_speedup(8, alpha) == model.speedup(best_gamma(model, 8, alpha), alpha)


def test_the_slowest_rows_are_those_whose_first_guess_holds_least_often() -> None:
    rows = [[0.9, 0.8], [0.2, 0.1], [], [0.4]]
    assert slowest_tokens(rows, 0.5) == pytest.approx([1.0, 1.1, 1.15])
    assert slowest_tokens(rows, 0.1) == [1.0, 1.0, 1.0], "one at least, and to the longest draft of all"
    assert slowest_tokens([[0.5]], 0.25) == round_tokens([[0.5]])
