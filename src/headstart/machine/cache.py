"""Where this package keeps what it made once: the converted model, packed weights, compiled kernels, measurements.

Knows: the folder. Does not know: what lies in it.
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["cache_folder", "write_whole"]


def cache_folder() -> Path:
    """$HEADSTART_CACHE, or ~/.cache/headstart."""
    chosen = os.environ.get("HEADSTART_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "headstart"


def write_whole(path: Path, content: bytes | str) -> None:
    """Write a file in one step: another process sees it whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    work = path.with_name(f".{path.name}-{os.getpid()}")
    work.write_bytes(content.encode() if isinstance(content, str) else content)
    work.replace(path)
