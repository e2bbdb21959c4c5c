"""What the server's tests share: a server over a tiny model, in a thread, on a port of its own."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from headstart import LLM, AsyncLLM
from headstart.cli.serve import bound
from headstart.server import process
from headstart.server.app import Settings, create_app
from headstart.testing import tiny_model, tiny_tokenizer

CHAT = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
WORDS = [{"role": "user", "content": "one two three"}]


def tiny_llm(**options: Any) -> LLM:
    """Nonsense, quickly; its answers have the same bits whatever else is served."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT
    target = options.pop("model", None) or tiny_model("llama", max_position_embeddings=512, **SIZES)
    settings = {"max_rows": 3, "max_model_len": 512, "check": False, "quantization": "int8"}
    return LLM(target, **{"draft": "lookup", "tokenizer": tokenizer} | settings | options)


def joined(events: str) -> dict[int, dict[str, Any]]:
    """The choices of a stream as a whole answer has them, by their numbers."""
    choices: dict[int, dict[str, Any]] = {}
    lines = [line.removeprefix("data: ") for line in events.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]", lines[-1]
    for line in lines[:-1]:
        for part in json.loads(line).get("choices", ()):
            choice = choices.setdefault(part["index"], {})
            for name, value in part.items():
                name, value = ("message", value) if name == "delta" else (name, value)
                choice[name] = _added(choice.get(name), value)
    return choices


def _added(known: Any, more: Any) -> Any:
    """Texts and lists grow, records grow field by field, and other things are the latest that were said."""
    if known is None or more is None:
        return more if known is None else known
    if isinstance(known, dict):
        return {name: _added(known.get(name), more.get(name)) for name in (*known, *(more.keys() - known.keys()))}
    if isinstance(known, list):
        return known + more
    return known + more if isinstance(known, str) and known != "assistant" else more


def head(path: str, body: bytes) -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode()


def read_all(connection: socket.socket) -> bytes:
    """Everything until the other side closes, in order or not."""
    found = b""
    with connection:
        try:
            while part := connection.recv(65536):
                found += part
        except ConnectionResetError:
            pass
    return found


def events(answer: bytes) -> list[Any]:
    """The events of a stream as it came over the wire (in chunks); "[DONE]" as it is."""
    body, rest = b"", answer.partition(b"\r\n\r\n")[2]
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    found = [part.removeprefix("data: ") for part in body.decode().split("\n\n") if part]
    return [part if part == "[DONE]" else json.loads(part) for part in found]


class Server:
    """A server in a thread. ``llm``: options of the LLM; the rest are the server's settings."""

    def __init__(
        self,
        *,
        llm: dict[str, Any] | None = None,
        connection: type[process.Connection] = process.Connection,
        **settings: Any,
    ) -> None:
        self.llm = tiny_llm(**llm or {})
        self.app = create_app(AsyncLLM(self.llm), Settings(model="tiny", **settings))
        self.listener = bound("127.0.0.1", 0)
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)  # little lies in the kernel, unread
        config = uvicorn.Config(self.app, http=connection, log_level="error", lifespan="on")
        self.server = process.Server(config, self.app.state.service, settings.get("drain", 30.0), mourning=3600)
        self.thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)
        self._own = len(asyncio.all_tasks(self._loop))  # tasks that are there while nobody asks for anything
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self.server.serve([self.listener])

    def close(self) -> None:
        """As by SIGTERM."""
        self.server.drain()
        self.thread.join(30)
        assert not self.thread.is_alive()

    def connect(self, *, buffer: int | None = None) -> socket.socket:
        """A raw connection. ``buffer``: bytes that may lie in it unread."""
        host, port = self.url.removeprefix("http://").split(":")
        found = socket.socket()
        found.settimeout(30)
        if buffer is not None:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)  # before it is connected
        found.connect((host, int(port)))
        return found

    def send(self, path: str, body: Any, **options: Any) -> socket.socket:
        """Post something on a connection of its own, and read nothing yet."""
        found = self.connect(**options)
        found.sendall(head(path, data := json.dumps(body).encode()) + data)
        return found

    def settle(self) -> None:
        """Wait until nothing is left of any request."""
        engine, end = self.llm.engine, time.monotonic() + 30
        while not engine.idle and time.monotonic() < end:
            time.sleep(0.005)
        assert engine.idle
        slab = engine.parts.runner.slab
        assert slab.free_rows == slab.rows
        while len(asyncio.all_tasks(self._loop)) > self._own and time.monotonic() < end:
            time.sleep(0.005)
        assert len(asyncio.all_tasks(self._loop)) <= self._own, asyncio.all_tasks(self._loop)

    @contextmanager
    def held(self) -> Iterator[None]:
        """The model computes nothing meanwhile."""
        go, runner = threading.Event(), self.llm.engine.parts.runner
        forward = runner.forward

        def waits(*arguments: Any, **options: Any) -> Any:
            assert go.wait(60)
            return forward(*arguments, **options)

        runner.forward = waits
        try:
            yield
        finally:
            go.set()
            runner.forward = forward

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"} | headers)
        return self._sent(request)

    def get(self, path: str, **headers: str) -> tuple[int, Any]:
        return self._sent(urllib.request.Request(self.url + path, headers=headers))

    def _sent(self, request: urllib.request.Request) -> tuple[int, Any]:
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                status, text = answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read().decode()
            error.close()
        try:
            return status, json.loads(text)
        except ValueError:
            return status, text


def ask(server: Server, method: str, path: str, body: Any = None, headers: Any = ()) -> tuple[int, Any, Any]:
    """Status, headers and body; ``headers``: pairs or a dict, sent as they are."""
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=30)
    try:
        pairs = list(headers.items()) if isinstance(headers, dict) else list(headers)
        connection.putrequest(method, path, skip_host=any(name.lower() == "host" for name, _ in pairs))
        for name, value in pairs:
            connection.putheader(name, value)
        data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        if body is not None:
            connection.putheader("Content-Type", "application/json")
            connection.putheader("Content-Length", str(len(data)))
        connection.endheaders(data or None)
        answer = connection.getresponse()
        text = answer.read().decode()
        return answer.status, answer.headers, json.loads(text) if "json" in answer.headers["Content-Type"] else text
    finally:
        connection.close()
