"""How much of the processor a container leaves to this process.

Knows: where Linux keeps the quotas of control groups. Does not know: threads, kernels, what is measured.

A quota is time: with 1.5 cores of 64, 32 threads use it up in a moment and then all stand still. Nothing else tells of
it: neither the number of cores nor those that the process may run on.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

__all__ = ["allowed_cores", "processors"]

_GROUPS, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def processors() -> int:
    """How many processors this process may keep busy."""
    if sys.platform == "linux":
        here = len(os.sched_getaffinity(0))
    else:
        here = os.cpu_count() or 1
    return min(here, allowed_cores() or here)


def allowed_cores(groups: Path = _GROUPS, own: Path = _OWN) -> int | None:
    """Cores' worth of time, rounded up; None: there is no quota. ``groups``: where control groups lie; ``own``: the
    file that says which of them this process is in."""
    quotas: list[float] = []
    with suppress(OSError, UnicodeDecodeError):
        for line in own.read_text(encoding="utf-8").splitlines():
            _, controllers, name = line.split(":", 2) if line.count(":") > 1 else ("", "none", "")
            mine = PurePosixPath(name.lstrip("/"))
            for place in (mine, *mine.parents):  # a group has what all those that it lies in leave it
                quotas += _quotas(groups, controllers, place)
    return max(1, math.ceil(min(quotas))) if quotas else None


def _quotas(groups: Path, controllers: str, place: PurePosixPath) -> Iterator[float]:
    with suppress(OSError, ValueError, ZeroDivisionError):
        if not controllers:  # version 2: "max 100000", "150000 100000"
            quota, period = (groups / place / "cpu.max").read_text(encoding="utf-8").split()
            if quota != "max":
                yield float(quota) / float(period)
        elif "cpu" in controllers.split(","):
            folder = groups / "cpu" / place
            quota, period = (
                (folder / f"cpu.cfs_{name}_us").read_text(encoding="utf-8") for name in ("quota", "period")
            )
            if float(quota) > 0:
                yield float(quota) / float(period)
