"""Why there is no speculation: said as soon as drafting is held back, and until it really happens again.

Through real engines, because the order in which a round asks (budgets, propose, trim, observe) is the point. Only the
clock is not real: what a forward takes is said here, since on a busy machine a forward of one token may take as long
as one of ten, and a controller that measures would be right to draft.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from engines import run, table, table_draft
from test_contributing import bigram
from test_controller import ROUND, STEEP, View
from test_drafters_head import target as head_target

from headstart import LLM, SamplingParams
from headstart.config import DraftConfig, EngineConfig
from headstart.control.adaptive import AdaptiveController
from headstart.control.controller import FixedController, controller_for
from headstart.distill.shapes import head_for
from headstart.drafters.base import Drafter
from headstart.drafters.head import HeadDrafter
from headstart.drafters.model import ModelDrafter
from headstart.drafters.portfolio import PortfolioDrafter
from headstart.engine import drafting, players
from headstart.engine import round as rounds
from headstart.engine.engine import Engine
from headstart.machine.runner import EagerRunner
from headstart.testing import TINY_VOCABULARY, ScriptedDrafter, TableRunner, tiny_model
from headstart.types import DraftView, Proposal, Request, Round

V = 12
TARGET = table(V, seed=5)
GREEDY = SamplingParams(temperature=0, max_tokens=300)
DRAWN = SamplingParams(temperature=1, seed=4, max_tokens=300, verification="block")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine has no other clock to be given: it reads the system's."""
    monkeypatch.setattr(rounds, "perf_counter", Clock())
    for module in (players, drafting):
        monkeypatch.setattr(module, "perf_counter", Clock())


def tick(tokens: int) -> None:
    """A forward over more tokens takes longer, as it does on a CPU."""
    Clock.now += 0.001 + 0.0004 * tokens


