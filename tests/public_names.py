"""What users can name: classes, functions, their arguments and members, commands and options.

    python public_names.py > data/public_names.json     before a release, so that what is new is held from then on

Knows: how to write down what there is, and which changes break programs. Does not know: what any of it does.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
from pathlib import Path
from typing import Any

MODULES = ("headstart", "headstart.testing")
ROOT = Path(__file__).parents[1]
_VARIABLE = re.compile(r"\bHEADSTART_[A-Z0-9_]+")

Names = dict[str, Any]


def arguments(thing: Any) -> Names | None:
    """How a thing is called; None if it is not."""
    if not callable(thing):
        return None
    try:
        found = [p for p in inspect.signature(thing).parameters.values() if p.name != "self"]
    except ValueError:  # something built in
        return None
    return {
        "positional": [p.name for p in found if p.kind == p.POSITIONAL_OR_KEYWORD],
        "keywords": [p.name for p in found if p.kind == p.KEYWORD_ONLY],
        "required": [
            p.name for p in found if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        ],
    }


def described(thing: Any) -> Names:
    """How it is called and, of a class, what its objects have."""
    if not inspect.isclass(thing):
        return {"call": arguments(thing)}
    fields = list(getattr(thing, "__dataclass_fields__", {}))
    own = {name for kind in thing.__mro__ if kind.__module__.startswith("headstart") for name in vars(kind)}
    members = {name: arguments(getattr(thing, name, None)) for name in sorted({*own, *fields}) if name[0] != "_"}
    return {"call": arguments(thing), "members": members}


def variables(folder: Path = ROOT / "src") -> list[str]:
    """The environment variables that the sources name."""
    files = [path for path in folder.rglob("*") if path.suffix in (".py", ".cpp", ".h", ".cu", ".cuh")]
    return sorted({name for path in files for name in _VARIABLE.findall(path.read_text(encoding="utf-8"))})


def commands() -> dict[str, list[str]]:
    """The options of every command."""
    import typer.main

    from headstart.cli.main import app

    found: Any = typer.main.get_command(app)
    return {
        name: sorted(option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts))
        for name, command in [("", found), *found.commands.items()]
    }


def now() -> Names:
    """All that there is now."""
    modules = {name: importlib.import_module(name) for name in MODULES}
    return {
        "modules": {
            name: {each: described(getattr(module, each)) for each in sorted(module.__all__)}
            for name, module in modules.items()
        },
        "commands": commands(),
        "variables": variables(),
    }


def broken(old: Any, new: Any, place: str = "") -> list[str]:
    """What worked and does not work now: a sentence each."""
    if not isinstance(old, dict):
        return [f"{place}: {name} is gone" for name in old or () if name not in (new or ())]
    if "positional" in old:
        return broken_call(old, new, place) if new is not None else [f"{place} can no longer be called"]
    found = []
    for name in old:
        here = f"{place}.{name}".lstrip(".")
        found += broken(old[name], new[name], here) if name in new else [f"{here} is gone"]
    return found


def broken_call(old: Names, new: Names, place: str) -> list[str]:
    """A call keeps its arguments, those without names their order, and needs no more than it did."""
    found = []
    if new["positional"][: len(old["positional"])] != old["positional"]:
        found.append(f"{place}({', '.join(old['positional'])}) is now ({', '.join(new['positional'])})")
    known = {*new["positional"], *new["keywords"]}
    found += [f"{place}({name}=) is gone" for name in old["keywords"] if name not in known]
    found += [f"{place}({name}=) must now be given" for name in new["required"] if name not in old["required"]]
    return found


if __name__ == "__main__":
    print(json.dumps(now(), indent=1, sort_keys=True))
