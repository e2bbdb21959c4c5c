"""JSON from strangers: text that may be anything becomes values, or a sentence.

Knows: JSON, how deep it may be, how a route comes by its body, and that a long one is read in a thread. Does not know:
what it says.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

__all__ = ["LONG", "MAX_DEPTH", "Route", "parsed"]

LONG = 2**16  # bytes, from which on a body takes longer than everybody should wait for
MAX_DEPTH = 32  # lists and objects inside each other; a conversation of parts has five
MAX_VALUES = 2**20  # in a body: 64 prompts of 16,384 token ids
MAX_TEXTS = 2**17  # names among them
#: one that is not closed goes on to the end: were it none, each quote in it would be tried anew
_TEXTS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)', re.DOTALL)


def parsed(text: bytes) -> Any:
    """The values. ValueError, with a sentence, for what is no JSON, too much of it or too deep."""
    _check_size(text)
    try:
        found = json.loads(text, parse_constant=_no_number, object_pairs_hook=_record)
    except RecursionError:
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg[:1].lower()}{error.msg[1:]} (character {error.pos})") from None
    except ValueError as error:
        raise ValueError("a number has thousands of digits" if "digits" in str(error) else str(error)) from None
    if text.count(b"[") + text.count(b"{") > MAX_DEPTH:
        _check_depth(found)
    return found


def _check_size(text: bytes) -> None:
    """In Python, a text at a time: one call of a library that takes seconds would let no other thread run."""
    if text.count(b",") < MAX_VALUES and text.count(b'"') <= 2 * MAX_TEXTS:
        return
    commas = end = 0
    for texts, match in enumerate(_TEXTS.finditer(text), 1):
        commas += text.count(b",", end, match.start())
        end = match.end()
        if texts > MAX_TEXTS:
            raise ValueError(f"it holds more than {MAX_TEXTS} texts and names")
    if commas + text.count(b",", end) >= MAX_VALUES:
        raise ValueError(f"it holds more than {MAX_VALUES} values")


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is not a number in JSON")


def _record(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object. Of a name that stands twice in it, others may have read the other value."""
    found = dict(pairs)
    if len(found) < len(pairs):
        seen = set[str]()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"{twice!r:.100} stands twice in an object")
    return found


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (dict, list))
        ]
        if not level:
            return
    raise ValueError(f"it is nested more than {MAX_DEPTH} deep")


class Route(APIRoute):
    """A route whose body is read by ``parsed``; a long one, and what it is checked for, in a thread: one after the
    other, so that they take no more than that from everybody."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()
        kind: Any = self.body_field.field_info.annotation if self.body_field is not None else None
        thread = ThreadPoolExecutor(1, thread_name_prefix="headstart-body")  # it starts when it is needed

        async def read(request: Request) -> Response:
            asked = _Request(request.scope, request.receive)
            asked.kind, asked.thread = kind, thread
            try:
                return await handler(asked)
            except HTTPException:
                if asked.wrong is not None:  # which a framework would not let through
                    raise asked.wrong from None
                raise

        return read


class _Request(Request):
    kind: type[BaseModel] | None = None
    thread: ThreadPoolExecutor
    wrong: Exception | None = None  # about what a long body says

    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            text = await self.body()
            try:
                if len(text) < LONG:
                    self._json = parsed(text)
                else:
                    self._json = await asyncio.get_running_loop().run_in_executor(self.thread, self._checked, text)
            except ValidationError as error:
                first = error.errors(include_url=False)[:1]
                self.wrong = RequestValidationError([each | {"loc": ("body", *each["loc"])} for each in first])
                raise HTTPException(400) from None
            except ValueError as error:
                raise HTTPException(400, f"the body is not JSON: {error}") from None
            except Exception as error:
                self.wrong = error
                raise HTTPException(400) from None
        return self._json

    def _checked(self, text: bytes) -> Any:
        """The record that the route takes: checked here, it is taken as it is."""
        found = parsed(text)
        return found if self.kind is None else self.kind.model_validate(found)
