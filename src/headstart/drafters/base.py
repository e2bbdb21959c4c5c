"""What a drafter is, and how one is found by name.

Knows: the contract between the engine and whoever guesses. Does not know: any particular guesser.

A drafter is asked once a round for guesses and may keep whatever state it likes about each sequence,
found again by ``view.id``. It cannot change what is generated, only how fast: the verification rule
needs nothing but the ``Proposal``. Packages add drafters through the entry-point group
``headstart.drafters``; CONTRIBUTING.md builds one step by step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from importlib.metadata import entry_points

from ..errors import InvalidParameter
from ..types import DraftView, Proposal, Verdict

__all__ = ["ENTRY_POINT_GROUP", "Drafter", "drafter_named", "registered_drafters"]

ENTRY_POINT_GROUP = "headstart.drafters"


class Drafter(ABC):
    """One guesser."""

    #: shown in metrics and messages
    name: str = "drafter"

    #: True when a guess costs next to nothing to make and is deterministic: the controller then looks at
    #: the guess (its ``strength``) before it decides how much of it to verify. False when every drafted
    #: token costs time: the controller decides beforehand.
    free: bool = False
    #: True when the drafter itself ends a draft that is not likely enough to hold, by ``Controller.least_hope``: the
    #: budget is then only a ceiling.
    ends_itself: bool = False
    #: True when q comes straight from the sampler that drew the tokens (``pen``): its shape is still checked in every
    #: round, but no longer whether its values are a distribution.
    sound_q: bool = False

    @abstractmethod
    def propose(self, views: Sequence[DraftView], budgets: Sequence[int]) -> list[Proposal | None]:
        """Guess what follows each sequence: at most ``budgets[i]`` tokens for ``views[i]``, None for no guess.

        What comes back is checked before anything runs; a drafter that proposes nonsense, or raises, is dropped.
        """

    def commit(self, views: Sequence[DraftView], verdicts: Sequence[Verdict | None]) -> None:  # noqa: B027
        """Told after each round what the target said of each proposal; ``view.tokens`` is up to date by then."""

    def release(self, sequence_id: str) -> None:  # noqa: B027
        """The sequence is finished or aborted: forget it."""

    def reset(self) -> None:  # noqa: B027
        """A round was interrupted (Ctrl-C, say), perhaps in the middle of ``propose``: forget every sequence. You will
        be asked again about those that go on."""


# Built in, so that they are there even when the package runs from its source tree without being installed.
_BUILT_IN = {"lookup": "headstart.drafters.lookup:LookupDrafter"}


def registered_drafters() -> dict[str, str]:
    """Name -> "module:Class" of every drafter that can be asked for by name."""
    found = {point.name: point.value for point in entry_points(group=ENTRY_POINT_GROUP)}
    return found | _BUILT_IN


def drafter_named(name: str) -> Drafter:
    """Build the drafter registered under ``name``, with its defaults."""
    for point in entry_points(group=ENTRY_POINT_GROUP):
        if point.name == name and name not in _BUILT_IN:
            made = point.load()()
            break
    else:
        if name not in _BUILT_IN:
            raise InvalidParameter("draft", f"names no drafter {name!r}; there are {', '.join(registered_drafters())}")
        from importlib import import_module

        module, _, attribute = _BUILT_IN[name].partition(":")
        made = getattr(import_module(module), attribute)()
    if not isinstance(made, Drafter):
        raise InvalidParameter("draft", f"names {name!r}, which is not a headstart.drafters.base.Drafter")
    return made
