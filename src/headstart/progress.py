"""What a start-up is doing, for whoever waits: one line that disappears on a terminal, plain lines anywhere else.

Knows: how to write on standard error. Does not know: what is done.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Condition, Thread
from time import monotonic

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from .types import Tell, silent

__all__ = ["Tell", "silent", "telling"]

PATIENCE = 2.0  # seconds that one thing may take before a line tells of it
INTERVAL = 10.0  # seconds between lines while many short things follow each other


@contextmanager
def telling(progress: Tell | None) -> Iterator[Tell]:
    """Whom to tell: ``progress`` itself; without it one line on a terminal, or plain lines where there is none."""
    if progress is not None:
        yield progress
        return
    console = Console(stderr=True)
    if not console.is_terminal:
        lines = _Lines()
        try:
            yield lines.tell
        finally:
            lines.close()
        return
    spinner = Spinner("dots", style="status.spinner")
    # What others print goes where it would go without this.
    line = Live(
        spinner, console=console, refresh_per_second=12.5, transient=True, redirect_stdout=False, redirect_stderr=False
    )

    def tell(text: str) -> None:
        if text:
            spinner.update(text=Text(text))
            line.start()
        else:
            line.stop()

    try:
        yield tell
    finally:
        line.stop()


class _Lines:
    """Tells what lasts: a line for what takes longer than ``PATIENCE``, and one each ``INTERVAL`` among short things.

    A quick start-up says nothing. A thread of its own watches the clock, because what is told of does not.
    """

    def __init__(self) -> None:
        self._changed = Condition()
        self._text = ""  # what is under way and was not told yet
        self._last = ""  # what was told last
        self._since = self._told = monotonic()
        self._closed = False
        self._thread: Thread | None = None
        self._stream = sys.stderr  # as it is now: what reads a GGUF file redirects it for a while

    def tell(self, text: str) -> None:
        with self._changed:
            self._text, self._since = "" if text == self._last else text, monotonic()
            if self._thread is None and text:
                self._thread = Thread(target=self._watch, name="headstart-progress", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        with self._changed:
            while not self._closed:
                wait = min(self._since + PATIENCE, self._told + INTERVAL) - monotonic() if self._text else None
                if wait is not None and wait <= 0:
                    with suppress(OSError, ValueError):  # nobody reads it
                        print(f"headstart: {self._text} ...", file=self._stream, flush=True)
                    self._last, self._text, self._told = self._text, "", monotonic()
                else:
                    self._changed.wait(wait)
