"""The library's door: ``LLM`` with ``generate``, ``stream`` and ``chat``.

Knows: what people ask for and how they read answers. Does not know: how prompts are written (``prompts.py``), or how
models, drafter and engine are put together (``assembly.py``).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, Literal, Self, overload

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
from .prompts import (
    Array,
    Messages,
    Prompt,
    Written,
    is_conversation,
    numbered,
    one_each,
    read_conversations,
    read_prompt,
    read_prompts,
    settings_of,
)
from .types import Completion, Piece, Request, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["LLM", "Stream"]


class LLM:
    """A target model, a way to draft for it, and an engine that runs them.

    ``model``: a folder, a ``.gguf`` file, a Hugging Face hub id, or a loaded Hugging Face model (with ``tokenizer``);
    without one, the embedded SmolLM2-135M-Instruct.
    ``draft``: a smaller model or a trained head given the same way, the name of a drafter ("lookup"), a ``Drafter``, or
    None for plain decoding; "auto" is the head that ships with the embedded model, beside ``lookup``, and ``lookup``
    alone for any other. ``gamma``: how many tokens to draft a round; "auto" measures and chooses,
    0 never drafts (a draft is not even loaded).
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
        sampling_params: SamplingParams | None = None,
    ) -> Completion: ...
    @overload
    def generate(
        self,
        prompts: list[str] | list[list[int]] | list[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        prediction: Sequence[str | None] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]: ...
    @overload
    def generate(
        self,
        prompts: Array | Iterable[Prompt | Array],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        prediction: str | Sequence[str | None] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Completion | list[Completion]: ...
    def generate(
        self,
        prompts: Any,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        prediction: str | Sequence[str | None] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Completion | list[Completion]:
        """Complete one prompt, or many together (in input order). Any thread may call this, and several at once.

        A prompt is text, token ids (a list; an array or tensor [T] or [1, T]), or a dict with the key "prompt" or
        "prompt_token_ids"; an array [B, T] is B prompts. ``sampling_params`` is another name of ``params``.

        ``prediction`` is text you expect to find in the answer (the file being edited, say); ``lookup`` drafts
        from it, and it can never change the answer. A prompt that cannot be taken (too long, say) raises before any is
        answered. One of many that fails on its way comes back with ``finish_reason="error"`` and ``error``.
        """
        many, single = read_prompts(prompts)
        each = one_each("params", settings_of(params, sampling_params), SamplingParams, len(many))
        guesses = one_each("prediction", prediction, (str, type(None)), len(many))
        requests = []
        for index, prompt in enumerate(many):
            with numbered("prompt", index, alone=single):
                requests.append(self._request(self._encode(prompt), each[index], guesses[index]))
        completions = self._run(requests, "prompt", alone=single)
        return completions[0] if single else completions

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        prediction: str | Sequence[str | None] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Completion | list[Completion]:
        """Answer one conversation (a list of {"role", "content"}), or several together.

        A message may have a ``name``, and a content that is a list of text parts. The rest as in ``generate``.
        """
        many, single = read_conversations(messages)
        each = one_each("params", settings_of(params, sampling_params), SamplingParams, len(many))
        guesses = one_each("prediction", prediction, (str, type(None)), len(many))
        requests = []
        for index, conversation in enumerate(many):
            with numbered("conversation", index, alone=single):
                ids = self._need_codec().encode_chat(conversation)
                requests.append(self._request(ids, each[index], guesses[index]))
        completions = self._run(requests, "conversation", alone=single)
        return completions[0] if single else completions

    def stream(
        self,
        prompt: Prompt | Array | Messages,
        params: SamplingParams | None = None,
        *,
        prediction: str | None = None,
        sampling_params: SamplingParams | None = None,
    ) -> Stream:
        """Token by token: each piece has the text it adds and its origin. Takes a prompt or a conversation."""
        if is_conversation(prompt):
            ids = self._need_codec().encode_chat(prompt)  # type: ignore[arg-type]
        else:
            ids = self._encode(read_prompt(prompt))
        [settings] = one_each("params", settings_of(params, sampling_params), SamplingParams, 1)
        [guess] = one_each("prediction", prediction, (str, type(None)), 1)
        return Stream(self.engine, self._request(ids, settings, guess))

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
        return self.engine.parts.drafter_name or "none"

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        return self._target.tokenizer

    # -- running requests

    def _run(self, requests: list[Request], what: str, *, alone: bool) -> list[Completion]:
        """All requests to their ends. The queue is bounded, so they go in as places come free.

        ``what`` they are, for an error that says which of them; ``alone``: there is one, and it raises what it met.
        """
        engine = self.engine
        for index, request in enumerate(requests):  # all of them, before anything is computed
            with numbered(what, index, alone=alone):
                engine.check(request)
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

    def _encode(self, prompt: Written) -> list[int]:
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
