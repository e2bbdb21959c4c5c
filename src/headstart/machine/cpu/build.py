"""The C++ kernels, compiled on this machine when they are first needed, and kept.

Knows: compilers, their options, and where the result lies. Does not know: what the kernels compute.

Compiling here, for this very processor, takes some seconds once and needs no binary wheels. The result is named by what
its numbers and its instructions depend on (source, options, processor), not by the compiler: the sources give the same
bits whoever compiles them, so a library that is there is used without any compiler. A note beside it says who made it
and what its bytes are; one that is damaged, or that others can write, is made anew. The compiler is $CXX, the system's,
or the one in the package ``ziglang``, which pip installs anywhere (the extra ``compiler``). Where there is none,
``why_not`` says so.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from threading import RLock
from typing import NamedTuple

from ...errors import InvalidParameter
from ...types import Tell, silent
from ..cache import cache_folder, clear_unused, guarded_folders
from ..files import hold, locked, open_guarded, read_guarded, replacing, sweep, temporary, write_whole

__all__ = ["ISAS", "compiled", "isa", "library_name", "load_kernels", "why_not"]

SOURCES = Path(__file__).parent / "csrc"
COMPILERS = ("c++", "g++", "clang++")
OPTIONS = (
    *("-O3", "-std=c++17", "-fno-fast-math", "-ffp-contract=off"),  # the last two: the same bits from every compiler
    *("-fvisibility=hidden", "-fPIC", "-shared", "-pthread", "-w"),
)
PATIENCE = 600  # seconds a compiler may take; ziglang's first compiles the C++ library too, a minute or two
PAUSES = (0.5, 2.0)  # seconds before a compiler that was killed, or could not be started, is tried again
REMEMBERED = 30.0  # seconds that a failure is taken as known: the parts of one start-up ask several times

# What the kernels may use of the processor: all of it, or less, for tests of the other code paths. Those are compiled
# in half the time (the last -O counts): -O3 says in many more instructions what the vectors in the sources say already.
ISAS = {"native": ("-march=native",), "avx2": ("-O2", "-march=haswell"), "plain": ("-O2",)}
_NEEDED = {"avx2": ("avx2", "fma", "f16c", "bmi2")}

_PASSING = (errno.EAGAIN, errno.ENOMEM, errno.EINTR)
_PASSING_WORDS = ("signal terminated", "temporarily unavailable", "annot allocate memory", "memory exhausted")
_FULL_WORDS = ("No space left on device", "Disk quota exceeded", "File size limit exceeded")
_LEAST_ROOM = 1 << 20  # bytes
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)


def isa() -> str:
    """$HEADSTART_CPU_ISA, or "native"."""
    chosen = os.environ.get("HEADSTART_CPU_ISA") or "native"
    if chosen not in ISAS:
        raise InvalidParameter("HEADSTART_CPU_ISA", f"must be {', '.join(ISAS)} or not set, not {chosen!r}")
    return chosen


class _Failure(NamedTuple):
    when: float
    circumstances: tuple[str | None, ...]
    reason: str


# What this process has loaded, or failed to. Shared by all models; the lock lets one thread compile for all.
_lock = RLock()
_libraries: dict[str, ctypes.CDLL] = {}
_failures: dict[str, _Failure] = {}


def load_kernels(level: str = "native", say: Tell = silent) -> ctypes.CDLL | str:
    """The kernels, compiled first if need be; or, in words, why there are none. A failure is soon forgotten."""
    with _lock:
        if level in _libraries:
            return _libraries[level]
        around = (str(cache_folder()), os.environ.get("PATH"), os.environ.get("CXX"))
        failed = _failures.get(level)
        if failed and failed.circumstances == around and time.monotonic() - failed.when < REMEMBERED:
            return failed.reason
        try:
            _libraries[level] = _loaded(level, say)
        except OSError as error:
            reason = f"the CPU kernels cannot be built here: {error}"
            _failures[level] = _Failure(time.monotonic(), around, reason)
            return reason
        return _libraries[level]


def why_not(level: str | None = None, say: Tell = silent) -> str | None:
    """None if there are kernels here, else the reason."""
    found = load_kernels(level or isa(), say)
    return found if isinstance(found, str) else None


def compiled(level: str, say: Tell = silent) -> Path:
    """The library's file. Raises OSError if it cannot be made."""
    library = _obtained(level, say)
    os.close(library.file)
    return library.path


def library_name(level: str) -> str:
    """What the library is called, be it there or not: other sources, options or processors give other names."""
    return _name(level, _sources())


# -- finding and keeping --------------------------------------------------------------------------------------------


class _Library(NamedTuple):
    path: Path
    file: int  # open, and found to be what the note says


def _loaded(level: str, say: Tell) -> ctypes.CDLL:
    library = _obtained(level, say)
    try:
        found = _opened(library)
    except OSError:  # it is whole, but made for another C library, say
        os.close(library.file)
        library = _obtained(level, say, anew=True)
        try:
            found = _opened(library)
        except OSError:
            os.close(library.file)
            raise
    hold(library.file)  # for as long as this process lives, so that it is not cleared away as unused
    for path in (library.path, library.path.with_suffix(".json")):
        with suppress(OSError):
            os.utime(path)  # used now
    clear_unused(library.path.parent)
    return found


def _opened(library: _Library) -> ctypes.CDLL:
    """By way of the open file, where there is one: what was looked at is what is loaded."""
    same = Path(f"/proc/self/fd/{library.file}")
    return ctypes.CDLL(str(same if same.exists() else library.path))


