"""The process that compiles kernels: jobs are begun as they come. Real processes; only the compiler is another one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from headstart.machine.gpu import one_kernel
from headstart.machine.gpu.compile import compiling
from headstart.machine.gpu.tiles import BOUNDS, attention_tile, pieces

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")

# Works through the jobs of its standard input, and notes what happens in a file. A job's "module" is how many seconds
# it takes; those named "dies" end their process.
DRIVER = """
import json, os, sys, time
{before}
sys.path.insert(0, {folder!r})
import compiling

def note(*words):
    with open({log!r}, "a") as file:  # a short line is written whole
        file.write(json.dumps([time.time(), os.getpid(), *words]) + "\\n")

def make(job):
    note("begin", job[1])
    if job[1] == "dies":
        os._exit(3)
    time.sleep(float(job[0]))
    note("end", job[1])

note("head", "")

def name(job):
    if job[1] == "no name":
        raise AttributeError(job[1])
    note("name", job[1])

compiling._work(compiling._Lines(0), {workers}, name, make)
note("done", "")
"""


class Helper:
    def __init__(self, folder: Path, workers: int, before: str = "") -> None:
        self._log, here = folder / "log.jsonl", Path(compiling.__file__).parent
        code = DRIVER.format(folder=str(here), log=str(self._log), workers=workers, before=before)
        self._process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)

    def say(self, text: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(text.encode())
        self._process.stdin.flush()

    def send(self, name: str, seconds: float = 0.0, warps: int = 4) -> None:
        self.say(json.dumps([str(seconds), name, json.dumps({"options": {"num_warps": warps}})]) + "\n")

    def notes(self) -> list[tuple[float, int, str, str]]:
        return [tuple(json.loads(line)) for line in self._log.read_text().splitlines()] if self._log.exists() else []

    def until(self, what: str, name: str) -> None:
        for _ in range(1000):
            if any(entry[2:] == (what, name) for entry in self.notes()):
                return
            time.sleep(0.01)
        raise AssertionError(f"{what} {name} did not come: {self.notes()}")

    def finish(self) -> list[tuple[float, int, str, str]]:
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(20) == 0
        return self.notes()


def names(notes: list[tuple[float, int, str, str]], what: str) -> list[str]:
    return [name for _, _, kind, name in notes if kind == what]


def test_jobs_are_made_before_all_are_known(tmp_path: Path) -> None:
    helper = Helper(tmp_path, 2)
    for name in ("a", "b"):
        helper.send(name)
        helper.until("end", name)  # while the input is still open
    helper.send("c")
    notes = helper.finish()
    assert names(notes, "name") == ["a", "b", "c"]
    assert sorted(names(notes, "end")) == ["a", "b", "c"]
    assert notes[-1][2] == "done"


def test_the_first_is_made_here_and_the_others_by_a_process_each(tmp_path: Path) -> None:
    helper = Helper(tmp_path, 3)
    for name in "abcde":
        helper.send(name)
    notes = helper.finish()
    makers = {name: pid for _, pid, kind, name in notes if kind == "begin"}
    own = notes[0][1]
    assert makers["a"] == own
    assert len({makers[name] for name in "bcde"} - {own}) == 4


def test_no_more_at_a_time_than_there_are_workers(tmp_path: Path) -> None:
    helper = Helper(tmp_path, 2)
    for i in range(7):
        helper.send(f"job {i}", seconds=0.05 if i else 0.0)
    notes = helper.finish()
    running = most = 0
    for _, _, kind, name in sorted(notes):
        if name != "job 0" and kind in ("begin", "end"):
            running += 1 if kind == "begin" else -1
            most = max(most, running)
    assert most == 2
    assert len(names(notes, "end")) == 7


def test_a_free_worker_does_not_wait_for_a_busy_one(tmp_path: Path) -> None:
    helper = Helper(tmp_path, 2)
    helper.send("first")
    helper.send("slow", seconds=2)
    helper.until("begin", "slow")
    helper.send("quick")
    helper.until("end", "quick")
    assert "slow" not in names(helper.notes(), "end")
    assert "slow" in names(helper.finish(), "end")


def test_what_takes_long_comes_first(tmp_path: Path) -> None:
    helper = Helper(tmp_path, 1)
    helper.send("first", seconds=1)
    helper.until("begin", "first")  # the others wait together
    for name, warps in (("short", 8), ("long", 1), ("middle", 4)):
        helper.send(name, warps=warps)
    notes = helper.finish()
    assert names(notes, "name") == ["first", "short", "long", "middle"]  # but they are named as they came
    assert names(notes, "begin") == ["first", "long", "middle", "short"]


def test_a_worker_that_dies_keeps_nobody_waiting(tmp_path: Path) -> None:
    helper = Helper(tmp_path, 1)
    for name in ("a", "dies", "b", "dies", "c"):
        helper.send(name)
    assert sorted(names(helper.finish(), "end")) == ["a", "b", "c"]


def test_what_is_no_kernel_is_left_out(tmp_path: Path) -> None:
    helper = Helper(tmp_path, 1)
    helper.send("a")
    helper.say(json.dumps(["0", "b", "{}"]) + "\n")
    helper.send("no name")
    helper.send("c")
    assert names(helper.finish(), "end") == ["a", "c"]


def test_ends_of_workers_that_somebody_else_hears_of(tmp_path: Path) -> None:
    helper = Helper(tmp_path, 2, "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)")
    for i in range(6):
        helper.send(str(i), seconds=0.02)
    assert len(names(helper.finish(), "end")) == 6


def test_lines_that_come_in_pieces(tmp_path: Path) -> None:
    helper = Helper(tmp_path, 1)
    line = json.dumps(["0", "whole", json.dumps({"options": {"num_warps": 4}})])
    for piece in (line[:7], line[7:] + "\n" + line[:3], line[3:].replace("whole", "again")):
        helper.say(piece)
        time.sleep(0.05)
    helper.say("\n")
    assert names(helper.finish(), "end") == ["whole", "again"]


def test_nothing_to_do(tmp_path: Path) -> None:
    assert names(Helper(tmp_path, 4).finish(), "done") == [""]


class Making(Future[bytes]):
    """What is still being compiled. Nobody may wait for it."""

    def result(self, timeout: float | None = None) -> bytes:
        assert self.done(), "waited for the compiler"
        return super().result(timeout)


def half_open(made: Future[bytes]) -> one_kernel.WholeModel:
    """A model in one kernel that is being compiled."""
    model = one_kernel.WholeModel.__new__(one_kernel.WholeModel)
    model._weights = SimpleNamespace(hidden=8, device=torch.device("cpu"), dtype=torch.bfloat16)  # type: ignore[assignment]
    model._sizes = SimpleNamespace(with_x=3)  # type: ignore[assignment]
    model._binaries, model._kernels = {(1, 4): made}, {}
    return model


def test_a_rehearsal_does_not_wait_for_the_kernel_of_a_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Making()
    model, token = half_open(made), torch.zeros(1, dtype=torch.int64)
    monkeypatch.setattr(one_kernel, "rehearsing", lambda: True)
    assert model.takes(1, 512)
    assert not model.takes(3, 512)
    scaled, squares = model.step(token, token, 0, 512)
    assert (scaled.shape, squares.shape) == ((1, 8), (1, 3))
    monkeypatch.setattr(one_kernel, "Kernel", lambda *_: "a kernel")
    monkeypatch.setattr(one_kernel, "rehearsing", lambda: False)
    made.set_result(b"")
    assert model.takes(1, 512)
    assert list(model._kernels.values()) == ["a kernel"]


@pytest.mark.parametrize("known", [False, True])
def test_a_kernel_that_failed_is_not_expected_in_a_rehearsal(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Making()
    made.set_exception(RuntimeError("no"))
    model = half_open(made)
    if known:
        assert not model.takes(1, 512)
    monkeypatch.setattr(one_kernel, "rehearsing", lambda: True)
    assert not model.takes(1, 512)


@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("capacity", [300, 600, 1100, 1500, 2048, 4096, 20000])
def test_no_attention_kernel_is_first_met_while_serving(head_dim: int, capacity: int) -> None:
    """Captured rounds have bounds of ``BOUNDS``; a prompt is read with bounds in steps of 512, cut to the capacity."""
    t = attention_tile(head_dim, torch.bfloat16)

    def kernel(bound: int, *, split: bool = True) -> tuple[bool, int]:
        splits = pieces(bound, t.chunk) if split else 1
        return splits > 1, t.stages_for(1, splits)

    captured = {kernel(bound) for bound in (*(b for b in BOUNDS if b < capacity), capacity)}
    captured.add(kernel(512))  # a short prompt, see ``engine.warm_up.rehearse``
    bounds = [min(bound, capacity) for bound in range(512, 33000, 512)]
    assert {kernel(bound, split=split) for bound in bounds for split in (True, False)} <= captured
