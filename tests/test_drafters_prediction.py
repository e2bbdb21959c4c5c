"""Predictions: where an answer stands in the text its caller expects, who drafts from it, and how that is counted."""

from __future__ import annotations

from typing import Any

import pytest
from engines import device_draft, device_engine, table, table_draft, table_engine
from hypothesis import given, settings
from hypothesis import strategies as st
from test_drafters_lookup import View, only

from headstart.config import DraftConfig
from headstart.control.controller import controller_for
from headstart.drafters.head import HeadDrafter
from headstart.drafters.lookup import LookupDrafter
from headstart.drafters.model import ModelDrafter
from headstart.drafters.portfolio import PortfolioDrafter
from headstart.drafters.prediction import MAX_PREDICTION, Prediction, PredictionDrafter
from headstart.engine.captured import CapturedRounds
from headstart.engine.engine import Engine
from headstart.maths.limits import LONG_MATCH, MAX_STRENGTH
from headstart.testing import ScriptedDrafter
from headstart.types import Completion, Request, Round, SamplingParams

FILE = tuple(range(10, 60))


def test_an_answer_begins_as_predicted() -> None:
    drafter = LookupDrafter()
    view = View([5, 6, 1, 5, 6], prediction=(10, 11, 12, 13), prompt_length=5)
    first, whole = only(drafter, view, 3), only(drafter, view, 9)
    assert first is not None
    assert whole is not None
    assert (first.tokens, first.predicted) == ((10, 11, 12), True)  # though the prompt has a match of its own
    assert whole.tokens == (10, 11, 12, 13)
    view.tokens = [5, 6, 1, 5, 6, 99, 11]
    later = only(drafter, view, 9)
    assert later is not None
    assert (later.tokens, later.predicted) == ((12, 13), True)
    view.tokens = [5, 6, 1, 5, 6, 99, 11, 13]
    assert only(drafter, view, 9) is None  # the prediction ends there, and nothing else matches


def test_what_was_said_wins_over_the_prediction() -> None:
    view = View([1, 2, 60, 3, 1, 2], prediction=(1, 2, 50), prompt_length=1)
    proposal = only(LookupDrafter(), view, 1)
    assert proposal is not None
    assert (proposal.tokens, proposal.predicted) == ((60,), False)


def test_what_the_prompt_says_does_not() -> None:
    """The usual request: a file to edit in the prompt, and the same file as the prediction."""
    drafter, view = LookupDrafter(), View([1, *FILE, 2], prediction=FILE, prompt_length=len(FILE) + 2)
    for said in range(0, 40, 3):
        view.tokens = [1, *FILE, 2, *FILE[:said]]
        proposal = only(drafter, view, 4)
        assert proposal is not None
        assert (proposal.tokens, proposal.predicted) == (FILE[said : said + 4], True), said


def test_it_is_taken_up_again_after_a_divergence() -> None:
    """Something else in the place of a few tokens, something more, something less: each time it goes on behind."""
    drafter = PredictionDrafter()
    view = View([1], prediction=FILE, prompt_length=1)
    for answer in (
        [*FILE[:10], 900, 901, *FILE[12:16]],
        [*FILE[:10], 900, *FILE[10:14], 902, 903, *FILE[14:18]],
        [*FILE[:10], *FILE[30:34]],
        [900, *FILE[20:24]],
    ):
        for length in range(1, len(answer) + 1):
            view.tokens = [1, *answer[:length]]
            found = only(drafter, view, 3)
            if length == 1 and answer[0] == 900:
                assert found is None
        at = FILE.index(answer[-1]) + 1
        assert found is not None
        assert (found.tokens, found.strength) == (FILE[at : at + 3], min(LONG_MATCH, MAX_STRENGTH))
        drafter.reset()
    view.tokens = [1, *FILE[:10], 900, *FILE[11:14]]
    assert only(drafter, view, 3) is None, "three tokens do not speak for it loudly enough"


