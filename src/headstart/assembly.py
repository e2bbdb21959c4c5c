"""Puts models, a drafter, a controller and an engine together.

Knows: which parts a target and a wish for a draft need. Does not know: how any part works inside, or who uses them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from .config import Config
from .control.adaptive import AdaptiveController
from .control.controller import controller_for
from .drafters.base import DraftContext, Drafter, drafter_named, registered_drafters
from .drafters.head import HeadDrafter
from .drafters.model import ModelDrafter
from .drafters.portfolio import PortfolioDrafter
from .engine.engine import Engine
from .engine.warm_up import open_captured
from .errors import HeadstartWarning, InvalidParameter, ModelNotFound, ModelRefused
from .machine.cpu.cores import processors
from .machine.cpu.open import check_quantization, open_packed
from .machine.grammar import Grammars
from .machine.head import head_folder
from .machine.load.embedded import EMBEDDED, embedded_draft, embedded_folder, is_embedded
from .machine.load.hub import Remote
from .machine.load.loading import Capability, Loaded, eos_ids, find_model, same_tokenizer
from .machine.load.open import (
    Opened,
    Quantization,
    Runner,
    load_draft,
    load_target,
    ready_to_compile,
    runner_for,
    what_loads,
)
from .machine.load.packed_store import known_by
from .machine.load.pair_probe import LEAST_PARAMETERS, TOKENS, Promise, measure, pair_file, probe_text, recall, remember
from .machine.text import TextCodec, TextStream
from .maths.cost import Forecast
from .progress import Tell, telling
from .types import Request

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["Model", "assemble"]

Model: TypeAlias = "str | Path | PreTrainedModel"

LONGEST_DEFAULT = 8192  # tokens; a model that can hold more is given more only when asked


def assemble(
    model: Model | None,
    draft: Model | Drafter | None,
    config: Config,
    *,
    tokenizer: PreTrainedTokenizerBase | None,
    dtype: str | torch.dtype,
    draft_dtype: str | torch.dtype,
    quantization: Quantization,
    draft_quantization: Quantization,
    revision: str | None,
    check: bool,
    progress: Tell | None,
    opened: Opened | None = None,
    **placement: Any,
) -> tuple[Engine, Loaded, Capability | None, TextCodec | None, Grammars]:
    """Load everything: the engine, the target, what the draft model is, the codec if there is a tokenizer, what makes
    grammars. Arguments as of ``LLM``; ``placement``: device and trust; ``opened``: a target that is loaded already."""
    check_quantization("draft_quantization", draft_quantization)
    with telling(progress) as tell, ready_to_compile(model, placement, revision):
        source: Model = embedded_folder(tell) if model is None else model
        draft = "lookup" if draft == "auto" and not is_embedded(source) else draft
        _check_name(draft, placement)  # before gigabytes are read
        if opened is None:
            opened = _loaded(
                source, quantization, tell, tokenizer=tokenizer, dtype=dtype, revision=revision, **placement
            )
        sizes = _sizes(config, opened.loaded.report, check)
        runner, target = runner_for(opened, **sizes, invariant=config.engine.invariant)
        _check_threads(config.engine.threads, runner, target.report)
        vocab_size = target.report.tokenizer_size or runner.vocab_size
        controller = controller_for(config.draft)
        load = partial(load_draft, quantization=draft_quantization, dtype=draft_dtype, tell=tell, **placement)
        remote = Remote(revision, placement.get("token"))
        about = (draft_quantization, str(draft_dtype), config.draft.most, config.engine.threads)
        beside = _Beside(target, runner, source, remote, about, sizes, load, tell, config.draft.most)
        drafter = None
        if config.draft.most > 0:  # else nothing will be drafted, so nothing is loaded or asked either
            known, chunk = min(vocab_size, runner.vocab_size), config.engine.prefill_chunk
            given = partial(DraftContext, runner, known, controller, beside.open, prefill_chunk=chunk)
            drafter = _drafter(draft, given, tell)
        grammars = Grammars(target.tokenizer, width=runner.vocab_size, eos=(eos := eos_ids(target)))
        named = partial(open_captured, name=target.report.architecture, masks=grammars.possible)
        captured = named(runner, drafter, config.draft, vocab_size, tell)
        if drafter is not None:
            lengths = captured.lengths if captured is not None and captured.drafting else None
            controller.meet(free=drafter.free, ends_itself=drafter.ends_itself, lengths=lengths, **beside.known)
    codec = TextCodec(target.tokenizer) if target.tokenizer is not None else None
    engine = Engine(
        runner,
        drafter,
        controller,
        config.engine,
        vocab_size=vocab_size,
        eos=eos,
        text=(lambda request: _text(codec, request)) if codec is not None else None,
        captured=captured,
        max_gamma=config.draft.most,
    )
    return engine, beside.target, beside.draft, codec, grammars


def _loaded(source: Model, quantization: Quantization, tell: Tell, **how: Any) -> Opened:
    tell(what_loads(source))
    return load_target(source, quantization, tell=tell, **how)


def _text(codec: TextCodec, request: Request) -> TextStream:
    """What makes text of a request's tokens."""
    params = request.params
    return TextStream(codec, request.prompt, params.stop or (), special=not params.skip_special_tokens)


