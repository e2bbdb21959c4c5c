"""Files and folders that appear whole or not at all, made by one worker at a time, and who can have written them.

Knows: temporary names, locks, modes, owners. Does not know: what is in the files.

A temporary name belongs to one thread of one process of one machine or container, so nobody takes another's file away.
A lock lets one of many do the work while the others wait. Where there are no locks (Windows, some network disks),
everyone does the work for himself, and the last one's result stays: it is never mixed.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import ModuleType

try:
    import fcntl as _fcntl
except ImportError:  # Windows
    _fcntl = None  # type: ignore[assignment]

__all__ = [
    "claim",
    "hold",
    "in_use",
    "locked",
    "make_readable",
    "new_folder",
    "open_guarded",
    "read_guarded",
    "replacing",
    "sweep",
    "temporary",
    "why_distrusted",
    "write_whole",
]

DAY = 86400.0
PATIENCE = 1800.0  # seconds to wait for another's work; then it is done here as well
_BETWEEN = 0.05  # seconds between two looks at a lock

_TEMPORARY = re.compile(r"\..+-(?P<where>[0-9a-f]{8})-(?P<process>\d+)-[0-9a-f]{12}")
_FCNTL: ModuleType | None = _fcntl
_NO_LINK: int = getattr(os, "O_NOFOLLOW", 0)
_CLOSED: int = getattr(os, "O_CLOEXEC", 0)


# -- whole or not at all --------------------------------------------------------------------------------------------


@cache
def _where() -> str:
    """A word for the machine since its start, or the container: process numbers mean something only there."""
    parts = [platform.node()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8"))
    with suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return hashlib.sha256("".join(parts).encode()).hexdigest()[:8]


def temporary(path: Path) -> Path:
    """A name beside ``path`` that nobody else uses."""
    return path.with_name(f".{path.name}-{_where()}-{os.getpid()}-{secrets.token_hex(6)}")


@contextmanager
def replacing(path: Path, *, guarded: bool = False) -> Iterator[Path]:
    """A file to write, which then takes ``path``'s place in one step; it goes if the writing fails.

    Its mode is that of any new file there, whoever writes it (safetensors makes files for their owner alone).
    ``guarded``: others cannot write it, whatever the umask says, so that ``open_guarded`` opens it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    work = temporary(path)
    mode = _touch(work) & (~0o022 if guarded else ~0)
    try:
        yield work
        work.chmod(mode)
        work.replace(path)
    finally:
        with suppress(OSError):
            work.unlink(missing_ok=True)


def write_whole(path: Path, content: bytes | str, *, guarded: bool = False) -> None:
    """Write a file in one step: another process sees it whole or not at all."""
    with replacing(path, guarded=guarded) as work:
        work.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill, which then appears as ``folder`` in one step. One that is there already stays, this goes."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = temporary(folder)
    work.mkdir()
    try:
        yield work
        try:
            work.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def make_readable(folder: Path, *, guarded: bool = False) -> None:
    """Give the files in a folder the mode of any new file there; see ``replacing``."""
    probe = temporary(folder / "mode")
    mode = _touch(probe) & (~0o022 if guarded else ~0)
    probe.unlink()
    for file in folder.iterdir():
        if file.is_file() and not file.is_symlink():
            file.chmod(mode)


def _touch(path: Path) -> int:
    """Make a file as ``open`` does, and say which mode it got: asking for the umask would change it meanwhile."""
    file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | _CLOSED, 0o666)
    try:
        return stat.S_IMODE(os.fstat(file).st_mode)
    finally:
        os.close(file)


def sweep(folder: Path, before: str = "") -> None:
    """Clear away what killed processes left half-done: at once if the process is known to be gone, else after a day.

    The folder may be the user's: nothing is touched but ``temporary`` names, and those of earlier versions if
    ``before``, a regular expression, says what they were.
    """
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):
                if not _left_over(entry, before):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path, ignore_errors=True)
                else:
                    os.unlink(entry.path)


def _left_over(entry: os.DirEntry[str], before: str) -> bool:
    ours = _TEMPORARY.fullmatch(entry.name)
    if ours is None and not re.fullmatch(before, entry.name):
        return False
    if ours is not None and ours["where"] == _where() and not _lives(int(ours["process"])):
        return True
    return time.time() - entry.stat(follow_symlinks=False).st_mtime > DAY


