"""Packed models kept on disk, so that the next load needs neither their float weights nor the packing.

Knows: how a model's files look from outside, where packed copies lie, and how much room they may take.
Does not know: how weights are packed, or run.

A copy is named by everything it depends on: the model's files (path, size, time of change), the kind of rounding and
the layout's version. So nothing that is stale is ever found; it is cleared away when room is needed, longest unused
first. A copy appears and goes in one step: another process sees it whole or not at all. None is taken that others than
this user and root can have written.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import HeadstartError
from ..cache import guarded_folders
from ..cpu.packed import VERSION, Packed, load_packed, said_about, save_packed
from ..cpu.plan import Plan, plan_from, plan_text
from ..files import make_readable, new_folder, read_guarded, sweep, temporary, write_whole
from .gguf_header import gguf_parts, is_gguf
from .hub import Remote, found_at
from .loading import Loaded, fetch_tokenizer
from .model_info import outlined, report_from, report_text, save_tokenizer

if TYPE_CHECKING:
    import torch

__all__ = ["keep", "keep_outline", "known_by", "place_for", "take", "take_outline"]

log = logging.getLogger(__name__)

ROOM = 20.0  # gigabytes for all copies, unless $HEADSTART_CACHE_GB says otherwise; 0 keeps none
_SHELF = "packed"  # the cache's folder for copies
_WEIGHTS = "weights.safetensors"
_READING = 3  # how GGUF files are read: raised when one that was read before becomes another model, or its tokenizer
_OUTLINE = "outline.json"  # of a model whose weights are packed from its file each time


def known_by(source: object, remote: Remote) -> tuple[Path, list[tuple[str, int, int]]] | None:
    """Where a model lies, and the path, size and time of change of each of its files; None if it is not on this
    disk."""
    if not isinstance(source, (str, Path)):
        return None
    try:
        path = found_at(source, remote)  # on the hub: what the revision stands for now
        files = gguf_parts(path) if path.is_file() else sorted(file for file in path.iterdir() if file.is_file())
        return path, [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    except (OSError, ValueError):
        return None


def place_for(
    source: str | Path, kind: str, *, dtype: str | torch.dtype, revision: str | None, token: str | bool | None
) -> Path | None:
    """Where a packed copy of the model belongs, be it there or not; None if the model is not on this disk, or there is
    nowhere to keep one."""
    found = known_by(source, Remote(revision, token))
    if found is None:
        return None
    path, stats = found
    about = json.dumps([VERSION, kind, str(dtype), stats, *([_READING] if is_gguf(path) else [])])
    name = f"{path.stem[:40]}-{kind}-{hashlib.sha256(about.encode()).hexdigest()[:20]}"
    for shelf in guarded_folders(_SHELF):
        if (shelf / name).exists():
            return shelf / name
    shelves = guarded_folders(_SHELF, make=True)
    return next((shelf / name for shelf in shelves if os.access(shelf, os.W_OK)), None)


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
        if report.tokenizer_size is not None and not is_gguf(source):
            tokenizer = fetch_tokenizer(str(Path(source).expanduser()), remote)
        found = outlined(place, report, tokenizer)
        with suppress(OSError):  # another's, that may be read
            os.utime(place)  # it was used now
    except (HeadstartError, MemoryError):  # the model's own tokenizer is damaged, say
        raise
    except Exception as error:  # cleared away meanwhile, or damaged: then its readers raise anything
        log.info("the packed copy in %s cannot be used: %s", place, error)
        _discard(place)
        return None
    return found, packed


def take_outline(place: Path) -> tuple[Loaded, Plan] | None:
    """What ``keep_outline`` kept; None if there is nothing."""
    try:
        about = json.loads(read_guarded(place / _OUTLINE))
        plan, report = plan_from(about["plan"]), report_from(about["report"])
        if about["version"] != VERSION or plan is None or report is None:
            raise OSError("it is of another version")
        # Without a digest, of a version that noted none: taken as it is.
        if about.get("sha256", "") not in ("", _digest(about["plan"], about["report"])):
            raise OSError("it is damaged")
        found = outlined(place, report)
        with suppress(OSError):  # another's, that may be read
            os.utime(place)  # it was used now
    except FileNotFoundError:
        return None
    except MemoryError:
        raise
    except Exception as error:  # damaged files raise whatever their readers happen to meet
        log.info("what is kept in %s cannot be used: %s", place, error)
        _discard(place)
        return None
    return found, plan


def keep(place: Path, loaded: Loaded, packed: Packed) -> None:
    """Put a packed model on the shelf. A disk that is full or read-only costs the packing next time, and no more."""
    room = _room()
    if packed.bytes > room or packed.bytes > shutil.disk_usage(_existing(place)).free / 2:
        log.info(
            "no packed copy is kept: it takes %.1f GB (HEADSTART_CACHE_GB is %.1f)", packed.bytes / 1e9, room / 1e9
        )
        return
    _put(place, loaded, lambda work: save_packed(packed, work / _WEIGHTS, report_text(loaded.report)))
    _clear(place.parent, room)


def keep_outline(place: Path, loaded: Loaded, plan: Plan) -> None:
    """Keep all of a GGUF file's model but its weights, which are packed from the file as fast as a copy would be read:
    reading its configuration and its tokenizer takes longer than that."""
    if not _room():
        return
    texts = plan_text(plan), report_text(loaded.report)
    about = {"version": VERSION, "plan": texts[0], "report": texts[1], "sha256": _digest(*texts)}
    _put(place, loaded, lambda work: write_whole(work / _OUTLINE, json.dumps(about), guarded=True))
    _clear(place.parent, _room())


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def _put(place: Path, loaded: Loaded, write: Callable[[Path], None]) -> None:
    """A folder with a model's configuration, its tokenizer, and whatever ``write`` puts there."""
    try:
        sweep(place.parent, before=r"\..+-int[48]-[0-9a-f]{20}(-old)?-\d+")
        with new_folder(place) as work:
            work.chmod(work.stat().st_mode & ~0o022)
            write(work)
            loaded.model.config.save_pretrained(work)
            if getattr(loaded.model, "generation_config", None) is not None:
                loaded.model.generation_config.save_pretrained(work)
            if loaded.tokenizer is not None:
                save_tokenizer(loaded.tokenizer, work)
            make_readable(work, guarded=True)
        log.info("kept a packed copy in %s", place)
    except OSError as error:
        log.info("no packed copy is kept in %s: %s", place, error)


def _room() -> float:
    try:
        room = float(os.environ.get("HEADSTART_CACHE_GB", ROOM))
    except ValueError:
        room = ROOM
    return 1e9 * (ROOM if math.isnan(room) else max(room, 0.0))


def _existing(path: Path) -> Path:
    """The path, or the nearest folder above it that is there."""
    return next(folder for folder in (path, *path.parents) if folder.exists())


def _clear(shelf: Path, room: float) -> None:
    """Clear copies away, longest unused first, until all fit the room."""
    copies: list[tuple[float, int, Path]] = []
    with suppress(OSError):
        for folder in shelf.iterdir():
            with suppress(OSError):  # another process clears, too
                if not folder.name.startswith("."):
                    size = sum(file.stat().st_size for file in folder.iterdir())
                    copies.append((folder.stat().st_mtime, size, folder))
    total = sum(size for _, size, _ in copies)
    for _, size, folder in sorted(copies):
        if total <= room:
            return
        _discard(folder)
        log.info("cleared %s away (%.2f GB)", folder, size / 1e9)
        total -= size


def _discard(folder: Path) -> None:
    trash = temporary(folder)
    with suppress(OSError):
        folder.rename(trash)
        shutil.rmtree(trash)
