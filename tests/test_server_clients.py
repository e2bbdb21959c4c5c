"""Clients that were not written for us, unchanged, over a real socket: ``openai``, the ``llm`` command, ``curl``."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
openai = pytest.importorskip("openai")

from server_tools import WORDS, Server  # noqa: E402

from headstart import SamplingParams  # noqa: E402

KEY = "sesame"
GREEDY = SamplingParams(temperature=0, max_tokens=10)
ASK: dict[str, Any] = {"model": "tiny", "max_tokens": 10, "temperature": 0}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    found = Server(api_key=KEY, llm={"max_waiting": 6})
    yield found
    found.settle()
    found.close()


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Any]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0) as found:
        yield found


def made(server: Server) -> Any:
    return openai.AsyncOpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=20)


# -- openai


def test_openai_log_probabilities_are_the_librarys(server: Server, client: Any) -> None:
    own = server.llm.chat(WORDS, SamplingParams(temperature=0, max_tokens=10, logprobs=3))
    chat = client.chat.completions.create(messages=WORDS, logprobs=True, top_logprobs=3, **ASK).choices[0]
    said = chat.logprobs.content
    assert [each.logprob for each in said] == [each.logprob for each in own.choices[0].logprobs]
    assert [len(each.top_logprobs) for each in said] == [3] * len(said)
    for each in said:  # greedy: what was written is the likeliest
        assert each.logprob == max(top.logprob for top in each.top_logprobs)
        assert bytes(each.bytes).decode() == each.token
    assert "".join(each.token for each in said) == chat.message.content
    text = client.completions.create(prompt="one two", logprobs=2, **ASK).choices[0]
    own = server.llm.generate("one two", SamplingParams(temperature=0, max_tokens=10, logprobs=2))
    assert text.logprobs.token_logprobs == [each.logprob for each in own.choices[0].logprobs]
    assert "".join(text.logprobs.tokens).replace("<s>", "") == text.text  # a control token has no text
    assert [len(top) for top in text.logprobs.top_logprobs] == [2] * len(text.logprobs.tokens)


def test_openai_async_asks_many_at_once(server: Server) -> None:
    prompts = [f"one {word} two" for word in "abcdefghijkl"]
    own = [server.llm.generate(prompt, GREEDY).text for prompt in prompts]

    async def main() -> None:
        async with made(server) as client:  # it comes back by itself when the line is full
            found = await asyncio.gather(*(client.completions.create(prompt=p, **ASK) for p in prompts))
            assert [each.choices[0].text for each in found] == own
            stream = await client.completions.create(prompt=prompts[0], stream=True, **ASK)
            assert "".join([chunk.choices[0].text async for chunk in stream]) == own[0]

    asyncio.run(asyncio.wait_for(main(), 60))


def test_openai_async_leaves_a_stream(server: Server) -> None:
    before = server.llm.stats.aborted

    async def main() -> None:
        async with made(server) as client:
            long = ASK | {"max_tokens": 400, "extra_body": {"ignore_eos": True}}
            async with await client.chat.completions.create(messages=WORDS, stream=True, **long) as stream:
                async for chunk in stream:
                    if chunk.choices[0].delta.content:
                        break

    asyncio.run(asyncio.wait_for(main(), 60))
    server.settle()
    assert server.llm.stats.aborted == before + 1


def test_openais_stream_helper_puts_the_answer_together(server: Server, client: Any) -> None:
    stop = server.llm.chat(WORDS, GREEDY).text[5]  # the helper takes no answer that was cut at max_tokens
    own = server.llm.chat(WORDS, SamplingParams(temperature=0, max_tokens=10, stop=stop))
    ask = ASK | {"stop": stop, "stream_options": {"include_usage": True}}
    with client.chat.completions.stream(messages=WORDS, **ask) as stream:
        kinds = {event.type for event in stream}
        whole = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert whole.choices[0].message.content == own.text
    assert whole.choices[0].finish_reason == own.finish_reason
    assert whole.usage.completion_tokens == len(own.token_ids)


def test_usage_runs_along_where_load_tools_ask_for_it(client: Any) -> None:
    """guidellm sends this."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    ask = ASK | {"extra_body": {"ignore_eos": True}, "stream": True, "stream_options": options}
    for chunks in (
        list(client.chat.completions.create(messages=WORDS, **ask)),
        list(client.completions.create(prompt=["one", "two"], **ask)),
    ):
        counts = [chunk.usage.completion_tokens for chunk in chunks]
        assert counts == sorted(counts)
        assert counts[-1] == counts[-2] in (10, 20)
        assert {chunk.usage.prompt_tokens for chunk in chunks} == {chunks[-1].usage.prompt_tokens}


def test_openai_counts_choices(client: Any) -> None:
    found = client.completions.create(prompt=["one", "two"], n=3, **ASK | {"temperature": 1}, seed=4)
    assert [choice.index for choice in found.choices] == list(range(6))
    assert found.usage.completion_tokens <= 60
    again = client.completions.create(prompt=["one", "two"], n=3, **ASK | {"temperature": 1}, seed=4)
    assert [choice.text for choice in again.choices] == [choice.text for choice in found.choices]


