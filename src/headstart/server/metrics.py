"""``/metrics``: vLLM's names, so that its dashboards and load tools work, and ours for what speculation does.

Knows: an ``LLM``'s stats, rounds and ended requests. Does not know: routes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ..api import LLM
from ..types import Completion, Round

__all__ = ["Metrics"]

_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TIMES = {
    "time_to_first_token_seconds": "From submitting a request to its first token.",
    "inter_token_latency_seconds": "Mean time between two tokens of a request.",
    "e2e_request_latency_seconds": "From submitting a request to its end.",
    "request_queue_time_seconds": "Time in the waiting line.",
    "request_prefill_time_seconds": "From the start of reading a prompt to the first token.",
    "request_decode_time_seconds": "From the first token to the last.",
}


class Metrics:
    """Counts what an LLM does; ``text`` is what Prometheus reads."""

    def __init__(self, llm: LLM, model: str) -> None:
        self._llm, self._model = llm, model
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._times = {
            name: Histogram(f"vllm:{name}", help, ["model_name"], buckets=_SECONDS, registry=self._registry).labels(
                model
            )
            for name, help in _TIMES.items()
        }
        self._by_place: list[int] = []  # accepted tokens, by their place in the draft
        self._drafts = self._prompt_tokens = 0
        self._ends: dict[str, int] = {}
        self.listening = llm.listen(self._rounds, ended=self._ended)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        engine, stats = self._llm.engine, self._llm.stats
        slab = engine.parts.runner.slab
        yield self._gauge("vllm:num_requests_running", "Requests that have a row.", slab.rows - slab.free_rows)
        yield self._gauge("vllm:num_requests_waiting", "Requests in the line.", engine.waiting)
        used = sum(slab.lengths[: slab.rows - slab.free_rows])
        yield self._gauge(
            "vllm:kv_cache_usage_perc", "Share of the rows' slots in use.", used / (slab.rows * slab.capacity)
        )
        yield self._counter("vllm:prompt_tokens", "Prompt tokens of requests that ended.", self._prompt_tokens)
        yield self._counter("vllm:generation_tokens", "Tokens written.", stats.tokens)
        yield self._counter("vllm:prefix_cache_queries", "Prompt tokens looked for in warm rows.", self._prompt_tokens)
        yield self._counter("vllm:prefix_cache_hits", "Prompt tokens that were warm.", stats.cached_tokens)
        yield self._counter("vllm:spec_decode_num_drafts", "Drafts verified.", self._drafts)
        yield self._counter("vllm:spec_decode_num_draft_tokens", "Tokens drafted.", stats.drafted)
        yield self._counter("vllm:spec_decode_num_accepted_tokens", "Drafted tokens accepted.", stats.accepted)
        places = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "The same, by place.", labels=["model_name", "position"]
        )
        for place, count in enumerate(self._by_place):
            places.add_metric([self._model, str(place)], count)
        yield places
        ends = CounterMetricFamily("vllm:request_success", "Requests ended.", labels=["model_name", "finished_reason"])
        for reason, count in sorted(self._ends.items()):
            ends.add_metric([self._model, reason], count)
        yield ends
        yield self._gauge("headstart_acceptance_rate", "alpha, since the start.", stats.acceptance_rate)
        yield self._gauge(
            "headstart_acceptance_length", "tau: tokens a round and row, since the start.", stats.acceptance_length
        )
        active = float(engine.inactive_reason is None)
        yield self._gauge("headstart_speculating", "1 while drafting is thought to pay.", active)

    def _gauge(self, name: str, help: str, value: float) -> Metric:
        found = GaugeMetricFamily(name, help, labels=["model_name"])
        found.add_metric([self._model], value)
        return found

    def _counter(self, name: str, help: str, value: float) -> Metric:
        found = CounterMetricFamily(name, help, labels=["model_name"])
        found.add_metric([self._model], value)
        return found

    # -- called by the thread that steps

    def _rounds(self, rounds: list[Round]) -> None:
        for record in rounds:
            self._drafts += bool(record.drafted)
            self._by_place += [0] * (record.accepted - len(self._by_place))
            for place in range(record.accepted):
                self._by_place[place] += 1

    def _ended(self, answer: Completion) -> None:
        self._prompt_tokens += len(answer.prompt_token_ids)
        for choice in answer.choices:
            stats: Any = choice.stats
            self._ends[choice.finish_reason] = self._ends.get(choice.finish_reason, 0) + 1
            if not stats.first_token_seconds:
                continue
            first, waited = stats.first_token_seconds, stats.waiting_seconds
            decoding = max(0.0, stats.seconds - (first - waited))
            values = (
                first,
                decoding / max(1, stats.tokens - 1),
                waited + stats.seconds,
                waited,
                first - waited,
                decoding,
            )
            for name, value in zip(_TIMES, values, strict=True):
                self._times[name].observe(value)
