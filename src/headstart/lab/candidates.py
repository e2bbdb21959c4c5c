"""Which drafts there are to choose from, and what is to be said of each before anything is measured.

Knows: drafters by name, heads, draft models with weights of fewer bits, what the catalogue proposes, and the rules of
thumb (size, family, instruction tuning, memory). Does not know: what any of them is worth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..drafters.base import Drafter, registered_drafters
from ..errors import HeadstartError
from ..machine.head import head_folder
from ..machine.load.embedded import embedded_draft, is_embedded
from ..machine.load.faults import local_path
from ..machine.load.gguf_header import is_quantized
from ..machine.load.hub import Remote, snapshot
from ..machine.load.loading import Capability, fetch_tokenizer, tokenizers_differ
from .catalogue import Known, known_drafts
from .system import System

__all__ = ["Candidate", "candidates", "checked", "named"]

TENFOLD = 10  # how many times larger a target should be than its draft
CPU_KINDS, GPU_KINDS = ("int8", "int4"), ("none", "int8")


@dataclass(frozen=True)
class Candidate:
    """One draft to try. ``draft`` and ``quantization`` are what ``LLM`` takes."""

    name: str
    kind: str  # "drafter", "head" or "model"
    draft: Any
    quantization: str = "auto"  # draft_quantization, here of a GGUF file its own bits; "none": as the model is
    notes: tuple[str, ...] = ()

    @property
    def settings(self) -> dict[str, Any]:
        """For ``System.sibling``."""
        return {"draft_quantization": None if self.quantization == "none" else self.quantization}

    def noted(self, *notes: str) -> Candidate:
        return replace(self, notes=(*self.notes, *notes))


def named(draft: object) -> str:
    """A draft's name without its folder."""
    if isinstance(draft, Drafter):
        return draft.name
    text = str(draft) if isinstance(draft, (str, Path)) else type(draft).__name__
    return text.rstrip("/").rsplit("/", 1)[-1] if Path(text).expanduser().exists() else text


def candidates(
    model: Any,
    given: Sequence[Any] | None,
    *,
    device: str,
    quantization: str | None = "auto",
    dtype: object = "auto",
    tokenizer: PreTrainedTokenizerBase | None = None,
    remote: Remote | None = None,
) -> tuple[list[Candidate], list[str]]:
    """The drafts to measure for a target, and what else might be worth a download.

    ``given``: what the user named; None: the catalogue is asked, and what of it lies on this machine is measured.
    ``device``: "cpu" or "cuda". ``quantization``: of drafts; "auto": what there is for the device, each kind a
    candidate of its own. ``dtype``: "auto", or floats that are asked for in the place of a file's own bits.
    ``tokenizer``: the target's, to compare with those of proposals that are here.
    """
    found = [Candidate(name, "drafter", name) for name in registered_drafters()]
    if (model is None or is_embedded(model)) and embedded_draft() is not None:
        found.append(
            Candidate("auto", "head", "auto", notes=("the head that ships with the embedded model, and lookup",))
        )
    proposals: list[str] = []
    if given is None:
        given = []
        for entry in known_drafts(model):
            here = _here(entry.draft, remote)
            if entry.loadable and here is not None:
                given = [*given, entry.draft]
            else:
                proposals.append(_compared(entry, tokenizer, remote).sentence)
    for draft in given:
        found += _variants(draft, device, quantization, own_bits=dtype == "auto")
    unique: dict[tuple[object, str], Candidate] = {}
    for each in found:
        same = str(each.draft) if isinstance(each.draft, (str, Path)) else id(each.draft)
        unique.setdefault((same, each.quantization), each)
    names: dict[str, Candidate] = {}
    for each in unique.values():  # models that are objects have no names of their own
        name = each.name
        while name in names:
            name += "'"
        names[name] = replace(each, name=name)
    return list(names.values()), proposals


def _here(name: str, remote: Remote | None) -> Path | None:
    """Where a model lies on this machine; nothing is fetched."""
    local = local_path(name)
    if local is not None:
        return local
    try:
        found = snapshot(name, replace(remote or Remote(), local_files_only=True))
    except (OSError, ValueError):
        return None
    weights = found is not None and any(file.suffix in (".safetensors", ".bin") for file in found.iterdir())
    return found if weights else None  # of some models only the tokenizer was fetched


def _compared(entry: Known, tokenizer: PreTrainedTokenizerBase | None, remote: Remote | None) -> Known:
    """What the catalogue says of a draft, held against its tokenizer where that lies here."""
    try:
        other = fetch_tokenizer(entry.draft, replace(remote or Remote(), local_files_only=True))
    except HeadstartError:
        return entry
    if tokenizer is None or other is None or entry.kind != "model":
        return entry
    differs = tokenizers_differ(tokenizer, other)
    return replace(entry, verified=differs is None, differs=differs)


def _variants(draft: Any, device: str, quantization: str | None, *, own_bits: bool) -> list[Candidate]:
    """A draft with every kind of weights that it could run with; first, on a CPU, as it runs where none is named."""
    if isinstance(draft, str) and draft in ("auto", *registered_drafters()):
        return [Candidate(draft, "drafter", draft)]
    if isinstance(draft, Drafter):
        return [Candidate(named(draft), "drafter", draft)]
    if head_folder(draft) is not None:
        return [Candidate(named(draft), "head", draft)]
    kinds: tuple[str, ...] = (quantization or "none",)
    if quantization == "auto":
        kinds = CPU_KINDS if device == "cpu" else GPU_KINDS
        if device == "cpu" and own_bits and _has_own_bits(draft):
            kinds = ("auto", *kinds)
    as_it_is = ("none", "auto")
    return [
        Candidate(named(draft) + (f" ({kind})" if kind not in as_it_is else ""), "model", draft, kind) for kind in kinds
    ]


def _has_own_bits(draft: Any) -> bool:
    try:
        return isinstance(draft, (str, Path)) and is_quantized(draft)
    except HeadstartError:  # a damaged file: opening it says so
        return False


def checked(candidate: Candidate, target: System, system: System) -> Candidate:
    """What there is to say of a draft that was opened beside its target."""
    draft = system.draft_report
    if draft is None or candidate.kind != "model":
        return candidate
    return candidate.noted(*_rules(target.report, draft), *_template(target, candidate))


def _rules(target: Capability, draft: Capability) -> list[str]:
    notes = []
    if (times := target.parameters / max(1, draft.parameters)) < TENFOLD:
        notes.append(
            f"it has {draft.parameters / 1e6:,.0f}M weights, the target {times:.1f} times as many: a rule of thumb "
            f"asks for {TENFOLD} times; what was measured decides"
        )
    if draft.architecture != target.architecture:
        notes.append(f"it is a {draft.architecture}, the target a {target.architecture}: of another family, perhaps")
    return notes


def _template(target: System, candidate: Candidate) -> list[str]:
    """Is one of the two tuned on conversations, and the other not?"""
    words = ("instruct", "chat", "-it")
    if not isinstance(candidate.draft, (str, Path)) or not isinstance(target.options.model, (str, Path)):
        return []
    mine, theirs = (
        any(word in str(name).lower() for word in words) for name in (candidate.draft, target.options.model)
    )
    if mine == theirs:
        return []
    tuned, other = ("the draft", "the target") if mine else ("the target", "the draft")
    return [f"{tuned} seems to be tuned on conversations and {other} not: they agree less than they could"]
