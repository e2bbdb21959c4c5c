"""``/metrics``: vLLM's names, so that its dashboards and load tools work, and ours for what speculation does.

Knows: an ``LLM``'s stats, rounds, and requests that begin and end. Does not know: routes, but those it is told of.

Counted are things that happened, also to requests that were aborted or failed: their tokens, their prompts if they were
read, their first token if there was one. How long a request took counts only if it came to its own end.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import accumulate
from threading import Lock
from time import perf_counter

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.utils import floatToGoString

from ..api import LLM
from ..control.costs import Beliefs
from ..engine.copies import undisturbed
from ..types import Completion, FinishReason, Request, Round, Stats

__all__ = ["Metrics"]

ENGINE = "0"  # vLLM numbers its engines; there is one
#: from a token of a small model to an answer that takes the better part of an hour
SECONDS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0),
)
TOKENS = tuple(base * 10**power for power in range(6) for base in (1, 2, 5))[:-1]
_HISTOGRAMS = {
    "time_to_first_token_seconds": ("From submitting a request to its first token.", SECONDS),
    "inter_token_latency_seconds": ("Time between a token and the next, of each token.", SECONDS),
    "request_time_per_output_token_seconds": ("Mean time between two tokens of a request.", SECONDS),
    "e2e_request_latency_seconds": ("From submitting a request to its end.", SECONDS),
    "request_queue_time_seconds": ("Time in the waiting line.", SECONDS),
    "request_inference_time_seconds": ("From the start of reading a prompt to the end.", SECONDS),
    "request_prefill_time_seconds": ("From the start of reading a prompt to the first token.", SECONDS),
    "request_decode_time_seconds": ("From the first token to the last.", SECONDS),
    "request_prompt_tokens": ("Prompt tokens of a request.", TOKENS),
    "request_generation_tokens": ("Tokens written for a request.", TOKENS),
}
_ENDS: tuple[FinishReason, ...] = ("stop", "length", "abort", "error")
_ASKED_EVERY = 1.0  # seconds between two questions to the controller


class Metrics:
    """Counts what an LLM does; ``text`` is what Prometheus reads."""

    media_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, llm: LLM, model: str) -> None:
        self._llm = llm
        self._labels = {"model_name": model, "engine": ENGINE}
        self._lock = Lock()  # the thread that steps counts, event loops read
        self._histograms = {name: _Histogram(bounds) for name, (_, bounds) in _HISTOGRAMS.items()}
        self._by_place: list[int] = [0]  # accepted tokens, by their place in the draft
        self._drafts = self._prompt_tokens = self._looked_for = self._warm = 0
        self._opening: dict[str, int] = {}  # prompts that are about to be read
        self._last: dict[str, float] = {}  # when a running sequence wrote its last token
        self._ends = dict.fromkeys(_ENDS, 0)
        self._round_counts: Counter[str] = Counter()  # by kind
        self._round_seconds = defaultdict[str, float](float)
        self._break_even = (0.0, 0.0)
        self._beliefs = Beliefs()
        self._asked = 0.0
        self._answered: Counter[tuple[str, str, str]] = Counter()
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self.listening = llm.listen(self._rounds, begun=self._begun, ended=self._ended)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def answered(self, route: str, method: str, status: int) -> None:
        """An HTTP request was answered."""
        with self._lock:
            self._answered[route, method, str(status)] += 1

    # -- what Prometheus reads

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            return iter([*self._traffic(), *self._speculation(), *self._controller()])

    def _traffic(self) -> Iterator[Metric]:
        engine, stats = self._llm.engine, self._llm.stats
        slab = engine.parts.runner.slab
        rows = slab.rows - slab.free_rows
        used = sum(slab.lengths[:rows]) / (slab.rows * slab.capacity)
        yield self._gauge("vllm:num_requests_running", "Sequences in the batch.", rows)
        yield self._gauge("vllm:num_requests_waiting", "Sequences in the queue.", engine.waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of the KV cache in use, 1 is all.", used)
        yield self._counter("vllm:prompt_tokens", "Prompt tokens of requests that were read.", self._prompt_tokens)
        yield self._counter("vllm:generation_tokens", "Tokens written.", stats.tokens)
        yield self._counter(
            "vllm:prefix_cache_queries", "Prompt tokens looked for in the prefix cache.", self._looked_for
        )
        yield self._counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", self._warm)
        ends = [((reason,), count) for reason, count in undisturbed(lambda: list(self._ends.items()))]
        yield self._counters("vllm:request_success", "Choices that ended.", ["finished_reason"], ends)
        for name, (help, _) in _HISTOGRAMS.items():
            found = HistogramMetricFamily(f"vllm:{name}", help, labels=list(self._labels))
            found.add_metric(list(self._labels.values()), *self._histograms[name].read())
            yield found
        yield self._counters(
            "http_requests", "Answers by HTTP.", ["handler", "method", "status"], self._answered.items()
        )

    def _speculation(self) -> Iterator[Metric]:
        stats = self._llm.stats
        yield self._counter("vllm:spec_decode_num_drafts", "Drafts verified.", self._drafts)
        yield self._counter("vllm:spec_decode_num_draft_tokens", "Tokens drafted.", stats.drafted)
        yield self._counter("vllm:spec_decode_num_accepted_tokens", "Drafted tokens accepted.", stats.accepted)
        places = [((str(place),), count) for place, count in enumerate(self._by_place)]
        help = "Drafted tokens accepted, by their place in the draft."
        yield self._counters("vllm:spec_decode_num_accepted_tokens_per_pos", help, ["position"], places)
        gamma = stats.drafted / self._drafts if self._drafts else 0.0
        yield self._gauge("headstart_acceptance_rate", "alpha, since the start.", stats.acceptance_rate)
        help = "tau: tokens a round and row, since the start."
        yield self._gauge("headstart_acceptance_length", help, stats.acceptance_length)
        yield self._gauge("headstart_draft_length", "gamma: tokens a draft, since the start.", gamma)
        yield self._counter("headstart_rounds", "Decoding steps (forward passes of the target).", stats.rounds)
        yield self._counter("headstart_row_rounds", "The same, counted for each sequence.", stats.row_rounds)

    def _controller(self) -> Iterator[Metric]:
        stats, why = self._llm.stats, self._llm.engine.inactive_reason
        labels = [*self._labels, "kind"]
        rounds = SummaryMetricFamily("headstart_round_seconds", "What rounds took, for all rows.", labels=labels)
        for kind in ("plain", "drafted", "prefill"):
            rounds.add_metric([*self._labels.values(), kind], self._round_counts[kind], self._round_seconds[kind])
        yield rounds
        yield self._counter("headstart_draft_seconds", "Time spent drafting.", stats.draft_seconds)
        yield self._counter("headstart_verify_seconds", "Time of the target's forwards.", stats.verify_seconds)
        help = "Time of drafters reading what they lacked."
        yield self._counter("headstart_catch_up_seconds", help, stats.catch_up_seconds)
        keep, extend = self._break_even
        help = "Least acceptance probability, summed over the batch, at which verifying a token more pays; 0: any does."
        yield self._gauge("headstart_break_even_verify", help, keep)
        help = "The same for drafting a token more and verifying it."
        yield self._gauge("headstart_break_even_draft", help, extend)
        yield from self._costs()
        yield self._gauge("headstart_speculating", "1 while drafting is thought to pay.", float(why is None))
        held = GaugeMetricFamily(
            "headstart_speculation_held_back", "1 while it is, and why.", labels=[*self._labels, "reason"]
        )
        # Its first words only: the figures behind them change, and every text would be a time series of its own.
        held.add_metric([*self._labels.values(), (why or "").partition(":")[0]], float(why is not None))
        yield held

    def _costs(self) -> Iterator[Metric]:
        """What the controller believes. As many widths as a round may have: they are the labels."""
        known = self._beliefs
        yield self._gauge(
            "headstart_cost_rows", "Rows for which the costs below are believed; 0: none yet.", known.rows
        )
        help = "What a forward pass of the target is believed to take, by its tokens for each sequence."
        forwards = GaugeMetricFamily("headstart_forward_cost_seconds", help, labels=[*self._labels, "width"])
        for width, seconds in enumerate(known.forwards, 1):
            forwards.add_metric([*self._labels.values(), str(width)], seconds)
        yield forwards
        yield self._gauge("headstart_draft_cost_seconds", "What any draft is believed to take.", known.draft)
        help = "And more for each of its tokens."
        yield self._gauge("headstart_draft_token_cost_seconds", help, known.step)

    def _gauge(self, name: str, help: str, value: float) -> Metric:
        found = GaugeMetricFamily(name, help, labels=list(self._labels))
        found.add_metric(list(self._labels.values()), value)
        return found

    def _counter(self, name: str, help: str, value: float) -> Metric:
        return self._counters(name, help, [], [((), value)])

    def _counters(self, name: str, help: str, by: list[str], values: Iterable[tuple[tuple[str, ...], float]]) -> Metric:
        found = CounterMetricFamily(name, help, labels=[*self._labels, *by])
        for key, value in values:
            found.add_metric([*self._labels.values(), *key], value)
        return found

    # -- called by the thread that steps

    def _begun(self, request: Request) -> None:
        """It is about to be read, unless it ends before: a request that was aborted in the line begins and ends."""
        with self._lock:
            self._opening[request.id] = len(request.prompt)

    def _rounds(self, rounds: list[Round]) -> None:
        now = perf_counter()
        with self._lock:
            if self._opening:
                self._prompt_tokens += sum(self._opening.values())
                self._opening.clear()
            self._time(rounds)
            for record in rounds:
                self._drafts += bool(record.drafted)
                self._by_place += [0] * (record.accepted - len(self._by_place))
                for place in range(record.accepted):
                    self._by_place[place] += 1
                if record.emitted:
                    before = self._last.get(record.sequence)
                    if before is not None:
                        each = (now - before) / record.emitted
                        self._histograms["inter_token_latency_seconds"].add(each, record.emitted)
                    self._last[record.sequence] = now
        if now - self._asked > _ASKED_EVERY:
            self._ask(now)

    def _ask(self, now: float) -> None:
        """What the controller thinks. Not asked when Prometheus asks: it belongs to the thread that steps."""
        self._asked = now
        controller = self._llm.engine.parts.controller
        self._break_even, self._beliefs = controller.min_chances(), controller.beliefs()

    def _time(self, rounds: list[Round]) -> None:
        if not rounds:
            return
        first = rounds[0]
        drafted = any(record.drafted for record in rounds)
        kind = "prefill" if first.prefill else "drafted" if drafted else "plain"
        self._round_counts[kind] += 1
        self._round_seconds[kind] += first.round_seconds

    def _ended(self, answer: Completion) -> None:
        with self._lock:
            length = self._opening.pop(answer.id, 0)
            if any(choice.stats.waiting_seconds > 0 for choice in answer.choices):  # it had a row
                self._prompt_tokens += length
            for choice in answer.choices:
                self._last.pop(f"{answer.id}/{choice.index}", None)
                self._ends[choice.finish_reason] += 1
                if choice.stats.waiting_seconds > 0:
                    self._looked_for += choice.stats.prompt_tokens
                    self._warm += choice.stats.cached_tokens
                    self._observe(choice.stats, whole=choice.finish_reason in ("stop", "length"))
        self._ask(perf_counter())

    def _observe(self, stats: Stats, *, whole: bool) -> None:
        first, waited = stats.first_token_seconds, stats.waiting_seconds
        found: dict[str, float] = {"request_queue_time_seconds": waited}
        if first:
            found |= {"time_to_first_token_seconds": first, "request_prefill_time_seconds": first - waited}
        if whole:
            found |= {
                "e2e_request_latency_seconds": waited + stats.seconds,
                "request_inference_time_seconds": stats.seconds,
                "request_prompt_tokens": stats.prompt_tokens,
                "request_generation_tokens": stats.tokens,
            }
        if whole and first:
            decoding = max(0.0, stats.seconds - (first - waited))
            found["request_decode_time_seconds"] = decoding
            if stats.tokens > 1:
                found["request_time_per_output_token_seconds"] = decoding / (stats.tokens - 1)
        for name, value in found.items():
            self._histograms[name].add(value)


class _Histogram:
    """Counts values by size, several equal ones at once."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds, self._counts, self._sum = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def read(self) -> tuple[list[tuple[str, float]], float]:
        """How many are at most so large, for each bound; and their sum."""
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        return list(zip(names, map(float, accumulate(self._counts)), strict=True)), self._sum
