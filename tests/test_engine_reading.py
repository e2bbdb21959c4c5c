"""Prompts are read together: in few forwards, none holds the others up, what they share is computed once."""

from __future__ import annotations

import pytest
import torch
from engines import run, table
from slab_tools import check_slab

from headstart.config import EngineConfig
from headstart.control.controller import FixedController
from headstart.drafters.lookup import LookupDrafter
from headstart.engine.engine import Engine, Handle
from headstart.testing import TableRunner
from headstart.types import Request, Round, SamplingParams

V = 7
TARGET = table(V, seed=3)


class Watched(TableRunner):
    """Notes what is read in one call."""

    def __init__(self, *, rows: int, max_len: int = 900) -> None:
        super().__init__(TARGET, rows=rows, max_len=max_len, margin=40)
        self.reads: list[list[tuple[int, int]]] = []
        self.broken = False

    def read(self, pieces, *, logits=True):  # type: ignore[no-untyped-def]
        self.reads.append([(row, len(tokens)) for row, tokens in pieces])
        if self.broken:
            raise RuntimeError("no memory")
        return super().read(pieces, logits=logits)


def engine_of(rows: int = 32, chunk: int = 64, lookup: bool = False, max_len: int = 900) -> tuple[Engine, Watched]:
    runner = Watched(rows=rows, max_len=max_len)
    drafter = LookupDrafter() if lookup else None
    config = EngineConfig(max_rows=rows, prefill_chunk=chunk, max_waiting=500)
    return Engine(runner, drafter, FixedController(3), config, vocab_size=V), runner


