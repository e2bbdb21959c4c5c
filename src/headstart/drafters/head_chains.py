"""A head's chains on the CPU's own kernels: a round's whole draft in one call.

Knows: how each request's settings are told to the kernel, and what becomes of its answer. Does not know: rows, caches.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..machine.cpu.head import HeadKernel
from ..machine.cpu.sampling import REJECTING, Knobs, knobs_of
from ..maths.asks import DRAWING, PROCESSING, RULES, TENSORS_ONLY, Served
from ..maths.limits import AGREEMENT_TEMPERATURE, DRAWN_HEAT
from ..maths.vocab_ops import Rule
from ..types import DraftView, Proposal
from .base import LeastChances
from .draft_masks import DraftMasks

__all__ = ["SERVED", "kernel_chains"]

#: penalties and bias are left to the target: a guess that heeds them takes several times as long to make here
SERVED = Served("head kernel", DRAWING | RULES | {"structured"}, PROCESSING | TENSORS_ONLY - RULES | {"logprobs"})


def kernel_chains(
    kernel: HeadKernel,
    views: Sequence[DraftView],
    starts: Sequence[int],
    feed: Sequence[Sequence[int]],
    features: Sequence[Tensor | None],
    budgets: Sequence[int],
    least: LeastChances,
) -> list[Proposal]:
    """A chain for each view, of at most ``budgets[i]`` tokens.

    starts, feed, features: see ``HeadKernel``.
    """
    knobs: list[Knobs] = []
    if not all(view.params.greedy for view in views):
        knobs = [_knobs(view) for view in views]
    drawn = [row.rule in REJECTING for row in knobs]
    q = torch.empty(len(views), max(budgets), kernel.config.target_vocab) if any(drawn) else None
    masks = DraftMasks(views, [budget > 0 for budget in budgets])
    drafted = kernel.chains(
        starts,
        feed,
        features,
        budgets,
        temperature=AGREEMENT_TEMPERATURE,
        min_chance_to_extend=least.kept,
        least_next=least.followed,
        least_first=least.first,
        knobs=knobs,
        q=q,
        masks=masks if any(masks.masked) else None,
    )
    if q is None:
        return [Proposal.chain(line) for line in drafted]
    return [Proposal.chain(line, q[row, : len(line)] if drawn[row] else None) for row, line in enumerate(drafted)]


def _knobs(view: DraftView) -> Knobs:
    # A draft is drawn from q alike for every rule but coupled.
    rule: Rule = "greedy" if view.params.greedy else "coupled" if view.params.rule == "coupled" else "token"
    knobs = knobs_of(view.params, rule, seed=view.seed, base=len(view.tokens))
    if knobs.rule in REJECTING:
        knobs.temperature *= DRAWN_HEAT
    return knobs
