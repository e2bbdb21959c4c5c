"""Many threads in one LLM: served together, the same text as alone, on every backend that runs here."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from engines import table, table_draft, table_engine
from slab_tools import check_slab
from test_engine_captured import engine as captured

from headstart import LLM, HeadstartError, SamplingParams
from headstart.engine.turns import Turns
from headstart.machine.cpu.build import why_not
from headstart.testing import tiny_model
from headstart.types import Request

SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
PARAMS = (
    SamplingParams(temperature=0, max_tokens=14),
    SamplingParams(temperature=0.9, max_tokens=18, seed=5, verification="coupled"),
    SamplingParams(temperature=0, max_tokens=9, repetition_penalty=1.2),
    SamplingParams(temperature=1.2, max_tokens=17, seed=6, verification="coupled", top_p=0.9, logprobs=2),
)
PROMPTS = [[3 + i, 7, 11, 20 + i % 3, 5, 9][: 2 + i % 5] for i in range(8)]
JOBS = [(prompt, PARAMS[i % len(PARAMS)]) for i, prompt in enumerate(PROMPTS)]


def opened(kind: str, max_waiting: int = 64) -> LLM:
    target, draft = tiny_model("llama", **SIZES), tiny_model("llama", seed=0, num_hidden_layers=1, **SIZES)
    quantization: Any = None if kind in ("float32", "lookup") else kind
    guesser: Any = "lookup" if kind == "lookup" else draft
    settings: dict[str, Any] = {"gamma": 3, "max_rows": 3, "max_model_len": 96, "max_waiting": max_waiting}
    return LLM(target, guesser, quantization=quantization, **settings)


@pytest.fixture(params=["float32", "lookup", "int8", "int4"], scope="module")
def llm(request: pytest.FixtureRequest) -> LLM:
    if request.param.startswith("int") and (reason := why_not()):
        pytest.skip(reason)
    return opened(request.param)


def answers(llm: LLM, jobs: list[tuple[list[int], SamplingParams]]) -> list[tuple[int, ...]]:
    return [llm.generate(prompt, params).token_ids for prompt, params in jobs]


def in_threads(count: int, work: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(count) as pool:
        return [future.result(timeout=120) for future in [pool.submit(work, i) for i in range(count)]]


def test_threads_get_the_text_that_they_would_get_alone(llm: LLM) -> None:
    expected = answers(llm, JOBS)

    def work(i: int) -> list[tuple[int, ...]]:
        mine = JOBS[i:] + JOBS[:i]
        if i % 3 == 0:
            found = answers(llm, mine)
        elif i % 3 == 1:
            found = [tuple(p.token_id for p in llm.stream(*job) if p.token_id is not None) for job in mine]
        else:
            found = [c.token_ids for c in llm.generate([p for p, _ in mine], [s for _, s in mine])]
        return found[len(JOBS) - i :] + found[: len(JOBS) - i]

    assert in_threads(4, work) == [expected] * 4
    assert answers(llm, JOBS) == expected  # and afterwards, alone
    assert llm.engine.idle
    assert not llm.engine._handles
    check_slab(llm.engine.parts.runner.slab)
    assert llm.engine.inactive_reason is None


def test_threads_wait_for_a_place_in_a_short_line() -> None:
    llm = opened("lookup", max_waiting=2)
    prompts, params = [p for p, _ in JOBS], [s for _, s in JOBS]
    expected = [c.token_ids for c in llm.generate(prompts, params)]
    found = in_threads(4, lambda i: [c.token_ids for c in llm.generate(prompts, params)])
    assert found == [expected] * 4


def test_requests_of_several_threads_share_their_rounds(llm: LLM) -> None:
    most = 0

    def count(rounds: list[Any]) -> None:
        nonlocal most
        most = max(most, len(rounds))

    llm.engine.listen(count)
    begin = threading.Barrier(3)

    def work(i: int) -> None:
        begin.wait(30)
        llm.generate([4, 5, 6 + i], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))

    in_threads(3, work)
    assert most == 3


def test_streams_dropped_in_many_threads_leave_nothing_behind(llm: LLM) -> None:
    expected = answers(llm, JOBS[:2])

    def work(i: int) -> list[tuple[int, ...]]:
        for turn in range(4):
            stream = llm.stream(*JOBS[(i + turn) % len(JOBS)])
            for _ in range((i + turn) % 3):
                next(stream, None)
            if turn % 2:
                stream.close()
            del stream
        return answers(llm, JOBS[:2])

    assert in_threads(5, work) == [expected] * 5
    gc.collect()
    assert answers(llm, JOBS[:2]) == expected
    assert llm.engine.idle
    assert not llm.engine._handles


def test_a_stream_dropped_before_its_first_piece_costs_nothing(llm: LLM) -> None:
    before = llm.stats.tokens
    llm.stream([5, 6, 7], SamplingParams(temperature=0, max_tokens=64, ignore_eos=True))
    gc.collect()
    out = llm.generate([8, 9], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    assert llm.stats.tokens - before == len(out.token_ids) == 3
    assert llm.engine.idle


def test_a_forked_child_is_served(llm: LLM) -> None:
    if not hasattr(os, "fork"):
        pytest.skip("nothing forks here")
    expected = answers(llm, JOBS[:4])
    running = llm.stream(*JOBS[0])
    next(running)  # the child must not go on with its parent's requests
    read, write = os.pipe()
    child = os.fork()
    if child == 0:  # no pytest in here: it ends with _exit, whatever happens
        try:
            os.write(write, repr(answers(llm, JOBS[:4])).encode())
            os._exit(0)
        finally:
            os._exit(1)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        told = pipe.read().decode()
    assert os.waitpid(child, 0)[1] == 0
    assert told == repr(expected)
    running.close()
    assert answers(llm, JOBS[:4]) == expected


def test_two_engines_over_one_model_in_two_threads() -> None:
    """What a forward lends to a Hugging Face model must not meet another engine's forward, nor stay behind."""
    target = tiny_model("llama", **SIZES)
    engines = [LLM(target, "lookup", max_rows=2, max_model_len=96) for _ in "ab"]
    expected = answers(engines[0], JOBS)
    assert in_threads(4, lambda i: answers(engines[i % 2], JOBS)) == [expected] * 4
    assert target.config._attn_implementation == "sdpa"


