"""What tests of compiled kernels share: compilers that do as they are told, and processes that import little.

Knows: shells and processes. Does not know: what is tested. The stand-in for a compiler hands out the library that the
real one made before: compiling takes ten seconds, and what is tested is everything around it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from warm_processes import WarmProcess

import headstart
from headstart.machine.cpu import build

SOURCE = Path(headstart.__file__).parent
LIBRARY = build.compiled("native") if build.why_not("native") is None else None  # before any test changes the cache

#: Imports the modules around the kernels without torch and transformers, which take seconds.
LIGHT = """
import sys, types
from pathlib import Path
root = Path(sys.argv[1])
for name in ("headstart", "headstart.machine", "headstart.machine.cpu"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [str(root.parent.joinpath(*name.split(".")))]
from headstart.machine import cache, files
from headstart.machine.cpu import build
"""


class Compiler:
    """A script in place of a C++ compiler. It notes each compilation; ``before``: shell lines that come first."""

    def __init__(self, folder: Path, before: str = "", library: Path | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self.log = folder / "c++", folder / "log"
        library = library or LIBRARY
        self.path.write_text(
            f"#!/bin/sh\n[ \"$1\" = --version ] && {{ echo stand-in 1.0; exit 0; }}\necho $$ >> '{self.log}'\n"
            'tries=$(wc -l < "' + str(self.log) + '")\n'
            'for one in "$@"; do [ "$before" = -o ] && out=$one; before=$one; done\n'
            f"{before}\ncp '{library}' \"$out\"\n"
        )
        self.path.chmod(0o755)

    @property
    def count(self) -> int:
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0


def use(monkeypatch: pytest.MonkeyPatch, compiler: Compiler | None) -> None:
    """This compiler, or none at all."""
    monkeypatch.setattr(build, "COMPILERS", ())
    monkeypatch.setattr(build, "find_spec", lambda name: None)
    if compiler is None:
        monkeypatch.delenv("CXX", raising=False)
    else:
        monkeypatch.setenv("CXX", str(compiler.path))


def start(code: str, *arguments: str, cache: Path, **variables: str) -> subprocess.Popen[str]:
    """A process with a cache folder of its own, in a session of its own, so that all of it can be killed. It has
    imported little (``LIGHT``)."""
    return subprocess.Popen(
        [sys.executable, "-c", LIGHT + code, str(SOURCE), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=_around(cache, variables),
        start_new_session=True,
    )


def start_warm(code: str, *arguments: str, cache: Path, **variables: str) -> WarmProcess:
    """The same, for code that needs torch and transformers: it has imported them."""
    return WarmProcess(code, *arguments, environment=_around(cache, variables))


def _around(cache: Path, variables: dict[str, str]) -> dict[str, str]:
    place = {"HEADSTART_CACHE": str(cache), "PYTHONPATH": str(SOURCE.parent), "HF_HUB_OFFLINE": "1"}
    return os.environ | place | variables


def ended(*processes: subprocess.Popen[str] | WarmProcess, seconds: float = 240) -> list[str]:
    """What they printed; all must end well, in time."""
    try:
        said = [process.communicate(timeout=seconds) for process in processes]
    except BaseException:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        raise
    assert [process.returncode for process in processes] == [0] * len(processes), said
    return [out.strip() for out, _ in said]


def names(folder: Path) -> list[str]:
    """All that lies in a folder, hidden files too."""
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []
