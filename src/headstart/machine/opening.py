"""A model's name and the wish for rounded weights -> a runner.

Knows: which of the runners suits a model, and when weights are rounded. Does not know: drafters, engines.

Rounding changes a target's numbers, so "auto" rounds only the embedded model, whose own file has these very 4-bit
weights. A draft's guesses are checked by the target, so there "auto" rounds whatever the CPU's kernels can run.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .cpu.opening import check_quantization, described, open_packed, reason_against
from .cpu.packed import Packed
from .cpu.runner import CpuRunner
from .embedded import PACKED_KIND, embedded_outline, embedded_packed, is_embedded
from .fused import open_runner
from .loading import Loaded, load
from .runner import EagerRunner

__all__ = ["Opened", "Quantization", "Runner", "load_draft", "load_target", "runner_for"]

log = logging.getLogger(__name__)

Quantization: TypeAlias = Literal["auto", "int8", "int4"] | None
Runner: TypeAlias = EagerRunner | CpuRunner


@dataclass(frozen=True)
class Opened:
    """A loaded model, and how its weights are to be rounded (None: not at all)."""

    loaded: Loaded
    quantization: str | None = None
    packed: Packed | None = None  # where they lie ready


def load_target(
    source: str | Path | PreTrainedModel,
    quantization: Quantization,
    *,
    tokenizer: PreTrainedTokenizerBase | None,
    dtype: str | torch.dtype,
    revision: str | None,
    **placement: Any,
) -> Opened:
    """Load a target. A ``dtype`` other than "auto" asks for that, so "auto" then rounds nothing."""
    check_quantization("quantization", quantization)
    plain = quantization in ("auto", PACKED_KIND) and dtype == "auto" and tokenizer is None
    if plain and is_embedded(source) and _on_cpu(placement):
        assert isinstance(source, (str, Path))
        packed = embedded_packed(Path(source).expanduser())
        if packed is not None:
            return Opened(embedded_outline(Path(source).expanduser()), PACKED_KIND, packed)
        log.info("the embedded model runs in float32: its 4-bit weights or a C++ compiler are missing")
    loaded = load(source, tokenizer=tokenizer, dtype=dtype, revision=revision, **placement)
    return Opened(loaded, None if quantization == "auto" else quantization)


def load_draft(
    source: str | Path | PreTrainedModel, quantization: Quantization, *, dtype: str | torch.dtype, **placement: Any
) -> Opened:
    """Load a draft model."""
    check_quantization("draft_quantization", quantization)
    loaded = load(source, dtype=dtype, **placement)
    if quantization == "auto":
        quantization = "int8" if reason_against(loaded) is None else None
    return Opened(loaded, quantization)


def runner_for(
    opened: Opened, *, rows: int, max_len: int, margin: int, probe: bool = True, draft: bool = False
) -> tuple[Runner, Loaded]:
    """The fastest runner for the model here, and the model with its report brought up to date."""
    loaded = opened.loaded
    if opened.quantization is not None:
        runner = open_packed(
            loaded,
            opened.quantization,
            rows=rows,
            max_len=max_len,
            margin=margin,
            probe=probe,
            packed=opened.packed,
        )
        return runner, Loaded(loaded.model, loaded.tokenizer, described(loaded.report, runner.packed))
    plain, reason = open_runner(loaded.model, rows=rows, max_len=max_len, margin=margin, probe=probe, draft=draft)
    if reason is not None:
        log.info("%s runs on its own modules: %s", loaded.report.architecture, reason)
    return plain, loaded


def _on_cpu(placement: dict[str, Any]) -> bool:
    device = placement.get("device")
    if placement.get("device_map") is not None:
        return False
    return torch.device(device).type == "cpu" if device is not None else not torch.cuda.is_available()
