"""JSON from strangers: text that may be anything becomes values, or a sentence.

Knows: JSON, how deep it may be, and how a route comes by its body. Does not know: what it says.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

__all__ = ["MAX_DEPTH", "Route", "parsed"]

MAX_DEPTH = 32  # lists and objects inside each other; a conversation of parts has five


def parsed(text: bytes) -> Any:
    """The values. ValueError, with a sentence, for what is no JSON or too deep."""
    try:
        found = json.loads(text, parse_constant=_no_number)
    except RecursionError:
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg[:1].lower()}{error.msg[1:]} (character {error.pos})") from None
    if text.count(b"[") + text.count(b"{") > MAX_DEPTH:
        _check_depth(found)
    return found


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is not a number in JSON")


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
