"""A drafter is anybody's code: whatever it proposes, no request notices, and all can see why it went."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from engines import DeviceTable, run, table, table_engine
from slab_tools import check_slab

from headstart.config import EngineConfig
from headstart.control.controller import FixedController
from headstart.drafters.base import Drafter
from headstart.engine.captured import CapturedRounds
from headstart.engine.engine import Engine
from headstart.machine.cpu import build
from headstart.machine.cpu.sampling import vocab_ops_for
from headstart.types import DraftView, Proposal, Request, SamplingParams

V, GAMMA = 6, 3
TARGET, DRAFT = table(V, seed=5), table(V, seed=5) + 0.7 * table(V, seed=6)
PROMPTS = [(1, 3, 2), (4, 4, 0, 1), (5, 2)]
SETTINGS = {
    "greedy": SamplingParams(temperature=0, max_tokens=14),
    "coupled": SamplingParams(seed=3, max_tokens=14, verification="coupled"),
    "block": SamplingParams(seed=3, max_tokens=14, verification="block"),
}
UNIFORM = torch.full((1, V), 1 / V)


def q_of(rows: int, **wrong: float) -> torch.Tensor:
    q = torch.full((rows, V), 1 / V)
    for place, value in wrong.items():
        q[-1, int(place[1:])] = value
    return q


def drawn(q: Any, tokens: tuple[int, ...] = (0,)) -> Proposal:
    return Proposal.chain(tokens, q)


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def raises(error: BaseException) -> Callable[[DraftView, int], Any]:
    def guess(view: DraftView, budget: int) -> Any:
        raise error

    return guess


# What a row's guess is, and a word of the reason that must be shown.
ROWS: dict[str, tuple[Callable[[DraftView, int], Any], str]] = {
    "id past the end": (lambda v, b: Proposal.chain([V]), f"token {V}"),
    "id below zero": (lambda v, b: Proposal.chain([0, -1]), "token -1"),
    "id of 70 bits": (lambda v, b: Proposal.chain([2**70]), "vocabulary"),
    "id a string": (lambda v, b: Proposal.chain("ab"), "no whole number"),
    "id a fraction": (lambda v, b: Proposal.chain([1.0]), "no whole number"),  # type: ignore[list-item]
    "id a truth value": (lambda v, b: Proposal.chain([True]), "no whole number"),
    "id None": (lambda v, b: Proposal.chain([None]), "no whole number"),  # type: ignore[list-item]
    "ids in a tensor of fractions": (lambda v, b: Proposal.chain(torch.rand(2)), "no whole number"),  # type: ignore[arg-type]
    "ids in two rows": (lambda v, b: Proposal.chain(torch.zeros(1, 2).long()), "no whole number"),  # type: ignore[arg-type]
    "tokens a number": (lambda v, b: Proposal(3, (-1,)), "not a tuple"),  # type: ignore[arg-type]
    "tokens a string": (lambda v, b: Proposal("0", (-1,)), "not a tuple"),  # type: ignore[arg-type]
    "one too many": (lambda v, b: Proposal.chain([0] * (b + 1)), "at most"),
    "thousands": (lambda v, b: Proposal.chain([0] * 5000), "5000 tokens"),
    "too few parents": (lambda v, b: Proposal((0, 1), (-1,)), "1 parents"),
    "too many parents": (lambda v, b: Proposal((0,), (-1, 0)), "2 parents"),
    "its own parent": (lambda v, b: Proposal((0, 1), (-1, 1)), "parent 1"),
    "a later parent": (lambda v, b: Proposal((0, 1, 2), (2, 0, 1)), "parent 2"),
    "parent -2": (lambda v, b: Proposal((0,), (-2,)), "parent -2"),
    "parents None": (lambda v, b: Proposal((0,), None), "parents"),  # type: ignore[arg-type]
    "parents fractions": (lambda v, b: Proposal((0,), (-1.0,)), "parents"),  # type: ignore[arg-type]
    "an unknown draw": (lambda v, b: Proposal((0,), (-1,), UNIFORM, "thrown"), "thrown"),  # type: ignore[arg-type]
    "q of a point": (lambda v, b: Proposal((0,), (-1,), UNIFORM), "deterministic"),
    "no q": (lambda v, b: Proposal((0,), (-1,), None, "iid"), "q is None"),
    "q a list": (lambda v, b: drawn([[1 / V] * V]), "q is a list"),
    "q of too few rows": (lambda v, b: drawn(UNIFORM, (0, 1)), "[1, 6]"),
    "q of too many rows": (lambda v, b: drawn(q_of(2)), "[2, 6]"),
    "q too narrow": (lambda v, b: drawn(q_of(1)[:, :-1]), "[1, 5]"),
    "q too wide": (lambda v, b: drawn(torch.full((1, V + 1), 1 / (V + 1))), "[1, 7]"),
    "q of one axis": (lambda v, b: drawn(q_of(1)[0]), "[6]"),
    "q of whole numbers": (lambda v, b: drawn(torch.eye(V).long()[:1]), "int64"),
    "q in bfloat16": (lambda v, b: drawn(UNIFORM.bfloat16()), "bfloat16"),
    "q sparse": (lambda v, b: drawn(torch.eye(V)[:1].to_sparse()), "sparse"),
    "q with NaN": (lambda v, b: drawn(q_of(2, _1=float("nan")), (0, 1)), "NaN"),
    "q below zero": (lambda v, b: drawn(q_of(1, _0=1 / V + 0.2, _5=1 / V - 0.2)), "negative"),
    "q infinite": (lambda v, b: drawn(q_of(1, _0=float("inf"))), "sum to 1"),
    "q of 2": (lambda v, b: drawn(2 * UNIFORM), "sum to 1"),
    "q of nothing": (lambda v, b: drawn(0 * UNIFORM), "sum to 1"),
    "a token that q cannot draw": (lambda v, b: drawn(torch.eye(V)[:1], (3,)), "probability 0"),
    "siblings drawn twice": (lambda v, b: Proposal((2, 2), (-1, -1), q_of(2), "distinct"), "without replacement"),
    "strength below zero": (lambda v, b: Proposal.chain([0], strength=-1), "strength"),
    "strength None": (lambda v, b: Proposal.chain([0], strength=None), "strength"),  # type: ignore[arg-type]
    "strength a fraction": (lambda v, b: Proposal.chain([0], strength=0.5), "strength"),  # type: ignore[arg-type]
    "a tuple": (lambda v, b: ((0,), (-1,)), "a tuple"),
    "a string": (lambda v, b: "0", "a str"),
    "the class itself": (lambda v, b: Proposal, "a type"),
    "an exception": (raises(ValueError("lost the thread")), "lost the thread"),
    "an exception without words": (raises(ZeroDivisionError()), "ZeroDivisionError"),
    "an exception that cannot be printed": (raises(Unprintable()), "Unprintable"),
    "out of memory": (raises(torch.OutOfMemoryError("the draft is out of memory")), "out of memory"),
}

# What ``propose`` makes of the right list of proposals.
LISTS: dict[str, tuple[Callable[[list[Any]], Any], str]] = {
    "one too few": (lambda found: found[:-1], "proposals for"),
    "one too many": (lambda found: [*found, None], "proposals for"),
    "nothing": (lambda found: None, "None"),
    "a generator": (lambda found: (p for p in found), "a generator"),
    "a dictionary": (lambda found: dict(enumerate(found)), "a dict"),
    "a word": (lambda found: "x" * len(found), "a str"),
    "a proposal": (lambda found: found[0] or Proposal.chain([0]), "a Proposal"),
}


class Turning(Drafter):
    """Drafts well, until the middle one of the three answers has some tokens; then goes wrong there."""

    name = "turning"

    def __init__(
        self, wrong: Callable[[DraftView, int], Any] | None, whole: Callable[[list[Any]], Any] | None, *, warm: bool
    ) -> None:
        """``warm``: it drafts nothing before: rejection sampling then says what plain decoding says."""
        self.wrong, self.whole, self.warm = wrong, whole, warm
        self.calls = 0

    def propose(self, views: Sequence[DraftView], budgets: Sequence[int]) -> Any:
        self.calls += 1
        turns = any(self.turns(view) and budget for view, budget in zip(views, budgets, strict=True))
        found = [self.guess(view, budget) for view, budget in zip(views, budgets, strict=True)]
        return self.whole(found) if turns and self.whole is not None else found

    def turns(self, view: DraftView) -> bool:
        return view.id == "1/0" and len(view.tokens) > view.prompt_length + 4

    def guess(self, view: DraftView, budget: int) -> Any:
        if self.turns(view) and budget and self.wrong is not None:
            return self.wrong(view, budget)
        tokens = list(view.tokens)
        for _ in range(0 if self.warm else budget):
            tokens.append(int(DRAFT[tokens[-2], tokens[-1]].argmax()))
        return Proposal.chain(tokens[len(view.tokens) :])


def engine(drafter: Drafter | None, backend: str) -> Engine:
    if backend != "captured":
        made = table_engine(TARGET, drafter, gamma=GAMMA, rows=3)
        if backend == "kernels":
            made.parts.runner.vocab_ops = vocab_ops_for(1)  # type: ignore[misc]
        return made
    runner = DeviceTable(TARGET, rows=3, max_len=64, margin=40)
    rounds = CapturedRounds(runner, None, vocab_size=V, lengths=(0, 1, GAMMA))
    config = EngineConfig(max_rows=3)
    return Engine(runner, drafter, FixedController(GAMMA), config, vocab_size=V, captured=rounds, max_gamma=GAMMA)


def requests(rule: str) -> list[Request]:
    return [Request(str(i), prompt, SETTINGS[rule]) for i, prompt in enumerate(PROMPTS)]


# Where a round is judged (by torch, by a program for the device, by the CPU's own kernels), and by which rule.
JUDGES = [
    *(("table", rule) for rule in SETTINGS),
    ("captured", "greedy"),
    ("captured", "block"),
    pytest.param("kernels", "block", marks=pytest.mark.skipif(build.why_not() is not None, reason="no kernels")),
]
judged = pytest.mark.parametrize(("backend", "rule"), JUDGES)


@cache
def plain(backend: str, rule: str) -> list[tuple[int, ...]]:
    return [c.token_ids for c in run(engine(None, backend), requests(rule))]


def goes_on(made: Engine, expected: list[tuple[int, ...]], rule: str, reason: str) -> None:
    """Every request ends as without a drafter; the drafter is gone, the reason is there, and later requests work."""
    found = run(made, requests(rule))
    assert [c.token_ids for c in found] == expected
    assert [c.finish_reason for c in found] == ["length"] * 3
    assert made.stats.failed == 0
    assert made.parts.drafter is None
    assert reason in str(made.inactive_reason)
    check_slab(made.parts.runner.slab)
    assert made.parts.runner.slab.free_rows == 3
    assert [c.token_ids for c in run(made, requests(rule))] == expected


@judged
@pytest.mark.parametrize("case", ROWS)
def test_a_proposal_that_is_nonsense(case: str, backend: str, rule: str) -> None:
    wrong, reason = ROWS[case]
    drafter = Turning(wrong, None, warm=rule == "block")
    made = engine(drafter, backend)
    goes_on(made, plain(backend, rule), rule, reason)
    assert "'turning'" in str(made.inactive_reason)
    assert drafter.calls > 1, "it was asked until then"
    if rule != "block":
        assert made.stats.accepted > 3


@judged
@pytest.mark.parametrize("case", LISTS)
def test_a_list_that_is_nonsense(case: str, backend: str, rule: str) -> None:
    whole, reason = LISTS[case]
    goes_on(engine(Turning(None, whole, warm=rule == "block"), backend), plain(backend, rule), rule, reason)


def test_a_guess_for_a_row_that_was_not_asked() -> None:
    """A request that asked for no speculation gets none, whatever is proposed for it."""

    class Eager(Drafter):
        def propose(self, views: Sequence[DraftView], budgets: Sequence[int]) -> list[Proposal | None]:
            return [Proposal.chain([0]) for _ in views]

    off = SamplingParams(temperature=0, max_tokens=14, speculate=False)
    asked = [Request("0", PROMPTS[0], SETTINGS["greedy"]), Request("1", PROMPTS[1], off)]
    made = table_engine(TARGET, Eager(), gamma=GAMMA)
    expected = [c.token_ids for c in run(table_engine(TARGET, None), asked)]
    found = run(made, asked)
    assert [c.token_ids for c in found] == expected
    assert set(found[1].choices[0].origins) == {"plain"}
    assert "at most 0" in str(made.inactive_reason)


# -- what is no nonsense


def good(view: DraftView, budget: int) -> Iterator[Proposal]:
    """The same guess in every form that is right."""
    import numpy as np

    tokens = list(view.tokens)
    for _ in range(min(budget, 2)):
        tokens.append(int(DRAFT[tokens[-2], tokens[-1]].argmax()))
    guess = tokens[len(view.tokens) :]
    n = len(guess)
    q = torch.full((n, V), 1 / V)
    yield Proposal.chain(guess)
    yield Proposal.chain(np.array(guess))  # type: ignore[arg-type]
    yield Proposal.chain(torch.tensor(guess))  # type: ignore[arg-type]
    yield Proposal(list(guess), list(range(-1, n - 1)))  # type: ignore[arg-type]
    yield Proposal.chain(guess, strength=np.int64(3))  # type: ignore[arg-type]
    yield Proposal((guess[0], *guess[:1]), (-1,) * min(2, n + 1)) if budget > 1 else Proposal.chain(guess)
    yield Proposal(tuple(guess), tuple(range(-1, n - 1)), q, "iid")
    yield Proposal(tuple(guess), tuple(range(-1, n - 1)), q.double(), "distinct")
    yield Proposal(tuple(guess), tuple(range(-1, n - 1)), q.clone().requires_grad_(), "iid")
    yield Proposal((), ())


@judged
def test_every_form_of_a_right_proposal(backend: str, rule: str) -> None:
    count = sum(1 for _ in good(_View(), 2))
    for form in range(count):

        class Forms(Drafter):
            def propose(self, views: Sequence[DraftView], budgets: Sequence[int], form: int = form) -> Any:
                return tuple(
                    list(good(view, budget))[form] if budget else None
                    for view, budget in zip(views, budgets, strict=True)
                )

        made = engine(Forms(), backend)
        found = run(made, requests(rule))
        assert made.inactive_reason is None, form
        assert all(type(token) is int for c in found for token in c.token_ids)
        assert [c.finish_reason for c in found] == ["length"] * 3
        if rule != "block":
            assert [c.token_ids for c in found] == plain(backend, rule), form


class _View:
    tokens = (1, 2)


def test_an_id_past_the_tokenizer_is_a_guess_that_never_holds() -> None:
    """A padded vocabulary: the target has the id, and never says it."""
    made = table_engine(
        TARGET, Turning(lambda v, b: Proposal.chain([V - 1]), None, warm=False), gamma=2, vocab_size=V - 1
    )
    asked = [Request(str(i), p, SETTINGS["greedy"]) for i, p in enumerate([(1, 3, 2), (4, 4, 0, 1)])]
    found = run(made, asked)
    assert made.inactive_reason is None
    assert max(token for c in found for token in c.token_ids) < V - 1
