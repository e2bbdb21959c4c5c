"""Memory that is free goes back to the system: soon after work, and now and then during it."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from server_tools import WORDS, Server

from headstart.server import memory, process
from headstart.server.memory import AT_REST, AT_WORK, Memory, give_back


class _Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def times(states: list[bool], tick: float) -> list[int]:
    """Ticks at which it was given back; a state for each: is the server idle?"""
    clock = _Clock()
    found, kept = [], Memory(clock)
    for i, idle in enumerate(states):
        clock.now = i * tick
        if kept.due(idle):
            found.append(i)
    return found


def test_soon_after_work_and_once() -> None:
    rest, work = int(AT_REST / 0.1), 5
    assert times([True] * 100, 0.1) == []  # nothing was used
    [first] = times([False] * work + [True] * 100, 0.1)
    assert abs(first - (work + rest)) <= 1
    busy = ([False] * work + [True] * (rest - 2)) * 20  # those who are always there again wait for nothing
    assert times(busy, 0.1) == []
    assert len(times(([False] * work + [True] * 2 * rest) * 3, 0.1)) == 3


def test_now_and_then_where_there_is_always_work() -> None:
    found = times([False] * 3000, 0.1)
    assert [round(at * 0.1 / AT_WORK) for at in found] == [1, 2, 3, 4]


@pytest.mark.skipif(memory._trim is None, reason="a C library that cannot")
def test_it_is_given_back() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    block, number = 32 * 1024, 4096
    blocks = [bytearray(b"x" * block) for _ in range(number)]
    kept = blocks[::32]  # of what is freed nothing lies at the end
    del blocks
    before = resident()
    give_back()
    assert len(kept) * 32 == number
    assert before - resident() > block * number / 2


def test_a_server_does_it_after_work(monkeypatch: pytest.MonkeyPatch) -> None:
    given = threading.Event()
    monkeypatch.setattr(process, "give_back", given.set)
    monkeypatch.setattr(memory, "AT_REST", 0.01)
    server = Server()
    try:
        with server.held():
            waiting = server.send("/v1/chat/completions", {"messages": WORDS, "max_tokens": 2})
            time.sleep(0.3)  # some ticks
            assert not given.is_set()
        assert given.wait(30)
        waiting.close()
        server.settle()
    finally:
        server.close()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc is Linux's")
def test_a_c_library_without_it_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstart.server.memory.ctypes.CDLL", lambda _: object())
    assert memory._trimmer() is None
    monkeypatch.setattr(memory, "_trim", None)
    give_back()
