"""Kernels take trees of so many nodes (a node's ancestors are the bits of a number): drafts keep to that."""

from __future__ import annotations

from typing import Any

import pytest
from engines import run, table

from headstart.config import MAX_GAMMA, EngineConfig
from headstart.control.controller import FixedController
from headstart.engine.engine import Engine
from headstart.machine.gpu.step import MAX_NODES, pack_ancestors
from headstart.testing import ScriptedDrafter, TableRunner
from headstart.types import DraftView, Proposal, Request, SamplingParams

V = 6
TARGET = table(V, seed=5)
PROMPTS = [(1, 3, 2), (4, 4, 0, 1)]
RULES = {
    "greedy": SamplingParams(temperature=0, max_tokens=100),
    "coupled": SamplingParams(seed=3, max_tokens=100, verification="coupled"),
}


def guess(view: DraftView, budget: int) -> Proposal:
    """As many nodes as may be: the target's own chain of four behind a wrong token, and wrong ones behind it. One
    sequence of two is guessed as a chain."""
    tokens = list(view.tokens)
    for _ in range(4):
        tokens.append(int(TARGET[tokens[-2], tokens[-1]].argmax()))
    right = tokens[-4:]
    if view.tokens[: view.prompt_length] == PROMPTS[1]:
        return Proposal.chain([*right, *[0] * budget][:budget])
    found = [(right[0] + 1) % V, *right, *[(right[0] + 1) % V] * budget]
    return Proposal(tuple(found[:budget]), (-1, -1, 1, 2, 3, *range(budget))[:budget])


class Packing(TableRunner):
    """Packs its trees as for Triton, where one that is too large is an error."""

    most_nodes = MAX_NODES
    widest = 0

    def forward(self, rows: slice, tokens: Any, lengths: Any, topology: Any = None, keep: Any = None) -> Any:
        if topology is not None and not topology.is_chain:
            pack_ancestors(topology.ancestors)
            self.widest = max(self.widest, topology.width)
        return super().forward(rows, tokens, lengths, topology, keep)


def answered(drafter: ScriptedDrafter | None, params: SamplingParams) -> tuple[Engine, list[tuple[Any, ...]]]:
    runner = Packing(TARGET, rows=2, max_len=256, margin=MAX_GAMMA + 20)
    engine = Engine(runner, drafter, FixedController(MAX_GAMMA), EngineConfig(max_rows=2), vocab_size=V, eos=())
    found = run(engine, [Request(f"r{i}", ids, params) for i, ids in enumerate(PROMPTS)])
    return engine, [(c.token_ids, c.finish_reason) for c in found]


@pytest.mark.parametrize("rule", RULES)
def test_a_draft_is_asked_for_no_more_than_the_runner_takes(rule: str) -> None:
    _, plain = answered(None, RULES[rule])
    engine, found = answered(ScriptedDrafter(guess), RULES[rule])
    assert found == plain
    assert engine.parts.runner.widest == MAX_NODES  # type: ignore[attr-defined]
    assert engine.inactive_reason is None
    assert engine.stats.accepted > 0


def test_the_runner_on_triton_says_how_many_it_takes() -> None:
    pytest.importorskip("triton")
    from headstart.machine.gpu.runner import FusedRunner

    assert FusedRunner.most_nodes == MAX_NODES