def _sizes(config: Config, report: Capability, check: bool) -> dict[str, Any]:
    """What every runner here is opened with: the draft's rows are as many and as long as the target's."""
    asked = config.engine.max_model_len
    if asked is not None and report.max_context and asked > report.max_context:
        raise InvalidParameter("max_model_len", f"is {asked}, but the model was made for {report.max_context}")
    return {
        "rows": config.engine.max_rows,
        "max_len": asked or min(report.max_context or LONGEST_DEFAULT, LONGEST_DEFAULT),
        "margin": 2 * (config.draft.most + 1) + 2,  # a round, and the one launched ahead of its result
        "probe": check,
        "threads": config.engine.threads,
    }


def _check_threads(asked: int | None, runner: Runner, report: Capability) -> None:
    """Say it where the wished number of threads does nothing, or harm."""
    if asked is None or runner.device.type != "cpu":
        return
    if not runner.own_threads and asked != torch.get_num_threads():
        said = f"does nothing: {report.architecture} runs on torch, with {torch.get_num_threads()} threads"
        warnings.warn(f"threads={asked} {said} (torch.set_num_threads)", HeadstartWarning, stacklevel=4)
    if runner.own_threads and asked > processors():
        said = (
            f"is more than the {processors()} processors here: threads that wait for each other are many times slower"
        )
        warnings.warn(f"threads={asked} {said}", HeadstartWarning, stacklevel=4)


def _check_name(draft: Model | Drafter | None, placement: dict[str, Any]) -> None:
    """Refuse a draft that is neither a drafter's name nor a model that can be had."""
    names = ["auto", EMBEDDED, *registered_drafters()]
    if draft is None or draft in names or isinstance(draft, Drafter) or hasattr(draft, "config"):
        return
    if not isinstance(draft, (str, Path)):
        raise InvalidParameter("draft", f"must be a drafter's name, a model, a Drafter or None, not {draft!r}")
    try:
        find_model(draft, Remote(token=placement.get("token")))
    except ModelNotFound as error:
        known = f"{', '.join(map(repr, names))}, and None, which is 'none' on the command line"
        raise ModelNotFound(f"draft {str(draft)!r} is no drafter's name (there are {known}), and {error}") from error


def _drafter(draft: Model | Drafter | None, given: Callable[[Model], DraftContext], tell: Tell) -> Drafter | None:
    """The drafter that was asked for: a name, a head's folder, or a model. ``given``: what it is built with."""
    if draft is None or isinstance(draft, Drafter):
        return draft
    if draft == "auto":
        shipped = embedded_draft()
        if shipped is not None:
            return PortfolioDrafter.for_target(given(shipped))
        draft = "lookup"
    if isinstance(draft, str) and draft in registered_drafters():
        return drafter_named(draft, given(draft))
    if isinstance(draft, str) and draft == EMBEDDED:
        draft = embedded_folder(tell)
    folder = head_folder(draft)
    return HeadDrafter.for_target(given(folder)) if folder is not None else ModelDrafter.for_target(given(draft))


