"""Hugging Face's own ``generate`` on the same prompts: plain, with prompt lookup, and with the draft as its assistant.

Knows: how to load the models for transformers and how to time an answer. Does not know: Headstart's engine.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from transformers import GenerationConfig

from ..drafters.base import Drafter, registered_drafters
from ..errors import InvalidParameter
from ..machine.head import head_folder
from ..machine.load.embedded import EMBEDDED, embedded_folder
from ..machine.load.loading import load
from ..machine.quantize import QUANTIZATIONS
from ..types import SamplingParams, Tell, silent
from .figures import Measured
from .system import System

__all__ = ["PEERS", "HuggingFace", "check_peers", "open_peers"]

PEERS = ("hf",)
LOOKUP_TOKENS = 10  # that prompt lookup copies at most: what its authors suggest


class HuggingFace:
    """One way to call ``generate``. Whole batches only: it cannot stop between two tokens."""

    def __init__(self, name: str, model: Any, eos: Sequence[int], alone: bool, **options: Any) -> None:
        """``alone``: it takes one prompt at a time. ``options``: more of ``generate``'s arguments."""
        self.name, self.model, self.alone, self._options, self._eos = name, model, alone, options, list(eos)

    def facts(self) -> dict[str, Any]:
        count = sum(p.numel() for p in self.model.parameters())
        place = {"dtype": str(self.model.dtype).removeprefix("torch."), "device": str(self.model.device)}
        return {"architecture": type(self.model).__name__, "parameters": count, **place, "kernels": "transformers"}

    def block(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> Measured:
        """Answers to these prompts together. The time to the first token is that of an answer of one token."""
        first, _ = self._timed(prompts, params[0], 1)
        seconds, ids = self._timed(prompts, params[0], params[0].max_tokens)
        tokens = sum(map(len, ids))
        return Measured(
            first_tokens=(first,) * len(prompts),
            tokens=tokens,
            seconds=seconds,
            decode_tokens=tokens - len(ids),
            decode_seconds=max(1e-9, seconds - first),
            ids=tuple(ids),
        )

    def _timed(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, tokens: int | None
    ) -> tuple[float, list[tuple[int, ...]]]:
        longest, device = max(map(len, prompts)), self.model.device
        pad = self._eos[0] if self._eos else 0
        ids = torch.tensor([[pad] * (longest - len(p)) + list(p) for p in prompts], device=device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device)
        settings: dict[str, Any] = {"max_new_tokens": tokens, "do_sample": params.temperature > 0, "pad_token_id": pad}
        if params.temperature > 0:
            settings |= {"temperature": params.temperature, "top_p": params.top_p, "top_k": params.top_k}
        config = GenerationConfig(eos_token_id=self._eos or None, **settings)
        if params.seed is not None:
            torch.manual_seed(params.seed)
        self._settle()
        started = perf_counter()
        with warnings.catch_warnings(), torch.inference_mode():
            warnings.simplefilter("ignore")
            out = self.model.generate(ids, attention_mask=mask, generation_config=config, **self._options)
        self._settle()
        seconds = perf_counter() - started
        return seconds, [_ended(line, self._eos) for line in out[:, longest:].tolist()]

    def _settle(self) -> None:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)


def _ended(ids: list[int], eos: Sequence[int]) -> tuple[int, ...]:
    """Up to and with what ends the answer: the rest is padding."""
    at = next((i for i, token in enumerate(ids) if token in eos), len(ids) - 1)
    return tuple(ids[: at + 1])


def check_peers(names: Sequence[str]) -> None:
    if unknown := [name for name in names if name not in PEERS]:
        raise InvalidParameter("peers", f"must be among {', '.join(PEERS)}, not {', '.join(unknown)}")


def open_peers(
    names: Sequence[str], system: System, rows: int, tell: Tell = silent
) -> tuple[list[HuggingFace], list[str]]:
    """The peers, and sentences about those that cannot be. ``system``: whose target, and whose draft if that is a
    model."""
    check_peers(names)
    if not names:
        return [], []
    tell("loading the target for transformers")
    options, notes = system.options, []
    live: Any = system.target.model
    floats = isinstance(live, torch.nn.Module) and system.report.dtype not in QUANTIZATIONS
    mine = floats and system.device.type == "cuda"
    source = options.model if options.model is not None else embedded_folder(tell)
    target: Any = live if mine else _loaded(source, system)
    eos = system.eos
    found = [HuggingFace("hf generate", target, eos, alone=False)]
    if not mine and system.report.dtype != str(target.dtype).removeprefix("torch."):
        notes.append(
            f"transformers runs the target in {str(target.dtype).removeprefix('torch.')}, and Headstart in "
            f"{system.report.dtype}: other numbers, and perhaps other text"
        )
    if rows > 1:
        return found, [
            *notes,
            "assisted generation in transformers takes one prompt at a time: left out for --rows > 1",
        ]
    found.append(HuggingFace("hf prompt lookup", target, eos, alone=True, prompt_lookup_num_tokens=LOOKUP_TOKENS))
    draft = options.draft
    is_model = not isinstance(draft, Drafter) and draft is not None and draft not in ("auto", *registered_drafters())
    if is_model and head_folder(draft) is None:
        tell("loading the draft for transformers")
        draft = embedded_folder(tell) if isinstance(draft, str) and draft == EMBEDDED else draft
        assistant = draft if isinstance(draft, torch.nn.Module) else _loaded(draft, system)
        found.append(HuggingFace("hf assistant_model", target, eos, alone=True, assistant_model=assistant))
    return found, notes


def _loaded(source: Any, system: System) -> Any:
    options = system.options
    trusted = options.trust_remote_code
    dtype = options.dtype if isinstance(source, (str, Path)) else "auto"
    return load(source, dtype=dtype, device=system.device, trust_remote_code=trusted, token=options.token).model
