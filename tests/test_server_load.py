"""Many clients at once over a network that fails, in small: ``benchmarks/serve_load.py`` is the long form."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

from server_tools import Server

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
CLIENTS, LEAVING = 60, 12


@pytest.fixture
def serve_load(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import serve_load

    return serve_load


def stormed(serve_load: Any, server: Server, kinds: Any, expected: Any) -> Any:
    async def main() -> Any:
        proxy = serve_load.Proxy(int(server.url.rpartition(":")[2]), seed=3)
        found = serve_load.Storm(await proxy.start(), proxy, kinds, expected)
        await found.run(CLIENTS, LEAVING, seed=5)
        await proxy.close()
        return found

    return asyncio.run(asyncio.wait_for(main(), 120))


def test_nothing_is_lost_or_wrong_when_many_come_and_some_leave(serve_load: Any) -> None:
    server = Server(llm={"max_waiting": 12})
    kinds = serve_load.asks(10, seed=2)
    expected = asyncio.run(serve_load.alone(int(server.url.rpartition(":")[2]), kinds))
    storm = stormed(serve_load, server, kinds, expected)
    assert storm.wrong == []
    assert storm.tally["answered"] == CLIENTS - LEAVING
    assert storm.tally["left"] == LEAVING
    assert storm.tally["429"], "the line was never full"
    assert storm.tally["cut by the network"]
    server.settle()
    assert not server.llm.engine._discarded
    wrong = [{index: (text + "!", scores, end) for index, (text, scores, end) in each.items()} for each in expected]
    assert len(stormed(serve_load, server, kinds, wrong).wrong) >= CLIENTS - LEAVING, "it would see a wrong answer"
    server.close()
