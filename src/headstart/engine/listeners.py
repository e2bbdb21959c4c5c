"""Who wants to know what happens: rounds, and requests that begin and end.

Knows: that a listener may be anybody's code: one that raises is told nothing any more, and hurts no request.
Does not know: what becomes of what it tells.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

from ..types import Round
from .handle import Handle

__all__ = ["Listeners"]

log = logging.getLogger(__name__)


class Listeners:
    """Told by the thread that steps, in the middle of a step: they must be quick, and must not wait for the engine.
    They may come and go from any thread, at any time."""

    def __init__(self, *rounds: Callable[[list[Round]], object]) -> None:
        self._rounds: list[Callable[[Any], object]] = [*rounds]
        self._begun: list[Callable[[Any], object]] = []
        self._ended: list[Callable[[Any], object]] = []

    def listen(
        self,
        rounds: Callable[[list[Round]], object] | None = None,
        *,
        begun: Callable[[Handle], object] | None = None,
        ended: Callable[[Handle], object] | None = None,
    ) -> ExitStack:
        """Tell these, too, until what comes back is closed (it is a context manager)."""
        heard = ExitStack()
        for those, listener in ((self._rounds, rounds), (self._begun, begun), (self._ended, ended)):
            if listener is not None:
                those.append(listener)
                heard.callback(_remove, those, listener)
        return heard

    def rounds(self, rounds: list[Round]) -> None:
        """The records of one round, one for each of its sequences."""
        _tell(self._rounds, rounds)

    def begun(self, handle: Handle) -> None:
        """Its prompt is about to be read. Fine to say more than once."""
        if not handle.begun:
            handle.begun = True
            _tell(self._begun, handle)

    def ended(self, handle: Handle) -> None:
        """Nothing more will come. One that never had a row begins and ends here."""
        self.begun(handle)
        _tell(self._ended, handle)


def _tell(those: list[Callable[[Any], object]], what: object) -> None:
    for listener in tuple(those):
        try:
            listener(what)
        except Exception:
            log.warning("a listener failed and is told nothing any more: %r", listener, exc_info=True)
            _remove(those, listener)


def _remove(those: list[Callable[[Any], object]], listener: Callable[[Any], object]) -> None:
    with suppress(ValueError):  # it raised, and is gone already
        those.remove(listener)
