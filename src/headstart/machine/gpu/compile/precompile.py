"""Kernels compiled before they are wanted, many at a time.

Knows: how to find out which kernels a piece of work launches without running them, and how to compile them at once on
all cores. Does not know: which kernels there are, or what the work is.

A kernel is compiled when it is first launched, one after the other, half a second each: a minute for all that a pair
of models needs. Here the work is rehearsed first. A launch whose kernel is not there yet is noted and skipped; what it
would have written stays zero, because new memory is handed out filled with zeros, so that an index read from it is a
valid one. What is noted is compiled while the rehearsal goes on, by processes of its own (threads get in each other's
way), and taken from Triton's cache on disk at the end. What could not be made so is compiled here.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["expected", "rehearsal", "rehearsing"]

log = logging.getLogger(__name__)

_MOST = 32  # processes
_FORKS = hasattr(os, "fork")  # what compiles needs that
_PACKAGE = __name__.rsplit(".", 2)[0]  # machine.gpu


class _Zeros(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """New memory is filled with zeros."""

    _MAKERS = (torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.empty_strided, torch.ops.aten.new_empty)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in self._MAKERS:
            out.zero_()
        return out


class _Job(NamedTuple):
    """One kernel that is wanted."""

    function: Any  # Triton's JITFunction
    data: str  # what it is to be compiled for


class _Absent:
    """Stands in Triton's own table where a kernel will be, so that launching it again is quickly passed over."""

    function = packed_metadata = None

    def launch_metadata(self, *_: Any) -> None:
        return None

    def run(self, *_: Any) -> None:
        pass


@contextmanager
def expected() -> Iterator[None]:
    """A rehearsal may come inside: what compiles takes some seconds to start, which the caller spends on other work."""
    global _waiting
    try:
        _prepare()
    except Exception as error:  # if there is a rehearsal, it will say what is wrong
        log.info("no kernels can be compiled beside: %s", error)
    try:
        yield
    finally:
        helper, _waiting = _waiting, None
        if helper is not None:
            helper.give_up()


def _prepare() -> None:
    """Start what compiles, unless something was compiled here before: then all of it may be there."""
    global _waiting
    if _waiting is None and _FORKS and not any(_folder().glob("headstart-*")):
        _waiting = _Helper()


def _folder() -> Path:
    from triton import knobs

    return Path(knobs.cache.dir)


def rehearsing() -> bool:
    """Is this a rehearsal? Then nothing needs to be worked out, or waited for."""
    return _rehearsing


@contextmanager
def rehearsal() -> Iterator[list[str]]:
    """Kernels that are missing are not run inside, but are there at the end. Gives their names, known by then."""
    from triton import knobs

    noted: dict[tuple[int, str], _Job] = {}
    absent: list[tuple[dict[str, Any], str]] = []
    names: list[str] = []

    def note(*, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:  # Triton's hook and its names
        place = id(fn.jit_function), key
        if place not in noted:
            job = noted[place] = _Job(fn.jit_function, compile["specialization_data"])
            job.function.cache_key  # noqa: B018 - named in the order in which they are sent: see ``compiling._name``
            table = fn.jit_function.device_caches[compile["device"]][0]
            table[key] = _Absent()
            absent.append((table, key))
            if helper is not None:
                helper.send(job)
        return True  # do not compile now

    global _waiting, _rehearsing
    folder = _folder()
    _prepare()
    helper, _waiting = _waiting, None
    before, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, note
    _rehearsing = True
    try:
        with _Zeros():  # type: ignore[no-untyped-call]
            yield names
    except BaseException:
        if helper is not None:
            helper.give_up()
        raise
    finally:
        knobs.runtime.jit_cache_hook = before
        _rehearsing = False
        for table, key in absent:
            del table[key]
    jobs = list(noted.values())
    names.extend(job.function.__name__ for job in jobs)
    _compile(jobs, folder, helper)


def _compile(jobs: list[_Job], folder: Path, helper: _Helper | None) -> None:
    from triton.runtime._async_compile import AsyncCompileMode

    names = [job.function.cache_key + job.data for job in jobs]
    known = hashlib.sha256("".join(sorted(names)).encode()).hexdigest()
    mark = folder / f"headstart-{known[:32]}"  # all these are in the cache
    if jobs and not mark.exists():
        if helper is None and _FORKS:
            helper = _Helper()
            for job in jobs:
                helper.send(job)
        if helper is not None:
            helper.finish()
    elif helper is not None:
        helper.give_up()
    with ThreadPoolExecutor(8) as threads, AsyncCompileMode(threads):
        for job in jobs:
            job.function.preload(job.data)
    folder.mkdir(parents=True, exist_ok=True)
    mark.touch()


class _Helper:
    """The process that compiles. It imports the kernels while the rehearsal goes on."""

    def __init__(self) -> None:
        from triton.runtime import driver

        target = driver.active.get_current_target()
        kernels = sorted(Path(__file__).parents[1].glob("kernels/[!_]*.py"))
        self._notes = tempfile.TemporaryDirectory()
        head = {
            "package": _PACKAGE,
            "target": [target.backend, target.arch, target.warp_size],
            "modules": [f"{_PACKAGE}.kernels.{path.stem}" for path in kernels],
            "workers": min(os.cpu_count() or 1, _MOST),
            "notes": self._notes.name,
        }
        program = [sys.executable, "-P", str(Path(__file__).with_name("compiling.py")), json.dumps(head)]
        self._process = subprocess.Popen(
            program, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, encoding="utf-8", start_new_session=True
        )
        assert self._process.stdin is not None
        if sys.platform == "linux":
            with suppress(ImportError, OSError):  # room for all jobs: nobody waits for it to read them
                import fcntl

                fcntl.fcntl(self._process.stdin, fcntl.F_SETPIPE_SZ, 1 << 20)

    def send(self, job: _Job) -> None:
        """Begin to compile this."""
        self._say((job.function.fn.__module__, job.function.__name__, job.data))

    def finish(self) -> None:
        """Wait until all is compiled."""
        self._say(None)
        self._process.communicate()
        self._notes.cleanup()

    def give_up(self) -> None:
        """Nothing is to be compiled."""
        if sys.platform != "win32":  # there is no fork, and no helper
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # its workers too
        self._process.communicate()
        self._notes.cleanup()

    def _say(self, line: Any) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it died: the kernels are compiled here
            self._process.stdin.write(json.dumps(line) + "\n")
            self._process.stdin.flush()


_waiting: _Helper | None = None  # started, and not yet used
_rehearsing = False
