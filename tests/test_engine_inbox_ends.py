"""The inbox's end: closed, killed, interrupted at any instruction, forked. Nobody who waits is left waiting."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import threading
from contextlib import suppress
from typing import Any

import pytest
import torch
from inbox_tools import EXPECTED, LONG, asked, check_empty, ids, in_loop, in_time, made, settle
from interrupts import Interrupt, Interrupted

from headstart import EngineStopped, GenerationFailed
from headstart.engine.engine import Engine
from headstart.engine.inbox import Inbox
from headstart.types import Piece


def test_closing_drains_or_aborts() -> None:
    engine = made()
    inbox = Inbox(engine)
    readers = [inbox.submit(asked(f"r{i}", i), buffer=None) for i in range(20)]
    inbox.close()
    assert [ids(reader.pieces()) for reader in readers] == EXPECTED[:20]
    check_empty(engine, inbox)
    for again in range(2):
        inbox.close()
        assert not inbox.alive, again
    with pytest.raises(EngineStopped, match="closed"):
        inbox.submit(asked("late", 0))

    inbox = Inbox(engine)
    readers = [inbox.submit(asked(f"r{i}", i, LONG), buffer=None) for i in range(20)]
    inbox.close(drain=0)
    assert {reader.completion().finish_reason for reader in readers} >= {"abort"}
    assert all(reader.done for reader in readers)
    check_empty(engine, inbox)
    assert ids(list(run_stream(engine))) == EXPECTED[0]


def test_it_does_not_seem_to_rest_while_a_request_gets_its_row() -> None:
    """A server that is told to stop ends when nothing runs: a request between the line and its row would be lost."""
    engine = made()
    acquire, seen = engine._slab.acquire, []

    def looked_at(*arguments: Any, **options: Any) -> Any:
        seen.append((engine.idle, inbox.idle))
        return acquire(*arguments, **options)

    engine._slab.acquire = looked_at  # type: ignore[method-assign]
    with Inbox(engine) as inbox:
        assert ids(list(inbox.submit(asked("r", 0)))) == EXPECTED[0]
        settle(engine, inbox)
        assert inbox.idle
    assert seen == [(True, False)]


def run_stream(engine: Engine) -> list[Piece]:
    handle = engine.submit(asked("again", 0))
    engine.drive(lambda: handle.done)
    return list(handle.pieces())


class Killed(BaseException):
    """What a thread dies of."""


@pytest.mark.parametrize("what", ["killed", "broken device"])
def test_when_the_thread_that_steps_dies_everybody_is_told(what: str) -> None:
    engine = made()
    runner, slab = engine.parts.runner, engine._slab
    forward, reset, calls = runner.forward, slab.reset, 0

    def broken(*args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls >= 6:
            raise Killed("struck") if what == "killed" else RuntimeError("the device is lost")
        return forward(*args, **kwargs)

    def lost(*args: Any) -> None:
        raise RuntimeError("the device is lost")

    async def client(inbox: Inbox, i: int) -> Any:
        try:
            return ids([piece async for piece in inbox.submit(asked(f"r{i}", i))])
        except (GenerationFailed, EngineStopped) as error:
            return error

    async def main() -> list[Any]:
        return list(await asyncio.gather(*(client(inbox, i) for i in range(12))))

    inbox = Inbox(engine)
    runner.forward = broken  # type: ignore[method-assign]
    if what == "broken device":
        slab.reset = lost  # type: ignore[method-assign]
        slab.scrub = lost  # type: ignore[method-assign]
    found = in_loop(main)
    assert isinstance(found[-1], (GenerationFailed, EngineStopped))
    for i, answer in enumerate(found):
        assert answer == EXPECTED[i] or "died of" in str(answer) or "device is lost" in str(answer), answer
    assert not inbox.alive
    assert isinstance(inbox.failure, Killed if what == "killed" else RuntimeError)
    with pytest.raises(EngineStopped, match="died of"):
        inbox.submit(asked("late", 0))
    inbox.close()
    assert not inbox._readers
    assert not engine._handles

    runner.forward = forward  # type: ignore[method-assign]
    if what == "broken device":
        slab.reset = reset  # type: ignore[method-assign]
        del slab.scrub
    with Inbox(engine) as another:
        assert ids(list(another.submit(asked("again", 0)))) == EXPECTED[0]
        check_empty(engine, another)


def test_other_threads_go_on_when_the_thread_that_steps_dies() -> None:
    engine = made()
    inbox = Inbox(engine)
    runner, me = engine.parts.runner, inbox._thread
    forward = runner.forward

    def struck(*args: Any, **kwargs: Any) -> torch.Tensor:
        if threading.current_thread() is me:
            raise Killed("struck")
        return forward(*args, **kwargs)

    runner.forward = struck  # type: ignore[method-assign]
    handle = engine.submit(asked("beside", 1))
    lost = inbox.submit(asked("lost", 0))
    me.join(60)
    engine.drive(lambda: handle.done)
    assert [t for c in handle.completion().choices for t in c.token_ids] == EXPECTED[1]
    with pytest.raises(GenerationFailed, match="died of Killed: struck"):
        lost.result()
    inbox.close()


class StruckInbox(Inbox):
    """Its thread is interrupted at a chosen instruction."""

    def __init__(self, engine: Engine, at: int | None) -> None:
        self.strike = Interrupt(at)
        super().__init__(engine)

    def _work(self) -> None:
        with self.strike:
            super()._work()


def test_wherever_the_thread_that_steps_is_struck_nobody_waits_for_ever() -> None:
    engine = made()

    def ask(at: int | None) -> tuple[StruckInbox, list[Any]]:
        inbox, found = StruckInbox(engine, at), []
        try:
            readers = []
            for i in range(4):
                news = threading.Event()
                readers.append((inbox.submit(asked(f"r{i}", i), news.set), news))
            for reader, news in readers:
                pieces: list[Piece] = []
                while not reader.ended:
                    assert news.wait(30), f"nobody told the reader, after {inbox.strike.where}"
                    news.clear()
                    pieces += reader.pieces()
                failed = any(choice.error for choice in reader.completion().choices)
                found.append("died" if failed else ids(pieces))
        except EngineStopped:
            found.append("died")
        inbox.close()
        return inbox, found

    whole, expected = ask(None)
    assert expected == EXPECTED[:4]
    draw = random.Random(0)
    strikes = [draw.randrange(1, whole.strike.count) for _ in range(12)]
    for at in [*range(1, 6), *strikes]:
        inbox, found = ask(at)
        for i, answer in enumerate(found):
            assert answer in (EXPECTED[i], "died"), inbox.strike.where
        assert not inbox._readers, inbox.strike.where
        assert not engine._handles, inbox.strike.where
        assert [ids(run_stream(engine))] == EXPECTED[:1], inbox.strike.where


def test_wherever_a_submitting_thread_is_struck_nothing_is_left() -> None:
    engine = made()
    inbox = Inbox(engine)
    within = ("inbox", "stream", "engine/engine", "engine/handle", "scheduler")
    gc.collect()
    gc.freeze()  # each collection below is then quick
    with Interrupt(within=within) as whole:
        reader = inbox.submit(asked("count", 0, LONG))
    for at in range(1, whole.count + 1):
        del reader  # not while it may be struck: Python swallows what interrupts a finalizer
        gc.collect()
        settle(engine, inbox)
        strike, reader = Interrupt(at, within=within), None
        with suppress(Interrupted), strike:
            reader = inbox.submit(asked("same", 0, LONG))
        if reader is not None:
            reader.close()
        settle(engine, inbox)
        assert not inbox._readers, strike.where
        assert engine.running("same") is None, strike.where
    assert ids(list(inbox.submit(asked("same", 0)))) == EXPECTED[0]
    in_time(inbox.close)
    check_empty(engine, inbox)
    gc.unfreeze()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")
def test_a_forked_child_is_told_that_nobody_steps() -> None:
    inbox = Inbox(made())
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            inbox.submit(asked("child", 0))
        except EngineStopped as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        assert b"forked" in pipe.read()
    os.waitpid(child, 0)
    assert ids(list(inbox.submit(asked("parent", 0)))) == EXPECTED[0]
    inbox.close()