class SlowTable(TableRunner):
    def forward(self, rows: slice, tokens: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        tick(tokens.shape[1])
        return super().forward(rows, tokens, *args, **options)


class SlowModel(EagerRunner):
    def forward(self, rows: slice, tokens: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        tick(tokens.shape[1])
        return super().forward(rows, tokens, *args, **options)


class SlowHead(HeadDrafter):
    def propose(self, views: Sequence[DraftView], budgets: Sequence[int]) -> list[Proposal | None]:
        tick(max(budgets))
        return super().propose(views, budgets)


def engine(drafter: Drafter, runner: Any = None, *, vocab_size: int = V) -> Engine:
    """With the controller that an ``LLM`` has by default."""
    target = runner if runner is not None else SlowTable(TARGET, rows=2, max_len=400, margin=40)
    controller = controller_for(DraftConfig())
    controller.meet(free=drafter.free, ends_itself=drafter.ends_itself)
    return Engine(target, drafter, controller, EngineConfig(max_rows=2), vocab_size=vocab_size)


def answered(made: Engine, params: SamplingParams, prompts: Sequence[tuple[int, ...]] = ((1, 3, 2),)) -> list[Round]:
    seen: list[Round] = []
    made.listen(seen.extend)
    for completion in run(made, [Request(str(i), prompt, params) for i, prompt in enumerate(prompts)]):
        assert completion.finish_reason == "length"
    return seen


def wrong(view: DraftView) -> int:
    """A token that the target does not say next."""
    likely = TARGET[view.tokens[-2], view.tokens[-1]]
    return int(likely.argmin())


# -- a drafter whose guesses cost nothing, and are worth nothing


@pytest.mark.parametrize("strength", [0, 1, 9])
@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_a_useless_free_drafter_is_trimmed_whatever_it_says_of_its_guesses(
    strength: int, params: SamplingParams
) -> None:
    def guess(view: DraftView, budget: int) -> Proposal | None:
        return Proposal.chain([wrong(view)] * budget, strength=strength)

    made = engine(ScriptedDrafter(guess, free=True))
    answered(made, params)
    assert made.stats.drafted < 250, "a third of a token a round, where ten were proposed"
    assert "does not pay" in str(made.inactive_reason)


def test_the_example_of_contributing_is_trimmed_too() -> None:
    """A text that does not repeat itself: each token has another follower every time."""

    class Wandering(SlowTable):
        def forward(self, rows: slice, tokens: torch.Tensor, lengths: Sequence[int], *args: Any, **options: Any) -> Any:
            logits = super().forward(rows, tokens, lengths, *args, **options).clone()
            where = torch.tensor(lengths)[:, None] + torch.arange(tokens.shape[1])
            keep = logits.shape[1]
            generator = torch.Generator()
            for row, places in enumerate(where.tolist()):
                for node, place in enumerate(places[len(places) - keep :]):
                    logits[row, node] = torch.randn(V, generator=generator.manual_seed(place * 7919))
            return logits

    made = engine(bigram()(), Wandering(TARGET, rows=2, max_len=400, margin=40))
    answered(made, GREEDY)
    assert 10 < made.stats.drafted < 400, "2,600 proposed and verified before"
    assert made.stats.acceptance_rate < 0.3
    assert "does not pay" in str(made.inactive_reason)


def test_a_useless_tree_is_trimmed_too() -> None:
    def guess(view: DraftView, budget: int) -> Proposal | None:
        return Proposal((wrong(view),) * 5, (-1, -1, 0, 1, 2)) if budget >= 5 else None

    made = engine(ScriptedDrafter(guess, free=True))
    answered(made, GREEDY)
    assert made.stats.drafted < 250
    assert "does not pay" in str(made.inactive_reason)


def test_a_tree_that_holds_is_kept() -> None:
    def guess(view: DraftView, budget: int) -> Proposal | None:
        if budget < 4:
            return None
        tokens = list(view.tokens)
        for _ in range(3):
            tokens.append(int(TARGET[tokens[-2], tokens[-1]].argmax()))
        return Proposal((wrong(view), *tokens[-3:]), (-1, -1, 1, 2))

    made = engine(ScriptedDrafter(guess, free=True))
    seen = answered(made, GREEDY)
    assert sum(r.drafted == 4 for r in seen) > 30
    assert made.inactive_reason is None


def test_drawn_tokens_are_never_cut_when_they_are_known() -> None:
    """A drafter that calls itself free and draws: what was drawn is verified, and how much is settled beforehand."""
    asked: list[int] = []
    generator = torch.Generator().manual_seed(3)

    def guess(view: DraftView, budget: int) -> Proposal | None:
        asked.append(budget)
        q = torch.full((V,), 0.02 / V)
        q[wrong(view)] += 0.98
        tokens = torch.multinomial(q, budget, replacement=True, generator=generator).tolist()
        return Proposal.chain(tokens, q.expand(budget, V), strength=4)

    made = engine(ScriptedDrafter(guess, free=True))
    seen = answered(made, DRAWN)
    assert [r.drafted for r in seen if r.drafted] == asked
    assert len(asked) < len(seen) / 2
    assert "does not pay" in str(made.inactive_reason)


def test_one_that_is_right_goes_on() -> None:
    def guess(view: DraftView, budget: int) -> Proposal | None:
        tokens = list(view.tokens)
        for _ in range(budget):
            tokens.append(int(TARGET[tokens[-2], tokens[-1]].argmax()))
        return Proposal.chain(tokens[len(view.tokens) :])

    made = engine(ScriptedDrafter(guess, free=True))
    seen = answered(made, GREEDY)
    assert sum(r.drafted > 0 for r in seen) > len(seen) / 2
    assert made.inactive_reason is None


# -- drafters whose guesses cost time


@pytest.mark.parametrize("ends_itself", [False, True])
@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_a_useless_draft_model(params: SamplingParams, ends_itself: bool) -> None:
    slow = SlowTable(-TARGET, rows=2, max_len=400, margin=40)
    drafter = ModelDrafter(slow, vocab_size=V, width=V, min_chance_to_extend=(lambda: 0.1) if ends_itself else None)
    made = engine(drafter)
    seen = answered(made, params)
    assert 0 < made.stats.drafted < 250
    assert seen[-1].drafted == 0
    assert "does not pay" in str(made.inactive_reason)


def useless_head(runner: EagerRunner) -> HeadDrafter:
    torch.manual_seed(1)
    net = head_for(head_target(), torch.arange(0, TINY_VOCABULARY - 20), ffn=32)
    return SlowHead(net, runner, vocab_size=TINY_VOCABULARY, min_chances=lambda: (0.0, 0.0))


@pytest.mark.parametrize("beside_lookup", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_useless_head(beside_lookup: bool, temperature: float) -> None:
    runner = SlowModel(head_target(), rows=2, max_len=200, margin=40, probe=False)
    made: list[Engine] = []

    def worth(views: Sequence[DraftView], limits: Sequence[int]) -> list[int]:
        return made[0].parts.controller.paid_budgets(views, limits)

    drafter: Drafter = useless_head(runner)
    if beside_lookup:
        drafter = PortfolioDrafter(drafter, worth, long_match=50)  # it never finds a match
    made.append(engine(drafter, runner, vocab_size=TINY_VOCABULARY))
    params = SamplingParams(temperature=temperature, seed=2, max_tokens=150, ignore_eos=True, verification="block")
    answered(made[0], params, ((5, 6, 7), (9, 3)))
    assert 0 < made[0].stats.drafted < 150
    assert "does not pay" in str(made[0].inactive_reason)


def test_the_reason_goes_when_speculation_is_back_and_not_by_a_probe() -> None:
    right = False

    def guess(view: DraftView, budget: int) -> Proposal | None:
        tokens = list(view.tokens)
        for _ in range(budget):
            before = TARGET[tokens[-2], tokens[-1]]
            tokens.append(int(before.argmax() if right else before.argmin()))
        return Proposal.chain(tokens[len(view.tokens) :])

    made = engine(ScriptedDrafter(guess))
    told: list[tuple[int, bool]] = []  # tokens drafted in a round, and was there a reason after it

    def asked(rounds: Sequence[Round]) -> None:
        told.append((rounds[0].drafted, made.inactive_reason is not None))

    made.listen(asked)
    run(made, [Request("a", (1, 3, 2), GREEDY)])
    first = next(i for i, (_, held_back) in enumerate(told) if held_back)
    assert all(held_back for _, held_back in told[first:])
    assert any(drafted for drafted, _ in told[first:]), "probes were made meanwhile"
    right = True
    for name in "bcde":
        run(made, [Request(name, (1, 3, 2), GREEDY)])
    assert max(drafted for drafted, _ in told[-5:]) > 4
    assert made.inactive_reason is None


# -- the same without an engine: no clock has a say


def in_order(controller: AdaptiveController, rounds: int, guess: Callable[[int], Proposal | None]) -> list[int]:
    """Rounds as the engine plays them; nothing holds, and a token more costs as much as the first."""
    drafted = []
    for _ in range(rounds):
        (budget,) = controller.budgets([View()], [10])
        proposal = guess(budget) if budget else None
        (kept,) = controller.trim([View()], [proposal])
        n = len(kept) if kept is not None else 0
        drafted.append(n)
        seconds = STEEP[n + 1]
        record = Round(
            **vars(ROUND)
            | {"drafted": n, "width": n + 1, "verify_seconds": seconds, "round_seconds": seconds + 0.1 * n}
            | {"draft_seconds": 0.1 * n, "outcomes": (False,) * bool(n)}
        )
        controller.observe([record])
    return drafted


@pytest.mark.parametrize("free", [False, True])
def test_trim_leaves_the_reason_alone(free: bool) -> None:
    controller = AdaptiveController(10, free=free)
    drafted = in_order(controller, 120, lambda budget: Proposal.chain([1] * budget))
    assert sum(drafted) > 0
    assert sum(drafted[-60:]) <= 6, "only the rare probe"
    assert "does not pay" in str(controller.reason())
    controller.budgets([View()], [10])
    controller.trim([View()], [None])
    assert "does not pay" in str(controller.reason())


def test_what_cost_time_is_learnt_apart_from_what_was_free() -> None:
    """In a portfolio, paid guesses that fail say nothing of free ones of unknown strength, and are not cut."""
    controller = AdaptiveController(10, free=True)
    controller.observe([ROUND])
    paid = Proposal((1,) * 8, tuple(range(-1, 7)), paid=True)
    for _ in range(40):
        assert controller.trim([View()], [paid]) == [paid]
        controller.observe([Round(**vars(ROUND) | {"drafted": 8, "width": 9, "outcomes": (False,), "paid": True})])
    assert controller._acceptance.rate(-1) < 0.1
    assert controller._acceptance.rate(0) == 0.5


# -- gamma = 0


def test_gamma_0_never_drafts() -> None:
    """Nobody is asked, a draft is not loaded, and the reason is there before the first token."""
    model = tiny_model("llama")

    class Unasked(Drafter):
        def propose(self, views: Sequence[DraftView], budgets: Sequence[int]) -> list[Proposal | None]:
            raise AssertionError("nobody is to ask")

    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    plain = LLM(model, None, max_model_len=64, check=False).generate([5, 6, 7], params)
    for draft in (None, "lookup", "auto", Unasked(), tiny_model("llama", seed=2)):
        llm = LLM(model, draft, gamma=0, max_model_len=64, check=False)
        assert "gamma is 0" in str(llm.engine.inactive_reason)
        assert llm.generate([5, 6, 7], params).token_ids == plain.token_ids
        assert llm.engine.parts.drafter is None
        assert llm.drafter_name == "none"
        assert llm.stats.drafted == 0
        assert set(llm.generate([5, 6, 7], params).choices[0].origins) == {"plain"}


def test_gamma_0_in_an_engine_of_ones_own() -> None:
    drafter = table_draft(TARGET, rows=2, max_len=400)
    runner = TableRunner(TARGET, rows=2, max_len=400, margin=40)
    made = Engine(runner, drafter, FixedController(0), EngineConfig(max_rows=2), vocab_size=V)
    assert made.inactive_reason == "gamma is 0, so nothing is drafted"
    answered(made, GREEDY)
    assert drafter.runner.forwards == 0  # type: ignore[attr-defined]
    assert made.stats.drafted == 0
