"""Rows with a grammar in captured rounds: the forward, the masks worked out by the host meanwhile, the decision. The
same tokens as step by step, the masked target's law by every rule, and neighbours that do not notice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from engines import DeviceTable, device_draft, device_engine, run, table, table_engine
from grammars import Follow, Toy, masked_law
from slab_tools import check_slab
from statistics_tools import chi_squared
from test_engine_structured import ASKED, DRAFT, LAW, LENGTH, PROMPT, SAMPLES, TARGET, V, drawn_blindly, follow

from headstart.drafters.base import Drafter
from headstart.drafters.draft_sampler import DraftSampler
from headstart.drafters.lookup import LookupDrafter
from headstart.engine import captured as capturing
from headstart.engine.engine import Engine
from headstart.engine.players import StepByStep
from headstart.engine.programs import Shape
from headstart.machine.runner import ModelRunner
from headstart.testing import ScriptedDrafter
from headstart.types import Completion, Request, SamplingParams

SIX = table(6, seed=4)
NEAR = SIX + 0.5 * table(6, seed=5)


class Maskless(capturing.CapturedRounds):
    """Rounds without programs for masks: a batch with such a row goes step by step."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options, masks=False)


def even(text: tuple[int, ...]) -> tuple[int, ...]:
    """Odd and even tokens take turns; behind 4 and 5 the text ends."""
    if text[-2:] == (5, 4):
        return ()
    return (0, 2, 4) if len(text) % 2 else (1, 3, 5)


def watch(engine: Engine) -> list[tuple[str, Shape]]:
    """The target's programs that are played on the device, as they come."""
    rounds, played = engine.parts.captured, []
    assert rounds is not None

    def noted(name: str, shape: Shape, body: Callable[[], None]) -> None:
        played.append((name, shape))
        body()

    for (name, shape), body in rounds._captured.items():
        if name != "draft":
            rounds._captured[name, shape] = partial(noted, name, shape, body)
    return played


def request(i: int, *, follow: Follow | None = None, moves: bool = False, prompt: Any = None, **params: Any) -> Request:
    given = {"max_tokens": 12, "seed": i} | params | ({"structured": ASKED} if follow is not None else {})
    grammar = Toy(follow, 6, moves=moves) if follow is not None else None
    return Request(str(i), prompt or (1, 2, i % 6), SamplingParams(**given), (), grammar)


SETTINGS: dict[str, list[dict[str, Any]]] = {
    "greedy": [{"temperature": 0}],
    "coupled": [{"temperature": 0.9, "top_p": 0.95}],
    "full": [
        {"temperature": 0, "logprobs": 2},
        {"temperature": 0.8, "top_k": 3, "repetition_penalty": 1.3},
        {"temperature": 0.8, "min_tokens": 9, "min_p": 0.02},
        {"temperature": 0, "logit_bias": {2: 3.0}, "presence_penalty": 0.4},
    ],
}
DRAFTERS: dict[str, Callable[[], Drafter | None]] = {
    "device": lambda: device_draft(NEAR),
    "host": LookupDrafter,
    "none": lambda: None,
}


