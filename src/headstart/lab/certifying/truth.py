"""What the target says, worked out anew: plain forward passes, and a request's processing in float64.

Knows: how to run the target over a whole text at once, from nothing, and what a request's settings make of its logits;
both written apart from the engine, its kernels and ``maths.distribution``. Does not know: drafts, rounds,
engines' answers.

What it shares with what it checks: the weights, the grammar library's masks, and the noise that a seed stands for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ...engine.engine import Engine
from ...machine.cpu.runner import CpuRunner
from ...machine.load.loading import Loaded
from ...maths import noise
from ...types import Mask, SamplingParams

__all__ = ["NARROW", "Forwards", "Law", "Truth", "clocks", "cuts", "processed", "target_law", "truth_of"]

Floats = NDArray[np.float64]

EDGE = 2e-4  # relative
SURE = 6.0  # standard deviations
LIKELIEST = 50  # tokens of a place, by which its rounding is measured
USUAL = 16.0  # logits; what they are made of is rounded as if they were no smaller than this
_PIECE = 1 << 14  # tokens
_MARGIN = 64  # slots of the reference's own row, past the longest text
_SPACINGS = {torch.bfloat16: (2.0**-8, 2.0), torch.float16: (2.0**-11, 4.0), torch.float32: (2.0**-24, 256.0)}


class Forwards(NamedTuple):
    """The shape of forwards."""

    rows: int
    width: int  # tokens of each


NARROW = Forwards(1, 1)


class Kernels(Protocol):
    """The target by the engine's own kernels."""

    def __call__(self, text: Sequence[int], keep: int, shape: Forwards = NARROW, /) -> torch.Tensor:
        """Logits [keep, V] of a text's last tokens, in forwards of this shape."""


@dataclass(frozen=True)
class Truth:
    """The target by plain forward passes."""

    name: str  # for people: what ran
    exact: bool  # the engine's logits are to be the same bits as these
    spacing: float  # of the target's numbers, relative; and how many of them still count as a tie
    spacings: float
    size: int  # ids that may be drawn
    rounding: float  # measured: how far the engine's logits are from these, and still as good as equal
    run: Callable[[Sequence[int], int], torch.Tensor]  # a text, and how many: logits [n, V] of its last tokens
    kernels: Kernels | None = None  # the same by the engine's own kernels, where these are not exact
    shapes: tuple[Forwards, ...] = (NARROW,)  # of forwards that its rounds run

    def after(self, text: Sequence[int], start: int) -> NDArray[np.float32]:
        """Logits for the tokens from ``start`` on: [T - start + 1, size]; the last are of what follows the text."""
        found: NDArray[np.float32] = self.run(text, len(text) - max(start - 1, 0))[:, : self.size].numpy()
        return found

    def by_kernels(self, text: Sequence[int], start: int, shape: Forwards = NARROW) -> NDArray[np.float32]:
        """What ``after`` says, by the engine's own kernels in such forwards. Only where these are not exact."""
        assert self.kernels is not None
        found: NDArray[np.float32] = self.kernels(text, len(text) - max(start - 1, 0), shape)[:, : self.size].numpy()
        return found

    def tie(self, row: Floats) -> float:
        """How far apart two logits of these may be and still be as good as equal: rounding moves each so far."""
        if self.exact:
            return 0.0
        largest = float(np.abs(row[np.isfinite(row)]).max(initial=USUAL))
        usual = self.spacings * self.spacing * 2.0 ** math.ceil(math.log2(largest))
        return min(max(usual, self.rounding), 2 * usual)

    def rounding_at(self, text: Sequence[int], start: int, at: int, reference: NDArray[np.float32]) -> float:
        """How far apart rounding moves two logits of one place, by what plain forwards of all shapes make of it: at
        some places most of what a model computes cancels out, and rounding shows several times as much there."""
        best = np.argsort(reference)[-LIKELIEST:]
        found = [self.by_kernels(text, start, shape)[at][best] - reference[best] for shape in self.shapes]
        return SURE * math.sqrt(2.0) * math.sqrt(np.mean([np.var(each.astype(np.float64)) for each in found]))


