"""Compares a built wheel with what git knows of the package: every file, and no other.

    python wheel_files.py WHEEL

Knows: file names and contents. Does not know: how wheels are built. Needs nothing but Python and git, because
``make wheel-check`` runs it on its own.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def tracked(folder: str = ".") -> list[str]:
    """The files under a folder that git knows, as paths from the root."""
    command = ["git", "ls-files", "-z", "--", folder]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return [name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


def differences(wheel: Path) -> list[str]:
    """What is wrong with a wheel, a sentence each; nothing if all is well."""
    wanted = {name.removeprefix("src/"): ROOT / name for name in tracked("src/headstart")}
    with zipfile.ZipFile(wheel) as file:
        found = {name for name in file.namelist() if ".dist-info/" not in name and not name.endswith("/")}
        changed = [n for n in sorted(found & set(wanted)) if file.read(n) != wanted[n].read_bytes()]
    return [
        *(f"{name} is not in the wheel" for name in sorted(set(wanted) - found)),
        *(f"{name} is in the wheel, but git does not know it" for name in sorted(found - set(wanted))),
        *(f"{name} is another in the wheel" for name in changed),
    ]


if __name__ == "__main__":
    wrong = differences(Path(sys.argv[1]))
    sys.exit("\n".join(wrong) if wrong else 0)
