"""The ``headstart`` command: puts the commands together and turns errors into one line.

Knows: which commands there are. Does not know: what any of them does.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import typer

from ..errors import HeadstartError
from .chat import chat
from .common import errors_console
from .demo import demo
from .distill import distill
from .generate import generate

__all__ = ["app"]


class _OneLineErrors(typer.core.TyperGroup):
    """Shows our own errors as one line, without a traceback. Anything else is a bug and shows itself."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except HeadstartError as error:
            errors_console().print(f"[bold red]error:[/] {_plain(error)}", highlight=False)
            sys.exit(2)
        except KeyboardInterrupt:
            errors_console().print("stopped")
            sys.exit(130)


def _plain(error: Exception) -> str:
    from rich.markup import escape

    return escape(str(error))


app = typer.Typer(
    name="headstart",
    cls=_OneLineErrors,
    help="Lossless speculative decoding: the same text as plain decoding, faster.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(generate)
app.command()(chat)
app.command()(demo)
app.command()(distill)


def _version(value: bool) -> None:
    if value:
        from .. import __version__

        print(f"headstart {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version."),
    verbose: bool = typer.Option(False, "--verbose", "-v", help="Show what is going on inside."),
) -> None:
    logging.getLogger("huggingface_hub").propagate = False  # it prints for itself
    logging.basicConfig(level=logging.INFO if verbose else logging.ERROR, format="%(name)s: %(message)s")
