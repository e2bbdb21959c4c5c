"""The rejection rules as kernels say what ``maths.verify`` says. Runs on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from headstart.maths.chance import CounterChance
from headstart.maths.tree import Topology
from headstart.maths.verify import Verdicts, chain_rules

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # broken rows divide by zero, which the interpreter mentions
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),  # its loops to a loaded number
]
DEVICE = "cpu" if INTERPRETED else "cuda"
SIZES = [(1, 50), (3, 64), (5, 211)] if INTERPRETED else [(1, 50), (8, 300), (20, 9000)]
ROWS = 33 if INTERPRETED else 3300  # of each test
KINDS = ("drawn", "equal", "few", "point", "ties", "impossible", "empty q", "p is nan", "q is nan", "no token", "far")


def chains(gamma: int, size: int, rows: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """p, q and tokens of rows of every kind in turn; q stands in a wider tensor."""
    torch.manual_seed(seed)
    p = torch.softmax(torch.randn(rows, gamma + 1, size) * 2, -1)
    wide = torch.full((rows + 1, gamma + 2, size), 9.0)
    q = wide[:rows, :gamma]
    q[:] = torch.softmax(p[:, :-1].log() + 0.7 * torch.randn(q.shape), -1)
    kinds = [KINDS[i % len(KINDS)] for i in range(rows)]

    def of(kind: str) -> Tensor:
        return torch.tensor([k == kind for k in kinds])

    same, few, ties, far = (of(kind) for kind in ("equal", "few", "ties", "far"))
    p[few] *= torch.rand(p[few].shape) < 0.1
    p[few, :, 3] += 1e-3
    q[few] *= torch.rand(q[few].shape) < 0.1
    q[few, :, 5] += 1e-3
    q[few, 1::2] = p[few, 1:-1:2]
    p[ties], q[ties] = (torch.randint(1, 3, x.shape).float() for x in (p[ties], q[ties]))
    p[far], q[far] = p[far].pow(9), q[far].flip(-1).pow(9)
    p, q[:] = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    q[same] = p[same, :-1]
    drafted = torch.multinomial(q.reshape(-1, size), 1).view(rows, gamma)
    point = of("point")
    drafted[point] = p[point, :-1].argmax(-1)
    q[point] = torch.nn.functional.one_hot(drafted[point], size).float()
    some = torch.rand(rows, gamma) < 0.3
    drafted = torch.where(of("no token")[:, None] & some, torch.where(drafted > size // 2, size + 3, -2), drafted)
    q[of("impossible")[:, None] & some] = torch.eye(size)[0]
    q[of("empty q")[:, None] & some] = 0.0
    q[of("q is nan")[:, None] & some] = torch.nan
    broken = torch.rand(rows, gamma + 1) < 0.3
    broken[::2, 0] = True
    p[of("p is nan")[:, None] & broken] = torch.nan
    tokens = torch.cat([torch.zeros(rows, 1, dtype=torch.int64), drafted], 1)
    return p.to(DEVICE), wide.to(DEVICE)[:rows, :gamma], tokens.to(DEVICE)


def said(p: Tensor, q: Tensor, tokens: Tensor, limits: Tensor, block: Tensor, seeds: Tensor, base: Tensor) -> Verdicts:
    """What the tensor operations say."""
    rows, nodes, _ = p.shape
    chain = Topology.chain([nodes - 1] * rows, torch.device(DEVICE))
    topology = replace(chain, valid=chain.depth <= limits[:, None])
    return chain_rules(p, q, tokens, topology, ["iid"] * rows, CounterChance(seeds, base, nodes), block > 0)


@pytest.mark.parametrize(
    ("gamma", "size"), [(1, 50), (3, 64), (5, 211)] if INTERPRETED else [(1, 50), (8, 300), (20, 9000)]
)
@pytest.mark.parametrize("rule", ["token", "block", "both"])
def test_the_same_verdicts(gamma: int, size: int, rule: str) -> None:
    from headstart.machine.gpu.kernels.reject import rejected

    rows = ROWS if size < 9000 else 330
    p, q, tokens = chains(gamma, size, rows, seed=gamma)
    limits = torch.randint(0, gamma + 4, (rows,), device=DEVICE)
    limits = torch.where(limits > gamma, 1 << 40, limits)
    block = {"token": 0 * limits, "block": 0 * limits + 1, "both": torch.randint(0, 2, (rows,), device=DEVICE)}[rule]
    seeds = torch.randint(-(1 << 62), 1 << 62, (rows,), device=DEVICE)
    base = torch.randint(1, 1 << 17, (rows,), device=DEVICE)
    wanted = said(p, q, tokens, limits, block, seeds, base)

    accepted, token, ok = rejected(p, q, tokens, limits, block, seeds, base)

    assert torch.equal(accepted, wanted.accepted)
    assert torch.equal(ok, wanted.ok)
    assert torch.equal(token[ok], wanted.token[ok])
    assert 0 < int(accepted.sum()) < rows * gamma
    assert 0 < int(ok.sum()) < rows
