"""What the benchmarks of the server share: a server in a process of its own, and a light client on raw sockets.

    python benchmarks/serve_common.py --model tiny --rows 8 --waiting 64      # the server's process; see ``Served``

Knows: HTTP/1.1 as far as our server speaks it. Does not know: what is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

HERE = Path(__file__).parent
CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
TINY = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}


# -- the client


class Cut(Exception):
    """The connection ended before the answer did. ``got``: what came of it."""

    def __init__(self, got: bytes = b"") -> None:
        super().__init__("the connection was cut")
        self.got = got


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes = b""
    times: list[float] = field(default_factory=list)  # when each part of the body came, on the event loop's clock

    def json(self) -> Any:
        return json.loads(self.body)

    def events(self) -> list[Any]:
        """A stream's events; "[DONE]" as it is."""
        found = [part.removeprefix("data: ") for part in self.body.decode().split("\n\n") if part]
        return [part if part == "[DONE]" else json.loads(part) for part in found]


def head(path: str, body: bytes, close: bool = True) -> bytes:
    kept = "close" if close else "keep-alive"
    return (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nConnection: {kept}\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode()


async def read_answer(reader: asyncio.StreamReader) -> Answer:
    """One answer, whole. ``Cut`` if the connection ended before it."""
    clock = asyncio.get_running_loop().time
    got = b""
    try:
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines) if name}
        answer = Answer(int(first.split()[1]), headers)
        if "content-length" in headers:
            got = await reader.readexactly(int(headers["content-length"]))
            answer.times.append(clock())
        else:
            while size := int(await reader.readuntil(b"\r\n"), 16):
                got += (await reader.readexactly(size + 2))[:-2]
                answer.times.append(clock())
            await reader.readexactly(2)
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        raise Cut(got + getattr(error, "partial", b"")) from None
    answer.body = got
    return answer


class Client:
    """One kept connection that posts one thing after another."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, path: str, body: Any) -> Answer:
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._streams
        data = json.dumps(body).encode()
        writer.write(head(path, data, close=False) + data)
        return await read_answer(reader)

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()


# -- the server


def _cpu(path: str) -> float:
    after_name = Path(path).read_text().rpartition(")")[2].split()
    return (int(after_name[11]) + int(after_name[12])) / os.sysconf("SC_CLK_TCK")


class Served:
    """A server in a process of its own; it ends with this."""

    def __init__(self, *options: str, **variables: str) -> None:
        command = [sys.executable, __file__, *options]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | variables
        )
        self.port: int = self._line()["port"]
        self.pid = self._process.pid

    def state(self) -> dict[str, int]:
        """What it holds at the moment."""
        found: dict[str, int] = self.do("state")
        return found

    def do(self, what: str, **arguments: Any) -> Any:
        """ "state", or "own": the same requests without HTTP, see ``_own``."""
        return self._line(json.dumps({"do": what} | arguments))

    def memory(self) -> int:
        """Resident bytes."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def cpu(self) -> tuple[float, float]:
        """Seconds of processor time so far: of the whole process, and of its event loop's thread."""
        return _cpu(f"/proc/{self.pid}/stat"), _cpu(f"/proc/{self.pid}/task/{self.pid}/stat")

    def files(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def _line(self, ask: str | None = None) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if ask is not None:
            self._process.stdin.write(ask + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the server ended with status {self._process.wait()}")
        return json.loads(line)

    def close(self) -> int:
        """End it by SIGTERM; its exit status."""
        self._process.terminate()
        try:
            return self._process.wait(60)
        finally:
            self._process.kill()
            self._process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def opened(model: str, **settings: Any) -> Any:
    """An ``LLM``: "tiny" (nonsense, quickly), "embedded", or a folder or file."""
    from headstart import LLM
    from headstart.testing import tiny_model, tiny_tokenizer

    if model != "tiny":
        return LLM(None if model == "embedded" else model, **settings)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    target = tiny_model("llama", max_position_embeddings=512, **TINY)
    return LLM(target, tokenizer=tokenizer, check=False, **{"draft": "lookup", "quantization": "int8"} | settings)


async def _own(llm: Any, conversations: list[Any], clients: int, tokens: int) -> dict[str, Any]:
    """Conversations answered by the engine itself: so many at a time, each as soon as there is a place."""
    from headstart import SamplingParams

    clock, left = time.perf_counter, iter(conversations)
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    firsts, written = [], 0

    async def client() -> None:
        nonlocal written
        for conversation in left:
            asked, first = clock(), 0.0
            async for pieces in llm.stream(conversation, params):
                first = first or clock()
                written += sum(piece.token_id is not None for piece in pieces)
            firsts.append(first - asked)

    started = clock()
    await asyncio.gather(*(client() for _ in range(clients)))
    return {"seconds": clock() - started, "tokens": written, "first_seconds": firsts}


def _loops() -> list[asyncio.AbstractEventLoop]:
    return [found for found in gc.get_objects() if issubclass(type(found), asyncio.AbstractEventLoop)]


def _serve(options: argparse.Namespace) -> None:
    from headstart import AsyncLLM
    from headstart.cli.serve import bound
    from headstart.server.app import Settings, create_app
    from headstart.server.process import run

    settings: dict[str, Any] = {"max_rows": options.rows, "max_waiting": options.waiting}
    settings |= json.loads(options.settings)
    if options.length:
        settings["max_model_len"] = options.length
    if options.plain:
        settings["draft"] = None
    llm = opened(options.model, **settings)
    if options.template:
        llm.tokenizer.chat_template = options.template
    served = AsyncLLM(llm)
    app, listener = create_app(served, Settings(model="served")), bound("127.0.0.1", 0)
    print(json.dumps({"port": listener.getsockname()[1]}), flush=True)

    def state() -> dict[str, int]:
        engine = llm.engine
        slab = engine.parts.runner.slab
        return {
            "rows": slab.rows,
            "free_rows": slab.free_rows,
            "requests": len(engine._handles),
            "waiting": engine.waiting,
            "discarded": len(engine._discarded),
            "threads": threading.active_count(),
            "tasks": sum(len(asyncio.all_tasks(loop)) for loop in _loops()),
            "aborted": llm.stats.aborted,
            "finished": llm.stats.finished,
            "failed": llm.stats.failed,
        }

    def answer() -> None:
        for line in sys.stdin:
            asked = json.loads(line)
            what = asked.pop("do")
            print(json.dumps(state() if what == "state" else asyncio.run(_own(served, **asked))), flush=True)
        os.kill(os.getpid(), signal.SIGTERM)  # whoever started it is gone: it must not stay, with what it holds

    threading.Thread(target=answer, daemon=True).start()
    run(app, listener, drain=30)


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--model", default="embedded", help='"tiny", "embedded", or a folder or file')
    arguments.add_argument("--rows", type=int, default=8)
    arguments.add_argument("--waiting", type=int, default=1024)
    arguments.add_argument("--length", type=int, default=0, help="max_model_len")
    arguments.add_argument("--plain", action="store_true", help="without a draft")
    arguments.add_argument("--template", help="a chat template, in place of the model's own")
    arguments.add_argument("--settings", default="{}", help="more of what LLM takes, as JSON")
    _serve(arguments.parse_args())
