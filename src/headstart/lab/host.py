"""The machine underneath: its processor, memory and disks. Needs nothing but Python, so that it can be asked on any.

Knows: how to ask the system. Does not know: devices, models, what the answers are for.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

__all__ = ["flags", "host_memory", "load_average", "processor"]

_CPUINFO, _MEMINFO, _GROUP = Path("/proc/cpuinfo"), Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def processor() -> str:
    """The processor's name."""
    named = (line.split(":", 1)[1].strip() for line in _lines(_CPUINFO) if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def flags() -> frozenset[str]:
    """What the processor can do, as far as the system says; nothing where it does not."""
    told = (line.partition(":")[2] for line in _lines(_CPUINFO) if line.startswith(("flags", "Features")))
    return frozenset(next(told, "").split())


def load_average() -> float | None:
    """Processes that want to run, over the last minute."""
    asked: Any = getattr(os, "getloadavg", None)  # Windows has none
    try:
        return float(asked()[0]) if asked is not None else None
    except OSError:
        return None


def host_memory() -> dict[str, int | None]:
    """Bytes of memory: all of it, and what is free now; of a container, what it is allowed. None: nobody knows."""
    total, free = _pages("SC_PHYS_PAGES"), _available()
    limit, used = _number(_GROUP / "memory.max"), _number(_GROUP / "memory.current")
    if total is not None and limit is not None and limit < total:
        total = limit
        free = min(free, max(0, limit - (used or 0))) if free is not None else None
    return {"total": total, "free": free}


def _pages(name: str) -> int | None:
    sysconf: Any = getattr(os, "sysconf", None)  # Windows has none
    try:
        return int(sysconf(name) * sysconf("SC_PAGE_SIZE")) if sysconf is not None else None
    except (ValueError, OSError):
        return None


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):  # there is none, or it says "max"
        return None


def _available() -> int | None:
    """What programs may still take: free pages, and those that only hold copies of files."""
    told = (int(line.split()[1]) * 1024 for line in _lines(_MEMINFO) if line.startswith("MemAvailable:"))
    found = next(told, None)
    return found if found is not None else _pages("SC_AVPHYS_PAGES")
