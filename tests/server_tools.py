"""What the server's tests share: a server over a tiny model, in a thread, on a port of its own."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from headstart import LLM, AsyncLLM
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


class Server:
    """A server in a thread. ``llm``: options of the LLM; the rest are the server's settings."""

    def __init__(self, *, llm: dict[str, Any] | None = None, **settings: Any) -> None:
        self.llm = tiny_llm(**llm or {})
        self.app = create_app(AsyncLLM(self.llm), Settings(model="tiny", **settings))
        self.server = uvicorn.Server(uvicorn.Config(self.app, port=0, log_level="error", lifespan="on"))
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)
        self.url = f"http://127.0.0.1:{self.server.servers[0].sockets[0].getsockname()[1]}"

    def close(self) -> None:
        self.server.should_exit = True
        self.thread.join(30)
        assert not self.thread.is_alive()

    def settle(self) -> None:
        """Wait until nothing is left of any request."""
        engine, end = self.llm.engine, time.monotonic() + 30
        while not engine.idle and time.monotonic() < end:
            time.sleep(0.005)
        assert engine.idle
        slab = engine.parts.runner.slab
        assert slab.free_rows == slab.rows

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
