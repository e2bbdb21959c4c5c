"""The loops over the vocabulary on the CPU's own kernels: what ``maths.vocab_ops`` says, without torch.

Knows: which memory csrc/sampling.cpp takes. Does not know: what is drawn, or why.

What is promised: a row's numbers and its token do not depend on the batch, the draft or the number of threads, to the
last bit; so on one machine a seed gives one text, with or without a draft. Against the plain functions: the same law
and the same noise, where a float may differ in its last bits; so a token at the very edge of a nucleus may fall on
either side, and a race that is all but even may go the other way.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import Structure, c_float, c_int32, c_int64, c_void_p
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ...maths import noise
from ...maths.asks import DRAWING, OTHERS, PROCESSING, TENSORS_ONLY, Served
from ...maths.limits import NO_TOP_K
from ...maths.vocab_ops import DraftedChain, Rule, VocabOps
from ...maths.warp import Warp, temperature_of
from ...types import Mask, SamplingParams
from .library import each, kernels, pool

__all__ = ["REJECTING", "SAMPLES", "SERVED", "Knobs", "knobs_of", "vocab_ops_for"]

#: log-probabilities are read off the same logits
SERVED = Served("C++ judge", DRAWING | PROCESSING | {"token", "block", "logprobs", "structured"}, TENSORS_ONLY)
#: what hs_sample reads of a ``Warp``; the rest is done before it, or after
_READ = frozenset({"temperature", "top_p", "top_k", "min_p"})
SAMPLES = Served("C++ sampling", _READ | OTHERS, TENSORS_ONLY - OTHERS)
RULES: dict[Rule, int] = {"greedy": 0, "coupled": 1, "token": 2, "block": 3}
REJECTING = (RULES["token"], RULES["block"])  # these ask what a token was drawn from


class Knobs(Structure):  # see csrc/sampling.h
    _fields_ = [*each(c_float, "temperature min_p top_p"), ("rule", c_int32), *each(c_int64, "top_k seed base")]


def knobs_of(params: SamplingParams, rule: Rule, *, seed: int, base: int) -> Knobs:
    """A row's settings for the kernels; ``base``: tokens committed so far. Seeds are 64 bits, signed or not."""
    temperature, top_k = temperature_of(params), params.top_k or NO_TOP_K
    return Knobs(temperature, params.min_p, params.top_p, RULES[rule], top_k, seed, base)


class _Loops:
    """Rows are shared out among the process's ``threads`` threads."""

    def __init__(self, threads: int) -> None:
        self._threads = threads

    def _pool(self, many: bool) -> int | None:
        return pool(self._threads) if many and self._threads > 1 else None

    def _sample(self, x: Tensor | None, warp: Warp | None, words: noise.Keys | None, p: Tensor) -> Tensor | None:
        """Logits x [.., V] of R rows -> p, which is filled; and tokens [..] if there are words of noise."""
        size = p.shape[-1]
        count = p.numel() // max(size, 1)
        knobs: list[int | None] = [None] * 4
        rows = count
        if warp is not None:
            rows = len(warp.greedy)
            knobs = [_address(v) for v in (warp.temperature, warp.min_p, warp.top_k, warp.top_p)]
        tokens, low, high = None, None, None
        if words is not None:
            low, high = (word.contiguous() for word in words)
            tokens = torch.empty(p.shape[:-1], dtype=torch.int64)
        kernels().hs_sample(
            self._pool(count > 1),
            _address(x),
            rows,
            count // max(rows, 1),
            size,
            *knobs,
            _address(low),
            _address(high),
            p.data_ptr(),
            _address(tokens),
        )
        return tokens

    def race(self, p: Tensor, words: noise.Keys) -> Tensor:
        if p.dtype != torch.float32:
            return noise.race(p, words)
        tokens = self._sample(None, None, words, p.contiguous())
        assert tokens is not None
        return tokens

    def sampled(self, x: Tensor, warp: Warp) -> Tensor:
        p = torch.empty_like(x, memory_format=torch.contiguous_format)
        self._sample(x.contiguous(), warp, None, p)
        return p

    def drawn(self, x: Tensor, warp: Warp, words: noise.Keys, into: Tensor | None = None) -> tuple[Tensor, Tensor]:
        p = torch.empty_like(x, memory_format=torch.contiguous_format)
        tokens = self._sample(x.contiguous(), warp, words, p)
        assert tokens is not None
        return p, tokens

    def judged(self, logits: Tensor, chain: DraftedChain) -> tuple[int, int]:
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        q, count = chain.q, len(chain.tokens)
        if q is not None and (q.dtype != torch.float32 or q.stride(1) != 1):
            q = q.float().contiguous()
        found, drafted = (c_int64 * 2)(), (c_int64 * max(1, count))(*chain.tokens)
        knobs = knobs_of(chain.params, chain.rule, seed=chain.seed, base=len(chain.committed))
        kernels().hs_judge(
            self._pool(count > 0),
            ctypes.addressof(knobs),
            logits.data_ptr(),
            logits.stride(0),
            logits.shape[1],
            count,
            ctypes.addressof(drafted),
            _address(q),
            q.stride(0) if q is not None else 0,
            *_pointers(chain.masks),
            ctypes.addressof(found),
        )
        return found[0], found[1]


