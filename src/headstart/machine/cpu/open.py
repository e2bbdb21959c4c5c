"""Which models run on the CPU's kernels, in which kind of weights, with how many threads.

Knows: what was asked for, what this machine can do, and what it measured. Does not know: kernels, engines.

Rounding a target changes its numbers, so it happens only on request, or to the embedded model, whose own file has these
very 4-bit weights. A draft may be rounded at will: the target checks its guesses.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import replace

import torch

from ...errors import HeadstartWarning, InvalidParameter, ModelRefused
from ..load.loading import Capability, Loaded
from ..quantize import QUANTIZATIONS
from .build import why_not as no_kernels
from .cores import processors
from .formats import KINDS
from .library import instructions
from .packed import Packed, pack_model, why_not
from .runner import CpuRunner

__all__ = [
    "can_round_draft",
    "check_quantization",
    "described",
    "fall_back",
    "open_packed",
    "reason_against",
]

MOST_THREADS = 16  # more do not help: memory is the limit


def check_quantization(name: str, value: object) -> None:
    if value not in (None, "auto", *QUANTIZATIONS):
        *most, last = map(repr, QUANTIZATIONS)
        known = f"must be 'auto', None ('none' on the command line), {', '.join(most)} or {last}, not {value!r}"
        if isinstance(value, str) and value.upper().startswith(("Q", "F16", "BF16")):
            known += "; with 'auto' a GGUF file runs with its own bits"
        raise InvalidParameter(name, known)


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
    loaded: Loaded,
    kind: str,
    *,
    rows: int,
    max_len: int,
    margin: int,
    probe: bool,
    threads: int | None = None,
    packed: Packed | None = None,
) -> CpuRunner:
    """The model on the kernels, rounded to ``kind``. ``packed``: its weights, where they lie ready. ``threads``: how
    many are used; None: never more than torch may use, or than there are cores for, chosen by measuring."""
    reason = reason_against(loaded) if packed is None else no_kernels()
    if packed is None and kind not in KINDS:
        reason = f"the CPU kernels have no {kind}"
    if reason is not None:
        raise ModelRefused(f"{loaded.report.architecture} cannot be quantized here: {reason}; use quantization=None")
    packed = packed or pack_model(loaded.model, kind)
    runner = CpuRunner(packed, loaded.model, rows=rows, max_len=max_len, margin=margin, probe=probe)
    if threads is None:
        runner.choose_threads(min(torch.get_num_threads(), MOST_THREADS, processors()))
    else:
        runner.threads = threads
    return runner


def described(report: Capability, packed: Packed, *, own: bool = False, wide: bool = False) -> Capability:
    """The capability report of a model that runs on the kernels. ``own``: with its file's own bits, which it names.
    ``wide``: float32 was asked for by name, which floats of fewer bits are, too."""
    kind = packed.plan.kind
    dtype = report.dtype if own and not packed.plan.exact else kind
    if packed.plan.exact:
        kept = ", as they are; nothing is rounded" if own else ""
        if wide and kind != "float32":
            dtype, kept = "float32", ", as they are: the same numbers as in float32; nothing is rounded"
        note = f"weights are {kind}{kept}: activations, keys and values are float32"
    elif own:
        note = (
            "activations are rounded to 8 bits for each token; speculation is lossless with respect to this model; "
            "dtype='float32' spells the weights out and rounds nothing"
        )
    else:
        note = (
            f"weights are {kind} in groups of 32 (embedding and output head int8), activations 8 bits a token; "
            "speculation is lossless with respect to this rounded model"
        )
    return replace(
        report,
        dtype=dtype,
        device="cpu",
        bytes=packed.bytes,
        notes=(*report.notes, note),
        kernels=f"C++ ({instructions()})",
    )
