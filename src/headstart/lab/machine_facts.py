"""What a figure was measured on: processor, devices, versions.

Knows: how to ask the machine. Does not know: what was measured.
"""

from __future__ import annotations

import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from ..machine.cpu.cores import processors
from .host import host_memory, processor

__all__ = ["machine", "memory", "processor"]


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
    return host_memory()


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
            ["git", "rev-parse", "--short", "HEAD"],
            cwd=here.parent,
            capture_output=True,
            text=True,
            encoding="utf-8",
            check=False,
        )
    except OSError:
        return None
    return said.stdout.strip() or None
