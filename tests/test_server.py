"""The server over a real socket, by OpenAI's own client and by raw HTTP."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi")
openai = pytest.importorskip("openai")

from server_tools import WORDS, Server  # noqa: E402
from tool_templates import TOOLS  # noqa: E402

from headstart import InvalidParameter, SamplingParams  # noqa: E402
from headstart.cli.serve import bound  # noqa: E402


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    found = Server()
    yield found
    assert found.llm.engine.idle
    found.close()


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Any]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as found:
        yield found


def test_the_openai_client_chats(server: Server, client: Any) -> None:
    answer = client.chat.completions.create(model="tiny", messages=WORDS, max_tokens=12, temperature=0, seed=1)
    own = server.llm.chat(WORDS, SamplingParams(temperature=0, max_tokens=12))
    assert answer.choices[0].message.content == own.text
    assert answer.choices[0].finish_reason == own.finish_reason
    assert answer.usage.completion_tokens == len(own.token_ids)
    assert answer.usage.prompt_tokens == len(own.prompt_token_ids)


def test_a_stream_is_the_whole_answer(client: Any) -> None:
    ask: dict[str, Any] = {"model": "tiny", "messages": WORDS, "max_tokens": 24, "temperature": 0.9, "seed": 5, "n": 2}
    ask |= {"logprobs": True, "top_logprobs": 2, "extra_body": {"ignore_eos": True}}
    whole = client.chat.completions.create(**ask)
    texts, logprobs, ends, usage = {0: "", 1: ""}, {0: [], 1: []}, {}, None
    for chunk in client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            logprobs[choice.index] += choice.logprobs.content if choice.logprobs else []
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
    for choice in whole.choices:
        assert texts[choice.index] == choice.message.content
        assert logprobs[choice.index] == choice.logprobs.content
        assert ends[choice.index] == choice.finish_reason
        assert len(choice.logprobs.content) == 24
    assert usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens == 48


def test_answers_do_not_change_when_speculation_is_off(server: Server) -> None:
    for path, asked in (
        ("/v1/chat/completions", {"messages": WORDS, "logprobs": True, "top_logprobs": 3}),
        ("/v1/completions", {"prompt": ["one two one two", [5, 6, 5, 6]], "logprobs": 2, "n": 2}),
    ):
        for how in ({"temperature": 0}, {"temperature": 1.2, "seed": 3, "top_p": 0.9, "logit_bias": {"7": 2}}):
            found = [
                server.post(path, {"max_tokens": 20, "ignore_eos": True, "speculate": on} | asked | how)
                for on in (True, False)
            ]
            assert [status for status, _ in found] == [200, 200], found
            assert found[0][1]["choices"] == found[1][1]["choices"]


def test_completions_of_several_prompts(server: Server, client: Any) -> None:
    answer = client.completions.create(model="tiny", prompt=["one", "two three"], max_tokens=6, temperature=0, n=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert (
        answer.choices[0].text
        == answer.choices[1].text
        == server.llm.generate("one", SamplingParams(temperature=0, max_tokens=6)).text
    )
    chunks = list(
        client.completions.create(
            model="tiny", prompt=["one", "two three"], max_tokens=6, temperature=0, n=2, stream=True
        )
    )
    texts = dict.fromkeys(range(4), "")
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert list(texts.values()) == [choice.text for choice in answer.choices]


@pytest.mark.parametrize(
    ("body", "field", "words"),
    [
        ({"messages": WORDS, "temperatur": 1}, "temperatur", "not a field"),
        ({"messages": WORDS, "temperature": 1000}, "temperature", "between"),
        ({"messages": WORDS, "temperature": "hot"}, "temperature", "number"),
        ({"messages": WORDS, "max_tokens": 0}, "max_tokens", "at least 1"),
        ({"messages": WORDS, "n": 1000}, "n", "at most 64"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role", "must be 'system'"),
        ({"messages": WORDS, "tools": [{"type": "function"}]}, "tools.0.function", "is required"),
        ({"messages": WORDS, "tools": TOOLS}, "tools", "no place for tools"),
        ({"messages": WORDS, "tools": {}}, "tools", "must be a list of objects such as"),
        ({"messages": WORDS, "tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"messages": WORDS, "tool_choice": "any"}, "tool_choice", '"required", or an object such as'),
        (
            {"messages": WORDS, "response_format": {"type": "xml"}},
            "response_format.type",
            "must be 'text', 'json_object'",
        ),
        ({"messages": WORDS, "store": True}, "store", "only false is supported"),
        ({"messages": WORDS, "top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        ({"messages": WORDS, "stream_options": {"include_usage": True}}, "stream_options", "streams"),
        ({"messages": WORDS, "logit_bias": {"x": 1}}, "logit_bias", "token ids"),
        ({"messages": WORDS, "max_tokens": 100000}, "max_tokens", "max_model_len"),
        ({"messages": WORDS, "min_tokens": 2, "stop_token_ids": [*range(112)]}, "min_tokens", "stop_token_ids"),
        ({"messages": [{"role": "user", "content": "a" * 2**20}]}, "messages", "tokens or more"),
        ({"messages": [{"role": "user", "content": "a b " * 300}]}, "messages", "messages: the prompt has"),
        ({}, "messages", "required"),
    ],
)
def test_wrong_fields_are_named(server: Server, body: Any, field: str, words: str) -> None:
    status, said = server.post("/v1/chat/completions", body)
    assert status == 400, said
    assert said["error"]["param"] == field
    assert words in said["error"]["message"]
    assert said["error"]["type"] == "invalid_request_error"


def test_null_is_absent_and_what_clients_send_is_taken(server: Server) -> None:
    harmless = {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "tools": None}
    nothing = {
        "temperature": None,
        "stop": None,
        "logit_bias": None,
        "stream": None,
        "response_format": {"type": "text"},
    }
    of_vllm = {
        "use_beam_search": False,
        "add_generation_prompt": True,
        "length_penalty": 1.0,
        "priority": 0,
        "detokenize": True,
        "documents": [],
        "echo": False,
        "chat_template_kwargs": {},
    }
    asked = {"messages": WORDS, "max_tokens": 3} | harmless | nothing | of_vllm
    status, said = server.post("/v1/chat/completions", asked)
    assert status == 200, said
    status, said = server.post("/v1/chat/completions", {"messages": WORDS, "use_beam_search": True})
    assert (status, said["error"]["message"]) == (400, "use_beam_search: only false is supported; leave it out")


def test_other_faults(server: Server) -> None:
    for body, status in ((b"{", 400), (b"[" * 100_000, 400), (b"\xff", 400), (b"", 400)):
        found, said = server.post("/v1/chat/completions", body)
        assert found == status, said
        assert said["error"]["message"]
    assert server.get("/v1/responses")[0] == 404
    assert server.get("/v1/chat/completions")[0] == 405
    assert (
        server.post("/v1/chat/completions", {"messages": WORDS, "model": "other"})[1]["error"]["code"]
        == "model_not_found"
    )
    assert server.get("/v1/models", Host="evil.example")[0] == 400


def test_tokens_and_models(server: Server, client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    assert time.time() - 3600 < client.models.retrieve("tiny").created <= time.time(), "when it was loaded"
    found = server.post("/tokenize", {"prompt": "one two"})[1]["tokens"]
    assert found == server.llm.codec.encode("one two")
    assert server.post("/tokenize", {"messages": WORDS})[1]["tokens"] == server.llm.codec.encode_chat(WORDS)
    assert "one two" in server.post("/detokenize", {"tokens": found})[1]["prompt"]
    chat = [*server.llm.codec.encode_chat([{"role": "user", "content": "a"}]), server.llm.tokenizer.eos_token_id]
    spelt = server.post("/detokenize", {"tokens": chat})[1]["prompt"]
    assert spelt.endswith(server.llm.tokenizer.eos_token), "control tokens are shown"
    assert server.post("/detokenize", {"tokens": [10**6]})[0] == 400
    assert server.get("/health") == (200, "ok")
    assert server.get("/ready") == (200, "ready")
    assert server.get("/version")[0] == 200


def test_metrics_have_vllms_names(server: Server) -> None:
    server.post("/v1/completions", {"prompt": "one two one two one", "max_tokens": 8})
    status, text = server.get("/metrics")
    assert status == 200
    for name in (
        "spec_decode_num_drafts_total",
        "num_requests_running",
        "generation_tokens_total",
        "request_success_total",
    ):
        assert f"vllm:{name}" in text, name
    assert "vllm:time_to_first_token_seconds_count" in text


def test_a_client_that_leaves_frees_its_row(server: Server) -> None:
    body = {"messages": WORDS, "max_tokens": 400, "ignore_eos": True, "stream": True}

    async def leaves() -> None:
        host, port = server.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        data = json.dumps(body).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        writer.write((head + f"Content-Length: {len(data)}\r\n\r\n").encode() + data)
        await reader.readuntil(b"data: ")
        writer.close()

    async def many() -> None:
        await asyncio.gather(*(leaves() for _ in range(6)))

    before = server.llm.stats.aborted
    asyncio.run(many())
    deadline = time.monotonic() + 30
    while not server.llm.engine.idle and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.llm.engine.idle
    assert server.llm.stats.aborted > before


def test_a_port_that_is_taken_is_told_before_a_model_is_loaded() -> None:
    with bound("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InvalidParameter, match=f"port {port} of 127.0.0.1 cannot be listened on"):
            bound("127.0.0.1", port)
    with pytest.raises(InvalidParameter, match="port must be 0 to 65535"):
        bound("127.0.0.1", 70000)
    with pytest.raises(InvalidParameter, match="cannot be listened on"):
        bound("no such host", 0)


def test_a_key_is_asked_for_and_large_bodies_are_refused() -> None:
    server = Server(api_key="sesame", max_body=2000)
    try:
        assert server.get("/v1/models")[0] == 401
        assert server.get("/v1/models", Authorization="Bearer wrong")[0] == 401
        assert server.get("/v1/models", Authorization="Bearer sesame")[0] == 200
        assert server.get("/health")[0] == 200
        status, said = server.post("/v1/completions", {"prompt": "x" * 5000}, Authorization="Bearer sesame")
        assert (status, said["error"]["code"]) == (413, "body_too_large")
    finally:
        server.close()
    assert server.llm.engine.idle
