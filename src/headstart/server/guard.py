"""Who may ask, from where, and how much: checked before anything is read.

Knows: names of hosts and origins, the API key, request ids, limits on bodies and headers. Does not know: routes (but
those that are open to all), or what is asked.

``Door`` stands outside of everything, also of what answers browsers (CORS); ``Guard`` inside of that, so that a page
that may ask can read why it was refused.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import uuid
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from .errors import REQUEST_ID, TWO_LENGTHS, Refused, answer, described

__all__ = ["OPEN", "Door", "Guard"]

log = logging.getLogger(__name__)

OPEN = ("/health", "/ready")  # without a key: those who watch a server have none
MAX_HEADERS = 100
MAX_HEADER_BYTES = 32 * 1024  # of all of them
MAX_ID = 128  # characters of a request's id
_METHODS = ("GET", "POST", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE")
_NOT_IN_IDS = re.compile(r"[^A-Za-z0-9._:=+/@-]")

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
Seen: TypeAlias = Callable[[str, str, int], None]  # a route (not a path: there is no end of them), a method, a status


class Door:
    """Host, Origin and size of headers; gives every request an id, and every answer the id of its request.

    ``hosts``: names without ports, ``*.example.com`` for all below, ``*`` for any. ``origins``: of web pages that may
    ask besides those that come from this very server. ``seen`` is told of every answer.
    """

    def __init__(self, app: Any, *, hosts: Sequence[str], origins: Sequence[str], seen: Seen) -> None:
        self._app, self._seen = app, seen
        self._hosts = [_bare(host) for host in hosts]
        self._origins = {origin.lower().rstrip("/") for origin in origins}

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)  # type: ignore[no-any-return]
        name, started = _request_id(scope["headers"]), False
        scope[REQUEST_ID] = name

        async def named(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", name.encode())]
                self._count(scope, message["status"])
            await send(message)

        try:
            self._check(scope["headers"])
            await self._app(scope, receive, named)
        except Refused as error:
            await answer(error)(scope, receive, named)
        except ClientDisconnect:
            return  # in the middle of its own request: nobody is there to be answered
        except Exception as error:  # a fault of ours: what was asked is not told, only by which name to ask for it
            log.error("request %s failed", name, exc_info=error)
            if started:
                raise  # so that the connection is cut: what was sent is not whole
            await answer(described(error))(scope, receive, named)

    def _count(self, scope: Message, status: int) -> None:
        route = getattr(scope.get("route"), "path", "none")
        method = scope["method"] if scope["method"] in _METHODS else "other"
        self._seen(route, method, status)

    def _check(self, headers: Sequence[tuple[bytes, bytes]]) -> None:
        if len(headers) > MAX_HEADERS or sum(len(name) + len(value) for name, value in headers) > MAX_HEADER_BYTES:
            most = f"{MAX_HEADERS} headers of {MAX_HEADER_BYTES} bytes together"
            raise Refused(431, f"the request has more than {most}", code="headers_too_large")
        if {b"content-length", b"transfer-encoding"} <= {name for name, _ in headers}:
            # A proxy may go by the one and this server by the other: what one takes for a body is the other's request.
            raise Refused(400, "the request's body has a length and comes in chunks: send one", code=TWO_LENGTHS)
        hosts = [value for name, value in headers if name == b"host"]
        host = hosts[0].decode("latin-1") if len(hosts) == 1 else ""
        if not self._known(_bare(host)):
            name = _clean(_bare(host)) or "NAME"
            said = f"this server does not answer to the Host {name}; start it with --allowed-host {name}"
            raise Refused(400, said, code="host_not_allowed")
        for origin in (value.decode("latin-1").lower() for name, value in headers if name == b"origin"):
            # Browsers send it; those who may not read an answer shall not make the server work for one either.
            if origin not in self._origins and "*" not in self._origins and not _same(origin, host):
                said = f"pages from elsewhere may not ask; start the server with --allowed-origin {_clean(origin)}"
                raise Refused(403, said, code="origin_not_allowed")

    def _known(self, host: str) -> bool:
        return any(
            known == "*" or (host and (host == known or (known.startswith("*.") and host.endswith(known[1:]))))
            for known in self._hosts
        )


class Guard:
    """The API key, and the size of bodies."""

    def __init__(self, app: Any, *, key: str | None, max_body: int) -> None:
        self._app, self._max_body = app, max_body
        forms = set[bytes]()
        if key is not None:
            forms.add(key.encode("utf-8", "surrogateescape"))
            with suppress(UnicodeEncodeError):  # clients disagree about how such letters are written into a header
                forms.add(key.encode("latin-1"))
        self._keys = [hashlib.sha256(form).digest() for form in forms]

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)  # type: ignore[no-any-return]
        headers, read = dict(scope["headers"]), 0
        try:
            self._check_key(scope["path"], headers.get(b"authorization", b""))
            self._check_length(headers.get(b"content-length", b""))
        except Refused as error:
            return await answer(error)(scope, receive, send)

        async def counted() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self._max_body:
                raise HTTPException(413, self._too_large)  # this kind passes through whoever reads the body
            return message

        await self._app(scope, counted, send)

    def _check_key(self, path: str, given: bytes) -> None:
        if not self._keys or path in OPEN:
            return
        scheme, _, key = given.partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()  # digests have one length: the time tells nothing of the key's
        right = [hmac.compare_digest(digest, known) for known in self._keys]
        if not any(right) or scheme.lower() != b"bearer":
            raise Refused(
                401, "the API key is missing or wrong: send it as 'Authorization: Bearer KEY'", code="invalid_api_key"
            )

    def _check_length(self, given: bytes) -> None:
        if given.isdigit() and int(given[:20]) > self._max_body:
            raise Refused(413, self._too_large, code="body_too_large")

    @property
    def _too_large(self) -> str:
        return f"the body is larger than {self._max_body} bytes"


def _request_id(headers: Sequence[tuple[bytes, bytes]]) -> str:
    """The client's own, as far as it can stand in a log and a header; else a new one."""
    given = next((value for name, value in headers if name == b"x-request-id"), b"")
    return _clean(given.decode("latin-1")) or f"req_{uuid.uuid4().hex}"


def _clean(text: str) -> str:
    """What of a header can stand in a log, a header and a sentence."""
    return _NOT_IN_IDS.sub("", text)[:MAX_ID]


def _bare(host: str) -> str:
    """A host's name without a port; of an IPv6 address what stands in the brackets."""
    host = host.strip().lower()
    if host.startswith("["):
        address, closed, rest = host[1:].partition("]")
        return address if closed and (not rest or re.fullmatch(r":\d{0,5}", rest)) else ""
    name, _, port = host.partition(":")
    if ":" in port:
        return host  # an address without brackets, as people write it in options
    return name.removesuffix(".") if not port or port.isdigit() else ""


def _same(origin: str, host: str) -> bool:
    """Does a page come from the server that it asks? What is in front of it may have taken the encryption off."""
    try:
        return bool(host) and urlsplit(origin).netloc == host.lower()
    except ValueError:
        return False
