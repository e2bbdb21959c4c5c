"""The inbox: an event loop and many threads submit, read, abort and leave, while one thread steps."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from weakref import WeakSet

import pytest
from inbox_tools import EXPECTED, LONG, PARAMS, Held, alone, asked, check_empty, ids, in_loop, in_time, made, settle

from headstart import EngineBusy, InvalidParameter
from headstart.engine.engine import Engine
from headstart.engine.handle import Handle
from headstart.engine.inbox import Inbox, together


@pytest.fixture
def engine() -> Engine:
    return made()


@pytest.fixture
def inbox(engine: Engine) -> Iterator[Inbox]:
    with Inbox(engine) as opened:
        yield opened
        settle(engine, opened)
        if opened.failure is None:
            check_empty(engine, opened)


# -- an event loop


def test_an_event_loop_streams_many_answers_at_once(engine: Engine, inbox: Inbox) -> None:
    async def client(i: int) -> list[int]:
        reader = inbox.submit(asked(f"r{i}", i))
        return ids([piece async for piece in reader])

    async def main() -> list[list[int]]:
        return await asyncio.gather(*(client(i) for i in range(40)))

    assert in_loop(main) == EXPECTED[:40]


def test_several_answers_are_read_together_and_left_together(engine: Engine, inbox: Inbox) -> None:
    async def main() -> list[list[int]]:
        found: dict[int, list[Any]] = {0: [], 1: [], 2: []}
        async for number, pieces in together([inbox.submit(asked(f"r{i}", i)) for i in range(3)]):
            found[number] += pieces
        left = together([inbox.submit(asked(f"left{i}", i, LONG)) for i in range(3)])
        assert (await anext(left))[1]
        await asyncio.sleep(0.02)  # the others have news meanwhile
        await asyncio.wait_for(left.aclose(), 10)
        return [ids(pieces) for pieces in found.values()]

    assert in_loop(main) == EXPECTED[:3]


def test_who_waits_for_the_end_is_told_once_and_may_leave_all_of_it_unread(engine: Engine, inbox: Inbox) -> None:
    told: list[str] = []

    async def main() -> list[list[int]]:
        readers = [inbox.submit(asked(f"r{i}", i), buffer=6) for i in range(3)]
        loop = asyncio.get_running_loop()
        tell = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda *a, **k: told.append("once") or tell(*a, **k)  # type: ignore[assignment, method-assign, func-returns-value]
        await asyncio.gather(*(reader.finish() for reader in readers))
        left = asyncio.create_task(inbox.submit(asked("left", 1, LONG)).finish())
        await asyncio.sleep(0.01)
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        return [[t for c in reader.completion().choices for t in c.token_ids] for reader in readers]

    assert in_loop(main) == EXPECTED[:3]
    assert len(told) <= 4


def test_clients_that_leave_or_are_cancelled_stop_their_requests_and_nobody_elses(engine: Engine, inbox: Inbox) -> None:
    async def leaves(i: int) -> None:
        async for _ in inbox.submit(asked(f"leaves{i}", i, LONG)):
            break

    async def stays(i: int) -> list[int]:
        return ids([piece async for piece in inbox.submit(asked(f"stays{i}", i))])

    async def main() -> list[list[int]]:
        cancelled = [asyncio.create_task(stays(i)) for i in range(12, 24)]
        leaving = [asyncio.create_task(leaves(i)) for i in range(12)]
        staying = [asyncio.create_task(stays(i)) for i in range(12)]
        await asyncio.sleep(0)
        for task in cancelled:
            task.cancel()
        await asyncio.gather(*leaving)
        await asyncio.gather(*cancelled, return_exceptions=True)
        return await asyncio.gather(*staying)

    assert in_loop(main) == EXPECTED[:12]
    settle(engine, inbox)
    assert engine.stats.aborted >= 12


def test_a_full_line_is_said_at_once_and_clears() -> None:
    engine = made(max_waiting=2)

    async def client(inbox: Inbox, i: int) -> tuple[list[int], int]:
        refused = 0
        while True:
            try:
                reader = inbox.submit(asked(f"r{i}", i, PARAMS[1]))
            except EngineBusy:
                refused += 1
                await asyncio.sleep(0.001)
            else:
                return ids([piece async for piece in reader]), refused

    async def main() -> list[tuple[list[int], int]]:
        with Inbox(engine) as inbox:
            found = await asyncio.gather(*(client(inbox, i) for i in range(12)))
            check_empty(engine, inbox)
        return list(found)

    answers = in_loop(main)
    assert [tokens for tokens, _ in answers] == [alone(i, PARAMS[1]) for i in range(12)]
    assert any(refused for _, refused in answers)


def test_closing_a_reader_from_another_task_wakes_the_one_that_reads(inbox: Inbox) -> None:
    async def main() -> str | None:
        reader = inbox.submit(asked("a", 0, LONG))
        pieces = []

        async def read() -> None:
            pieces.extend([piece async for piece in reader])

        task = asyncio.create_task(read())
        await asyncio.sleep(0)
        reader.close()
        await task
        return pieces[-1].finish_reason

    assert in_loop(main) in ("abort", "length")


def test_a_loop_that_is_closed_costs_its_own_requests_only(inbox: Inbox, engine: Engine) -> None:
    held = Held(engine)
    lost: list[Any] = []

    async def opens() -> None:
        reader = inbox.submit(asked("lost", 0, LONG))
        reading = reader.__aiter__()
        lost.extend((reader, reading))
        task = asyncio.ensure_future(anext(reading))
        await asyncio.sleep(0)
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        lost.append(task)

    loop = asyncio.new_event_loop()
    loop.run_until_complete(opens())
    loop.close()
    other = inbox.submit(asked("other", 1))
    held.go.set()
    assert ids(list(other)) == EXPECTED[1]
    settle(engine, inbox)
    assert lost[0].done
    assert "cannot be told of news" in lost[0].completion().error


# -- nothing waits for a step


def test_nothing_that_an_event_loop_calls_waits_for_a_step(engine: Engine, inbox: Inbox) -> None:
    held = Held(engine)
    first = inbox.submit(asked("first", 0))
    assert held.inside.wait(60)

    def work() -> list[Any]:
        second = inbox.submit(asked("second", 1))
        found = [second.pieces(), second.done, inbox.abort("second"), inbox.abort("nobody")]
        inbox.submit(asked("third", 2)).close()
        with pytest.raises(InvalidParameter, match="'first' is already running"):
            inbox.submit(asked("first", 3))
        return found

    try:
        assert in_time(work) == [[], False, True, False]
    finally:
        held.go.set()
    assert ids(list(first)) == EXPECTED[0]  # neither the refused one nor its neighbours did it any harm


def test_submitting_waits_for_no_step_though_the_line_is_full_of_dropped_requests() -> None:
    engine = made(max_waiting=2)
    held = Held(engine)
    first = engine.submit(asked("first", 0))
    stepping = threading.Thread(target=lambda: engine.drive(lambda: first.done))
    stepping.start()
    assert held.inside.wait(60)

    def work() -> Handle:
        for i in range(9):
            engine.submit(asked(f"dropped{i}", 0))
            engine.discard(f"dropped{i}")
        return engine.submit(asked("last", 1))

    try:
        last = in_time(work)
    finally:
        held.go.set()
    stepping.join(60)
    engine.drive(lambda: last.done)
    assert [t for c in last.completion().choices for t in c.token_ids] == EXPECTED[1]
    assert not engine._handles


# -- readers


def test_a_slow_reader_is_not_waited_for(engine: Engine, inbox: Inbox) -> None:
    slow = inbox.submit(asked("slow", 0, LONG), buffer=5)
    patient = inbox.submit(asked("patient", 0, LONG), buffer=None)
    quick = inbox.submit(asked("quick", 1))
    assert ids(list(quick)) == EXPECTED[1]
    while not (slow.done and patient.done):
        time.sleep(0.001)
    read = slow.pieces()
    assert 5 < len(read) < 50
    assert read[-1].finish_reason == "abort"
    assert slow.completion().error == "its reader left more than 5 pieces unread"
    assert ids(patient.pieces()) == alone(0, LONG)
    assert patient.ended


def test_a_reader_is_notified_once_until_it_reads(engine: Engine, inbox: Inbox) -> None:
    calls: list[int] = []
    reader = inbox.submit(asked("a", 1), lambda: calls.append(1))
    while not reader.done:
        time.sleep(0.001)
    settle(engine, inbox)
    assert len(calls) == 1
    assert ids(reader.pieces()) == EXPECTED[1]
    assert reader.ended


def test_a_thread_reads_as_it_is_notified(inbox: Inbox) -> None:
    for i in range(10):
        news = threading.Event()
        reader, found = inbox.submit(asked(f"r{i}", i), news.set), []
        while not reader.ended:
            assert news.wait(60)
            news.clear()
            found += reader.pieces()
        assert ids(found) == EXPECTED[i]


def test_a_notification_that_raises_costs_its_own_request_only(inbox: Inbox, caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> None:
        raise RuntimeError("the socket is gone")

    bad, good = inbox.submit(asked("bad", 0, LONG), broken), inbox.submit(asked("good", 1))
    assert ids(list(good)) == EXPECTED[1]
    assert bad.result().finish_reason == "abort"
    assert "the socket is gone" in str(bad.completion().error)
    assert "the socket is gone" in caplog.text


def test_the_thousandth_time_nothing_is_left(engine: Engine, inbox: Inbox) -> None:
    seen: WeakSet[Any] = WeakSet()
    for i in range(1000):
        reader = inbox.submit(asked("again" if i % 4 == 0 else f"r{i}", i % 60), buffer=None)
        seen.update((reader, reader._handle))
        if i % 4 == 0:
            assert ids(list(reader)) == EXPECTED[i % 60]
        elif i % 4 == 1:
            reader.close()
        elif i % 4 == 2:
            inbox.abort(reader.id)
        del reader  # and one of four is just dropped
        while engine.full():
            time.sleep(0.001)
    settle(engine, inbox)
    check_empty(engine, inbox)
    gc.collect()
    assert not seen


def test_requests_that_come_in_the_middle_of_a_look(engine: Engine, inbox: Inbox) -> None:
    """Garbage that is collected while the ends are looked for lets another thread in."""
    held = Held(engine)  # nothing ends meanwhile
    readers = [inbox.submit(asked(f"early {i}", i), buffer=None) for i in range(4)]
    here, before = threading.get_ident(), gc.get_threshold()

    def come(phase: str, _: object) -> None:
        if phase == "start" and threading.get_ident() == here and len(readers) < 10:
            readers.append(inbox.submit(asked(f"late {len(readers)}", len(readers)), buffer=None))

    gc.callbacks.append(come)
    gc.set_threshold(1)
    try:
        for _ in range(10):
            inbox._look()
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(come)
        held.go.set()
    assert len(readers) > 4
    for i, reader in enumerate(readers):
        assert ids(list(reader)) == EXPECTED[i]


def test_many_threads_come_and_go(engine: Engine, inbox: Inbox) -> None:
    def work(thread: int) -> None:
        draw = random.Random(thread)
        for turn in range(12):
            i = draw.randrange(len(EXPECTED))
            reader = inbox.submit(asked(f"{thread}-{turn}", i))
            how = draw.randrange(5)
            if how == 0:
                next(iter(reader), None)
                reader.close()
            elif how == 1:
                inbox.abort(reader.id)
                assert reader.result().finish_reason in ("abort", "stop", "length")
            elif how == 2:
                del reader
            elif how == 3:
                assert [t for c in reader.result().choices for t in c.token_ids] == EXPECTED[i]
            else:
                assert ids(list(reader)) == EXPECTED[i]
            handle = engine.submit(asked(f"beside {thread}-{turn}", i))  # and who needs no inbox
            engine.drive(lambda handle=handle: handle.done)
            assert [t for c in handle.completion().choices for t in c.token_ids] == EXPECTED[i]

    with ThreadPoolExecutor(5) as pool:
        for future in [pool.submit(work, thread) for thread in range(5)]:
            future.result(timeout=120)
