"""One submitted request, as its caller sees it.

Knows: the request's choices and their pieces. Does not know: how they are computed. Safe to read from any thread.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..errors import GenerationFailed, HeadstartError
from ..types import Completion, Piece, Request
from .sequence import Sequence

__all__ = ["Handle"]


class Handle:
    """One submitted request, for its caller."""

    def __init__(self, request: Request, sequences: list[Sequence]) -> None:
        self.request = request
        self.sequences = sequences

    @property
    def done(self) -> bool:
        """Has every choice ended, with its rows given back and its statistics complete?"""
        return all(s.settled for s in self.sequences)

    @property
    def news(self) -> bool:
        """Is there a piece to read, or nothing more to come?"""
        return any(s.pieces for s in self.sequences) or self.done

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
