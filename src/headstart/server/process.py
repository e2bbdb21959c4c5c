"""The life of a server's process and of its connections: signals, draining, and how long anybody is waited for.

Knows: uvicorn, signals, sockets that do not move. Does not know: routes, or what is computed.

The first SIGTERM or Ctrl-C: nothing more is taken in (503, and ``/ready`` says so), what runs comes to its end. What
still runs when the time to drain is over is stopped, and its clients are told. The second one ends the process at once.
A process whose engine died says so for a moment (``/health``), and ends with an error, so that it is started anew.
"""

from __future__ import annotations

import asyncio
import gc
import http
import json
import logging
import os
import signal
import socket
import sys
import time
import uuid
from functools import partial
from types import FrameType
from typing import Any, ClassVar, Protocol

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from ..errors import EngineStopped
from .errors import body
from .memory import Memory, give_back
from .streams import DIRECT

__all__ = ["Connection", "Draining", "Server", "run"]

log = logging.getLogger(__name__)

PATIENCE = 60.0  # seconds
KEEP_ALIVE = (
    75  # seconds: clients give up their idle connections sooner, so that none is closed while it is taken up again
)
LAST_BYTES = 5  # seconds: for streams that have ended, or were stopped, and are still being read
SWITCHING = 0.0005  # seconds
MOURNING = (
    5.0  # seconds that a server whose engine died says so before it ends: those who watch it look every few seconds
)


class Draining(Protocol):
    """What a server's process must know of what it serves."""

    stopping: bool  # set here: nothing more is taken in

    @property
    def idle(self) -> bool: ...  # nothing runs and nothing waits

    @property
    def failure(self) -> BaseException | None: ...  # what the engine died of

    async def close(self, drain: float) -> None: ...  # what still runs after so many seconds is stopped


