"""How commands look from outside: help in plain text that fits any width, and usage errors as one line.

Knows: Typer's commands and their options. Does not know: what any of them does.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from .exits import FAILED, complain, one_line_errors
from .stopping import StopAtOnce

__all__ = ["Command", "Commands", "Entry", "sections"]

_WIDEST = 100
#: options of vLLM and llama.cpp, and what they are here
_CALLED = {
    "--max-num-seqs": "--max-rows",
    "--parallel": "--max-rows",
    "-np": "--max-rows",
    "--ctx-size": "--max-model-len",
    "-c": "--max-model-len",
    "--predict": "--max-tokens",
    "--n-predict": "--max-tokens",
    "--max-new-tokens": "--max-tokens",
    "--temp": "--temperature",
    "--repeat-penalty": "--repetition-penalty",
    "--draft-max": "--gamma",
    "--draft-n": "--gamma",
    "--num-speculative-tokens": "--gamma",
    "-s": "--seed",
    "-hf": "--model",
    "-ngl": "--device cpu or --device cuda",
    "--gpu-layers": "--device cpu or --device cuda",
    "--n-gpu-layers": "--device cpu or --device cuda",
    "--speculative-config": "--draft",
    "--speculative-model": "--draft",
    "--model-draft": "--draft",
    "-md": "--draft",
    "--alias": "--served-model-name",
    "--allowed-origins": "--allowed-origin",
    "--tool-call-parser": "--tool-format",
}
#: what pydantic says of a value, in our words
_KINDS = {"integer": "must be a whole number", "number": "must be a number", "boolean": "must be true or false"}
_UsageError: Any = typer.BadParameter.__mro__[1]  # click's, or the copy of click inside Typer


@dataclass(frozen=True)
class Entry:
    """One option or argument, for help and docs."""

    section: str
    names: str  # "-m, --model MODEL"
    help: str
    default: str  # "": none worth telling

    @property
    def text(self) -> str:
        return f"{self.help} [default:\xa0{self.default}]" if self.default else self.help


def sections(command: Any, context: Any) -> dict[str, list[Entry]]:
    """A command's arguments and options under their headings, --help and its like last."""
    found: dict[str, list[Entry]] = {}
    for entry in _entries(command, context):
        found.setdefault(entry.section, []).append(entry)
    return found | {"Options": found.pop("Options")}


def _entries(command: Any, context: Any) -> Iterator[Entry]:
    for param in command.get_params(context):
        if param.param_type_name == "argument":
            yield Entry("Arguments", param.metavar or param.name, param.help or "", "")
            continue
        names = ", ".join(sorted(dict.fromkeys(param.opts), key=len))
        if param.secondary_opts:
            names += " / " + ", ".join(param.secondary_opts)
        if not param.is_flag:
            names += f" {param.metavar}"
        value = "" if param.is_flag or param.default is None else param.default
        default = f"{value:g}" if isinstance(value, float) else str(value)
        text = param.help or ""
        if param.required:
            text += " Must be given."
        if param.envvar:
            text += f" [{param.envvar}]"
        yield Entry(getattr(param, "rich_help_panel", None) or "Options", names, text, default)


class Command(TyperCommand):
    """Options under headings, names and texts side by side where there is room."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Of llama.cpp's names with one dash, some would be taken for a letter and its value: "-md D" for "-m d"."""
        valued = {name for param in self.params if not getattr(param, "is_flag", False) for name in param.opts}
        for before, arg in zip(["", *args], args, strict=False):
            if arg == "--":
                break
            letter, value = arg[:2], arg[2:]
            joined = re.fullmatch("-[a-z]{2,}", arg) and letter in ctx.help_option_names + list(valued)
            if joined and before not in valued and not os.path.exists(value) and (here := _here(arg, self.params)):
                ctx.fail(f"No such option: {arg}: {here}")
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        for name, rows in sections(self, ctx).items():
            with formatter.section(name):
                _side_by_side(formatter, [(entry.names, entry.text) for entry in rows])


