"""What a bench is told, and what it found.

Knows: settings, figures and ratios by way and task. Does not know: how they are measured or shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import InvalidParameter
from ..types import SamplingParams
from .figures import Figures
from .record import Record
from .statistics import Ratio

__all__ = ["ALL", "PLAIN", "SECONDS", "Bench", "BenchSettings", "Way"]

SECONDS = 60.0  # that measuring takes unless another time is given
PLAIN = "plain"
ALL = "all"  # in the place of a task's name


@dataclass(frozen=True)
class BenchSettings:
    """What is measured."""

    tokens: int = 64  # the most of an answer
    rows: int = 1  # requests answered together
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    verification: str | None = None
    ignore_eos: bool = False
    seconds: float | None = SECONDS  # None: no limit
    turns: int | None = None  # None: what time allows
    drafters: tuple[str, ...] = ()  # further drafts, each measured beside the first
    peers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("tokens", "rows"):
            if getattr(self, name) < 1:
                raise InvalidParameter(name, f"must be at least 1, not {getattr(self, name)}")
        if self.tokens < 2:
            raise InvalidParameter("tokens", "must be at least 2: the first one comes with the prompt")
        if self.turns is not None and self.turns < 1:
            raise InvalidParameter("turns", f"must be at least 1, not {self.turns}")
        self.params(0)

    def params(self, seed: int) -> SamplingParams:
        """With a seed of its own for each answer, and the rule that requests without a seed get."""
        rule: Any = self.verification or ("block" if self.temperature > 0 else None)
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            max_tokens=self.tokens,
            ignore_eos=self.ignore_eos,
            seed=seed,
            verification=rule,
        )


@dataclass(frozen=True)
class Way:
    """One way to decode, as it was measured. Keys: tasks, and ``ALL``."""

    name: str
    about: Mapping[str, Any]
    figures: Mapping[str, Figures]
    speedup: Mapping[str, Ratio]  # over plain decoding, behind the first token
    end_to_end: Mapping[str, Ratio]  # prompts included
    same: tuple[int, int]  # answers that are token for token plain decoding's, of how many
    inactive: str | None = None  # why it did not draft at the end

    def to_json(self) -> dict[str, Any]:
        tasks = {
            task: found.to_json()
            | {"speedup": self.speedup[task].to_json() if task in self.speedup else None}
            | {"speedup_end_to_end": self.end_to_end[task].to_json() if task in self.end_to_end else None}
            for task, found in self.figures.items()
        }
        same = {"same_tokens": self.same[0], "compared": self.same[1]}
        return {"name": self.name, "about": dict(self.about), **same, "inactive": self.inactive, "tasks": tasks}


@dataclass(frozen=True)
class Bench(Record):
    """What ``bench`` found. The first way is plain decoding, the second the draft that was asked for."""

    kind = "bench"

    ways: tuple[Way, ...]
    prompts: Mapping[str, int]  # by task
    blocks: int  # how often a prompt was measured, or prompts together
    turns: float  # how often each of them was, on average
    seconds: float  # that measuring took
    notes: tuple[str, ...] = ()

    @property
    def tasks(self) -> tuple[str, ...]:
        return tuple(self.prompts)

    @property
    def speedup(self) -> Ratio | None:
        """Of the draft that was asked for, over all prompts; None where nothing drafts."""
        return self.ways[1].speedup.get(ALL) if len(self.ways) > 1 else None

    def results(self) -> dict[str, Any]:
        return {
            "prompts": dict(self.prompts),
            "blocks": self.blocks,
            "turns": self.turns,
            "seconds": self.seconds,
            "notes": list(self.notes),
            "ways": [way.to_json() for way in self.ways],
        }
