"""The life of requests under a state machine, by every player of a round: requests come, end and are aborted, drafters
fail, steps are interrupted. Rows and lengths add up after every step, texts are plain decoding's, and nothing is left.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from engines import device_draft, device_engine, run, table, table_draft, table_engine, tree_drafter
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from interrupts import Interrupt, Interrupted
from slab_tools import check_slab, filling

from headstart.drafters.lookup import LookupDrafter
from headstart.drafters.model import ModelDrafter
from headstart.engine.engine import Engine, Handle
from headstart.engine.overlap import OverlappedRounds
from headstart.machine.kvcache import Slab
from headstart.types import Choice, Request, SamplingParams

V, GAMMA, CHUNK = 6, 3, 8
MORE = int(os.environ.get("HEADSTART_STRESS", "0"))
TARGET = table(V, seed=5)
DRAFT = TARGET + 0.4 * table(V, seed=6)

stepping = partial(table_engine, TARGET, gamma=GAMMA, prefill_chunk=CHUNK)
on_device = partial(device_engine, TARGET, gamma=GAMMA, prefill_chunk=CHUNK)
#: each way to play rounds, over so many rows
ENGINES: dict[str, Callable[[int], Engine]] = {
    "model": lambda rows: stepping(table_draft(DRAFT, rows=rows), rows=rows),
    "lookup": lambda rows: stepping(LookupDrafter(), rows=rows),
    "tree": lambda rows: stepping(tree_drafter(DRAFT), rows=rows),
    "captured": lambda rows: on_device(device_draft(DRAFT, rows=rows), rows=rows),
    "overlapped": lambda rows: on_device(device_draft(DRAFT, rows=rows), rows=rows, overlap=True),
    "judged on the device": lambda rows: on_device(LookupDrafter(), rows=rows),
    "captured, no draft": lambda rows: on_device(None, rows=rows),
}
#: beside temperature, rule and length: all else that a request may ask for
EXTRAS: list[dict[str, Any]] = [
    {},
    {},
    {"top_p": 0.8},
    {"top_k": 3, "min_p": 0.05},
    {"repetition_penalty": 1.4, "presence_penalty": 0.5},
    {"frequency_penalty": 0.7, "logit_bias": {2: 1.5, 4: -3.0}},
    {"logprobs": 2},
    {"min_tokens": 4},
]


def plain(request: Request) -> list[Choice]:
    """The answers to a request that is alone, with nothing drafted and nothing on the device."""
    (found,) = run(table_engine(TARGET, None, rows=1), [request])
    return list(found.choices)


class Life(RuleBasedStateMachine):
    """Submits, steps, aborts and interrupts at random, and checks the books after every step."""

    def __init__(self, kind: str, seen: Counter[str]) -> None:
        super().__init__()
        self.kind, self.seen = kind, seen
        self.handles: dict[str, Handle] = {}
        self.expected: dict[str, list[Choice]] = {}
        self.count = self.asked = 0
        self.fails_at: int | None = None

    @initialize(rows=st.sampled_from([1, 3]), fails_at=st.sampled_from([None, 1, None, 3, None, 7]))
    def begin(self, rows: int, fails_at: int | None) -> None:
        """``fails_at``: the host's how manieth call of the drafter, or of its model, raises."""
        self.engine, self.fails_at = ENGINES[self.kind](rows), fails_at
        drafter: Any = self.engine.parts.drafter
        if drafter is None:
            return
        self.frail(drafter.runner, "forward") if isinstance(drafter, ModelDrafter) else self.frail(drafter, "propose")

    def frail(self, thing: Any, method: str) -> None:
        own = getattr(thing, method)

        def may_fail(*args: Any, **kwargs: Any) -> Any:
            self.asked += 1
            if self.asked == self.fails_at:
                raise torch.OutOfMemoryError("no room for a draft")
            return own(*args, **kwargs)

        setattr(thing, method, may_fail)

    @precondition(lambda self: sum(not handle.done for handle in self.handles.values()) < 4)
    @rule(
        prompt=st.lists(st.integers(0, V - 1), min_size=1, max_size=24),
        max_tokens=st.integers(1, 24),
        temperature=st.sampled_from([0.0, 0.8]),
        verification=st.sampled_from(["token", "block", "coupled"]),
        n=st.sampled_from([1, 1, 2]),
        speculate=st.sampled_from([True, True, True, False]),
        stop_token_ids=st.sampled_from([(), (), (3,)]),
        extras=st.sampled_from(EXTRAS),
    )
    def submit(self, prompt: list[int], extras: dict[str, Any], **asked: Any) -> None:
        least = min(extras.get("min_tokens", 0), asked["max_tokens"])
        params = SamplingParams(seed=self.count, **asked | extras | {"min_tokens": least})
        ended = [name for name, handle in self.handles.items() if handle.done]
        name = ended[0] if ended and len(prompt) % 2 else f"r{self.count}"  # an id may come again
        if name in self.handles:
            self.look_at_the_answer(self.handles.pop(name), self.expected.pop(name, None))
        request = Request(name, tuple(prompt), params)
        self.count += 1
        self.handles[request.id] = self.engine.submit(request)
        if params.greedy or params.rule == "coupled" or not params.speculate:
            self.expected[request.id] = plain(request)

    @rule(count=st.integers(1, 3))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()

    @precondition(lambda self: self.handles)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        chosen = data.draw(st.sampled_from(sorted(self.handles)))
        self.engine.abort(chosen)
        assert self.handles[chosen].done

    @precondition(lambda self: not self.engine.idle)
    @rule(at=st.integers(1, 1500))
    def interrupt(self, at: int) -> None:
        """Ctrl-C somewhere in a step."""
        try:
            with Interrupt(at):
                self.engine.step()
        except Interrupted:
            self.seen["interrupted"] += 1

    @invariant()
    def books_add_up(self) -> None:
        if not hasattr(self, "engine") or self.engine._torn:  # the next step mends it
            return
        slab = self.engine.parts.runner.slab
        live = {s.id: s for h in self.handles.values() for s in h.sequences if not s.finished}
        scheduler = self.engine._scheduler
        held = scheduler._running | scheduler._filling
        # Every row belongs to a live sequence, and every live sequence is held or waits.
        assert set(slab.ready_keys) | set(filling(slab)) == set(held)
        assert set(held) | {s.id for s in scheduler._waiting} == set(live)
        assert slab.free_rows == slab.rows - len(held)
        for key, sequence in held.items():
            row = slab.row(key)
            # The cache holds a prefix of what was committed, and for a running row all but the last token.
            assert sequence.tokens[: slab.lengths[row]] == slab.tokens[row]
            if key in slab.ready_keys:
                assert slab.lengths[row] == len(sequence.tokens) - 1
            assert sequence.output_length <= sequence.params.max_tokens
        keys_are_those_tokens(slab)
        self.look_at_the_drafter(set(live))
        for name, handle in self.handles.items():
            for sequence, choice in zip(handle.sequences, self.expected.get(name, ()), strict=False):
                mine = tuple(sequence.tokens[sequence.prompt_length :])
                assert mine == choice.token_ids[: len(mine)]

    def look_at_the_drafter(self, live: set[str]) -> None:
        parts = self.engine.parts
        if parts.drafter is None:
            assert self.kind == "captured, no draft" or "no room for a draft" in str(parts.inactive)
        elif isinstance(parts.drafter, ModelDrafter):
            slab = parts.drafter.runner.slab
            assert set(slab.ready_keys) == set(parts.drafter._level) <= live
            keys_are_those_tokens(slab)
        elif isinstance(parts.drafter, LookupDrafter):
            assert set(parts.drafter._indexes) <= live
        rounds = parts.captured
        if rounds is not None:
            flight = rounds._flight
            assert flight is None or [s.id for s in flight.sequences] == list(parts.runner.slab.ready_keys)
            self.seen["launched ahead"] += flight is not None

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(2000):
            if self.engine.idle:
                break
            self.engine.step()
        self.books_add_up()
        parts = self.engine.parts
        assert parts.runner.slab.free_rows == parts.runner.slab.rows
        assert not self.engine._handles
        assert parts.captured is None or not parts.captured.in_flight
        for name, handle in self.handles.items():
            assert handle.done
            self.look_at_the_answer(handle, self.expected.get(name))
        self.seen["drafters failed"] += parts.inactive is not None
        self.seen["accepted"] += self.engine.stats.accepted
        self.seen["hits"] += parts.captured.hits if isinstance(parts.captured, OverlappedRounds) else 0

    def look_at_the_answer(self, handle: Handle, expected: list[Choice] | None) -> None:
        pieces = list(handle.pieces())
        for i, choice in enumerate(handle.completion().choices):
            self.seen[choice.finish_reason] += 1
            if choice.finish_reason == "error":  # its text may lack a piece, and no other may
                assert "interrupted in the middle of a token" in str(choice.error)
                continue
            # What was streamed is what is in the answer, and the last piece says why it ended.
            mine = [p for p in pieces if p.index == choice.index]
            assert tuple(p.token_id for p in mine if p.token_id is not None) == choice.token_ids
            assert [p.finish_reason for p in mine if p.finish_reason] == [choice.finish_reason]
            if expected is None or choice.finish_reason == "abort":
                continue
            assert (choice.token_ids, choice.finish_reason) == (expected[i].token_ids, expected[i].finish_reason)
            for ours, theirs in zip(choice.logprobs or (), expected[i].logprobs or (), strict=True):
                assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-5)
                assert ours.top.keys() == theirs.top.keys()


