"""How a command ends: exit codes, and errors as one line.

Knows: what goes wrong outside a command's own work (Ctrl-C, a closed pipe, a full disk). Does not know: any command.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ..errors import HeadstartError
from .stopping import STOPPED

__all__ = ["FAILED", "NOT_WELL", "PIPE_CLOSED", "complain", "one_line_errors", "sentence"]

log = logging.getLogger(__name__)

FAILED = 2  # the command could not be done; standard error says why in one line
NOT_WELL = 3  # done, but not all is well: a request failed, a certificate does not hold, a machine is not fit
PIPE_CLOSED = 141  # nobody reads the output any more: 128 + SIGPIPE

_NO_MEMORY = ("can't allocate memory", "out of memory")  # torch's words on a CPU and on a GPU
_WANTED = re.compile(r"[Tt]ried to allocate ([\d.]+ (?:bytes|[KMGT]iB))")
_NO_SPACE = ("No space left on device", "Disk quota exceeded")


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
        found = _WANTED.search(text)  # which weights the model has is not known here, so nothing is said of those
        wanted = f" ({found[1]} were wanted at once)" if found else ""
        return f"out of memory{wanted}; a smaller --max-model-len or fewer --max-rows need less"
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
