"""A tokenizer with a larger vocabulary: the given one, and tokens that join two of its own.

Knows: byte-level BPE as Hugging Face's tokenizers write it. Does not know: models, or grammars.
"""

from __future__ import annotations

import json
from itertools import product
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

__all__ = ["enlarged"]


def enlarged(tokenizer: Any, size: int) -> Any:
    """Merges of frequent beginnings with frequent ends until there are ``size`` tokens: most tokens of a vocabulary of
    that size are words of several parts, too."""
    written = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary: dict[str, int] = written["model"]["vocab"]
    merges = written["model"]["merges"]
    ordered = sorted(vocabulary, key=vocabulary.__getitem__)
    words = [text for text in ordered if len(text) > 2 and text[0] == "Ġ" and text[1:].isalpha()]
    ends = [text for text in ordered if len(text) > 1 and text.isascii() and text.isalpha()]
    taken = max(len(tokenizer), max(vocabulary.values()) + 1)
    for end, word in product(ends, words[:8000:10]):
        if taken >= size:
            break
        if word + end not in vocabulary:
            vocabulary[word + end] = taken
            merges.append([word, end])
            taken += 1
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(written)), eos_token=tokenizer.eos_token
    )
