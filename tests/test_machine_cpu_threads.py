"""How many threads a step gets: measured at load, doubted when the machine was busy, changed while it runs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from warm_processes import WarmProcess

from headstart.machine.cpu import build, thread_count
from headstart.machine.cpu.cores import allowed_cores
from headstart.machine.cpu.open import open_packed
from headstart.machine.cpu.thread_count import TURNS, Timed, best_count, threads_for
from headstart.machine.cpu.threads import FIRST_TRIAL, PAUSE, WINS, Pace, counts
from headstart.machine.load.loading import load
from headstart.testing import tiny_model

kernels = pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not()))


def test_a_busy_machine_gets_one_thread_until_it_is_quiet_again() -> None:
    pace = Pace(2)

    def step(seconds: float) -> int:
        used = pace.threads()
        pace.took((1, 7), seconds)
        return used

    assert [step(1.0) for _ in range(5)] == [2] * 5
    assert [step(9.0), step(1.1), step(9.0)] == [2, 2, 2]  # now and then a slow step is nothing
    assert pace.threads() == 2
    assert [step(9.0) for _ in range(2)] == [2, 2]
    assert [step(2.0) for _ in range(PAUSE)] == [1] * PAUSE
    assert step(9.0) == 2  # tried again, still slow
    assert [step(2.0) for _ in range(PAUSE)] == [1] * PAUSE
    assert [step(1.0) for _ in range(40)] == [2] * 40
    pace.took((8, 7), 30.0)  # more tokens have a best time of their own
    assert pace.threads() == 2


def played(pace: Pace, seconds: Callable[[int], float], steps: int) -> list[int]:
    """The threads of each step; ``seconds``: how long a step takes with so many."""
    used = []
    for _ in range(steps):
        used.append(pace.threads())
        pace.took((1, 7), seconds(used[-1]))
    return used


def test_a_count_that_was_wrong_is_found_out_while_running() -> None:
    """Measured beside another program, one thread seemed best; now the machine is quiet."""
    pace = Pace(2, start=1)
    used = played(pace, lambda threads: 1.0 / threads, FIRST_TRIAL + WINS + 50)
    assert used == [1] * FIRST_TRIAL + [2] * (WINS + 50)
    assert pace.now == 2


def test_trials_are_few_and_back_off_while_they_fail() -> None:
    for most, start in ((2, 2), (2, 1), (8, 4)):
        pace = Pace(most, start=start)
        used = played(pace, lambda threads, best=start: 1.0 if threads == best else 1.8, 20000)
        others = [count for count in used if count != start]
        assert pace.now == start
        assert 3 <= len(others) <= 8
        assert set(others) <= {start // 2, 2 * start}
        if most == 8:
            assert set(others) == {2, 8}  # both ways


def test_one_lucky_step_changes_nothing() -> None:
    pace = Pace(2, start=1)
    times = iter([0.5, 1.5] * 100)
    played(pace, lambda threads: 1.0 if threads == 1 else next(times), 20000)
    assert pace.now == 1


def test_a_number_set_by_hand_stays() -> None:
    pace = Pace(4, fixed=True)
    assert set(played(pace, lambda threads: 9.0 if threads > 1 else 1.0, 2000)) == {4}


def test_counts() -> None:
    assert [counts(n) for n in (1, 2, 3, 6, 8)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 6], [1, 2, 4, 8]]


# -- at load ----------------------------------------------------------------------------------------------------------


class Machine:
    """Steps with known lengths. ``busy``: with this many threads and more, one had to wait for a core."""

    def __init__(self, seconds: dict[int, float], busy: int = 99) -> None:
        self.seconds, self.busy, self.measured = seconds, busy, 0

    def timed(self, step: object, threads: int) -> Timed:
        self.measured += 1
        seconds = self.seconds[threads]
        return Timed(seconds, threads * seconds * (0.6 if threads >= self.busy else 1.0), threads)


def test_the_fastest_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def best(most: int, machine: Machine) -> int | None:
        monkeypatch.setattr(thread_count, "timed", machine.timed)
        return best_count(print, most)

    assert best(2, Machine({1: 2.0, 2: 1.1})) == 2
    assert best(2, Machine({1: 2.0, 2: 1.95})) == 1  # not worth a core
    assert best(4, Machine({1: 2.0, 2: 1.2, 4: 1.3})) == 2
    assert best(2, Machine({1: 2.0, 2: 5.0}, busy=2)) is None


def test_a_result_is_remembered_when_two_loads_found_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path))
    machine = Machine({1: 2.0, 2: 5.0}, busy=2)
    monkeypatch.setattr(thread_count, "timed", lambda step, count: machine.timed(step, count))

    def load() -> int:
        return threads_for(print, {"model": "m"}, 2)

    assert load() == 2  # a busy moment: as many as there are, and nothing is kept
    assert not (tmp_path / "threads").exists()
    machine.busy, machine.seconds[2] = 99, 1.0
    assert load() == 2
    (record,) = (tmp_path / "threads").iterdir()
    machine.busy = 2
    assert load() == 2  # busy again: what was seen once is better than nothing
    machine.busy, machine.measured = 99, 0
    assert (load(), machine.measured) == (2, 2 * TURNS)
    assert (load(), machine.measured) == (2, 2 * TURNS)  # seen twice: no more measuring
    machine.seconds[1] = 0.5
    for broken in ("{broken", '{"seen": [Infinity]}', "[" * 100_000, "[2]"):
        record.write_text(broken)
        assert load() == 1, broken[:30]
    record.write_text(json.dumps({"threads": 2, "seconds": {"1": 2.0, "2": 1.0}}))  # as it was kept before: doubted
    assert load() == 1


# -- what a container leaves ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "files", "cores"),
    [
        ("0::/", {"cpu.max": "150000 100000"}, 2),
        ("0::/", {"cpu.max": "max 100000"}, None),
        ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "400000 100000", "cpu.max": "max 100000"}, 4),
        ("0::/a/b", {"a/b/cpu.max": "20000 100000", "a/cpu.max": "400000 100000"}, 1),
        ("3:cpu,cpuacct:/x", {"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3),
        ("3:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ("3:cpuset:/", {"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, None),
        ("nonsense", {"cpu.max": "100000 100000"}, None),
        ("0::/", {"cpu.max": "much of it"}, None),
        ("0::/", {"cpu.max": "100000 0"}, None),
    ],
)
def test_a_containers_quota(own: str, files: dict[str, str], cores: int | None, tmp_path: Path) -> None:
    (tmp_path / "own").write_text(own + "\n")
    for name, text in files.items():
        path = tmp_path / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    assert allowed_cores(tmp_path / "groups", tmp_path / "own") == cores
    assert allowed_cores(tmp_path, tmp_path / "missing") is None


@kernels
@pytest.mark.parametrize(("quota", "cores"), [(1, {0, 1, 2}), (None, {2})])
def test_no_more_threads_than_there_are_cores_for(
    quota: int | None, cores: set[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Though torch counts the machine's (a container's quota, ``taskset``), and nothing could be measured: threads that
    share a core are never undisturbed."""
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path))
    monkeypatch.setattr("headstart.machine.cpu.cores.allowed_cores", lambda: quota)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: cores)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 32)
    monkeypatch.setattr(thread_count, "best_count", lambda step, most: None)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 32}
    runner = open_packed(load(tiny_model("llama", **sizes)), "int8", rows=1, max_len=16, margin=1, probe=False)
    assert runner.threads == 1