def mixture(kind: str) -> list[Request]:
    """Every other one has a grammar; some end by it, others by their length, at different times."""
    settings = SETTINGS[kind]
    return [
        request(i, follow=None if i % 2 else even, max_tokens=10 + 4 * i, **settings[i // 2 % len(settings)])
        for i in range(8)
    ]


_ALONE: dict[str, list[Completion]] = {}


def alone(kind: str) -> list[Completion]:
    """Step by step, one at a time, nothing drafted."""
    if kind not in _ALONE:
        _ALONE[kind] = [run(table_engine(SIX, None), [each])[0] for each in mixture(kind)]
    return _ALONE[kind]


@pytest.mark.parametrize("drafter", sorted(DRAFTERS))
@pytest.mark.parametrize("kind", sorted(SETTINGS))
def test_the_same_tokens_as_step_by_step(kind: str, drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows join, end by their grammar or their length, and leave, while rounds are in flight. Only first rounds are
    played step by step."""
    expected, stepped, verify = alone(kind), list[bool](), StepByStep.verify

    def noted(self: Any, rows: Any, drafted: Any) -> Any:
        stepped.append(rows.reading or rows.first > 0)
        return verify(self, rows, drafted)

    monkeypatch.setattr(StepByStep, "verify", noted)
    engine = device_engine(SIX, DRAFTERS[drafter](), overlap=drafter == "device", rows=4)
    played = watch(engine)
    handles = [engine.submit(each) for each in mixture(kind)]
    while not engine.idle:
        engine.step()
        check_slab(engine.parts.runner.slab)
    found = [handle.completion() for handle in handles]
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    assert [c.finish_reason for c in found] == [c.finish_reason for c in expected]
    assert {c.finish_reason for c in found} == {"stop", "length"}
    assert all(stepped)
    names = Counter(name for name, _ in played)
    assert names["forward"] == names["decide"] > 8
    assert names["verify"] > 0, "once no row with a grammar is left"
    kinds = {shape.kind for name, shape in played if name == "decide"}
    assert kinds == {kind} if kind != "full" else "full" in kinds
    if drafter == "device":
        assert engine.stats.accepted > 10
    for ours, theirs in zip(found, expected, strict=True):
        for mine, wanted in zip(ours.choices[0].logprobs or (), theirs.choices[0].logprobs or (), strict=True):
            assert mine.token_id == wanted.token_id
            assert mine.logprob == pytest.approx(wanted.logprob, abs=1e-5), "before any mask"
            assert mine.top == pytest.approx(wanted.top, abs=1e-5)


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("drafter", ["device", "host"])
def test_drawn_drafts_give_the_same_tokens_as_step_by_step(
    rule: str, drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device drafts without masks: so does the host here. Nothing is forced, which the host would draft."""

    def loose(text: tuple[int, ...]) -> tuple[int, ...]:
        return tuple({0, 1, 2, 3} - set(text[-1:])) if text[-2:] != (1, 0) else ()

    if drafter == "device":
        monkeypatch.setattr(
            DraftSampler, "_grammars", property(lambda self: None, lambda self, value: None), raising=False
        )
    requests = [
        Request(
            str(i),
            PROMPT,
            SamplingParams(max_tokens=30, seed=i, structured=ASKED, verification=rule),
            (),
            Toy(loose, V),
        )  # type: ignore[arg-type]
        for i in range(24)
    ]
    made = {"device": lambda: device_draft(DRAFT), "host": lambda: ScriptedDrafter(drawn_blindly)}[drafter]
    engine, plain = device_engine(TARGET, made()), table_engine(TARGET, made(), rounds=Maskless)
    played = watch(engine)
    # Near the end of what it may write, the host drafts less than the device.
    assert [c.token_ids[:26] for c in run(engine, requests)] == [c.token_ids[:26] for c in run(plain, requests)]
    assert {shape.kind for name, shape in played if name == "decide" and shape.gamma} == {"rejected"}
    assert engine.stats.accepted > 10


def law_of(engine: Engine, rule: str, moves: bool = False) -> Counter[tuple[int, ...]]:
    """The first tokens of many answers, beside others that have no grammar."""
    asked = [
        Request(
            str(seed),
            PROMPT,
            SamplingParams(max_tokens=LENGTH + 2, seed=seed, structured=ASKED, verification=rule),  # type: ignore[arg-type]
            (),
            Toy(follow, V, moves=moves),
        )
        for seed in range(SAMPLES)
    ]
    beside = [Request(f"b{i}", PROMPT, SamplingParams(max_tokens=40, seed=i, verification=rule)) for i in range(12)]  # type: ignore[arg-type]
    found = run(engine, [*beside, *asked])
    return Counter(c.token_ids[:LENGTH] for c in found[len(beside) :])


def sixteen(drafter: Drafter) -> Engine:
    return device_engine(TARGET, drafter, rows=16, max_waiting=2 * SAMPLES)


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
def test_sampling_follows_the_masked_target(rule: str) -> None:
    engine = sixteen(device_draft(DRAFT, rows=16))
    counts = law_of(engine, rule)
    assert chi_squared(counts, LAW) > 1e-4
    assert {len(text) for text in counts} == {2, 3, 4}
    assert 0.1 < engine.stats.acceptance_rate < 1


def test_a_grammar_that_drafted_tokens_move_is_caught() -> None:
    assert chi_squared(law_of(sixteen(device_draft(DRAFT, rows=16)), "token", moves=True), LAW) < 1e-9


@pytest.mark.parametrize("wrong", ["before", "behind"])
def test_a_mask_of_the_wrong_position_is_caught(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = capturing.node_masks

    def shifted(*given: Any) -> Any:
        found = right(*given)
        return found[:1] + found[:-1] if wrong == "before" else found[1:] + found[-1:]

    monkeypatch.setattr(capturing, "node_masks", shifted)
    assert chi_squared(law_of(sixteen(device_draft(DRAFT, rows=16)), "token"), LAW) < 1e-9


def test_masks_from_before_the_last_round_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worked out when the round is launched, ahead of what is committed meanwhile."""
    decide, launch = capturing.CapturedRounds._decide, capturing.CapturedRounds._launch

    def early(self: Any, sequences: Any, *rest: Any, **more: Any) -> Any:
        flight = launch(self, sequences, *rest, **more)
        decide(self, flight)
        return flight

    monkeypatch.setattr(capturing.CapturedRounds, "_launch", early)
    expected = [c.token_ids for c in alone("coupled")]
    assert [c.token_ids for c in run(device_engine(SIX, device_draft(NEAR)), mixture("coupled"))] != expected


@pytest.mark.parametrize("rule", ["token", "block", "coupled", "greedy"])
def test_neighbours_without_a_grammar_do_not_notice(rule: str) -> None:
    """The same tokens, in as many rounds, as if nobody had a grammar; and such a round is one program, as ever."""
    given: dict[str, Any] = {"temperature": 0} if rule == "greedy" else {"verification": rule}
    rounds: list[list[tuple[str, int, int]]] = []
    answers = []
    for grammar in (None, lambda text: (0, 1, 2, 3, 4, 5)):
        engine = device_engine(SIX, device_draft(NEAR), rows=4)
        played, seen = watch(engine), []
        engine.listen(lambda records, seen=seen: seen.extend((r.sequence, r.drafted, r.emitted) for r in records))
        asked = [request(i, follow=grammar if i == 1 else None, max_tokens=30, **given) for i in range(4)]
        answers.append([c.token_ids for c in run(engine, asked)])
        rounds.append(seen)
        names = {name for name, _ in played}
        assert names == ({"verify"} if grammar is None else names | {"forward", "decide"})
    assert answers[0] == answers[1]
    assert rounds[0] == rounds[1]


def test_an_answer_is_aborted_while_its_round_is_in_flight() -> None:
    engine = device_engine(SIX, device_draft(NEAR), rows=2)
    first, second = (engine.submit(request(i, follow=even, max_tokens=30, temperature=0)) for i in range(2))
    for _ in range(3):
        engine.step()
    rounds = engine.parts.captured
    assert rounds is not None
    assert rounds.in_flight
    engine.abort("0")
    assert first.done
    while not engine.idle:
        engine.step()
    expected = run(table_engine(SIX, None), [request(1, follow=even, max_tokens=30, temperature=0)])[0]
    assert second.completion().token_ids == expected.token_ids


def test_a_round_is_decided_before_prompts_are_read_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would wait for them on the device."""
    engine = device_engine(SIX, None, rows=4, prefill_chunk=2)
    rounds = engine.parts.captured
    assert rounds is not None
    flights: list[bool] = []
    read = ModelRunner.read

    def noted(self: Any, *args: Any, **more: Any) -> Any:
        if rounds._flight is not None:
            flights.append(rounds._flight.decided)
        return read(self, *args, **more)

    monkeypatch.setattr(DeviceTable, "read", noted)
    long = [request(i, follow=even, prompt=tuple(j % 6 for j in range(9 + i)), temperature=0) for i in range(6)]
    expected = [run(table_engine(SIX, None), [each])[0].token_ids for each in long]
    handles = []
    for each in long:
        handles.append(engine.submit(each))
        for _ in range(3):
            engine.step()
    while not engine.idle:
        engine.step()
    assert [h.completion().token_ids for h in handles] == expected
    assert flights
    assert all(flights)


def test_a_grammar_that_leaves_nothing_fails_alone() -> None:
    engine = device_engine(SIX, device_draft(NEAR))

    def nothing(text: tuple[int, ...]) -> tuple[int, ...] | None:
        return (9,) if len(text) == 2 else None

    bad = Request("a", (1, 2), SamplingParams(max_tokens=8, temperature=0, structured=ASKED), (), Toy(nothing, 12))
    first, second = run(engine, [bad, request(1, temperature=0)])
    assert first.finish_reason == "error"
    assert second.token_ids == run(table_engine(SIX, None), [request(1, temperature=0)])[0].token_ids


def test_without_programs_for_masks_such_rounds_go_step_by_step() -> None:
    """Where nothing can compile a grammar they are not captured; somebody may still bring one."""
    engine = table_engine(SIX, device_draft(NEAR), rounds=Maskless)
    played = watch(engine)
    assert [c.token_ids for c in run(engine, mixture("greedy"))] == [c.token_ids for c in alone("greedy")]
    assert {name for name, _ in played} == {"verify"}


def test_an_interruption_while_masks_are_worked_out(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = device_engine(SIX, device_draft(NEAR))
    right, calls = capturing.node_masks, 0

    def struck(*given: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls % 7 == 5:
            raise KeyboardInterrupt
        return right(*given)

    monkeypatch.setattr(capturing, "node_masks", struck)
    handles = [engine.submit(each) for each in mixture("greedy")]
    interrupted = 0
    while not engine.idle:
        try:
            engine.step()
        except KeyboardInterrupt:
            interrupted += 1
    assert [h.completion().token_ids for h in handles] == [c.token_ids for c in alone("greedy")]
    assert interrupted > 2


def test_the_law_is_what_it_says() -> None:
    """The masked law of these tests, once more by hand for its first token."""
    law = masked_law(lambda text: TARGET[tuple((*PROMPT, *text)[-2:])], follow, 1)
    logits = TARGET[PROMPT[-2], PROMPT[-1]].double()
    assert law == pytest.approx({(i,): float(p) for i, p in enumerate(torch.softmax(logits, -1))})
