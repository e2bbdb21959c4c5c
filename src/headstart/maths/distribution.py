"""Logits -> the distribution a token is drawn from.

Knows: the order of processing, which is vLLM's: vocabulary mask, logit_bias, min_tokens, penalties (repetition, then
frequency and presence), a grammar's mask, temperature, min-p, top-k, top-p, softmax. One code path for the target and
the draft.
Does not know: where logits come from, or what is drawn.

Everything is worked out for R rows and N nodes at once; at a node of a draft, penalties and min_tokens see that node's
own drafted ancestors. Work is in float32 (float64 if float64 is given), and a feature costs nothing while no row of
the batch asks for it. NaN is never hidden: a node whose logits hold NaN, or nothing finite, gets probabilities that
do not sum to 1 (NaN), and -1 for an argmax. Nothing here waits for a GPU.

min-p, top-k and top-p each keep the tokens whose probability is not under some floor, so tokens with equal
probability stay or go together, and no sort order decides.
"""

from __future__ import annotations

from typing import TypedDict, Unpack

import numpy as np
import torch
from torch import Tensor

from .asks import DRAWING, OTHERS, TENSORS_ONLY, Served
from .limits import CPU_CACHE
from .tree import Topology
from .vocab_ops import PLAIN, VocabOps
from .warp import History, Warp

__all__ = ["SERVED", "History", "Nodes", "Warp", "argmaxes", "probabilities", "processed"]

SERVED = Served("tensors", DRAWING | OTHERS | TENSORS_ONLY)

_PARTIAL = 512  # a nucleus is seldom larger, and finding the 512 largest costs half of a full sort


