"""A thousand clients at once, some of whom leave, on a network that delays, drips and cuts: is anything lost or wrong?

    python benchmarks/serve_load.py --clients 1000 --leaving 200 --minutes 10        # a tiny model
    python benchmarks/serve_load.py --model embedded --clients 1000 --leaving 200 --patience 1200
    python benchmarks/serve_load.py --quick

The server's line is bounded: beyond it clients get 429 and come back after ``Retry-After``. Each request is asked alone
first. Then all clients ask at once, through a proxy of our own; whatever is answered must be what was answered alone,
log-probabilities included, and what came of an answer that was cut must be its beginning. At the end all rows are free,
nothing waits, no task is left. With ``--minutes`` it goes on, storm after storm, and watches memory and open files.

Knows: what a client may do wrong, and what it is owed. Does not know: how anything is served.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from common import RESULTS, Report, log
from serve_common import Answer, Client, Cut, Served, head, read_answer

FAULTS = ("none", "none", "delay", "drip", "cut request", "cut answer")
LEAVES = ("at once", "in headers", "in body", "when sent", "at the first byte", "in the middle")
PATIENCE = 300.0  # seconds after which a client counts as hanging, unless ``--patience`` says otherwise


# -- what is asked, and what an answer says


@dataclass(frozen=True)
class Ask:
    path: str
    body: dict[str, Any]

    @property
    def stream(self) -> bool:
        return bool(self.body.get("stream"))


def asks(number: int, seed: int, model_tokens: int = 24) -> list[Ask]:
    """So many different requests, greedy or seeded, whole or in streams."""
    chance, found = random.Random(seed), []
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    for i in range(number):
        text = " ".join(chance.choices(words, k=chance.randint(1, 12)))
        body: dict[str, Any] = {"max_tokens": chance.randint(2, model_tokens), "stream": chance.random() < 0.6}
        body |= chance.choice(({"temperature": 0}, {"temperature": 1.0, "seed": i}, {"temperature": 0.7, "seed": i}))
        body |= chance.choice(({}, {}, {"n": 2}, {"presence_penalty": 0.5}, {"speculate": False}, {"ignore_eos": True}))
        if chance.random() < 0.5:
            scores = chance.choice(({}, {"logprobs": True, "top_logprobs": 2}))
            found.append(Ask("/v1/chat/completions", body | scores | {"messages": [{"role": "user", "content": text}]}))
        else:
            prompt: Any = chance.choice((text, [text, "one two"]))
            found.append(Ask("/v1/completions", body | chance.choice(({}, {"logprobs": 1})) | {"prompt": prompt}))
    return found


def said(ask: Ask, answer: Answer) -> dict[int, Any]:
    """Each choice's text, log-probabilities and end, whether it came whole or in a stream."""
    found: dict[int, Any] = {}
    events = answer.events() if ask.stream else [answer.json(), "[DONE]"]
    if events[-1] != "[DONE]":
        raise ValueError(f"the stream ends with {json.dumps(events[-1])[:300]}")
    for event in events[:-1]:
        if "error" in event:
            raise ValueError(json.dumps(event)[:300])
        for choice in event["choices"]:
            text, scores, end = found.get(choice["index"], ("", [], None))
            part = choice.get("message") or choice.get("delta") or {}
            text += choice.get("text", "") + (part.get("content") or "")
            scores = scores + _scores(choice.get("logprobs"))
            found[choice["index"]] = (text, scores, choice["finish_reason"] or end)
    return found


def _scores(logprobs: Any) -> list[Any]:
    if logprobs is None:
        return []
    if "content" in logprobs:
        return list(logprobs["content"])
    return list(zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True))


async def ended(writer: asyncio.StreamWriter, *, abort: bool = False) -> None:
    """Close a connection, or reset it, and wait until that is done."""
    if abort:
        writer.transport.abort()
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()


# -- a network that fails


