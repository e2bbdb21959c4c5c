"""The end of a round as one kernel gives what the tensor operations give. Runs on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from headstart.maths.tree import Topology
from headstart.maths.verify import coupled_rule

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytestmark = pytest.mark.gpu
DEVICE = "cpu" if INTERPRETED else "cuda"


def table(rows: int, gamma: int) -> list[Tensor]:
    """last, places, result, limits, advance, each wider than the round needs."""
    wide = rows + 3
    return [
        torch.randint(0, 9, (wide, 2), device=DEVICE),
        torch.randint(0, 9, (3, wide), device=DEVICE),
        torch.full((wide, gamma + 8), -7, device=DEVICE),
        torch.randint(0, gamma + 3, (wide,), device=DEVICE),
        torch.randint(0, 2, (wide,), device=DEVICE),
    ]


@pytest.mark.parametrize("gamma", [0, 1, 3, 8])
@pytest.mark.parametrize("follow", [True, False])
def test_the_end_of_a_round(gamma: int, follow: bool) -> None:
    from headstart.machine.gpu.kernels.commit import Table, close_round

    torch.manual_seed(gamma)
    rows = 64
    tokens = torch.randint(0, 3, (rows, gamma + 1), device=DEVICE)
    targets = torch.randint(-1, 3, (rows, gamma + 1), device=DEVICE)  # -1: broken there
    made = table(rows, gamma)
    last, places, result, limits, advance = (part.clone() for part in made)
    chain = Topology.chain([gamma] * rows, torch.device(DEVICE))
    chain.valid[:] = chain.depth <= limits[:rows, None]
    wanted = coupled_rule(targets, tokens, chain)
    accepted, token = wanted.accepted, wanted.token.clamp_min(0)
    last[:rows] = torch.stack([tokens.gather(1, accepted[:, None])[:, 0], token], dim=1)
    places[:, :rows] += (accepted + 1) * advance[:rows]
    told = torch.stack([accepted, token, wanted.ok.to(torch.int64)], dim=1)
    result[:rows, : gamma + 3] = torch.cat([told, tokens[:, 1:]], dim=1)

    verdicts = None if follow else (wanted.accepted, wanted.token, wanted.ok)
    found = close_round(tokens, Table(*made), targets=targets if follow else None, verdicts=verdicts)

    assert torch.equal(found[0], accepted)
    assert torch.equal(found[1], token)
    for got, want in zip(made, (last, places, result, limits, advance), strict=True):
        assert torch.equal(got, want)
    assert gamma == 0 or 0 < int(accepted.sum()) < rows * gamma


def test_the_largest_of_a_broken_row_is_no_token() -> None:
    from headstart.machine.gpu.kernels.race import argmax

    x = torch.randn(5, 300, device=DEVICE)
    x[1, 7] = float("nan")
    x[2, 9] = float("inf")
    x[3] = float("-inf")
    x[4, 299] = 50.0
    assert argmax(x, finite=True).tolist() == [int(x[0].argmax()), -1, -1, -1, 299]
