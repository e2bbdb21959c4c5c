"""When a draft that is not expected to pay is tried again."""

from __future__ import annotations

import pytest

from headstart.control.probes import Account, Probes


def rounds_until_due(probes: Probes, *, enough: float, cost: float = 0.1) -> int:
    probes.enough = enough
    for waited in range(1000):
        if probes.due(cost, 0.0):
            return waited
        probes.add((), probe=True)
    raise AssertionError("never")


def failed(rows: int, times: int) -> Probes:
    probes = Probes(Account())
    probes.enough = 0.04
    for _ in range(times):
        probes.add((), probe=True)
        probes.add([False] * rows, probe=True)
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
    probes.add((), probe=True)
    probes.add([True] * hits + [False] * (32 - hits), probe=True)
    assert (rounds_until_due(probes, enough=0.04) <= 4) is soon


def test_what_asking_took_is_paid_out_of_what_guesses_win() -> None:
    """Copies that win a little now and then must not pay for probes of a head, where looking for them took more."""
    looked, other = Account(), Account()
    for account in (looked, other):
        for _ in range(20):
            account.plain()
        if account is looked:
            for _ in range(20):
                account.asked(0.05)
        account.drafted(1.1, tokens=1.5)
    assert other.room - looked.room == pytest.approx(0.4)
    looked.drafted(1.0, tokens=2.0)
    other.drafted(1.0, tokens=2.0)
    assert other.room - looked.room == pytest.approx(1.0), "but what drafts win is theirs once that is paid"


def test_what_asking_took_alone_forbids_nothing() -> None:
    account = Account()
    before = account.room
    for _ in range(100):
        account.asked(0.1)
    assert account.room == before


def test_what_reading_took_is_lost_but_does_not_say_that_drafts_lose() -> None:
    account = Account()
    account.drafted(1.2, 6.0, tokens=1.9, paid=True)
    assert account.room < 0
    assert account.wins(paid=True)
    assert not account.wins(paid=False)
    account.plain(checking=True)
    assert account.wins(paid=True)
    account.plain()
    assert not account.wins(paid=True)
    account.drafted(1.2, tokens=1.0, paid=True)
    assert not account.wins(paid=True)
