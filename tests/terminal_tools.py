"""A real terminal for tests of the command line: a process on a pseudo-terminal, with keys and a size."""

from __future__ import annotations

import fcntl
import os
import re
import select
import struct
import subprocess
import sys
import termios
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

SOURCES = Path(__file__).parents[1] / "src"
CTRL_C, CTRL_D, UP = "\x03", "\x04", "\x1b[A"
# A session leader that opens a terminal gets it as its own, so that Ctrl-C reaches it as a signal. What started the
# tests may ignore that signal (a shell does so in the background), and that would be inherited.
_ATTACH = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.close(os.open(os.ttyname(0), os.O_RDWR))
os.execv(sys.argv[1], sys.argv[1:])
"""


def environment(**more: str) -> dict[str, str]:
    """For a process of its own that runs these sources."""
    kept = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR")}
    return kept | {"PYTHONPATH": str(SOURCES), "TERM": "xterm", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | more


class Terminal:
    """``headstart ARGUMENTS`` on a terminal of its own."""

    def __init__(self, *arguments: str, columns: int = 80, **variables: str) -> None:
        self._end, vocab_ops = os.openpty()
        fcntl.ioctl(vocab_ops, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        command = [sys.executable, "-c", _ATTACH, sys.executable, "-m", "headstart", *arguments]
        self.process = subprocess.Popen(
            command,
            stdin=vocab_ops,
            stdout=vocab_ops,
            stderr=vocab_ops,
            start_new_session=True,
            env=environment(**variables),
        )
        os.close(vocab_ops)
        self.shown = ""  # everything so far
        self._seen = 0  # what was waited for already

    def send(self, keys: str) -> None:
        os.write(self._end, keys.encode())

    def wait_for(self, pattern: str, seconds: float = 120) -> str:
        """Until this (a regular expression) is shown behind what was waited for before. Returns what came till then."""
        limit = time.monotonic() + seconds
        while (found := re.compile(pattern).search(self.shown, self._seen)) is None:
            left = limit - time.monotonic()
            if left <= 0 or not self._read(left):
                raise AssertionError(f"{pattern!r} was not shown; the screen: {self.shown[-2000:]!r}")
        before, self._seen = self.shown[self._seen : found.end()], found.end()
        return before

    def interrupt(self, pattern: str) -> str:
        """Ctrl-C, until this is shown: Python loses one that comes after a key and before it waits for the next."""
        for _ in range(10):
            self.send(CTRL_C)
            try:
                return self.wait_for(pattern, seconds=3)
            except AssertionError:
                continue
        raise AssertionError(f"{pattern!r} was not shown; the screen: {self.shown[-2000:]!r}")

    def end(self, keys: str = "", seconds: float = 60) -> int:
        """The exit status. ``keys`` are pressed until it ends; see ``interrupt`` for why once may not be enough."""
        limit = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < limit:
            with suppress(OSError):  # it may be gone by now
                self.send(keys)
            while self._read(3):
                pass
        while self._read(0):
            pass
        return self.process.wait(1)

    def _read(self, seconds: float) -> bool:
        """Take in what is there. False: nothing came in time, or the process is gone."""
        if not select.select([self._end], [], [], seconds)[0]:
            return False
        try:
            content = os.read(self._end, 65536)
        except OSError:
            return False
        self.shown += content.decode(errors="replace")
        return bool(content)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._end)