def test_of_several_places_the_nearest_is_taken() -> None:
    block = [1, 2, 3, 4, 5]
    expected = [*block, 50, *block, 51, *block, 52, *block, 53]
    known = Prediction(expected)
    known.follow(expected[:8])
    known.follow([*expected[:8], 99, *block])
    assert known.guess(2)[1] == [51, 1], "not where the same words stood first, nor where they stand last"


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=30), st.lists(st.integers(0, 3), max_size=20), st.integers(1, 9), st.data())
def test_a_guess_is_what_follows_a_match(answer: list[int], expected: list[int], budget: int, data: Any) -> None:
    """However the answer came in. Its strength is the length of a match, but for an answer that goes as expected."""
    known, done = Prediction(expected), 0
    while done < len(answer):
        done = data.draw(st.integers(done + 1, len(answer)))
        known.follow(answer[:done])
    strength, draft = known.guess(budget)
    if answer == expected[: len(answer)]:
        assert (strength, draft) == (min(LONG_MATCH + len(answer), MAX_STRENGTH), expected[len(answer) :][:budget])
        return
    longest = max(
        (n for n in range(min(len(answer), MAX_STRENGTH) + 1) for end in range(n, len(expected) + 1)
         if answer[len(answer) - n :] == expected[end - n : end]),
        default=0,
    )  # fmt: skip
    assert strength <= MAX_STRENGTH
    assert (strength > 0) == (longest > 0)
    if draft:
        ends = [end for end in range(len(expected) + 1) if expected[end : end + len(draft)] == draft]
        tail = min(strength, len(answer))
        assert any(expected[max(0, end - tail) : end] == answer[len(answer) - min(tail, end) :] for end in ends)


def test_a_hostile_prediction_is_bounded() -> None:
    drafter = LookupDrafter()
    view = View([1, 2, 3], prediction=tuple(range(MAX_PREDICTION)) + (1, 2, 3, 4) * 50_000, prompt_length=1)
    assert only(drafter, view, 4) is not None
    assert len(drafter._predictions._known["a"].expected) == MAX_PREDICTION
    drafter.release("a")
    assert not drafter._predictions._known
    negative = View([1, 2, 3, 1], prediction=(-1, -7, 2), id="b", prompt_length=4)
    proposal = only(drafter, negative, 4)
    assert proposal is not None
    assert (proposal.tokens[:2], proposal.predicted) == ((2, 3), False)


# -- in an engine

V = 8
TARGET, DRAFT = table(V, seed=5), table(V, seed=5) + 0.7 * table(V, seed=6)
GREEDY = SamplingParams(temperature=0, max_tokens=30)
PROMPT = (1, 2, 3)


def answered(
    engine: Engine, prediction: tuple[int, ...], params: SamplingParams = GREEDY
) -> tuple[Completion, list[Round]]:
    rounds: list[Round] = []
    with engine.listen(rounds.extend):
        handle = engine.submit(Request("a", PROMPT, params, prediction))
        engine.drive(lambda: handle.done)
    return handle.completion(), rounds


def plain(params: SamplingParams = GREEDY) -> tuple[int, ...]:
    return answered(table_engine(TARGET, None), (), params)[0].token_ids


def never() -> ScriptedDrafter:
    return ScriptedDrafter(lambda view, budget: None)


KINDS: dict[str, Any] = {
    "a model": lambda: table_engine(TARGET, table_draft(DRAFT), gamma=4),
    "a model, adaptive": lambda: table_engine(
        TARGET, table_draft(DRAFT), gamma=4, controller=controller_for(DraftConfig(max_gamma=4))
    ),
    "a model on the device": lambda: device_engine(TARGET, device_draft(DRAFT), gamma=4),
    "a model, overlapped": lambda: device_engine(TARGET, device_draft(DRAFT), gamma=4, overlap=True),
    "anybody's": lambda: table_engine(TARGET, never(), gamma=4),
    "anybody's, beside captured rounds": lambda: table_engine(TARGET, never(), gamma=4, rounds=CapturedRounds),
    "lookup": lambda: table_engine(TARGET, LookupDrafter(), gamma=4),
    "a portfolio": lambda: table_engine(TARGET, PortfolioDrafter(never(), lambda views, limits: list(limits)), gamma=4),
}


