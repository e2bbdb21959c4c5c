"""The rows of bigger models beside other engines: what they compute from times, without any engine."""

from __future__ import annotations

from collections import Counter
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
