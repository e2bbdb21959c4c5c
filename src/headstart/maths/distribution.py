"""Logits -> the distribution a token is drawn from.

Knows: the order of processing, which is vLLM's: vocabulary mask, logit_bias, min_tokens, penalties (repetition, then
frequency and presence), temperature, min-p, top-k, top-p, softmax. One code path for the target and the draft.
Does not know: where logits come from, or what is drawn.

Everything is worked out for R rows and N nodes at once; at a node of a draft, penalties and min_tokens see that node's
own drafted ancestors. Work is in float32 (float64 if float64 is given), and a feature costs nothing while no row of
the batch asks for it. NaN is never hidden: a node whose logits hold NaN, or nothing finite, gets probabilities that
do not sum to 1 (NaN), and -1 for an argmax. Nothing here waits for a GPU.

min-p, top-k and top-p each keep the tokens whose probability is not under some floor, so tokens with equal
probability stay or go together, and no sort order decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..types import SamplingParams
from .argmax import argmax
from .tree import Topology

__all__ = ["History", "Warp", "argmaxes", "probabilities", "processed"]

_PARTIAL = 512  # a nucleus is seldom larger, and finding the 512 largest costs half of a full sort
_COLD = 0.01  # below this temperature the largest logit is subtracted first, so that the quotient cannot overflow


@dataclass(frozen=True)
class Warp:
    """Sampling parameters of R rows as tensors on the device; None where no row uses the feature."""

    vocab_size: int  # ids from here on are padding and never get mass
    greedy: Tensor  # [R] bool
    all_greedy: bool
    any_greedy: bool
    needs_history: bool  # some row uses a penalty
    temperature: Tensor | None  # [R]; 1 for greedy rows
    cold: bool  # some temperature is close to 0
    min_p: Tensor | None  # [R]
    top_k: Tensor | None  # [R] int64; a huge number for rows without
    most_k: int  # the largest top_k in use
    top_p: Tensor | None  # [R]
    bias: tuple[Tensor, Tensor] | None  # [R, B] token ids, and [R, B] what to add to their logits
    early_eos: tuple[Tensor, Tensor, Tensor] | None  # [R] min_tokens, [R, E] token ids, [R, E] bool: not padding
    repetition: Tensor | None  # [R]
    frequency: Tensor | None  # [R]
    presence: Tensor | None  # [R]
    source: tuple[tuple[SamplingParams, tuple[int, ...]], ...]  # parameters and eos ids, row by row
    dtype: torch.dtype

    @staticmethod
    def of(
        params: Sequence[SamplingParams],
        *,
        vocab_size: int,
        eos: Sequence[Sequence[int]],
        device: torch.device | str,
        dtype: torch.dtype = torch.float32,
    ) -> Warp:
        """``eos[r]``: the ids row r may not draw until its min_tokens are out. ``dtype``: float64 for exact tests."""

        def column(values: list[float], unused: float) -> Tensor | None:
            used = any(value != unused for value in values)
            return torch.tensor(values, dtype=dtype, device=device) if used else None

        # Greedy rows need none of the warpers: none of them can move the argmax.
        warm = [1.0 if p.greedy else p.temperature for p in params]
        ks = [0 if p.greedy or p.top_k >= vocab_size else p.top_k for p in params]
        repetition = column([p.repetition_penalty for p in params], 1.0)
        frequency = column([p.frequency_penalty for p in params], 0.0)
        presence = column([p.presence_penalty for p in params], 0.0)
        return Warp(
            vocab_size=vocab_size,
            greedy=torch.tensor([p.greedy for p in params], dtype=torch.bool, device=device),
            all_greedy=all(p.greedy for p in params),
            any_greedy=any(p.greedy for p in params),
            needs_history=not (repetition is None and frequency is None and presence is None),
            temperature=column([max(t, 1e-30) for t in warm], 1.0),
            cold=min(warm, default=1.0) < _COLD,
            min_p=column([0.0 if p.greedy else p.min_p for p in params], 0.0),
            top_k=torch.tensor([k or 2**62 for k in ks], device=device) if any(ks) else None,
            most_k=max(ks, default=0),
            top_p=column([1.0 if p.greedy else p.top_p for p in params], 1.0),
            bias=_bias(params, vocab_size, device, dtype),
            early_eos=_early_eos(params, eos, vocab_size, device),
            repetition=repetition,
            frequency=frequency,
            presence=presence,
            source=tuple((p, tuple(ids)) for p, ids in zip(params, eos, strict=True)),
            dtype=dtype,
        )

    def select(self, rows: Sequence[int] | Tensor) -> Warp:
        """These rows only, in this order. Who shares a batch is decided on the host, so it is made anew there."""
        chosen = [self.source[row] for row in (rows.tolist() if isinstance(rows, Tensor) else rows)]
        return Warp.of(
            [params for params, _ in chosen],
            vocab_size=self.vocab_size,
            eos=[ids for _, ids in chosen],
            device=self.greedy.device,
            dtype=self.dtype,
        )


def _padded(rows: Sequence[Sequence[float]], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Lists of different lengths as one tensor, zeros at the end."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], dtype=dtype, device=device)


def _bias(
    params: Sequence[SamplingParams], vocab_size: int, device: torch.device | str, dtype: torch.dtype
) -> tuple[Tensor, Tensor] | None:
    pairs = [{i: v for i, v in (p.logit_bias or {}).items() if i < vocab_size} for p in params]
    if not any(pairs):
        return None
    ids = _padded([list(row) for row in pairs], torch.int64, device)
    return ids, _padded([list(row.values()) for row in pairs], dtype, device)


def _early_eos(
    params: Sequence[SamplingParams], eos: Sequence[Sequence[int]], vocab_size: int, device: torch.device | str
) -> tuple[Tensor, Tensor, Tensor] | None:
    ends = [[i for i in ids if i < vocab_size] if p.min_tokens else [] for p, ids in zip(params, eos, strict=True)]
    if not any(ends):
        return None
    least = torch.tensor([p.min_tokens for p in params], dtype=torch.int64, device=device)
    real = _padded([[1] * len(row) for row in ends], torch.bool, device)
    return least, _padded(ends, torch.int64, device), real


@dataclass(frozen=True)
class History:
    """What penalties need to know of the past."""

    prompt: Tensor  # [R, V] bool: the token occurs in the prompt
    counts: Tensor  # [R, V] float32: how often it occurs in the committed output

    @staticmethod
    def of(
        prompts: Sequence[Sequence[int]],
        outputs: Sequence[Sequence[int]],
        V: int,
        device: torch.device | str,
    ) -> History:
        prompt = np.zeros((len(prompts), V), dtype=np.bool_)
        counts = np.zeros((len(prompts), V), dtype=np.float32)
        for row, (before, after) in enumerate(zip(prompts, outputs, strict=True)):
            # Ids a smaller draft vocabulary lacks can have no logit there either.
            seen, out = np.asarray(before, dtype=np.int64), np.asarray(after, dtype=np.int64)
            prompt[row, seen[seen < V]] = True
            np.add.at(counts[row], out[out < V], 1.0)
        return History(torch.from_numpy(prompt).to(device), torch.from_numpy(counts).to(device))

    def add(self, tokens: Tensor) -> History:
        """Count one more output token for each row (tokens [R]), in place; returns itself."""
        self.counts.scatter_add_(1, tokens.unsqueeze(1), torch.ones_like(self.counts[:, :1]))
        return self

    def copy(self) -> History:
        """A draft loop adds its guesses to a copy, so that only accepted tokens count afterwards."""
        return History(self.prompt, self.counts.clone())


def _like(values: Tensor, x: Tensor) -> Tensor:
    """values [R] in x's dtype, shaped to broadcast over x [R, .., ..]."""
    return values.to(x.dtype).view(-1, *[1] * (x.dim() - 1))