def keys_are_those_tokens(slab: Slab) -> None:
    """In every row, warm ones too, what lies in memory is what the row says that it holds."""
    check_slab(slab)
    for row, (length, tokens) in enumerate(zip(slab.lengths, slab.tokens, strict=True)):
        if length:
            held = slab.layers[0].keys[row, 0, :length, 0].long().tolist()
            assert held == tokens, f"row {row}"


@pytest.mark.parametrize("kind", ENGINES)
def test_life(kind: str) -> None:
    seen: Counter[str] = Counter()
    run_state_machine_as_test(
        lambda: Life(kind, seen),
        settings=settings(
            max_examples=(40 if kind == "overlapped" else 20) * (MORE or 1),
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            derandomize=not MORE,  # the suite's lives are always the same ones; HEADSTART_STRESS=10 tries others
            database=None,
        ),
    )
    # What the machine is there for did happen.
    assert min(seen[reason] for reason in ("stop", "length", "abort", "interrupted")) > 0, seen
    if kind != "captured, no draft":
        assert seen["accepted"] > 20, seen
        assert seen["drafters failed"] > 0, seen
    if kind.startswith(("captured", "overlapped")):
        assert seen["launched ahead"] > 5, seen
    if kind == "overlapped":
        assert seen["hits"] > 0, seen