def text(length: int, seed: int) -> tuple[int, ...]:
    return tuple(torch.randint(0, V, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


def ask(name: str, prompt: tuple[int, ...], **params: object) -> Request:
    return Request(name, prompt, SamplingParams(**{"max_tokens": 6, "seed": 1} | params))  # type: ignore[arg-type]


@pytest.mark.parametrize("lookup", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_are_those_of_prompts_read_alone(lookup: bool, temperature: float) -> None:
    requests = [ask(str(i), text(5 + 13 * i % 50, i), temperature=temperature, logprobs=2) for i in range(40)]
    alone = []
    for request in requests:
        engine, runner = engine_of(rows=1, lookup=lookup)
        alone += run(engine, [request])
        assert not runner.reads, "a prompt that is alone gets a whole round"
    engine, runner = engine_of(rows=8, chunk=48, lookup=lookup)
    together = run(engine, requests)
    for one, other in zip(alone, together, strict=True):
        assert one.token_ids == other.token_ids
        assert [p.logprob for p in one.choices[0].logprobs or ()] == pytest.approx(
            [p.logprob for p in other.choices[0].logprobs or ()]
        )
    assert max(sum(n for _, n in pieces) for pieces in runner.reads) <= 48
    assert max(map(len, runner.reads)) > 2


def test_few_forwards_read_many_prompts() -> None:
    engine, runner = engine_of(rows=32, chunk=512)
    prompts = [text(20 + i, i) for i in range(32)]
    handles = [engine.submit(ask(str(i), prompt)) for i, prompt in enumerate(prompts)]
    total = sum(map(len, prompts))
    for _ in range(-(-total // 512)):
        engine.step()
    assert len(runner.reads) == -(-total // 512)
    assert all(handle.sequences[0].output_length for handle in handles)
    assert engine.stats.prefill_tokens == total
    while not engine.idle:
        engine.step()


def test_first_tokens_come_part_by_part_and_who_comes_meanwhile_joins() -> None:
    engine, runner = engine_of(rows=9, chunk=512)
    runner.enough_to_read = 64
    told: list[set[str]] = []

    def listen(rounds: list[Round]) -> None:
        told.append({r.sequence.rpartition("/")[0] for r in rounds})
        if len(told) == 1:  # when the first part is read, and the next one is not
            engine.submit(ask("late", text(10, 99)))

    prompts = [text(20, i) for i in range(8)]
    with engine.listen(listen):
        handles = [engine.submit(ask(str(i), prompt)) for i, prompt in enumerate(prompts)]
        engine.step()
    assert told[:2] == [set("0123"), {*"4567", "late"}]
    assert [len(pieces) for pieces in runner.reads] == [4, 5]
    while not engine.idle:
        engine.step()
    assert all(handle.done for handle in handles)


def test_a_long_prompt_holds_no_short_ones_up_and_is_not_starved() -> None:
    engine, _ = engine_of(rows=4, chunk=32)
    long = engine.submit(ask("long", text(800, 1)))
    engine.step()
    short = engine.submit(ask("short", text(10, 2), max_tokens=1))
    engine.step()
    assert short.done
    steps, count = 0, 0
    handles: list[Handle] = []
    while not long.sequences[0].output_length:
        if sum(not h.done for h in handles) < 3:  # short ones without end
            count += 1
            handles.append(engine.submit(ask(f"s{count}", text(30, 100 + count), max_tokens=1)))
        engine.step()
        steps += 1
        assert steps < 4 * 800 / 32 + 5, "a fourth of every forward is the oldest prompt's"
    engine.abort("long")


def test_what_prompts_share_is_computed_once() -> None:
    engine, _ = engine_of(rows=8, chunk=64)
    common = text(100, 5)
    requests = [ask(str(i), common + text(10, 10 + i)) for i in range(6)]
    found = run(engine, requests)
    assert engine.stats.prefill_tokens <= 110 + 5 * 10
    for completion, request in zip(found, requests, strict=True):
        assert completion.token_ids == run(engine_of(rows=1)[0], [request])[0].token_ids


def test_the_prompt_of_many_choices_is_computed_once() -> None:
    engine, _ = engine_of(rows=8, chunk=64)
    [completion] = run(engine, [ask("n", text(60, 5), n=8, temperature=1.0)])
    assert engine.stats.prefill_tokens <= 60 + 7
    assert len(completion.choices) == 8
    other = engine_of(rows=8, chunk=64)[0]
    short = run(other, [ask("n", text(3, 5), n=8, temperature=1.0)])
    assert other.stats.prefill_tokens <= 3 + 7
    assert len(short[0].choices) == 8


def test_who_waits_for_a_neighbour_is_passed_by_others_and_goes_on_when_it_is_aborted() -> None:
    engine, _ = engine_of(rows=4, chunk=16)
    common = text(200, 5)
    first = engine.submit(ask("first", common))
    engine.step()
    held = engine.submit(ask("held", (*common[:150], 1, 2, 3)))
    passing = engine.submit(ask("passing", text(8, 9), max_tokens=1))
    engine.step()
    assert passing.done
    assert len(engine._scheduler._waiting) == 1, "it waits for what it shares"
    engine.abort("first")
    while not held.done:
        engine.step()
    assert first.completion().finish_reason == "abort"
    assert (
        held.completion().token_ids == run(engine_of(rows=1)[0], [ask("held", (*common[:150], 1, 2, 3))])[0].token_ids
    )


def test_a_failing_forward_takes_only_the_prompts_it_read() -> None:
    engine, runner = engine_of(rows=6, chunk=64)
    before = engine.submit(ask("before", text(9, 1), max_tokens=40))
    engine.step()
    runner.broken = True
    lost = [engine.submit(ask(f"lost{i}", text(9, 2 + i))) for i in range(3)]
    engine.step()
    runner.broken = False
    assert {h.completion().finish_reason for h in lost} == {"error"}
    assert "no memory" in (lost[0].completion().choices[0].error or "")
    after = engine.submit(ask("after", text(9, 7)))
    while not engine.idle:
        engine.step()
    assert before.completion().finish_reason == "length"
    assert after.completion().token_ids == run(engine_of(rows=1)[0], [ask("after", text(9, 7))])[0].token_ids
    check_slab(engine.parts.runner.slab)


@pytest.mark.parametrize("moment", range(1, 6))
def test_aborts_while_prompts_are_being_read(moment: int) -> None:
    engine, _ = engine_of(rows=6, chunk=20)
    requests = [ask(str(i), text(25 + 3 * i, i)) for i in range(6)]
    handles = [engine.submit(request) for request in requests]
    for _ in range(moment):
        engine.step()
    for i in (0, 3):
        engine.abort(str(i))
        assert handles[i].done
    while not engine.idle:
        engine.step()
        check_slab(engine.parts.runner.slab)
    for i in (1, 2, 4, 5):
        assert handles[i].completion().token_ids == run(engine_of(rows=1)[0], [requests[i]])[0].token_ids
    assert engine.parts.runner.slab.free_rows == 6
