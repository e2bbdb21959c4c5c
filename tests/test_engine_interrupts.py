"""Whatever interrupts a step, at whatever instruction: the engine is as before or clean, and no later text is wrong."""

from __future__ import annotations

import gc
import os
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engines import table, table_draft, table_engine
from interrupts import Interrupt, Interrupted
from slab_tools import check_slab
from test_engine_captured import engine as captured_engine
from test_engine_threads import opened
from test_machine_kvcache import write

from headstart import SamplingParams
from headstart.drafters.lookup import LookupDrafter
from headstart.engine.engine import Engine
from headstart.machine.cpu.build import why_not
from headstart.machine.kvcache import Slab
from headstart.types import Request

TRIALS = int(os.environ.get("HEADSTART_STRESS", "1")) * 6
SHARED = [1, 2, 3, 4, 1, 2]  # beginnings in common, so that rows are copied
PROMPTS = ([*SHARED, 5], [*SHARED, 3, 3], [2, 4], [*SHARED, 5, 1, 1])
KINDS = (
    SamplingParams(temperature=0, max_tokens=5),
    SamplingParams(temperature=0.8, seed=3, verification="coupled", max_tokens=7),
    SamplingParams(temperature=0, max_tokens=4, logprobs=1),
    SamplingParams(temperature=0, max_tokens=6, repetition_penalty=1.3),
)


def table_with(kind: str) -> Engine:
    target = table(6, seed=2)
    drafter = table_draft(target + 0.4 * table(6, seed=3), rows=2) if kind == "model" else LookupDrafter()
    return table_engine(target, drafter, rows=2, prefill_chunk=4)


ENGINES: dict[str, Callable[[], Engine]] = {
    "table, model": lambda: table_with("model"),
    "table, lookup": lambda: table_with("lookup"),
    "float32": lambda: opened("float32").engine,
    "int8": lambda: opened("int8").engine,
    "captured": lambda: captured_engine(3, 3),
    "overlapped": lambda: captured_engine(3, 3, overlap=True),
}


