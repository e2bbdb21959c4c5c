"""How long answers are: how many tokens a sequence is expected to emit yet.

Knows: what running sequences emitted, and how long those that ended were. Does not know: what anything costs.
"""

from __future__ import annotations

from ..types import DraftView

__all__ = ["Answers"]


class Answers:
    """The usual length of answers, as seen lately."""

    USUAL = 256.0  # tokens of an answer, before any was seen

    def __init__(self) -> None:
        self._emitted: dict[str, int] = {}  # of running sequences
        self._length = self.USUAL

    def add(self, sequence_id: str, emitted: int) -> None:
        self._emitted[sequence_id] = self._emitted.get(sequence_id, 0) + emitted

    def end(self, sequence_id: str) -> None:
        emitted = self._emitted.pop(sequence_id, 0)
        if emitted:
            self._length += 0.1 * (emitted - self._length)

    def left(self, view: DraftView) -> float:
        """Tokens that a sequence is expected to emit yet."""
        written = len(view.tokens) - view.prompt_length
        expected = max(self._length - written, (self._length + written) / 4)
        most = view.params.max_tokens
        return expected if most is None else min(expected, most - written)
