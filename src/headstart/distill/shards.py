"""The target's text on disk: numbered shards, each written whole or not at all, and read back as batches.

Knows: the files and how a batch is cut from them. Does not know: how the text came about, or what it is used for.

A folder holds ``tiles.json`` (what was asked for) and ``shard-00000.safetensors`` ...: sequences one behind the other.
A run that was killed leaves finished shards and perhaps a temporary file; the next run with the same plan goes on
behind them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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

__all__ = ["Corpus", "Story", "check_plan", "finished_shards", "read_shard", "write_shard"]

_HELD_EVERY = 40  # each 40th sequence is kept from training, for measuring
_MOST_HELD = 192


@dataclass(frozen=True)
class Story:
    """One sequence: a conversation, or a prompt and its answer."""

    tokens: NDArray[np.int32]  # [T]
    answer: NDArray[np.bool_]  # [T]: the target wrote this token as (part of) an answer
    temperature: float  # its answers were drawn at


def check_plan(folder: Path, plan: Mapping[str, Any]) -> None:
    """Make the folder, or make sure that what lies in it was made by the same plan."""
    folder.mkdir(parents=True, exist_ok=True)
    sweep(folder, before=r"\.(shard-\d{5}\.safetensors|plan\.json)\.\d+")
    path = folder / "plan.json"
    text = json.dumps(plan, indent=1, sort_keys=True)
    if not path.exists():
        write_whole(path, text)
        return
    before = json.loads(path.read_text(encoding="utf-8"))
    changed = sorted(key for key in before.keys() | plan.keys() if before.get(key) != json.loads(text).get(key))
    if changed:
        raise InvalidParameter(
            "out", f"{folder} holds data made with another {', '.join(changed)}; choose a new folder"
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
    arrays = _arrays(_path(folder, number))
    cuts = np.cumsum(arrays["lengths"])[:-1]
    tokens, answer = np.split(arrays["tokens"], cuts), np.split(arrays["answer"].astype(bool), cuts)
    return [Story(t, a, float(h)) for t, a, h in zip(tokens, answer, arrays["temperature"], strict=True)]


def finished_shards(folder: Path) -> int:
    """How many shards are there, from number 0 on without a gap."""
    number = 0
    while _path(folder, number).exists():
        number += 1
    return number


def _arrays(path: Path) -> dict[str, Any]:
    try:
        arrays: dict[str, Any] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ModelNotFound(f"the training data in {path} cannot be read: {error}") from error
    return arrays


class Corpus:
    """All shards of a folder in memory, cut into training and held-out sequences."""

    def __init__(self, folder: Path, length: int) -> None:
        """``length``: tokens a row of a batch has; longer sequences are cut there."""
        shards = [_arrays(_path(folder, number)) for number in range(finished_shards(folder))]
        if not shards:
            raise ModelNotFound(f"there is no training data in {folder}")
        self.length = length
        self._tokens = np.concatenate([s["tokens"] for s in shards])
        self._answer = np.concatenate([s["answer"] for s in shards])
        self._heat = np.concatenate([s["temperature"] for s in shards])
        self._lengths = np.concatenate([s["lengths"] for s in shards])
        self._starts = np.cumsum(self._lengths) - self._lengths
        everyone = np.arange(len(self._lengths))
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
        return int(np.minimum(self._lengths[self.training], self.length).sum())

    def question(self, index: int) -> list[int]:
        """A sequence up to where its first answer begins."""
        start = int(self._starts[index])
        answer = self._answer[start : start + int(self._lengths[index])]
        first = int(answer.argmax()) if answer.any() else len(answer)
        return [int(token) for token in self._tokens[start : start + first]]

    def counts(self, size: int) -> torch.Tensor:
        """[size] how often each token occurs in answers."""
        return torch.from_numpy(np.bincount(self._tokens[self._answer > 0], minlength=size))

    def training_batch(self, step: int, rows: int, seed: int, device: torch.device) -> Batch:
        """The rows of one step: every sequence once an epoch, in an order that depends on seed and epoch only."""
        chosen = []
        for at in range(step * rows, (step + 1) * rows):
            epoch, place = divmod(at, len(self.training))
            chosen.append(self._order(epoch, seed)[place])
        return self.batch(chosen, device)

    def _order(self, epoch: int, seed: int) -> NDArray[np.int64]:
        if getattr(self, "_shuffled", (None,))[0] != (epoch, seed):
            shuffle = np.random.default_rng([seed % 2**63, epoch])
            self._shuffled = ((epoch, seed), shuffle.permutation(self.training))
        return self._shuffled[1]

    def batch(self, chosen: Sequence[int] | NDArray[np.int64], device: torch.device) -> Batch:
        width = int(min(self.length, self._lengths[list(chosen)].max()))
        tokens = np.zeros((len(chosen), width), dtype=np.int64)
        answer = np.zeros((len(chosen), width), dtype=np.bool_)
        for row, index in enumerate(chosen):
            n, start = min(width, int(self._lengths[index])), int(self._starts[index])
            tokens[row, :n] = self._tokens[start : start + n]
            answer[row, :n] = self._answer[start : start + n]
        return Batch(
            torch.from_numpy(tokens).to(device, non_blocking=True),
            torch.from_numpy(answer),
            torch.from_numpy(self._heat[list(chosen)]).to(device),
        )
