"""What a start-up is at, in one line that goes when it is done.

Knows: how to write on a terminal. Does not know: what is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

__all__ = ["Tell", "silent", "telling"]

Tell: TypeAlias = Callable[[str], None]  # an empty text: nothing to tell, or what follows tells itself


def silent(text: str) -> None:
    pass


@contextmanager
def telling(progress: Tell | None) -> Iterator[Tell]:
    """Whom to tell: ``progress`` itself; without it a line on the terminal, or nobody where there is none."""
    console = Console(stderr=True)
    if progress is not None or not console.is_terminal:
        yield progress or silent
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
