"""Drafters made for testing: one that is often wrong in a known way, and one that lies about itself.

Knows: proposals and what they were drawn from. Does not know: engines, targets, what is tested.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random

import torch
from torch import Tensor

from ...drafters.base import Drafter
from ...types import DraftView, Proposal, Verdict

__all__ = ["Overconfident", "Recorder", "StressDrafter", "distorted"]


def distorted(p: Tensor, tokens: Sequence[int]) -> Tensor:
    """Another distribution than p [V], that a rule has to correct: nearly even among ``tokens``, p elsewhere."""
    few = torch.tensor(list(tokens))
    weights = p[few].sqrt() + 0.15 * torch.arange(len(tokens), dtype=p.dtype)
    q = 0.1 * p
    q[few] += 0.9 * weights / weights.sum()
    return q / q.sum()


class StressDrafter(Drafter):
    """Draws from distributions it was given for the texts behind one prompt, and drafts nothing elsewhere."""

    name = "stress"

    def __init__(self, prompt: Sequence[int], q: Mapping[tuple[int, ...], Tensor], width: int, seed: int) -> None:
        """``q``: by the tokens behind the prompt, [V]; ``width``: of the target's logits."""
        self._start, self._width = len(prompt), width
        self._q = {
            prefix: (torch.nn.functional.pad(each.float(), (0, width - len(each))), each.cumsum(0))
            for prefix, each in q.items()
        }
        self._random = Random(seed)

    def propose(self, views: Sequence[DraftView], budgets: Sequence[int]) -> list[Proposal | None]:
        return [self._guess(view, budget) for view, budget in zip(views, budgets, strict=True)]

    def _guess(self, view: DraftView, budget: int) -> Proposal | None:
        prefix = tuple(view.tokens[self._start :])
        tokens: list[int] = []
        rows: list[Tensor] = []
        while len(tokens) < budget and prefix in self._q:
            q, sums = self._q[prefix]
            at = torch.searchsorted(sums, torch.tensor([self._random.random() * float(sums[-1])], dtype=sums.dtype))
            token = min(int(at), len(sums) - 1)
            tokens.append(token)
            rows.append(q)
            prefix = (*prefix, token)
        return Proposal.chain(tokens, torch.stack(rows)) if tokens else None


class _Beside(Drafter):
    """Another drafter, with something done to its guesses, or with them. On the host, wherever the other one drafts."""

    def __init__(self, drafter: Drafter, width: int) -> None:
        self.inner, self._width = drafter, width
        self.name = drafter.name
        self.needs_torch = drafter.needs_torch

    def catch_up(self, views: Sequence[DraftView]) -> None:
        self.inner.catch_up(views)

    def commit(self, views: Sequence[DraftView], verdicts: Sequence[Verdict | None]) -> None:
        self.inner.commit(views, verdicts)

    def release(self, sequence_id: str) -> None:
        self.inner.release(sequence_id)

    def reset(self) -> None:
        self.inner.reset()

    def drawn_from(self, guess: Proposal) -> Tensor:
        """[n, V] what the tokens of a guess are said to be drawn from."""
        if guess.q is not None:
            return guess.q
        q = torch.zeros(len(guess.tokens), self._width)
        q[torch.arange(len(guess.tokens)), torch.tensor(guess.tokens)] = 1.0
        return q


class Recorder(_Beside):
    """Remembers what the first token of each guess was drawn from, by the text before it."""

    def __init__(self, drafter: Drafter, width: int) -> None:
        super().__init__(drafter, width)
        self.seen: dict[tuple[int, ...], Tensor] = {}

    def propose(self, views: Sequence[DraftView], budgets: Sequence[int]) -> list[Proposal | None]:
        guesses = self.inner.propose(views, budgets)
        for view, guess in zip(views, guesses, strict=True):
            if guess is not None and len(guess.tokens):
                self.seen[tuple(view.tokens)] = self.drawn_from(guess)[0].float().cpu()
        return guesses


class Overconfident(_Beside):
    """The negative control: another drafter's guesses, said to be drawn from half of their distribution and half of
    anything at all. A rule that believes it accepts them up to twice as often as it may."""

    def __init__(self, drafter: Drafter, width: int) -> None:
        super().__init__(drafter, width)
        self.name = f"{drafter.name}, overconfident"

    def propose(self, views: Sequence[DraftView], budgets: Sequence[int]) -> list[Proposal | None]:
        return [self._boasted(guess) for guess in self.inner.propose(views, budgets)]

    def _boasted(self, guess: Proposal | None) -> Proposal | None:
        if guess is None or not guess.is_chain:
            return guess
        return replace(guess, q=0.5 * self.drawn_from(guess) + 0.5 / self._width, draw="iid", paid=True)
