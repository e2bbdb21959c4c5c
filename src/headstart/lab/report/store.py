"""Where reports go: JSON and a page, written whole or not at all.

Knows: what every report says of itself, and files. Does not know: what was measured.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from ...errors import InvalidParameter
from ...machine.files import write_whole
from ..record import Record

__all__ = ["FOLDER", "VERSION", "as_json", "check_out", "envelope", "page_of", "save", "without_folders"]

VERSION = 1  # of the form; a field that changes its meaning raises it
FOLDER = "headstart-reports"  # where reports go unless another folder is named

# A path with a folder in it: absolute, under ~, or under . or ..; not a hub id, a URL or a fraction.
FOLDERS = re.compile(r"(?<![\w)/.:~])(?:~|\.\.?)?/(?:[\w.+@-]+/)+(?=[\w.+@-])")


def envelope(record: Record) -> dict[str, Any]:
    """A record as it is stored and printed: what it is, and no folder of this machine in it."""
    found: dict[str, Any] = without_folders({"kind": record.kind, "version": VERSION, **record.to_json()})
    return found


def as_json(value: Any) -> str:
    """Text of a value as it is stored: every path is cut to its last name."""
    return json.dumps(without_folders(value), indent=1) + "\n"


def without_folders(value: Any) -> Any:
    """The same with every path cut to its last name, and None for numbers that JSON does not have."""
    if isinstance(value, Mapping):
        return {str(key): without_folders(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_folders(part) for part in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int)):
        return value
    return FOLDERS.sub("", str(value))


def page_of(record: Record) -> str:
    """The record's page, by the builder that has its name in this folder."""
    build = import_module(f".{record.kind}", __package__).page
    text: str = build(record)
    return text


def check_out(folder: str | Path) -> None:
    """Refuse a folder that nothing can be written to, before anything is measured. Nothing is left behind."""
    place = Path(folder).expanduser()
    existing = next((p for p in (place, *place.absolute().parents) if p.exists()), None)
    if existing is None or not existing.is_dir():
        raise InvalidParameter("out", f"must be a folder, and {existing} is a file")
    try:
        with tempfile.TemporaryDirectory(prefix=".headstart-", dir=existing):
            pass
    except OSError as error:
        raise InvalidParameter("out", f"cannot be written to: {error.strerror} ({existing})") from error


def save(record: Record, folder: str | Path | None = None) -> tuple[Path, Path]:
    """Write NAME.json and NAME.html into a folder; where they are. In a folder that was named, NAME is the command's
    and an older report is replaced; in ``FOLDER`` the time is added to it."""
    name = record.kind if folder is not None else f"{record.kind}-{time.strftime('%Y%m%d-%H%M%S')}"
    place = Path(folder if folder is not None else FOLDER).expanduser()
    texts = {f"{name}.json": as_json(envelope(record)), f"{name}.html": page_of(record)}  # both, before any is written
    try:
        place.mkdir(parents=True, exist_ok=True)
        for file, text in texts.items():
            write_whole(place / file, text)
    except OSError as error:
        raise InvalidParameter("out", f"cannot be written to: {error.strerror or error} ({place})") from error
    first, second = (place / file for file in texts)
    return first, second
