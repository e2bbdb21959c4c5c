"""The step loop: requests in, pieces out.

Knows: the life of a request from submit to its last piece. Does not know: HTTP, terminals, who calls from which thread.

Any thread may call anything here; one at a time steps, for everybody (``turns``). Whatever interrupts a step (an error,
Ctrl-C in the thread that happened to step), the next one starts clean: the caches are emptied, and every request that
still runs is read in again from its committed tokens.
"""

from __future__ import annotations

import atexit
import logging
import os
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import nullcontext
from threading import Lock
from weakref import WeakSet

import torch

from ..config import MAX_GAMMA, EngineConfig
from ..control.controller import Controller
from ..drafters.base import Drafter
from ..errors import EngineBusy, GenerationFailed, HeadstartError, InvalidParameter
from ..machine.model_runner import ModelRunner
from ..types import Request, Round
from .captured import CapturedRounds
from .context import RoundContext
from .copies import undisturbed
from .handle import Handle, Reception
from .listeners import Listeners
from .players import players
from .round import begin_reading, drain, end_reading, play
from .scheduler import Chunk, Scheduler
from .sequence import Sequence, TextSink
from .stats import EngineStats
from .torch_threads import torch_threads as limited_torch_threads
from .turns import Turns

__all__ = ["Engine", "Handle"]

log = logging.getLogger(__name__)

_engines: WeakSet[Engine] = WeakSet()  # for a fork: what another thread held then, nobody gives back in the child


def _forked() -> None:
    for engine in list(_engines):
        engine._rebuilding = Lock()


def _exiting() -> None:
    for engine in list(_engines):
        engine._turns.close(timeout=5.0)


