"""Structured answers and tool calls under load: sixteen clients at once, others that leave, and grammars that fail.

    python benchmarks/structured_load.py                    # the embedded model, six storms
    python benchmarks/structured_load.py --leaving 64 --busy 2 --out structured-load-busy.json     # a hostile world
    python benchmarks/structured_load.py --model tiny       # to see that it runs

Every kind of request (JSON schema, any JSON, regex, choice, Lark, tools required, named and offered; greedy and seeded)
is answered once alone, with nothing drafted. Then come storms: all of them at once, drafted and not, as streams and
whole, in another order each time; beside them clients that leave in the middle of a stream, some by a reset, as of a
killed process, and requests whose grammar cannot be compiled or fails within the answer. ``--busy``: so many processes
that only take processor time. Every answer must be the same as alone, every fault a 400, ``/health`` must say that all
is well within seconds, and in the end nothing may be left running.

Knows: what is asked, and what must come. Does not know: how anything is computed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from socket import SO_LINGER, SOL_SOCKET
from typing import Any

from common import log, machine, save
from serve_common import Served, head, read_answer
from structured_clients import HERMES

CHAT = "/v1/chat/completions"
FORM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 16},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["cat", "dog", "camel"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 3},
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
}
UNION = {"anyOf": [FORM, {"type": "array", "items": {"type": "integer", "maximum": 99, "minimum": 0}, "maxItems": 8}]}
TOOL = {"type": "function", "function": {"name": "note", "parameters": FORM}}
OTHER = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"enum": [1, 2, 3]}}}},
}
BAD: list[dict[str, Any]] = [  # each is a 400
    {"structured_outputs": {"regex": "a(?!b)"}},
    {"structured_outputs": {"grammar": "start: missing"}},
    {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"schema": {"type": "integer", "minimum": 5, "maximum": 3}},
        }
    },
    {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "another"}}},
]


def schema(given: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": given}}}


KINDS: dict[str, dict[str, Any]] = {
    "schema": schema(FORM),
    "union": schema(UNION),
    "any JSON": {"response_format": {"type": "json_object"}, "max_tokens": 40},
    "regex": {"structured_outputs": {"regex": "[a-z]{3,9}(-[0-9]{2,4}){1,4}!"}},
    "choice": {"structured_outputs": {"choice": ["certainly", "certainly not", "perhaps", "ask again"]}},
    "lark": {"structured_outputs": {"grammar": 'start: item ("; " item)~2\nitem: /[a-z]{2,8}/ " = " /[0-9]{1,3}/'}},
    "tools required": {"tools": [TOOL, OTHER], "tool_choice": "required"},
    "tool named": {"tools": [TOOL, OTHER], "tool_choice": {"type": "function", "function": {"name": "note"}}},
    "tools offered": {"tools": [TOOL, OTHER], "max_tokens": 40},
    "nothing": {"max_tokens": 40},
}
DRAWN: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0}, "seeded": {"temperature": 0.9, "seed": 5}}


def bodies() -> dict[str, dict[str, Any]]:
    found = {}
    for number, (kind, asked) in enumerate(KINDS.items()):
        for drawn, how in DRAWN.items():
            words = [{"role": "user", "content": f"Make up animal number {number} and describe it."}]
            found[f"{kind}, {drawn}"] = {"messages": words, "max_tokens": 120} | how | asked
    return found


def told(message: dict[str, Any]) -> Any:
    """What was said, without ids of calls, which are drawn anew."""
    calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls") or []]
    return [message.get("content") or "", [list(call) for call in calls]]


def joined(events: list[Any]) -> Any:
    """A stream's deltas as one message."""
    content, calls, reason = "", list[dict[str, Any]](), None
    for choice in (choice for event in events if event != "[DONE]" for choice in event["choices"]):
        content += choice["delta"].get("content") or ""
        for part in choice["delta"].get("tool_calls") or []:
            while len(calls) <= part["index"]:
                calls.append({"function": {"name": "", "arguments": ""}})
            for key, text in part["function"].items():
                calls[part["index"]]["function"][key] += text or ""
        reason = choice["finish_reason"] or reason
    return [*told({"content": content, "tool_calls": calls}), reason]


async def post(port: int, body: dict[str, Any]) -> tuple[int, Any]:
    """Its status, and the message with the finish reason, or the error."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = json.dumps(body).encode()
    writer.write(head(CHAT, data) + data)
    answer = await read_answer(reader)
    writer.close()
    if answer.status != 200:
        return answer.status, answer.json()["error"]
    if body.get("stream"):
        return 200, joined(answer.events())
    [choice] = answer.json()["choices"]
    return 200, [*told(choice["message"]), choice["finish_reason"]]


async def leave(port: int, body: dict[str, Any], rng: random.Random) -> None:
    """Read for some time, or some events, then go away: properly, or as a process that is killed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = json.dumps(body | {"stream": True}).encode()
    writer.write(head(CHAT, data) + data)
    if rng.random() < 0.5:
        await asyncio.sleep(rng.uniform(0, 3))
    else:
        with suppress(asyncio.IncompleteReadError):
            for _ in range(rng.randint(1, 20)):
                await reader.readuntil(b"\n\n")
    if rng.random() < 0.5:
        writer.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))
    writer.close()


