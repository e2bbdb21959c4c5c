"""One submitted request, as its caller sees it.

Knows: the request's choices and their pieces. Does not know: how they are computed. Safe to read from any thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ..errors import GenerationFailed, HeadstartError
from ..types import Completion, Piece, Request
from .sequence import Sequence

__all__ = ["Handle"]


class Handle:
    """One submitted request, for its caller."""

    def __init__(self, request: Request, sequences: list[Sequence], running: Mapping[str, Handle]) -> None:
        """``running``: the engine's requests by id. A handle is done when it was there, and is there no longer."""
        self.request = request
        self.sequences = sequences
        self.entered = False  # it was put among the running ones
        self.why: str | None = None  # it is aborted, for people; None where its caller knows
        self.begun = False  # those who listen were told that its prompt is being read
        self._running = running

    @property
    def done(self) -> bool:
        """Has every choice ended, with its rows given back and its statistics complete?"""
        return self.entered and self._running.get(self.request.id) is not self

    @property
    def news(self) -> bool:
        """Is there a piece to read, or nothing more to come?"""
        return self.unread > 0 or self.done

    @property
    def unread(self) -> int:
        """How many pieces wait for ``pieces``."""
        return sum(len(s.pieces) for s in self.sequences)

    def pieces(self) -> Iterator[Piece]:
        """The pieces that came since the last call."""
        for sequence in self.sequences:
            while sequence.pieces:
                yield sequence.pieces.popleft()

    def completion(self) -> Completion:
        """The whole answer, once ``done``."""
        if not all(s.finished for s in self.sequences):
            raise HeadstartError(f"{self.request.id} has not ended yet: read its stream to the end, or close it")
        return Completion(self.request.id, self.request.prompt, tuple(s.choice() for s in self.sequences))

    def raise_failure(self) -> None:
        """Raise if any choice failed."""
        for sequence in self.sequences:
            if sequence.finish_reason == "error":
                raise GenerationFailed(f"request {self.request.id}: {sequence.error}")
