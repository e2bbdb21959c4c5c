"""The library's door: ``LLM`` with ``generate``, ``stream`` and ``chat``.

Knows: how to put models, a drafter and an engine together, and how people write prompts. Does not know: how any of it
works inside.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias, overload

import torch

from .config import Config
from .controller import controller_for
from .drafters.base import Drafter, drafter_named, registered_drafters
from .drafters.head import HeadDrafter
from .drafters.model import ModelDrafter
from .drafters.portfolio import PortfolioDrafter
from .drafters.watched import WatchedRunner
from .engine.engine import Engine, Handle
from .engine.opening import open_captured
from .engine.stats import EngineStats
from .errors import InvalidParameter, ModelRefused
from .machine.embedded import embedded_draft, embedded_folder, is_embedded
from .machine.head import head_folder
from .machine.loading import Capability, eos_ids, same_tokenizer
from .machine.opening import Quantization, Runner, load_draft, load_target, ready_to_compile, runner_for, what_loads
from .machine.progress import Tell, telling
from .machine.runner import EagerRunner
from .machine.text import TextCodec, TextStream
from .types import Completion, DraftView, Piece, Request, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["LLM", "Stream"]

log = logging.getLogger(__name__)

Prompt: TypeAlias = str | Sequence[int]
Messages: TypeAlias = Sequence[Mapping[str, Any]]
Model: TypeAlias = "str | Path | PreTrainedModel"

LONGEST_DEFAULT = 8192  # tokens; a model that can hold more is given more only when asked


class LLM:
    """A target model, a way to draft for it, and an engine that runs them.

    ``model``: a folder, a ``.gguf`` file, a Hugging Face hub id, or a loaded Hugging Face model (with ``tokenizer``);
    without one, the embedded SmolLM2-135M-Instruct.
    ``draft``: a smaller model or a trained head given the same way, the name of a drafter ("lookup"), a ``Drafter``, or
    None for plain decoding; "auto" is the head that ships with the embedded model, beside ``lookup``, and ``lookup``
    alone for any other. ``gamma``: how many tokens to draft a round; "auto" measures and chooses.
    ``quantization``: weights of 8 or 4 bits ("int8", "int4") or as they are (None); "auto" is "int4" for the
    embedded model on a CPU (its own file's weights) unless a ``dtype`` is given, and None for any other.
    ``draft_quantization``: the same for a draft model; it cannot change the text, so "auto" is "int8" on a CPU.
    """

    def __init__(
        self,
        model: Model | None = None,
        draft: Model | Drafter | None = "auto",
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        gamma: int | Literal["auto"] = "auto",
        dtype: str | torch.dtype = "auto",
        draft_dtype: str | torch.dtype | None = None,
        quantization: Quantization = "auto",
        draft_quantization: Quantization = "auto",
        device: str | torch.device | None = None,
        device_map: Any = None,
        trust_remote_code: bool = False,
        revision: str | None = None,
        token: str | None = None,
        check: bool = True,
        progress: Tell | None = None,
        **settings: Any,
    ) -> None:
        """``settings``: ``max_rows``, ``max_model_len``, ``prefill_chunk``, ``max_waiting``, ``max_gamma``,
        ``overlap`` (on a GPU, go on drafting while the target verifies).

        ``check=False`` skips the short self-test that every model passes at load. ``progress`` is told what loading is
        at (an empty text: nothing to tell); without it, a terminal shows that in one line.
        """
        self.config = Config.of({"gamma": gamma, **settings})
        self._check = check
        self._placement = {
            "device": device,
            "device_map": device_map,
            "trust_remote_code": trust_remote_code,
            "token": token,
        }
        self._draft_quantization: Quantization = draft_quantization
        with telling(progress) as tell, ready_to_compile(model, self._placement, revision):
            source: Model = embedded_folder(tell) if model is None else model
            if draft == "auto" and not is_embedded(source):
                draft = "lookup"
            tell(what_loads(source))
            opened = load_target(
                source, quantization, tokenizer=tokenizer, dtype=dtype, revision=revision, **self._placement
            )
            self._longest = self._context(opened.loaded.report)
            runner, self._target = runner_for(opened, **self._sizes())
            self._codec = TextCodec(self._target.tokenizer) if self._target.tokenizer is not None else None
            self._vocab_size = self._target.report.tokenizer_size or runner.vocab_size
            drafter = self._drafter(draft, runner, dtype if draft_dtype is None else draft_dtype, tell)
            captured = None
            if isinstance(runner, EagerRunner):
                captured = open_captured(runner, drafter, self.config.draft, self._vocab_size, tell)
        self.engine = Engine(
            runner,
            drafter,
            controller_for(
                self.config.draft,
                free=drafter is not None and drafter.free,
                ends_itself=drafter is not None and drafter.ends_itself,
            ),
            self.config.engine,
            vocab_size=self._vocab_size,
            eos=eos_ids(self._target),
            text=self._text_stream if self._codec is not None else None,
            captured=captured,
            max_gamma=self.config.draft.most,
            torch_threads=_torch_threads(runner, drafter),
        )
        self._ids = count()

    # -- what people call

    @overload
    def generate(
        self,
        prompts: Prompt,
        params: SamplingParams | None = None,
        *,
        prediction: str | None = None,
    ) -> Completion: ...
    @overload
    def generate(
        self,
        prompts: list[str] | list[list[int]] | list[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        prediction: Sequence[str | None] | None = None,
    ) -> list[Completion]: ...
    def generate(
        self,
        prompts: Prompt | list[str] | list[list[int]] | list[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        prediction: str | Sequence[str | None] | None = None,
    ) -> Completion | list[Completion]:
        """Complete one prompt, or many together (in input order). A prompt is text or token ids.

        ``prediction`` is text you expect to find in the answer (the file being edited, say); ``lookup`` drafts
        from it, and it can never change the answer. A prompt that cannot be taken (too long, say) raises before any is
        answered. One of many that fails on its way comes back with ``finish_reason="error"`` and ``error``.
        """
        if not isinstance(prompts, Iterable):
            raise InvalidParameter("prompts", f"must be text, token ids, or a list of those, not {prompts!r}")
        single = _is_prompt(prompts)
        many: list[Prompt] = [prompts] if single else list(prompts)  # type: ignore[list-item, arg-type]
        each = _per_prompt("params", params if params is not None else SamplingParams(), SamplingParams, len(many))
        guesses = _per_prompt("prediction", prediction, (str, type(None)), len(many))
        requests = [
            self._request(self._encode(prompt), settings, guess)
            for prompt, settings, guess in zip(many, each, guesses, strict=True)
        ]
        completions = self._run(requests, alone=single)
        return completions[0] if single else completions

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | None = None,
        *,
        prediction: str | None = None,
    ) -> Completion | list[Completion]:
        """Answer one conversation (a list of {"role", "content"}), or several together. ``prediction``: for each."""
        single = bool(messages) and isinstance(messages[0], Mapping)
        many: Sequence[Messages] = [messages] if single else messages  # type: ignore[list-item, assignment]
        settings = params if params is not None else SamplingParams()
        requests = [self._request(self._need_codec().encode_chat(m), settings, prediction) for m in many]
        completions = self._run(requests, alone=single)
        return completions[0] if single else completions

    def stream(
        self,
        prompt: Prompt | Messages,
        params: SamplingParams | None = None,
        *,
        prediction: str | None = None,
    ) -> Stream:
        """Token by token: each piece has the text it adds and its origin. Takes a prompt or a conversation."""
        if _is_prompt(prompt):
            ids = self._encode(prompt)  # type: ignore[arg-type]
        else:
            ids = self._need_codec().encode_chat(prompt)  # type: ignore[arg-type]
        settings = params if params is not None else SamplingParams()
        return Stream(self.engine, self.engine.submit(self._request(ids, settings, prediction)))

    @property
    def has_chat_template(self) -> bool:
        return bool(getattr(self.tokenizer, "chat_template", None))

    @property
    def report(self) -> Capability:
        """What the target is and what it can do."""
        return self._target.report

    @property
    def stats(self) -> EngineStats:
        """Sums over everything this LLM has done."""
        return self.engine.stats

    @property
    def drafter_name(self) -> str:
        """Who drafts; "none" for plain decoding."""
        drafter = self.engine.parts.drafter
        return drafter.name if drafter is not None else "none"

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        return self._target.tokenizer

    # -- running requests

    def _run(self, requests: list[Request], *, alone: bool) -> list[Completion]:
        """All requests to their ends. The queue is bounded, so they go in as places come free."""
        handles: list[Handle] = []
        try:
            for request in requests:
                while self.engine.full(request.params.n):
                    self.engine.step()
                handles.append(self.engine.submit(request))
            while not all(handle.done for handle in handles):
                self.engine.step()
        finally:
            for handle in handles:
                self.engine.abort(handle.request.id)
        if alone:
            handles[0].raise_failure()
        return [handle.completion() for handle in handles]

    def _request(self, ids: Sequence[int], params: SamplingParams, prediction: str | None) -> Request:
        expected: tuple[int, ...] = ()
        if prediction:
            expected = tuple(self._need_codec().encode_prediction(prediction))
        return Request(f"request-{next(self._ids)}", tuple(ids), params, expected)

    def _encode(self, prompt: Prompt) -> Sequence[int]:
        return self._need_codec().encode(prompt) if isinstance(prompt, str) else prompt

    def _need_codec(self) -> TextCodec:
        if self._codec is None:
            raise InvalidParameter("prompt", "must be token ids: this model was given without a tokenizer")
        return self._codec

    def _text_stream(self, request: Request) -> TextStream:
        stops = request.params.stop
        assert not isinstance(stops, str)  # SamplingParams makes it a tuple
        return TextStream(self._need_codec(), request.prompt, tuple(stops))

    def _worth_drafting(self, views: Sequence[DraftView], limits: Sequence[int]) -> list[int]:
        return self.engine.parts.controller.paid_budgets(views, limits)

    # -- putting the parts together

    def _context(self, report: Capability) -> int:
        asked = self.config.engine.max_model_len
        if asked is not None and report.max_context and asked > report.max_context:
            raise InvalidParameter("max_model_len", f"is {asked}, but the model was made for {report.max_context}")
        return asked or min(report.max_context or LONGEST_DEFAULT, LONGEST_DEFAULT)

    def _sizes(self) -> dict[str, Any]:
        return {
            "rows": self.config.engine.max_rows,
            "max_len": self._longest,
            "margin": 2 * (self.config.draft.most + 1) + 2,  # a round, and the one launched ahead of its result
            "probe": self._check,
        }

    def _head(self, folder: Path, target: WatchedRunner) -> HeadDrafter:
        def hopes() -> tuple[float, float]:
            controller = self.engine.parts.controller
            return controller.least_kept(), controller.least_hope()

        size = min(self._vocab_size, target.vocab_size)
        return HeadDrafter.load(folder, target, vocab_size=size, hopes=hopes)

    def _drafter(
        self, draft: Model | Drafter | None, target: Runner, dtype: str | torch.dtype, tell: Tell
    ) -> Drafter | None:
        if draft is None or isinstance(draft, Drafter):
            return draft
        if draft == "auto":
            shipped = embedded_draft()
            if shipped is None:
                return drafter_named("lookup")
            return PortfolioDrafter(self._head(shipped, target), self._worth_drafting)
        if isinstance(draft, str) and draft in registered_drafters():
            return drafter_named(draft)
        folder = head_folder(draft)
        if folder is not None:
            return self._head(folder, target)
        tell(what_loads(draft))
        opened = load_draft(draft, self._draft_quantization, dtype=dtype, **self._placement)
        loaded = opened.loaded
        difference = same_tokenizer(self._target, loaded)
        if difference is not None:
            raise ModelRefused(
                f"the draft cannot guess for this target: {difference}. Use a draft of the same family, "
                "or draft='lookup', which needs no second model."
            )
        if loaded.report.max_context and loaded.report.max_context < self._longest:
            raise ModelRefused(
                f"the draft's context of {loaded.report.max_context} tokens is shorter than the target's "
                f"{self._longest}: set max_model_len={loaded.report.max_context} or use another draft."
            )
        return ModelDrafter(
            runner_for(opened, **self._sizes(), draft=True)[0],
            vocab_size=min(self._vocab_size, target.vocab_size),
            width=target.vocab_size,
            prefill_chunk=self.config.engine.prefill_chunk,
            least_hope=lambda: self.engine.parts.controller.least_hope(),
        )


def _torch_threads(runner: Runner, drafter: Drafter | None) -> int | None:
    """One, where models run on kernels with threads of their own: torch's would wait in a busy loop on their cores."""
    drafts_by_torch = isinstance(getattr(drafter, "runner", None), EagerRunner)
    return None if isinstance(runner, EagerRunner) or drafts_by_torch else 1


class Stream:
    """The pieces of one answer, as they come. Closing it early aborts the request and frees its row."""

    def __init__(self, engine: Engine, handle: Handle) -> None:
        self._engine = engine
        self._handle = handle
        self._pieces = self._run()

    def __iter__(self) -> Iterator[Piece]:
        return self._pieces

    def __next__(self) -> Piece:
        return next(self._pieces)

    def close(self) -> None:
        self._pieces.close()
        self._engine.abort(self._handle.request.id)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def completion(self) -> Completion:
        """The whole answer, once the stream has ended."""
        return self._handle.completion()

    def _run(self) -> Generator[Piece, None, None]:
        try:
            while True:
                done = self._handle.done
                yield from self._handle.pieces()
                if done:
                    break
                self._engine.step()
            self._handle.raise_failure()
        finally:
            self._engine.abort(self._handle.request.id)


def _is_prompt(value: object) -> bool:
    """Text, or a list of token ids; as against a list of prompts or of messages."""
    if isinstance(value, str):
        return True
    return isinstance(value, Sequence) and bool(value) and isinstance(value[0], int)


def _per_prompt(name: str, value: Any, kinds: Any, n: int) -> list[Any]:
    """One value for all prompts, or a list with one for each."""
    if isinstance(value, kinds):
        return [value] * n
    values = list(value)
    if len(values) != n:
        raise InvalidParameter(name, f"has {len(values)} entries for {n} prompts")
    for item in values:
        if not isinstance(item, kinds):
            raise InvalidParameter(name, f"must hold one entry for each prompt, not {item!r}")
    return values
