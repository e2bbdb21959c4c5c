"""Packed models kept on disk, so that the next load needs neither their float weights nor the packing.

Knows: how a model's files look from outside, where packed copies lie, and how much room they may take.
Does not know: how weights are packed, or run.

A copy is named by everything it depends on: the model's files (path, size, time of change), the kind of rounding and
the layout's version. So nothing that is stale is ever found; it is cleared away when room is needed, longest unused
first. A copy appears and goes in one step: another process sees it whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from .cache import cache_folder
from .cpu.packed import VERSION, Packed, load_packed, said_about, save_packed
from .hub import Remote, found_at
from .loading import Loaded, fetch_tokenizer
from .outline import outlined, report_from, report_text

if TYPE_CHECKING:
    import torch

__all__ = ["keep", "place_for", "take"]

log = logging.getLogger(__name__)

ROOM = 20.0  # gigabytes for all copies, unless $HEADSTART_CACHE_GB says otherwise; 0 keeps none
_WEIGHTS = "weights.safetensors"


def place_for(
    source: str | Path, kind: str, *, dtype: str | torch.dtype, revision: str | None, token: str | bool | None
) -> Path | None:
    """Where a packed copy of the model belongs, be it there or not; None if the model is not on this disk."""
    try:
        path = found_at(source, Remote(revision, token))  # on the hub: what the revision stands for now
        files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.is_file())
        stats = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    except (OSError, ValueError):
        return None
    about = json.dumps([VERSION, kind, str(dtype), stats])
    return _shelf() / f"{path.stem[:40]}-{kind}-{hashlib.sha256(about.encode()).hexdigest()[:20]}"


def take(place: Path | None, source: str | Path, remote: Remote) -> tuple[Loaded, Packed] | None:
    """The packed copy and what else there is to know of the model; None if there is none."""
    if place is None or not (place / _WEIGHTS).exists():
        return None
    try:
        report, packed = report_from(said_about(place / _WEIGHTS)), load_packed(place / _WEIGHTS)
        if report is None or packed is None:
            raise OSError("it is damaged or of another version")
        tokenizer = None
        # A GGUF file's tokenizer takes seconds to read, so it is kept too. Any other is read from where it always was.
        if report.tokenizer_size is not None and Path(source).suffix != ".gguf":
            tokenizer = fetch_tokenizer(str(Path(source).expanduser()), remote)
        found = outlined(place, report, tokenizer)
        os.utime(place)  # it was used now
    except (OSError, ValueError) as error:  # cleared away meanwhile, or damaged
        log.info("the packed copy in %s cannot be used: %s", place, error)
        _discard(place)
        return None
    return found, packed


def keep(place: Path, loaded: Loaded, packed: Packed) -> None:
    """Put a packed model on the shelf. A disk that is full or read-only costs the packing next time, and no more."""
    room = _room()
    if packed.bytes > room or packed.bytes > shutil.disk_usage(_existing(place)).free / 2:
        log.info(
            "no packed copy is kept: it takes %.1f GB (HEADSTART_CACHE_GB is %.1f)", packed.bytes / 1e9, room / 1e9
        )
        return
    work = place.with_name(f".{place.name}-{os.getpid()}")
    try:
        work.mkdir(parents=True)
        save_packed(packed, work / _WEIGHTS, report_text(loaded.report))
        loaded.model.config.save_pretrained(work)
        if getattr(loaded.model, "generation_config", None) is not None:
            loaded.model.generation_config.save_pretrained(work)
        if loaded.tokenizer is not None:
            loaded.tokenizer.save_pretrained(work)
        with suppress(OSError):  # another process was faster
            work.rename(place)
        _clear(room)
        log.info("kept a packed copy in %s (%.2f GB)", place, packed.bytes / 1e9)
    except OSError as error:
        log.info("no packed copy is kept in %s: %s", place, error)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _shelf() -> Path:
    return cache_folder() / "packed"


def _room() -> float:
    try:
        return float(os.environ.get("HEADSTART_CACHE_GB", ROOM)) * 1e9
    except ValueError:
        return ROOM * 1e9


def _existing(path: Path) -> Path:
    """The path, or the nearest folder above it that is there."""
    return next(folder for folder in (path, *path.parents) if folder.exists())


def _clear(room: float) -> None:
    """Clear copies away, longest unused first, until all fit the room."""
    copies = [(folder.stat().st_mtime, folder) for folder in _shelf().iterdir() if not folder.name.startswith(".")]
    sizes = {folder: sum(file.stat().st_size for file in folder.iterdir()) for _, folder in copies}
    total = sum(sizes.values())
    for _, folder in sorted(copies):
        if total <= room:
            return
        _discard(folder)
        log.info("cleared %s away (%.2f GB)", folder, sizes[folder] / 1e9)
        total -= sizes[folder]


def _discard(folder: Path) -> None:
    trash = folder.with_name(f".{folder.name}-old-{os.getpid()}")
    with suppress(OSError):
        folder.rename(trash)
        shutil.rmtree(trash)
