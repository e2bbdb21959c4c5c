"""Who may ask a server, from where, and what is told and logged of it, over a real socket."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi")

from server_tools import WORDS, Server, ask

from headstart.cli.screen import show_log

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ROUTES = [
    ("POST", CHAT),
    ("POST", TEXT),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/tiny"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/version"),
    ("GET", "/metrics"),
    ("GET", "/openapi.json"),
    ("GET", "/nowhere"),
    ("GET", CHAT),
    ("GET", "/health/"),
    ("GET", "/ready/x"),
]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    found = Server()
    yield found
    found.settle()
    found.close()


@pytest.fixture(scope="module")
def closed() -> Iterator[Server]:
    """One that wants a key, and lets one page ask."""
    found = Server(
        api_key="schlüssel-ß", allowed_origins=["https://page.example"], allowed_hosts=["::1", "*.own.example"]
    )
    yield found
    found.close()


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_every_route_but_two_wants_the_key(closed: Server, method: str, path: str) -> None:
    host = ("Host", "[::1]:80")
    body = {} if method == "POST" else None
    for headers in (
        [host],
        [host, ("Authorization", "Bearer wrong")],
        [host, ("Authorization", "Bearer ")],
        [host, ("Authorization", "Basic schlüssel-ß".encode())],
        [host, ("Authorization", "schlüssel-ß".encode())],
        [host, ("Authorization", "Bearer schlüssel-ß-and-more".encode())],
        [host, ("Authorization", b"Bearer schl")],
        [host, ("X-API-Key", "schlüssel-ß".encode())],
    ):
        status, answered, said = ask(closed, method, path, body, headers)
        assert (status, said["error"]["code"]) == (401, "invalid_api_key")
        assert answered["WWW-Authenticate"] == "Bearer"
    for key in ("schlüssel-ß".encode(), "schlüssel-ß".encode("latin-1")):  # clients write it in two ways
        status, _, said = ask(closed, method, path, body, [host, ("Authorization", b"bearer " + key)])
        assert status != 401, said


def test_those_who_watch_need_no_key(closed: Server) -> None:
    for path in ("/health", "/ready"):
        assert ask(closed, "GET", path, headers=[("Host", "[::1]")])[0] == 200


def test_the_server_answers_to_its_own_names_only(server: Server, closed: Server) -> None:
    for host, status in (
        ("127.0.0.1", 200),
        ("127.0.0.1:12345", 200),
        ("LocalHost:80", 200),
        ("localhost.", 200),
        ("[::1]", 200),
        ("[::1]:8000", 200),
        ("evil.example", 400),
        ("127.0.0.1.evil.example", 400),
        ("localhost:80@evil.example", 400),
        ("[::1].evil.example", 400),
        ("[::1", 400),
        ("[::2]", 400),
        ("", 400),
        (":80", 400),
    ):
        found, _, said = ask(server, "GET", "/health", headers=[("Host", host)])
        assert found == status, host
        assert status == 200 or said["error"]["code"] == "host_not_allowed"
    for host, status in (("a.own.example:1", 200), ("own.example", 400), ("xown.example", 400), ("127.0.0.1", 400)):
        assert ask(closed, "GET", "/health", headers=[("Host", host)])[0] == status


def test_pages_from_elsewhere_may_not_ask_unless_told(server: Server, closed: Server) -> None:
    host = server.url.removeprefix("http://")
    body = {"prompt": "one", "max_tokens": 1}
    before = server.llm.stats.finished
    for origin in ("https://evil.example", "null", "http://127.0.0.1:1", f"http://{host}.evil.example"):
        status, headers, said = ask(server, "POST", TEXT, body, {"Origin": origin})
        assert (status, said["error"]["code"]) == (403, "origin_not_allowed")
        assert "Access-Control-Allow-Origin" not in headers
    assert server.llm.stats.finished == before, "nothing was computed for them"
    for origin in (f"http://{host}", f"https://{host}"):  # its own pages; something in front of it may have TLS
        assert ask(server, "POST", TEXT, body, {"Origin": origin})[0] == 200
    page = {"Host": "[::1]", "Origin": "https://page.example"}
    status, headers, _ = ask(closed, "GET", "/v1/models", headers=page)
    assert status == 401
    assert headers["Access-Control-Allow-Origin"] == "https://page.example", "it may read why"
    preflight = page | {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,x-stainless-os",
    }
    status, headers, _ = ask(closed, "OPTIONS", CHAT, headers=preflight)
    assert status == 200
    assert "authorization,x-stainless-os" in headers["Access-Control-Allow-Headers"].lower()


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("abc-123", "abc-123"),
        ("a\tb\x1b[31m c", "ab31mc"),
        ("x" * 5000, "x" * 128),
        ("schlüssel", "schlssel"),
        ("\u00ff\u00fe", None),
        ("", None),
        (None, None),
    ],
)
def test_request_ids_come_back_clean(server: Server, given: str | None, kept: str | None) -> None:
    headers = [] if given is None else [("X-Request-Id", given.encode("latin-1"))]
    for path in ("/version", "/nowhere"):
        try:
            _, answered, _ = ask(server, "GET", path, headers=headers)
        except ValueError:  # the client refuses to send it
            return
        if "X-Request-Id" not in answered:  # bytes that HTTP does not allow were refused before anybody looked
            assert given is not None
            assert "\x1b" in given
            continue
        found = answered["X-Request-Id"]
        assert found == kept if kept else re.fullmatch(r"req_[0-9a-f]{32}", found)


def test_a_fault_of_the_servers_is_told_by_its_id_and_logged_without_what_was_asked(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("planted")

    with monkeypatch.context() as patched, caplog.at_level(logging.DEBUG):
        patched.setattr(server.llm.codec, "encode", fails)
        status, headers, said = ask(server, "POST", "/tokenize", {"prompt": "my secret"}, {"X-Request-Id": "mine"})
    assert (status, said["error"]["type"]) == (500, "server_error")
    assert headers["X-Request-Id"] == "mine"
    assert "planted" not in said["error"]["message"]
    assert "request mine failed" in caplog.text
    assert "my secret" not in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO):
        server.post(CHAT, {"messages": [{"role": "user", "content": "my other secret"}], "max_tokens": 2})
        server.post(CHAT, {"messages": [{"role": "user", "content": "my other secret"}], "temperature": 99})
    assert "my other secret" not in caplog.text


def test_what_is_logged_cannot_steer_a_terminal_or_forge_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    before = logging.getLogger("headstart").level, logging.getLogger().level
    try:
        show_log(verbose=False)
        logging.getLogger("headstart").warning("it said %s", "x\x1b[2J\r\nerror: all is lost\x9b")
    finally:
        logging.getLogger("headstart").setLevel(before[0])
        logging.getLogger().setLevel(before[1])
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("warning: it said x")
    assert not any(set(line) & {"\x1b", "\r", "\x9b"} for line in lines)
    assert not any(line.startswith("error") for line in lines)


# -- the document


KINDS = {"object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "null": type(None)}


def fits(value: Any, schema: dict[str, Any], document: Any) -> bool:
    """Is it of the kind that a JSON schema says? As far as ours go."""
    if "$ref" in schema:
        return fits(value, document["components"]["schemas"][schema["$ref"].rpartition("/")[2]], document)
    if "anyOf" in schema:
        return any(fits(value, each, document) for each in schema["anyOf"])
    if not isinstance(value, KINDS[schema["type"]]) or value not in schema.get("enum", [value]):
        return False
    if isinstance(value, list):
        return all(fits(each, schema.get("items", {}), document) for each in value)
    if isinstance(value, dict):
        known = schema.get("properties", {})
        return set(schema.get("required", ())) <= set(value) and all(
            fits(each, known[name], document) for name, each in value.items() if name in known
        )
    return True


def test_the_openapi_document_says_what_is_answered(server: Server) -> None:
    status, document = server.get("/openapi.json")
    assert status == 200
    assert "422" not in json.dumps(document["paths"])

    def check(path: str, method: str, code: int, value: Any) -> None:
        found = document["paths"][path][method]["responses"][str(code)]["content"]["application/json"]["schema"]
        assert fits(value, found, document), (path, code, value)

    for form in ("ChatRequest", "CompletionRequest"):
        known = document["components"]["schemas"][form]["properties"]
        assert {"user", "store", "tools", "temperature"} <= set(known), "what is taken is in the document"
        assert known["store"] == {"enum": [None, False]}
    small = {"max_tokens": 2, "temperature": 0}
    for path, body in (
        (CHAT, {"messages": WORDS, "logprobs": True, "statistics": True} | small),
        (TEXT, {"prompt": "one", "n": 2, "logprobs": 1} | small),
        ("/tokenize", {"prompt": "one"}),
        ("/detokenize", {"tokens": [5]}),
    ):
        check(path, "post", 200, server.post(path, body)[1])
        check(path, "post", 400, server.post(path, body | {"wrong": 1})[1])
        check(path, "post", 404, server.post(path, body | {"model": "x"})[1])
    for path in ("/v1/models", "/version"):
        check(path, "get", 200, server.get(path)[1])
    check("/v1/models/{model}", "get", 200, server.get("/v1/models/tiny")[1])
    with pytest.raises(AssertionError):
        check(CHAT, "post", 200, {"error": {}})
