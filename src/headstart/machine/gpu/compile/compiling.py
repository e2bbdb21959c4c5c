"""A process that compiles kernels into Triton's cache on disk, several at a time.

    python compiling.py HEAD

Knows: how to build a kernel for a GPU that it never touches. Does not know: what is done with it, or the rest of this
package: it stands on the kernels' modules alone, because importing everything takes longer than compiling.

HEAD says for which GPU, which modules hold the kernels, how many workers there are and where they leave notes for each
other; the modules are imported at once. Each line of input is one job: (module, function, what Triton calls its
specialization data). Jobs are begun as they come, each in a process forked for it. A last line says null (the end of
the input alone may come late: whoever forks at the wrong moment has the pipe too). When all are done, so is this.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import select
import sys
import types
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

__all__ = ["main"]

_PATIENCE = 0.005  # seconds between two looks at whether a worker has ended

Job = tuple[str, str, str]


class _Stand:
    """What Triton asks its driver while it compiles."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0


def _bare_packages(name: str) -> None:
    """Let modules of this package be imported without what the packages around them import."""
    folder = Path(__file__).resolve().parents[1]
    while name:
        package = types.ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package
        name, folder = name.rpartition(".")[0], folder.parent


def _launcher(kernel: Any, taken: Path) -> None:
    """The C function that starts the kernel, for which Triton calls a C compiler: half of the time of all this.

    Many kernels have the same one. Whoever makes its file in ``taken`` first builds it.
    """
    if kernel.metadata.target.backend != "cuda":
        return
    from triton.backends.nvidia.driver import CudaLauncher

    kind = [list(kernel.src.signature.items()), sorted(map(str, kernel.src.constants))]
    with suppress(FileExistsError):
        (taken / hashlib.sha256(json.dumps(kind).encode()).hexdigest()).touch(exist_ok=False)
        CudaLauncher(kernel.src, kernel.metadata)


def _compile(job: Job, taken: Path) -> None:
    module, function, data = job
    try:
        _launcher(getattr(importlib.import_module(module), function).preload(data), taken)
    except Exception as error:  # whoever wants the kernel compiles it himself, and sees what is wrong
        print(f"{function}: {error}", file=sys.stderr)


def _name(job: Job) -> None:
    """Let Triton name the kernel. The name depends on which kernel's it worked out first, so it is done in the order of
    the jobs, as whoever sends them has done."""
    getattr(importlib.import_module(job[0]), job[1]).cache_key  # noqa: B018


def _warps(job: Job) -> int:
    """How many warps a kernel has: the fewer, the more each thread has to do, and the longer it takes to compile."""
    return int(json.loads(job[2])["options"]["num_warps"])


class _Lines:
    """Lines of a file that is still being written."""

    def __init__(self, file: int) -> None:
        self._file, self._rest, self.open = file, b"", True

    def read(self, patience: float | None) -> list[str]:
        """Those that are there; if there are none, those that come within so many seconds (None: for ever)."""
        if not self.open or not select.select([self._file], [], [], patience)[0]:
            return []
        found = os.read(self._file, 1 << 20)
        self.open = bool(found)
        *lines, self._rest = (self._rest + found).split(b"\n")
        if lines and lines[-1] == b"null":
            self.open = False
            lines.pop()
        return [line.decode() for line in lines]


def _work(lines: _Lines, workers: int, name: Callable[[Job], None], make: Callable[[Job], None]) -> None:
    """``name`` all jobs as they come, and ``make`` each as soon as a worker is free, those that take long first."""
    if sys.platform == "win32":
        raise OSError("each job is a fork, and there is none here")  # ``precompile`` does not start this there
    waiting: list[tuple[int, Job]] = []
    running, first = 0, True
    while lines.open or waiting or running:
        busy = running > 0
        for line in lines.read(_PATIENCE if busy else None):
            job = tuple(json.loads(line))
            with suppress(Exception):  # else whoever wants the kernel compiles it himself
                name(job)
                waiting.append((_warps(job), job))
        if busy:  # where nothing more is to be read, wait for a worker's end
            try:
                ended, _ = os.waitpid(-1, os.WNOHANG if lines.open else 0)
                running -= ended != 0
            except ChildProcessError:  # somebody else heard of it
                running = 0
        if first and waiting:  # what Triton works out once a process is then there for all
            make(waiting.pop(0)[1])
            first = False
        waiting.sort(key=lambda one: one[0])
        while waiting and running < workers:
            _, job = waiting.pop(0)
            if os.fork() == 0:
                try:
                    make(job)
                finally:
                    os._exit(0)
            running += 1


def main() -> None:
    head = json.loads(sys.argv[1])
    _bare_packages(head["package"])
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    driver.set_active(_Stand(GPUTarget(*head["target"])))
    for module in head["modules"]:
        importlib.import_module(module)
    taken = Path(head["notes"])
    _work(_Lines(sys.stdin.fileno()), head["workers"], _name, lambda job: _compile(job, taken))


if __name__ == "__main__":
    main()
