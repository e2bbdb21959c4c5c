"""Structured answers over real sockets when much goes on: many clients with shapes of their own, bad and slow shapes
among them, clients that leave and clients that are killed."""

from __future__ import annotations

import http.client
import json
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from socket import SO_LINGER, SOL_SOCKET
from time import monotonic, sleep
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("llguidance")

from server_tools import WORDS, Server, joined

from headstart.machine import compiling, grammar, mask_budget

CHAT = "/v1/chat/completions"


def shape(number: int) -> dict[str, Any]:
    """A form; each client's is another."""
    keys = [f"key_{number}", f"kind_{number}", "count"]
    values: list[Any] = [
        {"type": "string", "maxLength": 3},
        {"enum": ["alpha", "beta", f"gamma {number}"]},
        {"type": "integer", "minimum": number, "maximum": number + 40},
    ]
    fields = dict(zip(keys, values, strict=True))
    return {"type": "object", "properties": fields, "required": keys, "additionalProperties": False}


def fits(text: str, number: int) -> bool:
    found = json.loads(text)
    key, kind, count = found.values()
    right = len(key) <= 3 and kind in ("alpha", "beta", f"gamma {number}") and number <= count <= number + 40
    return list(found) == list(shape(number)["properties"]) and right


def body(number: int, **more: Any) -> dict[str, Any]:
    wanted = {"type": "json_schema", "json_schema": {"name": "form", "schema": shape(number)}}
    drawn = {"temperature": 0} if number % 2 else {"temperature": 1, "seed": number}
    return {"messages": WORDS, "max_tokens": 120, "response_format": wanted, **drawn, **more}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    found = Server(llm={"max_rows": 8})
    yield found
    found.close()


@pytest.fixture(scope="module")
def alone(server: Server) -> list[str]:
    """Each client's answer when nobody else is there and nothing is drafted."""
    found = []
    for number in range(8):
        status, said = server.post(CHAT, body(number, speculate=False))
        assert status == 200, said
        found.append(said["choices"][0]["message"]["content"])
        assert fits(found[-1], number)
    return found


def test_eight_clients_each_with_a_shape_of_its_own(server: Server, alone: list[str]) -> None:
    """vLLM's PR 44993: eight of them together, drafted, gave corrupt JSON."""
    drafted = server.llm.stats.drafted
    with ThreadPoolExecutor(8) as clients:
        with server.held():  # until all of them are there
            asked = [clients.submit(server.post, CHAT, body(number, stream=True)) for number in range(8)]
            end = monotonic() + 20
            while len(server.llm.engine._handles) < 8 and monotonic() < end:
                sleep(0.005)
        texts = [joined(each.result()[1])[0]["message"]["content"] for each in asked]
    assert texts == alone
    assert server.llm.stats.drafted > drafted + 100