def test_torch_keeps_its_threads() -> None:
    if reason := why_not():
        pytest.skip(reason)
    torch.set_num_threads(2)
    try:
        engines = [opened("int8") for _ in "ab"]
        in_threads(4, lambda i: answers(engines[i % 2], JOBS[:4]))
        assert torch.get_num_threads() == 2
        seen: list[int] = []
        thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert seen == [2]
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("overlap", [False, True])
def test_threads_over_captured_rounds(overlap: bool) -> None:
    """The same programs that a GPU replays, run one by one here."""
    engine = captured(3, 3, overlap=overlap)

    def work(i: int) -> list[tuple[int, ...]]:
        found = []
        for turn in range(6):
            params = SamplingParams(temperature=0.8 * (turn % 2), max_tokens=12, seed=turn, verification="coupled")
            handle = engine.submit(Request(f"{i}-{turn}", (1, 2, 3 + turn % 2), params))
            engine.drive(lambda handle=handle: handle.done)
            found.append(handle.completion().token_ids)
        return found

    expected = work(-1)
    assert in_threads(5, work) == [expected] * 5
    assert engine.idle


# -- whose turn it is


def test_a_listener_may_abort_but_not_step() -> None:
    engine = table_engine(table(6), table_draft(table(6, 1)))
    seen: list[str] = []

    def meddle(rounds: list[Any]) -> None:
        engine.abort("a")
        with pytest.raises(HeadstartError, match="in the middle of a step"):
            engine.step()
        seen.append("asked")

    engine.listen(meddle)
    handle = engine.submit(Request("a", (1, 2), SamplingParams(max_tokens=40, temperature=0)))
    other = engine.submit(Request("b", (1, 2), SamplingParams(max_tokens=5, temperature=0)))
    engine.drive(lambda: handle.done and other.done)
    assert seen
    assert handle.completion().finish_reason == "abort"
    assert other.completion().finish_reason == "length"


def test_a_listener_that_raises_hurts_nobody(caplog: pytest.LogCaptureFixture) -> None:
    engine = table_engine(table(6), None)
    calls = []

    def bad(rounds: list[Any]) -> None:
        calls.append(1)
        raise RuntimeError("metrics are down")

    engine.listen(bad)
    handle = engine.submit(Request("a", (1, 2), SamplingParams(max_tokens=5, temperature=0)))
    engine.drive(lambda: handle.done)
    assert handle.completion().finish_reason == "length"
    assert len(calls) == 1
    assert "metrics are down" in caplog.text


def test_a_lost_hint_delays_a_sleeper_but_does_not_stop_it() -> None:
    """A thread that was interrupted at the worst moment leaves "somebody leads" behind."""
    turns, done = Turns(), []
    turns._leading = True
    turns._knocking.add(-1)
    turns._owner = threading.get_ident()
    turns.until(lambda: len(done) > 2, lambda: done.append(1))
    assert len(done) == 3
    assert not turns.mine


@pytest.fixture(autouse=True)
def quick_switches() -> Iterator[None]:
    """Threads take turns far more often than usual, so that races show."""
    import sys

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(before)
