"""What HTTP costs: the same requests through the server and by the engine itself, in one process, in turns.

    python benchmarks/serve.py --turns 5            # the embedded pair, 8 clients, each as soon as its last is answered
    python benchmarks/serve.py --quick              # a tiny model, one turn

Clients are light (raw sockets, kept connections), in this process, with processor seconds of their own; so they take
from the two cores that the engine computes on, and their share is told beside the figures. A turn's prompts are new, so
that no row is warm. First tokens: with all clients at once, and one after another.

Knows: what is compared. Does not know: how anything is served.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from typing import Any

from common import RESULTS, Report, geometric_mean, log, median, prompts
from serve_common import Answer, Client, Served

WAYS = ("own", "stream", "whole")


def conversations(number: int, turn: str) -> list[Any]:
    texts = [text for kind in prompts().values() for text in kind]
    return [[{"role": "user", "content": f"({turn}-{i}) {texts[i % len(texts)]}"}] for i in range(number)]


async def by_http(port: int, words: list[Any], clients: int, tokens: int, *, stream: bool) -> dict[str, Any]:
    clock, left = asyncio.get_running_loop().time, iter(words)
    body = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True, "stream": stream}
    found: list[tuple[float, Answer]] = []

    async def client() -> None:
        connection = Client(port)
        for messages in left:
            asked = clock()
            found.append((asked, await connection.post("/v1/chat/completions", body | {"messages": messages})))
        connection.close()

    started, cpu = clock(), time.process_time()
    await asyncio.gather(*(client() for _ in range(clients)))
    seconds, cpu = clock() - started, time.process_time() - cpu
    for _, answer in found:
        if answer.status != 200:
            raise RuntimeError(f"{answer.status}: {answer.body[:200]!r}")
    firsts = [_first(asked, answer) for asked, answer in found] if stream else []
    return {"seconds": seconds, "tokens": len(words) * tokens, "first_seconds": firsts, "client_cpu_seconds": cpu}


def _first(asked: float, answer: Answer) -> float:
    """When the first text came: the second event, behind the one that only says who speaks."""
    if len(answer.times) < 3:
        raise RuntimeError(f"a stream of {len(answer.times)} parts")
    return answer.times[1] - asked


def turn(served: Served, way: str, words: list[Any], clients: int, tokens: int) -> dict[str, Any]:
    before = served.cpu()
    if way == "own":
        found: dict[str, Any] = served.do("own", conversations=words, clients=clients, tokens=tokens)
    else:
        found = asyncio.run(by_http(served.port, words, clients, tokens, stream=way == "stream"))
    cpu, loop = (after - start for after, start in zip(served.cpu(), before, strict=True))
    rate = found["tokens"] / found["seconds"]
    return found | {"tokens_per_second": rate, "cpu_seconds": cpu, "event_loop_cpu_seconds": loop}


def compared(turns: dict[str, list[dict[str, Any]]], clients: int) -> dict[str, Any]:
    """Each way against the engine's own in the same turn."""
    found: dict[str, Any] = {}
    for way in WAYS:
        rates = [each["tokens_per_second"] for each in turns[way]]
        ratios = [mine / own["tokens_per_second"] for mine, own in zip(rates, turns["own"], strict=True)]
        found[way] = {"tokens_per_second": median(rates), "over_own": geometric_mean(ratios), "each_over_own": ratios}
        if way != "own":
            for whose in ("client", "event_loop"):
                shares = (each[f"{whose}_cpu_seconds"] / each["seconds"] for each in turns[way])
                found[way][f"{whose}_cpu_share"] = median(shares)
            spent = sum(each["event_loop_cpu_seconds"] for each in turns[way])
            found[way]["event_loop_us_per_token"] = 1e6 * spent / sum(each["tokens"] for each in turns[way])
    for way in ("own", "stream"):
        found[way]["first_seconds"] = median(median(each["first_seconds"]) for each in turns[way])
    found["first_later_by_seconds"] = found["stream"]["first_seconds"] - found["own"]["first_seconds"]
    return {"clients": clients} | found


def measure(served: Served, options: argparse.Namespace) -> dict[str, Any]:
    result = {}
    for clients in (options.clients, 1):
        number = options.requests if clients > 1 else max(4, options.requests // 6)
        turns: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
        for i in range(options.turns + 1):
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
    arguments.add_argument("--requests", type=int, default=24, help="in a turn")
    arguments.add_argument("--tokens", type=int, default=48)
    arguments.add_argument("--turns", type=int, default=5)
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