def test_everything_else_a_request_can_ask_for(server: Server) -> None:
    """Each with what is drafted and without: the same answers, all of them of the shape."""
    for number, more in enumerate(
        (
            {"n": 3, "seed": 1, "temperature": 1},
            {"logprobs": True, "top_logprobs": 2},
            {"presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
            {"min_tokens": 119, "top_p": 0.9, "min_p": 0.01, "top_k": 50},
            {"verification": "coupled", "seed": 4, "temperature": 1.3},
            {"logit_bias": {"5": 3.0}, "temperature": 0},
        )
    ):
        found = []
        for speculate in (True, False):
            status, said = server.post(CHAT, body(number, speculate=speculate) | more)
            assert status == 200, said
            found.append([choice["message"]["content"] for choice in said["choices"]])
        assert found[0] == found[1], more
        assert all(fits(text, number) for text in found[0]), more
    for rule in ("token", "block"):
        _, said = server.post(CHAT, body(0, verification=rule, n=4) | {"seed": None})
        assert all(fits(choice["message"]["content"], 0) for choice in said["choices"]), rule
    _, said = server.post(CHAT, body(1, stop=['", "']))
    assert said["choices"][0]["message"]["content"].startswith('{"key_1": "')
    assert '", "' not in said["choices"][0]["message"]["content"]
    assert said["choices"][0]["finish_reason"] == "stop"


BAD: dict[str, tuple[Any, str]] = {
    "contradictory": ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum (5) is greater than maximum (3)"),
    "refers to itself": ({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "refers to itself"),
    "cannot end": (
        {"$defs": {"a": {"type": "object", "properties": {"b": {"$ref": "#/$defs/a"}}, "required": ["b"]}}}
        | {"$ref": "#/$defs/a"},
        "",
    ),
    "unknown word": ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    "look-ahead": ({"type": "string", "pattern": "^(?!a)"}, "look-around"),
    "huge": ({"enum": ["x" * 60 + str(i) for i in range(9000)]}, "is at most 262144 characters"),
    "elsewhere": ({"$ref": "http://example.com/schema"}, "example.com"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_shapes_are_refused_with_the_reason(server: Server, kind: str) -> None:
    schema, why = BAD[kind]
    wanted = {"type": "json_schema", "json_schema": {"name": "bad", "schema": schema}}
    status, said = server.post(CHAT, body(0) | {"response_format": wanted})
    assert status == 400, said
    assert said["error"]["param"] == "response_format.json_schema.schema"
    assert why in said["error"]["message"]
    assert len(said["error"]["message"]) < 500


def test_a_shape_that_takes_long_keeps_nobody_waiting(
    server: Server, alone: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    go, begun, source = threading.Event(), threading.Semaphore(0), grammar._source_of

    def slow(asked: Any) -> str:
        if "slow" in str(asked.regex):
            begun.release()
            assert go.wait(60)
        return source(asked)

    monkeypatch.setattr(grammar, "_source_of", slow)
    monkeypatch.setattr(server.llm._grammars, "_deadline", 0.3)
    with ThreadPoolExecutor(8) as clients:
        late = [clients.submit(server.post, CHAT, body(0) | _regex(f"slow {i}")) for i in range(compiling.EACH - 1)]
        for _ in late:
            assert begun.acquire(timeout=20)
        new = server.post(CHAT, body(9))  # compiles while the others do
        assert new[0] == 200
        assert fits(new[1]["choices"][0]["message"]["content"], 9)
        for number in range(4):
            assert server.post(CHAT, body(number))[1]["choices"][0]["message"]["content"] == alone[number]
        for each in late:
            status, said = each.result()
            assert (status, said["error"]["param"]) == (400, "structured_outputs.regex")
            assert "takes more than 0.3 s to compile: make it smaller" in said["error"]["message"]
        go.set()
    monkeypatch.undo()
    end = monotonic() + 20
    while server.llm._grammars._running and monotonic() < end:
        sleep(0.005)
    assert server.post(CHAT, body(0) | _regex("slow 1"))[0] == 200  # it was compiled all the same, and is kept


def test_a_client_whose_shapes_take_long_keeps_only_itself_waiting(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty of them at once, from one address; another address gets its own, which is new, at once."""
    go, source, begun = threading.Event(), grammar._source_of, threading.Semaphore(0)

    def slow(asked: Any) -> str:
        if "slow" in str(asked.regex):
            begun.release()
            assert go.wait(60)
        return source(asked)

    monkeypatch.setattr(grammar, "_source_of", slow)
    monkeypatch.setattr(server.llm._grammars, "_deadline", 30.0)
    with ThreadPoolExecutor(20) as clients:
        late = [clients.submit(server.post, CHAT, body(0) | _regex(f"slow [{i}]+a")) for i in range(20)]
        for _ in range(compiling.EACH):
            assert begun.acquire(timeout=20)
        other = http.client.HTTPConnection(
            server.url.removeprefix("http://"), timeout=20, source_address=("127.0.0.2", 0)
        )
        other.request("POST", CHAT, json.dumps(body(11)), {"Content-Type": "application/json"})
        said = json.loads(other.getresponse().read())
        other.close()
        assert fits(said["choices"][0]["message"]["content"], 11)
        status, text = server.get("/health")  # nor does anything else wait
        assert (status, text) == (200, "ok")
        assert server.post("/tokenize", {"prompt": "abc"})[0] == 200
        assert not any(each.done() for each in late)
        go.set()
        assert {each.result()[0] for each in late} == {200}


def _regex(text: str) -> dict[str, Any]:
    return {"response_format": None, "structured_outputs": {"regex": text}}


def test_clients_that_leave_and_clients_that_are_killed(server: Server, alone: list[str]) -> None:
    """Some go away in the middle of a stream, some without a word; others get what they would alone."""
    with ThreadPoolExecutor(8) as clients:
        for _ in range(2):
            asked = [clients.submit(server.post, CHAT, body(number)) for number in range(4)]
            gone = [server.send(CHAT, body(number, stream=True, max_tokens=100)) for number in range(4, 8)]
            gone.append(server.send(CHAT, {"messages": WORDS, "response_format": {"type": "json_object"}}))
            for number, each in enumerate(gone):
                if number % 2:
                    each.recv(400)
                if number > 2:
                    each.setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))  # a reset, as of a killed process
                each.close()
            for number, each in enumerate(asked):
                status, said = each.result()
                assert status == 200, said
                assert said["choices"][0]["message"]["content"] == alone[number]
    server.settle()
    assert server.llm.stats.failed == 0


def test_a_shape_that_takes_long_to_follow_ends_alone(
    server: Server, alone: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It compiles at once; then each token takes longer than the one before."""
    monkeypatch.setattr(mask_budget, "A_TOKEN", 1e-6)
    monkeypatch.setattr(mask_budget, "MOST", 0.2)
    slow = {"prompt": "a", "max_tokens": 150, "min_tokens": 150, "n": 2, "temperature": 0}
    slow |= {"structured_outputs": {"grammar": 'start: a\na: a a | a a a | "a" | "b" | ""'}}
    with ThreadPoolExecutor(6) as clients:
        late = clients.submit(server.post, "/v1/completions", slow)
        fast = [clients.submit(server.post, CHAT, body(number)) for number in range(4)]
        assert [each.result()[1]["choices"][0]["message"]["content"] for each in fast] == alone[:4]
        status, said = late.result()
    assert (status, said["error"]["code"]) == (400, "generation_failed")
    assert said["error"]["param"] == "structured_outputs.grammar"
    assert "of computing for each token: make it simpler, or less ambiguous" in said["error"]["message"]
    assert server.llm.engine.idle
    status, said = server.post("/v1/completions", slow)  # nobody else gets as far
    assert (status, said["error"]["param"]) == (400, "structured_outputs.grammar")
    assert "of computing for each token: make it simpler" in said["error"]["message"]


def test_a_shape_that_cannot_be_followed_is_the_clients(server: Server, alone: list[str]) -> None:
    """The model has no token for a euro sign, which is found out in the middle of an answer: no use asking again."""
    failed = server.llm.stats.failed
    bad = body(0) | {"response_format": None, "structured_outputs": {"regex": "abc[a-z](d€|dé)"}, "temperature": 0}
    with ThreadPoolExecutor(8) as clients:
        whole, stream = (clients.submit(server.post, CHAT, bad | {"stream": each}) for each in (False, True))
        fast = [clients.submit(server.post, CHAT, body(number)) for number in range(4)]
        assert [each.result()[1]["choices"][0]["message"]["content"] for each in fast] == alone[:4]
        status, said = whole.result()
        assert (status, said["error"]["param"]) == (400, "structured_outputs.regex")
        assert "has no token for what it wants" in said["error"]["message"]
        status, text = stream.result()
        events = [json.loads(each.removeprefix("data: ")) for each in text.split("\n\n") if each]
        assert (status, events[-1]) == (200, said)  # and no [DONE]
        assert "".join(each["choices"][0]["delta"].get("content", "") for each in events[:-1]).startswith("abc")
    server.settle()
    assert server.llm.stats.failed == failed + 2
