"""Server-sent events: how chunks become bytes on their way out.

Knows: how an event is written, and that a connection may take events directly. Does not know: what is in them.
"""

from __future__ import annotations

from typing import Any

from fastapi.sse import EventSourceResponse, format_sse_event
from pydantic_core import to_json
from starlette.types import Receive, Scope, Send

from .pump import Direct

__all__ = ["DIRECT", "DONE", "Events", "event"]

DIRECT = "headstart.direct"  # in a request's scope: a ``Direct``, for when the headers are on their way
DONE = format_sse_event(data_str="[DONE]")


def event(value: dict[str, Any]) -> bytes:
    """A record as an event. As ``format_sse_event``, which looks for lines: JSON in this form has one. (Python's
    ``json`` takes ten times as long, which is a part of what an event costs on a core that computes.)"""
    return b"data: %b\n\n" % to_json(value)


class Events(EventSourceResponse):
    """A stream of events. Where the connection has ``DIRECT`` (``process``), each goes there, past every layer that
    wraps ``send``: the event loop's time is taken from cores that compute."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._direct: Direct | None = scope.get(DIRECT)
        await super().__call__(scope, receive, send)

    async def stream_response(self, send: Send) -> None:
        if self._direct is None:
            return await super().stream_response(send)
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for part in self.body_iterator:
            await self._direct.drain()
            self._direct.write(part)  # type: ignore[arg-type]
        await send({"type": "http.response.body", "body": b"", "more_body": False})