def _penalise(x: Tensor, warp: Warp, prompt: Tensor, counts: Tensor) -> Tensor:
    """Logits x [R, N, M] of tokens seen ``counts`` times in the output; prompt, counts broadcast over x."""
    counts = counts.to(x.dtype)
    out = counts > 0
    if warp.repetition is not None:
        # x / factor where x > 0 and x * factor elsewhere, in two halves: comparing is slow on a CPU.
        factor = torch.where(prompt | out, _like(warp.repetition, x), 1.0)
        x = (x.clamp_min(0) / factor).add_(x.clamp_max(0) * factor)
    if warp.frequency is not None:
        x = x - counts * _like(warp.frequency, x)
    if warp.presence is not None:
        x = x - out * _like(warp.presence, x)
    return x


def _penalties(x: Tensor, warp: Warp, history: History, tokens: Tensor | None, topology: Topology | None) -> Tensor:
    """Penalties for every node: the committed history for all tokens at once, then each node's drafted ancestors."""
    result = _penalise(x, warp, history.prompt.unsqueeze(1), history.counts.unsqueeze(1))
    if x.shape[1] == 1:
        return result
    if tokens is None or topology is None:
        raise ValueError("penalties at drafted nodes need their tokens and their topology")
    # Only the tokens of this row's nodes can have been drafted: those N logits of each node are worked out anew, with
    # the node's own count. Writing the ones that are not its ancestors too changes nothing, as their count is right.
    index = tokens.unsqueeze(1).expand(-1, x.shape[1], -1)  # [R, N, N]: node i, token of node j
    line = topology.ancestors.clone()
    line[:, :, 0] = False  # the root is committed, so the history has it
    same = tokens.unsqueeze(2) == tokens.unsqueeze(1)  # [R, N, N]
    drafted = line.to(x.dtype) @ same.to(x.dtype)  # [R, N, N]: how often node i's ancestors hold token j
    known = history.counts.gather(1, tokens).unsqueeze(1).to(x.dtype)  # [R, 1, N]
    prompt = history.prompt.gather(1, tokens).unsqueeze(1)
    return result.scatter(-1, index, _penalise(x.gather(-1, index), warp, prompt, known + drafted))


