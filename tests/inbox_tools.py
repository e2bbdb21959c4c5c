"""What the inbox's tests share: an engine over tables, requests, and what each of them says when it is alone."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from engines import run, table, table_draft, table_engine
from slab_tools import check_slab

from headstart import SamplingParams
from headstart.engine.engine import Engine
from headstart.engine.inbox import Inbox
from headstart.types import Piece, Request

TARGET = table(6, seed=2)
PARAMS = (
    SamplingParams(temperature=0, max_tokens=9),
    SamplingParams(temperature=0.8, seed=3, max_tokens=12),
    SamplingParams(temperature=0, max_tokens=7, n=2),
    SamplingParams(temperature=1.1, seed=4, max_tokens=14, logprobs=1),
)
LONG = SamplingParams(temperature=0, max_tokens=50)


def made(**settings: Any) -> Engine:
    return table_engine(TARGET, table_draft(TARGET + 0.4 * table(6, seed=3), rows=3), rows=3, **settings)


def asked(name: str, i: int, params: SamplingParams | None = None) -> Request:
    return Request(name, (1, 2, 3 + i % 3, i % 5), params or PARAMS[i % len(PARAMS)])


def alone(i: int, params: SamplingParams | None = None) -> list[int]:
    """What request i says when nobody else is there: the ids of its choices, one after another."""
    [answer] = run(made(), [asked("alone", i, params)])
    return [token for choice in answer.choices for token in choice.token_ids]


EXPECTED = [alone(i) for i in range(60)]


def ids(pieces: list[Piece]) -> list[int]:
    return [p.token_id for p in sorted(pieces, key=lambda p: p.index) if p.token_id is not None]


def check_empty(engine: Engine, inbox: Inbox) -> None:
    assert not inbox._readers
    assert not engine._handles
    assert not engine._discarded
    assert engine.idle
    check_slab(engine.parts.runner.slab)
    assert engine.parts.runner.slab.free_rows == 3


def settle(engine: Engine, inbox: Inbox) -> None:
    """Give the thread that steps the time to take back what was left."""
    end = time.monotonic() + 30
    while (inbox._readers or not engine.idle or engine._discarded) and time.monotonic() < end:
        inbox._work_came.set()
        time.sleep(0.001)


class Held:
    """The target's forward waits here until it is let go."""

    def __init__(self, engine: Engine) -> None:
        self.inside, self.go = threading.Event(), threading.Event()
        runner: Any = engine.parts.runner
        forward = runner.forward

        def held(*args: Any, **kwargs: Any) -> torch.Tensor:
            self.inside.set()
            assert self.go.wait(60)
            result: torch.Tensor = forward(*args, **kwargs)
            return result

        runner.forward = held


def in_time(work: Callable[[], Any]) -> Any:
    """``work`` in another thread; fails instead of hanging."""
    pool = ThreadPoolExecutor(1)
    try:
        return pool.submit(work).result(timeout=60)
    finally:
        pool.shutdown(wait=False)


def in_loop(main: Callable[[], Any]) -> Any:
    async def bounded() -> Any:
        return await asyncio.wait_for(main(), 90)

    return asyncio.run(bounded())
