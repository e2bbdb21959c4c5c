"""What one pass over written text says of acceptance is what the rules do: by enumeration, and on tiny models."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from enumerate_rules import RULES, SHAPES, all_drafts, random_table, round_law

from headstart.lab.agreement import Agreement, Written, by_place, of_model, reached
from headstart.lab.agreement import _Columns as Columns
from headstart.lab.system import System
from headstart.testing import tiny_model

Table = list[torch.Tensor]


def along(target: Table, draft: Table, text: tuple[int, ...]) -> tuple[float, Agreement]:
    """How likely the target writes this text, and a draft's agreement along it."""
    size, chance, ratios = target[0].shape[1], 1.0, []
    state = 0
    for place, x in enumerate(text):
        p, q = float(target[place][state, x]), float(draft[place][state, x])
        chance *= p
        ratios.append(q / p if p else 0.0)
        state = state * size + x
    line = (tuple(ratios),)
    return chance, Agreement(False, line, line, line, line)


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("rule", ["token", "block"])
def test_over_all_texts_the_lengths_are_those_of_the_rule(rule: str, length: int) -> None:
    for seed in range(4):
        target, draft = random_table(length + 1, 3, seed), random_table(length + 1, 3, seed + 50)
        _, accepted = round_law(
            RULES[rule], SHAPES[f"chain-{length}"], all_drafts(SHAPES[f"chain-{length}"], draft, "iid"), target
        )
        found = 0.0
        for text in product(range(3), repeat=length):
            chance, agreement = along(target, draft, text)
            found += chance * sum(reached(agreement, 0, length, rule))  # type: ignore[arg-type]
        assert found == pytest.approx(accepted, abs=1e-12)


def test_a_wrong_rule_is_seen() -> None:
    """The enumeration tells the block rule from the token rule, so the test above can fail."""
    target, draft = random_table(4, 3, 1), random_table(4, 3, 51)
    _, accepted = round_law(RULES["block"], SHAPES["chain-3"], all_drafts(SHAPES["chain-3"], draft, "iid"), target)
    token = sum(
        chance * sum(reached(agreement, 0, 3, "token"))
        for chance, agreement in (along(target, draft, text) for text in product(range(3), repeat=3))
    )
    assert accepted - token > 0.01


def test_the_known_example() -> None:
    third = torch.tensor([1 / 3, 2 / 3], dtype=torch.float64)
    target, draft = ([law.repeat(2**d, 1) for d in range(3)] for law in (third, third.flip(0)))
    for rule, expected in (("token", 10 / 9), ("block", 11 / 9)):
        lines = [along(target, draft, text) for text in product(range(2), repeat=2)]
        assert sum(p * sum(reached(a, 0, 2, rule)) for p, a in lines) == pytest.approx(expected, abs=1e-12)  # type: ignore[arg-type]


def test_the_chance_of_coupled_drafts() -> None:
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.rand(5, generator=generator).softmax(0) for _ in "pq")
    q = (q.log() * 3).softmax(0)
    noise = -torch.log(-torch.log(torch.rand(400_000, 5, generator=generator).clamp(1e-12, 1 - 1e-7)))
    said, drafted = (p.log() + noise).argmax(1), (q.log() + noise).argmax(1)
    columns = Columns(drawn=True)
    columns.add(p.log().repeat(5, 1), q.log().repeat(5, 1), torch.arange(5), 1.0, 5)
    for x in range(5):
        mine = said == x
        assert columns.coupled[x] == pytest.approx(float((drafted[mine] == x).float().mean()), abs=0.006)
    assert columns.overlap[0] == pytest.approx(float(torch.minimum(p, q).sum()), abs=1e-6)


def test_acceptance_by_place_is_conditional() -> None:
    same = Agreement(True, *[((1.0, 1.0, 0.0, 1.0),)] * 4)
    # Drafts of two that begin at each token: 11, 10, 01, 1: the first holds in 3 of 4, then the second in 1 of 3 seen.
    first, second = by_place([same], 2)
    assert first == pytest.approx(3 / 4)
    assert second == pytest.approx((1 / 3) / (3 / 4))
    assert reached(same, 0, 8, None) == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_one_pass_of_tiny_models(temperature: float) -> None:
    target, small = tiny_model("llama"), tiny_model("llama", seed=1)
    with System.open(
        model=target, draft=small, quantization=None, draft_quantization=None, max_model_len=96, check=False
    ) as system:
        ids = tuple(torch.randint(3, 100, (70,), generator=torch.Generator().manual_seed(2)).tolist())
        text, parts = Written("any", 5, ids, temperature), system.engine.parts
        found = of_model(parts.runner, parts.drafter.text_model(), text, parts.vocab_size)  # type: ignore[union-attr,arg-type]
        with torch.inference_mode():
            p, q = (model(torch.tensor([ids])).logits[0, 4:-1].float() for model in (target, small))
        x = torch.tensor(ids[5:])
        if temperature:
            p, q = p.softmax(-1), q.softmax(-1)
            wanted = (q.gather(1, x[:, None]) / p.gather(1, x[:, None]))[:, 0]
            assert torch.allclose(torch.tensor(found.overlap[0]), torch.minimum(p, q).sum(-1), atol=1e-4)
        else:
            wanted = (q.argmax(-1) == x).float()
        assert len(found.ratio[0]) == 65
        assert torch.allclose(torch.tensor(found.ratio[0]), wanted, rtol=1e-3, atol=1e-4)
        again = of_model(parts.runner, parts.drafter.text_model(), text, parts.vocab_size)  # type: ignore[union-attr,arg-type]
        assert again == found, "a pass leaves nothing behind that changes the next one"
