"""Lines that a person types, with arrow keys and history; or lines from a pipe.

Knows: terminals, the readline library where there is one, and the history's file. Does not know: what is said.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ..errors import InvalidParameter
from ..machine.cache import cache_folder, write_whole
from .exits import sentence

__all__ = ["History", "Lines"]

_MOST = 1000  # entries of the history that are kept
_QUOTES = '"""'
_PROMPT, _MORE = "you> ", " ... "


class Lines:
    """Reads messages: a line, or several that belong together."""

    def __init__(self, tell: Callable[[str], None], *, colour: bool = False) -> None:
        """``tell`` takes a note for the person."""
        self.typed = sys.stdin.isatty()  # else: a pipe or a file, and nobody to prompt
        self._edited = self.typed and sys.stdout.isatty()
        self._colour = colour
        self._history = History(tell) if self._edited else None

    def message(self) -> str:
        """The next message. Raises EOFError at the end, KeyboardInterrupt at Ctrl-C."""
        line = self._line(_PROMPT)
        if line.strip().startswith(_QUOTES):
            return self._quoted(line.strip().removeprefix(_QUOTES))
        parts = [line]
        while parts[-1].endswith("\\"):
            parts[-1] = parts[-1][:-1]
            try:
                parts.append(self._line(_MORE))
            except EOFError:
                break
        return "\n".join(parts)

    def leave(self) -> None:
        """The line was not finished: what comes next begins on a new one."""
        if self.typed:
            print(file=sys.stdout if self._edited else sys.stderr, flush=True)

    def _quoted(self, first: str) -> str:
        """Lines up to the one that ends in quotes."""
        parts = [first]
        while not parts[-1].rstrip().endswith(_QUOTES):
            try:
                parts.append(self._line(_MORE))
            except EOFError:
                return "\n".join(parts).strip("\n")
        parts[-1] = parts[-1].rstrip().removesuffix(_QUOTES)
        return "\n".join(parts).strip("\n")

    def _line(self, prompt: str) -> str:
        if self._history is None:
            if self.typed:  # standard output goes elsewhere
                print(prompt, end="", file=sys.stderr, flush=True)
            return _from_pipe()
        # readline must know which characters take no room, or it counts the columns wrong.
        line = input(f"\001\x1b[1m\002{prompt}\001\x1b[0m\002" if self._colour else prompt)
        self._history.add(line)
        return line.encode(errors="surrogateescape").decode(errors="replace")  # a key that sent no character


class History:
    """What was typed before, for the arrow keys, in this session and the next. Kept private: it is what was said."""

    def __init__(self, tell: Callable[[str], None], path: Path | None = None) -> None:
        self._tell = tell
        self._path: Path | None = path if path is not None else cache_folder() / "chat_history"
        try:
            import readline  # not on every system; where it is, input() uses it from now on
        except ImportError:
            return
        for line in _kept(self._path):
            readline.add_history(line)  # type: ignore[attr-defined, unused-ignore]  # not among Windows' own modules

    def add(self, line: str) -> None:
        """Keep one more line, at once: a window that is closed loses none."""
        if not line.strip() or self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                os.write(file, (json.dumps(line) + "\n").encode())
            finally:
                os.close(file)
        except OSError as error:
            self._tell(f"what you type is not kept for next time: {sentence(error)}")
            self._path = None


def _kept(path: Path) -> list[str]:
    """The last lines of a history, which is cut where it has grown too long."""
    try:
        entries = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    if len(entries) > 2 * _MOST:
        with suppress(OSError):
            write_whole(path, "\n".join(entries[-_MOST:]) + "\n")
            path.chmod(0o600)
    found = []
    for entry in entries[-_MOST:]:
        with suppress(ValueError):
            line = json.loads(entry)
            if isinstance(line, str):
                found.append(line)
    return found


def _from_pipe() -> str:
    line = sys.stdin.buffer.readline()
    if not line:
        raise EOFError
    try:
        return line.decode().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError:
        raise InvalidParameter("standard input", "is not valid UTF-8") from None