class Proxy:
    """Passes bytes on, not always all of them, and not always at once. What it does to a connection depends on chance,
    and ``fault_of`` tells its client."""

    def __init__(self, port: int, seed: int, faults: Sequence[str] = FAULTS) -> None:
        self._port, self._chance, self._faults = port, random.Random(seed), faults
        self._fault_of: dict[int, str] = {}  # by the client's port
        self._open: set[asyncio.Task[None]] = set()

    async def start(self) -> int:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=2048)
        found: int = self._server.sockets[0].getsockname()[1]
        return found

    async def close(self) -> None:
        self._server.close()
        await self._server.wait_closed()
        await asyncio.gather(*self._open)

    def fault_of(self, port: int) -> str:
        return self._fault_of.pop(port, "none")

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        task.add_done_callback(self._open.discard)
        fault = self._chance.choice(self._faults)
        self._fault_of[writer.get_extra_info("peername")[1]] = fault
        if fault == "delay":
            await asyncio.sleep(self._chance.random() * 0.3)
        try:
            their_reader, their_writer = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            await ended(writer, abort=True)
            return
        cut = self._chance.randrange(4000)
        both = [writer, their_writer]
        to_server = self._pass(reader, their_writer, fault, cut % 300 if fault == "cut request" else None, both)
        to_client = self._pass(their_reader, writer, fault, cut if fault == "cut answer" else None, both)
        await asyncio.gather(to_server, to_client)
        for each in both:
            await ended(each)

    async def _pass(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        fault: str,
        left: int | None,
        both: list[asyncio.StreamWriter],
    ) -> None:
        with suppress(OSError):
            while data := await reader.read(self._chance.randint(1, 200) if fault == "drip" else 65536):
                if left is not None and (left := left - len(data)) <= 0:
                    writer.write(data[:left] if left else data)
                    for each in both:
                        each.transport.abort()
                    return
                writer.write(data)
                await writer.drain()
                if fault in ("drip", "delay"):
                    await asyncio.sleep(self._chance.random() * 0.004)
            if writer.can_write_eof():
                writer.close()  # our clients never half-close: who ends has left


# -- clients


