"""Ctrl-C in the seconds before there is anything to save.

Knows: signals. Does not know: anything else; it imports next to nothing, so that it is there from the first moment.
"""

from __future__ import annotations

import os
import signal

__all__ = ["STOPPED", "StopAtOnce"]

STOPPED = 130  # as shells count it: 128 + SIGINT


class StopAtOnce:
    """While modules are imported: Ctrl-C ends the process with one line.

    Importing takes seconds, has nothing to clean up, and some packages catch any exception on their way; so this
    raises none. Where Ctrl-C means something else already, or in another thread, that stays.
    """

    def __enter__(self) -> None:
        self._before = signal.getsignal(signal.SIGINT)
        self._ours = self._before is signal.default_int_handler
        try:
            if self._ours:
                signal.signal(signal.SIGINT, _stop)
        except ValueError:  # not the main thread
            self._ours = False

    def __exit__(self, *_: object) -> None:
        if self._ours:
            signal.signal(signal.SIGINT, self._before)


def _stop(number: int, frame: object) -> None:
    clear = b"\r\x1b[2K\x1b[?25h" if os.isatty(2) else b""  # a progress line may stand there, with the cursor hidden
    try:
        os.write(2, clear + b"stopped\n")
    finally:
        os._exit(STOPPED)
