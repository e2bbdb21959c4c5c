"""The routes: OpenAI's chat and text completions over an ``AsyncLLM``, and what people need to run a server.

Knows: which route does what, and what becomes of an answer whose client left. Does not know: how anything is computed,
or the shapes of what is sent (``schemas``, ``answers``).
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
import uuid
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from fastapi.sse import EventSourceResponse, format_sse_event
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware

from .. import __version__
from ..async_api import AsyncLLM
from ..engine.inbox import Reader
from ..errors import InvalidParameter
from ..types import Completion, Piece, SamplingParams
from . import errors
from .answers import Chats, Texts, Writer
from .errors import Refused
from .guard import Guard
from .metrics import Metrics
from .schemas import ChatRequest, CompletionRequest, Detokenize, Tokenize

__all__ = ["Settings", "create_app", "run"]

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class Settings:
    """How a server is run."""

    model: str = "headstart"  # the name that clients ask for
    api_key: str | None = None
    allowed_hosts: Sequence[str] = ("127.0.0.1", "localhost", "[::1]")
    allowed_origins: Sequence[str] = ()  # of web pages; none: only pages of this server's own
    max_body: int = 16 * 2**20  # bytes
    statistics: bool = False  # in every answer
    drain: float = 30.0  # seconds that requests have to end when the server stops


def create_app(llm: AsyncLLM, settings: Settings | None = None) -> FastAPI:
    """The server as an ASGI app. It closes ``llm`` when it stops."""
    settings = settings or Settings()
    service = _Service(llm, settings)

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        try:
            yield
        finally:
            service.stopping = True
            await llm.close(settings.drain)

    app = FastAPI(title="Headstart", version=__version__, lifespan=life, docs_url=None, redoc_url=None)
    errors.install(app)
    app.post("/v1/chat/completions", response_model=None)(service.chat)
    app.post("/v1/completions", response_model=None)(service.complete)
    app.get("/v1/models")(service.models)
    app.get("/v1/models/{model}")(service.model)
    app.post("/tokenize")(service.tokenize)
    app.post("/detokenize")(service.detokenize)
    app.get("/health", response_model=None)(service.health)
    app.get("/ready", response_model=None)(service.ready)
    app.get("/version")(service.version)
    app.get("/metrics", response_model=None)(service.metrics_text)
    app.add_middleware(Guard, key=settings.api_key, max_body=settings.max_body)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.allowed_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type"],
        )
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(settings.allowed_hosts))
    return app


def run(app: FastAPI, listener: socket.socket, *, drain: float) -> None:
    """Serve on a socket until Ctrl-C or SIGTERM, and then until what runs has ended."""
    signal.signal(signal.SIGTERM, lambda *_: None)  # uvicorn sends it again when it has ended: that is no failure
    config = uvicorn.Config(
        app,
        log_level="warning",
        timeout_graceful_shutdown=int(drain) + 5,
        h11_max_incomplete_event_size=64 * 1024,  # of headers
    )
    uvicorn.Server(config).run(sockets=[listener])


class _Service:
    """What the routes do."""

    def __init__(self, llm: AsyncLLM, settings: Settings) -> None:
        self._llm, self._settings = llm, settings
        self._metrics = Metrics(llm.llm, settings.model)
        self.stopping = False
        self._spell = lru_cache(maxsize=65536)(llm.llm.codec.spell)

    # -- completions

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        self._check_model(body.model)
        params, words = body.params(), body.conversation()
        writer = self._writer(Chats, "chatcmpl", body, logprobs=bool(body.logprobs))
        guess = body.prediction.text if body.prediction is not None else None
        return await self._answered(request, writer, [words], params, guess, body)

    async def complete(self, body: CompletionRequest, request: Request) -> Response:
        self._check_model(body.model)
        params, prompts = body.params(), body.prompts()
        writer = self._writer(Texts, "cmpl", body, logprobs=body.logprobs is not None)
        guess = body.prediction.text if body.prediction is not None else None
        return await self._answered(request, writer, prompts, params, guess, body)

    def _writer(
        self, kind: type[Writer], prefix: str, body: ChatRequest | CompletionRequest, *, logprobs: bool
    ) -> Writer:
        return kind(
            f"{prefix}-{uuid.uuid4().hex}",
            self._settings.model,
            self._spell,
            logprobs=logprobs,
            statistics=self._settings.statistics if body.statistics is None else body.statistics,
            origins=bool(body.origins),
        )

    async def _answered(
        self,
        request: Request,
        writer: Writer,
        prompts: Sequence[Any],
        params: SamplingParams,
        prediction: str | None,
        body: ChatRequest | CompletionRequest,
    ) -> Response:
        readers = await self._submitted(writer.id, prompts, params, prediction)
        if body.stream:
            events = self._events(writer, readers, params.n, usage=body.wants_usage)
            return EventSourceResponse(events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        try:
            answers = await _unless_gone(request, _read_all(readers))
        finally:
            for reader in readers:
                reader.close()
        if answers is None:
            return Response(status_code=499)  # nobody reads it
        for answer in answers:
            _check_ended(answer)
        return JSONResponse(writer.whole(answers))

    async def _submitted(
        self, name: str, prompts: Sequence[Any], params: SamplingParams, prediction: str | None
    ) -> list[Reader]:
        if self.stopping:
            raise Refused(503, "the server is shutting down", code="shutting_down")
        readers: list[Reader] = []
        try:
            for i, prompt in enumerate(prompts):
                readers.append(await self._llm.submit(prompt, params, id=f"{name}-{i}", prediction=prediction))
        except BaseException:
            for reader in readers:
                reader.close()
            raise
        return readers

    async def _events(
        self, writer: Writer, readers: Sequence[Reader], each: int, *, usage: bool
    ) -> AsyncIterator[bytes]:
        """A stream's events. A client that leaves ends this, and that stops its requests."""
        try:
            for chunk in writer.first(each * len(readers)):
                yield _event(chunk)
            async for number, pieces in _together(readers):
                for chunk in writer.chunks(number * each, pieces):
                    yield _event(chunk)
            answers = [reader.completion() for reader in readers]
            for answer in answers:
                _check_ended(answer)
            if usage or writer.statistics:
                last = writer.last(answers)
                yield _event(last)
            yield format_sse_event(data_str="[DONE]")
        except Exception as error:
            said = errors.described(error)
            if said.status >= 500:
                log.exception("a stream failed")
            yield _event(errors.body(said.status, said.message, said.field, said.code))
        finally:
            for reader in readers:
                reader.close()

    # -- models and tokens

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self._settings.model:
            raise Refused(
                404,
                f"there is no model {name!r:.100} here; this server has {self._settings.model!r}",
                "model",
                "model_not_found",
            )

    async def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [self._card()]}

    async def model(self, model: str) -> dict[str, Any]:
        self._check_model(model)
        return self._card()

    def _card(self) -> dict[str, Any]:
        return {
            "id": self._settings.model,
            "object": "model",
            "created": 0,
            "owned_by": "headstart",
            "max_model_len": self._llm.llm.engine.parts.runner.max_len,
        }

    async def tokenize(self, body: Tokenize) -> dict[str, Any]:
        self._check_model(body.model)
        words: Any = body.prompt if body.messages is None else [message.as_dict() for message in body.messages]
        found = await asyncio.to_thread(self._tokens, words, body.add_special_tokens)
        return {"tokens": found, "count": len(found), "max_model_len": self._llm.llm.engine.parts.runner.max_len}

    def _tokens(self, words: Any, special: bool | None) -> list[int]:
        codec = self._llm.llm.codec
        if not isinstance(words, str):
            return codec.encode_chat(words)
        return codec.encode_prediction(words) if special is False else codec.encode(words)

    async def detokenize(self, body: Detokenize) -> dict[str, Any]:
        self._check_model(body.model)
        codec = self._llm.llm.codec
        if body.tokens and not 0 <= min(body.tokens) <= max(body.tokens) < codec.vocab_size:
            raise InvalidParameter("tokens", f"holds ids outside the vocabulary of {codec.vocab_size}")
        return {"prompt": await asyncio.to_thread(codec.decode, body.tokens)}

    # -- for those who watch

    async def health(self) -> Response:
        if self._llm.alive or self.stopping:
            return PlainTextResponse("ok")
        return PlainTextResponse(f"the engine stopped: {self._llm.failure}", 503)

    async def ready(self) -> Response:
        if self._llm.alive and not self.stopping:
            return PlainTextResponse("ready")
        return PlainTextResponse("shutting down" if self.stopping else "the engine stopped", 503)

    async def version(self) -> dict[str, str]:
        return {"version": __version__}

    async def metrics_text(self) -> Response:
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def _read_all(readers: Sequence[Reader]) -> list[Completion]:
    for reader in readers:
        async for _ in reader.rounds(failing=False):
            pass
    return [reader.completion() for reader in readers]


