"""Who wants to know what happens: rounds, and requests that begin and end.

Knows: that a listener may be anybody's code: one that raises is told nothing any more, and hurts no request.
Does not know: what becomes of what it tells.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Generic, TypeVar

from ..types import Round
from .handle import Handle

__all__ = ["Listeners"]

log = logging.getLogger(__name__)

T = TypeVar("T")


class _Kind(Generic[T]):
    """All who are told of one kind of event. They may come and go from any thread, at any time."""

    def __init__(self, *first: Callable[[T], object]) -> None:
        self._all = list(first)

    def tell(self, what: T) -> None:
        for listener in tuple(self._all):
            try:
                listener(what)
            except Exception:
                log.warning("a listener failed and is told nothing any more: %r", listener, exc_info=True)
                self._remove(listener)

    def until(self, closed: ExitStack, listener: Callable[[T], object] | None) -> None:
        """Tell this one, too, until ``closed`` is."""
        if listener is not None:
            self._all.append(listener)
            closed.callback(self._remove, listener)

    def _remove(self, listener: Callable[[T], object]) -> None:
        with suppress(ValueError):  # it raised, and is gone already
            self._all.remove(listener)


class Listeners:
    """Told by the thread that steps, in the middle of a step: they must be quick, and must not wait for the engine."""

    def __init__(self, *rounds: Callable[[list[Round]], object]) -> None:
        self._rounds = _Kind(*rounds)
        self._begun: _Kind[Handle] = _Kind()
        self._ended: _Kind[Handle] = _Kind()
        self.rounds = self._rounds.tell  # the records of one round, one for each of its sequences

    def listen(
        self,
        rounds: Callable[[list[Round]], object] | None = None,
        *,
        begun: Callable[[Handle], object] | None = None,
        ended: Callable[[Handle], object] | None = None,
    ) -> ExitStack:
        """Tell these, too, until what comes back is closed (it is a context manager)."""
        heard = ExitStack()
        self._rounds.until(heard, rounds)
        self._begun.until(heard, begun)
        self._ended.until(heard, ended)
        return heard

    def begun(self, handle: Handle) -> None:
        """Its prompt is about to be read. Fine to say more than once."""
        if not handle.begun:
            handle.begun = True
            self._begun.tell(handle)

    def ended(self, handle: Handle) -> None:
        """Nothing more will come. One that never had a row begins and ends here."""
        self.begun(handle)
        self._ended.tell(handle)
