"""The library's door for asyncio programs and servers: ``AsyncLLM``.

Knows: an ``LLM``, its inbox, and which work must not be done on an event loop. Does not know: HTTP, or how anything is
computed. Needs no extra.

    async with await AsyncLLM.open("my-model", "my-draft") as llm:
        answers = await asyncio.gather(*(llm.chat(conversation) for conversation in conversations))

The engine steps in a thread of its own (``engine/inbox.py``); prompts are tokenized in others. The event loop only
hands over requests and takes what comes: one event for each round that wrote something, not for each token.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, Self, TypeVar

from .api import LLM
from .engine.inbox import BUFFER, Reader
from .engine.places import Places
from .engine.stats import EngineStats
from .errors import EngineBusy, EngineStopped
from .prompts import Messages, numbered, one_each, read_conversations, read_prompts, settings_of
from .types import Completion, Grammar, Piece, Request, SamplingParams, Structured

__all__ = ["AsyncLLM"]

T = TypeVar("T")

TOKENIZING = 4  # threads: a prompt takes milliseconds
LONG = 2**17  # characters, from which on it may take longer than anybody should wait for a thread


class AsyncLLM:
    """An ``LLM`` for event loops: nothing here blocks one. Use it from one event loop, and close it when done.

    ``AsyncLLM(llm)`` takes an LLM that is loaded; ``await AsyncLLM.open(...)`` loads one and takes what ``LLM`` takes.
    """

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self._inbox = llm.inbox()
        self._threads = ThreadPoolExecutor(TOKENIZING, thread_name_prefix="headstart-tokenize")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="headstart-tokenize-long")
        self._line = Places(llm.engine)

    @classmethod
    async def open(cls, *arguments: Any, **settings: Any) -> Self:
        """Load a model while the event loop goes on. Takes what ``LLM`` takes."""
        return cls(await asyncio.to_thread(partial(LLM, *arguments, **settings)))

    async def generate(
        self,
        prompts: Any,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        prediction: str | Sequence[str | None] | None = None,
    ) -> Any:
        """Complete one prompt (a ``Completion``), or many together (a list of them, in input order): see
        ``LLM.generate``. Waits for a place in the line. Cancelled, it stops what it asked for."""
        many, single = read_prompts(prompts)
        return await self._answers("prompt", many, single, params, prediction)

    async def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        prediction: str | Sequence[str | None] | None = None,
    ) -> Any:
        """Answer one conversation, or several together: see ``LLM.chat``. The rest as in ``generate``."""
        many, single = read_conversations(messages)
        return await self._answers("conversation", many, single, params, prediction)

    async def stream(
        self,
        prompt: Any,
        params: SamplingParams | None = None,
        *,
        id: str | None = None,
        prediction: str | None = None,
    ) -> AsyncIterator[list[Piece]]:
        """The pieces of one answer, round by round. Takes a prompt or a conversation. ``EngineBusy`` where the line is
        full. Leaving the loop early stops the request."""
        reader = await self.submit(prompt, params, id=id, prediction=prediction)
        try:
            async for pieces in reader.rounds():
                yield pieces
        finally:
            reader.close()  # at once, when its reader leaves

    async def submit(
        self,
        prompt: Any,
        params: SamplingParams | None = None,
        *,
        id: str | None = None,
        prediction: str | None = None,
        buffer: int | None = BUFFER,
        wait: bool = False,
        client: str | None = None,
    ) -> Reader:
        """Put a request in the line. The ``Reader`` is read by ``async for``, piece by piece, or by ``rounds``.

        ``EngineBusy``: the line is full; ``wait``: for a place in it. ``EngineStopped``: the thread that computes died,
        or this is closed.
        ``buffer``: how many pieces may lie unread before the request is aborted; None: all of them.
        ``client``: for whom it is, where there are several: grammars that take long to compile hold up only theirs.
        """
        request = await self.request(prompt, params, id=id, prediction=prediction, client=client)
        return await self._entered(request, buffer) if wait else self._inbox.submit(request, buffer=buffer)

    async def request(
        self,
        prompt: Any,
        params: SamplingParams | None = None,
        *,
        id: str | None = None,
        prediction: str | None = None,
        client: str | None = None,
    ) -> Request:
        """See ``LLM.request`` and ``submit``; tokenized in another thread."""
        structured = params.structured if isinstance(params, SamplingParams) else None
        grammar = await self._compiled(structured, client) if structured is not None else None
        make = partial(self.llm.request, prompt, params, id=id, prediction=prediction, grammar=grammar)
        return await self._in_thread(self._threads if _length(prompt) < LONG else self._long, make)

    def abort(self, id: str) -> bool:
        """Stop a request before the next step. False: no such request runs."""
        return self._inbox.abort(id)

    @property
    def alive(self) -> bool:
        """Are requests taken and computed? False once it is closed, or its thread died."""
        return self._inbox.alive

    @property
    def idle(self) -> bool:
        """Does nothing run, and nothing wait?"""
        return self._inbox.idle

    @property
    def failure(self) -> BaseException | None:
        """What the thread that computes died of."""
        return self._inbox.failure

    @property
    def stats(self) -> EngineStats:
        """Sums over everything the LLM has done."""
        return self.llm.stats

    async def close(self, drain: float | None = None) -> None:
        """Take nothing in any more and wait for what runs; what still runs after ``drain`` seconds is aborted."""
        await asyncio.to_thread(self._inbox.close, drain)
        for threads in (self._threads, self._long):
            threads.shutdown(wait=False)
        self._line.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        await self.close(None if kind is None else 0)

    # -- inside

    async def _in_thread(self, threads: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        """What may take long has threads of its own, so that nothing else waits for it."""
        loop = asyncio.get_running_loop()
        try:
            done = loop.run_in_executor(threads, work)
        except RuntimeError:  # its threads are gone
            raise EngineStopped("this AsyncLLM is closed") from None
        return await done

    async def _compiled(self, structured: Structured, client: str | None) -> Grammar:
        """What an answer must look like, compiled. No thread waits for it: that can take seconds."""
        order = await self._in_thread(self._threads, partial(self.llm.order_grammar, structured, client))
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def told(_: object) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(done.set)

        order.future.add_done_callback(told)
        while not order.over:
            with suppress(TimeoutError):
                await asyncio.wait_for(done.wait(), order.pause)
        return order.found()

    async def _answers(self, what: str, asked: Sequence[Any], alone: bool, params: Any, prediction: Any) -> Any:
        each = one_each("params", settings_of(params, None), SamplingParams, len(asked))
        guesses = one_each("prediction", prediction, (str, type(None)), len(asked))
        requests = []
        for index, one in enumerate(asked):  # all of them, before anything is computed
            with numbered(what, index, alone=alone):
                requests.append(await self.request(one, each[index], prediction=guesses[index]))
        readers: list[Reader] = []
        try:
            for request in requests:
                readers.append(await self._entered(request, None))
            for reader in readers:
                await reader.finish()
        finally:
            for reader in readers:
                reader.close()
        if alone:
            readers[0].raise_failure()
        found: list[Completion] = [reader.completion() for reader in readers]
        return found[0] if alone else found

    async def _entered(self, request: Request, buffer: int | None) -> Reader:
        """Submit as soon as there is a place in the line."""
        while True:
            async with self._line.place(request.params.n):
                try:
                    return self._inbox.submit(request, buffer=buffer)
                except EngineBusy:  # somebody who does not wait was quicker
                    continue


def _length(prompt: Any) -> int:
    """Characters that are to be tokenized, of a prompt or a conversation."""
    if isinstance(prompt, str):
        return len(prompt)
    if isinstance(prompt, Mapping):
        return sum(map(_length, prompt.values()))
    if isinstance(prompt, (list, tuple)) and prompt and not isinstance(prompt[0], int):
        return sum(map(_length, prompt))
    return 0
