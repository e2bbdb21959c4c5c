"""The rows of faults.md that concern a server, over a real socket: what is sent, and the life of a request.

Who asks, and from where, is in test_server_trust.py. What happens on the wire and to the process (slow readers,
signals, a dead engine) is in test_server_wire.py, many clients at once in test_server_load.py, speculation on and off
in test_server_equal.py.
"""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi")

from server_tools import SIZES, WORDS, Server, ask

from headstart import LLM, AsyncLLM, SamplingParams
from headstart.drafters.prediction import MAX_PREDICTION
from headstart.server.calls import Calls
from headstart.server.guard import MAX_HEADER_BYTES, MAX_HEADERS
from headstart.server.reading import MAX_DEPTH, parsed
from headstart.server.schemas import CompletionRequest
from headstart.testing import tiny_model, tiny_tokenizer

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    found = Server(max_body=100_000)
    yield found
    found.settle()
    found.close()


# -- input


@pytest.mark.parametrize("announced", [True, False])
def test_a_body_that_is_too_large(server: Server, announced: bool) -> None:
    """With a length and without one: in chunks, of which nobody knows how many come."""
    body = json.dumps({"prompt": "x" * 150_000}).encode()
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=30)
    try:
        if announced:
            connection.request("POST", TEXT, body, JSON)
        else:
            pieces = (body[at : at + 10_000] for at in range(0, len(body), 10_000))
            connection.request("POST", TEXT, pieces, JSON, encode_chunked=True)
        answer = connection.getresponse()
        said = json.loads(answer.read())
    finally:
        connection.close()
    assert answer.status == 413
    assert said["error"]["code"] == "body_too_large"
    assert "100000 bytes" in said["error"]["message"]
    assert server.post(TEXT, {"prompt": "x" * 300, "max_tokens": 1})[0] == 200


def test_json_that_is_none_or_nested_too_deep(server: Server) -> None:
    deep = "[" * 40_000 + "]" * 40_000
    for body in (
        b"{",
        b"\xff\xfe{}",
        b'{"prompt": "one", "max_tokens": NaN}',
        b'{"prompt": "one", "max_tokens": 1, "max_tokens": 3}',
        b'{"prompt": "one", "seed": ' + b"9" * 5000 + b"}",
        b"[" * 90_000,
        f'{{"prompt": {deep}}}'.encode(),
        f'{{"prompt": "one", "metadata": {"[" * 40}{"]" * 40}}}'.encode(),
        f'{{"prompt": "one", "tools": {"[" * 900}{"]" * 900}}}'.encode(),
        b'{"prompt": "one", "tools": ' + b'{"a":' * 900 + b"1" + b"}" * 900 + b"}",
    ):
        status, _, said = ask(server, "POST", TEXT, body)
        assert status == 400, said
        assert "not JSON" in said["error"]["message"]
    for content in ("text/plain", "application/x-www-form-urlencoded"):  # what a page may send without being asked
        status, said = server.post(TEXT, {"prompt": "one"}, **{"Content-Type": content})
        assert status == 400, said
    assert parsed(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH)
    with pytest.raises(ValueError, match="nested more than"):
        parsed(b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1))
    assert parsed(json.dumps({"prompt": "[" * 500}).encode())
    with pytest.raises(ValueError, match="more than 1048576 values"):
        parsed(b'{"metadata": [' + b"[]," * 2**21 + b"[]]}")
    assert parsed(json.dumps({"prompt": '\\",' * 2**21}).encode()), "a text of commas is one value"


def test_more_prompts_than_may_wait_are_refused_before_any_is_read() -> None:
    few = Server(llm={"max_waiting": 4, "max_rows": 2})
    try:
        status, said = few.post(TEXT, {"prompt": ["one"] * 6, "max_tokens": 1})
        assert (status, said["error"]["param"]) == (400, "prompt")
        assert few.llm.stats.finished == 0
        assert few.post(TEXT, {"prompt": ["one"] * 4, "max_tokens": 1})[0] == 200
        assert few.post(TEXT, {"prompt": "one", "n": 6, "max_tokens": 1})[0] == 200
        status, said = few.post("/tokenize", {"prompt": "one two " * 100_000})
        assert (status, said["error"]["code"]) == (400, "context_length_exceeded")
    finally:
        few.close()