@cache
def vocab_ops_for(threads: int) -> VocabOps:
    """The inner loops on so many threads."""
    loops = _Loops(threads)
    return VocabOps(
        race=loops.race,
        keys=_keys,
        sampled=loops.sampled,
        drawn=loops.drawn,
        samples=SAMPLES,
        judged=loops.judged,
        processed=_processed,
        judges=SERVED,
    )


class _Past(Structure):  # see csrc/penalties.cpp
    _fields_ = [
        ("text", c_void_p),
        *each(c_int32, "prompt committed nodes"),
        *each(c_float, "repetition frequency presence"),
        *each(c_int32, "biased banned"),
        *each(c_void_p, "bias_ids bias banned_ids"),
        ("least", c_int32),
    ]


def _processed(logits: Tensor, chain: DraftedChain) -> Tensor:
    """See ``maths.vocab_ops.VocabOps``."""
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    params, endings, nodes = chain.params, chain.endings, len(chain.tokens) + 1
    line, bias = (*chain.committed, *chain.tokens), params.logit_bias or {}
    text, banned = (c_int64 * len(line))(*line), (c_int64 * len(endings))(*endings)
    bias_ids, values = (c_int64 * len(bias))(*bias), (c_float * len(bias))(*bias.values())
    past = _Past(
        text=ctypes.addressof(text),
        prompt=chain.prompt_length,
        committed=len(chain.committed),
        nodes=nodes,
        repetition=params.repetition_penalty,
        frequency=params.frequency_penalty,
        presence=params.presence_penalty,
        biased=len(bias),
        banned=len(endings),
        bias_ids=ctypes.addressof(bias_ids),
        bias=ctypes.addressof(values),
        banned_ids=ctypes.addressof(banned),
        least=params.min_tokens,
    )
    found = torch.empty(nodes, logits.shape[1])
    kernels().hs_process(ctypes.addressof(past), logits.data_ptr(), logits.stride(0), logits.shape[1], found.data_ptr())
    return found


def _pointers(masks: Sequence[Mask | None]) -> tuple[Any, int]:
    """Where the masks of a chain's nodes lie, and how many words each has."""
    words = max((len(mask) for mask in masks if mask is not None), default=0)
    if not words:
        return None, 0
    return (c_void_p * len(masks))(*(None if mask is None else mask.ctypes.data for mask in masks)), words


def _keys(seed: Tensor, base: Tensor, offset: Tensor | int, stream: Tensor | int) -> noise.Keys:
    """``noise.keys`` in one call: seed [R], base [R] or [R, N], offset a number or [R, N], stream a number or [R]."""
    parts = [part if isinstance(part, Tensor) else torch.tensor(part) for part in (seed, base, offset, stream)]
    if any(part.dim() > 1 for part in parts):
        parts = [part.unsqueeze(1) if part.dim() == 1 else part for part in parts]
    shape = (parts[0] + parts[1] + parts[2] + parts[3]).shape
    wide = [part.expand(shape).contiguous() for part in parts]
    low, high = (torch.empty(wide[0].shape, dtype=torch.int32) for _ in "ab")
    kernels().hs_keys(*(part.data_ptr() for part in wide), wide[0].numel(), low.data_ptr(), high.data_ptr())
    return low, high


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