class Commands(TyperGroup):
    """The commands together. Errors that people can mend are one line, without a traceback."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            _side_by_side(formatter, [(name, _about(self.get_command(ctx, name))) for name in self.list_commands(ctx)])
        with formatter.section("Options"):
            _side_by_side(formatter, [(entry.names, entry.text) for entry in _entries(self, ctx)])

    def make_context(self, *args: Any, **more: Any) -> Any:
        # Help is as wide as the terminal, so that nothing is cut and nothing wraps twice; commands inherit it.
        width = max(min(shutil.get_terminal_size().columns, _WIDEST) - 1, 30)
        with StopAtOnce():
            return super().make_context(*args, terminal_width=width, **more)

    def invoke(self, ctx: Any) -> Any:
        with one_line_errors():
            return super().invoke(ctx)

    def main(self, args: Any = None, prog_name: Any = None, *, standalone_mode: bool = True, **more: Any) -> Any:  # type: ignore[override]  # fewer by position
        try:
            code = super().main(args, prog_name, standalone_mode=False, **more)
        except _UsageError as error:
            path = error.ctx.command_path if error.ctx is not None else "headstart"
            complain(f"{' '.join(_wrong(error).split())} ('{path} --help' lists what there is)")
            sys.exit(FAILED)
        if standalone_mode:
            sys.exit(code if isinstance(code, int) else 0)
        return code


def _side_by_side(formatter: Any, rows: list[tuple[str, str]]) -> None:
    """Names on the left, texts on the right; under each other where it is narrow. No option's name is broken."""
    narrow = formatter.width < 64
    column = 6 if narrow else min(max(len(name) for name, _ in rows), 25) + 4
    for name, text in rows:
        wrapped = textwrap.wrap(text, max(formatter.width - column, 16), break_on_hyphens=False)
        first = f"  {name}".ljust(column)
        if narrow or len(first) > column:
            formatter.write(f"{first.rstrip()}\n")
            first = " " * column
        for line in wrapped or [""]:
            formatter.write(f"{first}{line}".replace("\xa0", " ").rstrip() + "\n")
            first = " " * column


def _wrong(error: Any) -> str:
    """What is wrong; a value that came from the environment is named by its variable."""
    param = getattr(error, "param", None)
    if param is not None and param.envvar and error.ctx is not None:
        source = error.ctx.get_parameter_source(param.name)
        if source is not None and source.name == "ENVIRONMENT":
            return f"Invalid value for {param.envvar}: {_in_our_words(error.message)}"
    told = _in_our_words(str(error.format_message()))
    if (asked := getattr(error, "option_name", None)) is not None and error.ctx is not None:
        known = {name for param in error.ctx.command.params for name in param.opts}
        if asked == "--api-key" and "--api-key-file" in known:  # an argument can be seen by everybody on the machine
            return f"No such option: {asked}: set HEADSTART_API_KEY, or give --api-key-file"
        if here := _here(asked, error.ctx.command.params):
            return f"No such option: {asked}: {here}"
    if "unexpected extra argument" in told and error.ctx is not None:
        params = error.ctx.command.params
        given = [error.ctx.params.get(p.name) for p in params if p.param_type_name == "argument"]
        if any("--model" in p.opts for p in params) and (not given or any(map(_is_model, given))):
            named = next((f" ({place})" for place in given if _is_model(place)), "")
            return f"{told}: the model{named} is given by --model"  # ``vllm serve MODEL`` is what many are used to
    return told


def _here(asked: str, params: list[Any]) -> str:
    """What an option of vLLM or llama.cpp is here; "": it is none, or this command has nothing like it."""
    if asked in ("-p", "--prompt") and any(p.param_type_name == "argument" and p.name == "prompt" for p in params):
        return "the prompt is given without an option"
    called = _CALLED.get(asked, "")
    return f"here it is {called}" if called and any(called.split()[0] in param.opts for param in params) else ""


def _is_model(place: object) -> bool:
    """Is it where a model lies, on this disk?"""
    return isinstance(place, str) and (os.path.isdir(place) or (place.endswith(".gguf") and os.path.exists(place)))


def _in_our_words(told: str) -> str:
    """What is wrong with a value, as the rest of Headstart says it."""
    return re.sub(
        r"Input should be a valid (\w+)(, unable to .*)?$", lambda found: _KINDS.get(found[1], found[0]), told
    )


def _about(command: Any) -> str:
    """The first sentence about a command."""
    return str(command.help or "").split("\n\n")[0].strip()
