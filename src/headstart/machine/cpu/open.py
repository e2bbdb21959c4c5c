"""Which models run on the CPU's kernels, in which kind of weights, with how many threads.

Knows: what was asked for, what this machine can do, and what it measured. Does not know: kernels, engines.

Rounding a target changes its numbers, so it happens only on request, or to the embedded model, whose own file has these
very 4-bit weights. A draft may be rounded at will: the target checks its guesses.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from time import perf_counter

import torch

from ...errors import HeadstartWarning, InvalidParameter, ModelRefused
from ..cache import cache_folder, write_whole
from ..load.loading import Capability, Loaded
from .build import isa
from .build import why_not as no_kernels
from .library import instructions
from .packed import Packed, pack_model, why_not
from .runner import CpuRunner

__all__ = [
    "QUANTIZATIONS",
    "can_round_draft",
    "check_quantization",
    "described",
    "fall_back",
    "open_packed",
    "reason_against",
    "threads_for",
]

QUANTIZATIONS = ("int8", "int4")
MOST_THREADS = 16  # more do not help: memory is the limit
_WORTH_IT = 0.95  # more threads must save this much
_STEPS = 6


def check_quantization(name: str, value: object) -> None:
    if value not in (None, "auto", *QUANTIZATIONS):
        raise InvalidParameter(name, f"must be 'auto', None, 'int8' or 'int4', not {value!r}")


def fall_back(what: str, reason: str) -> None:
    """Say that something runs without the kernels, and why; refuse it if $HEADSTART_REQUIRE_KERNELS asks for them."""
    if os.environ.get("HEADSTART_REQUIRE_KERNELS", "").lower() not in ("", "0", "false", "no"):
        raise ModelRefused(
            f"{what}, because {reason}; HEADSTART_REQUIRE_KERNELS is set, so that is refused: make the kernels work, "
            "or unset it"
        )
    warnings.warn(f"{what}: {reason}", HeadstartWarning, stacklevel=3)


def reason_against(loaded: Loaded) -> str | None:
    """None if the kernels can run this model here, else why not, in words."""
    if loaded.model.device.type not in ("cpu", "meta"):
        return f"quantized weights are for the CPU, and the model is on {loaded.model.device}"
    return why_not(loaded.model) or no_kernels()


def can_round_draft(loaded: Loaded) -> bool:
    """Can the kernels run this draft here? Where they could if only they were there, that is said."""
    if loaded.model.device.type not in ("cpu", "meta") or why_not(loaded.model) is not None:
        return False
    missing = no_kernels()
    if missing is not None:
        fall_back("the draft model runs in float32 on torch, several times slower", missing)
    return missing is None


def open_packed(
    loaded: Loaded, kind: str, *, rows: int, max_len: int, margin: int, probe: bool, packed: Packed | None = None
) -> CpuRunner:
    """The model on the kernels, rounded to ``kind``. ``packed``: its weights, where they lie ready."""
    reason = reason_against(loaded) if packed is None else no_kernels()
    if reason is not None:
        raise ModelRefused(f"{loaded.report.architecture} cannot be quantized here: {reason}; use quantization=None")
    packed = packed or pack_model(loaded.model, kind)
    runner = CpuRunner(packed, loaded.model, rows=rows, max_len=max_len, margin=margin, probe=probe)
    runner.threads = threads_for(runner)
    return runner


def described(report: Capability, packed: Packed) -> Capability:
    """The capability report of a model that runs rounded."""
    note = (
        f"weights are {packed.plan.kind} in groups of 32 (embedding and output head int8), activations 8 bits a token; "
        "speculation is lossless with respect to this rounded model"
    )
    return replace(
        report,
        dtype=packed.plan.kind,
        device="cpu",
        bytes=packed.bytes,
        notes=(*report.notes, note),
        kernels=f"C++ ({instructions()})",
    )


# -- threads ------------------------------------------------------------------------------------------------------


def threads_for(runner: CpuRunner) -> int:
    """How many threads are fastest for this model here: measured once (well under a second) and remembered.

    Never more than torch may use. On a machine with other work, two threads can be slower than one.
    """
    most = min(torch.get_num_threads(), MOST_THREADS)
    if most == 1:
        return 1
    plan = asdict(runner.packed.plan) | {"inverse_frequencies": None, "eps": None}
    about = json.dumps([plan, isa(), platform.node(), platform.processor(), most], sort_keys=True)
    path = cache_folder() / "threads" / f"{hashlib.sha256(about.encode()).hexdigest()[:20]}.json"
    try:
        return min(int(json.loads(path.read_text(encoding="utf-8"))["threads"]), most)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    measured = {count: _seconds(runner, count) for count in _candidates(most)}
    best = 1
    for count, seconds in measured.items():
        if seconds < _WORTH_IT * measured[best]:
            best = count
    with suppress(OSError):  # a cache that cannot be written costs a measurement next time
        write_whole(path, json.dumps({"threads": best, "seconds": {str(n): s for n, s in measured.items()}}))
    return best


def _candidates(most: int) -> Sequence[int]:
    found = [1]
    while found[-1] * 2 < most:
        found.append(found[-1] * 2)
    return [*found, most]


def _seconds(runner: CpuRunner, threads: int) -> float:
    """A step of one token, undisturbed."""
    before, runner.threads = runner.threads, threads
    token, best = torch.tensor([[0]]), float("inf")
    for _ in range(_STEPS):
        begun = perf_counter()
        runner.forward(slice(0, 1), token, [0])
        best = min(best, perf_counter() - begun)
    runner.threads = before
    return best
