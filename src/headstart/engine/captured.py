"""Rounds that live on the device: the draft loop is one CUDA graph, verify-and-decide another; the host runs behind.

Knows: which programs are captured, when each is replayed, and how its result gets to the host.
Does not know: what they do (``programs``), or what a row's line in the device's table means (``device_rows``).

The host reads one small buffer a round. When nothing is about to change, the next round is launched before the last
one's result is read, so the device never waits for Python; a sequence that ended is then noticed one round late, and
what was computed past its end is dropped. They are captured for a few numbers of rows (buckets), draft lengths
and bounds on the context, all of them in ``warm_up``; after it nothing is captured any more.

Where a row has a grammar, the target's forward is launched ahead as ever, since it needs the device's table alone. What
the grammar allows is worked out while it runs, from the committed text and the drafted tokens, which come back before
it; then the decision is launched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import NamedTuple

import torch

from ..drafters.base import DeviceDrafter
from ..machine.gpu.graphs import Graphs
from ..machine.model_runner import DeviceRunner
from ..types import Proposal
from .device_rows import DeviceRows, Kind, kind_of
from .flight import Flight, mark
from .node_masks import node_masks
from .outcome import DraftFailed, Outcome
from .programs import Programs, Shape
from .sequence import Sequence

__all__ = ["Body", "CapturedRounds", "Flight", "draft_lengths"]

KINDS: tuple[Kind, ...] = ("greedy", "rejected", "coupled", "full")
_LENGTHS = (0, 1, 2, 3, 4, 6, 8, 10, 12, 16, 24, 32, 48, 64)
_FEW_LENGTHS = (0, 1, 3, 6, 12, 24, 48)


def draft_lengths(most: int, *, fixed: bool, few: bool = False) -> tuple[int, ...]:
    """The draft lengths to capture: a fixed one, or a choice for a controller; 0 is a plain round.

    ``few``: a coarser choice, where capturing takes long.
    """
    return (0, most) if fixed else tuple(sorted({*(n for n in (_FEW_LENGTHS if few else _LENGTHS) if n < most), most}))


def _masked(sequences: Seq[Sequence]) -> bool:
    """Has any of them a grammar?"""
    return any(s.constraint is not None for s in sequences)


class Body(NamedTuple):
    """One program of a shape, and what captures it."""

    graphs: Graphs
    runner: DeviceRunner  # whose layers it runs
    run: Callable[[], None]
    enough: Callable[[], None]  # launches every kernel that ``run`` launches, perhaps less often

    def brief(self) -> None:
        with self.runner.brief():
            self.enough()


class CapturedRounds:
    """Plays rounds of a target on the device, with the drafts of a draft model there or with drafts from the host."""

    def __init__(
        self,
        target: DeviceRunner,
        drafter: DeviceDrafter | None,
        *,
        vocab_size: int,
        lengths: Seq[int],
        masks: bool = True,
    ) -> None:
        """``lengths``: the draft lengths that are captured, 0 among them; ``masks``: rows may have grammars."""
        self._target, self._drafter = target, drafter
        self.lengths = tuple(sorted({0, *lengths}))
        slab = target.slab
        self._state = DeviceRows(slab.rows, width=target.vocab_size, vocab_size=vocab_size, device=target.device)
        self._programs = Programs(self._state, target, drafter, max(1, self.lengths[-1]), masks=masks)
        self._graphs = Graphs(target.device)
        self._captured: dict[tuple[str, Shape], Callable[[], None]] = {}  # by the names of ``_bodies``
        self._flight: Flight | None = None
        self._caught_up = 0.0  # seconds of the last catching up, until a launch takes them along
        self._sealed = False
        self._bounds = (*(b for b in target.BOUNDS if b < slab.capacity), slab.capacity)
        self._buckets = (*(1 << i for i in range(16) if 1 << i < slab.rows), slab.rows)
        # Two that take turns, since two rounds can be under way.
        told, pinned = (self._programs.result, *self._programs.logprobs), self._graphs.enabled
        self._hosts = [[torch.zeros(t.shape, dtype=t.dtype, pin_memory=pinned) for t in told] for _ in "ab"]
        drafts = self._programs.drafts
        self._drafts = torch.zeros(drafts.shape, dtype=drafts.dtype, pin_memory=pinned)  # as they come back

    # -- what the round asks

    @property
    def in_flight(self) -> bool:
        return self._flight is not None

    @property
    def drafting(self) -> bool:
        """Is the draft model on the device too?"""
        return self._drafter is not None

    @property
    def buckets(self) -> tuple[int, ...]:
        """Numbers of rows that are captured: others run as the next larger one."""
        return self._buckets

    @property
    def captured_programs(self) -> int:
        return len(self._captured)

    def fits(self, sequences: Seq[Sequence], gamma: int) -> bool:
        """Can these rows' next round be played here?"""
        shape = self._shape(sequences, self._down(gamma))
        drafts = shape.gamma == 0 or (self.drafting and not self._missing("draft", shape))
        return drafts and self._verifiable(sequences, shape)

    def play(self, sequences: Seq[Sequence], gamma: int, *, ahead: Callable[[], bool]) -> Outcome:
        """The next round of rows 0 .. R-1. ``ahead``: may the one after it be launched before this returns? It is asked
        while the device works."""
        gamma = self._down(gamma)
        if self._flight is None:
            self._settle(sequences, drafting=gamma > 0)
            self._flight = self._launch(sequences, gamma)
        flight, self._flight = self._flight, None
        self._decide(flight)
        # The draft is level only where it drafted, so a round that begins to draft starts from the host.
        same = bool(gamma) == bool(flight.shape.gamma)
        ending = any(self._over(s, gamma, rounds=2) or s.remaining <= flight.shape.gamma + 1 for s in sequences)
        if same and not ending and self.fits(sequences, gamma) and ahead():
            self._flight = self._launch(sequences, gamma)
        return self._read(flight, sequences)

    def judge(self, sequences: Seq[Sequence], proposals: Seq[Proposal | None]) -> Outcome | None:
        """A round whose drafts were made elsewhere; None where it does not fit. Only their tokens come back."""
        longest = max((len(p) for p in proposals if p is not None), default=0)
        gamma = next((n for n in self.lengths if n >= longest), None)
        if gamma is None or any(p is not None and not p.is_chain for p in proposals):
            return None
        shape = self._shape(sequences, gamma)
        if not self._verifiable(sequences, shape):
            return None
        limits = [len(p) if p is not None else 0 for p in proposals]
        self._settle(sequences, drafting=False, limits=limits)
        self._send(proposals, shape)
        flight = self._launch(sequences, gamma, given=limits)
        self._decide(flight, proposals)
        return self._read(flight, sequences)

    def complete(self) -> None:
        """Launch all that is left of the round in flight: other work for the device is about to come behind it."""
        if self._flight is not None:
            self._decide(self._flight)

    def forget(self) -> None:
        """After a failure: nothing on the device can be trusted to be level."""
        self._flight = None
        self._state.forget()

    # -- shapes

    def _down(self, gamma: int) -> int:
        return max(n for n in self.lengths if n <= gamma)

    def _shape(self, sequences: Seq[Sequence], gamma: int) -> Shape:
        rows = next(n for n in self._buckets if n >= len(sequences))
        longest = max(len(s.tokens) for s in sequences) + 2 * (gamma + 1)
        bound = next((b for b in self._bounds if b >= longest), self._bounds[-1])
        return self._coarse(Shape(rows, gamma, kind_of(sequences, drafted=gamma > 0), bound))

    def _coarse(self, shape: Shape) -> Shape:
        """Programs that are seldom wanted are captured for the largest bound only."""
        seldom = shape.kind == "full" or (shape.kind == "coupled" and shape.gamma > 0)
        return replace(shape, bound=self._bounds[-1]) if seldom else shape

    def _missing(self, name: str, shape: Shape) -> bool:
        return self._sealed and (name, shape) not in self._captured

    def _verifiable(self, sequences: Seq[Sequence], shape: Shape) -> bool:
        enough = all(len(s.tokens) >= 2 and not self._over(s, shape.gamma, rounds=1) for s in sequences)
        if _masked(sequences) and self._programs.masks is None:
            return False
        return enough and not any(self._missing(*part) for part in self._parts(sequences, shape))

    def _parts(self, sequences: Seq[Sequence], shape: Shape) -> list[tuple[str, Shape]]:
        """The target's programs of a round, by name: one, or two where the host works masks out in between."""
        if not _masked(sequences):
            return [("verify", shape)]
        return [("forward", replace(shape, kind="greedy")), ("decide", replace(shape, bound=self._bounds[-1]))]

    def _over(self, sequence: Sequence, gamma: int, rounds: int) -> bool:
        """Would that many rounds write past the end of a row?"""
        return len(sequence.tokens) + rounds * (gamma + 1) > self._target.slab.capacity

    # -- launching and reading

    def _settle(self, sequences: Seq[Sequence], *, drafting: bool, limits: Seq[int] | None = None) -> None:
        """Bring the device's table, and the draft's rows, level with the host."""
        if self._drafter is not None and drafting:
            self._catch_up(self._drafter, sequences)
        # Where idle rows may be written without harm.
        idle = range(len(sequences), next(n for n in self._buckets if n >= len(sequences)))
        draft = self._drafter.device_runner.slab.lengths if self._drafter is not None else [0] * idle.stop
        self._state.settle(sequences, [(self._target.slab.lengths[row], draft[row]) for row in idle], limits)

    def _catch_up(self, drafter: DeviceDrafter, sequences: Seq[Sequence]) -> None:
        """The draft reads what it lacks. Waits until it has: what comes next is timed."""
        started = perf_counter()
        try:
            if drafter.align(sequences) and self._graphs.enabled:
                torch.cuda.synchronize(self._target.device)
        except Exception as error:
            raise DraftFailed from error
        self._caught_up = perf_counter() - started

    def _send(self, proposals: Seq[Proposal | None], shape: Shape) -> None:
        """Drafts from the host, and what they were drawn from: a deterministic guess is a one-hot distribution."""
        width, device = shape.gamma, self._target.device
        lines = [[*p.tokens, *[0] * (width - len(p))] if p is not None else [0] * width for p in proposals]
        drafts = torch.tensor(lines, dtype=torch.int64).T.contiguous().to(device, non_blocking=True)
        self._programs.drafts[:width, : len(proposals)] = drafts
        if shape.kind == "greedy" or not width:
            return
        q = self._programs.q[: shape.rows, :width]
        q.zero_()
        q[: len(proposals)].scatter_(2, drafts.T[:, :, None], 1.0)
        for row, proposal in enumerate(proposals):
            if proposal is not None and proposal.q is not None and proposal.draw == "iid":
                q[row, : len(proposal)] = proposal.q

    def _launch(
        self,
        sequences: Seq[Sequence],
        gamma: int,
        *,
        given: Seq[int] | None = None,
        anew: bool = True,
        beside: Callable[[], None] | None = None,
    ) -> Flight:
        """Launch a round, as far as it goes without masks. given: lengths of the drafts that were sent.
        ``anew=False``: the drafts are on the device. ``beside``: called between drafting and verifying.
        """
        shape = self._shape(sequences, gamma)
        lengths = [n for n in self.lengths if 0 < n <= gamma] if given is None and anew else []
        drafts = [self._program("draft", replace(shape, gamma=n)) for n in lengths]
        first, *more = (self._program(*part) for part in self._parts(sequences, shape))
        started = mark(self._target.device)
        for draft in drafts:
            draft()
        if beside is not None:
            beside()
        marks, arrived = [started, mark(self._target.device)], None
        if more and given is None and gamma:
            self._drafts[:gamma].copy_(self._programs.drafts[:gamma], non_blocking=True)
            arrived = mark(self._target.device)
        first()
        limits = tuple(given) if given is not None else tuple(gamma if s.params.speculate else 0 for s in sequences)
        behind, self._caught_up = self._caught_up, 0.0
        flight = Flight(shape, tuple(sequences), limits, marks, given is None, behind, arrived)
        if not more:
            self._fetch(flight)
        return flight

    def _decide(self, flight: Flight, given: Seq[Proposal | None] | None = None) -> None:
        """Launch what is left of a round: with masks that follow from all that is committed, and from the drafts.
        given: those that were sent."""
        if flight.decided:
            return
        proposals = given if given is not None else flight.drafts(self._drafts)
        # The end is checked first: a sequence that ended in the round before asks for nothing any more.
        pairs = zip(flight.sequences, proposals, strict=True)
        masks = [[] if sequence.finished else node_masks(sequence, proposal) for sequence, proposal in pairs]
        assert self._programs.masks is not None
        self._programs.masks.send(masks, flight.shape.gamma + 1)
        _, decide = self._parts(flight.sequences, flight.shape)
        self._program(*decide)()
        self._fetch(flight)

    def _fetch(self, flight: Flight) -> None:
        """Start copying the result to the host."""
        self._hosts.reverse()
        logprobs = any(s.params.logprobs is not None for s in flight.sequences)
        told, rows = (self._programs.result, *(self._programs.logprobs if logprobs else ())), flight.shape.rows
        flight.host = self._hosts[0][: len(told)]
        for here, there in zip(flight.host, told, strict=True):
            here[:rows].copy_(there[:rows], non_blocking=True)
        flight.marks.append(mark(self._target.device))

    def _read(self, flight: Flight, sequences: Seq[Sequence]) -> Outcome:
        assert flight.sequences == tuple(sequences), "rows changed while a round was in flight"
        outcome = flight.outcome()
        self._state.advanced(sequences, outcome.verdicts)
        if flight.drafted and self._drafter is not None:
            for s, proposal, verdict in zip(sequences, outcome.proposals, outcome.verdicts, strict=True):
                if proposal is not None and verdict is not None and not s.finished:
                    # A draft that was accepted whole never read its own last token.
                    fed = len(verdict.path) - (verdict.origin == "bonus")
                    self._drafter.adopt(s, proposal.tokens[:fed])
        return outcome

    # -- capturing

    def warm_up(self, report: Callable[[int, int], object] = lambda done, of: None) -> None:
        """Capture everything there is, so that nothing is captured while serving. ``report``: (done, of how many)."""
        shapes = list(self._shapes())
        for done, shape in enumerate(shapes):
            report(done, len(shapes))
            for name in self._bodies(shape):
                self._program(name, shape)
        report(len(shapes), len(shapes))
        self._sealed = True

    def rehearsed(self) -> Iterator[Callable[[], None]]:
        """Everything that will be captured, each once and briefly, to be called before ``warm_up``.

        What it does to the rows is put back when the iterator ends.
        """
        kept = [tensor.clone() for tensor in self._programs.changed(len(self._state.lengths))]
        for shape in self._shapes():
            for body in self._bodies(shape).values():
                yield body.brief
        for tensor, value in zip(self._programs.changed(len(self._state.lengths)), kept, strict=True):
            tensor.copy_(value)

    def _bodies(self, shape: Shape) -> dict[str, Body]:
        """The programs of a shape, by name."""
        verify = partial(self._programs.verify, shape)
        found = {"verify": Body(self._graphs, self._target, verify, verify)}
        if shape.gamma and self.drafting:
            # A draft is captured in parts, each from one length to the next: capturing all lengths then takes no longer
            # than capturing the longest.
            before = max((n for n in self.lengths if n < shape.gamma), default=0)
            draft = partial(self._programs.draft, shape, before)
            found["draft"] = Body(self._graphs, self._programs.draft_runner, draft, partial(draft, 2))
        if self._programs.masks is not None:  # see ``_parts``: one is the same for all kinds, one for all bounds
            if shape.kind == "greedy":
                forward = partial(self._programs.forward, shape)
                found["forward"] = Body(self._graphs, self._target, forward, forward)
            if shape.bound == self._bounds[-1]:
                decide = partial(self._programs.decide, shape)
                found["decide"] = Body(self._graphs, self._target, decide, decide)
        return found

    def _shapes(self) -> Iterator[Shape]:
        """The largest first, so that the others find their memory there."""
        for bound in reversed(self._bounds):
            for rows in reversed(self._buckets):
                for kind in reversed(KINDS):
                    for gamma in reversed(self.lengths):
                        shape = Shape(rows, gamma, kind, bound)
                        if shape == self._coarse(shape) and (gamma or kind != "rejected"):
                            yield shape

    @torch.inference_mode()
    def _program(self, name: str, shape: Shape) -> Callable[[], None]:
        found = self._captured.get((name, shape))
        if found is None:
            body = self._bodies(shape)[name]
            found = body.graphs.capture(body.run, self._programs.changed(shape.rows), body.brief)
            self._captured[name, shape] = found
        return found

    @property
    def runners(self) -> tuple[DeviceRunner, ...]:
        """The target, and the draft model where it is on the device."""
        return (self._target, *([self._programs.draft_runner] if self.drafting else []))