def truth_of(engine: Engine, loaded: Loaded, longest: int, shapes: Sequence[Forwards] = (NARROW,)) -> Truth:
    """Plain passes of an engine's target: through the model's own modules where they are there, else through its
    kernels, the whole text in one forward over keys that were emptied before. ``shapes``: of forwards that the engine's
    rounds run, the narrowest first."""
    runner: Any = engine.parts.runner
    size, weights = engine.parts.vocab_size, engine.parts.runner.packed
    if weights is not None:
        apart = CpuRunner(weights, loaded.model, rows=1, max_len=longest, margin=_MARGIN, probe=False)
        apart.threads = max(1, runner.threads)

        def packed(text: Sequence[int], keep: int) -> torch.Tensor:
            apart.slab.reset()
            return apart.forward(slice(0, 1), torch.tensor([list(text)]), [0], keep=keep)[0]

        kind = weights.plan.kind
        name = f"one pass of the {kind} kernels over the whole text, in a row of its own that was emptied before"
        return Truth(name, True, 0.0, 0.0, size, 0.0, packed)
    spacing, spacings = _SPACINGS.get(runner.dtype, (2.0**-24, 256.0))
    kernels, known = _kernels(engine), tuple(shapes)
    if _whole(loaded):

        def modules(text: Sequence[int], keep: int) -> torch.Tensor:
            with torch.inference_mode():
                ids = torch.tensor([list(text)], device=runner.device)
                return loaded.model(input_ids=ids, use_cache=False).logits[0, -keep:].float().cpu()  # type: ignore[no-any-return]

        name = "one pass of Hugging Face's own modules over the whole text, without a cache"
        return Truth(name, False, spacing, spacings, size, _rounding(size, modules, kernels), modules, kernels, known)

    def emptied(text: Sequence[int], keep: int) -> torch.Tensor:
        engine.cold()
        ids = torch.tensor([list(text)], device=runner.device)
        found: torch.Tensor = runner.forward(slice(0, 1), ids, [0], keep=keep)[0].float().cpu()
        engine.cold()
        return found

    name = "one pass of the kernels over the whole text, over emptied keys"
    return Truth(name, False, spacing, spacings, size, _rounding(size, emptied, kernels), emptied, kernels, known)


def _kernels(engine: Engine) -> Kernels:
    """Logits of a text's last tokens by the engine's kernels, in forwards of some shape: one token at a time, as narrow
    as forwards get, or as wide as a round that verifies drafts, and with as many rows, all of the same text. Over fresh
    keys, without drafts: what goes wrong in rounds is not in it."""

    @lru_cache(8)  # of one text its places are asked about one after another
    def of(text: tuple[int, ...], keep: int, shape: Forwards) -> torch.Tensor:
        runner, start = engine.parts.runner, len(text) - keep
        engine.cold()
        ids = torch.tensor([list(text)] * shape.rows, device=runner.device)
        forward, rows = _forward(engine), slice(0, shape.rows)
        with torch.inference_mode():
            if start:
                runner.forward(rows, ids[:, :start], [0] * shape.rows, keep=1)
            parts = ((ids[:, at : at + shape.width], at) for at in range(start, len(text), shape.width))
            found = torch.cat([forward(*part)[0].float().cpu() for part in parts])
        engine.cold()
        return found

    def run(text: Sequence[int], keep: int, shape: Forwards = NARROW) -> torch.Tensor:
        return of(tuple(text), keep, shape)

    return run


def _forward(engine: Engine) -> Callable[[torch.Tensor, int], torch.Tensor]:
    """The forward of the engine's rounds: ids [R, N] in rows 0 .. R-1, each behind so many keys -> logits [R, N, V]."""
    runner, captured = engine.parts.runner, engine.parts.captured
    device = runner.on_device() if captured is not None else None
    if device is None:
        return lambda ids, at: runner.forward(slice(0, len(ids)), ids, [at] * len(ids), keep=ids.shape[1])
    bound = device.slab.capacity
    return lambda ids, at: device.device_forward(
        ids, torch.tensor([at] * len(ids), device=ids.device), ids.shape[1], bound
    )


def _rounding(size: int, *ways: Callable[[Sequence[int], int], torch.Tensor]) -> float:
    """By how much two ways to work them out differ about one logit over another, nearly always."""
    text = [(11 + 37 * i) % size for i in range(12)]
    with torch.inference_mode():
        one, other = (run(text, len(text)) for run in ways)
    difference = (one - other)[:, :size]
    difference = difference - difference.mean(1, keepdim=True)
    return SURE * math.sqrt(2.0) * float(difference.square().mean().sqrt())


def _whole(loaded: Loaded) -> bool:
    """Can its own modules run, with the numbers that are served? A model that was quantized for a GPU has others there,
    or has let its weights go."""
    kept, weights = getattr(torch, loaded.report.dtype, None), list(loaded.model.parameters())
    floats = isinstance(kept, torch.dtype) and kept.is_floating_point
    return floats and bool(weights) and all(p.numel() and p.device.type != "meta" for p in weights)


