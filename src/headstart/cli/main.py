"""The ``headstart`` command: puts the commands together.

Knows: which commands there are. Does not know: what any of them does.
"""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from .advise import advise
from .batch import batch
from .bench import bench
from .certify import certify
from .chat import chat
from .commands import Command, Commands
from .demo import demo
from .distill import distill
from .doctor import doctor
from .environment import PREFIX, unknown
from .generate import generate
from .options import Verbose, spread
from .profile import profile
from .screen import note, show_log
from .serve import serve
from .whatif import whatif

__all__ = ["app", "command"]

app = typer.Typer(
    name="headstart",
    cls=Commands,
    help="Lossless speculative decoding: the same text as plain decoding, faster.",
    epilog="'headstart COMMAND --help' lists a command's options.",
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for function in (generate, chat, serve, batch, demo, distill, bench, certify, doctor, profile, advise, whatif):
    app.command(cls=Command)(spread(function, env=PREFIX if function is serve else ""))


def command() -> Any:
    """What ``app()`` makes first, and then runs."""
    return typer.main.get_command(app)


def _version(value: bool) -> None:
    if value:
        from .. import __version__

        print(f"headstart {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
    verbose: Verbose = False,
) -> None:
    show_log(verbose=verbose)
    if told := unknown(os.environ, _variables(context)):
        note(f"warning: {told}")
    if context.invoked_subcommand is None:
        print(context.get_help())


def _variables(context: typer.Context) -> list[str]:
    """The environment variables of options."""
    commands: Any = context.command
    return [param.envvar for each in commands.commands.values() for param in each.params if param.envvar]
