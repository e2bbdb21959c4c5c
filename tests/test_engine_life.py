"""The life of requests under a state machine: rows and lengths add up after every step, whatever happens."""

from __future__ import annotations

import torch
from engines import table, table_draft, table_engine
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headstart.drafters.lookup import LookupDrafter
from headstart.engine.engine import Handle
from headstart.types import Request, SamplingParams

V = 6
TARGET, DRAFT = table(V, seed=5), table(V, seed=5) + 0.7 * table(V, seed=6)


class Life(RuleBasedStateMachine):
    """Submits, steps and aborts at random over three rows, and checks the books after every step."""

    def __init__(self) -> None:
        super().__init__()
        self.handles: dict[str, Handle] = {}
        self.count = 0

    @rule(
        prompt=st.lists(st.integers(0, V - 1), min_size=1, max_size=24),
        max_tokens=st.integers(1, 12),
        temperature=st.sampled_from([0.0, 0.8]),
        verification=st.sampled_from(["token", "block", "coupled"]),
        n=st.integers(1, 2),
        speculate=st.booleans(),
        stop=st.sampled_from([(), (3,)]),
    )
    def submit(self, prompt, max_tokens, temperature, verification, n, speculate, stop) -> None:  # type: ignore[no-untyped-def]
        if self.count == 0:
            drafter = table_draft(DRAFT, rows=3) if self.use_model else LookupDrafter()
            self.engine = table_engine(TARGET, drafter, gamma=3, rows=3, prefill_chunk=8)
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            verification=verification,
            n=n,
            speculate=speculate,
            stop_token_ids=stop,
            seed=self.count,
        )
        request = Request(f"r{self.count}", tuple(prompt), params)
        self.count += 1
        self.handles[request.id] = self.engine.submit(request)

    use_model = True

    @precondition(lambda self: self.count)
    @rule()
    def step(self) -> None:
        self.engine.step()

    @precondition(lambda self: self.handles)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        chosen = data.draw(st.sampled_from(sorted(self.handles)))
        self.engine.abort(chosen)
        assert self.handles[chosen].done

    @precondition(lambda self: self.count)
    @invariant()
    def books_add_up(self) -> None:
        slab = self.engine.parts.runner.slab
        slab.check()
        live = {s.id: s for h in self.handles.values() for s in h.sequences if not s.finished}
        scheduler = self.engine._scheduler
        held = {s.id: s for s in scheduler.held()}
        # Every row belongs to a live sequence, and every live sequence is held or waits.
        assert set(slab.ready_keys) | set(slab.filling_keys) == set(held)
        assert set(held) | {s.id for s in scheduler._waiting} == set(live)
        assert slab.free_rows == slab.rows - len(held)
        for key, sequence in held.items():
            row = slab.row(key)
            # The cache holds a prefix of what was committed, and for a running row all but the last token.
            assert sequence.tokens[: slab.lengths[row]] == slab.tokens[row]
            if key in slab.ready_keys:
                assert slab.lengths[row] == len(sequence.tokens) - 1
            # The keys are really those tokens' keys.
            if slab.lengths[row]:
                keys = slab.layers[0].keys[row, 0, : slab.lengths[row], 0]
                assert torch.equal(keys.long(), torch.tensor(slab.tokens[row]))
            assert sequence.output_length <= sequence.params.max_tokens
        drafter = self.engine.parts.drafter
        assert drafter is not None, self.engine.parts.inactive
        if self.use_model:
            drafter.runner.slab.check()  # type: ignore[attr-defined]
            assert set(drafter.runner.slab.ready_keys) <= set(live)  # type: ignore[attr-defined]

    def teardown(self) -> None:
        if not self.count:
            return
        steps = 0
        while not self.engine.idle:
            self.engine.step()
            steps += 1
            assert steps < 2000
        slab = self.engine.parts.runner.slab
        assert slab.free_rows == slab.rows
        assert not self.engine._handles
        for handle in self.handles.values():
            assert handle.done
            pieces = list(handle.pieces())
            for choice in handle.completion().choices:
                assert choice.finish_reason in ("stop", "length", "abort")
                # What was streamed is what is in the answer, and the last piece says why it ended.
                mine = [p for p in pieces if p.index == choice.index]
                assert tuple(p.token_id for p in mine if p.token_id is not None) == choice.token_ids
                assert [p.finish_reason for p in mine if p.finish_reason] == [choice.finish_reason]


class LifeWithLookup(Life):
    use_model = False


TestLifeWithModel = Life.TestCase
TestLifeWithModel.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestLifeWithLookup = LifeWithLookup.TestCase
TestLifeWithLookup.settings = TestLifeWithModel.settings
