"""When a draft that is not expected to pay is tried again."""

from __future__ import annotations

import pytest

from headstart.control.probes import Probes


def rounds_until_due(probes: Probes, *, enough: float, cost: float = 0.1) -> int:
    for waited in range(1000):
        if probes.due(cost, 0.0, enough):
            return waited
        probes.plain()
    raise AssertionError("never")


def failed(rows: int, times: int) -> Probes:
    probes = Probes()
    for _ in range(times):
        probes.plain()
        probes.drafted(1.0, 1.0, [False] * rows, probe=True, enough=0.04)
    return probes


def test_many_rows_that_failed_together_are_believed_longer_than_one() -> None:
    assert rounds_until_due(failed(rows=1, times=2), enough=0.04) <= 16
    assert rounds_until_due(failed(rows=32, times=2), enough=0.04) > 40


@pytest.mark.parametrize(("enough", "soon"), [(0.04, False), (0.01, True)])
def test_what_must_hold_decides_what_failures_mean(enough: float, soon: bool) -> None:
    assert (rounds_until_due(failed(rows=32, times=2), enough=enough) <= 16) is soon


@pytest.mark.parametrize(("hits", "soon"), [(1, False), (8, True)])
def test_a_guess_that_holds_among_many_is_no_reason_to_come_back(hits: int, soon: bool) -> None:
    probes = failed(rows=32, times=3)
    probes.plain()
    probes.drafted(1.0, 1.0, [True] * hits + [False] * (32 - hits), probe=True, enough=0.04)
    assert (rounds_until_due(probes, enough=0.04) <= 4) is soon
