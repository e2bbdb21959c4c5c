"""Requests from any thread, an event loop's too: a thread of its own steps, readers are told when there is news.

Knows: who reads which answer, and what becomes of it when the reader is slow or gone, or when nobody steps any more.
Does not know: HTTP, or how a step is made. Needs nothing but the standard library.

    inbox = llm.inbox()
    reader = inbox.submit(llm.request("Once upon a time"))   # returns at once; ``EngineBusy``: come back later
    async for piece in reader:                               # leaving the loop early aborts the request
        ...

Nothing here waits for a step, but ``Inbox.close``, which waits for what still runs. ``submit`` waits for the locks over
the waiting line, which are held for microseconds; ``abort`` and ``Reader.close`` wait for nothing at all.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from functools import partial
from threading import Event, Lock, Thread
from typing import Self

from ..errors import EngineStopped, HeadstartError
from ..types import Piece, Request, Round
from .copies import undisturbed
from .engine import Engine
from .handle import Handle
from .stream import Stream

__all__ = ["Inbox", "Reader", "together"]

log = logging.getLogger(__name__)

BUFFER = 1024  # pieces


class Reader(Stream):
    """One answer on its way out: ``async for`` in an event loop, ``for`` in a thread, or ``pieces`` when notified."""

    def __init__(self, inbox: Inbox, request: Request, notify: Callable[[], object] | None, buffer: int | None) -> None:
        self._inbox, self._notify, self._buffer = inbox, notify, buffer
        self._told = False  # there was news, and nobody has read it yet
        self._at_end = False  # its end is the only news
        super().__init__(inbox._engine, request)

    def _enter(self) -> None:
        self._inbox._admit(self, self._handle)

    def pieces(self) -> list[Piece]:
        """What came since the last call; never waits. From here on ``notify`` is called again when there is news."""
        self._told = False  # first, so that nothing can come unnoticed
        return list(self._handle.pieces())

    @property
    def ended(self) -> bool:
        """Has everything been read?"""
        return self.done and not self._handle.unread

    def close(self) -> None:
        """Stop it before the next step. Waits for nothing."""
        self._closed = True
        self._engine.discard(self._handle)

    async def __aiter__(self) -> AsyncIterator[Piece]:
        try:
            async for pieces in self.rounds():
                for piece in pieces:
                    yield piece
        finally:
            self.close()  # at once, when its reader leaves

    async def rounds(self, *, failing: bool = True) -> AsyncIterator[list[Piece]]:
        """What came with each round, or with several if the event loop was busy. ``failing``: raise at the end of a
        request that failed."""
        news = asyncio.Event()
        self.listen(news.set)
        try:
            while True:
                if pieces := self.pieces():
                    yield pieces
                elif self.ended:
                    break
                else:
                    await news.wait()
                    news.clear()
        finally:
            self.close()
        if failing:
            self._handle.raise_failure()

    def raise_failure(self) -> None:
        """Raise if any choice failed."""
        self._handle.raise_failure()

    def listen(self, call: Callable[[], object]) -> None:
        """Have this called in the event loop that runs here when there is news; ``pieces`` has it. Once for each time
        that they were read, so look first for what is there already."""
        self._notify = partial(self._inbox.bell().ring, call)

    async def finish(self) -> None:
        """Wait for the end of it all, without being told of each round, and without raising if it failed."""
        over = asyncio.Event()
        self._buffer, self._at_end, self._told = None, True, False
        self.listen(over.set)
        try:
            if not self.done:
                await over.wait()
        finally:
            self.close()

    def _tell(self) -> None:
        """There is news: say so once, until it is read. One who does not read is not waited for."""
        if self._at_end and not self.done:
            return
        if self._buffer is not None and self._handle.unread > self._buffer:
            self._give_up(f"its reader left more than {self._buffer} pieces unread")
        if self._notify is not None and not self._told:
            self._told = True
            try:
                self._notify()
            except Exception as error:  # its event loop is closed, say
                self._notify = None
                self._give_up(f"its reader cannot be told of news: {error}")

    def _give_up(self, why: str) -> None:
        if self._handle.why is None and self._engine.discard(self._handle):
            self._handle.why = why
            log.warning("request %r is aborted: %s", self.id, why)


async def together(readers: Sequence[Reader]) -> AsyncGenerator[tuple[int, list[Piece]], None]:
    """The rounds of several answers as they come, each with its reader's number. None is waited for by another, and
    failures are not raised. Left early, it stops all of them."""
    news = asyncio.Queue[int]()
    left = set(range(len(readers)))
    for number, reader in enumerate(readers):
        reader.listen(partial(news.put_nowait, number))
        news.put_nowait(number)  # for what came before
    try:
        while left:
            number = await news.get()
            if pieces := readers[number].pieces():
                yield number, pieces
            if readers[number].ended:
                left.discard(number)
    finally:
        for reader in readers:
            reader.close()


class Bell:
    """Wakes an event loop once for all that a round brought, however many read there."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)  # an inbox outlives many
        self._due = deque[Callable[[], object]]()
        self._rung = False

    def ring(self, call: Callable[[], object]) -> None:
        """Have it called there, soon. From any thread; an error means that the loop is closed."""
        self._due.append(call)
        if self._rung:
            return  # it has not looked yet, and will find this, too
        loop, self._rung = self._loop(), True
        try:
            if loop is None:
                raise RuntimeError("the event loop is gone")
            loop.call_soon_threadsafe(self._answer)
        except BaseException:
            self._rung = False
            raise

    def _answer(self) -> None:
        self._rung = False  # first, so that nothing can come unnoticed
        while self._due:
            self._due.popleft()()