class Storm:
    """Many clients at once. ``tally`` counts what became of them; ``wrong`` says what must not be."""

    def __init__(
        self,
        port: int,
        proxy: Proxy,
        kinds: list[Ask],
        expected: list[dict[int, Any]],
        patience: float = PATIENCE,
    ) -> None:
        self._patience = patience
        self._port, self._proxy, self._kinds, self._expected = port, proxy, kinds, expected
        self.tally: Counter[str] = Counter()
        self.wrong: list[str] = []

    async def run(self, clients: int, leaving: int, seed: int) -> None:
        chance = random.Random(seed)
        roles = ["stays"] * (clients - leaving) + [chance.choice(LEAVES) for _ in range(leaving)]
        chance.shuffle(roles)
        each = [
            self._client(chance.randrange(len(self._kinds)), role, random.Random(i)) for i, role in enumerate(roles)
        ]
        await asyncio.gather(*each)

    async def _client(self, kind: int, role: str, chance: random.Random) -> None:
        try:
            async with asyncio.timeout(self._patience):
                if role == "stays":
                    await self._stays(kind, chance)
                else:
                    await self._leaves(kind, role, chance)
                    self.tally["left"] += 1
        except TimeoutError:
            self.wrong.append(f"a client that {role} hangs: {self._kinds[kind]}")
        except Exception as error:
            self.wrong.append(f"{role}: {type(error).__name__}: {error}")

    async def _stays(self, kind: int, chance: random.Random) -> None:
        """Ask until there is an answer: later where the line is full, again where the network failed."""
        ask = self._kinds[kind]
        while True:
            port = 0
            try:
                reader, writer, port = await self._sent(ask)
                try:
                    answer = await read_answer(reader)
                finally:
                    await ended(writer)
            except (Cut, OSError) as error:
                fault = self._proxy.fault_of(port)
                if not fault.startswith("cut") and isinstance(error, Cut):
                    self.wrong.append(f"an answer was lost on a network that only does this: {fault}")
                    return
                self._check_beginning(kind, error.got if isinstance(error, Cut) else b"")
                self.tally["cut by the network"] += 1
                continue
            self._proxy.fault_of(port)
            if answer.status == 429:
                self.tally["429"] += 1
                await asyncio.sleep(int(answer.headers["retry-after"]) * chance.uniform(0.5, 1.5))
                continue
            if answer.status != 200:
                self.wrong.append(f"{answer.status}: {answer.body[:300]!r}")
                return
            self.tally["answered"] += 1
            if (found := said(ask, answer)) != self._expected[kind]:
                self.wrong.append(f"{ask} gave {found}, and alone {self._expected[kind]}"[:1000])
            return

    def _check_beginning(self, kind: int, got: bytes) -> None:
        """What came of a stream before it was cut is the beginning of what was asked for."""
        if not self._kinds[kind].stream:
            return
        whole = got[: got.rfind(b"\n\n") + 2] if b"\n\n" in got else b""
        whole = whole.removesuffix(b"data: [DONE]\n\n")
        found = said(self._kinds[kind], Answer(200, {}, whole + b"data: [DONE]\n\n"))
        for index, (text, scores, _) in found.items():
            all_text, all_scores, _ = self._expected[kind][index]
            if not all_text.startswith(text) or all_scores[: len(scores)] != scores:
                self.wrong.append(f"{self._kinds[kind]} began with {text!r}, and alone with {all_text!r}")

    async def _sent(self, ask: Ask) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, int]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        data = json.dumps(ask.body).encode()
        writer.write(head(ask.path, data) + data)
        return reader, writer, writer.get_extra_info("sockname")[1]

    async def _leaves(self, kind: int, moment: str, chance: random.Random) -> None:
        ask = self._kinds[kind]
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        data = json.dumps(ask.body).encode()
        start = head(ask.path, data)
        sent = {"at once": b"", "in headers": start[: chance.randrange(1, len(start))]}.get(moment, start)
        writer.write(sent + (b"" if moment in ("at once", "in headers") else data[: len(data) // 2]))
        if moment not in ("at once", "in headers", "in body"):
            writer.write(data[len(data) // 2 :])
            with suppress(OSError, asyncio.IncompleteReadError):
                if moment == "at the first byte":
                    await reader.readexactly(1)
                elif moment == "in the middle":
                    await reader.readexactly(chance.randrange(200, 1500))
        await ended(writer, abort=chance.random() < 0.5)


async def alone(port: int, kinds: list[Ask]) -> list[dict[int, Any]]:
    """What each request is answered when nobody else is there."""
    client = Client(port)
    try:
        return [said(ask, await client.post(ask.path, ask.body)) for ask in kinds]
    finally:
        client.close()


async def settled(served: Served, tasks: int) -> dict[str, int]:
    """The server's state, when it has had the time to forget those who left."""
    state: dict[str, int] = {}
    for _ in range(200):
        state = await asyncio.to_thread(served.state)
        if not state["requests"] and state["free_rows"] == state["rows"] and state["tasks"] <= tasks:
            break
        await asyncio.sleep(0.05)
    return state


async def measure(served: Served, options: argparse.Namespace) -> dict[str, Any]:
    kinds = asks(options.kinds, options.seed, options.tokens)
    expected = await alone(served.port, kinds)
    before = await settled(served, 0)
    files = served.files()
    proxy = Proxy(served.port, options.seed)
    port = await proxy.start()
    storm = Storm(port, proxy, kinds, expected, options.patience)
    started, watched, storms = time.monotonic(), [], 0
    while not storms or time.monotonic() - started < 60 * options.minutes:
        await storm.run(options.clients, options.leaving, options.seed + storms)
        storms += 1
        seen: dict[str, Any] = {
            "minute": round((time.monotonic() - started) / 60, 2),
            "resident_bytes": served.memory(),
        }
        await settled(served, before["tasks"])
        await asyncio.sleep(3)  # the server gives memory back when it has had nothing to do for a second
        watched.append(seen | {"resident_bytes_at_rest": served.memory(), "files": served.files()})
        log(f"{watched[-1]}")
        if storm.wrong:
            break
    await proxy.close()
    state = await settled(served, before["tasks"])
    late = [each["resident_bytes_at_rest"] for each in watched if each["minute"] >= min(2, options.minutes / 2)]
    return {
        "seconds": time.monotonic() - started,
        "storms": storms,
        "tally": dict(storm.tally),
        "wrong": storm.wrong[:20],
        "before": before,
        "after": state,
        "files": {"before": files, "after": served.files()},
        "resident_bytes_at_rest": {"after_two_minutes": late[0], "end": late[-1]} if len(late) > 1 else None,
        "watched": watched if len(watched) < 50 else watched[:: len(watched) // 50],
    }


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--model", default="tiny")
    arguments.add_argument("--clients", type=int, default=1000)
    arguments.add_argument("--leaving", type=int, default=200)
    arguments.add_argument("--minutes", type=float, default=0.0, help="storm after storm, for so long")
    arguments.add_argument("--waiting", type=int, default=64, help="places in the server's line")
    arguments.add_argument("--kinds", type=int, default=40, help="different requests")
    arguments.add_argument("--tokens", type=int, default=24)
    arguments.add_argument(
        "--patience", type=float, default=PATIENCE, help="seconds that a client waits for its answer"
    )
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--quick", action="store_true")
    options = arguments.parse_args()
    if options.quick:
        options.clients, options.leaving, options.waiting, options.kinds = 60, 12, 8, 10
    name = "serve-load.json" if options.model == "tiny" else "serve-load-embedded.json"
    length = "512" if options.model == "tiny" else "1024"
    with Served("--model", options.model, "--waiting", str(options.waiting), "--length", length) as served:
        found = asyncio.run(measure(served, options))
    log(json.dumps({key: value for key, value in found.items() if key != "watched"}, indent=1))
    if not options.quick:
        Report(RESULTS / name, vars(options), 0).add("load", found)


if __name__ == "__main__":
    main()
