"""The library's door: ``LLM`` with ``generate``, ``stream`` and ``chat``.

Knows: how people write prompts and read answers. Does not know: how models, drafter and engine are put together.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias, overload

import torch

from .assembly import Model, assemble
from .config import Config
from .drafters.base import Drafter
from .engine.engine import Engine, Handle
from .engine.stats import EngineStats
from .errors import EngineBusy, InvalidParameter
from .machine.loading import Capability
from .machine.opening import Quantization
from .machine.progress import Tell
from .machine.text import TextCodec
from .types import Completion, Piece, Request, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["LLM", "Stream"]

Prompt: TypeAlias = str | Sequence[int]
Messages: TypeAlias = Sequence[Mapping[str, Any]]


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
        placement = {
            "device": device,
            "device_map": device_map,
            "trust_remote_code": trust_remote_code,
            "token": token,
        }
        built = assemble(
            model,
            draft,
            self.config,
            tokenizer=tokenizer,
            dtype=dtype,
            draft_dtype=dtype if draft_dtype is None else draft_dtype,
            quantization=quantization,
            draft_quantization=draft_quantization,
            placement=placement,
            revision=revision,
            check=check,
            progress=progress,
        )
        self.engine = built.engine
        self._target, self._codec = built.target, built.codec
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
        return Stream(self.engine, self._request(ids, settings, prediction))

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
        engine = self.engine
        for request in requests:
            engine.check(request)  # all of them, before anything is computed
        handles: list[Handle] = []
        claim = _Claim(engine, [request.id for request in requests])
        try:
            for request in requests:
                handles.append(self._submitted(request))
            engine.drive(lambda: all(handle.done for handle in handles))
        finally:
            claim.abort()
        if alone:
            handles[0].raise_failure()
        return [handle.completion() for handle in handles]

    def _submitted(self, request: Request) -> Handle:
        """Submit as soon as there is a place in the line; another thread may be quicker to take it."""
        engine = self.engine
        while True:
            engine.drive(lambda: not engine.full(request.params.n))
            try:
                return engine.submit(request)
            except EngineBusy:
                continue

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


class _Claim:
    """Somebody waits for these requests. When nobody can any more, they are stopped: nothing is computed for nobody."""

    def __init__(self, engine: Engine, ids: Sequence[str]) -> None:
        self._engine, self._ids = engine, list(ids)
        self._lost = weakref.finalize(self, _discard, engine, self._ids)
        self._lost.atexit = False

    def abort(self) -> None:
        """Stop what still runs, now."""
        for request_id in self._ids:
            self._engine.abort(request_id)
        self._lost.detach()


def _discard(engine: Engine, ids: Sequence[str]) -> None:
    for request_id in ids:
        engine.discard(request_id)


class Stream:
    """The pieces of one answer, as they come. Closing or dropping it early aborts the request and frees its row."""

    def __init__(self, engine: Engine, request: Request) -> None:
        self._engine, self._closed = engine, False
        self._claim = _Claim(engine, [request.id])  # before the request goes in, so that none can be lost
        self._handle = engine.submit(request)

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        if self._closed:
            raise StopIteration
        try:
            self._engine.drive(lambda: self._handle.news)
            for piece in self._handle.pieces():
                return piece
            self._engine.drive(lambda: self._handle.done)
        except BaseException:
            self.close()
            raise
        self._handle.raise_failure()
        raise StopIteration

    def close(self) -> None:
        self._closed = True
        self._claim.abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def completion(self) -> Completion:
        """The whole answer, once the stream has ended; before that it raises."""
        return self._handle.completion()


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
