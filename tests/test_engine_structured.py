"""Grammars in the whole engine, on a model with known probabilities: what it emits follows the masked target's law,
whoever drafts, by every rule; and a grammar that is moved by drafted tokens would be noticed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engines import run, table, table_draft, table_engine, tree_drafter
from grammars import Toy, masked_law
from statistics_tools import chi_squared

from headstart import InvalidParameter
from headstart.control.adaptive import AdaptiveController
from headstart.drafters.base import Drafter
from headstart.engine import node_masks as masking
from headstart.engine.engine import Engine
from headstart.maths import noise
from headstart.testing import ScriptedDrafter
from headstart.types import DraftView, Proposal, Request, SamplingParams, Structured

V, LENGTH, SAMPLES = 4, 4, 500
TARGET, DRAFT = table(V, seed=1), table(V, seed=1) + 0.8 * table(V, seed=2)
PROMPT = (1, 3, 2)
ASKED = Structured(regex="x")  # the grammar is given as an object; this only says that there is one


def follow(text: tuple[int, ...]) -> tuple[int, ...]:
    """No token twice in a row; behind 3, 1 must come; behind 1 and 0 the text ends."""
    if text[-2:] == (1, 0):
        return ()
    if text[-1:] == (3,):
        return (1,)
    return tuple({0, 1, 2, 3} - set(text[-1:]))


LAW = masked_law(lambda text: TARGET[tuple((*PROMPT, *text)[-2:])], follow, LENGTH)


def drawn_blindly(view: DraftView, budget: int) -> Proposal | None:
    """Draws from the draft as it is: what the grammar forbids is drawn as any other token."""
    tokens, q = list(view.tokens), []
    for offset in range(min(budget, 3)):
        law = DRAFT[tokens[-2], tokens[-1]].softmax(-1)
        keys = noise.keys(noise.seeds([view.seed], "cpu"), torch.tensor([len(view.tokens)]), offset + 1, noise.DRAFT)
        q.append(law)
        tokens.append(int(noise.race(law[None], keys)))
    return Proposal.chain(tokens[len(view.tokens) :], torch.stack(q)) if q else None


DRAFTERS: dict[str, Callable[[], Drafter | None]] = {
    "plain": lambda: None,
    "model": lambda: table_draft(DRAFT, rows=16),
    "blind": lambda: ScriptedDrafter(drawn_blindly),
    "tree": lambda: tree_drafter(DRAFT),
}


def sample(kind: str, grammar: Toy, **params: Any) -> tuple[Counter[tuple[int, ...]], Engine]:
    engine = table_engine(TARGET, DRAFTERS[kind](), gamma=3, rows=16, max_waiting=SAMPLES)
    requests = [
        Request(
            str(seed), PROMPT, SamplingParams(max_tokens=LENGTH + 2, seed=seed, structured=ASKED, **params), (), grammar
        )
        for seed in range(SAMPLES)
    ]
    return Counter(c.token_ids[:LENGTH] for c in run(engine, requests)), engine


@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        ("plain", "block"),
        *((kind, rule) for kind in ("model", "blind", "tree") for rule in ("token", "block", "coupled")),
    ],
)
def test_the_engine_follows_the_masked_target(kind: str, rule: str) -> None:
    grammar = Toy(follow, V)
    counts, engine = sample(kind, grammar, verification=rule)
    assert chi_squared(counts, LAW) > 1e-4
    assert {len(text) for text in counts} == {2, 3, 4}
    assert engine.inactive_reason is None
    if kind != "plain":
        assert 0.2 < engine.stats.acceptance_rate < 1
        assert any(len(asked) > 1 for state in grammar.made for asked in state.asked), "behind drafted tokens, too"


@pytest.mark.parametrize("kind", ["model", "tree"])
def test_a_grammar_that_drafted_tokens_move_is_caught(kind: str) -> None:
    counts, _ = sample(kind, Toy(follow, V, moves=True), verification="token")
    assert chi_squared(counts, LAW) < 1e-9


def test_the_mask_of_the_position_before_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = masking.node_masks

    def shifted(*given: Any) -> Any:
        found = right(*given)
        return found[:1] + found[:-1]

    monkeypatch.setattr("headstart.engine.judge.node_masks", shifted)
    counts, _ = sample("model", Toy(follow, V), verification="token")
    assert chi_squared(counts, LAW) < 1e-9


def test_greedy_rows_and_neighbours_without_a_grammar() -> None:
    """In one batch: each as if alone."""
    target = table(6, seed=4)

    def even(text: tuple[int, ...]) -> tuple[int, ...]:
        return (0, 2, 4) if len(text) % 2 else (1, 3, 5)

    settings: list[dict[str, Any]] = [
        {"temperature": 0},
        {"seed": 5},
        {"seed": 6, "top_k": 2, "repetition_penalty": 1.3},
    ]

    def request(i: int) -> Request:
        given = settings[i % 3] | ({"structured": ASKED} if i % 2 else {})
        return Request(str(i), (1, 2, i), SamplingParams(max_tokens=9, **given), (), Toy(even, 6) if i % 2 else None)

    alone = [run(table_engine(target, None), [request(i)])[0] for i in range(6)]
    for drafter in (None, table_draft(table(6, seed=5), rows=6), tree_drafter(table(6, seed=4))):
        together = run(table_engine(target, drafter, rows=6), [request(i) for i in range(6)])
        assert [c.token_ids for c in together] == [c.token_ids for c in alone]
    assert all(token % 2 == (place + 1) % 2 for place, token in enumerate(alone[1].token_ids))


@pytest.mark.parametrize("controller", [None, AdaptiveController(10)])
def test_forced_tokens_are_drafted_and_hold(controller: AdaptiveController | None) -> None:
    def spelling(text: tuple[int, ...]) -> tuple[int, ...]:
        return (text[-1] + 1,) if text and text[-1] < 5 else (0, 5)

    grammar = Toy(spelling, 6)
    engine = table_engine(table(6), ScriptedDrafter(lambda view, budget: None), gamma=8, controller=controller)
    plain = table_engine(table(6), None)
    asked = [
        Request(str(i), (1, 2), SamplingParams(max_tokens=30, seed=i, structured=ASKED), (), grammar) for i in range(4)
    ]
    found, expected = run(engine, asked), run(plain, asked)
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    assert sum(c.stats.forced for c in found) > 20
    assert all(c.stats.accepted == c.stats.drafted == c.stats.forced for c in found)
    assert engine.stats.rounds < plain.stats.rounds


def test_a_grammar_that_leaves_nothing_fails_alone() -> None:
    """No bit at all: that request ends with an error which says why, its neighbour goes on."""
    grammar = Toy(lambda text: (9,) if len(text) == 2 else None, 12)
    engine = table_engine(table(6), table_draft(table(6)))
    bad = Request("a", (1, 2), SamplingParams(max_tokens=8, temperature=0, structured=ASKED), (), grammar)
    good = Request("b", (1, 2), SamplingParams(max_tokens=8, temperature=0))
    first, second = run(engine, [bad, good])
    assert first.finish_reason == "error"
    assert len(second.token_ids) == 8


def test_a_request_without_its_grammar_is_refused() -> None:
    engine = table_engine(table(6), None)
    with pytest.raises(InvalidParameter, match=r"structured has to be compiled: LLM\.request does so"):
        engine.submit(Request("a", (1, 2), SamplingParams(structured=ASKED)))


def test_a_grammar_that_the_parameters_do_not_tell_of_is_refused() -> None:
    """Backends go by the parameters: those that do not know masks would leave it out."""
    with pytest.raises(InvalidParameter, match="structured is missing"):
        run(table_engine(TARGET, None), [Request("a", PROMPT, SamplingParams(max_tokens=LENGTH), (), Toy(follow, V))])
