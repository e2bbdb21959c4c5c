"""Draws a draft's tokens, one step of all rows at a time, the way each row's request asks for.

Knows: the sampling settings, noise and history of the rows. Does not know: where the logits come from.

Greedy rows take the argmax. Coupled rows use the noise that the target will use at the same position. The others draw
from q with noise of their own, keyed by the round, and q is remembered for the verification rule. Every drafter that
has logits shares this pen, so all of them warp alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F

from ..maths import noise
from ..maths.argmax import argmax
from ..maths.asks import DRAWING, PENALTIES, RULES, TENSORS_ONLY, Served
from ..maths.distribution import History, Warp, argmaxes, probabilities, processed
from ..maths.limits import AGREEMENT_TEMPERATURE, DRAWN_HOPE
from ..maths.vocab_ops import PLAIN, VocabOps
from ..types import DraftView, Proposal
from .draft_masks import DraftMasks

__all__ = ["SERVED", "DraftSampler", "draft_keys", "draw_tokens", "fit"]

#: a guess disregards min_tokens; log-probabilities are the target's alone
SERVED = Served(
    "draft sampler",
    DRAWING | PENALTIES | RULES | {"logit_bias", "structured"} | TENSORS_ONLY,
    frozenset({"min_tokens", "logprobs"}),
)


class DraftSampler:
    """Draws the next token of every row the way that row's request asks for, and remembers q where it is needed."""

    def __init__(
        self,
        views: Sequence[DraftView],
        vocab_size: int,
        width: int,
        device: torch.device,
        ids: torch.Tensor | None = None,
        vocab_ops: VocabOps = PLAIN,
        live: Sequence[bool] | None = None,
    ) -> None:
        """``vocab_size``: ids that may be drawn; ``width``: V of the target's logits, the width q must have.

        ``ids`` [W] int64: a draft that knows only these tokens, and whose logits [R, W] are of them; every other token
        has probability zero. ``live``: rows whose guess counts; None: all.
        """
        params = [view.params for view in views]
        self.width, self._inner = width, vocab_ops
        self.warp = Warp.of(params, vocab_size=vocab_size, eos=None, device=device)
        self.point = [p.greedy or p.rule == "coupled" for p in params]
        self._ids = ids
        self._grammars = DraftMasks(views, live) if "structured" in self.warp.asks else None
        self._last: torch.Tensor | None = None
        self._q: list[torch.Tensor] = []
        # With nothing to process, the argmax of the few logits is the argmax of all: the wide row is never made.
        self._direct = ids is not None and self.warp.untouched
        self._history = None
        if self.warp.needs_history:
            prompts = [view.tokens[: view.prompt_length] for view in views]
            outputs = [view.tokens[view.prompt_length :] for view in views]
            self._history = History.of(prompts, outputs, width, device)
        if not self.warp.all_greedy:
            self._seeds = noise.seeds([view.seed for view in views], device)
            self._base = torch.tensor([len(view.tokens) for view in views], device=device)
            self._coupled = torch.tensor([p.rule == "coupled" for p in params], device=device)

    def draw(self, logits: torch.Tensor, offset: int) -> torch.Tensor:
        """logits [R, V or W] -> token ids [R]; ``offset`` counts the tokens drawn before in this round."""
        self._last = logits
        if self._direct:
            assert self._ids is not None
            return self._ids[argmax(logits)]
        wide, warp = fit(logits, self.width, self._ids), self.warp
        if self._grammars is not None:
            wide, allowed = self._grammars.applied(wide)
            warp, self._last = replace(warp, allowed=allowed[:, None]), wide.masked_fill(~allowed, -torch.inf)
        tokens, q = draw_tokens(
            wide,
            warp,
            None if warp.all_greedy else self._keys(offset),
            history=self._history,
            vocab_ops=self._inner,
        )
        if self._grammars is not None:
            tokens = self._grammars.took(tokens)
        if q is not None and not all(self.point):
            self._q.append(q)
        if self._history is not None:
            self._history.add(tokens)
        return tokens

    def _keys(self, offset: int) -> noise.Keys:
        low, high = draft_keys(self._seeds, self._base, self._coupled, torch.tensor([offset], device=self._base.device))
        return low[:, 0], high[:, 0]

    def agreement(self) -> torch.Tensor:
        """[R] about how likely the target will agree with the last tokens, from their distributions alone.

        Never from the tokens that were drawn, so that a draft may end by it. See ``maths.limits``.
        """
        assert self._last is not None
        logits = self._last.float() / AGREEMENT_TEMPERATURE
        sure: torch.Tensor = (logits.amax(-1) - logits.logsumexp(-1)).exp()
        if not self._q:
            return sure
        return torch.where(self.warp.greedy, sure, DRAWN_HOPE[0] + DRAWN_HOPE[1] * self._q[-1].amax(-1))

    def q(self) -> torch.Tensor | None:
        """[R, n, V], or None when every row drew deterministically."""
        return torch.stack(self._q, dim=1) if self._q else None

    def proposals(self, drawn: Sequence[torch.Tensor], budgets: Sequence[int]) -> list[Proposal]:
        """What was drawn, step by step [R] each, as a chain for each row: of at most its budget, and ending before the
        first -1 (its numbers broke down there)."""
        q, found = self.q(), []
        for row, (line, budget) in enumerate(zip(torch.stack(list(drawn), dim=1).tolist(), budgets, strict=True)):
            length = min(budget, line.index(-1) if -1 in line else len(line))
            found.append(Proposal.chain(line[:length], None if q is None or self.point[row] else q[row, :length]))
        return found


