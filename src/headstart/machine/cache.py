"""Where this package keeps what it made once: the converted model, packed weights, compiled kernels, measurements.

Knows: the folders, whom they must belong to, and how long kernels stay. Does not know: what lies in them.

What is run (kernels) or trusted unread (packed weights) is taken only from folders that nobody but this user and root
can write. Where the usual folder is not such a one, a private one is used instead, and that is said.
"""

from __future__ import annotations

import os
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ..errors import HeadstartWarning
from .files import DAY, in_use, why_distrusted, write_whole

__all__ = ["cache_folder", "clear_unused", "guarded_folders", "tell_unusable", "why_unusable", "write_whole"]

UNUSED_DAYS = 30

_told: set[tuple[Path, str]] = set()  # said once in a process


def cache_folder() -> Path:
    """$HEADSTART_CACHE, or ~/.cache/headstart."""
    chosen = os.environ.get("HEADSTART_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "headstart"


def why_unusable(folder: Path) -> str | None:
    """None if files can be put into the folder, which may have to be made first; else the reason, in words."""
    existing = next((path for path in (folder, *folder.parents) if os.path.exists(path)), folder)
    if not existing.is_dir():
        return f"{existing} is a file, not a folder"
    return None if os.access(existing, os.W_OK | os.X_OK) else f"{existing} cannot be written"


def tell_unusable() -> None:
    """Warn where the cache folder cannot be used: once in a process for each reason."""
    folder = cache_folder()
    reason = why_unusable(folder)
    if reason is None or (folder, reason) in _told:
        return
    _told.add((folder, reason))
    warnings.warn(
        f"the cache folder {folder} cannot be used: {reason}. So nothing is remembered from one start to the next: "
        "models are packed and measured anew, and kernels are compiled again (unless those among the temporary files "
        "are still there). Make it a folder that you can write, or set HEADSTART_CACHE to one.",
        HeadstartWarning,
        stacklevel=3,
    )


def guarded_folders(name: str, *, make: bool = False, elsewhere: bool = False) -> Iterator[Path]:
    """Folders for ``name`` that nobody but this user and root can write, the best first.

    The usual one in the cache folder, a private one beside it, and with ``elsewhere`` one among the temporary files,
    for those who cannot write in the cache folder. ``make``: missing ones are made, each when it is its turn.
    """
    user = str(os.geteuid()) if hasattr(os, "geteuid") else "private"
    usual, private = cache_folder() / name, cache_folder() / f"{name}-{user}"
    candidates = [(usual, 0o755), (private, 0o700)]
    if elsewhere:
        candidates.append((Path(tempfile.gettempdir()) / f"headstart-{name}-{user}", 0o700))
    if make and why_unusable(usual) is not None:
        tell_unusable()
    for folder, mode in candidates:
        try:
            if make:
                folder.mkdir(mode, parents=True, exist_ok=True)
            reason = why_distrusted(folder)
        except OSError:  # not there, or cannot be made
            continue
        if reason is None:
            yield folder
        elif folder == usual:
            warnings.warn(
                f"{reason}, so nothing is taken from it: a private folder is used instead ({private}). To end this, "
                "make the folder yours alone (chmod go-w), or set HEADSTART_CACHE to one of your own.",
                HeadstartWarning,
                stacklevel=2,
            )


def clear_unused(folder: Path, days: float = UNUSED_DAYS) -> None:
    """Clear away compiled kernels that nobody has used for so long; whoever uses one touches it. What a killed process
    left locked goes with them."""
    kernels = (".so", ".cubin")
    with suppress(OSError):
        for file in folder.iterdir():
            with suppress(OSError):
                alone = file.suffix == ".json" and not any(file.with_suffix(kind).exists() for kind in kernels)
                if not (alone or file.suffix in (*kernels, ".lock")):
                    continue
                if time.time() - file.stat().st_mtime > days * DAY and not in_use(file):
                    file.unlink()
                    file.with_suffix(".json").unlink(missing_ok=True)
