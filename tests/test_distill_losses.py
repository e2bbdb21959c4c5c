"""Losses and acceptance rates against numbers worked out by hand or in other ways."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from headstart import InvalidParameter
from headstart.distill import losses
from headstart.distill.losses import Goal, acceptance, distance, draft_tau
from headstart.distill.train import TrainSettings
from headstart.machine import gpu

P = torch.tensor([[0.5, 0.3, 0.2, 0.0], [0.1, 0.1, 0.1, 0.7]])
LOGITS = P.clamp_min(1e-30).log()
ONES = torch.ones(2)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def test_a_draft_that_says_the_same_has_no_loss_and_is_always_accepted() -> None:
    goal = Goal.of(LOGITS, None, ONES)
    for loss in ("forward", "reverse", "tv", "mix"):
        value, alpha = distance(goal, LOGITS, loss)
        assert float(value) == pytest.approx(0, abs=1e-5)
        assert float(alpha) == pytest.approx(1, abs=1e-5)


def test_losses_are_the_textbook_ones() -> None:
    q = torch.tensor([[0.25, 0.25, 0.25, 0.25], [0.4, 0.2, 0.2, 0.2]])
    goal = Goal.of(LOGITS, None, ONES)
    overlap = torch.minimum(P, q).sum(-1)
    forward = (P * (P.clamp_min(1e-30) / q).log()).sum(-1).mean()
    alpha = float(overlap.mean())
    assert float(distance(goal, q.log(), "forward")[0]) == pytest.approx(float(forward), abs=1e-5)
    assert float(distance(goal, q.log(), "tv")[0]) == pytest.approx(1 - alpha, abs=1e-6)
    assert float(distance(goal, q.log(), "tv")[1]) == pytest.approx(alpha, abs=1e-6)
    weight = float(torch.exp(torch.tensor(-3 * alpha)))
    mix = weight * float(forward) + (1 - weight) * (1 - alpha)
    assert float(distance(goal, q.log(), "mix")[0]) == pytest.approx(mix, abs=1e-5)
    drawn, greedy = acceptance(goal, q.log())
    torch.testing.assert_close(drawn, overlap)
    assert greedy.tolist() == [1.0, 0.0]


def test_words_the_draft_does_not_know_are_lost() -> None:
    ids = torch.tensor([0, 1])
    goal = Goal.of(LOGITS, ids, ONES)
    torch.testing.assert_close(goal.log_p.exp(), P[:, :2])
    assert goal.best.tolist() == [0, -1]
    drawn, greedy = acceptance(goal, torch.zeros(2, 2))
    torch.testing.assert_close(drawn, torch.tensor([0.8, 0.2]))  # min(0.5, 0.5) + min(0.3, 0.5), and 0.1 + 0.1
    assert greedy.tolist() == [1.0, 0.0]


def test_temperature_sharpens_both_sides() -> None:
    cold = Goal.of(LOGITS, None, torch.full((2,), 0.5))
    expected = P**2 / (P**2).sum(-1, keepdim=True)
    torch.testing.assert_close(cold.log_p.exp(), expected)
    assert float(distance(cold, LOGITS, "forward")[0]) == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("loss", ["forward", "reverse", "tv", "mix"])
def test_following_the_slope_leads_to_the_target(loss: str) -> None:
    goal = Goal.of(LOGITS, None, ONES)
    guess = torch.zeros(2, 4, requires_grad=True)
    optimizer = torch.optim.Adam([guess], lr=0.1)
    for _ in range(300):
        optimizer.zero_grad()
        distance(goal, guess, loss)[0].backward()
        optimizer.step()
    assert float(distance(goal, guess, "tv")[1]) > 0.97


def test_tau_multiplies_along_a_draft() -> None:
    """Two slots ahead of each start; the third slot belongs to no answer."""
    first, second = [0.5, 0.8, 0.0], [0.9, 0.6, 0.0]  # chances at slots 0, 1, 2 of step 0 and of step 1
    rates = torch.tensor([[first], [second]])
    start = torch.tensor([[True, True, False]])
    reached = draft_tau(rates, start)
    # From slot 0: 0.5, then step 1 at slot 1: 0.5 * 0.6. From slot 1: 0.8, then step 1 at slot 2: 0.
    assert reached.tolist() == pytest.approx([1.3, 0.3, 2.0])


def test_unknown_losses_are_named() -> None:
    with pytest.raises(InvalidParameter, match="loss must be one of forward"):
        TrainSettings(loss="square")  # type: ignore[arg-type]


@pytest.mark.skipif(gpu.available() is not None, reason=str(gpu.available()))
@(pytest.mark.slow if INTERPRETED else pytest.mark.gpu)
@pytest.mark.parametrize("all_words", [False, True])
def test_fused_kernels_give_the_same_losses_and_slopes(all_words: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    device = "cpu" if INTERPRETED else "cuda"
    rows, known, size = 7, 5003, 9001  # no multiples of a block
    logits = 3 * torch.randn(rows, size, device=device)
    ids = None if all_words else torch.randperm(size, device=device)[:known].sort().values
    guess = 2 * torch.randn(rows, size if all_words else known, device=device)
    temperature = torch.rand(rows, device=device) + 0.5

    def everything(lowered: bool) -> list[Any]:
        monkeypatch.setattr(losses, "_lowered", lambda logits: lowered)
        goal = Goal.of(logits, ids, temperature)
        found = [goal.log_p, goal.best, *acceptance(goal, guess)]
        for loss in ("forward", "tv", "mix"):
            mine = guess.clone().requires_grad_()
            value, rate = distance(goal, mine, loss)
            value.backward()
            found += [value.detach(), rate, mine.grad]
        return found

    for plain, quick in zip(everything(False), everything(True), strict=True):
        torch.testing.assert_close(quick, plain, atol=1e-5, rtol=2e-3)
