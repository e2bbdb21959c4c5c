"""One request's trouble is nobody else's: NaN in rows that move, ids that come again, clocks that run backwards."""

from __future__ import annotations

import torch
from engines import device_engine, run, table

from headstart.config import EngineConfig
from headstart.control.adaptive import AdaptiveController
from headstart.control.controller import FixedController
from headstart.engine.engine import Engine
from headstart.engine.scheduler import Scheduler
from headstart.engine.sequence import Sequence
from headstart.machine.kvcache import Slab
from headstart.machine.runner import EagerRunner
from headstart.testing import TINY_VOCABULARY, ScriptedDrafter, tiny_model
from headstart.types import DraftView, Proposal, Request, Round, SamplingParams

BAD = 7
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def poisoned(prefill_chunk: int) -> Engine:
    """Whoever writes token BAD gets NaN."""
    model = tiny_model("llama")
    runner = EagerRunner(model, rows=4, max_len=96, margin=40)
    with torch.no_grad():
        model.get_input_embeddings().weight[BAD] = float("nan")
    config = EngineConfig(max_rows=4, prefill_chunk=prefill_chunk)
    return Engine(runner, None, FixedController(0), config, vocab_size=TINY_VOCABULARY)


def clean(engine: Engine) -> set[str | None]:
    short = [(11 + i, 12, 13, 14, 15 + i) for i in range(4)]  # they take the rows as those before left them
    prompts = [*short, tuple(range(20, 24)), tuple(range(25, 85)), (3, 4), (6, 5, 4)]
    requests = [Request(f"clean{i}", prompt, GREEDY) for i, prompt in enumerate(prompts)]
    return {completion.finish_reason for completion in run(engine, requests)}


def test_rows_that_failed_together_leave_nothing_behind() -> None:
    engine = poisoned(512)
    lengths = ((20, 20), (25, 20), (30, 9))
    bad = [Request(f"bad{i}", (8 + i,) * good + (BAD,) * worse, GREEDY) for i, (good, worse) in enumerate(lengths)]
    assert {c.finish_reason for c in run(engine, bad)} == {"error"}
    assert clean(engine) == {"length"}


def test_a_prompt_that_was_aborted_half_read_leaves_nothing_behind() -> None:
    engine = poisoned(16)
    engine.submit(Request("long", (BAD,) * 60, GREEDY))
    engine.step()
    engine.abort("long")
    assert clean(engine) == {"length"}


def test_a_guess_is_for_the_sequence_it_was_made_for() -> None:
    """The same id, as many tokens, another request, which wants no speculation."""
    asked: list[int] = []

    def guess(view: DraftView, budget: int) -> Proposal | None:
        asked.append(len(view.tokens))
        return Proposal.chain([1, 2][:budget]) if len(view.tokens) >= 5 else None

    engine = device_engine(table(6, seed=4), ScriptedDrafter(guess, free=True))
    engine.submit(Request("a", (1, 2, 3), SamplingParams(max_tokens=20, temperature=0)))
    while 5 not in asked:  # while the device plays a round: the guess is for the next one
        engine.step()
    engine.abort("a")
    before = engine.stats.drafted
    run(engine, [Request("a", (3, 2, 1, 2, 3), SamplingParams(max_tokens=3, temperature=0, speculate=False))])
    assert engine.stats.drafted == before


def test_costs_stay_positive_where_a_rounds_wait_was_short() -> None:
    """A round that was over before anybody waited for it says less time than its draft took."""
    controller = AdaptiveController(4)
    for i in range(200):
        controller.observe([Round("s", 2, 1, 2, 1, 3, 0, 0.002, 0.004, 0.0003, paid=True)])
        assert controller._costs.level > 0, i
    table = controller._costs.table(1)
    assert all(seconds > 0 for _, seconds in table)


def test_many_choices_of_a_long_prompt_are_asked_about_once() -> None:
    slab = Slab(64, 5000)
    scheduler = Scheduler(slab, 100)
    request = Request("n", tuple(range(4000)), SamplingParams(n=64, max_tokens=1))
    scheduler.add([Sequence(request, i, 0, eos=(), text=None, limit=4001) for i in range(64)])
    asked: list[int] = []
    warm = slab.warm
    slab.warm = lambda prompt: (asked.append(1), warm(prompt))[1]  # type: ignore[method-assign]
    for _ in range(3):
        [chunk] = scheduler.chunks(512)
        slab.extend(chunk.row, chunk.tokens)
    assert len(asked) <= 3


def busy_scheduler(rows: int, waiting: int) -> tuple[Scheduler, list[Sequence]]:
    """All rows run; so many more wait."""
    slab = Slab(rows, 64)
    scheduler = Scheduler(slab, 100)
    made = [Request(f"r{i}", (i + 3, i + 4), SamplingParams(max_tokens=4)) for i in range(rows + waiting)]
    sequences = [Sequence(request, 0, 0, eos=(), text=None, limit=60) for request in made]
    scheduler.add(sequences[:rows])
    for chunk in scheduler.chunks(512):
        slab.extend(chunk.row, chunk.tokens)
        scheduler.filled(chunk.sequence)
    scheduler.add(sequences[rows:])
    assert not scheduler.arriving
    return scheduler, sequences[:rows]


def end(scheduler: Scheduler, sequence: Sequence) -> None:
    sequence.end("stop")
    scheduler.retire(sequence)


def test_while_a_line_waits_prompts_are_read_several_at_a_time() -> None:
    scheduler, running = busy_scheduler(rows=32, waiting=3)
    end(scheduler, running[0])
    assert not scheduler.arriving, "a row waits for another to get free"
    end(scheduler, running[1])
    assert scheduler.arriving
    assert len(scheduler.chunks(512)) == 2


def test_a_free_row_is_not_held_back_for_long() -> None:
    scheduler, running = busy_scheduler(rows=32, waiting=3)
    end(scheduler, running[0])
    for _ in range(3):
        scheduler.wrote(1)
    assert not scheduler.arriving
    scheduler.wrote(1)
    assert scheduler.arriving
    assert len(scheduler.chunks(512)) == 1
    for sequence in running[1:3]:
        end(scheduler, sequence)
    assert scheduler.arriving, "one is being read"


def test_nobody_waits_for_a_row_that_is_for_him_alone() -> None:
    for rows, waiting in ((32, 1), (16, 3)):  # as many as wait; and few rows are worth no waiting
        scheduler, running = busy_scheduler(rows, waiting)
        end(scheduler, running[0])
        assert scheduler.arriving
