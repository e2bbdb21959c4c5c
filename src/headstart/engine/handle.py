"""What comes in: is it fit to run? And what its caller sees of it from then on.

Knows: the limits of the model, how a request becomes sequences, and their pieces. Does not know: who runs, when, or how
anything is computed.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from ..errors import GenerationFailed, HeadstartError, InvalidParameter
from ..types import Completion, Piece, Request, SamplingParams, TokenLogprob
from .sequence import Sequence, TextSink

__all__ = ["Handle", "Reception"]


class Handle:
    """One submitted request, for its caller. Safe to read from any thread."""

    def __init__(self, request: Request, sequences: list[Sequence], running: Mapping[str, Handle]) -> None:
        """``running``: the engine's requests by id. A handle is done when it was there, and is there no longer."""
        self.request = request
        self.sequences = sequences
        self.entered = False  # it was put among the running ones
        self.why: str | None = None  # it is aborted, for people; None where its caller knows
        self.begun = False  # those who listen were told that its prompt is being read
        self._running = running

    @property
    def done(self) -> bool:
        """Has every choice ended, with its rows given back and its statistics complete?"""
        return self.entered and self._running.get(self.request.id) is not self

    @property
    def news(self) -> bool:
        """Is there a piece to read, or nothing more to come?"""
        return self.unread > 0 or self.done

    @property
    def unread(self) -> int:
        """How many pieces wait for ``pieces``."""
        return sum(len(s.pieces) for s in self.sequences)

    def pieces(self) -> Iterator[Piece]:
        """The pieces that came since the last call."""
        for sequence in self.sequences:
            while sequence.pieces:
                yield sequence.pieces.popleft()

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprob | None, ...] | None:
        """Of the prompt's tokens, once a piece of the answer is there."""
        found = self.sequences[0].prompt_logprobs
        return None if found is None else tuple(found)

    def completion(self) -> Completion:
        """The whole answer, once ``done``."""
        if not all(s.finished for s in self.sequences):
            raise HeadstartError(f"{self.request.id} has not ended yet: read its stream to the end, or close it")
        choices = tuple(s.choice() for s in self.sequences)
        return Completion(self.request.id, self.request.prompt, choices, self.prompt_logprobs)

    def raise_failure(self) -> None:
        """Raise if any choice failed."""
        for sequence in self.sequences:
            if sequence.finish_reason == "error":
                raise GenerationFailed(f"request {self.request.id}: {sequence.error}")


@dataclass(frozen=True)
class Reception:
    """Checks requests and makes their handles."""

    vocab_size: int
    max_len: int
    eos: tuple[int, ...]
    text: Callable[[Request], TextSink] | None  # makes the detokeniser of a request; None for ids only

    def check(self, request: Request) -> None:
        """Raise if the request can never run. Nothing is allocated."""
        if not request.prompt:
            raise InvalidParameter("prompt", "must hold at least one token")
        for name, ids in (("prompt", request.prompt), ("prediction", request.prediction)):
            if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
                raise InvalidParameter(name, f"holds token ids outside the vocabulary of {self.vocab_size}")
        request.params.check_vocabulary(self.vocab_size)
        self._check_endings(request.params)
        if request.params.stop and self.text is None:
            raise InvalidParameter(
                "stop", "needs a tokenizer, and this model was given without one: use stop_token_ids"
            )
        if request.params.structured is not None and request.grammar is None:
            raise InvalidParameter("structured", "has to be compiled: LLM.request does so, for models with a tokenizer")
        if request.params.structured is None and request.grammar is not None:
            raise InvalidParameter("structured", "is missing: by it everybody knows that the request has a grammar")
        request.longest(self.max_len)

    def _check_endings(self, params: SamplingParams) -> None:
        """``min_tokens`` holds back what ends an answer: some token has to be left."""
        if params.min_tokens and len(params.stop_token_ids or ()) >= self.vocab_size - len(self.eos):
            ends = set(params.stop_token_ids or ()).union(() if params.ignore_eos else self.eos)
            if len(ends) >= self.vocab_size:
                raise InvalidParameter(
                    "min_tokens", "cannot be reached: stop_token_ids hold every token, so that each ends the answer"
                )

    def handle(self, request: Request, running: Mapping[str, Handle]) -> Handle:
        """The request's handle, with a sequence for each choice; ``running``: see ``Handle``."""
        self.check(request)
        seed = request.params.seed if request.params.seed is not None else secrets.randbits(63)
        sequences = [
            Sequence(
                request,
                index,
                seed,
                eos=self.eos,
                text=self.text(request) if self.text is not None else None,
                limit=request.longest(self.max_len),
            )
            for index in range(request.params.n)
        ]
        return Handle(request, sequences, running)