class Caller:
    """Asks an engine for all prompts together, and gives up what it asked for if it is interrupted."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.calls = engine, 0

    def __call__(self) -> list[tuple[int, ...]]:
        self.calls += 1
        requests = [Request(f"{self.calls}-{i}", tuple(p), KINDS[i]) for i, p in enumerate(PROMPTS)]
        try:
            handles = [self.engine.submit(request) for request in requests]
            self.engine.drive(lambda: all(h.done for h in handles))
        except BaseException:
            for request in requests:
                self.engine.discard(request.id)
            raise
        for handle in handles:
            handle.raise_failure()
        return [h.completion().token_ids for h in handles]


@pytest.mark.parametrize("kind", ENGINES)
def test_no_later_text_is_wrong_wherever_it_strikes(kind: str) -> None:
    if kind == "int8" and (reason := why_not()):
        pytest.skip(reason)
    engine = ENGINES[kind]()
    ask = Caller(engine)
    expected = ask()
    drafter = engine.parts.drafter
    with Interrupt() as whole:
        assert ask() == expected
    draw = random.Random(kind)
    for trial in range(TRIALS):
        strike = Interrupt(draw.randrange(1, whole.count))
        try:
            with strike:
                ask()
        except Interrupted:
            pass
        assert ask() == expected, f"trial {trial}: wrong text after an interruption at {strike.where}"
        check_slab(engine.parts.runner.slab)
        assert engine.idle, f"something still runs after an interruption at {strike.where}"
        assert not engine._handles, strike.where
        assert engine.parts.drafter is drafter, f"{engine.inactive_reason}, after {strike.where}"


@pytest.mark.parametrize("where", ["kvcache", "scheduler"])
def test_rows_that_were_moving(where: str) -> None:
    """The same, aimed at what moves rows: every tenth instruction there."""
    ask = Caller(table_with("model"))
    expected = ask()
    with Interrupt(within=(where,)) as whole:
        ask()
    for at in range(1, whole.count, max(10, whole.count // (2 * TRIALS))):
        with pytest.raises(Interrupted), Interrupt(at, within=(where,)) as strike:
            ask()
        assert ask() == expected, strike.where


@pytest.mark.parametrize("operation", ["swap", "copy"])
def test_a_row_never_claims_more_than_its_memory_holds(operation: str) -> None:
    """In the middle of a move the keys are mixed; then neither row may say that it holds any."""
    slab = Slab(3, 12)
    for key, tokens in (("a", [1, 2, 3, 4]), ("b", [5, 6, 7])):
        slab.acquire(key, tokens)
        row = slab.row(key)
        write(slab, slice(row, row + 1), [tokens], [0])
        slab.extend(row, tokens)
        slab.promote(key)
    work: dict[str, Callable[[], Any]] = {
        "swap": lambda: slab.swap(0, 1),
        "copy": lambda: slab.acquire("c", [1, 2, 3, 9]),
    }
    with Interrupt(within=("kvcache",)) as whole:
        work[operation]()
    for at in range(1, whole.count):
        slab.reset()
        for key, tokens in (("a", [1, 2, 3, 4]), ("b", [5, 6, 7])):
            slab.acquire(key, tokens)
            row = slab.row(key)
            write(slab, slice(row, row + 1), [tokens], [0])
            slab.extend(row, tokens)
            slab.promote(key)
        try:
            with Interrupt(at, within=("kvcache",)):
                work[operation]()
        except Interrupted:
            pass
        for row in range(3):
            held = slab.layers[0].keys[row, 0, : slab.lengths[row], 0].long()
            assert held.tolist() == slab.tokens[row][: slab.lengths[row]], f"row {row}, instruction {at}"


@pytest.mark.parametrize("kind", ["float32", "int8"])
def test_other_threads_go_on(kind: str) -> None:
    """The thread that is struck happens to step for the others as well."""
    if kind == "int8" and (reason := why_not()):
        pytest.skip(reason)
    llm = opened(kind)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    expected = llm.generate([4, 5, 6], params).token_ids
    draw = random.Random(1)
    for _ in range(6):
        found: list[Any] = []
        go = threading.Event()

        def other(found: list[Any] = found, go: threading.Event = go) -> None:
            stream = llm.stream([4, 5, 6], params)
            go.set()
            try:
                found.append(tuple(p.token_id for p in stream if p.token_id is not None))
            except Exception as error:
                found.append(error)

        thread = threading.Thread(target=other)
        thread.start()
        assert go.wait(60)
        try:
            with Interrupt(draw.randrange(1, 20000)):
                llm.generate([9, 8, 7, 6], params)
        except Interrupted:
            pass
        thread.join(60)
        assert not thread.is_alive()
        assert found[0] == expected or "interrupted" in str(found[0]), found[0]
    assert llm.generate([4, 5, 6], params).token_ids == expected
    assert llm.engine.idle


def test_ctrl_c_in_generate_leaves_nothing_behind() -> None:
    """Through the front door, with a real KeyboardInterrupt from inside the model's forward."""
    llm = opened("float32")
    params = SamplingParams(temperature=0, max_tokens=12)
    expected = [c.token_ids for c in llm.generate([[3, 4], [3, 4, 5], [7]], params)]
    runner: Any = llm.engine.parts.runner
    forward, calls = runner.forward, 0

    def struck(*args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        return forward(*args, **kwargs)

    runner.forward = struck
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[3, 4], [3, 4, 5], [7]], params)
    runner.forward = forward
    assert llm.engine.idle or not llm.engine._handles
    assert [c.token_ids for c in llm.generate([[3, 4], [3, 4, 5], [7]], params)] == expected
    gc.collect()
    assert llm.engine.idle


def test_an_error_outside_a_round_fails_those_with_rows_and_nobody_else() -> None:
    """Memory for a row cannot be had, say."""
    engine = table_with("lookup")
    ask = Caller(engine)
    expected = ask()
    acquire = engine._slab.acquire

    def broken(*args: Any) -> int:
        engine._slab.acquire = acquire  # type: ignore[method-assign]
        raise MemoryError("no room for a row")

    engine._slab.acquire = broken  # type: ignore[method-assign]
    handles = [engine.submit(Request(f"x{i}", tuple(p), KINDS[i])) for i, p in enumerate(PROMPTS)]
    engine.drive(lambda: all(h.done for h in handles))
    reasons = [h.completion().finish_reason for h in handles]
    assert reasons[0] == "error"
    assert "no room for a row" in (handles[0].completion().error or "")
    assert [h.completion().token_ids for h in handles[1:]] == expected[1:]
    assert ask() == expected