def test_openai_maps_errors_to_its_own_classes(server: Server, client: Any) -> None:
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(messages=WORDS, **ASK | {"temperature": -1})
    assert wrong.value.param == "temperature"
    assert wrong.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(prompt="a" * 600, **ASK)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as other:
        client.chat.completions.create(messages=WORDS, **ASK | {"model": "other"})
    assert other.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="tiny", input="one")
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_openai_is_told_that_the_line_is_full(server: Server, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    long = ASK | {"max_tokens": 480, "extra_body": {"ignore_eos": True}}
    with server.held():  # the model waits, so that nothing ends meanwhile
        taken = [client.completions.create(prompt="one", stream=True, **long)]  # one has a row, or gets it
        full = None
        while full is None and len(taken) < 12:
            try:
                taken.append(client.completions.create(prompt="one", stream=True, **long))
            except openai.RateLimitError as error:
                full = error
        assert full is not None
        assert full.code == "queue_full"
        assert int(full.response.headers["retry-after"]) >= 1
        with monkeypatch.context() as patched:  # those who are sent away cost little
            patched.setattr(server.llm, "request", None)
            with pytest.raises(openai.RateLimitError):
                client.completions.create(prompt="one", **ASK)
    for stream in taken:
        stream.close()
    server.settle()


# -- llm


@pytest.fixture
def home(server: Server, tmp_path: Path) -> dict[str, str]:
    """A home for the ``llm`` command that knows our server and nothing else."""
    model = {"model_id": "mine", "model_name": "tiny", "api_base": server.url + "/v1", "api_key_name": "mine"}
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([model]))
    (tmp_path / "keys.json").write_text(json.dumps({"mine": KEY}))
    return os.environ | {"LLM_USER_PATH": str(tmp_path), "LLM_LOAD_PLUGINS": "", "HOME": str(tmp_path)}


@pytest.mark.skipif(shutil.which("llm", path=str(Path(sys.executable).parent)) is None, reason="needs the package llm")
def test_the_llm_command(server: Server, home: dict[str, str]) -> None:
    def llm(*arguments: str) -> str:
        command = [sys.executable, "-m", "llm", *arguments]
        done = subprocess.run(command, env=home, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
        assert done.returncode == 0, done.stderr
        return done.stdout

    greedy = ("-o", "temperature", "0", "-o", "max_tokens", "10")
    words = [{"role": "user", "content": "one two three"}]
    first = server.llm.chat(words, GREEDY).text
    assert llm("-m", "mine", *greedy, "one two three") == first + "\n"  # streams
    words += [{"role": "assistant", "content": first}, {"role": "user", "content": "four"}]
    assert llm("-c", "--no-stream", *greedy, "four") == server.llm.chat(words, GREEDY).text + "\n"


# -- curl


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_curl_gets_events_as_they_come(server: Server) -> None:
    body = {"messages": WORDS, "max_tokens": 40, "ignore_eos": True, "temperature": 0, "stream": True}
    command = ["curl", "-sSN", server.url + "/v1/chat/completions", "-H", f"Authorization: Bearer {KEY}"]
    command += ["-H", "Content-Type: application/json", "-d", json.dumps(body), "-D", "-"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with server.held():  # no token can be computed
        head = [process.stdout.readline() for _ in range(2)]
        while head[-1] != "\n":
            head.append(process.stdout.readline())
        start = json.loads(process.stdout.readline().removeprefix("data: "))  # comes before any token
    assert head[0].startswith("HTTP/1.1 200")
    assert any(line.lower().startswith("content-type: text/event-stream") for line in head)
    assert start["choices"][0]["delta"]["role"] == "assistant"
    rest = process.communicate(timeout=60)[0].split("\n\n")
    assert process.returncode == 0
    assert rest[-2:] == ["data: [DONE]", ""]
    text = ""
    for event in rest[:-2]:
        text += json.loads(event.strip().removeprefix("data: "))["choices"][0]["delta"].get("content", "")
    assert text == server.llm.chat(WORDS, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)).text


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_curl_sends_in_pieces_and_on_one_connection(server: Server, tmp_path: Path) -> None:
    body = tmp_path / "body.json"
    body.write_text(json.dumps({"prompt": "one", "max_tokens": 10, "temperature": 0}))
    one = [
        "-sS",
        "-H",
        f"Authorization: Bearer {KEY}",
        "-H",
        "Content-Type: application/json",
        "-H",
        "Expect: 100-continue",
    ]
    one += ["-H", "Transfer-Encoding: chunked", "--data-binary", f"@{body}", "-w", "\n%{num_connects}\n"]
    command = ["curl", *one, server.url + "/v1/completions", "--next", *one, server.url + "/v1/completions"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    first, connects, second, more = done.stdout.splitlines()
    assert (connects, more) == ("1", "0"), "the second request goes over the first one's connection"
    own = server.llm.generate("one", GREEDY).text
    assert json.loads(first)["choices"][0]["text"] == json.loads(second)["choices"][0]["text"] == own
