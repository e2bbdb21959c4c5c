"""What can go wrong on the wire and in the process: slow, silent and leaving clients, signals, an engine that dies."""

from __future__ import annotations

import json
import logging
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

pytest.importorskip("fastapi")

from server_tools import WORDS, Server, events, head, read_all
from terminal_tools import environment

from headstart import EngineStopped, SamplingParams
from headstart.server import process

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LONG = {"max_tokens": 400, "ignore_eos": True, "stream": True, "temperature": 0}
FIRST = b'"content":"'  # behind it stands text


class Hasty(process.Connection):
    patience = 0.5


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    found = Server(connection=Hasty)
    yield found
    found.settle()
    found.close()


def wait_for(what: Any, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not what() and time.monotonic() < end:
        time.sleep(0.005)
    assert what()


# -- connections that do not move


def test_a_slow_reader_is_cut_and_nobody_else_notices(server: Server) -> None:
    own = server.llm.generate("one", SamplingParams(temperature=0, max_tokens=30)).text
    before = server.llm.stats.aborted
    ask = LONG | {"messages": WORDS, "n": 3, "max_tokens": 450, "logprobs": True, "top_logprobs": 9}
    slow = server.send(CHAT, ask, buffer=2048)
    assert slow.recv(1)  # it begins to read, and then it does not
    for _ in range(3):
        status, said = server.post(TEXT, {"prompt": "one", "max_tokens": 30, "temperature": 0})
        assert (status, said["choices"][0]["text"]) == (200, own)
    wait_for(lambda: server.llm.stats.aborted == before + 3)  # its choices: more than 1,024 pieces lay unread
    server.settle()  # the connection was cut, so nobody waits to write to it any more
    assert b"[DONE]" not in read_all(slow)


def test_a_client_that_pauses_gets_all_of_it(server: Server) -> None:
    """Nothing is written to a connection that is full, and nothing is lost."""
    ask = {"prompt": "one", "n": 3, "max_tokens": 120, "ignore_eos": True, "seed": 5, "logprobs": 4}
    _, whole = server.post(TEXT, ask)
    last = b"Connection: close\r\n\r\n"
    body = json.dumps(ask | {"stream": True}).encode()
    with server.connect(buffer=2048) as client:
        client.sendall(head(TEXT, body).removesuffix(b"\r\n") + last + body)
        wait_for(lambda: any(c.flow.write_paused for c in list(server.server.server_state.connections)))
        *found, done = events(read_all(client))
    assert done == "[DONE]"
    texts = ["".join(c["text"] for part in found for c in part["choices"] if c["index"] == i) for i in range(3)]
    assert texts == [choice["text"] for choice in whole["choices"]]


def test_a_request_that_never_comes_whole_is_cut(server: Server) -> None:
    body = json.dumps({"prompt": "one"}).encode()
    for sent in (b"", b"POST /v1/comple", head(TEXT, body), head(TEXT, body) + body[:4]):
        connection = server.connect()
        connection.sendall(sent)
        assert read_all(connection) == b""
        behind = server.connect()  # another one, which came with it
        behind.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n" + sent)
        if sent.startswith(head(TEXT, body)):  # else it is one that is kept for longer
            assert read_all(behind).count(b"HTTP/1.1") == 1
        behind.close()
    dripping, sent = server.connect(), 0  # headers have their time together
    with suppress(ConnectionResetError, BrokenPipeError):
        for byte in b"GET /health HTTP/1.1\r\nX-Long: " + b"x" * 100:
            dripping.sendall(bytes([byte]))
            sent += 1
            time.sleep(0.05)
    assert sent < 100
    dripping.close()
    dripped = server.connect()  # slowly, but whole in time
    for part in (head(TEXT, body)[:30], head(TEXT, body)[30:], body[:3], body[3:]):
        time.sleep(0.03)
        dripped.sendall(part)
    assert dripped.recv(12) == b"HTTP/1.1 200"
    dripped.close()


def test_a_request_that_says_twice_how_long_it_is_ends_its_connection(server: Server) -> None:
    """Whatever is in front of the server may have taken its end for another, and what follows for somebody else's."""
    body = json.dumps({"prompt": "one", "max_tokens": 1}).encode()
    chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    connection = server.connect()
    both = head(TEXT, body).replace(b"\r\n\r\n", b"\r\nTransfer-Encoding: chunked\r\n\r\n")
    connection.sendall(both + chunks + b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    found = read_all(connection)
    assert found.startswith(b"HTTP/1.1 400 ")
    assert b"two_lengths" in found
    assert found.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        (b"GET /version HTTP/1.1\r\nX: " + b"x" * 200_000 + b"\r\n\r\n", 431, "headers_too_large"),
        (b"GET /version HTTP/1.1\r\nHost: localhost\r\nHost: evil\r\n\r\n", 400, "bad_request"),
        (
            head(TEXT, b"zz\r\n").replace(b"Content-Length: 4", b"Transfer-Encoding: chunked") + b"zz\r\n",
            400,
            "bad_request",
        ),
        (b"\x00\xff nonsense\r\n\r\n", 400, "bad_request"),
    ],
)
def test_what_is_no_http_is_told_as_everything_else_is(
    server: Server, sent: bytes, status: int, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    connection = server.connect()
    with suppress(ConnectionResetError, BrokenPipeError):
        connection.sendall(sent)
    start, _, body = read_all(connection).partition(b"\r\n\r\n")
    assert start.startswith(b"HTTP/1.1 %d " % status)
    assert b"x-request-id: req_" in start
    assert json.loads(body)["error"]["code"] == code
    server.settle()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR], "it is no fault of ours"


