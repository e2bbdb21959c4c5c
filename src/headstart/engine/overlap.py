"""Captured rounds whose draft goes on while the target verifies.

Knows: the optimistic continuation. While the target reads a draft, the draft model goes on from its own full chain as
if all of it were accepted: it guesses the target's bonus token too, and drafts the next round behind it, on a second
stream. If the verdict is "all accepted, and the bonus is the one you guessed", the next round's draft is already
there; otherwise it is drafted anew. Does not know: what is drawn how (``programs``).

Lossless for every rule, because nothing new is drawn: a continuation is drawn with the noise of the round it is for, so
it is the very draft that would have been made after the verdict. Only single rows overlap; with several, all of them
would have to be right at once. And only while most drafts are accepted whole: else the work is thrown away, and slows
the verifying down.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial
from typing import Any

import torch

from ..drafters.draft_sampler import draw_tokens
from ..machine.gpu.graphs import Graphs
from ..maths import noise
from .captured import Body, CapturedRounds, Flight
from .outcome import Outcome
from .programs import Shape
from .sequence import Sequence

__all__ = ["OverlappedRounds"]


WORTH = 0.5  # the share of whole acceptances under which there is no continuation
FADE = 0.1  # how fast old rounds are forgotten in it


class OverlappedRounds(CapturedRounds):
    """``CapturedRounds`` that overlap drafting and verifying wherever one sequence runs alone."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        cuda = self._graphs.enabled
        self._side = torch.cuda.Stream(self._target.device, priority=-1) if cuda else None  # type: ignore[no-untyped-call]
        self._side_graphs = Graphs(self._target.device, -1)  # scratch memory of its own: it runs beside the others
        self._ahead = torch.zeros_like(self._programs.drafts)  # the next round's drafts
        self._ahead_q = torch.zeros_like(self._programs.q[:1])
        self._origin = torch.zeros_like(self._state.lengths[:1])  # the row's length when this round began
        self._guess = torch.zeros_like(self._origin)
        self._guess_host = torch.zeros(1, dtype=torch.int64, pin_memory=cuda)
        self._finished: torch.cuda.Event | None = None  # of the last continuation
        self._continued: Flight | None = None  # the round that the last continuation belongs to
        self._whole = 1.0  # the recent share of drafts that were accepted whole
        self.hits = 0

    def play(self, sequences: Seq[Sequence], gamma: int, *, ahead: Callable[[], bool]) -> Outcome:
        gamma = self._down(gamma)
        if not self._pays(sequences, gamma):
            self._wait()
            return super().play(sequences, gamma, ahead=ahead)
        if self._flight is None:
            self._settle(sequences, drafting=True)
            self._flight = self._start(sequences, gamma, anew=True)
        flight, self._flight = self._flight, None
        found = self._read(flight, sequences)
        (sequence,), (verdict,) = sequences, found.verdicts
        room = sequence.remaining - (len(verdict.path) + 1 if verdict is not None else 0)
        # One more round may be under way when the end is noticed, so there must be a place for it.
        if verdict is not None and room > 0 and not self._over(sequence, gamma, rounds=3) and ahead():
            whole = len(verdict.path) == gamma == flight.shape.gamma and flight is self._continued
            hit = whole and self._guessed() == verdict.token
            self.hits += hit
            if hit or flight.shape.gamma:  # a draft that sat a round out is level only after a fresh start
                self._flight = self._start(sequences, gamma, anew=not hit)
        return found

    def _pays(self, sequences: Seq[Sequence], gamma: int) -> bool:
        shape = self._shape(sequences, gamma)
        alone = len(sequences) == 1 and sequences[0].params.speculate
        # A row with a grammar is not drafted ahead: what it is decided by waits for the host.
        fits = alone and sequences[0].constraint is None and gamma > 0 and shape.kind != "full"
        room = not any(self._over(s, gamma, rounds=2) for s in sequences)  # the continuation's own round
        return fits and room and self._whole >= WORTH and not self._missing("continue", shape)

    def _read(self, flight: Flight, sequences: Seq[Sequence]) -> Outcome:
        found = super()._read(flight, sequences)
        if len(sequences) == 1 and flight.shape.gamma and found.verdicts[0] is not None:
            whole = len(found.verdicts[0].path) == flight.shape.gamma
            self._whole += FADE * (whole - self._whole)
        return found

    def _bodies(self, shape: Shape) -> dict[str, Body]:
        found = super()._bodies(shape)
        if shape.rows == 1 and shape.gamma > 0 and shape.kind != "full":
            run = partial(self._continue, shape)
            found["continue"] = Body(self._side_graphs, self._programs.draft_runner, run, run)
        return found

    def forget(self) -> None:
        self._whole = 1.0
        self._wait()
        super().forget()

    def _settle(self, sequences: Seq[Sequence], *, drafting: bool, limits: Seq[int] | None = None) -> None:
        self._wait()
        super()._settle(sequences, drafting=drafting, limits=limits)

    # -- the continuation

    def _start(self, sequences: Seq[Sequence], gamma: int, *, anew: bool) -> Flight:
        """Launch a round, with the draft that is there or a new one, and its continuation beside it."""
        shape = self._shape(sequences, gamma)
        self._wait()
        if not anew:
            self._programs.drafts[:gamma, :1] = self._ahead[:gamma, :1]
            if shape.kind != "greedy":
                self._programs.q[:1, :gamma].copy_(self._ahead_q[:, :gamma])
        self._origin.copy_(self._state.lengths[:1])
        flight = self._launch(sequences, gamma, anew=anew, beside=partial(self._go_on, shape))
        self._continued = flight
        return flight

    def _go_on(self, shape: Shape) -> None:
        """Start the continuation on the second stream, behind everything that was launched so far."""
        go_on = self._program("continue", shape)
        if self._side is None:
            go_on()
            self._guess_host.copy_(self._guess)
            return
        self._side.wait_stream(torch.cuda.current_stream(self._target.device))
        with torch.cuda.stream(self._side):
            go_on()
            self._guess_host.copy_(self._guess, non_blocking=True)
            self._finished = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._finished.record(self._side)

    def _wait(self) -> None:
        """What is launched from here on comes after the continuation: both write the draft's keys."""
        if self._finished is not None:
            torch.cuda.current_stream(self._target.device).wait_event(self._finished)

    def _guessed(self) -> int:
        if self._finished is not None:
            self._finished.synchronize()
        return int(self._guess_host)

    def _continue(self, shape: Shape) -> None:
        """The target's bonus as the draft sees it, and the next round's draft behind it."""
        programs, s, gamma = self._programs, self._state, shape.gamma
        assert self._drafter is not None
        warp = s.warp(1, shape.kind, draft=True)
        at = self._origin + gamma
        with programs.draft_runner.beside():
            last = programs.drafts[gamma - 1, :1, None]
            logits = self._drafter.fit(programs.draft_runner.device_forward(last, at, 1, shape.bound)[:, 0])
            # The target draws its bonus with the round's residual noise, or with the position's where it is coupled.
            rejects = s.codes[0, :1] > 0
            base = torch.where(rejects, self._origin + 1, at + 1)
            keys = programs.vocab_ops.keys(s.seeds[:1], base, 0, torch.where(rejects, noise.RESIDUAL, noise.COUPLED))
            token, _ = draw_tokens(logits, warp, keys, vocab_ops=programs.vocab_ops)
            torch.clamp_min(token, 0, out=self._guess)
            fed, drafts, q = self._guess[:, None], self._ahead, self._ahead_q
            programs.chain(shape, fed, at + 1, None, range(gamma), base=at + 2, drafts=drafts, q=q)
