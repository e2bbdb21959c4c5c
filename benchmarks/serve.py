"""What HTTP costs: the same requests through the server and by the engine itself, in one process, in turns.

    python benchmarks/serve.py                      # the embedded pair, 8 clients, each as soon as its last is answered
    python benchmarks/serve.py --quick              # a tiny model, one turn

Clients are light (raw sockets, kept connections, answers hardly looked at), in this process, with processor seconds of
their own: they take from the two cores that the engine computes on, and their share is told beside the figures. A
turn's prompts are new, so that no row is warm. Turns are short and many: a shared processor changes within seconds.
First tokens: with all clients at once, and one after another.

Knows: what is compared. Does not know: how anything is served.
"""

from __future__ import annotations

import argparse
import json
import re
import selectors
import socket
import time
from collections.abc import Iterable, Iterator
from statistics import mean
from typing import Any

from common import RESULTS, Report, interval, log, median, prompts
from serve_common import Served, head

WAYS = ("own", "stream", "whole")


def conversations(number: int, turn: str) -> list[Any]:
    texts = [text for kind in prompts().values() for text in kind]
    return [[{"role": "user", "content": f"({turn}-{i}) {texts[i % len(texts)]}"}] for i in range(number)]


class Connection:
    """A client that costs little: one kept socket, whose answers are looked at no further than is needed."""

    def __init__(self, port: int, bodies: Iterator[bytes]) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.firsts: list[float] = []  # seconds to the first text of each answer that was streamed
        self._bodies = bodies

    def ask(self) -> bool:
        """The next request; False if there is none left."""
        body = next(self._bodies, None)
        if body is None:
            self.socket.close()
            return False
        self._got, self._first, self._asked = bytearray(), False, time.perf_counter()
        self.socket.sendall(head("/v1/chat/completions", body, close=False) + body)
        return True

    def read(self) -> bool:
        """What came; True at the end of an answer."""
        now, part = time.perf_counter(), self.socket.recv(1 << 16)
        self._got += part
        if not part or not self._got.startswith(b"HTTP/1.1 200"[: len(self._got)]):
            raise RuntimeError(f"not an answer: {bytes(self._got[:300])!r}")
        if not self._first and self._got.count(b"data: ") >= 2:  # the first one only says who speaks
            self._first = True
            self.firsts.append(now - self._asked)
        if self._got.endswith(b"0\r\n\r\n"):
            return b"[DONE]" in self._got
        start, _, whole = self._got.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", start) if len(self._got) < 4096 or not self._first else None
        return length is not None and len(whole) == int(length[1])


def by_http(port: int, words: list[Any], clients: int, tokens: int, *, stream: bool) -> dict[str, Any]:
    body = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True, "stream": stream}
    bodies = iter([json.dumps(body | {"messages": messages}).encode() for messages in words])
    connections = [Connection(port, bodies) for _ in range(clients)]
    started, cpu = time.perf_counter(), time.process_time()
    with selectors.DefaultSelector() as waiting:
        for connection in connections:
            if connection.ask():
                waiting.register(connection.socket, selectors.EVENT_READ, connection)
        while waiting.get_map():
            for key, _ in waiting.select():
                if key.data.read():
                    waiting.unregister(key.fileobj)
                    if key.data.ask():
                        waiting.register(key.fileobj, selectors.EVENT_READ, key.data)
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    firsts = [first for connection in connections for first in connection.firsts]
    if stream and len(firsts) != len(words):
        raise RuntimeError(f"{len(words)} streams were asked for, {len(firsts)} came")
    return {"seconds": seconds, "tokens": len(words) * tokens, "first_seconds": firsts, "client_cpu_seconds": cpu}


