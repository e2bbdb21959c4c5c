"""The C++ kernels, compiled on this machine when they are first needed, and kept.

Knows: compilers, their options, and where the result lies. Does not know: what the kernels compute.

Compiling here, for this very processor, takes a few seconds once and needs no binary wheels. The result is named by
everything it depends on (source, compiler, options, processor), so a changed machine or version compiles anew. The
compiler is $CXX, the system's, or the one in the package ``ziglang``, which pip installs anywhere (the extra
``compiler``). Where there is none, ``why_not`` says so and callers stay on torch.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from ..cache import cache_folder

__all__ = ["ISAS", "compiled", "isa", "load_kernels", "why_not"]

SOURCES = Path(__file__).parent / "csrc"
COMPILERS = ("c++", "g++", "clang++")
OPTIONS = ("-O3", "-std=c++17", "-ffp-contract=off", "-fvisibility=hidden", "-fPIC", "-shared", "-pthread", "-w")
PATIENCE = 600  # seconds a compiler may take; ziglang's first compiles the C++ library too, a minute or two

# What the kernels may use of the processor: all of it, or less, for tests of the other code paths.
ISAS = {"native": ("-march=native",), "avx2": ("-march=haswell",), "plain": ()}


def isa() -> str:
    """$HEADSTART_CPU_ISA, or "native"."""
    chosen = os.environ.get("HEADSTART_CPU_ISA", "native")
    return chosen if chosen in ISAS else "native"


@cache
def load_kernels(level: str = "native") -> ctypes.CDLL | str:
    """The kernels, compiled first if need be; or, in words, why there are none."""
    try:
        return ctypes.CDLL(str(compiled(level)))
    except OSError as error:
        return f"the CPU kernels cannot be built here: {error}"


def why_not(level: str | None = None) -> str | None:
    """None if there are kernels here, else the reason."""
    found = load_kernels(level or isa())
    return found if isinstance(found, str) else None


def compiled(level: str) -> Path:
    """The library's file. Raises OSError if it cannot be made."""
    compiler = _compiler()
    if compiler is None:
        raise OSError(
            f"no C++ compiler found ({', '.join(COMPILERS)}); pip install 'headstart[compiler]' brings one (ziglang)"
        )
    sources = sorted(SOURCES.glob("*.cpp"))
    command = [*compiler, *OPTIONS, *ISAS[level]]
    known = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        known.update(path.name.encode() + path.read_bytes())
    for part in (*command, _version(compiler), _processor()):
        known.update(part.encode() + b"\0")
    path = cache_folder() / "kernels" / f"{level}-{known.hexdigest()[:20]}.so"
    if not path.exists():
        _compile(command, sources, path)
    return path


def _compiler() -> list[str] | None:
    """The command that compiles C++ here, without options."""
    if chosen := os.environ.get("CXX"):
        return shlex.split(chosen)
    if found := next(filter(None, map(shutil.which, COMPILERS)), None):
        return [found]
    return [sys.executable, "-m", "ziglang", "c++"] if find_spec("ziglang") is not None else None


def _compile(command: list[str], sources: list[Path], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    work = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        subprocess.run(
            [*command, *map(str, sources), "-o", str(work)], check=True, capture_output=True, timeout=PATIENCE
        )
        work.replace(path)  # in one step: another process sees it whole or not at all
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        raise OSError(f"{command[0]} failed: {lines[0][:300]}") from error
    except subprocess.TimeoutExpired as error:
        raise OSError(f"{command[0]} took more than {PATIENCE} s") from error
    finally:
        work.unlink(missing_ok=True)


def _version(compiler: list[str]) -> str:
    try:
        done = subprocess.run([*compiler, "--version"], capture_output=True, timeout=PATIENCE, check=True)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise OSError(f"{shlex.join(compiler)} --version failed: {error}") from error
    return done.stdout.decode(errors="replace")


def _processor() -> str:
    """What the processor can do, as far as the system says."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return f"{platform.machine()} {platform.processor()}"