def processed(
    logits: Tensor,
    warp: Warp,
    *,
    outputs: Tensor,
    tokens: Tensor | None = None,
    topology: Topology | None = None,
    history: History | None = None,
    depth: int = 0,
) -> Tensor:
    """Everything before the temperature: logits [R, N, V] -> [R, N, V]; maybe the caller's own tensor, so only read it.

    outputs [R]: committed output tokens. tokens [R, N]: the nodes' tokens, column 0 the root (already in the history).
    Without a topology the N nodes are a chain that begins ``depth`` drafted tokens below the root, and the history
    must already count those (a draft loop: N = 1, ``history.add`` after each step).
    """
    x = logits if logits.dtype == torch.float64 else logits.to(torch.float32)
    rows, nodes, size = x.shape
    padded = size > warp.vocab_size
    if x is logits and (padded or warp.bias is not None or warp.early_eos is not None):
        x = x.clone()  # the caller's logits stay as they are
    if padded:
        x[..., warp.vocab_size :] = -torch.inf
    if warp.bias is not None:
        ids, values = warp.bias
        x.scatter_add_(2, ids.unsqueeze(1).expand(-1, nodes, -1), values.to(x.dtype).unsqueeze(1).expand(-1, nodes, -1))
    if warp.early_eos is not None:
        least, ids, real = warp.early_eos
        below = (
            torch.arange(nodes, device=x.device).add_(depth).expand(rows, -1) if topology is None else topology.depth
        )
        early = outputs.unsqueeze(1) + below < least.unsqueeze(1)  # [R, N]
        banned = torch.where(early.unsqueeze(2) & real.unsqueeze(1), -torch.inf, 0.0).to(x.dtype)
        x.scatter_add_(2, ids.unsqueeze(1).expand(-1, nodes, -1), banned)
    if warp.needs_history:
        if history is None:
            raise ValueError("a row uses a penalty, so the history is needed")
        x = _penalties(x, warp, history, tokens, topology)
    return x


def _largest(p: Tensor, count: int) -> Tensor:
    """The ``count`` largest values in falling order: p [R, N, V] -> [R, N, count]."""
    size = p.shape[-1]
    if p.device.type != "cpu":
        return p.topk(count, -1).values if count < size else p.sort(-1, descending=True).values
    # NumPy's vectorised sort is ten to twenty times faster than torch's; NaN comes first in both.
    values = p.detach().numpy()
    if count < size:
        values = np.partition(values, size - count, -1)[..., size - count :]
    return torch.from_numpy(np.ascontiguousarray(np.sort(values, -1)[..., ::-1]))


