"""How a command ends: exit codes, and errors as one line.

Knows: what goes wrong outside a command's own work (Ctrl-C, a closed pipe, a full disk). Does not know: any command.
Imports nothing that takes time, so that Ctrl-C is looked after from the first moment.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from ..errors import HeadstartError

__all__ = ["FAILED", "PIPE_CLOSED", "STOPPED", "complain", "one_line_errors", "sentence", "stop_at_once"]

log = logging.getLogger(__name__)

FAILED = 2  # the command could not be done; standard error says why in one line
STOPPED = 130  # Ctrl-C, as shells count it: 128 + SIGINT
PIPE_CLOSED = 141  # nobody reads the output any more: 128 + SIGPIPE

_NO_MEMORY = ("can't allocate memory", "out of memory")  # torch's words on a CPU and on a GPU
_NO_SPACE = ("No space left on device", "Disk quota exceeded")


@contextmanager
def stop_at_once() -> Iterator[None]:
    """While modules are imported: Ctrl-C ends the process with one line.

    Importing takes seconds, has nothing to clean up, and some packages catch any exception on their way; so this
    raises none.
    """
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _stop(number: int, frame: FrameType | None) -> None:
    clear = "\r\x1b[2K\x1b[?25h" if os.isatty(2) else ""  # a progress line may stand there, with the cursor hidden
    with suppress(OSError):
        os.write(2, f"{clear}stopped\n".encode())
    os._exit(STOPPED)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """What people can mend, and Ctrl-C, become one line and an exit code. Anything else is a bug and shows itself."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        _give_up_output()
        sys.exit(PIPE_CLOSED)
    except Exception as error:
        told = sentence(error)
        if told is None:
            raise
        complain(told)
        log.info("where it came from:", exc_info=True)
        sys.exit(FAILED)
    except KeyboardInterrupt:
        _say("stopped")
        sys.exit(STOPPED)


def sentence(error: Exception) -> str | None:
    """What happened in one line, where it is something that people can mend; None for what must be a bug."""
    if isinstance(error, HeadstartError):
        return " ".join(str(error).split())
    text = " ".join(str(error).split())
    if isinstance(error, MemoryError) or any(words in text for words in _NO_MEMORY):
        return "out of memory; a smaller --max-model-len, fewer --max-rows or --quantization int8 need less"
    if isinstance(error, OSError):
        where = f": {error.filename}" if error.filename is not None else ""
        return f"{error.strerror}{where}" if error.strerror else text or type(error).__name__
    # Libraries in other languages have error classes of their own for a disk that is full.
    return text if any(words in text for words in _NO_SPACE) else None


def complain(text: str) -> None:
    """One line that begins with "error:", behind what was written so far."""
    coloured = sys.stderr.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    _say(f"\x1b[1;31merror:\x1b[0m {text}" if coloured else f"error: {text}")


def _say(text: str) -> None:
    try:
        sys.stdout.flush()
    except OSError:
        _give_up_output()
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def _give_up_output() -> None:
    """What is still in the buffer goes nowhere; otherwise Python complains about it when it ends."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
