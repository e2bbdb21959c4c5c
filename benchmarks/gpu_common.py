"""What the GPU benchmarks share: bandwidth, clocks, and the speed of an engine and of Hugging Face's ``generate``.

Rates are of decoding: tokens over the clock time between rounds, everything included but the reading of prompts.
"""

from __future__ import annotations

import gc
import time
from typing import Any

import torch
from common import greedy, median, set_draft_length

from headstart import LLM, SamplingParams
from headstart.control.controller import FixedController
from headstart.types import Round

TOKENS = 256


def bandwidth() -> float:
    """Bytes a second that a plain reduction reads."""
    data = torch.empty(2 * 1024**3, dtype=torch.bfloat16, device="cuda").normal_()
    times = []
    for _ in range(20):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")
        start.record()
        data.view(torch.int32).view(1024, -1).amax(-1)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return data.numel() * 2 / median(times[5:])


def weight_bytes(model: Any) -> int:
    """What one step reads: every weight once (the embedding is looked up, not read, unless it is the head too)."""
    seen, total = set(), 0
    for name, weight in model.named_parameters():
        lookup = "embed_tokens" in name and not model.config.tie_word_embeddings
        if weight.data_ptr() not in seen and not lookup:
            seen.add(weight.data_ptr())
            total += weight.numel() * weight.element_size()
    return total


class Compiled:
    """Counts the kernels that are compiled, or fetched from the cache, from now on."""

    def __init__(self) -> None:
        from triton import knobs

        self.count = 0
        knobs.runtime.jit_post_compile_hook = self

    def __call__(self, **_: Any) -> None:
        self.count += 1


class Clock:
    """Notes every round with the clock time since the one before."""

    def __init__(self) -> None:
        self.rounds: list[tuple[float, list[Round]]] = []
        self._last = time.perf_counter()

    def __call__(self, records: list[Round]) -> None:
        now = time.perf_counter()
        if records:
            self.rounds.append((now - self._last, records))
        self._last = now

    def decoding(self, rows: int) -> list[tuple[float, list[Round]]]:
        """Rounds of all rows whose predecessor was one too: what lies between prompts and the first is left out."""
        full = [len(records) == rows and not any(r.prefill for r in records) for _, records in self.rounds]
        return [entry for entry, now, before in zip(self.rounds, full, [False, *full], strict=False) if now and before]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def speed(
    llm: LLM, ids: list[list[int]], tokens: int = TOKENS, gamma: int | None = None, **params: Any
) -> dict[str, Any]:
    """Tokens a second over all prompts, one batch at a time; with tau and step times from the rounds, all as means."""
    if gamma is not None:
        llm.engine.parts.controller = FixedController(gamma)
    settings = {"temperature": 0.0, "ignore_eos": True, **params}
    batch = min(llm.config.engine.max_rows, len(ids))
    llm.generate(ids[:batch], SamplingParams(max_tokens=24, seed=0, **settings))  # warm up
    gc.collect()
    gc.freeze()  # a collection of all that was loaded would be timed as part of some round
    clock, compiled = Clock(), Compiled()
    listening = llm.listen(clock)
    rounds = llm.engine.parts.captured
    captured = rounds.captured_programs if rounds is not None else 0
    started = time.perf_counter()
    for at in range(0, len(ids), batch):
        llm.generate(ids[at : at + batch], SamplingParams(max_tokens=tokens, seed=at, **settings))
    wall = time.perf_counter() - started
    gc.unfreeze()
    listening.close()
    full = clock.decoding(batch)
    seconds = [s for s, _ in full]
    records = [r for _, found in full for r in found]
    firsts = [found[0] for _, found in full]
    drafted, accepted = sum(r.drafted for r in records), sum(r.accepted for r in records)
    asked, held = [0] * 65, [0] * 65
    for r in records:
        for i, hit in enumerate(r.outcomes):
            asked[i] += 1
            held[i] += hit
    forward = sum(r.draft_seconds + r.verify_seconds for r in firsts)
    return {
        "tokens_per_second": sum(r.emitted for r in records) / sum(seconds),
        "rounds_per_second": len(full) / sum(seconds),
        "wall_tokens_per_second": len(ids) * tokens / wall,
        "rounds": len(full),
        "tau": sum(r.emitted for r in records) / len(records),
        "alpha": accepted / drafted if drafted else None,
        "conditional_acceptance": [hit / n for hit, n in zip(held, asked, strict=True) if n],
        "round_ms": 1e3 * mean(seconds),
        "round_ms_median": 1e3 * median(seconds),
        "slowest_rounds_ms": sorted((round(1e3 * s, 3) for s in seconds), reverse=True)[:6],
        "verify_ms": 1e3 * mean([r.verify_seconds for r in firsts]),
        "draft_step_ms": 1e3 * mean([r.draft_seconds / r.drafted for r in firsts if r.drafted]) if drafted else None,
        "neither_forward": 1 - forward / sum(seconds),
        "recorded_while_serving": (rounds.captured_programs - captured) if rounds is not None else None,
        "compiled_while_serving": compiled.count,
    }


def hugging_face(model: Any, ids: list[list[int]], tokens: int, **options: Any) -> dict[str, Any]:
    """Hugging Face's ``generate``. Its warm-up is as long as what is timed: static caches are compiled for a length."""
    model.generation_config.eos_token_id = None  # cheaper than to forbid it at each token
    times = []
    for line in [ids[0], *ids]:
        torch.cuda.synchronize()
        started = time.perf_counter()
        answer = greedy(model, line, tokens, **options)
        times.append((time.perf_counter() - started, len(answer)))
    seconds, count = (sum(column) for column in zip(*times[1:], strict=True))  # the first is the warm-up
    return {"tokens_per_second": count / seconds, "prompts": len(ids), "tokens": tokens, "warm_seconds": times[0][0]}


def assisted(model: Any, draft: Any, ids: list[list[int]], tokens: int, gamma: int) -> dict[str, Any]:
    """Hugging Face's assisted generation with just ``gamma`` tokens a round."""
    set_draft_length(draft, gamma)
    return hugging_face(model, ids, tokens, assistant_model=draft)
