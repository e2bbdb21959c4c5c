"""Llama-shaped models lowered to fused kernels.

Knows: whether this machine can run the kernels, and what they do of a model and of sampling.
Importing this folder needs neither a GPU nor Triton; ``kernels`` and what uses them do, and are imported where a model
is opened.
"""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING, Any

import torch

from ...maths.asks import OTHERS, TENSORS_ONLY, Served
from ...maths.vocab_ops import PLAIN, VocabOps
from ..lower import TRITON_PARTS, parts_of
from ..lower import why_not as why_not_lowered

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .model import FusedModel
    from .runner import FusedRunner

__all__ = ["available", "fuse", "open_runner", "reason_against", "vocab_ops_of", "why_not"]

#: what ``kernels.sampling`` reads of a ``Warp``; the rest is done before it, or after
_READ = frozenset({"temperature", "top_p", "top_k", "min_p"})
SAMPLES = Served("Triton sampling", _READ | OTHERS, TENSORS_ONLY - OTHERS)


def available() -> str | None:
    """None if fused kernels can run here, else the reason why not."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None  # the kernels run on the CPU, slowly: for tests
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    if torch.cuda.get_device_capability()[0] < 8:
        return "the GPU is older than compute capability 8.0"
    return None


def fuse(
    model: PreTrainedModel, *, rows: int, capacity: int, quantization: str | None = None, **kind: bool
) -> FusedModel:
    """Lower the model, with its own key-value buffers. Raises ValueError with the reason if it cannot be done.

    ``kind``: ``draft`` and ``invariant`` of ``FusedModel``.
    """
    reason = available() or why_not(model, quantization)
    if reason is not None:
        raise ValueError(f"{type(model).__name__} stays on its own modules: {reason}")
    from ..lower import lower
    from .model import FusedModel

    weights = lower(model, quantization)
    return FusedModel(weights, weights.buffers(rows, capacity), **kind)


def vocab_ops_of(device: torch.device) -> VocabOps:
    """The fastest loops over the vocabulary for tensors on this device."""
    if device.type != "cuda" or available() is not None:
        return PLAIN
    from .sampling import INNER

    return INNER


def why_not(model: PreTrainedModel, quantization: str | None = None) -> str | None:
    """None if the kernels do all that the model does, with its weights rounded if so wished; else why not."""
    reason = why_not_lowered(model, quantization)
    if reason is None and (missing := parts_of(model) - TRITON_PARTS):
        return f"it {' and '.join(sorted(missing))}, which the GPU kernels do not"
    return reason


def reason_against(model: PreTrainedModel, quantization: str | None = None) -> str | None:
    """``why_not``, for the model where it is."""
    reason = available() if model.device.type == "cuda" else "the model is not on a GPU"
    return reason or why_not(model, quantization)


def open_runner(model: PreTrainedModel, **options: Any) -> FusedRunner:
    """The model on fused kernels; options as for ``FusedRunner``. Ask ``reason_against`` first."""
    from .runner import FusedRunner

    return FusedRunner(model, **options)
