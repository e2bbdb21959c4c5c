"""Long bodies: read in a thread, while others are answered, and refused in the words of short ones."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("fastapi")

from server_tools import Server

from headstart.server import reading

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PADDING = {"metadata": {"padding": "x" * reading.LONG}}  # what a body says is no other, but it is long


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    found = Server()
    yield found
    found.close()


@pytest.mark.parametrize(
    ("path", "wrong", "said"),
    [
        (TEXT, {"prompt": "one", "temprature": 1}, "temprature: is not a field that this server knows; did you mean"),
        (TEXT, {"prompt": "one", "stream_options": {}}, "stream_options: is only for streams"),
        (TEXT, {"prompt": {"a": 1}}, "prompt: must be text, token ids"),
        (TEXT, {"prompt": "one", "n": 65}, "n: must be at most 64"),
        (TEXT, {"prompt": "one", "temperature": True}, "temperature: must be a number"),
        (CHAT, {"messages": [{"role": "nobody", "content": "a"}]}, "messages.0.role: "),
    ],
)
def test_long_bodies_are_refused_in_the_same_words(server: Server, path: str, wrong: dict[str, Any], said: str) -> None:
    short, long = server.post(path, wrong), server.post(path, wrong | PADDING)
    assert short == long
    assert short[0] == 400
    assert short[1]["error"]["message"].startswith(said)


def test_a_long_body_is_read_while_others_are_answered(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go, right = threading.Event(), threading.Event(), reading.parsed

    def slow(text: bytes) -> Any:
        if len(text) >= reading.LONG:
            begun.set()
            assert go.wait(60)
        return right(text)

    monkeypatch.setattr(reading, "parsed", slow)
    asked = {"prompt": "one two", "max_tokens": 4, "temperature": 0}
    with ThreadPoolExecutor(1) as client:
        long = client.submit(server.post, TEXT, asked | PADDING)
        assert begun.wait(20)
        short = server.post(TEXT, asked)
        assert not long.done()
        go.set()
        assert long.result()[1]["choices"] == short[1]["choices"]


def test_values_are_counted_outside_of_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MAX_VALUES", 3)
    monkeypatch.setattr(reading, "MAX_TEXTS", 4)
    for text in ('["a,,,,,", "\\",,,,\\\\", 1]', '["\\"\\"\\"\\"\\"", {"a": "b"}]'):
        assert reading.parsed(text.encode()) == json.loads(text)
    for text in ("[1, 2, 3, 4]", '[",", 2, 3, 4]', '[1, 2, "\\\\", ","]'):
        with pytest.raises(ValueError, match="more than 3 values"):
            reading.parsed(text.encode())
    with pytest.raises(ValueError, match="more than 4 texts and names"):
        reading.parsed(b'{"a": {"a": {"a": {"a": {"a": 1}}}}}')


def test_a_text_that_is_not_closed_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MAX_VALUES", 3)
    for end in (b"", b"\\"):
        with pytest.raises(ValueError, match="unterminated string"):
            reading.parsed(b'["' + b'\\",' * 300_000 + end)  # an hour, were each quote tried anew
