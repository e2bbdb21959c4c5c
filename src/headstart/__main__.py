"""The ``headstart`` script and ``python -m headstart``.

Knows: how to start the command line so that Ctrl-C never shows a traceback. Does not know: the commands.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import warnings

from .cli.stopping import StopAtOnce

__all__ = ["main"]


def main() -> None:
    with StopAtOnce():
        from .cli.main import command
        from .cli.screen import show_warning

        headstart = command()
    if not sys.warnoptions:
        warnings.showwarning = show_warning
    _open_what_is_closed()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a character that the terminal cannot show is no reason to stop
    try:
        headstart.main(prog_name="headstart")
    finally:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing is left to be saved while Python shuts down


def _open_what_is_closed() -> None:
    """A process may be started without standard input or output (``<&-``); reading then finds nothing."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  # for as long as the process lives


if __name__ == "__main__":
    main()
