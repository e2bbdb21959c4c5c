"""Everything at once for a while: threads, arrivals, aborts, interruptions, failing drafters and forwards, cold caches.

``make stress SECONDS=600`` runs it for long, ``test_stress.py`` briefly, in two processes that share a cold cache.
Ends with the texts of an undisturbed run, and with nothing left behind.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import hashlib
import logging
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from interrupts import Interrupted
from slab_tools import check_slab

from headstart import LLM, Drafter, EngineBusy, GenerationFailed, Proposal, SamplingParams
from headstart.drafters.lookup import LookupDrafter
from headstart.testing import tiny_model
from headstart.types import DraftView

SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
SHARED = [3, 9, 4, 9, 4, 7, 3, 9]
PROMPTS = [SHARED[: 2 + i % 7] + [10 + i, 5, 9][: i % 4] for i in range(12)]
SETTINGS = [
    {"temperature": 0.0, "max_tokens": 20},
    {"temperature": 0.9, "max_tokens": 15, "seed": 1, "verification": "coupled"},
    {"temperature": 0.0, "max_tokens": 12, "repetition_penalty": 1.2, "logprobs": 1},
    {"temperature": 1.1, "max_tokens": 25, "seed": 2, "verification": "coupled", "top_p": 0.9, "n": 2},
    {"temperature": 0.0, "max_tokens": 30, "speculate": False},
]
JOBS = [(prompt, SamplingParams(**SETTINGS[i % len(SETTINGS)])) for i, prompt in enumerate(PROMPTS)]  # type: ignore[arg-type]
THREADS = 6
BACKENDS = ("lookup", "float32", "int8", "failing drafter", "failing forward")


class FailsLater(Drafter):
    """Looks up, until it raises; then it must be gone, and nobody may notice."""

    name = "fails later"
    free = True

    def __init__(self, after: int) -> None:
        self.left, self._lookup = after, LookupDrafter()

    def propose(self, views: Sequence[DraftView], budgets: Sequence[int]) -> list[Proposal | None]:
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("this drafter has had enough")
        return self._lookup.propose(views, budgets)


def opened(backend: str) -> LLM:
    target, draft = tiny_model("llama", **SIZES), tiny_model("llama", seed=0, num_hidden_layers=1, **SIZES)
    guesser: Any = draft if backend in ("float32", "int8", "failing forward") else "lookup"
    if backend == "failing drafter":
        guesser = FailsLater(50)
    quantization: Any = "int8" if backend == "int8" else None
    return LLM(target, guesser, quantization=quantization, max_rows=3, max_model_len=64, max_waiting=16)


def texts(completion: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(choice.token_ids for choice in completion.choices)


class Worker(threading.Thread):
    """Asks for this and that until it is told to stop, and compares what it gets."""

    def __init__(self, llm: LLM, expected: list[Any], seed: int, seen: Counter[str], wrong: list[str]) -> None:
        super().__init__(daemon=True)
        self.llm, self.expected, self.seen, self.wrong = llm, expected, seen, wrong
        self.draw = random.Random(seed)
        self.stop = threading.Event()

    def run(self) -> None:
        while not self.stop.is_set():
            try:
                while not self.stop.is_set():
                    self.act()
            except Interrupted:
                self.seen["interrupted"] += 1
            except EngineBusy:
                self.seen["busy"] += 1
            except GenerationFailed as error:
                self.seen["failed"] += 1
                if not any(word in str(error) for word in ("interrupted", "broken on purpose")):
                    self.wrong.append(f"failed for another reason: {error}")

    def act(self) -> None:
        action, i = self.draw.choice(("one", "many", "stream", "drop", "close")), self.draw.randrange(len(JOBS))
        prompt, params = JOBS[i]
        if action == "one":
            self.compare(i, texts(self.llm.generate(prompt, params)))
        elif action == "many":
            chosen = [(i + k) % len(JOBS) for k in range(self.draw.randrange(1, 6))]
            answers = self.llm.generate([JOBS[k][0] for k in chosen], [JOBS[k][1] for k in chosen])
            for k, answer in zip(chosen, answers, strict=True):
                if all(choice.finish_reason != "error" for choice in answer.choices):
                    self.compare(k, texts(answer))
        elif action == "stream":
            found: dict[int, list[int]] = {}
            for piece in self.llm.stream(prompt, params):
                if piece.token_id is not None:
                    found.setdefault(piece.index, []).append(piece.token_id)
            self.compare(i, tuple(tuple(found[index]) for index in sorted(found)))
        else:
            stream = self.llm.stream(prompt, params)
            for _ in range(self.draw.randrange(4)):
                next(stream, None)
            if action == "close":
                stream.close()
        self.seen[action] += 1

    def compare(self, i: int, found: Any) -> None:
        if found != self.expected[i]:
            self.wrong.append(f"job {i}: {found} instead of {self.expected[i]}")


def interrupt(thread: threading.Thread) -> None:
    """What Ctrl-C does to the main thread, for any thread: at its next chance it raises."""
    if thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(Interrupted))


def break_forwards(llm: LLM, draw: random.Random) -> None:
    runner: Any = llm.engine.parts.runner
    forward = runner.forward

    def sometimes(*args: Any, **kwargs: Any) -> Any:
        if draw.random() < 0.02:
            raise RuntimeError("broken on purpose")
        return forward(*args, **kwargs)

    runner.forward = sometimes


def stress(llm: LLM, backend: str, seconds: float, seed: int, expected: list[Any]) -> Counter[str]:
    """What happened in a disturbed run; asserts that it did no harm. ``expected``: the texts of an undisturbed one."""
    draw, seen, wrong = random.Random(seed), Counter[str](), list[str]()
    if backend == "failing forward":
        forward = llm.engine.parts.runner.forward
        break_forwards(llm, draw)
    workers = [Worker(llm, expected, seed * 100 + i, seen, wrong) for i in range(THREADS)]
    for worker in workers:
        worker.start()
    end = time.monotonic() + seconds
    while time.monotonic() < end and not wrong:
        time.sleep(draw.uniform(0.01, 0.4))
        interrupt(draw.choice(workers))
    for worker in workers:
        worker.stop.set()
    for worker in workers:
        worker.join(120)
        assert not worker.is_alive(), f"{backend}: a thread hangs; {seen}"
    assert not wrong, f"{backend}: {wrong[0]} (and {len(wrong) - 1} more); {seen}"
    if backend == "failing forward":
        llm.engine.parts.runner.forward = forward  # type: ignore[method-assign]
    gc.collect()
    prompts, settings = zip(*JOBS, strict=True)
    again = [texts(answer) for answer in llm.generate(list(prompts), list(settings))]
    assert again == expected, f"{backend}: other texts afterwards; {seen}"
    check_empty(llm, backend)
    return seen


def check_empty(llm: LLM, backend: str) -> None:
    engine: Any = llm.engine
    drain = time.monotonic() + 60
    while not engine.idle and time.monotonic() < drain:  # what was dropped just now goes in the next step
        engine.step()
    assert engine.idle, backend
    assert not engine._handles, backend
    slab = engine.parts.runner.slab
    check_slab(slab)
    assert slab.free_rows == slab.rows, backend
    if backend == "failing drafter":
        assert "had enough" in engine.inactive_reason
    elif backend in ("float32", "int8"):
        assert engine.parts.drafter is not None, engine.inactive_reason
        check_slab(engine.parts.drafter.runner.slab)
        assert not engine.parts.drafter.runner.slab.ready_keys, backend


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="in all")
    parser.add_argument("--backend", choices=BACKENDS, action="append", help="one of them only; may be repeated")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("headstart").setLevel(logging.CRITICAL)  # what fails here fails on purpose
    sys.setswitchinterval(1e-3)
    threading.excepthook = lambda args: None if args.exc_type is Interrupted else sys.__excepthook__(*args[:3])
    sys.unraisablehook = lambda args: None if args.exc_type is Interrupted else sys.__unraisablehook__(args)
    backends = given.backend or BACKENDS
    told = hashlib.sha256()
    undisturbed: dict[bool, list[Any]] = {}  # by whether the target is rounded: whoever drafts, its texts are the same
    for backend in backends:
        begun, llm = time.monotonic(), opened(backend)
        rounded = backend == "int8"
        if rounded not in undisturbed:
            undisturbed[rounded] = [texts(llm.generate(prompt, params)) for prompt, params in JOBS]
        seen = stress(llm, backend, given.seconds / len(backends), given.seed, undisturbed[rounded])
        told.update(repr(undisturbed[rounded]).encode())
        print(f"{backend}: {time.monotonic() - begun:.0f} s, {dict(seen)}", file=sys.stderr, flush=True)
    print(told.hexdigest())


if __name__ == "__main__":
    main()