@pytest.mark.parametrize("kind", KINDS)
def test_whoever_drafts_predictions_are_drafted_and_counted(kind: str) -> None:
    truth = plain()
    engine: Engine = KINDS[kind]()
    answer, rounds = answered(engine, truth)
    stats = answer.stats
    assert answer.token_ids == truth
    assert stats.predicted == sum(r.drafted for r in rounds if r.predicted)
    assert stats.predicted_accepted == sum(r.accepted for r in rounds if r.predicted)
    assert stats.predicted_accepted >= 16, "most of the answer"
    wrong = tuple((token + 1) % V for token in truth)
    other, _ = answered(engine, wrong)
    assert other.token_ids == truth
    assert other.stats.predicted_accepted < other.stats.predicted or not other.stats.predicted
    edited = (*truth[:12], *((token + 1) % V for token in truth[12:15]), *truth[15:])
    again, _ = answered(engine, edited)
    assert again.token_ids == truth
    assert again.stats.predicted > again.stats.predicted_accepted > 12, "it was taken up again"
    nothing, rounds = answered(engine, ())
    assert nothing.token_ids == truth
    assert (nothing.stats.predicted, nothing.stats.predicted_accepted) == (0, 0)
    assert not any(r.predicted for r in rounds)


@pytest.mark.parametrize("kind", ["a model", "a model on the device", "lookup"])
def test_with_every_other_option(kind: str) -> None:
    for params in (
        SamplingParams(temperature=0.9, seed=4, max_tokens=25, n=3, logprobs=2),
        SamplingParams(temperature=0, max_tokens=25, repetition_penalty=1.3, presence_penalty=0.5, logprobs=1),
        SamplingParams(temperature=0, max_tokens=25, min_tokens=6, logit_bias={3: 0.4}, prompt_logprobs=1),
    ):
        without, _ = answered(table_engine(TARGET, None), (), params)
        found, _ = answered(KINDS[kind](), without.choices[0].token_ids, params)
        assert [c.token_ids for c in found.choices] == [c.token_ids for c in without.choices]
        assert found.choices[0].stats.predicted_accepted >= 12
        assert found.choices[0].logprobs is None or len(found.choices[0].logprobs) == 25
    off, _ = answered(KINDS[kind](), plain(), SamplingParams(temperature=0, max_tokens=30, speculate=False))
    assert off.token_ids == plain()
    assert off.stats.predicted == 0


def test_who_reads_predictions_itself() -> None:
    assert LookupDrafter.reads_predictions
    assert PortfolioDrafter.reads_predictions
    assert not ModelDrafter.reads_predictions
    assert not HeadDrafter.reads_predictions


def test_the_controller_takes_no_prediction_for_the_models_work() -> None:
    """A predicted draft took no time, and says nothing of how often the model's guesses hold."""
    controller = controller_for(DraftConfig(max_gamma=4))
    engine = table_engine(TARGET, table_draft(DRAFT), gamma=4, controller=controller)
    controller.meet(free=False, ends_itself=False)
    truth = plain()
    before = controller._greedy._acceptance.chances("x", -1, 2)  # type: ignore[attr-defined]
    _, rounds = answered(engine, truth)
    assert any(r.predicted for r in rounds)
    assert all(r.predicted for r in rounds if r.drafted), "the prediction was right all the way"
    assert controller._greedy._acceptance.chances("x", -1, 2) == before  # type: ignore[attr-defined]
    assert not controller._greedy._drafting  # type: ignore[attr-defined]


def test_a_drafter_is_told_of_sequences_in_the_same_way() -> None:
    engine = KINDS["a model"]()
    answered(engine, plain())
    assert not engine.parts.predictions._known, "released"
    assert PredictionDrafter.free
