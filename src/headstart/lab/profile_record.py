"""What a profile found: costs of steps by rows and context, and memory.

Knows: the numbers, and what the cost model makes of them. Does not know: how they are measured or shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..maths.cost import CostModel
from .record import Record

__all__ = ["ALPHAS", "FASTER", "Costs", "Memory", "Profile"]

FASTER = 5.0  # times faster than the target's step that a draft's step should be
ALPHAS = (0.5, 0.6, 0.7, 0.8, 0.9)  # acceptance rates that speed-ups are worked out for
WIDEST = 16


@dataclass(frozen=True)
class Costs:
    """Seconds at one number of rows and one length of what stands before."""

    rows: int
    context: int  # tokens
    target_step: float  # a round without a draft
    rounds: Mapping[int, float]  # width -> seconds of a round less drafting
    forwards: Mapping[int, float]  # width -> seconds of the target's forward alone
    draft_start: float  # seconds that any draft takes; 0 where nothing drafts or drafting is free
    draft_step: float  # and for each of its tokens
    prefill: float  # tokens a second

    def model(self) -> CostModel:
        """In plain rounds: what any draft takes counts as overhead."""
        plain = self.target_step
        widths = {width: seconds / plain for width, seconds in self.rounds.items() if width > 1}
        return CostModel(c=self.draft_step / plain, v=widths, overhead=self.draft_start / plain)

    def verify(self, width: int) -> float:
        """v(width), in plain rounds: straight lines between what was measured."""
        return self.model().verify(width)

    @property
    def faster(self) -> float | None:
        """How many times faster a draft step is than the target's; None where drafting takes no time."""
        return self.target_step / self.draft_step if self.draft_step > 0 else None

    def best(self, alpha: float, most: int) -> tuple[int, float]:
        """The best draft length 0 .. most at an acceptance rate, and its speed-up."""
        model = self.model()
        found = [(1.0, 0)] + [(model.speedup(gamma, alpha), -gamma) for gamma in range(1, most + 1)]
        speed, gamma = max(found)
        return -gamma, speed

    def break_even(self, most: int) -> float | None:
        """The least acceptance rate at which drafting pays; None: at none."""
        model = self.model()
        for percent in range(1, 101):
            if any(model.speedup(gamma, percent / 100) > 1 for gamma in range(1, most + 1)):
                return percent / 100
        return None

    def to_json(self, most: int) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "context": self.context,
            "target_step_seconds": self.target_step,
            "draft_start_seconds": self.draft_start,
            "draft_step_seconds": self.draft_step,
            "times_faster": self.faster,
            "prefill_tokens_per_second": self.prefill,
            "v": {str(width): self.verify(width) for width in range(1, WIDEST + 1)},
            "round_seconds": {str(width): seconds for width, seconds in self.rounds.items()},
            "forward_seconds": {str(width): seconds for width, seconds in self.forwards.items()},
            "best_by_alpha": {
                f"{a:g}": dict(zip(("gamma", "speedup"), self.best(a, most), strict=True)) for a in ALPHAS
            },
            "break_even_alpha": self.break_even(most),
        }


@dataclass(frozen=True)
class Memory:
    """Bytes."""

    target: int  # weights
    draft: int  # weights; 0 where no model drafts
    token: int  # keys and values of a token of text, target and draft together
    captured: int  # what captured rounds hold on a GPU
    rows: int  # that are held now ...
    max_len: int  # ... each of so many tokens
    total: int | None  # of the device, or of the machine
    free: int | None  # beside all this, now

    @property
    def held(self) -> int:
        """Keys and values that are held for rows of full length."""
        return self.token * self.rows * self.max_len

    def more_rows(self, length: int) -> int | None:
        """How many further rows of so many tokens fit in what is free, less a tenth for what comes and goes."""
        if self.free is None or not self.token:
            return None
        return int(0.9 * self.free / (self.token * length))

    def to_json(self) -> dict[str, Any]:
        return {
            "target_weights": self.target,
            "draft_weights": self.draft,
            "keys_and_values_a_token": self.token,
            "captured_rounds": self.captured,
            "rows": self.rows,
            "max_model_len": self.max_len,
            "keys_and_values": self.held,
            "total": self.total,
            "free": self.free,
            "further_rows_that_fit": self.more_rows(self.max_len),
        }


@dataclass(frozen=True)
class Profile(Record):
    """What ``profile`` found. The first of ``costs`` is one row with a short context."""

    kind = "profile"

    about: Mapping[str, Any]  # what runs
    costs: tuple[Costs, ...]
    memory: Memory
    free: bool  # guesses take no time
    most: int  # tokens that a round may draft
    seconds: float
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def at(self, rows: int, context: int) -> Costs:
        """The costs that were measured nearest to this."""
        return min(self.costs, key=lambda c: (abs(c.rows - rows), abs(c.context - context)))

    def results(self) -> dict[str, Any]:
        return {
            "about": dict(self.about),
            "drafting_is_free": self.free,
            "costs": [each.to_json(self.most) for each in self.costs],
            "memory": self.memory.to_json(),
            "seconds": self.seconds,
            "warnings": list(self.warnings),
            "notes": list(self.notes),
        }