def _obtained(level: str, say: Tell, *, anew: bool = False) -> _Library:
    if missing := [flag for flag in _NEEDED.get(level, ()) if not _has(flag)]:
        raise OSError(f"this processor has no {', '.join(missing)}")
    sources = _sources()
    name = _name(level, sources)
    if not anew:
        for folder in guarded_folders("kernels", elsewhere=True):
            if (found := _kept(folder / name)) is not None:
                return found
    problems: list[str] = []
    full: set[int] = set()  # disks
    for folder in guarded_folders("kernels", make=True, elsewhere=True):
        path, disk = folder / name, folder.stat().st_dev
        if disk in full:
            continue
        sweep(folder, before=r"\.\w+-[0-9a-f]{20}\.so-\d+")
        try:
            with locked(path, lambda: say("waiting for another process that compiles the CPU kernels")):
                found = None if anew else _kept(path)
                if found is None:
                    say("compiling the CPU kernels (once, some seconds)")
                    _compile(level, sources, path)
                    found = _kept(path)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            problems.append(f"{folder} cannot be written ({os.strerror(error.errno)})")
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                full.add(disk)
            continue
        if found is not None:
            return found
        problems.append(f"{path} is not what was written")
    raise OSError("; ".join(problems) or f"there is no place to keep them ({cache_folder()} cannot be written)")


def _kept(path: Path) -> _Library | None:
    """The library in a file, if it is there, whole, and nobody else's."""
    try:
        note = json.loads(read_guarded(path.with_suffix(".json")))
        file = open_guarded(path)
    except (OSError, ValueError):
        return None
    with open(file, "rb", closefd=False) as content:
        whole = isinstance(note, dict) and note.get("sha256") == hashlib.sha256(content.read()).hexdigest()
    if not whole:
        os.close(file)
        return None
    return _Library(path, file)


def _sources() -> dict[str, bytes]:
    """Every source by its name, read once: what is compiled is what the library is named by."""
    return {path.name: path.read_bytes() for path in sorted(SOURCES.iterdir()) if path.suffix in (".cpp", ".h")}


def _name(level: str, sources: dict[str, bytes]) -> str:
    known = hashlib.sha256()
    for name, content in sources.items():
        known.update(name.encode() + b"\0" + content + b"\0")
    # The C library by its name only: one that is made for an older version runs with a newer one.
    processor = _processor() if level == "native" else ""
    machine = (sys.platform, platform.machine(), platform.libc_ver()[0], str(sys.maxsize))
    for part in (*OPTIONS, *ISAS[level], processor, *machine):
        known.update(part.encode() + b"\0")
    return f"{level}-{known.hexdigest()[:20]}.so"


@cache
def _processor() -> str:
    """What the processor can do, as far as the system says."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return f"{platform.machine()} {platform.processor()}"


def _has(flag: str) -> bool:
    """Can the processor do that? Yes where the system does not say."""
    name, _, flags = _processor().partition(":")
    return not name.startswith("flags") or flag in flags.split()


# -- compiling ------------------------------------------------------------------------------------------------------


def _compiler() -> list[str] | None:
    """The command that compiles C++ here, without options."""
    if chosen := os.environ.get("CXX"):
        return shlex.split(chosen)
    if found := next(filter(None, map(shutil.which, COMPILERS)), None):
        return [found]
    return [sys.executable, "-m", "ziglang", "c++"] if find_spec("ziglang") is not None else None


def _compile(level: str, sources: dict[str, bytes], path: Path) -> None:
    """Compile the sources, and write the library and the note about it. Raises OSError with the reason."""
    compiler = _compiler()
    if compiler is None:
        raise OSError(
            f"no C++ compiler found ({', '.join(COMPILERS)}); pip install 'headstart[compiler]' brings one (ziglang)"
        )
    work = temporary(path)
    work.mkdir()
    try:
        for name, content in sources.items():
            (work / name).write_bytes(content)
        units = [str(work / name) for name in sources if name.endswith(".cpp")]
        made = work / "kernels.so"
        _run([*compiler, *OPTIONS, *ISAS[level], *units, "-o", str(made)], work)
        content = made.read_bytes()
        note = {"sha256": hashlib.sha256(content).hexdigest(), "compiler": compiler, "version": _version(compiler)}
        # The note first: a library without its own is not used.
        write_whole(path.with_suffix(".json"), json.dumps(note) + "\n", guarded=True)
        with replacing(path, guarded=True) as to:
            to.write_bytes(content)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _run(command: list[str], work: Path) -> None:
    """Run the compiler, which puts its own temporary files into ``work``; again if it was killed or did not start."""
    around = os.environ | {"TMPDIR": str(work), "LC_ALL": "C"}  # what it says is read below
    for pause in (*PAUSES, None):
        try:
            done = subprocess.run(command, capture_output=True, timeout=PATIENCE, env=around)
        except subprocess.TimeoutExpired as error:
            raise OSError(f"{command[0]} took more than {PATIENCE} s") from error
        except OSError as error:
            if error.errno in _PASSING and pause is not None:
                time.sleep(pause)
                continue
            raise OSError(f"{command[0]} cannot be run: {error.strerror}") from error
        if done.returncode == 0:
            return
        said = done.stderr.decode(errors="replace").strip()
        if any(words in said for words in _FULL_WORDS) or shutil.disk_usage(work).free < _LEAST_ROOM:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(work))
        killed = done.returncode < 0 or any(words in said for words in _PASSING_WORDS)
        if not killed or pause is None:
            lines = said.splitlines() or [f"it was ended by signal {-done.returncode}" if killed else "no message"]
            raise OSError(f"{command[0]} failed: {lines[0][:300]}")
        time.sleep(pause)


def _version(compiler: list[str]) -> str:
    """For the note; that it cannot be asked is no reason to do without the library."""
    try:
        done = subprocess.run([*compiler, "--version"], capture_output=True, timeout=PATIENCE)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode(errors="replace").partition("\n")[0]