atexit.register(_exiting)  # daemon threads may be in the middle of a step
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


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
        max_gamma: int = MAX_GAMMA,
    ) -> None:
        """``vocab_size``: the tokenizer's; ``text`` makes the detokeniser of a request, None for ids only.

        ``captured``: rounds on the device, for what fits there; ``max_gamma``: the most a round may draft.
        """
        # Where all models run on threads of their own, torch's would wait in a busy loop on the same cores.
        by_torch = not runner.own_threads or (drafter is not None and drafter.needs_torch)
        self._torch_threads = config.threads if by_torch else 1
        self.config = config
        self.stats = EngineStats()
        known = min(vocab_size, runner.vocab_size)
        self.parts = RoundContext(runner, drafter, controller, known, max_gamma, captured)
        self.players = players(self.parts)
        self._slab = runner.slab
        self._scheduler = Scheduler(self._slab, config.max_waiting)
        self._reception = Reception(known, runner.max_len, tuple(eos), text)
        self._handles: dict[str, Handle] = {}
        self._tell = Listeners(self.stats.add, controller.observe)
        self.listen = self._tell.listen
        self.check = self._reception.check  # raises if ``submit`` would refuse a request, whenever that were
        self._turns = Turns()
        self._door = Lock()  # over ``_handles`` and the waiting line together
        self._discarded: deque[Handle] = deque()  # requests that nobody waits for any more
        self._torn = False  # true while something moves; found true at the start: that was interrupted
        self._process = os.getpid()
        self._rebuilding = Lock()  # in a forked child
        _engines.add(self)

    # -- the caller's side

    def submit(self, request: Request) -> Handle:
        """Take a request in. Everything that can be wrong with it is said here, before anything is allocated."""
        handle = self.prepare(request)
        self.enter(handle)
        return handle

    def prepare(self, request: Request) -> Handle:
        """A handle for the request, which is checked here; nothing runs before ``enter``."""
        self._check_process()
        return self._reception.handle(request, self._handles)

    def enter(self, handle: Handle) -> None:
        """Put it in the line. Waits for no step of another thread, only for its books (microseconds)."""
        request_id = handle.request.id
        if len(self._discarded) > self.config.max_waiting and not self._turns.busy:  # while nobody steps they pile up
            self._turns.alone(lambda: self._whole(self._abort_discarded))
        with self._door:
            if request_id in self._handles:
                raise InvalidParameter("id", f"{request_id!r} is already running")
            handle.entered, self._handles[request_id] = True, handle
            try:
                self._scheduler.add(handle.sequences)
            except EngineBusy:
                self._handles.pop(request_id, None)
                raise
            except BaseException:  # Ctrl-C, perhaps when it was in the line already
                self.discard(handle)
                raise

    def running(self, request: str | Handle) -> Handle | None:
        """The request that runs or waits under this id; of a handle, itself, or None if it has ended."""
        found = self._handles.get(request if isinstance(request, str) else request.request.id)
        return found if isinstance(request, str) or found is request else None

    def abort(self, request: str | Handle) -> bool:
        """Stop a request now; its rows are free when this returns, after the step in progress. False: nothing ran."""
        handle = self.running(request)
        if handle is None:
            return False
        if self._turns.mine:  # from a listener: rows must not move before the step is over
            return self.discard(handle)
        self._turns.alone(lambda: self._whole(lambda: self._abort(handle)))
        return True

    def discard(self, request: str | Handle) -> bool:
        """Stop a request before the next step. Takes no lock, so a finalizer may call it at any moment."""
        handle = self.running(request)
        if handle is None:
            return False
        for sequence in handle.sequences:
            sequence.dropped = True
        self._discarded.append(handle)
        return True

    def abandon(self, handles: Seq[Handle], why: str) -> None:
        """These requests end with an error, now, even if the models cannot be used any more."""

        def end() -> None:
            self._torn = True  # their rows are not given back one by one: the next step empties the caches
            for handle in filter(self.running, handles):
                for sequence in handle.sequences:
                    sequence.end("error", why)
            self._requeue()

        self._turns.alone(end)

    def cold(self, *, learnt: bool = False) -> None:
        """Forget warm rows and (unless ``learnt``) what was learnt, as after loading. ``EngineBusy`` while any runs."""
        self._check_process()
        self._turns.alone(lambda: self._cool(learnt=learnt))

    def _cool(self, *, learnt: bool) -> None:
        self._whole(self._abort_discarded)
        if not self.idle:
            raise EngineBusy(f"{len(self._handles)} requests run or wait: a cold start needs an engine without any")
        self._whole(self._recover)
        if not learnt:  # as if it met its drafter for the first time
            who = self.parts.drafter
            self.parts.controller.meet(free=bool(who and who.free), ends_itself=bool(who and who.ends_itself))

    def drive(self, done: Callable[[], bool]) -> None:
        """Step until ``done()``, or sleep until then while another thread steps. Any thread may ask ``done``."""
        self._check_process()

        def step() -> None:
            self._whole(self._step)
            if not done() and self.idle:
                raise GenerationFailed("the engine has nothing left to do, and does not know this request")

        self._turns.until(done, step)

    def full(self, sequences: int = 1) -> bool:
        """True while ``submit`` would refuse that many sequences for want of a place in the line."""
        return self._scheduler.full(sequences)

    @property
    def stepping(self) -> bool:
        """Is this very thread in the middle of a step (a listener calls back)?"""
        return self._turns.mine

    @property
    def waiting(self) -> int:
        return self._scheduler.waiting

    @property
    def idle(self) -> bool:
        return self._scheduler.idle and not self._discarded

    @property
    def inactive_reason(self) -> str | None:
        """Why there is no speculation at the moment, for people; None while there is."""
        return self.parts.inactive or self.parts.controller.reason()

    # -- the step

    def step(self) -> None:
        """Read in some prompt, then give every running sequence a round."""
        self._check_process()
        self._turns.alone(lambda: self._whole(self._step))

    def _whole(self, work: Callable[[], None]) -> None:
        """Do something that moves rows. If it is interrupted, the next one starts with a clean engine."""
        device = self.parts.runner.device  # kernels of our own start on whatever device is the current one
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            if self._torn:
                self._recover()
            self._torn = True
            try:
                with limited_torch_threads(self._torch_threads):
                    work()
            except Exception as error:
                self._collapse(error)
            self._torn = False

    def _step(self) -> None:
        self._abort_discarded()
        if self._scheduler.arriving:
            self._fill()
        if ready := self._scheduler.ready():
            self.parts.controller.line(self._scheduler.waiting)
            self._round(ready, 0, ahead=not self._scheduler.arriving)

    def _abort_discarded(self) -> None:
        while self._discarded:
            self._abort(self._discarded.popleft())

    def _abort(self, handle: Handle) -> None:
        if self.running(handle) is None:
            return
        self._settle()
        for sequence in handle.sequences:
            if not sequence.finished:
                sequence.end("abort", handle.why)
                self._retire(sequence)

    def _settle(self) -> None:
        """Take in the round that was launched ahead, if there is one: rows must not move while it is under way."""
        if ready := self._scheduler.ready():
            self._guarded(ready, lambda: drain(self.parts, self.players, ready))

    def _fill(self) -> None:
        """Read prompts in, up to a chunk's worth of tokens, so that running sequences do not wait long."""
        budget, enough = self.config.prefill_chunk, self.parts.runner.enough_to_read
        while budget > 0 and (chunks := self._scheduler.chunks(budget, enough)):
            budget -= sum(len(chunk.tokens) for chunk in chunks)
            for chunk in chunks:
                self._tell.begun(self._handles[chunk.sequence.request.id])
            everyone = [chunk.sequence for chunk in chunks]
            whole = [chunk.sequence for chunk in chunks if chunk.last]
            if len(chunks) == len(whole) == 1 and self._drafts_from_prompts:
                self._settle()  # rows are about to change
                well = self._round(whole, self._slab.row(whole[0].id))
            else:
                well = self._guarded(everyone, lambda: self._read(chunks))
            for sequence in whole if well else ():
                if not sequence.finished:
                    self._scheduler.filled(sequence)

    @property
    def _drafts_from_prompts(self) -> bool:
        """May something be drafted in the round that reads the end of a prompt?"""
        captured = self.parts.captured
        return captured is None or (self.parts.drafter is not None and not captured.drafting)

    def _read(self, chunks: Seq[Chunk]) -> list[Round] | None:
        reading = begin_reading(self.parts, chunks)
        self._settle()  # while the device reads; rows are about to change
        return end_reading(self.parts, reading, self.stats)

    def _round(self, sequences: list[Sequence], first_row: int, *, ahead: bool = False) -> bool:
        return self._guarded(sequences, lambda: play(self.parts, self.players, sequences, first_row, ahead=ahead))

    def _guarded(self, sequences: list[Sequence], work: Callable[[], list[Round] | None]) -> bool:
        """Play a round; if it blows up, these sequences fail and the engine lives on. True if it went well."""
        try:
            rounds = work()
            while rounds is not None:
                self._tell.rounds(rounds)
                self._scheduler.wrote(max((r.emitted for r in rounds), default=0))
                if not any(s.finished for s in sequences):
                    break
                rounds = drain(self.parts, self.players, sequences)  # launched before the end was noticed
        except Exception as error:
            self._forget_rounds()
            log.error("a forward failed; %d sequences end with an error", len(sequences), exc_info=error)
            for sequence in sequences:
                sequence.end("error", f"{type(error).__name__}: {error}")
                self._retire(sequence)
            return False
        for sequence in sequences:
            if sequence.finished:
                self._retire(sequence)
        return True

    def _forget_rounds(self) -> None:
        for player in self.players:
            player.forget()

    def _retire(self, sequence: Sequence) -> None:
        self._scheduler.retire(sequence)
        self.parts.tell_drafter(lambda drafter: drafter.release(sequence.id))
        self._close(sequence)

    def _close(self, sequence: Sequence) -> None:
        """The books of a sequence that holds nothing any more."""
        if not sequence.settled:
            self.parts.controller.forget(sequence.id)
            self.stats.finished += sequence.finish_reason in ("stop", "length")
            self.stats.aborted += sequence.finish_reason == "abort"
            self.stats.failed += sequence.finish_reason == "error"
            self.stats.cached_tokens += sequence.tally.cached_tokens
            sequence.settled = True
        handle = self._handles.get(sequence.request.id)
        if handle is not None and all(s.settled for s in handle.sequences):
            self._handles.pop(sequence.request.id)  # its caller sees its end here
            self._tell.ended(handle)

    # -- after an interruption

    def _collapse(self, error: Exception) -> None:
        """Something went wrong outside a round (memory for a row, say): all that have a row fail, the rest wait on."""
        log.error("a step failed; every running sequence ends with an error", exc_info=error)
        for sequence in undisturbed(lambda: [s for handle in self._handles.values() for s in handle.sequences]):
            if not self._scheduler.waits(sequence):
                sequence.end("error", f"{type(error).__name__}: {error}")
        self._recover()

    def _recover(self) -> None:
        """Begin anew from the committed tokens: after an interruption nothing in the caches can be trusted."""
        self._forget_rounds()
        self._slab.reset()
        self.parts.tell_drafter(lambda drafter: drafter.reset())
        live = self._requeue()
        if live:
            log.info("the caches were emptied; requests that go on, from their committed tokens: %d", live)

    def _requeue(self) -> int:
        """Put all that goes on in the line, and close the books of the rest. How many go on."""
        with self._door:
            sequences = undisturbed(lambda: [s for handle in self._handles.values() for s in handle.sequences])
            for sequence in sequences:
                if sequence.dropped:
                    sequence.end("abort")
                elif sequence.torn:
                    sequence.end("error", "it was interrupted in the middle of a token (Ctrl-C, or an error)")
            live = [s for s in sequences if not s.finished]
            self._scheduler.restart(live)
        for sequence in sequences:  # those who listen may submit: not while the door is shut
            if sequence.finished:
                self._close(sequence)
        return len(live)

    def _check_process(self) -> None:
        """A forked child has the weights, but not the threads and none of the requests of its parent."""
        if os.getpid() != self._process:
            with self._rebuilding:
                if os.getpid() != self._process:
                    self._rebuild()

    def _rebuild(self) -> None:
        if self.parts.runner.device.type == "cuda":
            raise HeadstartError(
                "this process was forked after the model was loaded, and CUDA does not survive that: load the model in "
                "the child, or start it with multiprocessing's 'spawn'"
            )
        self._turns, self._door = Turns(), Lock()
        self._scheduler = Scheduler(self._slab, self.config.max_waiting)
        self._handles, self._discarded = {}, deque()
        torch.set_num_threads(1)  # torch's own threads stayed behind, and a step that waits for them never ends
        self._torn = True
        self._process = os.getpid()
