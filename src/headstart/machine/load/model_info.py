"""A model whose weights lie packed: its settings, its tokenizer and its report, without transformers' modules.

Knows: what those who serve a packed model still ask of it. Does not know: where packed weights come from.

What makes models in transformers takes seconds to import and float weights take memory; neither is needed here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerFast

from .loading import Capability, Loaded
from .quiet import quiet

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["Outline", "generation_in", "outlined", "report_from", "report_text", "save_tokenizer"]

_PLAIN_TOKENIZERS = ("PreTrainedTokenizerFast", "TokenizersBackend")


class Outline:
    """Stands where a ``PreTrainedModel`` would: it can be asked about, and not called."""

    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self, config: Any, generation_config: Any, architecture: str) -> None:
        self.config, self.generation_config, self.architecture = config, generation_config, architecture

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """None: the weights are packed."""
        return iter(())


def generation_in(folder: Path) -> GenerationConfig | None:
    """The settings for generating that lie in a folder, if any do."""
    return GenerationConfig.from_pretrained(folder) if (folder / "generation_config.json").exists() else None


def outlined(folder: Path, report: Capability, tokenizer: PreTrainedTokenizerBase | None = None) -> Loaded:
    """The model that ``folder`` has the configuration of (and the tokenizer, if none is given)."""
    with quiet():
        # The base class: a family's own imports all of transformers, and nothing but names and numbers is asked for.
        config = PreTrainedConfig.from_pretrained(folder, trust_remote_code=False)
        generation = generation_in(folder)
        if tokenizer is None and report.tokenizer_size is not None:
            tokenizer = _tokenizer(folder)
    model = cast("PreTrainedModel", Outline(config, generation, report.architecture))
    return Loaded(model, tokenizer, report)


def _tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer in a folder; without asking for its family where its own files say that it has none."""
    settings = folder / "tokenizer_config.json"
    if (
        settings.exists()
        and json.loads(settings.read_text(encoding="utf-8")).get("tokenizer_class") in _PLAIN_TOKENIZERS
    ):
        return PreTrainedTokenizerFast.from_pretrained(folder, trust_remote_code=False)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write it into a folder. Raises OSError if that cannot be done."""
    try:
        tokenizer.save_pretrained(folder)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # the library tokenizers has no other name for a disk that is full
        raise OSError(str(error)) from error


def report_text(report: Capability) -> str:
    return json.dumps(asdict(report))


def report_from(text: str) -> Capability | None:
    """What ``report_text`` wrote; None if it was another version that did."""
    try:
        values = json.loads(text)
        return Capability(**values | {name: tuple(values[name]) for name in ("reasons", "notes")})
    except (ValueError, TypeError, KeyError):
        return None
