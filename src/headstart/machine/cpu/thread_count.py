"""How many threads are fastest for a model on this machine: measured when it is loaded, remembered when seen twice.

Knows: how a step is timed, when a measurement is to be doubted, and where results are kept. Does not know: kernels.

A step in which a thread had to wait for a core says nothing about the kernels. While its threads run, each of them uses
processor time; where a step's processor time is less than its threads times its length, somebody else had a core.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

from ..cache import cache_folder, tell_unusable, write_whole
from .build import isa
from .threads import counts

__all__ = ["Timed", "best_count", "threads_for", "timed"]

TURNS = 6
QUIET = 0.9  # of the processor time that a step's threads use when nothing else wants the cores
_WORTH_IT = 0.95  # more threads must save this much
_KEPT = 4  # results that are remembered


@dataclass(frozen=True)
class Timed:
    """A step with some number of threads: its length, and the processor time it used in all threads together."""

    seconds: float
    used: float
    threads: int = 1

    @property
    def quiet(self) -> bool:
        """Did nothing else want the cores meanwhile?"""
        return self.used >= QUIET * self.threads * self.seconds


def threads_for(step: Callable[[int], object], about: Mapping[str, Any], most: int) -> int:
    """The number of threads, up to ``most``, with which ``step(threads)`` is fastest. ``about``: what the model is.

    A result is taken for granted once two loads have found it; one that was disturbed by other programs counts for
    nothing.
    """
    if most == 1:
        return 1
    text = json.dumps([dict(about), isa(), platform.node(), platform.processor(), most], sort_keys=True)
    path = cache_folder() / "threads" / f"{hashlib.sha256(text.encode()).hexdigest()[:20]}.json"
    seen = [count for count in _remembered(path) if 1 <= count <= most]
    if len(seen) > 1 and seen[-1] == seen[-2]:
        return seen[-1]
    best = best_count(step, most)
    if best is None:  # a busy moment
        return seen[-1] if seen else most
    try:
        write_whole(path, json.dumps({"seen": [*seen, best][-_KEPT:]}))
    except OSError:  # a cache that cannot be written costs a measurement next time
        tell_unusable()
    return best


def best_count(step: Callable[[int], object], most: int) -> int | None:
    """Measured in turns, so that what comes and goes meets every number of threads alike; None if nothing could be
    measured undisturbed."""
    found: dict[int, list[float]] = {count: [] for count in counts(most)}
    for _ in range(TURNS):
        for count, seconds in found.items():
            one = timed(step, count)
            if one.quiet:
                seconds.append(one.seconds)
    best = 1
    if not all(found.values()):
        return None
    for count, seconds in found.items():
        if min(seconds) < _WORTH_IT * min(found[best]):
            best = count
    return best


def timed(step: Callable[[int], object], threads: int) -> Timed:
    """One ``step(threads)``."""
    used, begun = process_time(), perf_counter()
    step(threads)
    seconds = perf_counter() - begun
    return Timed(seconds, process_time() - used, threads)


def _remembered(path: Path) -> list[int]:
    """What earlier loads found. A file of before noted one result, which may have been disturbed: it is not taken."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["seen"]
        return [int(count) for count in found]
    except (OSError, ValueError, LookupError, TypeError, OverflowError, RecursionError):
        return []
