"""Who may ask, from where, and how much: checked before anything is read.

Knows: the API key, limits on bodies and headers. Does not know: routes (but those that are open to all), or JSON.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

from .errors import Refused, answer

__all__ = ["OPEN", "Guard"]

OPEN = ("/health", "/ready")  # without a key: those who watch a server have none

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]


class Guard:
    """An ASGI app around the app."""

    def __init__(self, app: Any, *, key: str | None, max_body: int) -> None:
        self._app, self._max_body = app, max_body
        self._key = None if key is None else key.encode()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)  # type: ignore[no-any-return]
        headers = dict(scope["headers"])
        try:
            self._check_key(scope["path"], headers.get(b"authorization", b""))
            self._check_length(headers.get(b"content-length"))
        except Refused as error:
            return await answer(error)(scope, receive, send)
        started, read = False, 0

        async def counted() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self._max_body:
                raise self._too_large()
            return message

        async def noted(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, counted, noted)
        except Refused as error:  # raised by ``counted``, past the app's own handlers
            if started:
                raise
            await answer(error)(scope, receive, send)

    def _check_key(self, path: str, given: bytes) -> None:
        if self._key is None or path in OPEN:
            return
        scheme, _, key = given.partition(b" ")
        if scheme.lower() != b"bearer" or not hmac.compare_digest(key.strip(), self._key):
            raise Refused(
                401, "the API key is missing or wrong: send it as 'Authorization: Bearer KEY'", code="invalid_api_key"
            )

    def _check_length(self, given: bytes | None) -> None:
        if given is not None and given.isdigit() and int(given) > self._max_body:
            raise self._too_large()

    def _too_large(self) -> Refused:
        return Refused(413, f"the body is larger than {self._max_body} bytes", code="body_too_large")
