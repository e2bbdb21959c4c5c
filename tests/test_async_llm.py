"""AsyncLLM: an asyncio program generates, streams, leaves and closes, and its event loop never waits for a step."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from headstart import (
    LLM,
    AsyncLLM,
    EngineBusy,
    EngineStopped,
    GenerationFailed,
    InvalidParameter,
    Reader,
    SamplingParams,
    Structured,
)
from headstart.testing import tiny_model, tiny_tokenizer

PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
PROMPTS = ["one two", "three", "four five six", "seven eight"]


def made(**settings: Any) -> LLM:
    settings = {"draft": "lookup", "max_rows": 2, "max_model_len": 512, "check": False, "quantization": None} | settings
    return LLM(tiny_model("llama", max_position_embeddings=512), tokenizer=tiny_tokenizer(), **settings)


def run(main: Callable[[AsyncLLM], Awaitable[Any]], llm: LLM | None = None) -> Any:
    async def whole() -> Any:
        async with AsyncLLM(llm or made()) as served:
            found = await main(served)
        assert served.llm.engine.idle
        assert served.llm.engine.parts.runner.slab.free_rows == served.llm.engine.parts.runner.slab.rows
        return found

    return asyncio.run(asyncio.wait_for(whole(), 60))


def test_answers_are_those_of_an_llm() -> None:
    llm = made()
    alone, together = llm.generate(PROMPTS[0], PARAMS), llm.generate(PROMPTS, PARAMS)

    async def main(served: AsyncLLM) -> None:
        assert (await served.generate(PROMPTS[0], PARAMS)).text == alone.text
        assert [a.token_ids for a in await served.generate(PROMPTS, PARAMS)] == [a.token_ids for a in together]
        many = await asyncio.gather(*(served.generate(p, params=PARAMS) for p in PROMPTS))
        assert [a.token_ids for a in many] == [a.token_ids for a in together]
        assert await served.generate([]) == []
        ids = list(alone.prompt_token_ids)
        assert (await served.generate(ids, PARAMS, prediction="two three")).token_ids == alone.token_ids
        assert served.stats is llm.stats

    run(main, llm)


def test_a_stream_has_an_event_for_each_round() -> None:
    llm = made(draft=tiny_model("llama", max_position_embeddings=512), gamma=3, draft_quantization=None)
    whole, rounds = llm.generate(PROMPTS[0], PARAMS), []

    async def main(served: AsyncLLM) -> None:
        events = [pieces async for pieces in served.stream(PROMPTS[0], PARAMS)]
        assert "".join(piece.text for pieces in events for piece in pieces) == whole.text
        assert [p.token_id for pieces in events for p in pieces if p.token_id is not None] == list(whole.token_ids)
        assert len(events) <= len(rounds) < len(whole.token_ids), "the draft is its own target: several tokens a round"

    with llm.listen(rounds.append):
        run(main, llm)


def test_one_who_leaves_or_is_cancelled_stops_its_request_and_nobody_elses() -> None:
    async def main(served: AsyncLLM) -> None:
        async for _ in served.stream(PROMPTS[0], LONG, id="left"):
            break
        task = asyncio.create_task(served.generate(PROMPTS[:2], LONG))
        other = asyncio.create_task(served.generate(PROMPTS[3], PARAMS))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len((await other).token_ids) == 12
        reader = await served.submit(PROMPTS[0], LONG, id="mine")
        assert served.abort("mine")
        assert {p.finish_reason for p in [p async for p in reader] if p.finish_reason} <= {"abort"}
        assert not served.abort("mine")

    run(main)


def test_a_full_line_is_waited_for_by_generate_and_told_to_streams() -> None:
    llm = made(max_waiting=2)
    expected = [a.token_ids for a in llm.generate(PROMPTS * 4, PARAMS)]

    async def main(served: AsyncLLM) -> None:
        found = await asyncio.gather(*(served.generate(p, PARAMS) for p in PROMPTS * 4))
        assert [a.token_ids for a in found] == expected
        held = await asyncio.gather(
            *(served.submit(PROMPTS[0], LONG, buffer=None) for _ in range(12)), return_exceptions=True
        )
        assert {type(each) for each in held} == {Reader, EngineBusy}
        for reader in held:
            if isinstance(reader, Reader):
                reader.close()

    run(main, llm)


def test_a_place_that_gets_free_wakes_one_and_not_all(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, tries = made(max_waiting=2), []
    short = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)

    async def main(served: AsyncLLM) -> None:
        submit = served._inbox.submit
        monkeypatch.setattr(served._inbox, "submit", lambda *a, **more: [tries.append(1), submit(*a, **more)][1])
        tasks = [asyncio.create_task(served.generate([5, 6, 7 + i], short)) for i in range(60)]
        await asyncio.sleep(0)
        for task in tasks[50:]:
            task.cancel()  # those who give up must not keep a place
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert [isinstance(each, asyncio.CancelledError) for each in found] == [False] * 50 + [True] * 10
        assert len(tries) <= 60, "many looked for a place that was not there"
        many = SamplingParams(temperature=1, max_tokens=2, n=5, ignore_eos=True)  # more than the line has places
        both = await asyncio.gather(*(served.generate(p, many) for p in PROMPTS))
        assert [len(each.choices) for each in both] == [5] * 4

    run(main, llm)


def test_the_event_loop_goes_on_while_a_prompt_is_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, busy, go_on = made(), threading.Event(), threading.Event()
    encode = llm._encode

    def slow(prompt: Any) -> list[int]:
        busy.set()
        assert go_on.wait(30)
        return encode(prompt)

    monkeypatch.setattr(llm, "_encode", slow)

    async def main(served: AsyncLLM) -> None:
        task = asyncio.create_task(served.generate(PROMPTS[0], PARAMS))
        while not busy.is_set():
            await asyncio.sleep(0.001)
        go_on.set()  # could not be reached if the loop waited for the tokenizer
        assert len((await task).token_ids) == 12

    run(main, llm)


@pytest.mark.parametrize(
    ("prompt", "params"), [("x" * 2**17, PARAMS), ("y", SamplingParams(structured=Structured(choice=["a"])))]
)
def test_what_takes_long_to_read_keeps_nobody_else_waiting(
    prompt: str, params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of megabytes, and shapes of answers, which are compiled first."""
    llm, go_on = made(), threading.Event()
    encode = llm._encode

    def slow(given: Any) -> list[int]:
        assert given != prompt or go_on.wait(30)
        return encode(given[:100])

    monkeypatch.setattr(llm, "_encode", slow)

    async def main(served: AsyncLLM) -> None:
        long = [asyncio.create_task(served.request(prompt, params)) for _ in range(8)]
        await asyncio.sleep(0)
        assert len((await served.generate(PROMPTS[0], PARAMS)).token_ids) == 12
        assert not any(task.done() for task in long)
        go_on.set()
        await asyncio.gather(*long, return_exceptions=True)

    run(main, llm)