class Inbox:
    """Takes requests from any thread, and steps in one of its own until it is closed."""

    def __init__(self, engine: Engine) -> None:
        self.failure: BaseException | None = None  # what the thread that steps died of
        self._engine = engine
        self._readers: dict[Handle, weakref.ref[Reader]] = {}  # of what has not ended yet
        self._bells = weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Bell]()
        self._closing = False
        self._door = Lock()  # over ``_closing`` and ``_readers`` together
        self._work_came = Event()
        self._listening = engine.listen(self._news, ended=self._look)
        self._thread = Thread(target=self._work, name="headstart-inbox", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Are requests taken and computed?"""
        return self._thread.is_alive() and not self._closing

    @property
    def idle(self) -> bool:
        """Has all that came in ended? The engine alone may seem to rest while a request goes from its line to a row."""
        return not self._readers and self._engine.idle

    def submit(
        self, request: Request, notify: Callable[[], object] | None = None, *, buffer: int | None = BUFFER
    ) -> Reader:
        """Take a request in; waits for no step. ``EngineBusy``: the line is full. ``EngineStopped``: see ``alive``.

        ``notify`` is called by the thread that steps, in the middle of a step, when there is news and the reader has
        read what came before: it must return at once (``loop.call_soon_threadsafe``, ``Event.set``). ``async for``
        needs none. ``buffer``: how many pieces may lie unread before the request is aborted; None: all of them.
        """
        return Reader(self, request, notify, buffer)

    def bell(self) -> Bell:
        """That of the event loop which runs in this thread."""
        loop = asyncio.get_running_loop()
        with self._door:
            return self._bells.setdefault(loop, Bell(loop))

    def abort(self, request_id: str) -> bool:
        """Stop a request before the next step. Waits for nothing. False: no such request runs."""
        return self._engine.discard(request_id)

    def close(self, drain: float | None = None) -> None:
        """Take nothing in any more, let what runs come to its end, and stop stepping.

        ``drain``: seconds after which what still runs is aborted; 0 aborts at once, None waits for all of it.
        """
        if self._engine.stepping:
            raise HeadstartError(
                "an inbox cannot be closed from inside a step (a listener or notify): close its readers"
            )
        with self._door:
            self._closing = True
        self._work_came.set()
        self._thread.join(drain)
        for handle in undisturbed(lambda: list(self._readers)):
            self._engine.discard(handle)
        self._thread.join()
        self._listening.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(None if kind is None else 0)

    def _admit(self, reader: Reader, handle: Handle) -> None:
        try:
            with self._door:
                self._check()
                self._readers[handle] = weakref.ref(reader)
            self._engine.enter(handle)
            if self.failure is not None:  # it came behind the last look: nobody would ever step for it
                self._check()
        except BaseException:
            self._readers.pop(handle, None)
            raise
        finally:
            self._work_came.set()

    def _check(self) -> None:
        if self.failure is not None:
            raise EngineStopped(f"the thread that steps died of {type(self.failure).__name__}: {self.failure}")
        if not self.alive:
            raise EngineStopped("this inbox is closed, or belongs to the process that this one was forked from")

    # -- what the thread that steps does, this one or another

    def _news(self, rounds: list[Round]) -> None:
        for round_ in rounds:
            handle = self._engine.running(round_.sequence.rpartition("/")[0])
            reader = self._readers.get(handle) if handle is not None else None
            if reader is not None and (found := reader()) is not None:
                found._tell()

    def _look(self, _: object = None) -> None:
        """Tell the readers of all that has ended. All, because an interruption may have left one of them out."""
        for handle, reader in undisturbed(lambda: list(self._readers.items())):
            if handle.done:
                self._readers.pop(handle, None)
                if (found := reader()) is not None:
                    found._tell()

    def _work(self) -> None:
        try:
            while not self._over():
                self._engine.drive(lambda: self._engine.idle or self._over())
                self._look()
                if not self._over():
                    self._work_came.wait()
                    self._work_came.clear()
        except BaseException as error:
            log.exception("the thread that steps died; its requests end with an error")
            with self._door:
                self.failure, self._closing = error, True
            why = f"the thread that steps died of {type(error).__name__}: {error}"
            self._engine.abandon(undisturbed(lambda: list(self._readers)), why)

    def _over(self) -> bool:
        return self._closing and not self._readers  # in this order: nobody comes after ``_closing``