def test_streams_behind_each_other_and_for_old_clients(server: Server) -> None:
    """In chunks, which end so that the next answer can follow; as they are for one who does not know chunks."""
    ask = json.dumps({"prompt": "one", "max_tokens": 12, "temperature": 0, "stream": True}).encode()
    request, close = head(TEXT, ask), b"Connection: close\r\n\r\n"
    last = request.removesuffix(b"\r\n") + close
    with server.connect() as kept:
        kept.sendall(request + ask + last + ask)
        first, second, end = read_all(kept).split(b"\r\n0\r\n\r\n")
    with server.connect() as old:
        old.sendall(request.replace(b"HTTP/1.1", b"HTTP/1.0") + ask)
        start, _, body = read_all(old).partition(b"\r\n\r\n")
    assert (end, b"chunked" in first, b"chunked" in start.lower()) == (b"", True, False)
    texts = {
        "".join(part["choices"][0]["text"] for part in found[:-1])
        for found in (
            events(first + b"\r\n"),
            events(second + b"\r\n"),
            events(b"\r\n\r\n%x\r\n%b\r\n" % (len(body), body)),
        )
    }
    own = server.llm.generate("one", SamplingParams(temperature=0, max_tokens=12)).text
    assert texts == {own}


def test_what_is_written_is_sent_at_once(server: Server) -> None:
    """Nothing waits for the client to acknowledge what came before it."""
    with server.connect() as client:
        client.sendall(b"POST ")
        wait_for(lambda: server.server.server_state.connections)
        (connection,) = server.server.server_state.connections
        sending = connection.transport.get_extra_info("socket")
        assert sending.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    server.settle()


def test_who_waits_for_an_answer_is_not_cut(server: Server) -> None:
    with server.held():
        connections = [server.send(TEXT, {"prompt": "one", "stream": stream}) for stream in (True, False)]
        time.sleep(3 * Hasty.patience)
    for connection in connections:
        assert connection.recv(12) == b"HTTP/1.1 200"
        connection.close()


