"""Proof 3 on the real embedded model: speculative sampling follows the probabilities that plain forward passes give.

The first tokens of many sampled answers are counted, per position and as joint prefixes, and compared by chi-squared
with p computed without any of our engine. The drafts are drawn from a distorted copy of p, so acceptance is under 1.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from statistics_tools import chi_squared

from headstart import LLM, SamplingParams
from headstart.testing import ScriptedDrafter
from headstart.types import DraftView, Proposal

K, LENGTH, SAMPLES = 3, 2, 140
Law = dict[tuple[int, ...], float]


def exact_law(llm: LLM, prompt: list[int]) -> tuple[Law, dict[tuple[int, ...], torch.Tensor]]:
    """The joint law of the first LENGTH tokens under top_k = K, by plain forward passes; and p after each prefix."""
    model = llm.engine.parts.runner.model  # type: ignore[attr-defined]
    law: Law = {(): 1.0}
    after: dict[tuple[int, ...], torch.Tensor] = {}
    for _ in range(LENGTH):
        prefixes = list(law)
        batch = torch.tensor([[*prompt, *prefix] for prefix in prefixes])
        with torch.inference_mode():
            logits = model(batch).logits[:, -1].double()
        longer: Law = {}
        for prefix, row in zip(prefixes, logits, strict=True):
            best = row.topk(K)
            p = torch.zeros_like(row).scatter(0, best.indices, best.values.softmax(-1))
            after[prefix] = p
            longer.update({(*prefix, int(t)): law[prefix] * float(p[t]) for t in best.indices})
        law = longer
    return law, after


def distorted(p: torch.Tensor) -> tuple[list[int], list[float]]:
    """The tokens that p can draw, and other odds for them."""
    support = p.nonzero()[:, 0].tolist()
    weights = [float(p[t]) ** 0.5 + 0.1 * i for i, t in enumerate(support)]
    return support, [weight / sum(weights) for weight in weights]


def drafter(prompt: list[int], after: dict[tuple[int, ...], torch.Tensor]) -> ScriptedDrafter:
    """Draws up to two tokens from p with its odds distorted."""
    source = random.Random(5)

    def guess(view: DraftView, budget: int) -> Proposal | None:
        prefix = tuple(view.tokens[len(prompt) :])
        tokens: list[int] = []
        rows: list[torch.Tensor] = []
        while len(tokens) < budget and prefix in after:
            support, weights = distorted(after[prefix])
            token = source.choices(support, weights)[0]
            q = torch.zeros(len(after[prefix])).scatter(0, torch.tensor(support), torch.tensor(weights))
            tokens.append(token)
            rows.append(q)
            prefix = (*prefix, token)
        return Proposal.chain(tokens, torch.stack(rows)) if tokens else None

    return ScriptedDrafter(guess)


def drafts_alone(after: dict[tuple[int, ...], torch.Tensor]) -> Counter[tuple[int, ...]]:
    """What would come if every draft were accepted."""
    source, counts = random.Random(6), Counter[tuple[int, ...]]()
    for _ in range(SAMPLES):
        prefix: tuple[int, ...] = ()
        while prefix in after:
            prefix = (*prefix, source.choices(*distorted(after[prefix]))[0])
        counts[prefix] += 1
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["block", "token"])
def test_sampling_on_the_real_model(embedded: LLM, rule: str) -> None:
    prompt = [1, 9690, 198]  # short: what is tested is the law of what follows
    law, after = exact_law(embedded, prompt)
    assert chi_squared(drafts_alone(after), law) < 1e-6, "as many samples can tell the draft's law from the target's"
    llm = LLM(
        embedded.engine.parts.runner.model,  # type: ignore[attr-defined]
        drafter(prompt, after),
        gamma=2,
        max_rows=35,
        max_model_len=16,
        check=False,
    )
    params = [
        SamplingParams(top_k=K, max_tokens=LENGTH + 1, seed=seed, verification=rule, ignore_eos=True)  # type: ignore[arg-type]
        for seed in range(SAMPLES)
    ]
    answers = llm.generate([prompt] * SAMPLES, params)
    assert 0.3 < llm.stats.acceptance_rate < 0.95
    counts = Counter(a.token_ids[:LENGTH] for a in answers)
    assert chi_squared(counts, law) > 1e-4, "joint law of the first tokens"
    for position in range(LENGTH):
        marginal: Law = {}
        for outcome, chance in law.items():
            marginal[outcome[position : position + 1]] = marginal.get(outcome[position : position + 1], 0.0) + chance
        seen = Counter(a.token_ids[position : position + 1] for a in answers)
        assert chi_squared(seen, marginal) > 1e-4, f"law of token {position}"
