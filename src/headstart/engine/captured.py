"""Rounds that live on the device: the draft loop is one recording, verify-and-decide another, and the host runs behind.

Knows: the state a round needs on the device (last tokens, lengths, seeds, settings), and the two recordings.
Does not know: how a token is drawn (``drafters.pen``) or judged (``judge.decide``); both are the eager path's own.

The host reads one small buffer a round. When nothing is about to change, the next round is launched before the last
one's result is read, so the device never waits for Python; a sequence that ended is then noticed one round late, and
what was computed past its end is dropped.

What does not fit (penalties, bias, log-probabilities, rows with different rules) takes the eager path: see ``fits``.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ..drafters.model import ModelDrafter
from ..drafters.pen import draw_tokens
from ..machine.graphs import Recorder, Recording
from ..machine.runner import ModelRunner
from ..maths import noise
from ..maths.tree import Topology
from ..maths.warp import Warp
from ..types import Draw, Proposal, SamplingParams, Verdict
from .judge import Group, decide, group_of
from .sequence import Sequence

__all__ = ["CapturedRounds", "DeviceRunner", "Outcome"]


@runtime_checkable
class DeviceRunner(ModelRunner, Protocol):
    """A runner that can also be told its rows' lengths by a tensor on the device, without the host knowing them."""

    def device_forward(self, tokens: Tensor, lengths: Tensor, keep: int, bound: int) -> Tensor:
        """Logits [R, keep, V] of tokens [R, N] in rows 0 .. R-1 behind lengths [R] keys; no row gets past ``bound``."""


@dataclass(frozen=True)
class Outcome:
    """What one round said, on the host."""

    proposals: list[Proposal | None]
    verdicts: list[Verdict | None]
    draft_seconds: float
    verify_seconds: float
    logits: Tensor | None = None  # [R, N+1, V], where the round was played step by step


@dataclass(frozen=True)
class _Shape:
    """What one pair of recordings serves."""

    rows: int
    gamma: int
    group: Group
    truncates: bool  # some row uses top-k, top-p or min-p
    bound: int


@dataclass
class _Plan:
    """The recordings for one shape and the tensors they share."""

    shape: _Shape
    draft: Recording | None
    verify: Recording
    result: Tensor  # [R, gamma + 3] int64 on the device: accepted, token, ok, drafted tokens
    hosts: list[Tensor]  # the same, pinned: two that take turns, since two rounds can be under way


@dataclass
class _Flight:
    """A launched round whose result was not read yet."""

    plan: _Plan
    host: Tensor
    keys: tuple[str, ...]
    marks: list[torch.cuda.Event] | None
    times: tuple[float, float]


