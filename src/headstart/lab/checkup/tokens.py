"""Do the token ids of two models mean the same? Their tokenizers are read as they are when the models are loaded.

Knows: where a folder and a GGUF file keep theirs. Does not know: what follows from it. It needs a torch that works, so
nothing of it is imported before it is asked for.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["tokens_differ"]


def tokens_differ(target: Path, draft: Path) -> str | None:
    """In what; None: in no token. Raises LookupError where one of them has none, and whatever reading them raises."""
    from ...machine.load.loading import tokenizers_differ

    return tokenizers_differ(_read(target), _read(draft))


def _read(path: Path) -> PreTrainedTokenizerBase:
    from ...machine.load.gguf import empty_model, read_tokenizer
    from ...machine.load.gguf_header import is_gguf, read_header
    from ...machine.load.hub import Remote
    from ...machine.load.loading import fetch_tokenizer
    from ...machine.load.quiet import quiet

    with quiet():
        if is_gguf(path):
            header = read_header(path)
            found = read_tokenizer(path, header, empty_model(path, header))
        else:
            found = fetch_tokenizer(str(path), Remote(local_files_only=True))
    if found is None:
        raise LookupError(f"{path.name} has no tokenizer")
    return found