def test_headers_that_are_too_many_or_too_large(server: Server) -> None:
    for headers in (
        [(f"X-{i}", "1") for i in range(MAX_HEADERS + 1)],
        [("X-Long", "x" * MAX_HEADER_BYTES)],
    ):
        status, _, said = ask(server, "GET", "/v1/models", headers=headers)
        assert (status, said["error"]["code"]) == (431, "headers_too_large")
    assert ask(server, "GET", "/v1/models", headers=[("X-Long", "x" * (MAX_HEADER_BYTES // 2))])[0] == 200
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=30)
    try:
        connection.request("GET", "/v1/models", headers={"X-Huge": "x" * 1_000_000})
        status = connection.getresponse().status
    except (BrokenPipeError, ConnectionResetError):
        status = 400  # it was cut while it was still talking
    finally:
        connection.close()
    assert status in (400, 431)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"n": 1000}, "n"),
        ({"n": 0}, "n"),
        ({"best_of": 1000}, "best_of"),
        ({"stop": ["x"] * 1000}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"seed": 2**64}, "seed"),
        ({"seed": -(2**63) - 1}, "seed"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"logprobs": 10_000}, "logprobs"),
        ({"logit_bias": {"1000000": 1}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"stop_token_ids": [1_000_000]}, "stop_token_ids"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["one"] * 65}, "prompt"),
        ({"prompt": [5] * 600}, "prompt"),
        ({"prompt": [10**9]}, "prompt"),
        ({"prompt": [10**30], "echo": True}, "prompt"),
        ({"prompt": [-1], "echo": True}, "prompt"),
        ({"prompt": "half a character: \ud800"}, "prompt"),
        ({"max_tokens": 10_000}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"chat_template_kwargs": {}}, "chat_template_kwargs"),
        ({"structural_tag": {}}, "structural_tag"),
        ({"stop": "half a character: \ud800"}, "stop"),
        ({"stop_token_ids": [1] * 20_000}, "stop_token_ids"),
        ({"logit_bias": {"07": 1}}, "logit_bias"),
        ({"temperature": True}, "temperature"),
        ({"store": 0}, "store"),
        ({"origins": True}, "origins"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
    ],
)
def test_what_cannot_be_met_is_a_400_that_names_the_field(server: Server, body: Any, field: str) -> None:
    status, said = server.post(TEXT, {"prompt": "one", "max_tokens": 2} | body)
    assert status == 400, said
    assert said["error"]["param"] == field
    assert said["error"]["type"] == "invalid_request_error"
    assert field in said["error"]["message"]


def test_only_the_one_model_exists(server: Server) -> None:
    for name in ("other", "../tiny", "/etc/passwd", "tiny/../tiny", "\x00", ""):
        status, said = server.post(TEXT, {"prompt": "one", "model": name})
        assert (status, said["error"]["code"]) == (404, "model_not_found")
    for path in ("/v1/models/..%2f..%2fetc%2fpasswd", "/v1/models/x"):
        assert server.get(path)[0] == 404
    for path in (
        "/v1/load_lora_adapter",
        "/v1/responses",
        "/v1/embeddings",
        "/reset_prefix_cache",
        "/docs",
        "/v1/files",
    ):
        status, said = server.post(path, {})
        assert (status, said["error"]["code"]) == (404, "not_found")
        assert path in said["error"]["message"]


def test_special_tokens_in_user_text_are_text(server: Server) -> None:
    """In messages, that is; a raw prompt is its writer's own, who may mean them."""
    tokenizer = server.llm.tokenizer
    assert tokenizer is not None
    for name in filter(None, (tokenizer.eos_token, tokenizer.bos_token)):
        control = tokenizer.convert_tokens_to_ids(name)
        found = server.post("/tokenize", {"messages": [{"role": "user", "content": f"one {name}"}]})[1]["tokens"]
        assert control not in found[1:], f"{name} is a control token"