# -- what the system does not give ------------------------------------------------------------------------------------

CODE = """
import resource, sys, torch
from headstart.machine.cpu.open import open_packed
from headstart.machine.load.loading import load
from headstart.testing import tiny_model

def limit(more):
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + more, -1))

model = load(tiny_model("llama", hidden_size=64, intermediate_size=16384, head_dim=32, max_position_embeddings=2048))
runner = open_packed(model, "bfloat16", rows=1, max_len=2048, margin=1, probe=False, threads=1)
text = torch.randint(100, (1, 2000))
few = runner.forward(slice(0, 1), text[:, :3], [0])
limit(24 << 20)
try:
    runner.forward(slice(0, 1), text, [0], keep=1)
    print("there was memory")
except MemoryError as error:
    print(error)
runner.threads = 12  # each wants a stack
print(torch.equal(runner.forward(slice(0, 1), text[:, :3], [0]), few))
"""


@kernels
@pytest.mark.skipif(sys.platform != "linux", reason="limits the memory as Linux does")
def test_memory_and_threads_that_cannot_be_had() -> None:
    """A forward without memory is an error, and the next one runs; missing threads cost time only."""
    out, errors = WarmProcess(CODE, environment=dict(os.environ)).communicate(timeout=300)
    assert out.splitlines() == ["there is no memory for a forward of 2000 tokens", "True"], errors
    assert "of 12 threads could be started" in errors
