"""The files of a batch: what is asked, line by line, and what was answered, so that a job that was stopped goes on.

Knows: which line of the output answers which line of the input, and that nothing may be half-written. Does not know:
what the lines ask, or models; it needs nothing that takes long to import.

A record's id is made of the model and of its line in the input. So the output itself says what is done, and what in it
belongs to another input or model.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ..errors import HeadstartError, InvalidParameter
from ..machine.files import claim

__all__ = ["Line", "Questions", "Records", "check_apart", "fingerprint"]

_OPENING = b'{"id":"batch_req_'
_PROBE = 65536  # bytes at the beginning and the end of a model's files that tell it from others


@dataclass(frozen=True)
class Line:
    """A line of the input."""

    number: int  # from 1
    start: int  # bytes before it
    length: int
    id: str  # of the record that answers it


def fingerprint(model: str | None, *settings: str | None) -> str:
    """What tells a model from others, wherever its files lie; by its name alone, if it is none of this disk's."""
    digest = hashlib.sha256(json.dumps(settings).encode())
    path = Path(model) if model is not None else None
    if path is None or not path.exists():
        digest.update(f"name {model}".encode())
        return digest.hexdigest()
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        if not file.is_file():
            continue
        with open(file, "rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            digest.update(f"{file.name} {size}".encode() + opened.read(_PROBE))
            opened.seek(max(0, size - _PROBE))
            digest.update(opened.read(_PROBE))
    return digest.hexdigest()


def check_apart(asked: str, answered: str) -> None:
    """Refuse to write the answers over the questions."""
    if "-" not in (asked, answered) and os.path.exists(answered) and os.path.samefile(asked, answered):
        raise InvalidParameter("output", f"is the file that is read: {answered}")


class Questions:
    """The input. ``path``: "-" is standard input."""

    def __init__(self, path: str, fingerprint: str) -> None:
        self.name = "standard input" if path == "-" else path
        self._fingerprint = fingerprint
        self._file: IO[bytes] = _spooled(sys.stdin.buffer) if path == "-" else _opened(path)
        try:
            self.lines = list(self._scan())
            if not self.lines:
                raise InvalidParameter("input", f"holds nothing: {self.name} is empty")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._file.close()

    def read(self, line: Line) -> tuple[int, bytes]:
        """Its number, and what it says. Raises if that is no longer what it said: its answer would belong to nobody."""
        self._file.seek(line.start)
        content = self._file.read(line.length)
        if self._id(line.number, content) != line.id:
            raise HeadstartError(f"line {line.number} of {self.name} was changed while the job ran")
        return line.number, content

    def _id(self, number: int, content: bytes) -> str:
        key = f"{self._fingerprint} {number} ".encode() + content
        return f"batch_req_{hashlib.sha256(key).hexdigest()[:32]}"

    def _scan(self) -> Iterator[Line]:
        """The lines that are not empty. Two that have one name are refused before anything is computed."""
        named: dict[str, int] = {}
        start = 0
        for number, text in enumerate(self._file, start=1):
            content = text.removeprefix(b"\xef\xbb\xbf").strip() if number == 1 else text.strip()
            if content:
                name = _custom_id(content)
                if name is not None and (other := named.setdefault(name, number)) != number:
                    raise InvalidParameter("input", f"has the custom_id {name!r} twice, in lines {other} and {number}")
                yield Line(number, start + text.index(content), len(content), self._id(number, content))
            start += len(text)


class Records:
    """The output. ``path``: "-" is standard output, which cannot be gone on with. ``retry``: what failed is taken out
    of it, to be tried again."""

    def __init__(self, path: str, lines: list[Line], *, retry: bool = False) -> None:
        self.done: set[str] = set()  # ids
        self.failed = 0  # of these
        self._retry = retry
        self._path, self._file = path, sys.stdout.fileno() if path == "-" else _writable(path)
        self._claimed = [self._file]
        self._end: int | None = None  # bytes that are whole; None: it cannot be taken back
        if not stat.S_ISREG(os.fstat(self._file).st_mode) or path == "-":
            return
        try:
            with open(path, "rb") as file:
                self._end, out = self._taken(file, {line.id for line in lines})
                if out:
                    self._file, self._end = self._without(file, out)
            os.truncate(path, self._end)
        except BaseException:
            self._release()
            raise

    def add(self, line: Line, record: dict[str, Any]) -> None:
        """Write a record, whole or not at all."""
        text = json.dumps({"id": line.id} | record, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
        try:
            rest = memoryview(text)
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except BaseException:
            if self._end is not None:
                with suppress(OSError):
                    os.truncate(self._path, self._end)
            raise
        self._count(line.id, record)
        if self._end is not None:
            self._end += len(text)

    def close(self) -> None:
        if self._path != "-":
            with suppress(OSError):  # some disks cannot
                os.fsync(self._file)
            self._release()

    def _release(self) -> None:
        for each in self._claimed:
            os.close(each)

    def _without(self, file: IO[bytes], out: set[int]) -> tuple[int, int]:
        """The same file without these lines, claimed and open, and its length. Whoever kills this on the way finds the
        one that was there. The old one stays claimed: another process may have opened it, and not looked yet."""
        path = os.path.realpath(self._path)
        other = f"{path}.retry"
        with suppress(FileNotFoundError):
            os.unlink(other)  # of a process that was killed here
        new = _writable(other)
        self._claimed.append(new)
        file.seek(0)
        with open(new, "ab", closefd=False) as copy:
            for number, text in enumerate(file, start=1):
                if number not in out and text.endswith(b"\n"):
                    copy.write(text)
        with suppress(OSError):
            os.fsync(new)
        os.chmod(other, stat.S_IMODE(os.fstat(self._file).st_mode))
        os.replace(other, path)
        return new, os.fstat(new).st_size

    def _taken(self, file: IO[bytes], known: set[str]) -> tuple[int, set[int]]:
        """Take what is there as done. How many bytes of it are whole, and which lines are to be tried again."""
        end, out = 0, set[int]()
        for number, text in enumerate(file, start=1):
            if not text.endswith(b"\n") and text[: len(_OPENING)] == _OPENING[: len(text)]:
                break  # a record that was cut off when its process was killed
            end += len(text)
            try:
                record = json.loads(text)
                name, again = record["id"], record["id"] in self.done
                if self._retry and _failed(record):  # also where its line was mended since, and has another id
                    out.add(number)
                    continue
                self._count(name, record)
            except (ValueError, KeyError, TypeError, RecursionError):
                where = f"line {number} of {self._path} is no record of a batch"
                raise InvalidParameter("output", f"holds something else: {where}; choose another file") from None
            if name not in known or again:
                where = f"custom_id {record.get('custom_id')!r:.100}, line {number} of {self._path}"
                raise InvalidParameter(
                    "output",
                    f"holds answers to another input, or of another model ({where}): choose another file, or delete it",
                )
        return end, out

    def _count(self, name: str, record: dict[str, Any]) -> None:
        self.failed += _failed(record)
        self.done.add(name)


def _failed(record: dict[str, Any]) -> bool:
    response = record["response"]
    return response is None or response["status_code"] != 200


def _custom_id(line: bytes) -> str | None:
    """None: it has none that could be doubled; what is wrong with it is said in its record."""
    try:
        name = json.loads(line)["custom_id"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return name if isinstance(name, str) else None


def _opened(path: str) -> IO[bytes]:
    try:
        file = open(path, "rb")  # noqa: SIM115  # as long as the job
    except OSError as error:
        raise InvalidParameter("input", f"cannot be read: {error.strerror} ({path})") from None
    if file.seekable():
        return file
    with file:  # a pipe: <(head -5 all.jsonl), or /dev/stdin
        return _spooled(file)


def _spooled(file: IO[bytes]) -> IO[bytes]:
    """What can be read only once, to be read more than once."""
    kept = tempfile.TemporaryFile()  # noqa: SIM115  # as long as the job
    while piece := file.read(1 << 20):
        kept.write(piece)
    kept.seek(0)
    return kept


def _writable(path: str) -> int:
    try:
        file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND | getattr(os, "O_BINARY", 0), 0o666)
    except OSError as error:
        raise InvalidParameter("output", f"cannot be written: {error.strerror} ({path})") from None
    if not claim(file):
        os.close(file)
        raise HeadstartError(f"another process writes to {path}: wait for it, or choose another file")
    return file