def test_wrong_requests_are_refused_before_anything_is_computed() -> None:
    async def main(served: AsyncLLM) -> None:
        before = served.stats.tokens
        with pytest.raises(InvalidParameter, match="prompt 1"):
            await served.generate(["fine", ""], PARAMS)
        with pytest.raises(InvalidParameter, match="params"):
            await served.generate(PROMPTS, [PARAMS])
        with pytest.raises(InvalidParameter, match="must be SamplingParams"):
            await served.generate(PROMPTS[0], "hot")  # type: ignore[arg-type]
        assert served.stats.tokens == before

    run(main)


def test_it_drains_what_runs_and_takes_nothing_more() -> None:
    async def main() -> None:
        served = AsyncLLM(made(max_waiting=1))
        running = [asyncio.create_task(served.generate(p, PARAMS)) for p in PROMPTS]
        await asyncio.sleep(0.05)
        await served.close()
        assert not served.alive
        done = await asyncio.gather(*running, return_exceptions=True)
        assert all(isinstance(a, EngineStopped) or len(a.token_ids) == 12 for a in done)
        assert any(not isinstance(a, EngineStopped) for a in done)
        with pytest.raises(EngineStopped, match="closed"):
            await served.generate(PROMPTS[0], PARAMS)
        with pytest.raises(EngineStopped, match="closed"):
            await served.submit(PROMPTS[0], PARAMS)

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_dead_engine_is_seen_and_hangs_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = made()

    async def main() -> None:
        served = AsyncLLM(llm)

        def dies() -> None:
            raise SystemExit("killed")

        monkeypatch.setattr(llm.engine, "_step", dies)
        with pytest.raises((GenerationFailed, EngineStopped)):
            await served.generate(PROMPTS[0], PARAMS)
        with pytest.raises(EngineStopped):
            await served.generate(PROMPTS[1], PARAMS)
        assert not served.alive
        assert isinstance(served.failure, SystemExit)
        await served.close()

    asyncio.run(asyncio.wait_for(main(), 60))
