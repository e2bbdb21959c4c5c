"""What a model thinks before it answers: whether it does, and how many tokens that took.

Knows: the tags in chat templates, prompts and answers. Does not know: how an answer is taken apart (``replies``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..machine.text import TextCodec
from .replies import Thinking

__all__ = ["Reasoning"]

_TAGS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
_TAIL = 16  # tokens at the end of a prompt


@dataclass(frozen=True)
class Reasoning:
    """The served model's thinking. ``tags``: None where it has no marks for it."""

    codec: TextCodec
    tags: Thinking | None

    @staticmethod
    def of(codec: TextCodec) -> Reasoning:
        template = codec.template or ""
        found = next((Thinking(*tags) for tags in _TAGS if tags[1] in template), None)
        return Reasoning(codec, found)

    @property
    def special(self) -> bool:
        """Are the marks special tokens, which a text leaves out unless it is told otherwise?"""
        return self.tags is not None and self.codec.special_id(self.tags.closing) is not None

    def thinking(self, prompt: Sequence[int]) -> Thinking | None:
        """How the answer to this prompt may begin. A template may open the thinking, or open and close it, itself."""
        if self.tags is None:
            return None
        end = self.codec.decode(prompt[-_TAIL:], special=True).rstrip()
        if end.endswith(self.tags.closing):
            return None
        return replace(self.tags, opened=end.endswith(self.tags.opening))

    def tokens(self, prompt: Sequence[int], text: str, ids: Sequence[int]) -> int:
        """How many of an answer's tokens were spent on it, marks included."""
        tags = self.thinking(prompt)
        if tags is None or not (tags.opened or text.lstrip().startswith(tags.opening)):
            return 0
        low, high = 0, len(ids)  # the fewest tokens that hold the closing mark
        while low < high:
            middle = (low + high) // 2
            if tags.closing in self.codec.decode(ids[: middle + 1], special=True):
                high = middle
            else:
                low = middle + 1
        return min(low + 1, len(ids))
