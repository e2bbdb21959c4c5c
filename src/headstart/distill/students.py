"""What is trained: a head or a small model, each with the one thing training needs of it.

Knows: how a student reads a batch of the target's text and what it guesses at every step of a draft.
Does not know: optimizers, schedules, data on disk.

A head is trained on its own rollouts: step 0 reads the target's features, step s its own output of step s - 1, one slot
to the right, and sees true slots only up to where its draft began. So it meets in training what it meets in use.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..machine.files import make_readable
from ..machine.head import HeadNet, save_head
from ..machine.hidden_states import Watch
from ..machine.load.loading import quiet

__all__ = ["Batch", "HeadStudent", "ModelStudent", "Reading", "Student", "Teacher"]


@dataclass(frozen=True)
class Batch:
    """Rows of the target's own text."""

    tokens: Tensor  # [B, T] int64, short rows padded at the end
    answer: Tensor  # [B, T] bool, on the CPU: the target wrote this token as (part of) an answer
    temperature: Tensor  # [B] it was served at; 0 is greedy


@dataclass(frozen=True)
class Reading:
    """A batch, and what the target thinks of it."""

    batch: Batch
    logits: Tensor  # [B, T, V]
    features: Tensor | None  # [B, T, F], for heads


class Teacher:
    """The target, as the students see it. Never trained."""

    def __init__(self, model: PreTrainedModel, watch: tuple[int, ...] = ()) -> None:
        self.model = model.eval().requires_grad_(False)
        self._watch = Watch(model, watch) if watch else None

    @torch.no_grad()
    def read(self, batch: Batch) -> Reading:
        logits: Tensor = self.model(input_ids=batch.tokens, use_cache=False).logits
        return Reading(batch, logits, self._watch.take() if self._watch is not None else None)

    def close(self) -> None:
        if self._watch is not None:
            self._watch.stop()


class Student(Protocol):
    """A draft in training."""

    steady: bool
    """Every step of a draft guesses as the first one does, so that one step says all there is to learn."""

    @property
    def module(self) -> nn.Module: ...
    @property
    def ids(self) -> Tensor | None:
        """[W] the tokens its logits stand for; None: all."""

    @property
    def tables(self) -> list[Tensor]:
        """Weights with a row for each word, which are no maps from one space to another."""

    def rollout(self, reading: Reading, steps: int) -> Iterator[Tensor]:
        """For each step of a draft, hidden or output states [B, T, ...] that ``logits`` turns into guesses.

        At step s, slot j says what it expects behind token j when the draft began s tokens before.
        """

    def logits(self, states: Tensor) -> Tensor:
        """States [M, ...] -> logits [M, W]."""

    def save(self, folder: Path) -> None: ...


class HeadStudent:
    """A ``HeadNet`` for a target whose features come with each reading."""

    steady = False

    def __init__(self, net: HeadNet, target: PreTrainedModel, about: dict[str, Any] | None = None) -> None:
        self.net = net
        self._embedding: Tensor = target.get_input_embeddings().weight
        self._about = about or {}
        self._turn: Tensor | None = None
        self._masks: dict[tuple[int, int], Tensor] = {}

    @property
    def module(self) -> nn.Module:
        return self.net

    @property
    def ids(self) -> Tensor | None:
        return self.net.ids

    @property
    def tables(self) -> list[Tensor]:
        return [self.net.head]

    def rollout(self, reading: Reading, steps: int) -> Iterator[Tensor]:
        assert reading.features is not None
        tokens = reading.batch.tokens
        length = tokens.shape[1]
        if self._turn is None or self._turn.shape[1] < length:
            self._turn = self.net.rotary(length, tokens.device)[None]
        turn = self._turn[:, :length]
        g = self.net.fused(_later(reading.features, 1))
        word = self.net.word(self._embedding[tokens].to(g.dtype))
        keys: list[Tensor] = []
        values: list[Tensor] = []
        group = self.net.config.heads // self.net.config.kv_heads
        for step in range(steps):
            x = g + word
            q, k, v = self.net.queries_keys_values(x, turn)
            keys.append(k.repeat_interleave(group, 2).transpose(1, 2))  # [B, heads, T, dim]
            values.append(v.repeat_interleave(group, 2).transpose(1, 2))
            # All steps' keys side by side under a mask: many products for nothing, but in one kernel that writes no
            # scores down, which is what costs time on a GPU.
            seen = self._seen(length, step, tokens.device)
            found = F.scaled_dot_product_attention(q.transpose(1, 2), torch.cat(keys, 2), torch.cat(values, 2), seen)
            y = self.net.finish(x, found.transpose(1, 2).flatten(2))
            yield y
            g = _later(y, 1)

    def _seen(self, length: int, step: int, device: torch.device) -> Tensor:
        if (length, step) not in self._masks:
            self._masks[length, step] = _mask(length, self.net.config.window, step, device)
        return self._masks[length, step]

    def logits(self, states: Tensor) -> Tensor:
        return self.net.logits(states)

    def frozen(self) -> HeadNet:
        """A copy as it is now, to draft with."""
        return copy.deepcopy(self.net).eval().requires_grad_(False)

    def save(self, folder: Path) -> None:
        save_head(self.net, folder, self._about, torch.bfloat16)


class ModelStudent:
    """An ordinary causal LM with the target's tokenizer. It drafts from text alone, so every step is the same."""

    steady = True

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.model = model
        self.tokenizer = tokenizer

    @property
    def module(self) -> nn.Module:
        module: nn.Module = self.model
        return module

    @property
    def ids(self) -> Tensor | None:
        return None

    @property
    def tables(self) -> list[Tensor]:
        return [self.model.get_input_embeddings().weight, self.model.get_output_embeddings().weight]

    def rollout(self, reading: Reading, steps: int) -> Iterator[Tensor]:
        out = self.model(input_ids=reading.batch.tokens, use_cache=False).logits
        width = reading.logits.shape[-1]  # padded vocabularies differ
        out = out[..., :width] if out.shape[-1] >= width else F.pad(out, (0, width - out.shape[-1]), value=-1e4)
        for _ in range(steps):
            yield out

    def logits(self, states: Tensor) -> Tensor:
        return states

    def save(self, folder: Path) -> None:
        with quiet():
            self.model.save_pretrained(folder)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)
        make_readable(folder)


def _later(x: Tensor, slots: int) -> Tensor:
    """x [B, T, ...] moved right by some slots, zeros coming in."""
    if slots == 0:
        return x
    return torch.cat([torch.zeros_like(x[:, :slots]), x[:, :-slots]], dim=1)


def _mask(length: int, window: int, step: int, device: torch.device) -> Tensor:
    """[T, T * (step + 1)] bool: what slots of step ``step`` of a rollout see of the slots of all steps so far.

    Slot j sees the true slots (of step 0) up to j - step, and of each later step m the one slot of its own draft,
    j - step + m.
    """
    at = torch.arange(length, device=device)
    back = at[:, None] - at
    true = (back >= step) & (back < window)
    return torch.cat([true, *(back == step - m for m in range(1, step + 1))], dim=1)