@dataclass
class _Beside:
    """Opens draft models beside a target."""

    target: Loaded  # its report says what was taken for granted, and what was chosen
    runner: Runner  # the target's
    source: Model  # where the target is from
    remote: Remote
    about: tuple[object, ...]  # how the draft is asked for
    sizes: dict[str, Any]
    load: Callable[..., Opened]
    tell: Tell
    most: int  # tokens that a round may draft
    cost: float | None = None  # bytes that the draft reads for a token, over the target's; None: nobody knows
    forecast: Forecast | None = None  # None: it was not measured
    draft: Capability | None = None  # what was opened

    @property
    def known(self) -> dict[str, Any]:
        """What a controller may know of the pair before it drafts: see ``Controller.meet``."""
        return {"cost": self.cost, "forecast": self.forecast, "ragged": self.runner.ragged}

    def open(self, draft: Model) -> Runner:
        """See ``DraftContext.open_model``."""
        self.tell(what_loads(draft))
        place = self._pair_file(draft)
        promise = recall(place)
        opened = self.load(draft, auto="int4" if promise is not None and promise.kind == "int4" else "int8")
        self._check(opened.loaded)
        if promise is None and not self._hopeless(opened):
            opened, promise = self._measured(draft, opened)
            if promise is not None:
                remember(place, promise)
        runner, loaded = runner_for(opened, **self.sizes, draft=True)
        self.draft = loaded.report
        if promise is not None:
            self.forecast = promise.forecast()
            self._note(str(promise))
        if not any("expert" in name for name, _ in loaded.model.named_parameters()):  # else it reads some of them
            self.cost = loaded.report.bytes / self.target.report.bytes
        return runner

    def _check(self, draft: Loaded) -> None:
        """Refuse a draft that cannot guess for this target."""
        difference, longest = same_tokenizer(self.target, draft), self.sizes["max_len"]
        if difference is not None:
            raise ModelRefused(
                f"the draft cannot guess for this target: {difference}. Use a draft of the same family, "
                "or draft='lookup', which needs no second model."
            )
        self._note_sizes(draft)
        if draft.report.max_context and draft.report.max_context < longest:
            raise ModelRefused(
                f"the draft's context of {draft.report.max_context} tokens is shorter than the target's "
                f"{longest}: set max_model_len={draft.report.max_context} or use another draft."
            )

    def _pair_file(self, draft: Model) -> Path | None:
        """Where what is measured of this pair is kept; None: nothing is, or the models have no files to be known by."""
        if self.runner.device.type != "cpu":
            return None
        files = known_by(draft, replace(self.remote, revision=None)), known_by(self.source, self.remote)
        if None in files:
            return None
        return pair_file(str(files), self.target.report.dtype, *self.about, torch.get_num_threads())

    def _hopeless(self, opened: Opened) -> bool:
        """Is there nothing to choose, and the draft too large to be asked whatever a measurement says?"""
        if opened.choosable or opened.packed is None:
            return False
        return opened.packed.bytes >= AdaptiveController.TOO_LARGE * self.target.report.bytes

    def _measured(self, draft: Model, opened: Opened) -> tuple[Opened, Promise | None]:
        """What the draft promises beside this target, if it runs on the CPU's kernels; with weights of 8 bits or of 4,
        whichever promise more, where nobody asked for either."""
        large = opened.loaded.report.parameters >= LEAST_PARAMETERS
        if not large or opened.quantization is None or self.runner.device.type != "cpu":
            return opened, None
        self.tell("measuring the draft beside its target")
        each = {opened.quantization: opened}
        if opened.choosable:
            each["int4"] = self.load(draft, auto="int4")
        short = {"rows": 1, "max_len": TOKENS, "margin": 1, "probe": False, "threads": self.sizes["threads"]}
        runners = {kind: open_packed(one.loaded, kind, packed=one.packed, **short) for kind, one in each.items()}
        known = min(self.runner.vocab_size, *(runner.vocab_size for runner in runners.values()))
        text = probe_text(self.runner, self.target.tokenizer, known)
        promise = measure(self.runner, runners, text, self.most)
        kind = promise.kind if promise is not None else opened.quantization
        return replace(each[kind], packed=runners[kind].packed), promise

    def _note(self, note: str) -> None:
        self.target = replace(self.target, report=replace(self.target.report, notes=(*self.target.report.notes, note)))

    def _note_sizes(self, draft: Loaded) -> None:
        """Without two tokenizers to compare, the user is told what is taken for granted."""
        sizes = self.target.report.vocab_size, draft.report.vocab_size
        if sizes[0] == sizes[1] or (self.target.tokenizer is not None and draft.tokenizer is not None):
            return
        self._note(
            f"the target has {sizes[0]} tokens and the draft {sizes[1]}, and there are no two tokenizers to compare: "
            f"the first {min(sizes)} are taken to be the same, and only they are drafted; the text stays the target's"
        )
