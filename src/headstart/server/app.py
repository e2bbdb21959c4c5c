"""The routes: OpenAI's chat and text completions over an ``AsyncLLM``, and what people need to run a server.

Knows: which route does what, and what becomes of an answer whose client left. Does not know: how anything is computed,
or the shapes of what is sent (``schemas``, ``answers``).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.middleware.cors import CORSMiddleware

from .. import __version__
from ..async_api import AsyncLLM
from ..engine.inbox import Reader
from ..errors import EngineBusy
from . import errors
from .calls import Brought, Call, Calls
from .errors import REQUEST_ID, Refused
from .guard import Door, Guard
from .metrics import Metrics
from .openapi import document
from .pace import Pace
from .pump import Direct, pumped
from .reading import LONG, Route
from .schemas import ChatRequest, CompletionRequest, Detokenize, Tokenize
from .streams import DIRECT, DONE, Events, event

__all__ = ["Settings", "create_app"]

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
    tool_format: str = "auto"  # how the model writes tool calls


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
            service.metrics.listening.close()  # the LLM may live on, with another app
            service.pace.listening.close()

    about: dict[str, Any] = {"title": "Headstart", "version": __version__, "docs_url": None, "redoc_url": None}
    app = FastAPI(**about, lifespan=life, redirect_slashes=False)
    app.state.service = service  # for ``process``, which stops it
    app.router.route_class = Route
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
    app.openapi = partial(document, app)  # type: ignore[method-assign]
    app.add_middleware(Guard, key=settings.api_key, max_body=settings.max_body)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.allowed_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],  # clients send headers of their own (OpenAI's: x-stainless-os)
            expose_headers=["x-request-id", "retry-after"],
        )
    app.add_middleware(
        Door, hosts=settings.allowed_hosts, origins=settings.allowed_origins, seen=service.metrics.answered
    )
    return app


class _Service:
    """What the routes do."""

    def __init__(self, llm: AsyncLLM, settings: Settings) -> None:
        self._llm, self._settings = llm, settings
        self.metrics = Metrics(llm.llm, settings.model)
        self.pace = Pace(llm.llm.engine)
        self.stopping = False
        self._loaded = int(time.time())
        self._calls = Calls(llm.llm, settings.model, statistics=settings.statistics, tools=settings.tool_format)

    # -- for the process that runs it

    @property
    def idle(self) -> bool:
        return self._llm.idle

    @property
    def failure(self) -> BaseException | None:
        return self._llm.failure

    async def close(self, drain: float) -> None:
        await self._llm.close(drain)

    # -- completions

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        return await self._answered(request, body, self._calls.chat)

    async def complete(self, body: CompletionRequest, request: Request) -> Response:
        return await self._answered(request, body, self._calls.complete)

    async def _answered(self, request: Request, body: Any, make: Callable[[Any], Call]) -> Response:
        if self.stopping:
            raise Refused(503, "the server is shutting down", code="shutting_down")
        engine = self._llm.llm.engine
        try:
            if engine.full():  # before anything is tokenized: a crowd that is sent away shall cost little
                most = engine.config.max_waiting
                raise EngineBusy(f"{engine.waiting} requests wait already; the queue holds {most} (max_waiting)")
            apart = self._calls.lengthy(body) or len(await request.body()) >= LONG
            call = await asyncio.to_thread(make, body) if apart else make(body)
            self._check_places(call)
            readers = await call.submit(self._llm, client=request.client.host if request.client is not None else None)
        except EngineBusy as error:
            raise Refused(429, str(error), code="queue_full", retry_after=self.pace.retry_after()) from None
        if call.stream:
            events = self._events(call, readers, request)
            return Events(events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        found = await _unless_gone(request, call.whole(readers))
        return Response(status_code=499) if found is None else JSONResponse(found)  # 499: nobody reads it

    def _check_places(self, call: Call) -> None:
        """All of a call's requests find a place, or none is begun. (One alone is never too large for an empty line.)"""
        engine, wanted = self._llm.llm.engine, len(call.prompts) * call.params.n
        most = engine.config.max_waiting
        if len(call.prompts) > 1 and wanted > most:
            why = f"asks for {wanted} answers at once; {most} may wait here (max_waiting)"
            raise Refused(400, f"prompt: {why}", "prompt")
        if len(call.prompts) > 1 and engine.full(wanted):
            raise EngineBusy(f"{engine.waiting} requests wait already; the queue holds {most} (max_waiting)")

    async def _events(self, call: Call, readers: Sequence[Reader], request: Request) -> AsyncIterator[bytes]:
        """A stream's events, but for those that go to the connection directly. A client that leaves ends this, and that
        stops its requests."""
        direct: Direct | None = request.scope.get(DIRECT)

        async def pump(brought: Brought) -> None:
            assert direct is not None
            await pumped(readers, direct, lambda number, pieces: [event(chunk) for chunk in brought(number, pieces)])

        try:
            async with aclosing(call.chunks(readers, pump if direct is not None else None)) as chunks:
                async for chunk in chunks:
                    yield event(chunk)
            yield DONE
        except Exception as error:
            said = errors.described(error)
            if said.status == 500:
                log.exception("request %s failed", request.scope.get(REQUEST_ID))
            yield event(errors.body(said.status, said.message, said.field, said.code))

    # -- models and tokens

    async def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [self._card()]}

    async def model(self, model: str) -> dict[str, Any]:
        self._calls.check_model(model)
        return self._card()

    def _card(self) -> dict[str, Any]:
        return {
            "id": self._settings.model,
            "object": "model",
            "created": self._loaded,
            "owned_by": "headstart",
            "max_model_len": self._llm.llm.engine.parts.runner.max_len,
        }

    async def tokenize(self, body: Tokenize) -> dict[str, Any]:
        self._calls.check_model(body.model)
        words: Any = body.prompt if body.messages is None else [message.as_dict() for message in body.messages]
        found = await asyncio.to_thread(self._tokens, words, body)
        return {"tokens": found, "count": len(found), "max_model_len": self._llm.llm.engine.parts.runner.max_len}

    def _tokens(self, words: Any, body: Tokenize) -> list[int]:
        codec = self._llm.llm.codec
        most = self._llm.llm.engine.parts.runner.max_len  # megabytes would take minutes
        if not isinstance(words, str):
            return codec.encode_chat(words, options=body.chat_template_kwargs, most=most)
        codec.check_length(words, most)
        return codec.encode_prediction(words) if body.add_special_tokens is False else codec.encode(words)

    async def detokenize(self, body: Detokenize) -> dict[str, Any]:
        self._calls.check_model(body.model)
        codec = self._llm.llm.codec
        codec.check_ids("tokens", body.tokens)
        return {"prompt": await asyncio.to_thread(codec.decode, body.tokens, special=True)}

    # -- for those who watch

    async def health(self) -> Response:
        failure = self._llm.failure
        if failure is None and (self._llm.alive or self.stopping):
            return PlainTextResponse("ok")
        return PlainTextResponse(f"the engine died of {type(failure).__name__}; the log says more", 503)

    async def ready(self) -> Response:
        if self._llm.alive and not self.stopping:
            return PlainTextResponse("ready")
        return PlainTextResponse("shutting down" if self.stopping else "the engine stopped", 503)

    async def version(self) -> dict[str, str]:
        return {"version": __version__}

    async def metrics_text(self) -> Response:
        return Response(self.metrics.text(), media_type=self.metrics.media_type)


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