class Connection(H11Protocol):
    """One connection. It is cut when the other side is waited for too long: to send the rest of its request, or to read
    what was written. Whoever waits for its answer is never cut."""

    patience: ClassVar[float] = PATIENCE

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        connected: socket.socket | None = transport.get_extra_info("socket")
        if connected is not None and connected.family in (socket.AF_INET, socket.AF_INET6):
            # asyncio does this only where the listening socket names its protocol. Without it, the first text waits for
            # the client to acknowledge what was sent before, which takes 40 ms.
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._request = _Deadline(self, transport)  # the rest of it must come
        self._reading = _Deadline(self, transport)  # of what was written must go on
        self._request.set()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            if not self._request.is_set:  # all headers together have that time: a byte now and then does not extend it
                self._request.set()
        elif self.conn.their_state is h11.SEND_BODY:
            self._request.set()
        else:
            self._request.clear()

    def on_response_complete(self) -> None:
        super().on_response_complete()  # begins what was sent behind it
        if self.conn.their_state is h11.SEND_BODY and not self._request.is_set:
            self._request.set()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP, or has too much of it before its body: told as everything else is."""
        error = sys.exc_info()[1]
        status = 431 if getattr(error, "error_status_hint", 400) == 431 else 400
        code, why = ("headers_too_large", "the headers are too large") if status == 431 else ("bad_request", msg)
        data = json.dumps(body(status, why, code=code)).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(data)).encode()),
            (b"x-request-id", f"req_{uuid.uuid4().hex}".encode()),
            (b"connection", b"close"),
        ]
        phrase = http.HTTPStatus(status).phrase.encode()
        for event in (h11.Response(status_code=status, headers=headers, reason=phrase), h11.Data(data=data)):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.write(self.conn.send(h11.EndOfMessage()) or b"")
        self.transport.close()

    def handle_events(self) -> None:
        super().handle_events()
        if self.scope is not None and self.cycle is not None:
            self.scope[DIRECT] = _Direct(self.cycle, self.scope["http_version"] == "1.1")  # type: ignore[literal-required]

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reading.set()

    def resume_writing(self) -> None:
        self._reading.clear()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._request.clear()
        self._reading.clear()
        super().connection_lost(exc)


class _Direct:
    """Writes parts of a response whose length is not known, as ``cycle.send`` does: h11 and all that stands between it
    and the app cost more than what an event is made of. ``chunked``: the client knows chunks."""

    def __init__(self, cycle: RequestResponseCycle, chunked: bool) -> None:
        self._cycle, self._chunked = cycle, chunked

    @property
    def full(self) -> bool:
        return self._cycle.flow.write_paused

    def write(self, data: bytes) -> None:
        if not self._cycle.disconnected:
            self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    async def drain(self) -> None:
        if self._cycle.flow.write_paused and not self._cycle.disconnected:
            await self._cycle.flow.drain()


class _Deadline:
    """The connection is cut unless this is cleared in time, or set anew."""

    def __init__(self, connection: Connection, transport: asyncio.Transport) -> None:
        self._call = partial(connection.loop.call_later, connection.patience, transport.abort)
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_set(self) -> bool:
        return self._timer is not None

    def set(self) -> None:
        self.clear()
        self._timer = self._call()

    def clear(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None


class Server(uvicorn.Server):
    """Drains on the first signal, ends at once on the second."""

    def __init__(self, config: uvicorn.Config, service: Draining, drain: float, mourning: float = MOURNING) -> None:
        super().__init__(config)
        self._service, self._drain, self._mourning = service, drain, mourning
        self._end: float | None = None  # by then it stops, whatever runs
        self._told = False  # people know that it waits
        self._memory = Memory()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._service.stopping:
            os._exit(128 + sig)  # nothing is left to be saved, and whatever hangs must not keep it
        self.drain()
        if sig == signal.SIGINT:
            self._captured_signals.append(sig)  # raised again at the end; SIGTERM that was obeyed is no failure

    def drain(self) -> None:
        """Take nothing more in, and end when what runs has ended."""
        self._service.stopping = True
        self._end = time.monotonic() + self._drain

    async def on_tick(self, counter: int) -> bool:
        if await super().on_tick(counter):
            return True
        if self._memory.due(self._service.idle):
            await asyncio.to_thread(give_back)  # ticks come later, and nothing else
        if self._end is None and self._service.failure is not None:
            self._end = time.monotonic() + self._mourning
        if self._end is None:
            return False
        if self._service.stopping and not self._service.idle and not self._told:
            self._told = True
            log.warning("stopping: what runs has %g s to end; a second signal ends it at once", self._drain)
        return (self._service.stopping and self._service.idle) or time.monotonic() >= self._end

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.stopping = True
        if not self._service.idle:
            log.warning("what still runs is stopped")
            await self._service.close(0)  # its clients are told before their connections are closed
        left = 0.0 if self._end is None else self._end - time.monotonic()
        self.config.timeout_graceful_shutdown = max(LAST_BYTES, round(left))
        await super().shutdown(sockets)


def run(app: Any, listener: socket.socket, *, drain: float, mourning: float = MOURNING) -> None:
    """Serve an app of ``create_app`` on a socket, as said above. ``EngineStopped``: the engine died."""
    service: Draining = app.state.service
    config = uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        log_config=None,  # its log goes where everybody's goes, who clean it
        log_level="warning",
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE,
        h11_max_incomplete_event_size=64 * 1024,  # of headers
    )
    # Python's 5 ms is how long the event loop waits for its turn while the engine's thread computes in Python, several
    # times between a request's arrival and its place in the line.
    before = sys.getswitchinterval()
    gc.collect()
    gc.freeze()  # what was loaded stays: no collection looks at it again while somebody waits for a token
    sys.setswitchinterval(SWITCHING)
    give_back()  # loading took more than stays
    try:
        Server(config, service, drain, mourning).run(sockets=[listener])
    finally:
        sys.setswitchinterval(before)
        gc.unfreeze()
    if service.failure is not None:
        raise EngineStopped(f"the engine died of {type(service.failure).__name__}: {service.failure}")
