"""What a round is played with, and what becomes of a drafter that fails.

Knows: the parts, and that a drafter may be anybody's code: whatever it raises costs speed, never a request.
Does not know: what happens in a round (``round``), or what a proposal must look like (``proposal_check``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from ..config import MAX_GAMMA
from ..control.controller import Controller
from ..drafters.base import Drafter
from ..drafters.prediction import PredictionDrafter
from ..machine.model_runner import ModelRunner
from .captured import CapturedRounds

__all__ = ["RoundContext"]

log = logging.getLogger(__name__)


@dataclass
class RoundContext:
    """What a round is played with."""

    runner: ModelRunner
    drafter: Drafter | None
    controller: Controller
    vocab_size: int  # ids at and past this are never emitted
    max_gamma: int = MAX_GAMMA
    captured: CapturedRounds | None = None  # rounds on the device, where there is one that can
    inactive: str | None = None  # why there is no speculation, for people
    predictions: PredictionDrafter = field(default_factory=PredictionDrafter)  # beside a drafter that reads none

    @property
    def drafter_name(self) -> str:
        """Who drafts; empty when nobody does."""
        if self.drafter is None:
            return ""
        try:
            return str(self.drafter.name)
        except Exception:  # a name is no reason to fail
            return type(self.drafter).__name__

    def drop_drafter(self, error: BaseException) -> None:
        """Go on without the drafter, for good, and let everybody see why."""
        if self.drafter is None:
            return
        self.inactive = f"the drafter {self.drafter_name!r} failed: {_said(error)}"
        self.drafter = None
        log.warning("speculation is off from here on: %s", self.inactive, exc_info=error)

    def tell_drafter(self, call: Callable[[Drafter], None]) -> None:
        """``Drafter.commit``, ``release`` or ``reset``, where there is a drafter."""
        call(self.predictions)
        if self.drafter is not None:
            try:
                call(self.drafter)
            except Exception as error:
                self.drop_drafter(error)


def _said(error: BaseException) -> str:
    """What an exception says of itself; its kind where that is nothing."""
    try:
        return str(error) or type(error).__name__
    except Exception:
        return type(error).__name__