def _lives(process: int) -> bool:
    if os.name != "posix":
        return True  # asking would end it
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


# -- one at a time --------------------------------------------------------------------------------------------------


@contextmanager
def locked(path: Path, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """One at a time, of all threads and processes that make ``path``. ``waiting`` is told if somebody else is at it.

    The lock is the operating system's: it ends with its process. Its file goes when the work is done.
    """
    lock = path.with_name(f".{path.name}.lock")
    file = _taken(lock, waiting)
    try:
        yield
    finally:
        if file is not None:
            with suppress(OSError):  # first the name, so that nobody new waits for what is about to go
                lock.unlink()
            assert _FCNTL is not None
            _FCNTL.flock(file, _FCNTL.LOCK_UN)  # said, because a forked child may have the file open, too
            os.close(file)


def _taken(lock: Path, waiting: Callable[[], None]) -> int | None:
    """The lock's file, locked; None if it cannot be had."""
    if _FCNTL is None:
        return None
    until, told = time.monotonic() + PATIENCE, False
    while True:
        file = _opened(lock)
        if file is None:
            return None
        try:
            while (got := _try(file, _FCNTL.LOCK_EX)) is False and time.monotonic() < until:
                if not told:
                    waiting()
                    told = True
                time.sleep(_BETWEEN)
            if got and _still(lock, file):
                return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)
        if not got:
            return None


def _opened(lock: Path) -> int | None:
    for how in (os.O_RDWR | os.O_CREAT, os.O_RDONLY):  # another user's may be locked, if not written
        with suppress(OSError):
            lock.parent.mkdir(parents=True, exist_ok=True)
            return os.open(lock, how | _NO_LINK | _CLOSED, 0o666)
    return None


def _try(file: int, how: int) -> bool | None:
    """None: this disk has no locks."""
    assert _FCNTL is not None
    try:
        _FCNTL.flock(file, how | _FCNTL.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _still(lock: Path, file: int) -> bool:
    """Does the name still stand for this file? Whoever had the lock before took it away."""
    try:
        there, here = os.stat(lock), os.fstat(file)
    except OSError:
        return False
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)


def claim(file: int) -> bool:
    """Take an open file for this process alone, until it is closed; False: another has it. Waits for nothing."""
    return _FCNTL is None or _try(file, _FCNTL.LOCK_EX) is not False


def hold(file: int) -> None:
    """Say that an open file is used, until it is closed."""
    if _FCNTL is not None:
        _try(file, _FCNTL.LOCK_SH)


def in_use(path: Path) -> bool:
    """Does somebody ``hold`` the file, or its lock?"""
    if _FCNTL is None:
        return False
    try:
        file = os.open(path, os.O_RDONLY | _NO_LINK | _CLOSED)
    except OSError:
        return False
    try:
        return _try(file, _FCNTL.LOCK_EX) is False
    finally:
        os.close(file)


# -- who can have written it ----------------------------------------------------------------------------------------


def why_distrusted(path: Path) -> str | None:
    """None if nobody but this user and root can have put a file or folder there; else the reason, in words."""
    about = path.lstat()
    if stat.S_ISLNK(about.st_mode):
        return _against(about, path, link=True) or _against(path.stat(), path)
    return _against(about, path)


def _against(about: os.stat_result, path: Path, *, link: bool = False) -> str | None:
    if not hasattr(os, "geteuid"):  # Windows: its users' folders are their own
        return None
    if about.st_uid not in (os.geteuid(), 0):
        return f"{path} belongs to another user (uid {about.st_uid})"
    if about.st_mode & 0o022 and not link:
        return f"{path} can be written by other users"
    return None


def open_guarded(path: Path) -> int:
    """Open a file that nobody but this user and root can have written. PermissionError says why it is not such a one.

    What was looked at is what was opened: a file that takes its place afterwards is another one.
    """
    reason = why_distrusted(path.parent)
    if reason is None and path.is_symlink():
        reason = f"{path} is a symbolic link"
    if reason is not None:
        raise PermissionError(reason)
    file = os.open(path, os.O_RDONLY | _NO_LINK | _CLOSED)
    reason = _against(os.fstat(file), path)
    if reason is not None:
        os.close(file)
        raise PermissionError(reason)
    return file


def read_guarded(path: Path) -> bytes:
    """What is in a file that ``open_guarded`` opens."""
    with open(open_guarded(path), "rb") as file:
        return file.read()
