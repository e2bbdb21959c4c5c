"""The target's text on disk: numbered shards, each written whole or not at all, and read back as batches.

Knows: the files and how a batch is cut from them. Does not know: how the text came about, or what it is used for.

A folder holds ``plan.json`` (what was asked for) and ``shard-00000.safetensors`` ...: sequences one behind the other.
A run that was killed leaves finished shards and perhaps a temporary file; the next run with the same plan goes on
behind them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from ..errors import InvalidParameter, ModelNotFound
from ..machine.files import replacing, sweep, write_whole
from .students import Batch

__all__ = ["Corpus", "Story", "batch_of", "check_plan", "finished_shards", "read_shard", "refuse_change", "write_shard"]

_HELD_EVERY = 40  # each 40th sequence is kept from training, for measuring
_MOST_HELD = 192


@dataclass(frozen=True)
class Story:
    """One sequence: a conversation, or a prompt and its answer."""

    tokens: NDArray[np.int32]  # [T]
    answer: NDArray[np.bool_]  # [T]: the target wrote this token as (part of) an answer
    temperature: float  # its answers were drawn at

    @property
    def question(self) -> list[int]:
        """Everything before the first answer."""
        first = int(self.answer.argmax()) if self.answer.any() else len(self.tokens)
        return [int(token) for token in self.tokens[:first]]


def check_plan(folder: Path, plan: Mapping[str, Any]) -> None:
    """Make the folder, or make sure that what lies in it was made by the same plan."""
    folder.mkdir(parents=True, exist_ok=True)
    sweep(folder, before=r"\.(shard-\d{5}\.safetensors|plan\.json)\.\d+")
    path = folder / "plan.json"
    if not path.exists():
        write_whole(path, json.dumps(plan, indent=1, sort_keys=True))
    refuse_change(folder, json.loads(path.read_text(encoding="utf-8")), plan)


def refuse_change(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Settings as they were read from a file of ``folder``, and as they are now, must be the same."""
    now = json.loads(json.dumps(now))  # as the file has them: without tuples
    changed = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    if changed:
        raise InvalidParameter(
            "out", f"{folder} holds what was made with another {', '.join(changed)}; choose a new folder"
        )


def _path(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}.safetensors"


def write_shard(folder: Path, number: int, stories: Sequence[Story]) -> None:
    """Under its own name only when it is complete."""
    lengths = [len(story.tokens) for story in stories]
    arrays: dict[str, NDArray[Any]] = {
        "tokens": np.concatenate([story.tokens for story in stories]).astype(np.int32),
        "answer": np.concatenate([story.answer for story in stories]).astype(np.uint8),
        "lengths": np.array(lengths, dtype=np.int64),
        "temperature": np.array([story.temperature for story in stories], dtype=np.float32),
    }
    with replacing(_path(folder, number)) as work:
        save_file(arrays, work)


def read_shard(folder: Path, number: int) -> list[Story]:
    path = _path(folder, number)
    try:
        arrays = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ModelNotFound(f"the training data in {path} cannot be read: {error}") from error
    cuts = np.cumsum(arrays["lengths"])[:-1]
    tokens, answer = np.split(arrays["tokens"], cuts), np.split(arrays["answer"].astype(bool), cuts)
    return [Story(t, a, float(h)) for t, a, h in zip(tokens, answer, arrays["temperature"], strict=True)]


def finished_shards(folder: Path) -> int:
    """How many shards are there, from number 0 on without a gap."""
    number = 0
    while _path(folder, number).exists():
        number += 1
    return number


class Corpus:
    """All shards of a folder in memory, cut into training and held-out sequences."""

    def __init__(self, folder: Path, length: int) -> None:
        """``length``: tokens a row of a batch has; longer sequences are cut there."""
        self.stories = [story for number in range(finished_shards(folder)) for story in read_shard(folder, number)]
        if not self.stories:
            raise ModelNotFound(f"there is no training data in {folder}")
        self.length = length
        everyone = np.arange(len(self.stories))
        held = everyone % _HELD_EVERY == _HELD_EVERY - 1 if len(everyone) >= 2 * _HELD_EVERY else everyone % 4 == 3
        self.held = everyone[held][:_MOST_HELD]
        self.training = everyone[~held]
        if not len(self.held) or not len(self.training):
            raise ModelNotFound(
                f"{folder} holds {len(everyone)} sequences: too few to train on some and measure on others"
            )

    @property
    def tokens(self) -> int:
        """How many tokens there are to train on."""
        return sum(min(len(self.stories[index].tokens), self.length) for index in self.training)

    def counts(self, size: int) -> torch.Tensor:
        """[size] how often each token occurs in answers."""
        return torch.from_numpy(np.bincount(np.concatenate([s.tokens[s.answer] for s in self.stories]), minlength=size))

    def training_batch(self, step: int, rows: int, seed: int, device: torch.device) -> Batch:
        """The rows of one step: every sequence once an epoch, in an order that depends on seed and epoch only."""
        chosen = []
        for at in range(step * rows, (step + 1) * rows):
            epoch, place = divmod(at, len(self.training))
            chosen.append(self.training[_order(len(self.training), epoch, seed)[place]])
        return self.batch(chosen, device)

    def batch(self, chosen: Iterable[int], device: torch.device) -> Batch:
        return batch_of([self.stories[index] for index in chosen], self.length, device)


@lru_cache(maxsize=2)
def _order(count: int, epoch: int, seed: int) -> NDArray[np.int64]:
    return np.random.default_rng([seed % 2**63, epoch]).permutation(count)


def batch_of(stories: Sequence[Story], longest: int, device: torch.device) -> Batch:
    """A row for each; what is longer than ``longest`` is cut there."""
    width = min(longest, max(len(story.tokens) for story in stories))
    tokens = np.zeros((len(stories), width), dtype=np.int64)
    answer = np.zeros((len(stories), width), dtype=np.bool_)
    for row, story in enumerate(stories):
        n = min(width, len(story.tokens))
        tokens[row, :n], answer[row, :n] = story.tokens[:n], story.answer[:n]
    return Batch(
        torch.from_numpy(tokens).to(device, non_blocking=True),
        torch.from_numpy(answer),
        torch.tensor([story.temperature for story in stories], device=device),
    )
