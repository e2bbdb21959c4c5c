"""Masks on the CPU's kernels: the judge against the rules, and the draft head against the draft sampler."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from grammars import Toy, packed
from test_machine_cpu_head import drafted
from test_machine_cpu_sampling import case, ruled, vocab_ops  # noqa: F401

from headstart.machine.cpu import build
from headstart.maths.bitmask import unpacked
from headstart.maths.vocab_ops import DraftedChain, Rule, VocabOps
from headstart.testing import TINY_VOCABULARY
from headstart.types import Mask, SamplingParams, Structured

pytestmark = pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not()))
ASKED = Structured(regex="x")  # the grammar is given as an object


def random_masks(number: int, tokens: list[int], size: int) -> list[Mask | None]:
    """One for each node: none at all, one token, few, many, half of the drafted tokens among them."""
    generator = np.random.default_rng(number)
    found: list[Mask | None] = []
    for node in range(len(tokens) + 1):
        kind = (number + node) % 5
        count = (0, 1, 3, size // 2, size - 1)[kind]
        allowed = set(generator.choice(size, count, replace=False).tolist())
        if node < len(tokens) and generator.random() < 0.7 and kind and tokens[node] >= 0:
            allowed.add(tokens[node])
        found.append(packed(allowed, size) if kind else None)
    return found


@pytest.mark.parametrize("draw", ["iid", "point"])
@pytest.mark.parametrize("rule", ["token", "block", "coupled", "greedy"])
def test_verdicts_under_masks_are_those_of_the_rules(
    vocab_ops: VocabOps,  # noqa: F811
    rule: Rule,
    draw: Literal["iid", "point"],
) -> None:
    lengths: set[int] = set()
    for number in range(200):
        size = (83, 96, 64)[number % 3]
        c = case(number, rule, draw, size=size)
        n = len(c["tokens"])
        masks = random_masks(number, c["tokens"], size)
        want = ruled(c, rule, replace(c["warp"], allowed=unpacked([masks], n + 1, size, "cpu")))
        chain = DraftedChain(c["params"], rule, c["seed"], [0] * 40, 3, c["tokens"], c["q"] if n else None, masks=masks)
        assert vocab_ops.judged is not None
        got = vocab_ops.judged(torch.nn.functional.pad(c["x"], (0, 5), value=9.0)[:, :size], chain)
        if not bool(want.ok[0]):
            assert got[1] == -1, number
            continue
        assert got == (int(want.accepted[0]), int(want.token[0])), (number, c["params"])
        lengths.add(got[0])
    assert {0, 1, 2} <= lengths


def follow(text: tuple[int, ...]) -> Any:
    """Often one token only, also one that the head does not know (from 92 on); else a third of them, or all."""
    place = len(text) % 7
    if place in (2, 3):
        return (100,) if place == 2 else (7 + (text[-1] * 5) % 80,)
    return None if place == 5 else tuple(range((text[-1] if text else 0) % 3, TINY_VOCABULARY, 3))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0},
        {"temperature": 0.9, "top_p": 0.9, "seed": 5},
        {"temperature": 0.9, "seed": 5, "verification": "block"},
    ],
    ids=["greedy", "coupled", "block"],
)
def test_a_head_drafts_under_masks_as_the_draft_sampler_does(settings: dict[str, Any], rows: int) -> None:
    params = SamplingParams(max_tokens=30, structured=ASKED, **settings)
    texts, guesses = drafted(params, rows=rows, grammar=Toy(follow, TINY_VOCABULARY))
    for text in texts:  # type: ignore[attr-defined]
        assert all((found := follow(text[:i])) is None or token in found for i, token in enumerate(text))
    if "verification" not in settings:  # the kernel draws with a little more heat there
        assert (texts, guesses) == drafted(params, kernel=False, rows=rows, grammar=Toy(follow, TINY_VOCABULARY))
    assert sum(100 in tokens for _, _, tokens in guesses) > 3, "also what the head does not know"  # type: ignore[attr-defined]
