"""A replay over written text does what the engine does: the same rounds, drafts and acceptance, on tiny models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch

from headstart.control.controller import FixedController
from headstart.distill.shapes import head_for
from headstart.drafters.base import LeastChances
from headstart.lab.agreement import Agreement, Written
from headstart.lab.guesses import ByAgreement, View, ends_each
from headstart.lab.predict import Draft, predict, write
from headstart.lab.replay import Played, replay
from headstart.lab.round_costs import RoundCosts, RowCosts
from headstart.lab.system import System
from headstart.machine.head import save_head
from headstart.testing import TINY_VOCABULARY, tiny_model
from headstart.types import Request, Round, SamplingParams

FLAT = RowCosts(((1, 1.0, 9), (11, 1.5, 9)), start=0.05, step=0.1)
COSTS = RoundCosts({1: FLAT, 4: FLAT})
OPTIONS = {"quantization": None, "draft_quantization": None, "max_model_len": 192, "check": False, "max_rows": 4}


def noisy(scale: float) -> object:
    model = tiny_model("llama")
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "layers" in name and weight.dim() > 1:
                weight += scale * torch.randn(weight.shape, generator=generator) * weight.std()
    return model


@pytest.fixture(scope="module")
def model_system() -> Iterator[System]:
    with System.open(model=tiny_model("llama"), draft=noisy(0.25), **OPTIONS) as system:
        yield system


@pytest.fixture(scope="module")
def lookup_system() -> Iterator[System]:
    with System.open(model=tiny_model("llama"), draft="lookup", **OPTIONS) as system:
        yield system


@pytest.fixture(scope="module")
def head_system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """A head that knows nothing but the words that the target says most."""
    target, folder = tiny_model("llama"), tmp_path_factory.mktemp("head")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        save_head(head_for(target, torch.arange(TINY_VOCABULARY), ffn=32), folder)
    with System.open(model=target, draft=str(folder), **OPTIONS) as system:
        yield system


def prompts(count: int) -> list[tuple[str, list[int]]]:
    generator = torch.Generator().manual_seed(7)
    return [("any", torch.randint(3, 100, (12 + i,), generator=generator).tolist()) for i in range(count)]


def served(system: System, texts: Sequence[Written], gamma: int) -> list[Round]:
    """The rounds that the engine plays for these texts, all at once, but those that read prompts."""
    found: list[Round] = []
    system.cold()
    with system.listen(found.extend), system.engine.parts.controller.replaced(FixedController(gamma)):  # type: ignore[attr-defined]
        handles = [
            system.engine.submit(
                Request(
                    f"s{i}",
                    text.ids[: text.prompt],
                    SamplingParams(temperature=0, max_tokens=len(text.answer), ignore_eos=True),
                )
            )
            for i, text in enumerate(texts)
        ]
        while not system.engine.idle:
            system.engine.step()
    for handle, text in zip(handles, texts, strict=True):
        assert handle.completion().choices[0].token_ids == text.answer
    return [record for record in found if not record.prefill]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("gamma", [1, 4])
@pytest.mark.parametrize("which", ["model", "lookup", "head"])
def test_the_same_rounds_as_the_engine(which: str, gamma: int, rows: int, request: pytest.FixtureRequest) -> None:
    system: System = request.getfixturevalue(f"{which}_system")
    texts = write(system, prompts(rows), tokens=120 if which == "lookup" else 40, ignore_eos=True)
    draft = Draft(system, COSTS, COSTS)
    if which == "lookup":
        draft.costs = RoundCosts(COSTS.rows, free=True)
    real = served(system, texts, gamma)
    played = draft.replayed(texts, gamma, rows, cold=True)
    assert played.accepted == sum(record.accepted for record in real)
    assert played.accepted > 0 or which == "head"
    assert played.drafted == sum(record.drafted for record in real)
    assert played.row_rounds == len(real)
    assert played.tokens == sum(record.emitted for record in real)


def test_a_token_that_is_not_kept_costs_its_step(head_system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head learns how likely a token is by drafting it: one that it does not keep took its time, too."""
    texts = write(head_system, prompts(1), tokens=40, ignore_eos=True)
    draft = Draft(head_system, COSTS, COSTS)
    monkeypatch.setattr(draft.costly, "_min_chances", lambda: (2.0, 0.0))  # none is likely enough but the first
    played = draft.replayed(texts, 4, 1, cold=True)
    drafts = sum(count for length, count in played.gammas.items() if length)
    assert drafts == played.drafted > 0, "one token each"
    at_the_end = FLAT.step  # there is room for one token only
    assert played.draft_seconds == pytest.approx(drafts * (FLAT.start + 2 * FLAT.step) - at_the_end)
    alike = {texts[0]: Agreement(False, *4 * (((0.4,) * 40,),))}
    ends = ends_each(lambda rows: LeastChances(0.5, 0.0))
    view = View.of(0, texts[0], "block")
    assert ends([view], [4], [*alike.values()]) == ([1], 2)
    assert ends_each(lambda rows: LeastChances(0.0, 0.5))([view], [4], [*alike.values()]) == ([1], 1), (
        "it was not tried"
    )