def turn(served: Served, way: str, words: list[Any], clients: int, tokens: int) -> dict[str, Any]:
    before = served.cpu()
    if way == "own":
        found: dict[str, Any] = served.do("own", conversations=words, clients=clients, tokens=tokens)
    else:
        found = by_http(served.port, words, clients, tokens, stream=way == "stream")
    cpu, loop = (after - start for after, start in zip(served.cpu(), before, strict=True))
    rate = found["tokens"] / found["seconds"]
    return found | {"tokens_per_second": rate, "cpu_seconds": cpu, "event_loop_cpu_seconds": loop}


def fastest(rates: Iterable[float]) -> float:
    """What the fastest quarter reaches: other machines on the same processor only ever slow a turn down."""
    ordered = sorted(rates)
    return ordered[(3 * len(ordered)) // 4]


def compared(turns: dict[str, list[dict[str, Any]]], clients: int) -> dict[str, Any]:
    """Each way against the engine's own in the same turn."""
    found: dict[str, Any] = {}
    for way in WAYS:
        rates = [each["tokens_per_second"] for each in turns[way]]
        ratios = [mine / own["tokens_per_second"] for mine, own in zip(rates, turns["own"], strict=True)]
        found[way] = {"tokens_per_second": median(rates), "over_own": median(ratios), "each_over_own": ratios}
        best = (fastest(each["tokens_per_second"] for each in turns[which]) for which in (way, "own"))
        found[way]["fastest_over_own"] = next(best) / next(best)
        if len(ratios) > 1:
            found[way]["interval"] = interval(ratios)
        if way != "own":
            for whose in ("client", "event_loop"):
                shares = (each[f"{whose}_cpu_seconds"] / each["seconds"] for each in turns[way])
                found[way][f"{whose}_cpu_share"] = median(shares)
            spent = sum(each["event_loop_cpu_seconds"] for each in turns[way])
            found[way]["event_loop_us_per_token"] = 1e6 * spent / sum(each["tokens"] for each in turns[way])
    for way in ("own", "stream"):
        for which, of in {"": median, "mean_": mean, "last_": max}.items():  # of the clients of a turn
            found[way][f"{which}first_seconds"] = median(of(each["first_seconds"]) for each in turns[way])
    for which in ("", "mean_", "last_"):
        later = found["stream"][f"{which}first_seconds"] - found["own"][f"{which}first_seconds"]
        found[f"{which}first_later_by_seconds"] = later
    return {"clients": clients} | found


def measure(served: Served, options: argparse.Namespace) -> dict[str, Any]:
    result = {}
    for clients in (options.clients, 1):
        number, times = (options.requests, options.turns) if clients > 1 else (4, max(1, options.turns // 4))
        turns: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
        for i in range(times + 1):
            for way in (*WAYS[i % 3 :], *WAYS[: i % 3]):
                found = turn(served, way, conversations(number, f"{clients}{way[0]}{i}"), clients, options.tokens)
                if i or options.quick:  # the first one warms up
                    turns[way].append(found)
            if options.quick:
                break
        result[f"{clients} clients"] = compared(turns, clients)
        log(f"{clients} clients: {result[f'{clients} clients']}")
    return result


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--model", default="embedded")
    arguments.add_argument("--clients", type=int, default=8)
    arguments.add_argument("--requests", type=int, default=8, help="in a turn")
    arguments.add_argument("--tokens", type=int, default=48)
    arguments.add_argument("--turns", type=int, default=60)
    arguments.add_argument("--plain", action="store_true", help="without a draft")
    arguments.add_argument("--quick", action="store_true")
    options = arguments.parse_args()
    if options.quick:
        options.model, options.requests, options.tokens = "tiny", 8, 8
    length = "512" if options.model == "tiny" else "1024"
    with Served("--model", options.model, "--length", length, *(["--plain"] if options.plain else [])) as served:
        found = measure(served, options)
    if not options.quick:
        name = "serve-plain.json" if options.plain else "serve.json"
        Report(RESULTS / name, vars(options), 0).add("serve", found)


if __name__ == "__main__":
    main()
