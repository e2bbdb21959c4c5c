"""What is trained: a head or a small model, each with the one thing training needs of it.

Knows: how a student reads a batch of the target's text, what it guesses at every step of a draft, and how it drafts.
Does not know: optimizers, schedules, data on disk.

A head is trained on its own rollouts: step 0 reads the target's features, step s its own output of step s - 1, one slot
to the right, and sees true slots only up to where its draft began. So it meets in training what it meets in use.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..drafters.base import Drafter
from ..drafters.head import HeadDrafter
from ..drafters.model import ModelDrafter
from ..machine.files import make_readable
from ..machine.head import HeadNet, save_head
from ..machine.hidden_states import Watch, decoder_layers
from ..machine.load.loading import quiet
from ..machine.runner import EagerRunner

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
        return Reading(batch, logits, self._watch.take(logits.device) if self._watch is not None else None)

    def close(self) -> None:
        if self._watch is not None:
            self._watch.stop()


class Student(ABC):
    """A draft in training."""

    module: nn.Module
    tables: list[Tensor]  # weights with a row for each word, which are no maps from one space to another
    watch: tuple[int, ...] = ()  # the target's layers whose hidden states it reads
    steady = False  # every step of a draft guesses as the first one does: one step says all there is to learn

    @property
    def ids(self) -> Tensor | None:
        """[W] the tokens its logits stand for; None: all."""
        return None

    @property
    @abstractmethod
    def shape(self) -> str:
        """What it is, in words."""

    @abstractmethod
    def rollout(self, reading: Reading, steps: int) -> Iterator[Tensor]:
        """For each step of a draft, hidden or output states [B, T, ...] that ``logits`` turns into guesses.

        At step s, slot j says what it expects behind token j when the draft began s tokens before.
        """

    @abstractmethod
    def logits(self, states: Tensor) -> Tensor:
        """States [M, ...] -> logits [M, W]."""

    @abstractmethod
    def drafter(self, runner: EagerRunner, vocab_size: int) -> Drafter:
        """Drafts for the target in ``runner`` with the weights as they are now; ids from ``vocab_size`` on never."""

    @abstractmethod
    def save(self, folder: Path) -> None: ...

    @property
    def weights(self) -> int:
        return sum(weight.numel() for weight in self.module.parameters())


class HeadStudent(Student):
    """A ``HeadNet`` for a target whose features come with each reading."""

    def __init__(self, net: HeadNet, target: PreTrainedModel, about: dict[str, Any] | None = None) -> None:
        self.module: HeadNet = net
        self.tables, self.watch = [net.head], net.config.watch
        self._embedding: Tensor = target.get_input_embeddings().weight
        self._about = about or {}
        self._turn: Tensor | None = None

    @property
    def ids(self) -> Tensor | None:
        return self.module.ids

    @property
    def shape(self) -> str:
        c = self.module.config
        return (
            f"One decoder layer of width {c.width} on the target's hidden states behind layers "
            f"{', '.join(map(str, c.watch))}, with {c.vocab} output words; {self.weights / 1e6:.1f}M weights."
        )

    def rollout(self, reading: Reading, steps: int) -> Iterator[Tensor]:
        assert reading.features is not None
        net, tokens = self.module, reading.batch.tokens
        length = tokens.shape[1]
        if self._turn is None or self._turn.shape[1] < length:
            self._turn = net.rotary(length, tokens.device)[None]
        turn = self._turn[:, :length]
        g = net.fused(_later(reading.features))
        word = net.word(self._embedding[tokens].to(g.dtype))
        keys: list[Tensor] = []
        values: list[Tensor] = []
        group = net.config.heads // net.config.kv_heads
        for step in range(steps):
            x = g + word
            q, k, v = net.queries_keys_values(x, turn)
            keys.append(k.repeat_interleave(group, 2).transpose(1, 2))  # [B, heads, T, dim]
            values.append(v.repeat_interleave(group, 2).transpose(1, 2))
            # All steps' keys side by side under a mask: many products for nothing, but in one kernel that writes no
            # scores down, which is what costs time on a GPU.
            seen = _mask(length, net.config.window, step, tokens.device)
            found = F.scaled_dot_product_attention(q.transpose(1, 2), torch.cat(keys, 2), torch.cat(values, 2), seen)
            y = net.finish(x, found.transpose(1, 2).flatten(2))
            yield y
            g = _later(y)

    def logits(self, states: Tensor) -> Tensor:
        return self.module.logits(states)

    def drafter(self, runner: EagerRunner, vocab_size: int) -> Drafter:
        frozen = copy.deepcopy(self.module).eval().requires_grad_(False)
        return HeadDrafter(frozen, runner, vocab_size=vocab_size, min_chance_to_extend=0.0)

    def save(self, folder: Path) -> None:
        save_head(self.module, folder, self._about, torch.bfloat16)


class ModelStudent(Student):
    """An ordinary causal LM with the target's tokenizer. It drafts from text alone, so every step is the same."""

    steady = True

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.module: PreTrainedModel = model
        self.tables = [model.get_input_embeddings().weight, model.get_output_embeddings().weight]
        self.tokenizer = tokenizer

    @property
    def shape(self) -> str:
        layers, wide = len(decoder_layers(self.module)), self.tables[0].shape[1]
        return f"A causal language model of {layers} layers, {wide} wide, {self.weights / 1e6:.1f}M weights."

    def rollout(self, reading: Reading, steps: int) -> Iterator[Tensor]:
        out = self.module(input_ids=reading.batch.tokens, use_cache=False).logits
        width = reading.logits.shape[-1]  # padded vocabularies differ
        out = out[..., :width] if out.shape[-1] >= width else F.pad(out, (0, width - out.shape[-1]), value=-1e4)
        for _ in range(steps):
            yield out

    def logits(self, states: Tensor) -> Tensor:
        return states

    def drafter(self, runner: EagerRunner, vocab_size: int) -> Drafter:
        own = EagerRunner(self.module, rows=1, max_len=runner.max_len, margin=64, probe=False)
        return ModelDrafter(own, vocab_size=vocab_size, width=runner.vocab_size)

    def save(self, folder: Path) -> None:
        with quiet():
            self.module.save_pretrained(folder)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)
        make_readable(folder)


def _later(x: Tensor) -> Tensor:
    """x [B, T, H] moved right by a slot, zeros coming in."""
    return F.pad(x, (0, 0, 1, -1))


def _mask(length: int, window: int, step: int, device: torch.device) -> Tensor:
    """[T, T * (step + 1)] bool: what slots of step ``step`` of a rollout see of the slots of all steps so far.

    Slot j sees the true slots (of step 0) up to j - step, and of each later step m the one slot of its own draft,
    j - step + m.
    """
    at = torch.arange(length, device=device)
    back = at[:, None] - at
    true = (back >= step) & (back < window)
    return torch.cat([true, *(back == step - m for m in range(1, step + 1))], dim=1)
