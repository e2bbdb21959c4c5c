"""Proof 3 on a model with known probabilities: what the whole engine emits follows the target's law.

Thousands of requests run through the real engine (batches, rollback, rows moving about); the joint law of their first
tokens is compared with the exact one by a chi-squared test. A planted bug in the rule must fail the same test.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from engines import run, table, table_draft, table_engine, tree_drafter
from statistics_tools import chi_squared

from headstart.drafters.base import Drafter
from headstart.engine import judge as judging
from headstart.engine.engine import Engine
from headstart.maths import noise, verify
from headstart.types import DraftView, Proposal, Request, SamplingParams

V, LENGTH, SAMPLES = 4, 3, 500
TARGET, DRAFT = table(V, seed=1), table(V, seed=1) + 0.8 * table(V, seed=2)
PROMPT = (1, 3, 2)


def sample(engine: Engine, **params: object) -> Counter[tuple[int, ...]]:
    """LENGTH tokens a request; two more are asked for: the last counted one can be an accepted draft, and trees fit."""
    requests = [
        Request(str(seed), PROMPT, SamplingParams(max_tokens=LENGTH + 2, seed=seed, **params))  # type: ignore[arg-type]
        for seed in range(SAMPLES)
    ]
    return Counter(c.token_ids[:LENGTH] for c in run(engine, requests))


def engine_for(kind: str) -> Engine:
    drafter: Drafter | None = {
        "plain": lambda: None,
        "model": lambda: table_draft(DRAFT, rows=16),
        # Alone in its batch, so that a draft's length hangs on its own tokens and on nothing else.
        "ending itself": lambda: table_draft(DRAFT, rows=1, min_chance_to_extend=lambda: 0.6),
        "tree": lambda: tree_drafter(DRAFT),
    }[kind]()
    if kind == "ending itself":
        return table_engine(TARGET, drafter, gamma=3, rows=1, max_waiting=SAMPLES)
    return table_engine(TARGET, drafter, gamma=3, rows=16, max_waiting=SAMPLES)


@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        ("plain", "block"),
        *((kind, rule) for kind in ("model", "ending itself", "tree") for rule in ("token", "block", "coupled")),
    ],
)
def test_engine_follows_the_target(kind: str, rule: str) -> None:
    engine = engine_for(kind)
    counts = sample(engine, verification=rule)
    assert chi_squared(counts, engine.parts.runner.probabilities(PROMPT, LENGTH)) > 1e-4  # type: ignore[attr-defined]
    if kind == "ending itself":
        assert engine.stats.rounds < engine.stats.drafted < 3 * engine.stats.rounds, "some drafts end early, not all"
    if kind != "plain":
        assert 0.2 < engine.stats.acceptance_rate < 0.98


def test_with_temperature_and_penalties() -> None:
    """A penalty makes the law depend on the drafted prefix; the exact law is computed by plain recursion."""
    engine = engine_for("model")
    settings = {"temperature": 0.8, "repetition_penalty": 1.4, "presence_penalty": 0.5, "logit_bias": {0: 0.7}}
    counts = sample(engine, verification="block", **settings)
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        longer = {}
        for prefix, mass in law.items():
            text = [*PROMPT, *prefix]
            logits = TARGET[text[-2], text[-1]].double().clone()
            logits[0] += 0.7
            for token in set(text):
                logits[token] = logits[token] / 1.4 if logits[token] > 0 else logits[token] * 1.4
            for token in set(prefix):
                logits[token] -= 0.5
            row = (logits / 0.8).softmax(-1).tolist()
            longer.update({(*prefix, token): mass * chance for token, chance in enumerate(row)})
        law = longer
    assert chi_squared(counts, law) > 1e-4


# -- planted bugs: each must be caught by the very test above


def test_residual_from_p_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """On rejection, draw from p itself instead of max(p - q, 0)."""

    def wrong(p, q, tokens, topology, kinds, chance):  # type: ignore[no-untyped-def]
        right = verify.token_rule(p, q, tokens, topology, kinds, chance)
        last = right.path.gather(1, (right.accepted - 1).clamp_min(0)[:, None])[:, 0]
        node = torch.where(right.accepted > 0, last, 0)
        redrawn = chance.draw(p[torch.arange(p.shape[0]), node])
        return verify.Verdicts(right.path, right.accepted, redrawn, right.ok)

    monkeypatch.setattr(judging, "token_rule", wrong)
    engine = engine_for("model")
    counts = sample(engine, verification="token")
    assert chi_squared(counts, engine.parts.runner.probabilities(PROMPT, LENGTH)) < 1e-6  # type: ignore[attr-defined]


def test_one_noise_for_both_draws_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafts and the residual drawn with the same noise: the streams must be independent."""
    right = noise.keys

    def wrong(seed, base, offset, stream):  # type: ignore[no-untyped-def]
        if isinstance(stream, torch.Tensor) or stream in (noise.DRAFT, noise.RESIDUAL):
            return right(seed, base, 1, noise.DRAFT)
        return right(seed, base, offset, stream)

    monkeypatch.setattr(noise, "keys", wrong)
    engine = engine_for("model")
    counts = sample(engine, verification="token")
    assert chi_squared(counts, engine.parts.runner.probabilities(PROMPT, LENGTH)) < 1e-6  # type: ignore[attr-defined]


def test_a_draft_that_lies_about_q_is_caught() -> None:
    """A drafter that draws by argmax but reports a spread-out q breaks the rule's contract; the test notices."""

    def guess(view: DraftView, budget: int) -> Proposal | None:
        tokens = list(view.tokens)
        drawn, rows = [], []
        for _ in range(budget):
            row = DRAFT[tokens[-2], tokens[-1]].softmax(-1)
            drawn.append(int(row.argmax()))
            rows.append(row)
            tokens.append(drawn[-1])
        return Proposal.chain(drawn, torch.stack(rows)) if drawn else None

    from headstart.testing import ScriptedDrafter

    engine = table_engine(TARGET, ScriptedDrafter(guess), gamma=3, rows=16, max_waiting=SAMPLES)
    counts = sample(engine, verification="token")
    assert chi_squared(counts, engine.parts.runner.probabilities(PROMPT, LENGTH)) < 1e-6  # type: ignore[attr-defined]