def test_a_wrong_agreement_is_seen(model_system: System) -> None:
    texts = write(model_system, prompts(1), tokens=40, ignore_eos=True)
    draft = Draft(model_system, COSTS, COSTS)
    right = draft.agreement(texts[0])
    assert right is not None
    wrong = tuple(1.0 - value for value in right.ratio[0])
    draft._known[texts[0]] = Agreement(True, (wrong,), right.overlap, right.coupled, right.hope)
    real = served(model_system, texts, 4)
    assert draft.replayed(texts, 4, 1, cold=True).accepted != sum(record.accepted for record in real)


def simple(agreed: str) -> tuple[Written, Agreement]:
    """A text of as many tokens, and a draft that is right where there is a 1; the first comes with the prompt."""
    line = (tuple(map(float, agreed)),)
    return Written("any", 2, tuple(range(2 + len(agreed)))), Agreement(True, line, line, line, line)


def played(agreed: str, gamma: int, costs: RoundCosts = COSTS) -> Played:
    text, agreement = simple(agreed)
    return replay([text], ByAgreement({text: agreement}, None), FixedController(gamma), costs, rows=1)


def test_rounds_by_hand() -> None:
    # Behind the first token: draft 1 1 0: two kept and a correction; then 1 1: all kept, one of them is the last.
    found = played("1" + "110" + "111", 3)
    assert (found.rounds, found.tokens, found.drafted, found.accepted) == (2, 6, 5, 4)
    # forwards of width 4 and 3, drafts of 3 and 2 tokens
    assert found.seconds == pytest.approx((1.15 + 0.05 + 0.3) + (1.10 + 0.05 + 0.2))
    assert found.gammas == {3: 1, 2: 1}


def test_a_round_that_is_not_launched_ahead_waits_for_the_host() -> None:
    """On a device: the first, and those from when a row may be near its end until it has left."""
    waiting = replace(FLAT, gap=0.5)
    costs = RoundCosts({1: waiting, 4: waiting}, lengths=(0, 3), buckets=(1, 2, 4))
    good, bad = simple("1" * 17), simple("0" * 9)
    other = replace(bad[0], task="bad")
    guesses = ByAgreement({good[0]: good[1], other: bad[1]}, None)
    found = replay([good[0]], guesses, FixedController(3), costs, rows=1)
    assert found.rounds == 4
    # A round of four tokens: 1.15 and 0.35 for its draft. The first waits; the last was launched while 8 were left.
    assert found.seconds == pytest.approx(4 * 1.5 + 0.5)
    both = replay([good[0], other], guesses, FixedController(3), costs, rows=2)
    # The other one writes 8 tokens in 8 rounds, and may end in any of the last four; behind the fourth round the good
    # one has left.
    assert both.rounds == 8
    assert both.seconds == pytest.approx(8 * 1.5 + 0.5 * (1 + 4))
    plain = replay([good[0]], None, None, RoundCosts({1: waiting}, buckets=(1,)), rows=1)
    assert plain.seconds == pytest.approx(16 + 0.5)


