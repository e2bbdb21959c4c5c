"""A process that compiles kernels into Triton's cache on disk, several at a time.

    python compiling.py

Knows: how to build a kernel for a GPU that it never touches. Does not know: what is done with it, or the rest of this
package: it stands on the kernels' modules alone, because importing everything takes longer than compiling.

Its first line of input says for which GPU, which modules hold the kernels and how many workers there are; the modules
are imported at once. Each further line is one job: (module, function, what Triton calls its specialization data).
When the input ends, the workers are forked, take job after job, and end.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import sys
import tempfile
import types
from contextlib import suppress
from pathlib import Path
from typing import Any

__all__ = ["main"]


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
    folder = Path(__file__).resolve().parent
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


def _compile(job: tuple[str, str, str], taken: Path) -> None:
    module, function, data = job
    try:
        _launcher(getattr(importlib.import_module(module), function).preload(data), taken)
    except Exception as error:  # whoever wants the kernel compiles it himself, and sees what is wrong
        print(f"{function}: {error}", file=sys.stderr)


def _warps(job: tuple[str, str, str]) -> int:
    """How many warps a kernel has: the fewer, the more each thread has to do, and the longer it takes to compile."""
    return int(json.loads(job[2])["options"]["num_warps"])


def _share(jobs: list[tuple[str, str, str]], workers: int, taken: Path) -> None:
    """Compile the jobs, each by the worker that asks for one first. The longest should come first."""
    out, into = os.pipe()
    os.write(into, b"".join(i.to_bytes(4, "little") for i in range(len(jobs))))
    os.close(into)
    for _ in range(min(workers, len(jobs))):
        if os.fork() == 0:
            try:
                while number := os.read(out, 4):  # four bytes are read whole or not at all
                    _compile(jobs[int.from_bytes(number, "little")], taken)
            finally:
                os._exit(0)
    with suppress(ChildProcessError):  # all are done
        while True:
            os.wait()


def main() -> None:
    head = json.loads(sys.stdin.readline())
    _bare_packages(head["package"])
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    driver.set_active(_Stand(GPUTarget(*head["target"])))
    for module in head["modules"]:
        importlib.import_module(module)
    jobs = [tuple(json.loads(line)) for line in sys.stdin]
    # Triton's name for a kernel depends on which kernel's name it worked out first: here in the order of the jobs, as
    # whoever sends them has done.
    for module, function, _ in jobs:
        getattr(importlib.import_module(module), function).cache_key  # noqa: B018
    with tempfile.TemporaryDirectory() as taken:
        for job in jobs[:1]:  # what Triton works out once a process is then there for all
            _compile(job, Path(taken))
        _share(sorted(jobs[1:], key=_warps), head["workers"], Path(taken))


if __name__ == "__main__":
    main()
