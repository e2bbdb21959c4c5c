"""How few tokens a text can have: so that one is known to be too long before it is tokenized.

Knows: the parts of Rust tokenizers that lose nothing of a text, or lose what can be counted. Does not know: contexts,
or who asks. Of whatever it is not sure, it says nothing: then only tokenizing tells.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tokenizers import models
from tokenizers.pre_tokenizers import ByteLevel

__all__ = ["NFC", "TokenBytes"]

NFC = 4  # bytes that NFC makes one of, at the most: three become K, say (``tests/test_machine_token_bytes.py``)
_CHARACTER = 4  # bytes of one that no token spells
_KEEPING = {"ByteLevel", "Digits", "Metaspace", "UnicodeScripts"}  # pre-tokenizers that drop nothing
_NEVER = frozenset((0xC0, 0xC1, *range(0xF5, 0x100)))  # bytes that UTF-8 does not have


@dataclass(frozen=True)
class TokenBytes:
    """What tokens of one tokenizer stand for."""

    most: int  # bytes of text that a token stands for, at the most
    lost: bytes = b""  # bytes that there is no token for, and that are dropped

    def fewest(self, text: str) -> int:
        """Tokens that the text has at the least."""
        kept = text.encode(errors="surrogatepass")  # a lone one is refused by whoever encodes the text
        if self.lost:
            kept = kept.translate(None, self.lost)
        return -(-len(kept) // self.most)

    @staticmethod
    def of(backend: Any) -> TokenBytes | None:
        """Of a Rust tokenizer; None: that cannot be said."""
        model: Any = backend.model
        added = backend.get_added_tokens_decoder().values()
        if not isinstance(model, models.BPE) or model.dropout or any(each.lstrip or each.rstrip for each in added):
            return None
        before, steps = _parts(backend.pre_tokenizer, "pretokenizers"), _parts(backend.normalizer, "normalizers")
        shrinks = [_shrinks(step) for step in steps]
        if backend.truncation is not None or None in shrinks or not all(map(_keeps, before)):
            return None
        known = backend.get_vocab(with_added_tokens=False)
        if any(part["type"] == "ByteLevel" for part in before):
            found = _of_bytes(model, known)
        else:
            found = _of_characters(model, known)
        if found is None or (found.lost and steps):  # what is lost of a text is not what it was before
            return None
        most = max([found.most, *(len(each.content.encode()) for each in added)])
        for shrink in shrinks:
            most *= shrink or 1
        return TokenBytes(most, found.lost)


def _of_bytes(model: Any, known: dict[str, int]) -> TokenBytes | None:
    """Tokens are spelt with a character for each byte. Without a token for unknown ones, bytes that have none drop."""
    lost = [byte for byte in range(256) if byte not in _NEVER and _BYTES[byte] not in known]
    if lost and model.unk_token is not None:
        return None
    return TokenBytes(max(map(len, known), default=1), bytes(lost))


def _of_characters(model: Any, known: dict[str, int]) -> TokenBytes | None:
    spelt = model.byte_fallback and all(f"<0x{byte:02X}>" in known for byte in range(256))
    if not spelt and (model.unk_token not in known or model.fuse_unk):  # any number of characters may be one token
        return None
    return TokenBytes(max([_CHARACTER, *(len(token.encode()) for token in known)]))


def _byte_names() -> dict[int, str]:
    """How byte-level tokenizers spell bytes: printable ones as they are, the others in order from U+0100 on."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    found = {byte: chr(byte) for byte in own}
    others = (byte for byte in range(256) if byte not in found)
    found |= {byte: chr(256 + place) for place, byte in enumerate(others)}
    assert set(found.values()) == set(ByteLevel.alphabet())
    return found


_BYTES = _byte_names()


def _parts(part: Any, within: str) -> list[dict[str, Any]]:
    """A normalizer or pre-tokenizer as records, those of a sequence one by one."""
    if part is None:
        return []
    found = json.loads(part.__getstate__())
    return list(found[within]) if found["type"] == "Sequence" else [found]


def _shrinks(step: dict[str, Any]) -> int | None:
    """How many bytes a normalizer makes one of, at the most."""
    if step["type"] == "NFC":
        return NFC
    if step["type"] == "Prepend":
        return 1
    if step["type"] == "Replace" and "String" in step["pattern"]:
        return 1 if len(step["content"].encode()) >= len(step["pattern"]["String"].encode()) else None
    return None


def _keeps(part: dict[str, Any]) -> bool:
    """Does every character stay that a pre-tokenizer sees?"""
    return part["type"] in _KEEPING or (part["type"] in ("Split", "Punctuation") and part["behavior"] != "Removed")