async def get(port: int, path: str) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    return answer.decode()


async def gauges(port: int) -> dict[str, float]:
    """What the server says of requests that it has."""
    lines = [line for line in (await get(port, "/metrics")).splitlines() if line.startswith("vllm:num_requests_")]
    return {line.partition("{")[0]: float(line.split()[-1]) for line in lines}


@dataclass
class World:
    """Who asks at once, and what became of it."""

    port: int
    clients: int
    leaving: int
    counts: Counter[str] = field(default_factory=Counter)
    slowest_health: float = 0.0

    async def storm(self, asked: dict[str, dict[str, Any]], alone: dict[str, Any], seed: int) -> None:
        """All at once, so many clients at a time; those who leave wait for no place."""
        rng, places = random.Random(seed), asyncio.Semaphore(self.clients)

        async def one(name: str, body: dict[str, Any]) -> None:
            async with places:
                how = {"stream": rng.random() < 0.5, "speculate": rng.random() < 0.75}
                status, found = await post(self.port, body | how)
            self.counts["same" if (status, found) == (200, alone[name]) else "other"] += 1
            if (status, found) != (200, alone[name]):
                log(f"{name}: {status} {found} and not {alone[name]}")

        async def bad(body: dict[str, Any]) -> None:
            async with places:
                status, found = await post(self.port, body)
            self.counts["refused" if status == 400 and found["message"] else "not_refused"] += 1

        async def gone(body: dict[str, Any]) -> None:
            await leave(self.port, body, rng)
            self.counts["left"] += 1

        work = [one(name, body) for name, body in asked.items()]
        words = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 60}
        work += [bad(words | each) for each in BAD]
        work += [gone(body) for body in rng.choices(list(asked.values()), k=self.leaving)]
        rng.shuffle(work)
        over = asyncio.Event()
        watching = asyncio.create_task(self._watch(over))
        await asyncio.gather(*work)
        over.set()
        await watching

    async def _watch(self, over: asyncio.Event) -> None:
        while not over.is_set():
            started = time.perf_counter()
            said = await get(self.port, "/health")
            self.slowest_health = max(self.slowest_health, time.perf_counter() - started)
            self.counts["healthy" if said.startswith("HTTP/1.1 200") else "not_healthy"] += 1
            await asyncio.sleep(0.5)


async def measured(world: World, storms: int, seconds: float) -> dict[str, Any]:
    asked, end = bodies(), time.perf_counter() + seconds
    alone: dict[str, Any] = {}
    for name, body in asked.items():
        status, alone[name] = await post(world.port, body | {"speculate": False})
        assert status == 200, (name, alone[name])
    log(f"{len(alone)} answers alone")
    for number in range(storms):
        if time.perf_counter() > end:
            break
        await world.storm(asked, alone, number)
        log(f"{number + 1} storms: {dict(world.counts)}")
        world.counts["storms"] += 1
    ends = [answer[-1] for answer in alone.values()]
    none = dict.fromkeys(("other", "not_refused", "not_healthy"), 0)
    return {"kinds": len(alone), "ends": {e: ends.count(e) for e in set(ends)}} | none | dict(world.counts)


@contextmanager
def busy(number: int) -> Iterator[None]:
    """So many processes that only take processor time."""
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for each in spinning:
            each.kill()
            each.wait()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", default="embedded")
    options.add_argument("--storms", type=int, default=6)
    options.add_argument("--clients", type=int, default=16)
    options.add_argument("--leaving", type=int, default=8, help="clients of each storm that leave in the middle")
    options.add_argument("--busy", type=int, default=0, help="processes beside it that only take processor time")
    options.add_argument("--seconds", type=float, default=1e9, help="begin no other storm after so long")
    options.add_argument("--out", default="structured-load.json")
    given = options.parse_args()
    with Served("--model", given.model, "--length", "1024", "--template", HERMES) as served:
        world = World(served.port, given.clients, given.leaving)
        with busy(given.busy):
            result = asyncio.run(measured(world, given.storms, given.seconds))
        result["slowest_health_seconds"] = world.slowest_health
        for _ in range(100):
            left = served.state()
            if left["free_rows"] == left["rows"] and not left["requests"]:
                break
            time.sleep(0.1)
        result["remaining"] = {key: left[key] for key in ("requests", "waiting", "discarded", "failed")}
        result["remaining"] |= asyncio.run(gauges(served.port))
        result["rows_not_free"] = left["rows"] - left["free_rows"]
        result["aborted"] = left["aborted"]
        result["exit_status"] = served.close()
    log(json.dumps(result))
    if given.model == "embedded":
        save(given.out, {"machine": machine(), "settings": vars(given) | {"rows": 8}, "result": result})


if __name__ == "__main__":
    main()
