"""What a figure was measured on: processor, devices, versions.

Knows: how to ask the machine. Does not know: what was measured.
"""

from __future__ import annotations

import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from ..machine.cpu.cores import processors

__all__ = ["machine", "memory", "processor"]


def processor() -> str:
    """The processor's name."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def machine() -> dict[str, Any]:
    """Enough to know what a figure was measured on."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "processor": processor(),
        "cores": processors(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "headstart": _version(),
        "commit": _commit(),
    }


def memory(device: torch.device | None = None) -> dict[str, int | None]:
    """Bytes of memory: all of it, and what is free now; of a GPU, its own. None: nobody knows."""
    if device is not None and device.type == "cuda":
        on_device = torch.cuda.mem_get_info(device)
        return {"total": on_device[1], "free": on_device[0]}
    total, free = _pages("SC_PHYS_PAGES"), _available()
    limit, used = _number("/sys/fs/cgroup/memory.max"), _number("/sys/fs/cgroup/memory.current")
    if total is not None and limit is not None and limit < total:  # a container's
        total = limit
        free = min(free, max(0, limit - (used or 0))) if free is not None else None
    return {"total": total, "free": free}


def _pages(name: str) -> int | None:
    sysconf: Any = getattr(os, "sysconf", None)  # Windows has none
    try:
        return int(sysconf(name) * sysconf("SC_PAGE_SIZE")) if sysconf is not None else None
    except (ValueError, OSError):
        return None


def _number(path: str) -> int | None:
    try:
        return int(Path(path).read_text(encoding="ascii"))
    except (OSError, ValueError):  # there is none, or it says "max"
        return None


def _available() -> int | None:
    """What programs may still take: free pages, and those that only hold copies of files."""
    info = Path("/proc/meminfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return _pages("SC_AVPHYS_PAGES")


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("headstart")
    except PackageNotFoundError:  # run from its sources
        return "from sources"


def _commit() -> str | None:
    """The commit of the sources, where this is a checkout of them."""
    here = Path(__file__).resolve()
    if not any((parent / ".git").exists() for parent in here.parents):
        return None
    try:
        said = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=here.parent, capture_output=True, text=True, check=False
        )
    except OSError:
        return None
    return said.stdout.strip() or None
