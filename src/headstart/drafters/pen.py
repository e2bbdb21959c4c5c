"""Draws a draft's tokens, one step of all rows at a time, the way each row's request asks for.

Knows: the sampling settings, noise and history of the rows. Does not know: where the logits come from.

Greedy rows take the argmax. Coupled rows use the noise that the target will use at the same position. The others draw
from q with noise of their own, keyed by the round, and q is remembered for the verification rule.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from ..maths import noise
from ..maths.distribution import History, Warp, argmaxes, probabilities
from ..types import DraftView

__all__ = ["Pen"]


class Pen:
    """Draws the next token of every row the way that row's request asks for, and remembers q where it is needed."""

    def __init__(self, views: Sequence[DraftView], vocab_size: int, width: int, device: torch.device) -> None:
        """``vocab_size``: ids that may be drawn; ``width``: V of the target's logits, the width q must have."""
        params = [view.params for view in views]
        self.width = width
        self.warp = Warp.of(params, vocab_size=vocab_size, eos=[() for _ in views], device=device)
        self.point = [p.greedy or p.verification == "coupled" for p in params]
        self._greedy = self.warp.all_greedy
        self._history = None
        if self.warp.needs_history:
            prompts = [view.tokens[: view.prompt_length] for view in views]
            outputs = [view.tokens[view.prompt_length :] for view in views]
            self._history = History.of(prompts, outputs, width, device)
        self._outputs = torch.tensor([len(view.tokens) - view.prompt_length for view in views], device=device)
        self._seeds = noise.seeds([view.seed for view in views], device)
        self._base = torch.tensor([len(view.tokens) for view in views], device=device)
        self._coupled = torch.tensor([p.verification == "coupled" for p in params], device=device)
        self._q: list[torch.Tensor] = []

    def draw(self, logits: torch.Tensor, offset: int) -> torch.Tensor:
        """logits [R, V] -> token ids [R]; ``offset`` counts the tokens drawn before in this round."""
        logits = _fit(logits, self.width)[:, None]
        if self._greedy:
            tokens = argmaxes(logits, self.warp, outputs=self._outputs + offset, history=self._history)[:, 0]
        else:
            q = probabilities(logits, self.warp, outputs=self._outputs + offset, history=self._history)[:, 0]
            drafted = noise.keys(self._seeds, self._base, offset + 1, noise.DRAFT)
            coupled = noise.keys(self._seeds, self._base + offset, 0, noise.COUPLED)
            low, high = (torch.where(self._coupled, c, d) for c, d in zip(coupled, drafted, strict=True))
            tokens = noise.draw(q, noise.exponential((low, high), self.width))
            if not all(self.point):
                self._q.append(q)
        if self._history is not None:
            self._history.add(tokens)
        return tokens

    def q(self) -> torch.Tensor | None:
        """[R, n, V], or None when every row drew deterministically."""
        return torch.stack(self._q, dim=1) if self._q else None


def _fit(logits: torch.Tensor, width: int) -> torch.Tensor:
    """Give the draft's logits the target's width: padded vocabularies differ, the tokenizer does not."""
    if logits.shape[-1] >= width:
        return logits[..., :width]
    return F.pad(logits, (0, width - logits.shape[-1]), value=float("-inf"))