def test_a_long_whole_answer_to_several_prompts_is_not_cut_as_if_nobody_read_it() -> None:
    """They are read one after the other, so that more pieces wait than a stream's reader may leave."""
    target = tiny_model("llama", max_position_embeddings=1400, **SIZES)
    options = {"max_rows": 2, "max_model_len": 1400, "check": False, "quantization": "int8"}
    llm = LLM(target, None, tokenizer=tiny_tokenizer(), **options)

    async def main() -> Any:
        async with AsyncLLM(llm) as served:
            body = {"prompt": [[5, 6], [7, 8]], "max_tokens": 1100, "ignore_eos": True, "temperature": 0}
            call = Calls(llm, "tiny").complete(CompletionRequest.model_validate(body))
            return await call.whole(await call.submit(served))

    found = asyncio.run(main())
    assert [choice["finish_reason"] for choice in found["choices"]] == ["length", "length"]


# -- the life of a request


def test_a_huge_or_hostile_prediction_changes_nothing(server: Server) -> None:
    body = {"prompt": "one two one two", "max_tokens": 12, "temperature": 0}
    plain = server.post(TEXT, body | {"speculate": False})[1]["choices"]
    for text in ("one " * 20_000, "\u202e\x1b[2J\x00" * 50, "<s>" * 500):
        status, said = server.post(TEXT, body | {"prediction": {"type": "content", "content": text}})
        assert status == 200, said
        assert said["choices"] == plain


def test_no_more_of_a_prediction_is_tokenized_than_is_looked_at(server: Server) -> None:
    """Megabytes of it took a minute of a tokenizer's thread, of which there are four."""
    codec, read = server.llm.codec, list[int]()
    encode = codec.encode_prediction
    codec.encode_prediction = lambda text: read.append(len(text)) or encode(text[:1000])  # type: ignore[method-assign]
    try:
        server.llm.request("one", prediction="one two " * 1_000_000)
    finally:
        del codec.encode_prediction  # type: ignore[method-assign]
    assert read[0] <= 16 * MAX_PREDICTION
    assert len(server.llm.request("one", prediction="x" * 40_000).prediction) == MAX_PREDICTION


def test_a_stop_string_beats_the_cap_and_everything_is_trimmed_together(server: Server) -> None:
    body = {"prompt": "one two one two", "max_tokens": 12, "temperature": 0, "logprobs": 1, "ignore_eos": True}
    whole = server.post(TEXT, body)[1]["choices"][0]["text"]
    last = whole[-2:]
    status, said = server.post(TEXT, body | {"stop": [last]})
    assert status == 200
    choice = said["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["text"] == whole[: whole.index(last)]
    assert len(choice["logprobs"]["tokens"]) <= said["usage"]["completion_tokens"] <= 12
    plain = server.post(TEXT, body | {"stop": [last], "speculate": False})[1]
    assert plain["choices"] == said["choices"]


def test_one_of_two_equal_requests_leaves(server: Server) -> None:
    body = {"prompt": "one two", "max_tokens": 60, "temperature": 1.0, "seed": 3, "ignore_eos": True}
    own = server.post(TEXT, body)[1]["choices"]
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=30)
    connection.request("POST", TEXT, json.dumps(body | {"stream": True, "max_tokens": 400}), JSON)
    connection.getresponse().read(30)
    other = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=30)
    other.request("POST", TEXT, json.dumps(body), JSON)
    connection.close()
    try:
        assert json.loads(other.getresponse().read())["choices"] == own
    finally:
        other.close()
    server.settle()


def test_a_request_with_everything_is_the_same_with_and_without_speculation(server: Server) -> None:
    body = {
        "messages": WORDS, "max_tokens": 10, "temperature": 0.9, "seed": 7, "top_p": 0.95, "top_k": 50, "min_p": 0.01,
        "presence_penalty": 0.3, "frequency_penalty": 0.2, "repetition_penalty": 1.1, "logit_bias": {"7": 1.5}, "n": 2,
        "logprobs": True, "top_logprobs": 2, "min_tokens": 2, "stop": ["zzz"], 
        "prediction": {"type": "content", "content": "one two"},
    }  # fmt: skip
    found = [server.post(CHAT, body | {"speculate": on}) for on in (True, False)]
    assert [status for status, _ in found] == [200, 200], found
    assert found[0][1]["choices"] == found[1][1]["choices"]
    assert server.llm.generate("one", SamplingParams(max_tokens=1)).token_ids
