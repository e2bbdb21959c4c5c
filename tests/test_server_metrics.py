"""``/metrics``: right numbers, also when requests abort and fail; the dashboard names nothing that is not there."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

from prometheus_client.parser import text_string_to_metric_families
from server_tools import WORDS, Server, tiny_llm

from headstart import AsyncLLM, SamplingParams
from headstart.server.app import create_app
from headstart.server.metrics import Metrics

DASHBOARD = Path(__file__).parents[1] / "docs" / "grafana.json"
ISSUE = [
    *(
        f"vllm:{name}"
        for name in (
            "spec_decode_num_drafts_total",
            "spec_decode_num_draft_tokens_total",
            "spec_decode_num_accepted_tokens_total",
            "spec_decode_num_accepted_tokens_per_pos_total",
            "num_requests_running",
            "num_requests_waiting",
            "kv_cache_usage_perc",
            "prefix_cache_queries_total",
            "prefix_cache_hits_total",
            "prompt_tokens_total",
            "generation_tokens_total",
            "request_success_total",
            "time_to_first_token_seconds_bucket",
            "inter_token_latency_seconds_bucket",
            "e2e_request_latency_seconds_bucket",
            "request_queue_time_seconds_bucket",
            "request_prefill_time_seconds_bucket",
            "request_decode_time_seconds_bucket",
        )
    ),
    "headstart_acceptance_rate",
    "headstart_acceptance_length",
    "headstart_draft_length",
    "headstart_speculating",
    "headstart_break_even_draft",
    "headstart_break_even_verify",
    "headstart_round_seconds_sum",
    "headstart_speculation_held_back",
    "http_requests_total",
]


def samples(metrics: Metrics | str) -> dict[str, dict[tuple[str, ...], float]]:
    """By name, and by the values of the labels behind those that all have."""
    text = metrics if isinstance(metrics, str) else metrics.text().decode()
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert sample.labels["model_name"] == "tiny"
            assert sample.labels["engine"] == "0"
            key = tuple(value for name, value in sorted(sample.labels.items()) if name not in ("model_name", "engine"))
            found.setdefault(sample.name, {})[key] = sample.value
    return found


def one(found: dict[str, dict[tuple[str, ...], float]], name: str) -> float:
    [value] = found[name].values()
    return value


def test_every_name_is_there_before_and_after_a_request() -> None:
    server = Server()
    try:
        for _ in range(2):
            status, text = server.get("/metrics")
            assert status == 200
            found = samples(text)
            assert [name for name in ISSUE if name not in found and name != "http_requests_total"] == []
            server.post("/v1/completions", {"prompt": "one two one two one", "max_tokens": 8, "ignore_eos": True})
        server.get("/nowhere")
        server.get("/v1/models/x")
        found = samples(server.get("/metrics")[1])
        seen = found["http_requests_total"]
        assert seen["/v1/completions", "POST", "200"] == 2
        assert seen["none", "GET", "404"] == 1, "paths that clients make up are no label"
        assert seen["/v1/models/{model}", "GET", "404"] == 1
        assert found["vllm:request_success_total"] == {("stop",): 0, ("length",): 2, ("abort",): 0, ("error",): 0}
    finally:
        server.close()


def test_the_dashboard_names_what_is_there() -> None:
    board = json.loads(DASHBOARD.read_text())
    llm = tiny_llm()
    metrics = Metrics(llm, "tiny")
    llm.generate("one two one two", SamplingParams(max_tokens=8, temperature=0))
    metrics.answered("/v1/models", "GET", 200)
    found = samples(metrics)
    charts = [panel for panel in board["panels"] if panel["type"] != "row"]
    used = set()
    for panel in charts:
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["title"]
        for target in panel["targets"]:
            names = re.findall(r"\b(?:vllm:|headstart_|http_)\w+", target["expr"])
            assert names
            used |= set(names)
            assert target["expr"].count("(") == target["expr"].count(")")
    assert sorted(used - set(found)) == []
    assert {name for name in used if "_bucket" in name} >= {
        name for name in ISSUE if "token" in name and "_bucket" in name
    }
    assert [row["title"] for row in board["panels"] if row["type"] == "row"] == [
        "Traffic",
        "Latency",
        "Speculation",
        "Cache",
    ]
    assert {variable["name"] for variable in board["templating"]["list"]} == {"datasource", "model"}
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_counters_are_right_when_requests_abort_and_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tiny_llm(max_rows=1)
    metrics = Metrics(llm, "tiny")
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    whole = llm.generate([5, 6, 5, 6, 5], params)
    read = samples(metrics)
    assert one(read, "vllm:prompt_tokens_total") == 5
    assert one(read, "vllm:generation_tokens_total") == 6
    assert one(read, "vllm:inter_token_latency_seconds_count") <= 5
    assert one(read, "vllm:inter_token_latency_seconds_count") >= 6 - whole.choices[0].stats.rounds
    streams = [llm.submit([9, 8, 7], SamplingParams(max_tokens=50, ignore_eos=True)) for _ in range(3)]
    next(iter(streams[0]))  # this one has the row
    for stream in streams:
        stream.close()
    llm.generate([5], params)  # whoever steps next puts the others away
    found = samples(metrics)
    assert found["vllm:request_success_total"]["abort",] == 3
    assert one(found, "vllm:prompt_tokens_total") == 5 + 3 + 1, "two were never read"
    assert one(found, "vllm:prefix_cache_queries_total") == 9
    assert one(found, "vllm:prefix_cache_hits_total") <= one(found, "vllm:prefix_cache_queries_total")
    assert one(found, "vllm:e2e_request_latency_seconds_count") == 2, "how long one took that was stopped says nothing"
    assert one(found, "vllm:time_to_first_token_seconds_count") == 3
    with monkeypatch.context() as patched:

        def fails(*_: Any, **__: Any) -> Any:
            raise RuntimeError("no memory")

        patched.setattr(llm.engine.parts.runner, "forward", fails)
        assert llm.generate([[4, 4], [3, 3]], params)[0].finish_reason == "error"
    found = samples(metrics)
    assert found["vllm:request_success_total"]["error",] == 2
    assert one(found, "vllm:e2e_request_latency_seconds_count") == 2
    assert one(found, "vllm:num_requests_running") == one(found, "vllm:num_requests_waiting") == 0
    llm.generate([5], SamplingParams(max_tokens=2, n=3, seed=1))
    found = samples(metrics)
    assert one(found, "vllm:prefix_cache_hits_total") <= one(found, "vllm:prefix_cache_queries_total")


def test_histograms_count_what_they_say() -> None:
    llm = tiny_llm()
    metrics = Metrics(llm, "tiny")
    llm.generate([[5, 6, i] for i in range(8)], SamplingParams(max_tokens=7, temperature=0, ignore_eos=True))
    found = samples(metrics)
    for name in ("e2e_request_latency", "time_to_first_token", "request_queue_time", "request_decode_time"):
        buckets = {float(le): count for (le,), count in found[f"vllm:{name}_seconds_bucket"].items()}
        assert list(buckets.values()) == sorted(buckets.values())
        assert buckets[float("inf")] == found[f"vllm:{name}_seconds_count"][()] == 8
        assert min(buckets) < 0.001
        assert max(le for le in buckets if le < float("inf")) >= 600, "milliseconds and minutes"
    assert found["vllm:request_generation_tokens_sum"][()] == 56
    assert found["vllm:request_prompt_tokens_bucket"]["5.0",] == 8
    assert found["vllm:e2e_request_latency_seconds_sum"][()] >= found["vllm:request_decode_time_seconds_sum"][()]
    rounds = found["headstart_round_seconds_count"]
    assert sum(rounds.values()) == one(found, "headstart_rounds_total") > 0


def test_what_the_controller_thinks_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tiny_llm()
    metrics = Metrics(llm, "tiny")
    monkeypatch.setattr(llm.engine.parts.controller, "min_chances", lambda: (0.25, 0.5))
    llm.generate("one two", SamplingParams(max_tokens=3))
    found = samples(metrics)
    assert (one(found, "headstart_break_even_verify"), one(found, "headstart_break_even_draft")) == (0.25, 0.5)


def test_what_it_believes_that_rounds_cost_is_told() -> None:
    llm = tiny_llm(max_gamma=6)
    metrics = Metrics(llm, "tiny")
    found = samples(metrics)
    assert one(found, "headstart_cost_rows") == 0
    assert "headstart_forward_cost_seconds" not in found
    llm.generate(["one two one two one", "three three three"], SamplingParams(max_tokens=40, temperature=0))
    metrics._ask(0.0)
    found = samples(metrics)
    forwards = found["headstart_forward_cost_seconds"]
    assert sorted(forwards) == [(str(width),) for width in range(1, 8)], "no more labels than widths"
    assert one(found, "headstart_cost_rows") in (1, 2)
    assert forwards["7",] >= forwards["1",] > 0
    assert one(found, "headstart_draft_token_cost_seconds") == 0, "lookup costs nothing"
    learnt = llm.engine.parts.controller.beliefs()
    assert list(forwards.values()) == list(learnt.forwards)
    fixed = Metrics(tiny_llm(gamma=2), "tiny")
    fixed._ask(0.0)
    assert one(samples(fixed), "headstart_cost_rows") == 0


def test_why_there_is_no_speculation_is_a_label_that_does_not_grow() -> None:
    llm = tiny_llm(gamma=0)
    metrics = Metrics(llm, "tiny")
    llm.generate("one", SamplingParams(max_tokens=2))
    found = samples(metrics)
    assert one(found, "headstart_speculating") == 0
    [((reason,), value)] = found["headstart_speculation_held_back"].items()
    assert value == 1
    assert reason
    assert ":" not in reason


def test_a_thousand_requests_leave_nothing_behind() -> None:
    llm = tiny_llm(max_rows=8)
    metrics = Metrics(llm, "tiny")
    params = SamplingParams(max_tokens=2, temperature=0)
    sizes = []
    for _ in range(2):
        llm.generate([[i % 50 + 3, 5] for i in range(500)], params)
        sizes.append(len(metrics.text().splitlines()))
    assert sizes[0] == sizes[1]
    assert not metrics._last
    assert not metrics._opening
    assert sum(samples(metrics)["vllm:request_success_total"].values()) == 1000


def test_the_key_is_asked_for_here_too() -> None:
    server = Server(api_key="sesame")
    try:
        assert server.get("/metrics")[0] == 401
        assert server.get("/metrics", Authorization="Bearer sesame")[0] == 200
        assert server.post("/v1/chat/completions", {"messages": WORDS})[0] == 401
    finally:
        server.close()


def test_nothing_is_counted_for_an_app_that_has_stopped() -> None:
    """Its LLM may live on, under another app: each that came and went was told of every round, for ever."""
    llm = tiny_llm()

    async def live(app: Any) -> None:
        async with app.router.lifespan_context(app):
            pass

    app = create_app(AsyncLLM(llm))
    asyncio.run(live(app))
    llm.generate("one", SamplingParams(max_tokens=2, ignore_eos=True))
    assert "vllm:request_generation_tokens_count" in (said := app.state.service.metrics.text().decode())
    assert re.search(r"^vllm:request_generation_tokens_count\S* 0\.0$", said, re.MULTILINE)
