"""The step loop: requests in, pieces out.

Knows: the life of a request from submit to its last piece. Does not know: HTTP, terminals, threads. One thread calls
``step``; whoever needs several callers puts a lock or a queue in front.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from time import perf_counter

import torch

from ..config import EngineConfig
from ..controller import Controller
from ..drafters.base import Drafter
from ..errors import GenerationFailed, InvalidParameter, PromptTooLong
from ..machine.runner import ModelRunner
from ..types import Completion, Piece, Request, Round
from .captured import CapturedRounds
from .round import Parts, play
from .scheduler import Scheduler
from .sequence import Sequence, TextSink
from .stats import EngineStats

__all__ = ["Engine", "Handle"]

log = logging.getLogger(__name__)


class Handle:
    """One submitted request, for its caller."""

    def __init__(self, request: Request, sequences: list[Sequence]) -> None:
        self.request = request
        self.sequences = sequences

    @property
    def done(self) -> bool:
        return all(s.finished for s in self.sequences)

    def pieces(self) -> Iterator[Piece]:
        """The pieces that came since the last call."""
        for sequence in self.sequences:
            while sequence.pieces:
                yield sequence.pieces.popleft()

    def completion(self) -> Completion:
        """The whole answer, once ``done``."""
        return Completion(self.request.id, self.request.prompt, tuple(s.choice() for s in self.sequences))

    def raise_failure(self) -> None:
        """Raise if any choice failed."""
        for sequence in self.sequences:
            if sequence.finish_reason == "error":
                raise GenerationFailed(f"request {self.request.id}: {sequence.error}")


class Engine:
    """Serves requests on one target, with or without a drafter."""

    def __init__(
        self,
        runner: ModelRunner,
        drafter: Drafter | None,
        controller: Controller,
        config: EngineConfig,
        *,
        vocab_size: int,
        eos: Seq[int] = (),
        text: Callable[[Request], TextSink] | None = None,
        captured: CapturedRounds | None = None,
        max_gamma: int = 64,
        torch_threads: int | None = None,
    ) -> None:
        """``vocab_size``: the tokenizer's; ``text`` makes the detokeniser of a request, None for ids only.

        ``captured``: rounds on the device, for what fits there; ``max_gamma``: the most a round may draft.
        ``torch_threads``: how many threads torch may use in a step, None for as many as it has.
        """
        self._torch_threads = torch_threads
        self.config = config
        self.max_len = runner.max_len
        self.stats = EngineStats()
        self.parts = Parts(
            runner, drafter, controller, min(vocab_size, runner.vocab_size), self.max_len, max_gamma, captured
        )
        self._slab = runner.slab
        self._scheduler = Scheduler(self._slab, config.max_waiting)
        self._eos = tuple(eos)
        self._text = text
        self._handles: dict[str, Handle] = {}
        self._listeners: list[Callable[[list[Round]], None]] = [self.stats.add, controller.observe]

    # -- the caller's side

    def submit(self, request: Request) -> Handle:
        """Take a request in. Everything that can be wrong with it is said here, before anything is allocated."""
        self._check(request)
        seed = request.params.seed if request.params.seed is not None else secrets.randbits(63)
        sequences = [
            Sequence(
                request,
                index,
                seed,
                eos=self._eos,
                text=self._text(request) if self._text is not None else None,
                limit=self.max_len,
            )
            for index in range(request.params.n)
        ]
        self._scheduler.add(sequences)
        handle = self._handles[request.id] = Handle(request, sequences)
        return handle

    def abort(self, request_id: str) -> None:
        """Stop a request now; its rows are free when this returns. Unknown and finished ids are fine."""
        handle = self._handles.get(request_id)
        if handle is None:
            return
        self._settle()
        for sequence in handle.sequences:
            if not sequence.finished:
                sequence.end("abort")
                self._retire(sequence)

    def full(self, sequences: int = 1) -> bool:
        """True while ``submit`` would refuse that many sequences for want of a place in the line."""
        return self._scheduler.waiting + sequences > self.config.max_waiting and self._scheduler.waiting > 0

    @property
    def idle(self) -> bool:
        return self._scheduler.idle

    @property
    def inactive_reason(self) -> str | None:
        """Why there is no speculation at the moment, for people; None while there is."""
        return self.parts.inactive or self.parts.controller.reason()

    def listen(self, listener: Callable[[list[Round]], None]) -> None:
        """Have every round's records passed on as they come."""
        self._listeners.append(listener)

    # -- the step

    def step(self) -> None:
        """Read in some prompt, then give every running sequence a round."""
        device = self.parts.runner.device
        if device.type == "cuda":  # kernels of our own start on whatever device is the current one
            with torch.cuda.device(device):
                return self._step()
        if self._torch_threads is None:
            return self._step()
        before = torch.get_num_threads()
        torch.set_num_threads(self._torch_threads)
        try:
            self._step()
        finally:
            torch.set_num_threads(before)

    def _step(self) -> None:
        if self._scheduler.arriving:
            self._settle()  # rows are about to change
            self._fill()
        ready = self._scheduler.ready()
        if ready:
            self._guarded(ready, first_row=0, ahead=not self._scheduler.arriving)

    def _settle(self) -> None:
        """Take in the round that was launched ahead, if there is one: rows must not move while it is under way."""
        if self.parts.captured is not None and self.parts.captured.in_flight:
            self._guarded(self._scheduler.ready(), first_row=0)

    def _fill(self) -> None:
        """Read prompts in, up to a chunk's worth of tokens, so that running sequences do not wait long."""
        budget = self.config.prefill_chunk
        while budget > 0 and (sequence := self._scheduler.to_fill()) is not None:
            row = self._slab.row(sequence.id)
            start = self._slab.lengths[row]
            behind = len(sequence.tokens) - start
            if behind > budget:
                self._prefill(sequence, row, sequence.tokens[start : start + budget])
                return
            budget -= behind
            if self._guarded([sequence], first_row=row) and not sequence.finished:
                self._scheduler.filled(sequence)

    def _prefill(self, sequence: Sequence, row: int, tokens: list[int]) -> None:
        started = perf_counter()
        try:
            self.parts.runner.prefill(row, tokens)
        except Exception as error:
            self._fail([sequence], error)
        self.stats.prefill_tokens += len(tokens)
        self.stats.prefill_seconds += perf_counter() - started

    def _guarded(self, sequences: list[Sequence], first_row: int, *, ahead: bool = False) -> bool:
        """Play a round; if it blows up, these sequences fail and the engine lives on. True if it went well."""
        try:
            self._tell(play(self.parts, sequences, first_row, ahead=ahead))
            captured = self.parts.captured
            while captured is not None and captured.in_flight and any(s.finished for s in sequences):
                self._tell(play(self.parts, sequences, first_row))  # launched before the end was noticed
        except Exception as error:
            if self.parts.captured is not None:
                self.parts.captured.forget()
            self._fail(sequences, error)
            return False
        for sequence in sequences:
            if sequence.finished:
                self.stats.failed += sequence.finish_reason == "error"
                self._retire(sequence)
        return True

    def _tell(self, rounds: list[Round]) -> None:
        for listener in self._listeners:
            listener(rounds)

    def _fail(self, sequences: list[Sequence], error: Exception) -> None:
        log.error("a forward failed; %d sequences end with an error", len(sequences), exc_info=error)
        for sequence in sequences:
            sequence.end("error", f"{type(error).__name__}: {error}")
            self.stats.failed += 1
            self._retire(sequence)

    def _retire(self, sequence: Sequence) -> None:
        self._scheduler.retire(sequence)
        if self.parts.drafter is not None:
            self.parts.drafter.release(sequence.id)
        self.parts.controller.forget(sequence.id)
        self.stats.finished += sequence.finish_reason in ("stop", "length")
        self.stats.aborted += sequence.finish_reason == "abort"
        handle = self._handles.get(sequence.request.id)
        if handle is not None and handle.done:
            del self._handles[sequence.request.id]

    # -- validation

    def _check(self, request: Request) -> None:
        if request.id in self._handles:
            raise InvalidParameter("id", f"{request.id!r} is already running")
        if not request.prompt:
            raise InvalidParameter("prompt", "must hold at least one token")
        vocab_size = self.parts.vocab_size
        for name, ids in (("prompt", request.prompt), ("prediction", request.prediction)):
            if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
                raise InvalidParameter(name, f"holds token ids outside the vocabulary of {vocab_size}")
        request.params.check_vocabulary(vocab_size)
        length, wanted = len(request.prompt), request.params.max_tokens
        if length >= self.max_len:
            raise PromptTooLong("prompt", f"has {length} tokens; the context holds {self.max_len} with the answer")
        if length + wanted > self.max_len:
            room = self.max_len - length
            raise PromptTooLong(
                "max_tokens", f"is {wanted}; with {length} prompt tokens at most {room} fit the context", room
            )
