"""Threads that compile grammars: what takes long holds up nobody but the client that asked for it."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import Future
from time import monotonic, sleep

import pytest

from headstart import EngineBusy
from headstart.machine import compiling
from headstart.machine.compiling import Compilers


class Jobs:
    """Work that lasts until ``go``."""

    def __init__(self) -> None:
        self.compilers: Compilers[str] = Compilers()
        self.go, self.begun = threading.Event(), list[str]()
        self.asked: list[Future[str]] = []

    def ask(self, name: str, client: str | None, *, long: bool = True) -> Future[str]:
        def work() -> str:
            self.begun.append(name)
            assert not long or self.go.wait(60)
            return name

        self.asked.append(self.compilers.submit(work, client))
        return self.asked[-1]

    def until(self, count: int) -> list[str]:
        """What has begun, once it is so much."""
        end = monotonic() + 20
        while len(self.begun) < count and monotonic() < end:
            self.compilers.tend()
            sleep(0.002)
        return sorted(self.begun)

    def over(self) -> None:
        self.go.set()
        assert [each.result(20) for each in self.asked if not each.cancelled()]


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> Jobs:
    monkeypatch.setattr(compiling, "SLOW", 0.01)
    return Jobs()


def test_what_takes_long_gives_its_place_up(jobs: Jobs) -> None:
    for number in range(20):
        jobs.ask(f"a{number}", "a")
    assert len(jobs.until(compiling.EACH)) == compiling.EACH  # the others wait for these
    for number in range(compiling.EACH):
        jobs.ask(f"b{number}", "b")
    assert len(jobs.until(2 * compiling.EACH)) == 2 * compiling.EACH > compiling.AT_ONCE
    sleep(0.02)
    assert jobs.ask("c", "c", long=False).result(20) == "c"
    assert jobs.ask("mine", None, long=False).result(20) == "mine"
    assert len(jobs.begun) == 2 * compiling.EACH + 2
    jobs.over()
    assert len(jobs.until(25)) == 25


def test_this_program_itself_may_have_as_much_as_there_is(jobs: Jobs) -> None:
    for number in range(compiling.EACH + 2):
        jobs.ask(str(number), None)
    assert len(jobs.until(compiling.EACH + 2)) == compiling.EACH + 2
    jobs.over()


def test_who_waits_is_told_how_long(jobs: Jobs) -> None:
    first = [jobs.ask(str(number), "a") for number in range(compiling.EACH + 1)]
    jobs.until(compiling.EACH)
    begun, waits = jobs.compilers.pause(first[0]), jobs.compilers.pause(first[-1])
    assert begun > compiling.SLOW > 0  # when it gives its place up
    assert waits == compiling.PAUSE  # until there is a place
    jobs.over()


def test_there_is_a_bound_on_all_of_them(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "WAITING", 5)
    for number in range(compiling.MOST):
        jobs.ask(str(number), f"client {number}")
        jobs.until(number + 1)
    sleep(0.02)
    waiting = [jobs.ask(f"waits {number}", f"waits {number}") for number in range(5)]
    assert len(jobs.begun) == compiling.MOST
    with pytest.raises(EngineBusy, match="5 grammars wait"):
        jobs.ask("too many", "another")
    assert waiting[2].cancel()
    assert not jobs.asked[0].cancel()  # what has begun is not stopped
    jobs.over()
    jobs.until(compiling.MOST + 4)
    assert "waits 2" not in jobs.begun
    assert len(jobs.begun) == compiling.MOST + 4


def test_clients_take_turns(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that asks for much at once does not go before one that asks for little."""
    monkeypatch.setattr(compiling, "SLOW", 60.0)
    monkeypatch.setattr(compiling, "AT_ONCE", 2)
    for number in range(6):
        jobs.ask(f"a{number}", "a")
    jobs.ask("b", "b")
    assert jobs.until(2) == ["a0", "a1"]
    jobs.over()
    assert jobs.begun.index("b") < 4


def test_what_fails_says_so_and_leaves_its_place(jobs: Jobs) -> None:
    def broken() -> str:
        raise ValueError("no")

    for _ in range(3 * compiling.AT_ONCE):
        with pytest.raises(ValueError, match="no"):
            jobs.compilers.submit(broken, "a").result(20)
    assert jobs.ask("fine", "a", long=False).result(20) == "fine"


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities of their own only there")
def test_slow_ones_let_others_go_first(jobs: Jobs) -> None:
    ids: list[int] = []

    def work() -> str:
        ids.append(threading.get_native_id())
        jobs.go.wait(60)
        return "done"

    jobs.asked.append(jobs.compilers.submit(work, "a"))
    mine, end = os.getpriority(os.PRIO_PROCESS, threading.get_native_id()), monotonic() + 20
    while not (ids and os.getpriority(os.PRIO_PROCESS, ids[0]) > mine) and monotonic() < end:
        jobs.compilers.tend()
        sleep(0.002)
    assert os.getpriority(os.PRIO_PROCESS, ids[0]) == min(mine + compiling.NICE, 19)
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == mine
    jobs.over()
