"""Engines that answer in turn: the same answers as alone, at the same place at the same time, idle whatever happens."""

from __future__ import annotations

import pytest
from engines import table, table_engine

from headstart.engine.engine import Engine
from headstart.errors import GenerationFailed
from headstart.lab.turns import STRIDE, Run, in_turn, side_by_side
from headstart.testing import ScriptedDrafter
from headstart.types import Proposal, SamplingParams

TABLE = table(12, seed=3)
PARAMS = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
PROMPT = [1, 2, 3]


def plain() -> Engine:
    return table_engine(TABLE, None)


def right(view: object, budget: int) -> Proposal:
    """What the target will say, by its table."""
    text = list(view.tokens)  # type: ignore[attr-defined]
    for _ in range(budget):
        text.append(int(TABLE[text[-2], text[-1]].argmax()))
    return Proposal.chain(text[-budget:])


def drafted() -> Engine:
    return table_engine(TABLE, ScriptedDrafter(right), gamma=3)


def test_answers_are_those_of_each_engine_alone() -> None:
    alone = Run(plain(), [PROMPT, [4, 5]], PARAMS)
    in_turn({"alone": alone})
    found = in_turn({"a": Run(plain(), [PROMPT, [4, 5]], PARAMS), "b": Run(drafted(), [PROMPT, [4, 5]], PARAMS)})
    ids = [answer.choice.token_ids for answer in alone.answers]
    assert [[answer.choice.token_ids for answer in answers] for answers in found.values()] == [ids, ids]
    assert [answer.tokens for answer in found["b"]] == [40, 40]


def test_nobody_is_far_ahead() -> None:
    """While both have something to write, none is more than a stride and a round before the other."""
    a, b = Run(plain(), [PROMPT], PARAMS), Run(drafted(), [PROMPT], PARAMS)
    leads: list[int] = []
    for run in (a, b):
        run.engine.listen(lambda records: leads.append(abs(a.tokens - b.tokens)) if not a.done and not b.done else None)
    in_turn({"a": a, "b": b})
    assert max(leads) <= STRIDE + 4
    assert sum(lead >= STRIDE for lead in leads) >= 3, "they do take turns"


def test_times_are_of_the_engine_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that counts rounds: each engine's time is its own rounds', whatever the other does meanwhile."""
    clock = [0.0]
    monkeypatch.setattr("headstart.lab.turns.perf_counter", lambda: clock[0])
    runs = {"slow": Run(plain(), [PROMPT], PARAMS), "fast": Run(drafted(), [PROMPT], PARAMS)}
    for run, cost in ((runs["slow"], 3.0), (runs["fast"], 1.0)):

        def count(records: object, cost: float = cost) -> None:
            clock[0] += cost

        run.engine.listen(count)
    in_turn(runs)
    slow, fast = runs["slow"].answers[0], runs["fast"].answers[0]
    assert slow.first_token_seconds == 3.0
    assert slow.seconds == runs["slow"].seconds == 3.0 * 40
    assert (slow.decode_tokens, slow.decode_seconds) == runs["slow"].decoding == (39, 3.0 * 39)
    assert fast.seconds == runs["fast"].seconds < 15, "the right drafter needs few rounds"
    assert sum(record.emitted for record in fast.rounds) == fast.tokens == 40
    assert runs["fast"].decoding == (40 - fast.first_tokens, fast.decode_seconds)


def test_what_a_controller_learnt_may_stay_but_no_prompt_is_warm() -> None:
    engine = plain()
    for _ in range(2):
        run = Run(engine, [PROMPT], PARAMS, learnt=True)
        in_turn({"": run})
        assert run.answers[0].choice.stats.cached_tokens == 0


def test_rates_are_tokens_over_own_seconds() -> None:
    run = Run(plain(), [PROMPT], PARAMS)
    assert side_by_side({"x": run}) == {"x": run.tokens / run.seconds}
    assert run.tokens == 40


def test_an_interruption_leaves_every_engine_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = {"a": Run(plain(), [PROMPT], PARAMS), "b": Run(plain(), [PROMPT], PARAMS)}
    step = runs["b"].engine.step
    steps: list[int] = []

    def interrupted() -> None:
        steps.append(1)
        if len(steps) == 12:
            raise KeyboardInterrupt
        step()

    monkeypatch.setattr(runs["b"].engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        in_turn(runs)
    assert all(run.engine.idle for run in runs.values())
    again = Run(runs["a"].engine, [PROMPT], PARAMS)
    in_turn({"again": again})
    assert again.answers[0].tokens == 40


def test_a_failed_answer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = plain()

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("no more")

    run = Run(engine, [PROMPT], PARAMS)
    monkeypatch.setattr(engine.parts.runner, "forward", broken)
    with pytest.raises(GenerationFailed, match="no more"):
        in_turn({"": run})


def test_two_runs_cannot_share_an_engine() -> None:
    engine = plain()
    with pytest.raises(ValueError, match="share an engine"):
        in_turn({"a": Run(engine, [PROMPT], PARAMS), "b": Run(engine, [PROMPT], PARAMS)})
