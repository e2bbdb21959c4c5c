"""The ``headstart`` script and ``python -m headstart``.

Knows: how to start the command line so that Ctrl-C never shows a traceback. Does not know: the commands.
"""

from __future__ import annotations

import signal
import sys
import warnings

from .cli.exits import stop_at_once

__all__ = ["main"]


def main() -> None:
    with stop_at_once():
        from .cli.main import app
        from .cli.screen import show_warning
    if not sys.warnoptions:
        warnings.showwarning = show_warning
    try:
        app(prog_name="headstart")
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing is left to be saved while Python shuts down


if __name__ == "__main__":
    main()