def test_the_controller_is_told_times_that_scatter_and_the_clock_does_not() -> None:
    text, agreement = simple("1" * 41)
    told: list[Round] = []

    class Listening(FixedController):
        def observe(self, rounds: Sequence[Round]) -> None:
            told.extend(record for record in rounds if not record.prefill)

    noisy = RoundCosts({1: replace(FLAT, scatter=(0.5, 2.0))})
    found = replay([text], ByAgreement({text: agreement}, None), Listening(1), noisy, rows=1)
    assert found.seconds == pytest.approx(played("1" * 41, 1).seconds)
    times = {round(record.round_seconds / 1.2, 6) for record in told if record.width == 2}
    assert times == {0.5, 2.0}
    assert all(record.draft_seconds == pytest.approx(0.125 * record.round_seconds) for record in told if record.drafted)


def test_plain_rounds_cost_plain_rounds() -> None:
    text, _ = simple("1" * 9)
    found = replay([text] * 3, None, None, COSTS, rows=2)
    assert (found.rounds, found.row_rounds, found.tokens, found.seconds) == (16, 24, 24, pytest.approx(16.0))


def test_a_batch_waits_for_its_widest_and_ends_with_its_slowest() -> None:
    good, bad = simple("1" * 9), simple("10" * 4 + "0")
    other = replace(bad[0], task="bad")
    found = replay(
        [good[0], other], ByAgreement({good[0]: good[1], other: bad[1]}, None), FixedController(3), COSTS, rows=2
    )
    # The good one needs two rounds of four tokens. The other goes on alone, with one or two tokens a round.
    assert found.row_rounds == 2 + found.rounds
    assert found.tokens == 16


def test_rows_whose_prompts_are_read_first_are_ahead_when_all_have_begun() -> None:
    """Two prompts of two tokens, one read at a time: behind the first there is a round for its row alone."""
    texts = [replace(simple("1" * 13)[0], task=str(i)) for i in range(2)]
    guesses = ByAgreement(dict.fromkeys(texts, simple("1" * 13)[1]), None)
    together = replay(texts, guesses, FixedController(3), COSTS, rows=2)
    assert (together.rounds, together.tokens) == (3, 24)
    apart = replay(texts, guesses, FixedController(3), COSTS, rows=2, chunk=2)
    assert (apart.rounds, apart.tokens) == (3, 20), "four tokens were written before anything counts"
    assert apart.row_rounds == 5
    assert set(apart.each) == {0, 1}
    late = replay([*texts, replace(texts[0], task="2")] * 2, None, None, COSTS, rows=6, chunk=1)
    assert late.tokens == 72 - (10 + 8 + 6 + 4 + 2), "a token for each round that was played before the last began"


def test_a_draft_that_never_holds_is_not_expected_to_pay(model_system: System) -> None:
    texts = write(model_system, prompts(3), tokens=40, ignore_eos=True)
    draft = Draft(model_system, COSTS, COSTS)
    for text in texts:
        nothing = ((0.0,) * len(text.answer),)
        draft._known[text] = Agreement(True, nothing, nothing, nothing, nothing)
    assert predict(draft, texts, gamma=4, rows=1).speedup.mid == pytest.approx(1 / 1.65, rel=0.05)
    auto = predict(draft, texts, gamma="auto", rows=1)
    assert 0.9 < auto.speedup.mid <= 1.0
    assert auto.lengths[0] > 0.8


def test_a_draft_that_always_holds(model_system: System) -> None:
    texts = write(model_system, prompts(3), tokens=61, ignore_eos=True)
    draft = Draft(model_system, COSTS, COSTS)
    for text in texts:
        all_of_it = ((1.0,) * len(text.answer),)
        draft._known[text] = Agreement(True, all_of_it, all_of_it, all_of_it, all_of_it)
    found = predict(draft, texts, gamma=4, rows=1)
    assert found.formula == pytest.approx(5 / 1.65)
    assert found.speedup.mid == pytest.approx(5 / 1.65, rel=0.02)
    assert found.tau == 5.0


def test_drawn_tokens_are_accepted_as_the_formula_says() -> None:
    text = Written("any", 2, tuple(range(4002)), temperature=1.0)
    line = ((0.7,) * 4000,)
    found = replay(
        [text],
        ByAgreement({text: Agreement(False, line, line, line, line)}, "token"),
        FixedController(3),
        COSTS,
        rows=1,
        rule="token",
    )
    assert found.tau == pytest.approx(1 + 0.7 + 0.49 + 0.343, rel=0.04)
