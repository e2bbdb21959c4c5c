"""How an engine is set up: frozen, composed records in which an unknown key is an error.

Knows: the settings, their defaults and their ranges. Does not know: what is built from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any, Literal, Self

from .errors import InvalidParameter
from .values import at_least_one, integer, plain

__all__ = ["MAX_GAMMA", "SETTINGS", "Config", "DraftConfig", "EngineConfig"]

MAX_THREADS = 256
MAX_GAMMA = 64  # tokens that a round can draft at the most


@dataclass(frozen=True)
class EngineConfig:
    """Sizes of the engine."""

    max_rows: int = 8  # sequences decoded together
    max_model_len: int | None = None  # longest prompt + answer; None: the model's own, capped to what is sensible
    prefill_chunk: int = 512  # prompt tokens a step may spend before the running sequences get their round
    max_waiting: int = 1024  # requests that may queue
    # A token's logits are the same bits alone, in any batch and behind warm keys. The CPU's 8- and 4-bit kernels always
    # give that; on a GPU it has a price: see docs/reference.md.
    invariant: bool = False
    threads: int | None = None  # of a CPU; None: what measures fastest, never more than torch may use

    def __post_init__(self) -> None:
        at_least_one(self, "max_rows", "prefill_chunk", "max_waiting")
        if self.max_model_len is not None:
            integer("max_model_len", self.max_model_len, 2)
        if self.threads is not None:
            integer("threads", self.threads, 1, MAX_THREADS)
        if not isinstance(self.invariant, bool):
            raise InvalidParameter("invariant", f"must be True or False, not {self.invariant!r}")


@dataclass(frozen=True)
class DraftConfig:
    """How far ahead to guess. ``gamma="auto"`` lets the controller choose, round by round; zero is an answer."""

    gamma: int | Literal["auto"] = "auto"  # 0: never draft
    max_gamma: int = 10  # the most "auto" may choose
    # On a GPU, go on drafting while the target verifies. None: where it measured faster, which is fused kernels and a
    # fixed draft length.
    overlap: bool | None = None

    def __post_init__(self) -> None:
        whole = isinstance(self.gamma, int) and not isinstance(self.gamma, bool)
        if self.gamma != "auto" and not (whole and 0 <= self.gamma <= MAX_GAMMA):
            allowed = f"'auto' or a whole number from 0 to {MAX_GAMMA}"
            raise InvalidParameter("gamma", f"must be {allowed}, not {self.gamma!r}")
        integer("max_gamma", self.max_gamma, 1, MAX_GAMMA)

    @property
    def most(self) -> int:
        """The most tokens a round can draft."""
        return self.max_gamma if self.gamma == "auto" else self.gamma


# flat name -> the part of ``Config`` that has it
SETTINGS = {f.name: "engine" for f in fields(EngineConfig)} | {f.name: "draft" for f in fields(DraftConfig)}


@dataclass(frozen=True)
class Config:
    """Everything an engine is told, besides its models."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    draft: DraftConfig = field(default_factory=DraftConfig)

    @classmethod
    def of(cls, settings: Mapping[str, Any], beside: Iterable[str] = ()) -> Self:
        """Build from flat names (``max_rows=4, gamma=5``), each of which must belong to one part.

        ``beside``: what else may be given with them; the error about an unknown name says which of all are near.
        """
        parts: dict[str, dict[str, Any]] = {"engine": {}, "draft": {}}
        for name, value in settings.items():
            if name not in SETTINGS:
                known = sorted({*SETTINGS, *beside})
                near = " or ".join(get_close_matches(name, known))
                meant = f"did you mean {near}? " if near else ""
                raise InvalidParameter(name, f"is not a setting; {meant}the settings are {', '.join(known)}")
            parts[SETTINGS[name]][name] = plain(value)
        return cls(EngineConfig(**parts["engine"]), DraftConfig(**parts["draft"]))
