"""How far a draft's distribution is from the target's, and how often its guesses would be accepted.

Knows: the losses and the acceptance rates, position by position. Does not know: networks, data, optimizers.

    forward  KL(p || q): cover everything the target may say
    reverse  KL(q || p): say nothing the target would not
    tv       total variation: its complement is the acceptance rate itself, but its slope is flat far from the target
    mix      forward while the draft is poor, tv as it gets better: weight exp(-3 alpha) on forward, the rest on tv

p may have mass on tokens outside the draft's vocabulary; there q is 0, and alpha counts that mass as lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..machine import gpu

__all__ = ["Goal", "Loss", "acceptance", "distance", "draft_tau"]

Loss = Literal["forward", "reverse", "tv", "mix"]

_LEAST = -60.0  # log-probabilities are kept above this: 0 * -inf would be NaN
_PIECE = 4096  # positions that are looked at together
_TURN = 3.0  # how fast "mix" goes over to tv


@dataclass(frozen=True)
class Goal:
    """What the target says at M positions, restricted to the draft's W words."""

    log_p: Tensor  # [M, W] float32, at each position's temperature; sums to at most 1
    best: Tensor  # [M] the word that is the target's argmax; -1 if the draft does not know it
    temperature: Tensor  # [M, 1] temperatures

    @staticmethod
    @torch.no_grad()
    def of(logits: Tensor, ids: Tensor | None, temperature: Tensor) -> Goal:
        """From the target's logits [M, V]; ``ids`` [W] are the draft's words (None: all). In pieces, to save memory."""
        temperature = temperature[:, None].float()
        if _lowered(logits):
            from ..machine.gpu.kernels.distance import log_probs

            found, peaks = log_probs(logits, ids, temperature[:, 0], _LEAST)
            return Goal(found, peaks if ids is None else _placed(peaks, ids), temperature)
        log_p, best = [], []
        for part, heat in zip(torch.split(logits, _PIECE), torch.split(temperature, _PIECE), strict=True):
            z = part.float() / heat
            whole = z.logsumexp(-1, keepdim=True)
            peak = z.argmax(-1)
            if ids is not None:
                z = z[:, ids]
                peak = _placed(peak, ids)
            log_p.append((z - whole).clamp_min_(_LEAST))
            best.append(peak)
        return Goal(torch.cat(log_p), torch.cat(best), temperature)


def _placed(tokens: Tensor, ids: Tensor) -> Tensor:
    """Where each token lies in the rising ``ids``; -1: nowhere."""
    place = torch.searchsorted(ids, tokens).clamp_max(len(ids) - 1)
    return torch.where(ids[place] == tokens, place, -1)


def _lowered(logits: Tensor) -> bool:
    """Whether the fused kernels do it: on a GPU (or in Triton's interpreter, for tests)."""
    return gpu.available() is None and (logits.is_cuda or not torch.cuda.is_available())


class _Distance(torch.autograd.Function):
    """The losses ``forward``, ``tv`` and ``mix`` by fused kernels: the same numbers, many times faster."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, log_p: Tensor, temperature: Tensor, loss: Loss) -> tuple[Tensor, Tensor]:
        from ..machine.gpu.kernels.distance import sums

        logits = logits.contiguous()
        found = sums(logits, log_p, temperature)
        rate, far = found[1].mean(), found[4].mean()
        weight = {"forward": torch.ones_like(rate), "tv": torch.zeros_like(rate)}.get(loss, torch.exp(-_TURN * rate))
        weights = torch.stack([weight, 1 - weight])
        ctx.save_for_backward(logits, log_p, temperature, found, weights)
        ctx.mark_non_differentiable(rate)
        return weights[0] * far + weights[1] * (1 - rate), rate

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        from ..machine.gpu.kernels.distance import slope

        logits, log_p, temperature, found, weights = ctx.saved_tensors
        return slope(logits, log_p, temperature, found, weights * (grads[0] / len(logits))), None, None, None


def distance(goal: Goal, logits: Tensor, loss: Loss) -> tuple[Tensor, Tensor]:
    """The mean loss of draft logits [M, W], and the mean acceptance rate."""
    if loss != "reverse" and _lowered(logits):
        value, rate = _Distance.apply(logits, goal.log_p, goal.temperature[:, 0].contiguous(), loss)  # type: ignore[no-untyped-call]
        return value, rate
    log_q = (logits.float() / goal.temperature).log_softmax(-1)
    p = goal.log_p.exp()
    q = log_q.exp()
    alpha = torch.minimum(p, q).sum(-1).mean()
    rate = alpha.detach()
    if loss == "tv":
        return 1 - alpha, rate
    if loss == "reverse":
        return (q * (log_q - goal.log_p)).sum(-1).mean(), rate
    forward = (p * (goal.log_p - log_q)).sum(-1).mean()
    if loss == "forward":
        return forward, rate
    weight = torch.exp(-_TURN * rate)
    return weight * forward + (1 - weight) * (1 - alpha), rate


@torch.no_grad()
def acceptance(goal: Goal, logits: Tensor) -> tuple[Tensor, Tensor]:
    """At every position [M]: the chance that a drawn token is accepted, and whether the greedy guess is right."""
    right = (logits.argmax(-1) == goal.best).float()
    if _lowered(logits):
        from ..machine.gpu.kernels.distance import sums

        return sums(logits.contiguous(), goal.log_p, goal.temperature[:, 0].contiguous())[1], right
    q = (logits.float() / goal.temperature).softmax(-1)
    return torch.minimum(goal.log_p.exp(), q).sum(-1), right


def draft_tau(rates: Tensor, start: Tensor) -> Tensor:
    """Expected tokens of a round that drafts from each slot: 1 + a_1 + a_1 a_2 + ...

    ``rates`` [K, B, T]: chance that the token which step s (0 first) guesses at slot j is accepted, given that all
    before it were. A draft that starts at slot j meets step s at slot j + s. ``start`` [B, T] bool: where drafts may
    start. Returns the sums A_1 .. A_K over all starts, and their number at the end: [K + 1].
    """
    reached = torch.ones_like(rates[0])
    sums = []
    for step in range(len(rates)):
        ahead = torch.zeros_like(reached)
        ahead[:, : ahead.shape[1] - step] = rates[step, :, step:]
        reached = reached * ahead
        sums.append(reached[start].sum())
    return torch.stack([*sums, start.sum().to(reached.dtype)])
