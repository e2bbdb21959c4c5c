"""What a start-up is doing, in one line that goes when it is done.

Knows: how to write on a terminal. Does not know: what is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from rich.console import Console
from rich.markup import escape

__all__ = ["Tell", "telling"]

Tell: TypeAlias = Callable[[str], None]


@contextmanager
def telling(progress: Tell | None) -> Iterator[Tell]:
    """Whom to tell: ``progress`` itself; without it a line on the terminal, or nobody where there is none."""
    console = Console(stderr=True)
    if progress is not None:
        yield progress
    elif not console.is_terminal:
        yield lambda text: None
    else:
        with console.status("starting") as status:
            yield lambda text: status.update(escape(text))
