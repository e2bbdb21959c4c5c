"""``doctor``: one look at everything.

Knows: what is looked at, in which order. Does not know: how; and imports nothing that may be broken.
"""

from __future__ import annotations

import platform
import time
from time import perf_counter

from ...machine.cpu.cores import processors
from ...types import Tell, silent
from ..host import host_memory, processor
from . import looks
from .pair import Asked, examined
from .record import Checkup, Finding

__all__ = ["Asked", "doctor"]


def doctor(pair: Asked | None = None, *, environment: str | None = None, tell: Tell | None = None) -> Checkup:
    """Look at this machine, and with ``pair`` at two models before they are loaded. ``environment``: what is to be said
    of environment variables; ``tell``: hears what is going on. Nothing is changed."""
    tell, started = tell or silent, perf_counter()
    found: list[Finding] = []
    known = looks.versions()
    found += looks.extras(known)
    tell("asking torch")
    told = looks.asked_torch() if known["torch"] is not None else {"error": "it is not installed"}
    found += looks.torch(told, known["torch"] is not None)
    tell("looking at processor, compilers and caches")
    for look in (looks.work, looks.memory, looks.compilers, looks.cache):
        try:
            found += look()
        except Exception as error:  # on a broken machine anything may fail: that is a finding, too
            found.append(Finding(look.__name__, "note", f"could not be looked at: {type(error).__name__}: {error}"))
    if environment is not None:
        found.append(Finding("environment", "note", environment))
    devices = tuple(told.get("devices", ()))
    facts = None
    if pair is not None:
        tell("looking at the models' files")
        gpu = bool(devices)
        free = max((int(device["free"]) for device in devices), default=None) if gpu else host_memory()["free"]
        facts, more = examined(pair, free, gpu, torch_works="error" not in told)
        found += more
    return Checkup(
        machine={
            "date": time.strftime("%Y-%m-%d"),
            "processor": processor(),
            "cores": processors(),
            "memory": host_memory()["total"],
            "system": f"{platform.system()} {platform.machine()}",
            "cpu_capability": told.get("capability"),
        },
        settings={} if pair is None else {name: value for name, value in vars(pair).items() if value is not None},
        versions=known,
        devices=devices,
        findings=tuple(found),
        places=tuple(looks.kept()),
        pair=facts,
        seconds=perf_counter() - started,
    )
