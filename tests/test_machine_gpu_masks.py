"""Masks on logits as one kernel give what the tensor operations give. Runs on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

from headstart.maths import bitmask

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytestmark = pytest.mark.gpu
DEVICE = "cpu" if INTERPRETED else "cuda"


@pytest.mark.parametrize("size", [5, 32, 1024, 1999, 49_152])
@pytest.mark.parametrize("nodes", [1, 4])
def test_the_same_logits(size: int, nodes: int) -> None:
    from headstart.machine.gpu.kernels.masks import masked

    generator = torch.Generator().manual_seed(size + nodes)
    x = torch.randn(3, nodes, size, generator=generator)
    x[0, 0, 1], x[1, 0, 2] = torch.nan, torch.inf  # numbers that break down count where they are allowed
    wide = torch.randint(-(2**31), 2**31 - 1, (7, nodes + 2, -(-size // 32)), dtype=torch.int32, generator=generator)
    wide[2] = -1
    bits = wide.to(DEVICE)[:3, :nodes]
    found, expected = masked(x.to(DEVICE), bits), bitmask.masked(x, wide[:3, :nodes])
    assert torch.equal(found.cpu().nan_to_num(7.0, 8.0, 9.0), expected.nan_to_num(7.0, 8.0, 9.0))
    assert torch.equal(found[2].cpu(), x[2]), "all bits set: nothing changes"
