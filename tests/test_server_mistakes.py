"""The first hour of those who come from OpenAI, vLLM or llama.cpp: the examples of docs/serve.md run as they stand, and
the answer to what people get wrong first says what to do about it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

from server_tools import WORDS, Server, tiny_llm

from headstart.cli.options import ModelOptions
from headstart.cli.serve import ServerOptions, _key, serve
from headstart.errors import InvalidParameter

PAGE = (Path(__file__).parents[1] / "docs" / "serve.md").read_text(encoding="utf-8").partition("## Settings")[0]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]


class Tiny(ModelOptions):
    def open(self, rows: int = 1, **settings: Any) -> Any:
        return tiny_llm(max_rows=rows, **settings)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    found = Server()
    yield found
    found.close()


def examples(server: Server, language: str) -> list[str]:
    found = re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.S)
    return [code.replace("http://127.0.0.1:8000", server.url) for code in found]


def test_the_pages_programs_run_as_they_stand(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("openai")
    code = examples(server, "python")
    assert len(code) == 2
    names: dict[str, Any] = {}
    try:
        for program in code:
            exec(compile(program, "docs/serve.md", "exec"), names)
    finally:
        names["client"].close()
    assert "num_draft_tokens" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_so_does_its_curl(server: Server) -> None:
    [command] = examples(server, "sh")
    done = subprocess.run(["sh", "-c", command], capture_output=True, timeout=60, check=True)
    assert json.loads(done.stdout)["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("path", "body", "field", "words"),
    [
        (CHAT, {"messages": "Hi"}, "messages", '{"role": "user", "content": "Hello"}'),
        (CHAT, {"messages": ["Hi"]}, "messages.0", 'messages: must be a list of objects such as {"role"'),
        (CHAT, {"messages": IMAGE}, "messages.0.content", "no images"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": 5}]},
            "messages.0.content",
            "must be text, or a list of parts",
        ),
        (CHAT, {"prompt": "Hi"}, "prompt", f"is a field of {TEXT}, not of this route"),
        (CHAT, {"messages": WORDS, "echo": True}, "echo", f"is a field of {TEXT}"),
        (CHAT, {"messages": WORDS, "frequency_penality": 1}, "frequency_penality", "did you mean frequency_penalty?"),
        (CHAT, {"messages": WORDS, "n_predict": 9}, "n_predict", "here it is max_tokens"),
        (CHAT, {"messages": WORDS, "json_schema": {}}, "json_schema", "use response_format"),
        (CHAT, {"messages": WORDS, "max_tokens": -1}, "max_tokens", "at least 1; without it"),
        (CHAT, {"messages": WORDS, "logprobs": 5}, "logprobs", "true or false; top_logprobs says how many"),
        (CHAT, {"messages": WORDS, "stream": "true"}, "stream", "must be true or false"),
        (CHAT, {"messages": WORDS, "response_format": "json"}, "response_format", '{"type": "json_object"}'),
        (
            CHAT,
            {"messages": WORDS, "functions": [{"name": "f"}]},
            "functions",
            "functions: is not supported; leave it out",
        ),
        (CHAT, {"messages": WORDS, "reasoning_effort": "low"}, "reasoning_effort", 'only "none" is supported'),
        (CHAT, {"messages": WORDS, "prediction": "Hi"}, "prediction", '{"type": "content"'),
        (TEXT, {"messages": WORDS}, "messages", f"is a field of {CHAT}"),
        (TEXT, {"prompt": "Hi", "max_completion_tokens": 5}, "max_completion_tokens", "here it is max_tokens"),
        (TEXT, {"prompt": {"a": 1}}, "prompt", "must be text, token ids, or a list of those"),
        (TEXT, {"prompt": "Hi", "stop": ["a", 5]}, "stop", "must be text or a list of texts"),
        (CHAT, {"messages": WORDS, "stop": ["a"] * 99}, "stop", "stop: must hold at most 16"),
        (TEXT, {"prompt": ["a"] * 99}, "prompt", "prompt: holds 99 prompts; 1 to 64"),
        (TEXT, {"prompt": "Hi", "max_tokens": "8"}, "max_tokens", "must be a whole number"),
    ],
)
def test_a_wrong_field_is_answered_with_what_is_right(
    server: Server, path: str, body: Any, field: str, words: str
) -> None:
    status, said = server.post(path, body)
    assert (status, said["error"]["param"]) == (400, field), said
    assert words in said["error"]["message"]


def refused(server: Server, path: str, data: bytes | None = None, **headers: str) -> str:
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(urllib.request.Request(server.url + path, data, headers), timeout=30)
    with caught.value as answer:
        return str(json.loads(answer.read())["error"]["message"])


def test_so_are_a_wrong_header_and_a_wrong_base_url(server: Server) -> None:
    body = json.dumps({"prompt": "one", "max_tokens": 2}).encode()
    assert "Content-Type: application/json" in refused(server, TEXT, body)  # urllib says it is a form, as curl -d does
    assert f"but {CHAT}: " in refused(server, "/chat/completions", b"{}")
    assert "but /tokenize: that route is not below /v1" in refused(server, "/v1/tokenize", b"{}")
    assert "/v1/completions: /v1 stands there twice" in refused(server, "/v1/v1/completions", b"{}")
    assert "/openapi.json" in refused(server, "/v1/responses", b"{}")
    assert "--allowed-host llm.example " in refused(server, "/version", Host="llm.example:8000") + " "
    assert "--allowed-origin http://a.example " in refused(server, "/version", Origin="http://a.example") + " "
    assert "<" not in refused(server, "/version", Origin="http://a.example/<b>")


@pytest.mark.parametrize(("held", "words"), [(b"\xff\xfe", "is not UTF-8"), (b"\nkey", "empty first line")])
def test_a_key_file_that_holds_no_key_is_named(tmp_path: Path, held: bytes, words: str) -> None:
    file = tmp_path / "key"
    file.write_bytes(held)
    for path, said in ((file, words), (tmp_path / "none", "cannot be read")):
        with pytest.raises(InvalidParameter, match=f"{said}.*{path}"):
            _key(path)


def test_who_listens_everywhere_is_told_to_which_names_it_answers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("headstart.server.process.run", lambda app, listener, **_: listener.close())
    for host, more, told in (("0.0.0.0", None, True), ("0.0.0.0", ["a.example"], False), ("127.0.0.1", None, False)):
        serve(model=Tiny(), server=ServerOptions(host=host, port=0, allowed_host=more))
        said = capsys.readouterr().err
        assert ("--allowed-host NAME" in said) == told, said
        assert f"on http://{host}:" in said
