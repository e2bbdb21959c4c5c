"""The ``headstart`` script and ``python -m headstart``.

Knows: how to start the command line so that Ctrl-C never shows a traceback. Does not know: the commands.
"""

from __future__ import annotations

import io
import signal
import sys
import warnings

from .cli.stopping import StopAtOnce

__all__ = ["main"]


def main() -> None:
    with StopAtOnce():
        from .cli.main import app
        from .cli.screen import show_warning
    if not sys.warnoptions:
        warnings.showwarning = show_warning
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a character that the terminal cannot show is no reason to stop
    try:
        app(prog_name="headstart")
    finally:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing is left to be saved while Python shuts down


if __name__ == "__main__":
    main()
