"""The rows of bigger models beside other engines: what they compute from times, without any engine."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch


@pytest.fixture
def big(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    import peers_big

    return peers_big


def test_a_figure_is_the_median_of_ratios_within_a_turn(big: ModuleType) -> None:
    """A busy moment that hits both in one turn changes nothing."""
    found = big.ratio([2.0, 40.0, 2.2], [1.0, 20.0, 1.0])
    assert found["median"] == 2.0
    assert found["turns"] == 3


def test_each_turn_begins_with_another(big: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    import peers

    monkeypatch.setattr(peers, "REST", 0)
    order: list[str] = []

    def system(name: str) -> float:
        order.append(name)
        return len(order)

    found = big.turns({"a": lambda: system("a"), "b": lambda: system("b")}, 3)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert found == {"a": [1, 4, 5], "b": [2, 3, 6]}


def test_alpha_counts_what_was_judged(big: ModuleType) -> None:
    """A rejected token ends the round: those drafted behind it say nothing about alpha."""
    count = Counter[str]()
    verdicts = [(4, 4), (4, 1), (0, 0), (2, 0)]
    big.count_verdicts(count, [SimpleNamespace(drafted=d, accepted=a) for d, a in verdicts])
    assert count == {"accepted": 5, "judged": 7}


def test_losses_leave_out_each_windows_first_token(big: ModuleType) -> None:
    import perplexity

    table = torch.randn(9, 9)  # a token's next one depends on it alone
    found = perplexity.losses(lambda x: table[x[0]], [[1, 2, 3], [4, 5]])
    expected = -table.log_softmax(-1)[[1, 2, 4], [2, 3, 5]]
    torch.testing.assert_close(torch.tensor(found), expected)


def test_a_forwards_share_of_the_peak_counts_each_weight_once_a_token(big: ModuleType) -> None:
    """A tied embedding is the output head; one that is not tied is only looked up, and multiplies nothing."""
    import verify_curve

    from headstart.machine.cpu.plan import Plan

    plan = Plan("int4", "int8", 64, 2, 1, 32, 96, 100, 1e-5, (0, 0), False, False, False, True, (1.0,) * 16, 1.0)
    layer = (64 + 32 + 32) * 64 + 64 * 64 + 2 * 96 * 64 + 64 * 96
    assert verify_curve.products(plan) == 2 * layer + 100 * 64
    assert verify_curve.products(replace(plan, tied=False)) == 2 * layer + 100 * 64
    found = verify_curve.shares(plan, {1: 1.0, 8: 4.0}, 10.0 * (2 * layer + 100 * 64))
    assert found == pytest.approx({1: 0.1, 8: 0.2})
    assert verify_curve.shares(plan, {1: 1.0}, 0.0) is None


def test_a_curve_says_where_it_falls(big: ModuleType) -> None:
    import verify_curve

    turns = [  # the machine takes twice as long in the second half of each: one token does, too
        verify_curve.Turn([(1.0 + 0.1 * n) * (1 + n // 8) for n in range(16)], [1.0 + n // 8 for n in range(16)])
        for _ in range(3)
    ]
    assert verify_curve.curve(turns)[16] == pytest.approx(2.5)
    assert verify_curve.largest_fall(verify_curve.curve(turns)) == 0.0
    for turn in turns:
        turn.seconds[5] = 1.2  # six tokens, where five took 1.4
    assert verify_curve.largest_fall(verify_curve.curve(turns)) == pytest.approx(1 - 1.2 / 1.4)
