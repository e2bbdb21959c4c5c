"""The library's door: ``LLM`` with ``generate``, ``stream`` and ``chat``; ``submit`` and ``inbox`` for servers.

Knows: what people ask for and how they read answers. Does not know: how prompts are written (``prompts.py``), or how
models, drafter and engine are put together (``assembly.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from inspect import signature
from itertools import count
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import torch

from .assembly import Model, assemble
from .config import Config
from .drafters.base import Drafter
from .drafters.prediction import MAX_PREDICTION
from .engine.handle import Handle
from .engine.inbox import Inbox
from .engine.stats import EngineStats
from .engine.stream import Claim, Stream
from .errors import EngineBusy, InvalidParameter
from .machine.grammar import Order
from .machine.load.loading import Capability
from .machine.load.open import Quantization
from .machine.messages import check_text
from .machine.text import TextCodec
from .progress import Tell
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
from .types import Completion, Grammar, Request, Round, SamplingParams, Structured

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["LLM", "Stream"]

T = TypeVar("T")

_LONG_TOKEN = 16  # characters: of a text's tokens, hardly one in a hundred has more


class LLM:
    """A target model, a way to draft for it, and an engine that runs them.

    ``model``: a folder, a ``.gguf`` file, a Hugging Face hub id, or a loaded Hugging Face model (with ``tokenizer``);
    without one, the embedded SmolLM2-135M-Instruct.
    ``draft``: a smaller model or a trained head given the same way, the name of a drafter ("lookup"), "embedded" (the
    embedded model), a ``Drafter``, or None for plain decoding; "auto" is the head that ships with the embedded model,
    beside ``lookup``, and ``lookup`` alone for any other. ``gamma``: how many tokens to draft a round; "auto" measures
    and chooses, 0 never drafts (a draft is not even loaded).
    ``quantization``: weights of 8 or 4 bits ("int8", "int4") or as they are (None); "auto" on a CPU runs GGUF files and
    the embedded model with their own bits unless a ``dtype`` is given, and is None for any other.
    ``draft_quantization``: the same for a draft model; it cannot change the text, so "auto" on a CPU is "int8" or
    "int4", whichever measures better beside the target.
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
        ``overlap`` (on a GPU, go on drafting while the target verifies), ``invariant`` (the same bits in any company;
        always so with ``quantization`` on a CPU, at a price on a GPU), ``threads`` (on a CPU; by default as many as
        measure fastest).

        ``check=False`` skips the short self-test that every model passes at load. ``progress`` is told what loading is
        at (an empty text: nothing to tell); without it, a terminal shows that in one line.
        """
        self.config = Config.of({"gamma": gamma, **settings}, beside=set(signature(LLM).parameters) - {"settings"})
        self.engine, self._target, self._draft, self._codec, self._grammars = assemble(
            model,
            draft,
            self.config,
            tokenizer=tokenizer,
            dtype=dtype,
            draft_dtype=dtype if draft_dtype is None else draft_dtype,
            quantization=quantization,
            draft_quantization=draft_quantization,
            revision=revision,
            check=check,
            progress=progress,
            device=device,
            device_map=device_map,
            trust_remote_code=trust_remote_code,
            token=token,
        )
        self._ids = count()

    def __repr__(self) -> str:
        report = self.report
        return f"<LLM {report.architecture}, {report.dtype} on {report.device}, draft {self.drafter_name}>"

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
        return self._answers("prompt", many, self._encode, single, settings_of(params, sampling_params), prediction)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        prediction: str | Sequence[str | None] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Completion | list[Completion]:
        """Answer one conversation (a list of {"role", "content"}), or several together.

        A message may have a ``name``, and a content that is a list of text parts; the model's own also ``tool_calls``
        and ``reasoning_content``, a tool's a ``tool_call_id``. The rest as in ``generate``.
        """
        many, single = read_conversations(messages)
        settings = settings_of(params, sampling_params)
        return self._answers("conversation", many, self._encode_chat, single, settings, prediction)

    def stream(
        self,
        prompt: Prompt | Array | Messages,
        params: SamplingParams | None = None,
        *,
        prediction: str | None = None,
        sampling_params: SamplingParams | None = None,
    ) -> Stream:
        """Token by token: each piece has the text it adds and its origin. Takes a prompt or a conversation."""
        return self.submit(prompt, settings_of(params, sampling_params), prediction=prediction)

    # -- what servers and benches call

    def submit(
        self,
        prompt: Prompt | Array | Messages,
        params: SamplingParams | None = None,
        *,
        id: str | None = None,
        prediction: str | None = None,
    ) -> Stream:
        """Put a request in the line, and return at once: it is computed while somebody reads it or any other (``for``,
        ``result``). ``id``: yours, as in ``Completion.id`` and ``abort``; one that still runs is refused.

        Raises ``EngineBusy`` where the line is full. Waits for no step of another thread. Event loops want ``inbox``.
        """
        return Stream(self.engine, self.request(prompt, params, id=id, prediction=prediction))

    def request(
        self,
        prompt: Prompt | Array | Messages,
        params: SamplingParams | None = None,
        *,
        id: str | None = None,
        prediction: str | None = None,
        grammar: Grammar | None = None,
    ) -> Request:
        """A request for ``Inbox.submit``, checked and tokenized (a long prompt takes milliseconds). ``grammar``: what
        ``order_grammar`` found, where ``structured`` is not to be compiled here."""
        if is_conversation(prompt):
            ids = self._encode_chat(prompt)  # type: ignore[arg-type]
        else:
            ids = self._encode(read_prompt(prompt))
        [settings] = one_each("params", settings_of(params, None), SamplingParams, 1)
        [guess] = one_each("prediction", prediction, (str, type(None)), 1)
        if id is not None and not (isinstance(id, str) and id):
            raise InvalidParameter("id", f"must be a text that is not empty, not {id!r}")
        request = self._request(ids, settings, guess, id, grammar)
        self.engine.check(request)
        return request

    def abort(self, id: str) -> bool:
        """Stop a request, from any thread. Its row is free when this returns, which waits for the step in progress.
        False: no such request runs."""
        return self.engine.abort(id)

    def inbox(self) -> Inbox:
        """Start a thread that computes, for programs that must not wait: an event loop, say. Close it when done."""
        return Inbox(self.engine)

    def prepare_structured(self) -> None:
        """Get ready for requests with ``structured``, which the first of them does otherwise: it takes a second or two
        for a large vocabulary, in which nothing else is computed. ``MissingExtra``: llguidance is not installed."""
        self._grammars.prepare()

    def order_grammar(self, structured: Structured, client: str | None = None) -> Order:
        """Have what an answer must look like compiled in a thread of its own. ``client``: for whom, where there are
        several: one whose grammars take long holds up only itself."""
        return self._grammars.order(structured, client)

    def cold(self) -> None:
        """Forget prompts that are warm and what was learnt about drafting, as if just loaded; ``stats`` go on.
        Raises ``EngineBusy`` while requests run or wait."""
        self.engine.cold()

    def listen(
        self,
        rounds: Callable[[list[Round]], object] | None = None,
        *,
        begun: Callable[[Request], object] | None = None,
        ended: Callable[[Completion], object] | None = None,
    ) -> ExitStack:
        """Have these called: with the records of every round (one for each sequence in it), with each request when its
        prompt is about to be read, and with its answer when it has ended, also by an abort or a failure.

        They are called by the thread that steps, in the middle of a step, one at a time: be quick. They may submit and
        abort, but not wait. One that raises is dropped, with a warning. To end it, close what comes back, or leave its
        ``with``.
        """
        return self.engine.listen(
            rounds,
            begun=None if begun is None else lambda handle: begun(handle.request),
            ended=None if ended is None else lambda handle: ended(handle.completion()),
        )

    @property
    def has_chat_template(self) -> bool:
        return bool(getattr(self.tokenizer, "chat_template", None))

    @property
    def report(self) -> Capability:
        """What the target is and what it can do."""
        return self._target.report

    @property
    def draft_report(self) -> Capability | None:
        """What the draft model is; None where no model drafts (a head, ``lookup``, nobody)."""
        return self._draft

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

    def _answers(
        self, what: str, asked: Sequence[T], encode: Callable[[T], list[int]], alone: bool, params: Any, prediction: Any
    ) -> Completion | list[Completion]:
        """``what`` they are, for an error that says which of them; ``alone``: one was asked, and one comes back.

        ``params`` and ``prediction``: one for all, or one for each.
        """
        each = one_each("params", params, SamplingParams, len(asked))
        guesses = one_each("prediction", prediction, (str, type(None)), len(asked))
        requests = []
        for index, one in enumerate(asked):  # all of them, before anything is computed
            with numbered(what, index, alone=alone):
                requests.append(self._request(encode(one), each[index], guesses[index]))
                self.engine.check(requests[-1])
        handles: list[Handle] = []
        claim = Claim(self.engine)
        try:
            for request in requests:
                handles.append(self._submitted(claim, request))
            self.engine.drive(lambda: all(handle.done for handle in handles))
        finally:
            claim.abort()
        if alone:
            handles[0].raise_failure()
            return handles[0].completion()
        return [handle.completion() for handle in handles]

    def _submitted(self, claim: Claim, request: Request) -> Handle:
        """Submit as soon as there is a place in the line (it is bounded); another thread may be quicker to take it."""
        engine = self.engine
        while True:
            engine.drive(lambda: not engine.full(request.params.n))
            handle = claim.prepare(request)
            try:
                engine.enter(handle)
                return handle
            except EngineBusy:
                continue

    def _request(
        self,
        ids: Sequence[int],
        params: SamplingParams,
        prediction: str | None,
        own: str | None = None,
        grammar: Grammar | None = None,
    ) -> Request:
        """``own``: the id that the caller chose."""
        expected = self._expected(prediction) if prediction else ()
        free = (name for n in self._ids if not self.engine.running(name := f"request-{n}"))
        if params.structured is not None and grammar is None:
            grammar = self._grammars.compile(params.structured)
        return Request(own if own is not None else next(free), tuple(ids), params, expected, grammar)

    def _expected(self, prediction: str) -> tuple[int, ...]:
        """As much of a prediction as drafters look at: the rest may be megabytes, and is not tokenized."""
        check_text("prediction", prediction)
        return tuple(self.codec.encode_prediction(prediction[: MAX_PREDICTION * _LONG_TOKEN])[:MAX_PREDICTION])

    def _encode(self, prompt: Written) -> list[int]:
        return self.codec.encode(prompt, most=self.engine.parts.runner.max_len) if isinstance(prompt, str) else prompt

    def _encode_chat(self, conversation: Messages) -> list[int]:
        return self.codec.encode_chat(conversation, most=self.engine.parts.runner.max_len)

    @property
    def codec(self) -> TextCodec:
        """Text to token ids and back. ``InvalidParameter`` without a tokenizer."""
        if self._codec is None:
            raise InvalidParameter("prompt", "must be token ids: this model was given without a tokenizer")
        return self._codec
