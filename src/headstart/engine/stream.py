"""The pieces of one answer, for the thread that reads them; and the claim that a reader has on the engine.

Knows: that nothing is to be computed for nobody. Does not know: prompts, or how anything is computed.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Self

from ..types import Completion, Piece, Request, TokenLogprob
from .engine import Engine
from .handle import Handle

__all__ = ["Claim", "Stream"]


class Claim:
    """Somebody waits for these requests. When nobody can any more, they are stopped: nothing is computed for nobody."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._handles: list[Handle] = []
        self._lost = weakref.finalize(self, _discard, engine, self._handles)
        self._lost.atexit = False

    def prepare(self, request: Request) -> Handle:
        """The request's handle, claimed before it goes in, so that none can be lost."""
        handle = self._engine.prepare(request)
        self._handles.append(handle)
        return handle

    def abort(self) -> None:
        """Stop what still runs, now."""
        for handle in self._handles:
            self._engine.abort(handle)
        self._lost.detach()


def _discard(engine: Engine, handles: list[Handle]) -> None:
    for handle in handles:
        engine.discard(handle)


class Stream(Iterator[Piece]):
    """The pieces of one answer, as they come. Closing or dropping it early aborts the request and frees its row."""

    def __init__(self, engine: Engine, request: Request) -> None:
        self._engine, self._closed = engine, False
        self._claim = Claim(engine)
        self._handle = self._claim.prepare(request)
        self._enter()

    def _enter(self) -> None:
        self._engine.enter(self._handle)

    @property
    def id(self) -> str:
        return self._handle.request.id

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        return self._handle.request.prompt

    @property
    def done(self) -> bool:
        """Has the request ended? There may still be pieces to read."""
        return self._handle.done

    def __next__(self) -> Piece:
        if self._closed:
            raise StopIteration
        try:
            self._engine.drive(lambda: self._handle.news)
            for piece in self._handle.pieces():
                return piece
            self._engine.drive(lambda: self._handle.done)
        except BaseException:
            self.close()
            raise
        self._handle.raise_failure()
        raise StopIteration

    def close(self) -> None:
        self._closed = True
        self._claim.abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprob | None, ...] | None:
        """Log-probabilities of the prompt's tokens, where they are asked for; all are there with the first piece."""
        return self._handle.prompt_logprobs

    def completion(self) -> Completion:
        """The whole answer, once the stream has ended; before that it raises."""
        return self._handle.completion()

    def result(self) -> Completion:
        """The whole answer: waits for it, and raises if it failed."""
        try:
            self._engine.drive(lambda: self._handle.done)
        except BaseException:
            self.close()
            raise
        self._handle.raise_failure()
        return self.completion()
