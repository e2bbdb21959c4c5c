"""Rehearsals: kernels are compiled by processes of their own, and found in Triton's cache. Needs Triton, but no GPU."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from triton_stand import forget, stand_in  # noqa: E402

from headstart.machine.gpu.compile import precompile  # noqa: E402
from headstart.machine.gpu.kernels import pointwise as kernels_pointwise  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is compiled"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="its driver would have to be another one"),
]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache of Triton's."""
    stand_in(monkeypatch)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    yield tmp_path / "cache"
    assert precompile._waiting is None


class Here:
    """Counts the kernels that this very process compiles."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        monkeypatch.setattr(triton.knobs.compilation, "listener", self)

    def __call__(self, *, cache_hit: bool, **_: Any) -> None:
        self.count += not cache_hit


def work(width: int) -> None:
    x, table = torch.zeros(2, width), torch.zeros(8, width)
    scaled, squares = torch.zeros(2, width), torch.zeros(2, 1)
    kernels_pointwise.embed(torch.zeros(2, dtype=torch.int64), table, torch.ones(width), x, scaled, squares, pdl=0)
    kernels_pointwise.norm(x, None, torch.ones(width), scaled, eps=1e-5, pdl=0)


def alive(process: Any) -> bool:
    return process is not None and process.poll() is None


def test_what_is_rehearsed_is_compiled_elsewhere(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = Here(monkeypatch)
    assert not precompile.rehearsing()
    with precompile.rehearsal() as names:
        assert precompile.rehearsing()
        work(64)
        work(64)  # known by now
    assert not precompile.rehearsing()
    assert len(names) == 2
    assert here.count == 0
    assert len(list(cache.glob("headstart-*"))) == 1
    forget(kernels_pointwise)  # as in a new process
    monkeypatch.setattr(precompile, "_Helper", None)  # nothing is left for it to do
    with precompile.rehearsal() as again:
        work(64)
    assert again == names
    assert here.count == 0


def test_a_rehearsal_that_does_not_come_leaves_nothing_behind(cache: Path) -> None:
    with precompile.expected():
        helper = precompile._waiting
        assert helper is not None
        assert alive(helper._process)
    assert not alive(helper._process)
    assert not Path(helper._notes.name).exists()


def test_where_nothing_can_compile_beside_a_load_goes_on(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def helper() -> None:
        raise RuntimeError("there is no C compiler")

    monkeypatch.setattr(precompile, "_Helper", helper)
    with precompile.expected():
        assert precompile._waiting is None


def test_a_process_that_was_forked_meanwhile_holds_nothing_up(cache: Path) -> None:
    with precompile.expected():
        child = os.fork()  # it has the pipe too, and does not close it
        if child == 0:
            time.sleep(600)
            os._exit(0)
        try:
            with precompile.rehearsal() as names:
                work(256)
            assert len(names) == 2
            assert os.waitpid(child, os.WNOHANG) == (0, 0)
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def test_a_kernel_that_is_missing_is_asked_for_once(cache: Path) -> None:
    asked: list[Any] = []
    with precompile.rehearsal() as names:
        note = triton.knobs.runtime.jit_cache_hook  # called for whatever Triton does not find in its table

        def counted(**told: Any) -> Any:
            asked.append(told["fn"].jit_function)
            return note(**told)

        triton.knobs.runtime.jit_cache_hook = counted
        for _ in range(3):
            work(224)
    assert triton.knobs.runtime.jit_cache_hook is None
    assert len(asked) == len(names) == 2
    tables = [thing.device_caches[0][0] for thing in {*asked}]
    assert not any(isinstance(kernel, precompile._Absent) for table in tables for kernel in table.values())


def test_it_is_compiled_while_the_rehearsal_goes_on(cache: Path) -> None:
    with precompile.rehearsal():
        work(96)
        for _ in range(600):
            if list(cache.glob("*/*.cubin")):
                break
            time.sleep(0.1)
        else:
            raise AssertionError("nothing came")


def test_without_the_helper_all_is_compiled_here(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = Here(monkeypatch)
    with precompile.expected():
        helper = precompile._waiting
        assert helper is not None
        assert helper._process is not None
        os.killpg(helper._process.pid, signal.SIGKILL)
        with precompile.rehearsal() as names:
            work(160)
    assert here.count == len(names) == 2


def test_a_rehearsal_that_fails_leaves_nothing_behind(cache: Path) -> None:
    helpers: list[Any] = []

    def body() -> None:
        with precompile.expected():
            helpers.append(precompile._waiting)
            assert Path(helpers[0]._notes.name).exists()
            with precompile.rehearsal():
                work(192)
                raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        body()
    helper, notes = helpers[0], Path(helpers[0]._notes.name)
    assert not precompile.rehearsing()
    assert not alive(helper._process)
    assert not notes.exists()
    assert not list(cache.glob("headstart-*"))
