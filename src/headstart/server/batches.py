"""OpenAI's batch format: a line that asks becomes a line that answers, as the server would.

Knows: what stands in such lines, and how many are worked on at once. Does not know: files, or who waits for them.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Any, TypeVar

from pydantic import ValidationError

from ..async_api import AsyncLLM
from ..errors import EngineStopped
from . import errors
from .calls import Call, Calls
from .errors import Refused
from .reading import parsed
from .schemas import ChatRequest, CompletionRequest

__all__ = ["Batches"]

log = logging.getLogger(__name__)

T = TypeVar("T")
FIELDS = ("custom_id", "method", "url", "body")


class _Bad(Exception):
    """A line that asks for nothing that could be answered."""

    def __init__(self, code: str, field: str | None, message: str) -> None:
        super().__init__(message)
        self.code, self.field = code, field


class Batches:
    """Answers lines of batches. ``model``: the name that bodies may give."""

    def __init__(self, llm: AsyncLLM, model: str, *, statistics: bool = False, tools: str = "auto") -> None:
        self._llm = llm
        calls = Calls(llm.llm, model, statistics=statistics, tools=tools)
        self._routes: dict[str, tuple[Any, Callable[[Any], Call]]] = {
            "/v1/chat/completions": (ChatRequest, calls.chat),
            "/v1/completions": (CompletionRequest, calls.complete),
        }

    async def answers(
        self, lines: Iterable[T], read: Callable[[T], tuple[int, bytes]], *, together: int
    ) -> AsyncGenerator[tuple[T, dict[str, Any]], None]:
        """Each line with its record, as they get ready. ``read`` gives a line's number and bytes; ``together``: so many
        are worked on at once. Closed early, it stops what is under way."""
        running: set[asyncio.Task[tuple[T, dict[str, Any]]]] = set()

        async def one(line: T) -> tuple[T, dict[str, Any]]:
            return line, await self.answer(*read(line))

        waiting = iter(lines)
        try:
            while True:
                for line in waiting:
                    running.add(asyncio.create_task(one(line)))
                    if len(running) >= together:
                        break
                if not running:
                    return
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in sorted(done, key=lambda task: task.exception() is not None):  # what is answered comes first
                    yield task.result()
                    running.discard(task)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def answer(self, number: int, line: bytes) -> dict[str, Any]:
        """The record for one line, without its id. Only ``EngineStopped`` is raised: then nobody can be answered."""
        name: str | None = None
        try:
            asked = _read(line)
            name = _custom_id(asked)
            form, call = self._route(asked)
        except _Bad as bad:
            where = f"line {number}" if bad.field is None else f"line {number}: {bad.field}:"
            told = {"code": bad.code, "message": f"{where} {bad}", "param": bad.field}
            return {"custom_id": name, "response": None, "error": told}
        request = f"req_{uuid.uuid4().hex}"
        status, body = await self._answered(request, form, call, asked["body"])
        response = {"status_code": status, "request_id": request, "body": body}
        return {"custom_id": name, "response": response, "error": None}

    def _route(self, asked: dict[str, Any]) -> tuple[Any, Callable[[Any], Call]]:
        if asked.get("method") != "POST":
            raise _Bad("invalid_method", "method", "must be POST")
        url = asked.get("url")
        if not isinstance(url, str) or url not in self._routes:
            raise _Bad("invalid_url", "url", f"must be one of {', '.join(self._routes)}, not {url!r:.100}")
        if not isinstance(asked.get("body"), dict):
            raise _Bad("invalid_body", "body", "must be an object")
        for field in asked:
            if field not in FIELDS:
                raise _Bad("invalid_line", f"{field!r:.100}", "is not a field of a batch's lines")
        return self._routes[url]

    async def _answered(
        self, request: str, form: Any, call: Callable[[Any], Call], body: dict[str, Any]
    ) -> tuple[int, dict[str, Any]]:
        """A status and a body, as the server's."""
        try:
            made = call(form.model_validate(body))
            if made.stream:
                raise Refused(400, "stream: batches have no streams", "stream")
            return 200, await made.whole(await made.submit(self._llm, wait=True))
        except EngineStopped:
            raise
        except ValidationError as error:
            said = errors.misfit(error.errors())
        except Exception as error:
            said = errors.described(error)
            if said.status >= 500:
                log.error("request %s failed", request, exc_info=error)
        if not self._llm.alive:  # it failed because the engine did
            raise EngineStopped(f"the engine stopped: {self._llm.failure}")
        return said.status, errors.body(said.status, said.message, said.field, said.code)


def _read(line: bytes) -> dict[str, Any]:
    try:
        found = parsed(line)
    except ValueError as error:
        raise _Bad("invalid_json_line", None, f"is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise _Bad("invalid_json_line", None, "is not an object")
    return found


def _custom_id(asked: dict[str, Any]) -> str:
    name = asked.get("custom_id")
    if not isinstance(name, str) or not name:
        raise _Bad("invalid_custom_id", "custom_id", "is required, and must be a text")
    if not name.isprintable():
        raise _Bad("invalid_custom_id", "custom_id", f"must be printable text, not {name!r:.100}")
    return name