def _check_ended(answer: Completion) -> None:
    """An answer that did not come to its own end is an error, whatever was written of it."""
    for choice in answer.choices:
        if choice.finish_reason in ("error", "abort"):
            raise Refused(500, choice.error or "the request was stopped by the server", code="generation_failed")


async def _unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """What ``work`` gives; None, and it is cancelled, where the client left before."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, left = asyncio.create_task(work), asyncio.create_task(gone())
    try:
        await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for each in (task, left):
            each.cancel()
        await asyncio.gather(task, left, return_exceptions=True)


async def _together(readers: Sequence[Reader]) -> AsyncIterator[tuple[int, list[Piece]]]:
    """The rounds of several answers as they come, each with its number. One who does not take them is not waited for
    by the engine: the pieces stay with their reader, which gives up when they are too many."""
    if len(readers) == 1:
        async for pieces in readers[0].rounds(failing=False):
            yield 0, pieces
        return
    found: asyncio.Queue[tuple[int, list[Piece]] | None] = asyncio.Queue(1)

    async def read(number: int) -> None:
        async for pieces in readers[number].rounds(failing=False):
            await found.put((number, pieces))

    async def all_of_them() -> None:
        try:
            await asyncio.gather(*map(read, range(len(readers))))
        finally:
            await found.put(None)

    task = asyncio.create_task(all_of_them())
    try:
        while (item := await found.get()) is not None:
            yield item
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _event(value: dict[str, Any]) -> bytes:
    return format_sse_event(data_str=json.dumps(value, ensure_ascii=False, separators=(",", ":")))
