"""What servers and benches call on an ``LLM``: submit and abort by id, a cold start, listeners."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_engine_captured import engine as captured_engine
from test_engine_threads import opened

from headstart import LLM, Completion, EngineBusy, GenerationFailed, InvalidParameter, Request, Round, SamplingParams
from headstart.control.controller import controller_for
from headstart.engine.overlap import OverlappedRounds
from headstart.testing import tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return opened("float32")


# -- submit and abort


def test_a_request_has_the_id_of_its_caller(llm: LLM) -> None:
    expected = llm.generate([3, 4, 5], GREEDY).token_ids
    streams = [llm.submit([3, 4, 5], GREEDY, id=f"mine/{i}") for i in range(5)]  # more than there are rows
    assert [stream.id for stream in streams] == [f"mine/{i}" for i in range(5)]
    answers = [stream.result() for stream in streams]
    assert [answer.id for answer in answers] == [f"mine/{i}" for i in range(5)]
    assert [answer.token_ids for answer in answers] == [expected] * 5
    assert all(stream.done for stream in streams)
    assert tuple(p.token_id for p in streams[0]) == expected  # the pieces are still there to read
    assert llm.submit([3, 4, 5], GREEDY, id="mine/0").result().token_ids == expected  # an id is free when it has ended


def test_an_id_that_runs_is_refused_and_what_runs_under_it_goes_on(llm: LLM) -> None:
    first = llm.submit([3, 4, 5], GREEDY, id="mine")
    next(first)
    with pytest.raises(InvalidParameter, match="id 'mine' is already running"):
        llm.submit([7, 8], GREEDY, id="mine")
    gc.collect()  # whoever was refused has no claim on the other
    assert first.result().finish_reason == "length"
    assert first.result().token_ids == llm.generate([3, 4, 5], GREEDY).token_ids


@pytest.mark.parametrize("wrong", ["", 7, b"id"])
def test_an_id_that_is_none_is_refused(llm: LLM, wrong: Any) -> None:
    with pytest.raises(InvalidParameter, match="id must be a text"):
        llm.submit([3, 4], GREEDY, id=wrong)


def test_ids_of_ours_make_way_for_those_of_callers(llm: LLM) -> None:
    following = int(llm.request([3], GREEDY).id.removeprefix("request-")) + 1
    taken = llm.submit([3, 4, 5], GREEDY, id=f"request-{following}")
    assert llm.generate([3, 4, 5], GREEDY).token_ids == taken.result().token_ids


def test_abort_by_id(llm: LLM) -> None:
    stream, other = llm.submit([3, 4, 5], LONG, id="a"), llm.submit([3, 4, 5], GREEDY, id="b")
    next(stream)
    assert llm.abort("a")
    assert stream.done
    assert stream.result().finish_reason == "abort"
    assert not llm.abort("a")
    assert not llm.abort("nobody")
    assert other.result().token_ids == llm.generate([3, 4, 5], GREEDY).token_ids
    assert llm.engine.idle


def test_abort_while_another_thread_steps(llm: LLM) -> None:
    begun, found = threading.Event(), []
    params = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)
    with llm.listen(lambda rounds: begun.set()):
        reading = threading.Thread(target=lambda: found.append(llm.submit([3, 4, 5], params, id="far").result()))
        reading.start()
        assert begun.wait(60)
        stopped = llm.abort("far")
        reading.join(60)
    assert found[0].finish_reason == ("abort" if stopped else "length")
    assert llm.engine.idle


# -- a cold start


def learnt(thing: Any) -> Any:
    """Everything that a controller holds, in a form that can be compared."""
    if isinstance(thing, (int, float, str, type(None))):
        return thing
    if isinstance(thing, dict):
        return {key: learnt(value) for key, value in thing.items()}
    if isinstance(thing, (list, tuple, set, frozenset, deque)):
        return [learnt(each) for each in thing]
    if callable(thing) and not hasattr(thing, "__dict__"):
        return repr(thing)
    return type(thing).__name__, learnt(vars(thing))


@pytest.mark.parametrize("draft", ["model", "lookup", "none"])
def test_cold_is_as_cold_as_just_loaded(draft: str) -> None:
    guesser: Any = {"model": tiny_model("llama", seed=0, num_hidden_layers=1), "lookup": "lookup", "none": None}[draft]
    llm = LLM(tiny_model("llama"), guesser, max_rows=2, max_model_len=96)
    controller, drafter = llm.engine.parts.controller, llm.engine.parts.drafter
    fresh = controller_for(llm.config.draft)
    if drafter is not None:
        cost = controller._greedy._cost_ratio  # type: ignore[attr-defined]  # what was said of it, not learnt
        fresh.meet(free=drafter.free, ends_itself=drafter.ends_itself, cost=cost)
    assert learnt(controller) == learnt(fresh)
    prompt = [3, 4, 5, 6, 7, 8, 3, 4, 5]
    first = llm.generate(prompt, LONG)
    assert first.stats.cached_tokens == 0
    assert llm.generate(prompt, LONG).stats.cached_tokens == len(prompt) - 1
    assert llm.stats.cached_tokens == len(prompt) - 1
    llm.generate(prompt, SamplingParams(seed=1, max_tokens=20, ignore_eos=True))
    assert learnt(controller) != learnt(fresh)

    read = llm.stats.prefill_tokens
    llm.cold()
    assert learnt(controller) == learnt(fresh)
    again = llm.generate(prompt, LONG)
    assert (again.token_ids, again.stats.cached_tokens) == (first.token_ids, 0)
    assert llm.stats.prefill_tokens - read == len(prompt) - 1  # its last token goes with the first round
    if draft == "model":
        llm.cold()
        runner: Any = getattr(drafter, "runner", None)
        assert set(runner.slab.lengths) == {0}


def test_a_free_drafter_that_was_found_to_draw_is_met_anew() -> None:
    llm = LLM(tiny_model("llama"), "lookup", max_model_len=64)
    controller: Any = llm.engine.parts.controller
    controller._greedy.free = False  # as ``trim`` does
    llm.cold()
    assert controller._greedy.free


def test_cold_forgets_how_well_overlapping_went() -> None:
    engine = captured_engine(3, 3, overlap=True)
    rounds = engine.parts.captured
    assert isinstance(rounds, OverlappedRounds)
    rounds._whole = 0.1
    engine.cold()
    assert rounds._whole == 1.0


def test_cold_is_refused_while_requests_run_or_wait(llm: LLM) -> None:
    expected = llm.generate([3, 4, 5], LONG).token_ids
    running = llm.submit([3, 4, 5], LONG)
    with pytest.raises(EngineBusy, match="1 requests run or wait"):
        llm.cold()
    next(running)
    with pytest.raises(EngineBusy):
        llm.cold()
    assert running.result().token_ids == expected
    dropped = llm.submit([3, 4, 5], LONG)
    del dropped
    gc.collect()
    llm.cold()  # what nobody waits for is no obstacle
    assert llm.engine.idle


# -- listeners


def test_listeners_are_told_of_rounds_and_of_requests_that_begin_and_end(llm: LLM) -> None:
    rounds: list[Round] = []
    begun: list[Request] = []
    ended: list[Completion] = []
    with llm.listen(rounds.extend, begun=begun.append, ended=ended.append):
        answer = llm.submit([3, 4, 5], GREEDY, id="a").result()
        both = llm.submit([3, 4, 5], SamplingParams(temperature=0.7, seed=1, n=2, max_tokens=4), id="two").result()
        waiting = llm.submit([3, 4, 5], GREEDY, id="never ran")
        llm.abort("never ran")
    llm.generate([3, 4, 5], GREEDY)  # nobody listens any more
    assert [request.id for request in begun] == ["a", "two", "never ran"]
    assert [completion.id for completion in ended] == ["a", "two", "never ran"]
    assert ended == [answer, both, waiting.completion()]
    assert begun[0].prompt == (3, 4, 5)
    assert sum(r.emitted for r in rounds if r.sequence == "a/0") == 12
    assert {r.sequence for r in rounds} == {"a/0", "two/0", "two/1"}


def test_the_end_of_a_request_that_failed_is_told() -> None:
    llm = LLM(tiny_model("llama"), None, max_model_len=64)
    ended: list[Completion] = []
    llm.listen(ended=ended.append)
    forward = llm.engine.parts.runner.forward

    def broken(*args: Any, **kwargs: Any) -> torch.Tensor:
        raise RuntimeError("no such kernel")

    llm.engine.parts.runner.forward = broken  # type: ignore[method-assign]
    with pytest.raises(GenerationFailed):
        llm.submit([3, 4], GREEDY, id="bad").result()
    llm.engine.parts.runner.forward = forward  # type: ignore[method-assign]
    assert [(each.id, each.finish_reason) for each in ended] == [("bad", "error")]
    assert "no such kernel" in str(ended[0].error)


@pytest.mark.parametrize("kind", ["rounds", "begun", "ended"])
def test_a_listener_that_raises_is_dropped_and_hurts_nobody(
    llm: LLM, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    expected = llm.generate([3, 4, 5], GREEDY).token_ids
    calls = []

    def bad(what: Any) -> None:
        calls.append(what)
        raise RuntimeError("metrics are down")

    heard: list[Completion] = []
    with llm.listen(**{kind: bad}), llm.listen(ended=heard.append):  # type: ignore[arg-type]
        for _ in range(3):
            assert llm.generate([3, 4, 5], GREEDY).token_ids == expected
    assert len(calls) == 1
    assert len(heard) == 3
    assert "metrics are down" in caplog.text


def test_a_listener_may_submit_but_not_wait(llm: LLM) -> None:
    """A server that answers the next request where the last one ended, say."""
    more: list[Any] = []
    said: list[BaseException] = []

    def follow(answer: Completion) -> None:
        if len(more) < 3:
            more.append(llm.submit([3, 4, 5], GREEDY, id=answer.id))  # its id is free by now
            try:
                more[-1].result()
            except Exception as error:
                said.append(error)
                more[-1] = None

    with llm.listen(ended=follow):
        llm.submit([3, 4, 5], GREEDY, id="chain").result()
        while not llm.engine.idle:
            llm.engine.step()
    assert len(more) == 3
    assert all("in the middle of a step" in str(error) for error in said)
    assert llm.engine.idle
    assert not llm.engine._handles


def test_listening_may_end_twice_and_in_any_order(llm: LLM) -> None:
    seen: list[Any] = []
    first, second = llm.listen(seen.extend), llm.listen(seen.extend)
    first.close()
    first.close()
    llm.generate([3, 4, 5], GREEDY)
    rounds = len(seen)
    assert sum(r.emitted for r in seen) == 12
    second.close()
    llm.generate([3, 4, 5], GREEDY)
    assert len(seen) == rounds


def test_the_documented_server_serves(llm: LLM) -> None:
    page = (Path(__file__).parents[1] / "docs" / "reference.md").read_text(encoding="utf-8")
    section = page.partition("## For servers and benches\n")[2].partition("\n## ")[0]
    names: dict[str, Any] = {}
    exec(section.partition("```python\n")[2].partition("```")[0], names)
    sent: list[list[str]] = [[] for _ in range(8)]

    def to(i: int) -> Callable[[str], Awaitable[None]]:
        async def send(text: str) -> None:
            sent[i].append(text)

        return send

    asyncio.run(names["serve"](llm, [([3, 4, 5 + i], GREEDY, to(i)) for i in range(8)]))
    assert [len(texts) for texts in sent] == [12] * 8
    assert llm.engine.idle
    assert not llm.engine._handles
