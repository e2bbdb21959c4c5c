"""JSON from strangers: text that may be anything becomes values, or a sentence.

Knows: JSON, how deep it may be, and how a route comes by its body. Does not know: what it says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

__all__ = ["MAX_DEPTH", "Route", "parsed"]

MAX_DEPTH = 32  # lists and objects inside each other; a conversation of parts has five
MAX_VALUES = 2**20  # in a body: 64 prompts of 16,384 token ids. While more were looked at, nobody else would be served
_TEXTS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)


def parsed(text: bytes) -> Any:
    """The values. ValueError, with a sentence, for what is no JSON, too much of it or too deep."""
    if text.count(b",") > MAX_VALUES and _TEXTS.sub(b"", text).count(b",") > MAX_VALUES:
        raise ValueError(f"it holds more than {MAX_VALUES} values")
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
    """A route whose body is read by ``parsed``."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def read(request: Request) -> Response:
            return await handler(_Request(request.scope, request.receive))

        return read


class _Request(Request):
    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            try:
                self._json = parsed(await self.body())
            except ValueError as error:
                raise HTTPException(400, f"the body is not JSON: {error}") from None
        return self._json