# -- a request's settings, in float64 -------------------------------------------------------------------------------


def processed(
    row: NDArray[Any],
    params: SamplingParams,
    prompt: Iterable[int],
    output: Sequence[int],
    endings: Collection[int] = (),
    mask: Mask | None = None,
) -> Floats:
    """Logits [V] of what follows ``output``, with bias, min_tokens, penalties and a grammar's mask on them."""
    x: Floats = row.astype(np.float64)
    for token, bias in (params.logit_bias or {}).items():
        if token < len(x):
            x[token] += bias
    if len(output) < params.min_tokens:
        for token in endings:
            if token < len(x):
                x[token] = -np.inf
    if params.repetition_penalty != 1.0:
        for token in {*prompt, *output}:
            if token < len(x):
                x[token] = (
                    x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
                )
    if params.frequency_penalty or params.presence_penalty:
        for token in set(output):
            x[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    if mask is not None:
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        allowed = np.zeros(len(x), dtype=bool)
        allowed[: min(len(bits), len(x))] = bits[: len(x)]
        x[~allowed] = -np.inf
    return x


@dataclass(frozen=True)
class Law:
    """The distribution that a token is drawn from."""

    p: Floats  # [V]
    before: Floats  # [V] the same before truncation
    floor: float  # the least of ``before`` that stayed

    def possible(self, token: int) -> bool:
        """Could it be drawn? At the very edge of a truncation, float32 may have kept what float64 has not."""
        return bool(self.before[token] > 0 and self.before[token] >= self.floor * (1 - EDGE))


def target_law(x: Floats, params: SamplingParams) -> Law:
    """Processed logits -> temperature, min-p, top-k, top-p, by sorting."""
    p = np.exp((x - x.max()) / params.temperature)
    p /= p.sum()
    floor = params.min_p * p.max()
    size = len(p)
    if params.top_k and params.top_k < size:
        floor = max(floor, np.partition(p, size - params.top_k)[size - params.top_k])
    if params.top_p < 1:
        kept = np.sort(p[p >= floor])[::-1]
        if params.top_k:
            kept = kept[: params.top_k]
        sums = np.cumsum(kept)
        floor = max(floor, kept[min(int(np.searchsorted(sums, params.top_p * sums[-1])), len(kept) - 1)])
    left = np.where(p >= floor, p, 0.0) if floor > 0 else p
    return Law(left / left.sum(), p, float(floor))


def cuts(p: Floats, params: SamplingParams, give: float) -> tuple[float, float]:
    """Where min-p, top-k and top-p may cut p [V] off, if rounding moves any two logits apart by up to ``give``: tokens
    under the first probability are never kept, those from the second on always."""
    moved = math.exp(give)
    least = most = 0.0
    if params.min_p:
        floor = params.min_p * float(p.max())
        least, most = floor / moved, floor * moved
    if params.top_k and params.top_k < len(p):
        at = len(p) - params.top_k
        next_one, last = np.partition(p, (at - 1, at))[at - 1 : at + 1]  # cut off, and kept
        least, most = max(least, last / moved), max(most, next_one * moved)
    if params.top_p < 1:
        least = max(least, _nucleus(p[p >= least], params.top_p, moved)[0] / moved)
        if np.any(p >= most):
            most = max(most, _nucleus(p[p >= most], params.top_p, 1 / moved)[1] * moved)
    return least, most


def _nucleus(p: Floats, share: float, moved: float) -> tuple[float, float]:
    """The last token that top-p keeps of these, and the first that it does not (0: there is none), where the odds of
    what is kept have to be ``moved`` times as large."""
    kept = np.sort(p)[::-1]
    odds = share / (1 - share) * moved
    at = min(int(np.searchsorted(np.cumsum(kept) / kept.sum(), odds / (1 + odds))), len(kept) - 1)
    return float(kept[at]), float(kept[at + 1]) if at + 1 < len(kept) else 0.0


def clocks(size: int, seed: int, position: int, tokens: NDArray[np.int64]) -> Floats:
    """The noise of some tokens at ``position`` (tokens that stand before it). p / noise is a token's score in the race
    for that position, and the largest wins. A piece at a time, as torch wakes other threads for more: on a busy machine
    those are waited for."""
    keys = noise.keys(noise.seeds([seed], "cpu"), torch.tensor([position]), 0, noise.COUPLED)
    pieces = [torch.from_numpy(tokens[i : i + _PIECE]) for i in range(0, len(tokens), _PIECE)]
    return np.concatenate([noise.exponential_of(keys, piece, size)[0].numpy() for piece in pieces]).astype(np.float64)
