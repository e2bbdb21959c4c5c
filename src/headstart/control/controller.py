"""How many tokens to draft now, for each sequence; zero is an answer.

Knows: what a controller is asked, and the two that are not ``adaptive``. Does not know: models, drafters or tokens.

Losslessness: the draft length may depend on anything known before the tokens were drawn, never on the value
of a token that was drawn at random. ``budgets`` is called before drafting. ``trim`` is called after it, but only
cuts guesses that are deterministic (``Drafter.free``, ``Proposal.draw``), where a shorter guess is simply another
deterministic guess.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from ..config import DraftConfig
from ..maths.cost import Forecast
from ..types import Advice, DraftView, Proposal, Round
from .adaptive import AdaptiveController
from .costs import Beliefs

__all__ = ["Controller", "FixedController", "GreedyAndSampled", "controller_for"]


class Controller(Advice, Protocol):
    """Chooses draft lengths and learns from what came of them. A round asks ``budgets``, then ``trim``, then tells
    ``observe``. One that derives from this learns nothing and cuts nothing, but for what it says itself."""

    def meet(
        self,
        *,
        free: bool,
        ends_itself: bool,
        cost: float | None = None,
        forecast: Forecast | None = None,
        lengths: Sequence[int] | None = None,
        ragged: bool | None = None,
    ) -> None:
        """Who drafts from now on: one whose guesses cost nothing; one that ends a draft by itself (see ``Advice``).
        What was learnt before is forgotten.

        ``cost``: bytes that it reads for a token, over the target's. ``forecast``: what was measured of both before
        they serve anybody; it is believed until rounds say otherwise. ``lengths``: all rows draft together, and so many
        tokens. ``ragged``: a round's forward takes no longer than its tokens, however unlike its rows are (see
        ``ModelRunner``). None: as said before, if ever.
        """
        return None

    def line(self, waiting: int) -> None:
        """So many requests wait for a row; before each round."""
        return None

    def budgets(self, views: Sequence[DraftView], limits: Sequence[int]) -> list[int]:
        """Tokens to draft for each sequence, at most ``limits[i]``. Before drafting."""

    def trim(self, views: Sequence[DraftView], proposals: Sequence[Proposal | None]) -> list[Proposal | None]:
        """Cut free, deterministic guesses to what is worth verifying. After drafting."""
        return list(proposals)

    def observe(self, rounds: Sequence[Round]) -> None:
        """Learn from one round: a record for each of its sequences."""
        return None

    def beliefs(self) -> Beliefs:
        """What rounds and drafts are thought to cost just now."""
        return Beliefs()

    def forget(self, sequence_id: str) -> None:
        """The sequence is gone."""
        return None

    def reason(self) -> str | None:
        """Why speculation is held back just now, for people; None while it is not."""


def controller_for(config: DraftConfig, *, free: bool = False, ends_itself: bool = False) -> Controller:
    """The controller that the settings ask for; ``free``, ``ends_itself``: see ``Controller.meet``."""
    if config.gamma != "auto":
        return FixedController(config.gamma)
    kind = {"free": free, "ends_itself": ends_itself}
    drawn = AdaptiveController(config.max_gamma, drawn=True, **kind)
    return GreedyAndSampled(AdaptiveController(config.max_gamma, **kind), drawn)


class FixedController(Controller):
    """Always the same draft length; 0 is never to draft."""

    def __init__(self, gamma: int) -> None:
        self.gamma = gamma

    def budgets(self, views: Sequence[DraftView], limits: Sequence[int]) -> list[int]:
        return [min(self.gamma, limit) for limit in limits]

    paid_budgets = budgets

    def min_chance_to_extend(self) -> float:
        return 0.0

    def min_chances(self) -> tuple[float, float]:
        return 0.0, 0.0

    def reason(self) -> str | None:
        return None if self.gamma else "gamma is 0, so nothing is drafted"


class GreedyAndSampled:
    """One controller for rounds whose rows are all greedy, another for the rest.

    Drawn tokens cost more to draft and to judge and hold less often: what one kind taught must not put the other off.
    """

    def __init__(self, greedy: Controller, drawn: Controller) -> None:
        self._greedy, self._drawn = greedy, drawn
        self._now = greedy  # whose round it is: a round is observed before the next one's budgets are asked for

    def meet(self, **drafter: Any) -> None:
        self._now = self._greedy
        for each in (self._greedy, self._drawn):
            each.meet(**drafter)

    @contextmanager
    def replaced(self, by: Controller) -> Iterator[None]:
        """Inside, another controller decides: for whoever asks this one, drafters too. For measurements."""
        own = self._greedy, self._drawn, self._now
        self._greedy = self._drawn = self._now = by
        try:
            yield
        finally:
            self._greedy, self._drawn, self._now = own

    def _turn(self, views: Sequence[DraftView]) -> Controller:
        self._now = self._greedy if all(view.params.greedy for view in views) else self._drawn
        return self._now

    def line(self, waiting: int) -> None:
        self._greedy.line(waiting)
        self._drawn.line(waiting)

    def budgets(self, views: Sequence[DraftView], limits: Sequence[int]) -> list[int]:
        return self._turn(views).budgets(views, limits)

    def paid_budgets(self, views: Sequence[DraftView], limits: Sequence[int]) -> list[int]:
        return self._turn(views).paid_budgets(views, limits)

    def trim(self, views: Sequence[DraftView], proposals: Sequence[Proposal | None]) -> list[Proposal | None]:
        return self._turn(views).trim(views, proposals)

    def observe(self, rounds: Sequence[Round]) -> None:
        self._now.observe(rounds)

    def min_chance_to_extend(self) -> float:
        return self._now.min_chance_to_extend()

    def min_chances(self) -> tuple[float, float]:
        return self._now.min_chances()

    def beliefs(self) -> Beliefs:
        return self._now.beliefs()

    def forget(self, sequence_id: str) -> None:
        self._greedy.forget(sequence_id)
        self._drawn.forget(sequence_id)

    def reason(self) -> str | None:
        return self._now.reason()
