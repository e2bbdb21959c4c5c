"""The loops over the vocabulary as kernels: what ``maths.vocab_ops`` says, in a few launches.

Knows: which tensors the kernels take, and what does the rest. Does not know: what is drawn, or why.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...maths import bitmask, noise
from ...maths.vocab_ops import VocabOps
from ...maths.warp import Warp
from . import SAMPLES
from .kernels import sampling
from .kernels.keys import keys
from .kernels.masks import masked
from .kernels.reject import rejected

__all__ = ["INNER"]


def _fits(x: Tensor) -> bool:
    return x.dtype == torch.float32 and x.is_contiguous()


def _argmax(x: Tensor) -> Tensor:
    return sampling.argmax(x) if _fits(x) else x.argmax(-1)


def _peaks(x: Tensor) -> Tensor:
    return sampling.argmax(x if _fits(x) else x.float().contiguous(), finite=True)


def _race(p: Tensor, words: noise.Keys) -> Tensor:
    return sampling.race(p.contiguous(), words) if p.dtype == torch.float32 else noise.race(p, words)


def _masked(x: Tensor, bits: Tensor) -> Tensor:
    return masked(x, bits) if _fits(x) and bits.stride(2) == 1 else bitmask.masked(x, bits)


def _nucleus(x: Tensor, warp: Warp, words: noise.Keys | None, into: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return sampling.nucleus(
        x.contiguous(), words, into=into, temperature=warp.temperature, top_k=warp.top_k, top_p=warp.top_p,
        min_p=warp.min_p, cold=warp.cold,
    )  # fmt: skip


def _sampled(x: Tensor, warp: Warp) -> Tensor:
    return _nucleus(x, warp, None, None)[0]


def _drawn(x: Tensor, warp: Warp, words: noise.Keys, into: Tensor | None = None) -> tuple[Tensor, Tensor]:
    p, tokens = _nucleus(x, warp, words, into)
    assert tokens is not None
    return p, tokens


INNER = VocabOps(
    argmax=_argmax,
    peaks=_peaks,
    race=_race,
    masked=_masked,
    keys=keys,
    sampled=_sampled,
    drawn=_drawn,
    samples=SAMPLES,
    rejected=rejected,
)
