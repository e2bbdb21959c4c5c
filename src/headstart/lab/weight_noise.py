"""Drafts that agree with their target as often as is wanted: a model with noise on its weights.

Knows: how to add noise, and how much of it gives which agreement. Does not know: what the drafts are measured for.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["Noise"]


class Noise:
    """A model with more or less of one fixed noise on its layers' weights."""

    def __init__(self, base: Any, seed: int = 0) -> None:
        self._base = base
        generator = torch.Generator().manual_seed(seed)
        self._noise = {
            name: (torch.randn(weight.shape, generator=generator) * weight.detach().float().std().cpu()).to(weight)
            for name, weight in base.named_parameters()
            if weight.dim() > 1 and "layers" in name
        }

    def model(self, scale: float) -> Any:
        """A copy; ``scale`` in standard deviations of each weight matrix."""
        model = copy.deepcopy(self._base).requires_grad_(False)
        for name, weight in model.named_parameters():
            if name in self._noise:
                weight.data.add_(self._noise[name], alpha=scale)
        return model

    def agreement(self, model: Any, texts: Sequence[tuple[int, Sequence[int]]]) -> float:
        """Greedy alpha: how often ``model`` says the next token of (prompt length, prompt and the target's answer)."""
        right = total = 0
        for start, ids in texts:
            line = torch.tensor([list(ids)], device=model.device)
            with torch.inference_mode():
                said = model(line).logits[0, start - 1 : -1].argmax(-1)
            right += int((said == line[0, start:]).sum())
            total += len(said)
        return right / total

    def scale_for(
        self, alpha: float, texts: Sequence[tuple[int, Sequence[int]]], steps: int = 6
    ) -> tuple[float, float]:
        """The scale at which the agreement is near ``alpha``, and what it is there."""
        low, high = 0.0, 0.02
        while self.agreement(self.model(high), texts) > alpha and high < 4:
            low, high = high, 2 * high
        best = (high, 0.0)
        for _ in range(steps):
            middle = (low + high) / 2
            found = self.agreement(self.model(middle), texts)
            if abs(found - alpha) < abs(best[1] - alpha):
                best = (middle, found)
            low, high = (middle, high) if found > alpha else (low, middle)
        return best