def draft_keys(
    seeds: torch.Tensor, base: torch.Tensor, coupled: torch.Tensor, offset: torch.Tensor, vocab_ops: VocabOps = PLAIN
) -> noise.Keys:
    """The noise of drafted tokens number ``offset`` [N] in their round: seeds, base, coupled [R] -> two words [R, N].

    Coupled rows share the target's noise at the token's position; the others have noise of their own, by the round.
    """
    shared, base = coupled[:, None], base[:, None]
    return vocab_ops.keys(
        seeds,
        torch.where(shared, base + offset, base),
        torch.where(shared, 0, offset + 1),
        torch.where(coupled, noise.COUPLED, noise.DRAFT),
    )


def draw_tokens(
    logits: torch.Tensor,
    warp: Warp,
    keys: noise.Keys | None,
    *,
    history: History | None = None,
    vocab_ops: VocabOps = PLAIN,
    into: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """logits [R, V] -> tokens [R], and the distributions they were drawn from [R, V] (None if all rows are greedy).

    keys: two words [R], see ``draft_keys``; greedy rows need none. into [R, V]: where those distributions may be
    written; if they were, it is what is given back. Nothing here waits for the device.
    """
    if warp.all_greedy:
        return argmaxes(logits[:, None], warp, history=history, vocab_ops=vocab_ops)[:, 0], None
    assert keys is not None
    if vocab_ops.drawn is not None and not warp.any_greedy and vocab_ops.takes(warp.asks):
        x = processed(logits[:, None], warp, history=history)[:, 0]
        q, tokens = vocab_ops.drawn(x, warp, keys, into)
        return tokens, q
    q = probabilities(logits[:, None], warp, history=history, vocab_ops=vocab_ops)[:, 0]
    return vocab_ops.race(q, keys), q


def fit(logits: torch.Tensor, width: int, ids: torch.Tensor | None = None) -> torch.Tensor:
    """Give the draft's logits the target's width: padded vocabularies differ, the tokenizer does not."""
    if ids is not None:
        wide = logits.new_full((logits.shape[0], width), float("-inf"))
        return wide.index_copy_(1, ids, logits)
    if logits.shape[-1] >= width:
        return logits[..., :width]
    return F.pad(logits, (0, width - logits.shape[-1]), value=float("-inf"))