def _parts(count: int, size: int, device: torch.device) -> list[slice]:
    """Pieces of ``count`` distributions over ``size`` tokens to work on at a time: all of them on a GPU; on a CPU as
    many as its cache holds, which beats a dozen passes over all of them (and large buffers cost page faults)."""
    step = max(1, CPU_CACHE // size) if device.type == "cpu" else max(1, count)
    return [slice(i, i + step) for i in range(0, count, step)]


def _strengths(warp: Warp, rows: slice, prompt: Tensor, counts: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """What penalties do to tokens that occur in the prompt, and ``counts`` times in the output (both [M, N, V]) of
    these rows: a factor (repetition), and a number to subtract (frequency and presence)."""

    def knob(values: Tensor) -> Tensor:
        return values[rows].to(counts.dtype).view(-1, 1, 1)

    out, factor, shift = counts > 0, None, None
    if warp.repetition is not None:
        factor = torch.where(prompt | out, knob(warp.repetition), 1.0)
    if warp.frequency is not None:
        shift = counts * knob(warp.frequency)
    if warp.presence is not None:
        flat = out * knob(warp.presence)
        shift = flat if shift is None else shift + flat
    return factor, shift


def _penalise(x: Tensor, factor: Tensor | None, shift: Tensor | None) -> Tensor:
    if factor is not None:
        # x / factor where x > 0 and x * factor elsewhere, as a sum of two halves: comparing is slow on a CPU.
        x = (x.clamp_min(0) / factor).add_(x.clamp_max(0) * factor)
    return x if shift is None else x - shift


def _penalties(x: Tensor, warp: Warp, history: History, tokens: Tensor | None, topology: Topology | None) -> Tensor:
    """Penalties for every node: the committed history for all tokens at once, then each node's drafted ancestors."""
    rows, nodes, size = x.shape
    counts = history.counts.to(x.dtype)
    result = torch.empty_like(x)
    for row in _parts(rows, nodes * size, x.device):
        strengths = _strengths(warp, row, history.prompt[row].unsqueeze(1), counts[row].unsqueeze(1))
        for node in _parts(nodes, size, x.device):
            result[row, node] = _penalise(x[row, node], *strengths)
    if nodes == 1:
        return result
    if tokens is None or topology is None:
        raise ValueError("penalties at drafted nodes need their tokens and their topology")
    # Only the tokens of this row's nodes can have been drafted: those N logits of each node are worked out anew, with
    # the node's own count. Writing the ones that are not its ancestors too changes nothing, as their count is right.
    index = tokens.unsqueeze(1).expand(-1, nodes, -1)  # [R, N, N]: node i, token of node j
    line = topology.ancestors.clone()
    line[:, :, 0] = False  # the root is committed, so the history has it
    same = tokens.unsqueeze(2) == tokens.unsqueeze(1)  # [R, N, N]
    drafted = line.to(x.dtype) @ same.to(x.dtype)  # [R, N, N]: how often node i's ancestors hold token j
    known = counts.gather(1, tokens).unsqueeze(1)  # [R, 1, N]
    prompt = history.prompt.gather(1, tokens).unsqueeze(1)
    strengths = _strengths(warp, slice(None), prompt, known + drafted)
    return result.scatter_(2, index, _penalise(x.gather(2, index), *strengths))


class Nodes(TypedDict, total=False):
    """The N nodes of R rows whose distributions are asked for."""

    outputs: Tensor  # [R] committed output tokens; where min_tokens count
    tokens: Tensor | None  # [R, N] the nodes' tokens, column 0 the root (already in the history)
    topology: Topology | None  # None: a chain; a draft loop has N = 1, and the history counts what was drafted
    history: History | None


def processed(logits: Tensor, warp: Warp, **nodes: Unpack[Nodes]) -> Tensor:
    """Everything before the temperature: logits [R, N, V] -> [R, N, V]; maybe the caller's own tensor, so only read
    it."""
    topology = nodes.get("topology")
    x = logits if logits.dtype == torch.float64 else logits.to(torch.float32)
    count = x.shape[1]
    padded = x.shape[2] > warp.vocab_size
    if x is logits and (padded or warp.bias is not None or warp.early_eos is not None):
        x = x.clone()  # the caller's logits stay as they are
    if padded:
        x[..., warp.vocab_size :] = -torch.inf
    if warp.bias is not None:
        ids, values = warp.bias
        x.scatter_add_(2, ids.unsqueeze(1).expand(-1, count, -1), values.to(x.dtype).unsqueeze(1).expand(-1, count, -1))
    if warp.early_eos is not None:
        least, ids, real = warp.early_eos
        below = torch.arange(count, device=x.device) if topology is None else topology.depth
        early = nodes["outputs"].unsqueeze(1) + below < least.unsqueeze(1)  # [R, N]
        banned = torch.where(early.unsqueeze(2) & real.unsqueeze(1), -torch.inf, 0.0).to(x.dtype)
        x.scatter_add_(2, ids.unsqueeze(1).expand(-1, count, -1), banned)
    if warp.needs_history:
        history = nodes.get("history")
        if history is None:
            raise ValueError("a row uses a penalty, so the history is needed")
        x = _penalties(x, warp, history, nodes.get("tokens"), topology)
    if warp.allowed is not None:  # what is not allowed does not count, broken numbers neither
        x = x.masked_fill(~warp.allowed, -torch.inf)
    return x


def _largest(p: Tensor, count: int) -> Tensor:
    """The ``count`` largest values in falling order: p [M, V] -> [M, count]."""
    size = p.shape[-1]
    if p.device.type != "cpu":
        return p.topk(count, -1).values if count < size else p.sort(-1, descending=True).values
    # NumPy's vectorised sort is ten times faster than torch's. NaN comes first in all of them.
    values = p.detach().numpy()
    if count < size:
        values = np.partition(values, size - count, -1)[:, size - count :]
    # A copy even of a single value, which counts as contiguous although its stride is negative.
    return torch.from_numpy(np.sort(values, -1)[:, ::-1].copy())


def _above(p: Tensor, floor: Tensor) -> Tensor:
    """A new p with all that is below the floor set to 0: p [M, V], floor [M, 1]. NaN stays, as NaN * 0 is NaN."""
    return p.clone().ge_(floor).mul_(p)  # comparing into floats is ten times faster than into bools


def _floor(p: Tensor, count: int, least: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> tuple[Tensor, Tensor]:
    """The smallest probability that top-k and then top-p keep [M, 1]; and [M, 1]: were the ``count`` largest enough to
    tell? p [M, V]; least [M, 1]: min-p's floor, which goes before; top_k [M, 1], none in use above count; top_p [M, 1].
    """
    top = _above(_largest(p, count), least)
    sums = top.cumsum(1)
    last = torch.full_like(least, count - 1, dtype=torch.int64)  # which of ``top`` is the last to stay
    bounded = torch.zeros_like(least, dtype=torch.bool)  # is there a last one at all?
    enough = ~bounded
    if top_k is not None:
        bounded = top_k <= count
        last = torch.where(bounded, top_k - 1, last)
    if top_p is not None:
        total = torch.where(bounded, sums.gather(1, last), _above(p, least).sum(1, keepdim=True))
        # The nucleus ends with the first token that brings the sum up to its share.
        inside = torch.searchsorted(sums, top_p * total)
        cut = top_p < 1
        last = torch.where(cut, torch.minimum(last, inside), last)
        enough = bounded | ~cut | (inside < count)
        bounded = bounded | cut
    return torch.where(bounded, top.gather(1, last), 0.0), enough


def _truncate(p: Tensor, most_k: int, min_p: Tensor | None, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """min-p, then top-k, then top-p on probabilities: p [M, V] -> a new [M, V]; the others [M, 1]."""
    floor = torch.zeros_like(p[:, :1]) if min_p is None else min_p * p.amax(1, keepdim=True)
    if top_k is not None or top_p is not None:
        size, on_cpu = p.shape[1], p.device.type == "cpu"
        count = most_k
        if top_p is not None:  # on a GPU sort all: asking whether fewer were enough would mean waiting for it
            count = max(most_k, _PARTIAL) if on_cpu else size
        count = min(count, size)
        kept, enough = _floor(p, count, floor, top_k, top_p)
        if on_cpu and count < size and not bool(enough.all()):
            kept, _ = _floor(p, size, floor, top_k, top_p)
        floor = torch.maximum(floor, kept)
    p = _above(p, floor)
    return p.div_(p.sum(1, keepdim=True))


def probabilities(logits: Tensor, warp: Warp, *, vocab_ops: VocabOps = PLAIN, **nodes: Unpack[Nodes]) -> Tensor:
    """The distribution each node's next token is drawn from: logits [R, N, V] -> [R, N, V], a new tensor.

    A greedy row gets all its mass on the first largest logit.
    """
    x = processed(logits, warp, **nodes)
    if warp.all_greedy:
        best = vocab_ops.argmax(x).unsqueeze(-1)
        peak = x.gather(-1, best)
        return torch.zeros_like(x).scatter_(-1, best, peak - peak + 1)  # NaN where the peak is not finite
    if vocab_ops.sampled is not None and vocab_ops.takes(warp.asks):
        p = vocab_ops.sampled(x, warp)
    else:
        p = _sampled(x, warp)
    if warp.any_greedy:
        greedy = warp.greedy.to(x.dtype).view(-1, 1, 1)
        p.mul_(1 - greedy).scatter_add_(-1, vocab_ops.argmax(x).unsqueeze(-1), greedy.expand(-1, x.shape[1], -1))
    return p


def _sampled(x: Tensor, warp: Warp) -> Tensor:
    """Temperature, softmax and truncation: x [R, N, V] -> a new [R, N, V]."""
    rows, nodes, size = x.shape

    def each(values: Tensor | None) -> Tensor | None:  # one for each node: [R * N, 1]
        return None if values is None else values.repeat_interleave(nodes).unsqueeze(1)

    temperature, min_p, top_k, top_p = each(warp.temperature), each(warp.min_p), each(warp.top_k), each(warp.top_p)
    flat, result = x.reshape(-1, size), torch.empty_like(x).view(-1, size)
    for part in _parts(rows * nodes, size, x.device):
        y = flat[part]
        if warp.cold:
            y = y - y.amax(1, keepdim=True)
        if temperature is not None:
            y = y / temperature[part].to(x.dtype)
        y = torch.softmax(y, 1)
        if not (min_p is None and top_k is None and top_p is None):
            mine = [None if knob is None else knob[part] for knob in (min_p, top_k, top_p)]
            y = _truncate(y, warp.most_k, *mine)
        result[part] = y
    return result.view(rows, nodes, size)


def argmaxes(logits: Tensor, warp: Warp, *, vocab_ops: VocabOps = PLAIN, **nodes: Unpack[Nodes]) -> Tensor:
    """The greedy token of each node: logits [R, N, V] -> [R, N] int64; -1 where the logits are broken.

    Temperature and truncation cannot move an argmax, so they are left out.
    """
    if warp.untouched:
        x = logits[..., : warp.vocab_size]  # a view: nothing is copied or converted
    else:
        x = processed(logits, warp, **nodes)
    if vocab_ops.peaks is not None:
        return vocab_ops.peaks(x)
    best = vocab_ops.argmax(x)
    return torch.where(x.gather(-1, best.unsqueeze(-1)).squeeze(-1).isfinite(), best, -1)