class CapturedRounds:
    """Plays rounds of a target (and a draft model, if there is one) on the device."""

    BOUNDS = (1024, 4096, 16384, 65536, 262144)  # recordings are made for the smallest of these that holds every row

    def __init__(self, target: DeviceRunner, drafter: ModelDrafter | None, *, vocab_size: int) -> None:
        self._target = target
        self._drafter = drafter
        self._vocab_size = vocab_size
        self._recorder = Recorder(target.device)
        self._plans: dict[_Shape, _Plan] = {}
        self._flight: _Flight | None = None
        device, rows = target.device, target.slab.rows
        self._last = torch.zeros(rows, 2, dtype=torch.int64, device=device)  # the last two committed tokens
        self._lengths = torch.zeros(rows, dtype=torch.int64, device=device)  # live keys: committed tokens less one
        self._seeds = torch.zeros(rows, dtype=torch.int64, device=device)
        self._real = torch.ones(3, rows, device=device)  # temperature, top_p, min_p
        self._top_k = torch.ones(rows, dtype=torch.int64, device=device)
        self._settings: tuple[SamplingParams, ...] = ()
        self._level: tuple[tuple[str, int], ...] = ()  # who is on the device, and with how many committed tokens

    # -- what the round asks

    @property
    def in_flight(self) -> bool:
        return self._flight is not None

    def fits(self, sequences: Seq[Sequence], gamma: int) -> bool:
        """Can these rows' next round be played here?"""
        if (gamma and self._drafter is None) or not self._recordable(len(sequences)):
            return False
        group = group_of(sequences[0], drafted=gamma > 0)
        for s in sequences:
            p = s.params
            odd = (
                p.logprobs is not None
                or bool(p.logit_bias)
                or p.min_tokens > s.output_length
                or (p.presence_penalty, p.frequency_penalty, p.repetition_penalty) != (0, 0, 1)
                or (gamma > 0 and not p.speculate)
                or group_of(s, drafted=gamma > 0) != group
            )
            if odd or len(s.tokens) < 2 or self._over(s, gamma, rounds=1):
                return False
        return True

    def play(self, sequences: Seq[Sequence], gamma: int, *, ahead: bool) -> Outcome:
        """The next round of rows 0 .. R-1. ``ahead``: the one after it may be launched before this returns."""
        if self._flight is None:
            self._settle(sequences, drafting=gamma > 0)
            self._flight = self._launch(sequences, gamma)
        flight, self._flight = self._flight, None
        # The draft is level only where it drafted, so a round that begins to draft starts from the host.
        same = bool(gamma) == bool(flight.plan.shape.gamma)
        ending = any(self._over(s, gamma, rounds=2) or s.remaining <= flight.plan.shape.gamma + 1 for s in sequences)
        if ahead and same and not ending:
            self._flight = self._launch(sequences, gamma)
        return self._read(flight, sequences)

    def committed(self, sequences: Seq[Sequence], outcome: Outcome) -> None:
        """The host has taken the round in: the draft's books follow."""
        self._level = tuple((s.id, len(s.tokens)) for s in sequences)
        if self._drafter is not None:
            for s, proposal, verdict in zip(sequences, outcome.proposals, outcome.verdicts, strict=True):
                if proposal is not None and verdict is not None:
                    self._drafter.adopt(s, len(s.tokens) - 1 - (verdict.origin == "bonus"))

    def forget(self) -> None:
        """After a failure: nothing on the device can be trusted to be level."""
        self._flight, self._level = None, ()

    # -- launching and reading

    def _recordable(self, rows: int) -> bool:
        """Few numbers of rows are recorded, since each takes a second; the others are played step by step."""
        return rows <= 4 or rows % 4 == 0 or rows == self._target.slab.rows

    def _over(self, sequence: Sequence, gamma: int, rounds: int) -> bool:
        """Would that many rounds write past the end of a row?"""
        slab = self._target.slab
        return len(sequence.tokens) + rounds * (gamma + 1) > slab.capacity

    def _settle(self, sequences: Seq[Sequence], *, drafting: bool) -> None:
        """Bring the device's state, and the draft's rows, level with the host."""
        if drafting:
            assert self._drafter is not None
            self._drafter.align(sequences)
        level = tuple((s.id, len(s.tokens)) for s in sequences)
        params = tuple(s.params for s in sequences)
        rows = len(sequences)
        if level != self._level:
            state = [[*s.tokens[-2:], len(s.tokens) - 1, noise.seeds([s.seed], "cpu").item()] for s in sequences]
            table = torch.tensor(state, dtype=torch.int64).to(self._target.device, non_blocking=True)
            self._last[:rows] = table[:, :2]
            self._lengths[:rows] = table[:, 2]
            self._seeds[:rows] = table[:, 3]
            self._level = level
        if params != self._settings:
            real = [[p.temperature or 1.0 for p in params], [p.top_p for p in params], [p.min_p for p in params]]
            self._real[:, :rows] = torch.tensor(real).to(self._target.device)
            self._top_k[:rows] = torch.tensor([p.top_k or self._vocab_size for p in params]).to(self._target.device)
            self._settings = params

    def _launch(self, sequences: Seq[Sequence], gamma: int) -> _Flight:
        longest = max(len(s.tokens) for s in sequences) + 2 * (gamma + 1)
        capacity = self._target.slab.capacity
        bound = min(next((b for b in self.BOUNDS if b >= longest), capacity), capacity)
        truncates = any(p.top_k or p.top_p < 1 or p.min_p > 0 for p in self._settings)
        shape = _Shape(len(sequences), gamma, group_of(sequences[0], drafted=gamma > 0), truncates, bound)
        plan = self._plans.get(shape)
        if plan is None:
            plan = self._plans[shape] = self._record(shape)
        mark = partial(torch.cuda.Event, enable_timing=True)
        marks = [mark() for _ in range(3)] if self._recorder.enabled else None
        started = perf_counter()
        if marks:
            marks[0].record()
        if plan.draft is not None:
            plan.draft.replay()
        drafted = perf_counter()
        if marks:
            marks[1].record()
        plan.verify.replay()
        host = plan.hosts.pop(0)
        plan.hosts.append(host)
        host.copy_(plan.result, non_blocking=True)
        if marks:
            marks[2].record()
        return _Flight(plan, host, tuple(s.id for s in sequences), marks, (drafted - started, perf_counter() - drafted))

    def _read(self, flight: _Flight, sequences: Seq[Sequence]) -> Outcome:
        assert flight.keys == tuple(s.id for s in sequences), "rows changed while a round was in flight"
        draft_seconds, verify_seconds = flight.times
        if flight.marks:
            flight.marks[2].synchronize()
            draft_seconds = flight.marks[0].elapsed_time(flight.marks[1]) / 1e3
            verify_seconds = flight.marks[1].elapsed_time(flight.marks[2]) / 1e3
        proposals: list[Proposal | None] = []
        verdicts: list[Verdict | None] = []
        gamma = flight.plan.shape.gamma
        for accepted, token, ok, *drafted in flight.host.tolist():
            proposals.append(Proposal.chain(drafted) if gamma else None)
            origin = "plain" if not gamma else "bonus" if accepted == gamma else "correction"
            verdicts.append(Verdict(tuple(range(accepted)), token, origin) if ok else None)  # type: ignore[arg-type]
        return Outcome(proposals, verdicts, draft_seconds, verify_seconds)

    # -- recording

    def warm_up(self, rows: Seq[int], gammas: Seq[int], groups: Seq[Group]) -> None:
        """Record ahead of time, so that nothing is recorded while serving."""
        for group in groups:
            for count in rows:
                for gamma in gammas:
                    for bound in self.BOUNDS[:1]:
                        shape = _Shape(count, gamma, group, False, min(bound, self._target.slab.capacity))
                        self._plans.setdefault(shape, self._record(shape))

    def _warp(self, shape: _Shape) -> Warp:
        """The settings of the first R rows, read from the device's own state."""
        rows = shape.rows
        example = [SamplingParams(temperature=0.0 if shape.group == "greedy" else 1.0)] * rows
        plain = Warp.of(example, vocab_size=self._vocab_size, eos=[()] * rows, device=self._target.device)
        if shape.group == "greedy":
            return plain
        return plain.over(
            temperature=self._real[0, :rows],
            top_p=self._real[1, :rows] if shape.truncates else None,
            min_p=self._real[2, :rows] if shape.truncates else None,
            top_k=self._top_k[:rows] if shape.truncates else None,
        )

    def _record(self, shape: _Shape) -> _Plan:
        rows, gamma, device, width = shape.rows, shape.gamma, self._target.device, self._target.vocab_size
        point = shape.group in ("greedy", "coupled")
        warp = self._warp(shape)
        topology = Topology.chain([gamma] * rows, device)
        drafts = torch.zeros(rows, gamma, dtype=torch.int64, device=device)
        q = None if point or not gamma else torch.zeros(rows, gamma, width, device=device)
        result = torch.zeros(rows, gamma + 3, dtype=torch.int64, device=device)
        hosts = [torch.zeros(rows, gamma + 3, dtype=torch.int64, pin_memory=self._recorder.enabled) for _ in "ab"]
        last, lengths, seeds = self._last[:rows], self._lengths[:rows], self._seeds[:rows]
        none = torch.zeros(rows, dtype=torch.int64, device=device)
        coupled = torch.full((rows,), shape.group == "coupled", device=device)
        kinds: list[Draw] = ["point" if point else "iid"] * rows

        def draft() -> None:
            assert self._drafter is not None
            runner: DeviceRunner = self._drafter.runner  # type: ignore[assignment]
            # The token before the last is fed again: after full acceptance the draft has not seen it.
            fed, at = last, lengths - 1
            for i in range(gamma):
                logits = self._drafter.fit(runner.device_forward(fed, at, 1, shape.bound)[:, 0])
                drawn, row_q = draw_tokens(
                    logits, warp, i, seeds=seeds, base=lengths + 1, coupled=coupled, outputs=none
                )
                drafts[:, i] = drawn.clamp_min(0)
                if q is not None and row_q is not None:
                    q[:, i] = row_q
                at = at + fed.shape[1]
                fed = drafts[:, i : i + 1]

        def verify() -> None:
            tokens = torch.cat([last[:, 1:], drafts], dim=1)
            logits = self._target.device_forward(tokens, lengths, gamma + 1, shape.bound)
            verdicts = decide(
                shape.group,
                logits,
                warp,
                tokens=tokens,
                topology=topology,
                outputs=none,
                history=None,
                seeds=seeds,
                base=lengths + 1,
                q=q,
                kinds=kinds,
            )
            accepted, token = verdicts.accepted, verdicts.token.clamp_min(0)
            result[:, 0], result[:, 1], result[:, 2] = accepted, token, verdicts.ok
            if gamma:
                result[:, 3:] = drafts
            before = tokens.gather(1, accepted[:, None])
            last.copy_(torch.cat([before, token[:, None]], dim=1))
            lengths.add_(accepted + 1)

        state = [last, lengths]
        with torch.inference_mode():
            recorded = self._recorder.record(draft, state=state) if gamma else None
            return _Plan(shape, recorded, self._recorder.record(verify, state=state), result, hosts)
