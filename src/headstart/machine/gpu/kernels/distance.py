"""How far draft logits are from a target's log-probabilities, row by row, without writing anything in between.

Knows: log-probabilities of some words, the sums a distillation loss is made of, and its slope.
Does not know: which loss that is, models, training.

One program a row, which is read two or three times (it stays in the cache). Plain torch writes a dozen arrays of the
size of the logits for the same sums, and as many on the way back: most of the time of a training step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["log_probs", "slope", "sums"]

_BLOCK = 4096


@triton.jit
def _spread(row, temperature, N: tl.constexpr, BLOCK: tl.constexpr):
    """The log of the sum of exp(x / heat) over a row, and the place of its largest entry."""
    top = -float("inf")
    total = 0.0
    best = 0
    for at in range(0, N, BLOCK):
        k = at + tl.arange(0, BLOCK)
        z = tl.load(row + k, mask=k < N, other=-float("inf")).to(tl.float32) / temperature
        here = tl.max(z, axis=0)
        place = at + tl.argmax(z, axis=0)
        best = tl.where(here > top, place, best)
        higher = tl.maximum(top, here)
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(z - higher), axis=0)
        top = higher
    return top + tl.log(total), best


@triton.jit
def _log_probs_kernel(
    logits, ids, heats, log_p, best, least, V: tl.constexpr, W: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr
):
    m = tl.program_id(0).to(tl.int64)
    temperature = tl.load(heats + m)
    whole, place = _spread(logits + m * V, temperature, V, BLOCK)
    tl.store(best + m, place.to(tl.int64))
    for at in range(0, W, BLOCK):
        k = at + tl.arange(0, BLOCK)
        inside = k < W
        word = k
        if WORDS:
            word = tl.load(ids + k, mask=inside, other=0)
        z = tl.load(logits + m * V + word, mask=inside, other=0.0).to(tl.float32) / temperature
        tl.store(log_p + m * W + k, tl.maximum(z - whole, least), mask=inside)


@triton.jit
def _sums_kernel(logits, log_p, heats, found, M, W: tl.constexpr, BLOCK: tl.constexpr):
    m = tl.program_id(0).to(tl.int64)
    temperature = tl.load(heats + m)
    whole, _ = _spread(logits + m * W, temperature, W, BLOCK)
    overlap = 0.0
    under = 0.0
    mass = 0.0
    forward = 0.0
    for at in range(0, W, BLOCK):
        k = at + tl.arange(0, BLOCK)
        inside = k < W
        log_q = tl.load(logits + m * W + k, mask=inside, other=-float("inf")).to(tl.float32) / temperature - whole
        target = tl.load(log_p + m * W + k, mask=inside, other=-float("inf"))
        p = tl.exp(target)
        q = tl.exp(log_q)
        overlap += tl.sum(tl.minimum(p, q), axis=0)
        under += tl.sum(tl.where(q < p, q, 0.0), axis=0)
        mass += tl.sum(p, axis=0)
        forward += tl.sum(tl.where(inside, p * (target - log_q), 0.0), axis=0)
    tl.store(found + m, whole)
    tl.store(found + M + m, overlap)
    tl.store(found + 2 * M + m, under)
    tl.store(found + 3 * M + m, mass)
    tl.store(found + 4 * M + m, forward)


@triton.jit
def _slope_kernel(logits, log_p, heats, found, weights, grad, M, W: tl.constexpr, BLOCK: tl.constexpr):
    m = tl.program_id(0).to(tl.int64)
    temperature = tl.load(heats + m)
    whole = tl.load(found + m)
    under = tl.load(found + 2 * M + m)
    mass = tl.load(found + 3 * M + m)
    on_forward = tl.load(weights) / temperature
    on_tv = tl.load(weights + 1) / temperature
    for at in range(0, W, BLOCK):
        k = at + tl.arange(0, BLOCK)
        inside = k < W
        q = tl.exp(tl.load(logits + m * W + k, mask=inside, other=-float("inf")).to(tl.float32) / temperature - whole)
        p = tl.exp(tl.load(log_p + m * W + k, mask=inside, other=-float("inf")))
        below = tl.where(q < p, 1.0, 0.0)
        slope = on_forward * (mass * q - p) - on_tv * q * (below - under)
        tl.store(grad + m * W + k, slope.to(grad.dtype.element_ty), mask=inside)


def log_probs(logits: Tensor, ids: Tensor | None, temperature: Tensor, least: float) -> tuple[Tensor, Tensor]:
    """Logits [M, V] -> log-probabilities of the words ``ids`` [M, W] float32 at least ``least``, and the argmax [M].

    ``temperature`` [M]: temperatures.
    """
    logits = logits.contiguous()
    rows, size = logits.shape
    words = size if ids is None else len(ids)
    log_p = torch.empty(rows, words, device=logits.device)
    best = torch.empty(rows, dtype=torch.int64, device=logits.device)
    _log_probs_kernel[(rows,)](
        logits, best if ids is None else ids, temperature.contiguous(), log_p, best, least, size, words,
        WORDS=ids is not None, BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip
    return log_p, best


def sums(logits: Tensor, log_p: Tensor, temperature: Tensor) -> Tensor:
    """[5, M] float32 for q = softmax(logits / heat): the log of the sum, sum of min(p, q), sum of q where q < p, sum of
    p, and KL(p || q)."""
    rows, words = logits.shape
    found = torch.empty(5, rows, device=logits.device)
    _sums_kernel[(rows,)](logits, log_p, temperature, found, rows, words, BLOCK=_BLOCK, num_warps=8)
    return found


def slope(logits: Tensor, log_p: Tensor, temperature: Tensor, found: Tensor, weights: Tensor) -> Tensor:
    """The slope [M, W] of weights[0] * sum of KL + weights[1] * sum of total variation; ``found`` is of ``sums``."""
    grad = torch.empty_like(logits)
    rows, words = logits.shape
    _slope_kernel[(rows,)](logits, log_p, temperature, found, weights, grad, rows, words, BLOCK=_BLOCK, num_warps=8)
    return grad
