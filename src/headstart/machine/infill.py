"""Fill in the middle: a beginning and an end become a prompt whose answer stands between them.

Knows: how families of code models spell the tokens that say so, and which tokens end the middle.
Does not know: models, requests, or which tokenizer a text came from.

All of them take the beginning first: its token, the text before, the next token, the text behind, the last token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import InvalidParameter
from .messages import check_text

__all__ = ["Infill"]

#: the tokens before the beginning, before the end and before the middle; and those that end it, where a tokenizer has
#: them. An answer's own end tokens end it, too.
_FAMILIES: tuple[tuple[tuple[str, str, str], tuple[str, ...]], ...] = (
    (("<fim_prefix>", "<fim_suffix>", "<fim_middle>"), ("<|endoftext|>", "<file_sep>")),  # StarCoder, Granite
    (("<fim-prefix>", "<fim-suffix>", "<fim-middle>"), ("<|endoftext|>",)),  # SantaCoder
    (  # Qwen-coder, CodeGemma
        ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
        ("<|endoftext|>", "<|fim_pad|>", "<|file_sep|>", "<|file_separator|>"),
    ),
    (
        ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
        (),
    ),  # DeepSeek-coder
    (("▁<PRE>", "▁<SUF>", "▁<MID>"), ("▁<EOT>",)),  # CodeLlama
)
_MARK = "\u263a"  # stands before a text so that a tokenizer puts no space of its own there


@dataclass(frozen=True)
class Infill:
    """One tokenizer's way to fill in the middle."""

    tokenizer: Any
    places: tuple[int, int, int]  # the three tokens
    ends: tuple[int, ...]

    @staticmethod
    def of(tokenizer: Any) -> Infill:
        """``InvalidParameter`` where the tokenizer has no such tokens."""
        known = tokenizer.get_vocab()
        for names, ends in _FAMILIES:
            if all(name in known for name in names):
                first, second, third = (int(known[name]) for name in names)
                return Infill(tokenizer, (first, second, third), tuple(int(known[end]) for end in ends if end in known))
        raise InvalidParameter(
            "suffix", "needs a model that fills in the middle, and this one's tokenizer has no tokens for that"
        )

    def encode(self, prefix: str | Sequence[int], suffix: str) -> list[int]:
        """The prompt; ``prefix`` as text or as token ids."""
        check_text("suffix", suffix)
        bos = self.tokenizer.bos_token_id
        opening = [token for token in self.tokenizer.encode("")[:1] if token == bos]
        if isinstance(prefix, str):
            check_text("prompt", prefix)
            before = self._bare(prefix)
        else:
            before = list(prefix[1:] if opening and prefix[:1] == opening else prefix)
        first, second, third = self.places
        return [*opening, first, *before, second, *self._within(suffix), third]

    def _bare(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def _within(self, text: str) -> list[int]:
        """Tokens of a text that is not the beginning of one: some tokenizers put a space before those."""
        mark, found = self._bare(_MARK), self._bare(_MARK + text)
        return found[len(mark) :] if found[: len(mark)] == mark else self._bare(text)