def _nucleus_floor(p: Tensor, warp: Warp, top: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest probability that top-k and then top-p keep [R, N, 1], and whether ``top`` was enough to tell.

    p [R, N, V] sums to anything; top: its largest values in falling order [R, N, C], with C >= every top_k.
    """
    sums = top.cumsum(-1)
    total = p.sum(-1, keepdim=True)
    last = torch.full_like(total, top.shape[-1] - 1, dtype=torch.int64)  # the last of ``top`` that stays
    bounded = torch.zeros_like(total, dtype=torch.bool)
    if warp.top_k is not None:
        k = warp.top_k.view(-1, 1, 1)
        bounded = (k <= top.shape[-1]).expand_as(total)
        last = torch.where(bounded, k - 1, last)
        total = torch.where(bounded, sums.gather(-1, last), total)
    enough = bounded
    if warp.top_p is not None:
        share = _like(warp.top_p, p)
        before = sums - top
        inside = (before < share * total).sum(-1, keepdim=True) - 1
        cut = (share < 1).expand_as(total)
        last = torch.where(cut, torch.minimum(last, inside.clamp_min(0)), last)
        enough = torch.where(cut, bounded | (sums[..., -1:] >= share * total), bounded)
        bounded = bounded | cut
    return torch.where(bounded, top.gather(-1, last), 0.0), enough | ~bounded


def _truncate(p: Tensor, warp: Warp) -> Tensor:
    """min-p, top-k and top-p on probabilities p [R, N, V]; changes and returns p. NaN stays: NaN * 0 is NaN."""
    if warp.min_p is not None:
        p.mul_(p.clone().ge_(_like(warp.min_p, p) * p.amax(-1, keepdim=True)))  # ge_ is the comparison that is fast
    if warp.top_k is not None or warp.top_p is not None:
        size = p.shape[-1]
        count = warp.most_k if warp.top_p is None else max(warp.most_k, _PARTIAL)
        if warp.top_p is not None and p.device.type != "cpu":
            count = size  # asking whether fewer were enough would mean waiting for the device
        floor, enough = _nucleus_floor(p, warp, _largest(p, min(count, size)))
        if count < size and p.device.type == "cpu" and not bool(enough.all()):
            floor, _ = _nucleus_floor(p, warp, _largest(p, size))
        p.mul_(p.clone().ge_(floor))
    return p.div_(p.sum(-1, keepdim=True))


def probabilities(
    logits: Tensor,
    warp: Warp,
    *,
    outputs: Tensor,
    tokens: Tensor | None = None,
    topology: Topology | None = None,
    history: History | None = None,
    depth: int = 0,
) -> Tensor:
    """The distribution each node's next token is drawn from: logits [R, N, V] -> [R, N, V], a new tensor.

    Arguments as for ``processed``. A greedy row gets all its mass on the first largest logit.
    """
    x = processed(logits, warp, outputs=outputs, tokens=tokens, topology=topology, history=history, depth=depth)
    if warp.all_greedy:
        best = argmax(x).unsqueeze(-1)
        peak = x.gather(-1, best)
        return torch.zeros_like(x).scatter_(-1, best, peak - peak + 1)  # NaN where the peak is not finite
    if warp.temperature is not None:
        heat = _like(warp.temperature, x)
        x = (x - x.amax(-1, keepdim=True)).div_(heat) if warp.cold else x / heat
    p = torch.softmax(x, -1)
    if not (warp.min_p is None and warp.top_k is None and warp.top_p is None):
        p = _truncate(p, warp)
    if warp.any_greedy:
        greedy = _like(warp.greedy, x)
        p.mul_(1 - greedy).scatter_add_(-1, argmax(x).unsqueeze(-1), greedy.expand(-1, x.shape[1], -1))
    return p


def argmaxes(
    logits: Tensor,
    warp: Warp,
    *,
    outputs: Tensor,
    tokens: Tensor | None = None,
    topology: Topology | None = None,
    history: History | None = None,
    depth: int = 0,
) -> Tensor:
    """The greedy token of each node: logits [R, N, V] -> [R, N] int64; -1 where the logits are broken.

    Arguments as for ``processed``. Temperature and truncation cannot move an argmax, so they are left out.
    """
    if warp.bias is None and warp.early_eos is None and not warp.needs_history:
        x = logits[..., : warp.vocab_size]  # a view: nothing is copied or converted
    else:
        x = processed(logits, warp, outputs=outputs, tokens=tokens, topology=topology, history=history, depth=depth)
    best = argmax(x)
    return torch.where(x.gather(-1, best.unsqueeze(-1)).squeeze(-1).isfinite(), best, -1)