def test_nothing_is_left_of_those_who_leave(server: Server) -> None:
    asks = [LONG | {"prompt": ["one", "two", "three"]}, LONG | {"prompt": "one", "n": 3}]
    asks.append({"prompt": ["one", "two"], "max_tokens": 400, "ignore_eos": True})
    for ask in asks:
        for _ in range(4):
            connection = server.send(TEXT, ask)
            if "stream" in ask:
                assert connection.recv(100)
            connection.close()
        server.settle()
    many = LONG | {"prompt": ["one", "two", "three"], "max_tokens": 300, "logprobs": 9}
    for _ in range(2):  # one who does not read leaves while several answers wait for it
        connection = server.send(TEXT, many, buffer=2048)
        wait_for(lambda: any(c.flow.write_paused for c in list(server.server.server_state.connections)))
        connection.close()
        server.settle()
    for end in range(1, len(head(TEXT, b"{}")) + 3, 40):  # at any moment before that
        connection = server.connect()
        connection.sendall((head(TEXT, b"{}") + b"{}")[:end])
        connection.close()
    server.settle()
    assert server.post(TEXT, {"prompt": "one"})[0] == 200


# -- an engine that fails


def test_a_step_that_fails_is_told_and_the_next_one_is_answered(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no such luck")

    monkeypatch.setattr(server.llm.engine.parts.runner, "forward", fails)
    status, said = server.post(TEXT, {"prompt": "one"})
    assert (status, said["error"]["code"]) == (500, "generation_failed")
    assert "no such luck" in said["error"]["message"]
    stream = server.send(TEXT, {"prompt": "one", "stream": True})
    stream.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    answer = read_all(stream)
    assert b"no such luck" in answer
    assert b"[DONE]" not in answer
    ids = re.findall(r"request (req_[0-9a-f]+) failed", caplog.text)
    assert len(ids) == 2, "the log names both, by what their clients know them as"
    assert f"x-request-id: {ids[1]}".encode() in answer
    monkeypatch.undo()
    assert server.post(TEXT, {"prompt": "one"})[0] == 200
    assert server.get("/health")[0] == 200


@pytest.mark.parametrize("death", [SystemExit("killed"), KeyboardInterrupt()])
def test_a_dead_engine_is_seen_and_hangs_nobody(death: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(llm={"max_rows": 2})
    dead = threading.Event()
    step = server.llm.engine._step

    def dies() -> None:
        if dead.is_set():
            raise death
        step()

    monkeypatch.setattr(server.llm.engine, "_step", dies)
    with server.held():
        streams = [server.send(CHAT, LONG | {"messages": WORDS}) for _ in range(4)]  # two run, two wait
        wholes = [server.send(TEXT, {"prompt": "one", "max_tokens": 400, "ignore_eos": True}) for _ in range(4)]
        wait_for(lambda: len(server.llm.engine._handles) == 8)
        dead.set()
    for connection in streams:
        while b'"error"' not in (found := connection.recv(65536)):
            assert found
            assert b"[DONE]" not in found
        connection.close()
    for connection in wholes:
        assert connection.recv(12) == b"HTTP/1.1 500"
        connection.close()
    assert server.get("/health")[0] == 503
    assert server.get("/ready")[0] == 503
    status, said = server.post(TEXT, {"prompt": "one"})
    assert (status, said["error"]["code"]) == (503, "engine_stopped")
    server.close()


def test_a_process_whose_engine_died_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()
    listener = socket.create_server(("127.0.0.1", 0))

    def dies() -> None:
        raise SystemExit("killed")

    monkeypatch.setattr(server.llm.engine, "_step", dies)
    assert server.post(TEXT, {"prompt": "one"})[0] in (500, 503)
    with pytest.raises(EngineStopped, match="killed"):
        process.run(server.app, listener, drain=1, mourning=0.1)
    server.close()


# -- signals


def test_a_server_that_drains_takes_nothing_more_and_ends_what_runs() -> None:
    server = Server()
    own = server.llm.chat(WORDS, SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)).text
    with server.held():
        stream = server.send(CHAT, LONG | {"messages": WORDS})
        wait_for(lambda: server.llm.engine._handles)
        server.server.drain()
        status, said = server.post(TEXT, {"prompt": "one"})
        assert (status, said["error"]["code"]) == (503, "shutting_down")
        assert server.get("/ready")[0] == 503
        assert server.get("/health")[0] == 200
    found = events(read_all(stream))
    assert found[-1] == "[DONE]"
    assert "".join(each["choices"][0]["delta"].get("content", "") for each in found[:-1]) == own
    server.thread.join(30)
    assert not server.thread.is_alive()


def test_what_still_runs_when_the_time_is_over_is_stopped_and_told(caplog: pytest.LogCaptureFixture) -> None:
    server = Server(drain=0.3)
    runner: Any = server.llm.engine.parts.runner
    forward = runner.forward

    def slow(*arguments: Any, **options: Any) -> Any:
        time.sleep(0.02)
        return forward(*arguments, **options)

    runner.forward = slow
    stream = server.send(CHAT, LONG | {"messages": WORDS, "speculate": False})
    whole = server.send(TEXT, {"prompt": "one", "max_tokens": 400, "ignore_eos": True, "speculate": False})
    wait_for(lambda: server.llm.stats.tokens > 3)
    server.server.drain()
    found = events(read_all(stream))
    assert found[-1]["error"]["code"] == "shutting_down"
    assert len(found) > 3
    assert read_all(whole).startswith(b"HTTP/1.1 503")
    server.thread.join(30)
    assert not server.thread.is_alive()
    assert [record.getMessage() for record in caplog.records if record.name == process.log.name] == [
        "stopping: what runs has 0.3 s to end; a second signal ends it at once",
        "what still runs is stopped",
    ]
    assert "failed" not in caplog.text, "to be stopped by whoever runs it is no fault"


def url_of(served: subprocess.Popen[str]) -> str:
    assert served.stderr is not None
    line = ""
    while "http://" not in line:
        line = served.stderr.readline()
        assert line, "it ended"
    return line[line.index("http://") :].split("/v1")[0].strip()


def test_sigterm_lets_streams_end_and_is_no_failure(tiny_folder: str) -> None:
    command = [sys.executable, "-m", "headstart", "serve", "-m", tiny_folder, "--draft", "none", "--port", "0"]
    served = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment())
    try:
        body = json.dumps(LONG | {"messages": WORDS, "max_tokens": 600}).encode()
        request = urllib.request.Request(url_of(served) + CHAT, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as stream:
            assert stream.readline().startswith(b"data: ")
            served.send_signal(signal.SIGTERM)
            rest = stream.read()
        assert rest.endswith(b"data: [DONE]\n\n")
        assert rest.count(b'"finish_reason":"length"') == 1
        assert served.wait(60) == 0
    finally:
        served.kill()
        served.communicate()


def test_a_second_signal_ends_it_at_once() -> None:
    code = """
import asyncio, socket, sys
import uvicorn
from headstart.server.process import Connection, Server

class Busy:  # something runs, and never ends
    stopping, idle, failure = False, False, None

async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await asyncio.sleep(3600)

listener = socket.create_server(("127.0.0.1", 0))
print(f"http://127.0.0.1:{listener.getsockname()[1]}", file=sys.stderr, flush=True)
config = uvicorn.Config(app, http=Connection, lifespan="off", log_level="error")
Server(config, Busy(), 3600).run(sockets=[listener])
"""
    for second in (signal.SIGTERM, signal.SIGINT):
        served = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, env=environment())
        try:
            host, port = url_of(served).removeprefix("http://").split(":")
            with socket.create_connection((host, int(port))) as connection:
                connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert connection.recv(8) == b"HTTP/1.1"  # from here on it hears signals
                served.send_signal(signal.SIGTERM)
                time.sleep(0.3)
                assert served.poll() is None, "it drains"
                served.send_signal(second)
                assert served.wait(10) == 128 + second
        finally:
            served.kill()
            served.communicate()
