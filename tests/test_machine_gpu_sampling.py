"""The sampling kernels against the plain torch they stand for: ``maths.distribution`` and ``maths.noise``.

On a GPU: ``pytest -m gpu``. Without one the small vocabularies run in Triton's interpreter (TRITON_INTERPRET=1, slow).
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from headstart.machine import gpu
from headstart.maths import noise
from headstart.maths.distribution import probabilities
from headstart.maths.vocab_ops import PLAIN
from headstart.maths.warp import Warp
from headstart.types import SamplingParams

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
VOCABULARIES = [211] if INTERPRETED else [211, 5000, 49152, 151936]


def kernels(test: Any) -> Any:
    """A test that runs kernels: on a GPU, or in the interpreter."""
    reason = gpu.available()
    mark = pytest.mark.slow if INTERPRETED else pytest.mark.gpu
    return pytest.mark.skipif(reason is not None, reason=str(reason))(mark(test))


BATCHES: dict[str, list[dict[str, Any]]] = {
    "plain": [{"temperature": 1.0}, {"temperature": 1.0}],
    "warm": [{"temperature": 0.7}, {"temperature": 1.6}, {"temperature": 0.0}],
    "cold": [{"temperature": 0.001, "top_p": 0.9}, {"temperature": 1.0, "top_p": 0.3}],
    "top_p": [{"top_p": 0.95, "temperature": 0.7}, {"top_p": 0.5, "temperature": 1.3}, {"temperature": 1.0}],
    "wide": [{"top_p": 0.99999, "temperature": 2.0}, {"top_p": 0.0001, "temperature": 1.0}],
    "top_k": [{"top_k": 5, "temperature": 0.7}, {"top_k": 50, "temperature": 1.3}, {"temperature": 1.0}, {"top_k": 1}],
    "min_p": [{"min_p": 0.1, "temperature": 0.7}, {"temperature": 1.3}],
    "bounds": [
        {"temperature": 1e-30},
        {"temperature": 100.0, "top_p": 5e-324},
        {"temperature": 1e-30, "min_p": 1.0, "top_k": 2**63 - 1},
        {"temperature": 100.0, "min_p": 1e-45},
        {"temperature": 1.0, "top_p": 1e-45, "top_k": 1},
    ],
    "all": [
        {"top_k": 5, "top_p": 0.9, "min_p": 0.01, "temperature": 0.7},
        {"top_k": 50, "top_p": 0.8, "temperature": 1.3},
        {"top_p": 0.9, "min_p": 0.05, "temperature": 1.0},
        {"top_k": 100, "min_p": 0.2, "temperature": 2.0},
        {"temperature": 0.0},
        {"temperature": 1.0},
    ],
}


def logits(rows: int, nodes: int, size: int, ties: bool) -> torch.Tensor:
    x = torch.randn(rows, nodes, size, generator=torch.Generator().manual_seed(size)) * 3
    return ((x * 2).round() / 2 if ties else x).to(DEVICE)


@kernels
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("size", VOCABULARIES)
@pytest.mark.parametrize("batch", BATCHES)
def test_the_same_tokens_stay_with_the_same_probabilities(batch: str, size: int, ties: bool) -> None:
    from headstart.machine.gpu.sampling import INNER

    params = [SamplingParams(**each) for each in BATCHES[batch]]
    x = logits(len(params), 2, size, ties)
    warp = Warp.of(params, vocab_size=size, eos=[[]] * len(params), device=DEVICE)
    outputs = torch.zeros(len(params), dtype=torch.int64, device=DEVICE)
    want, got = (probabilities(x, warp, outputs=outputs, vocab_ops=vocab_ops) for vocab_ops in (PLAIN, INNER))
    # A token at the very edge may fall on either side, as sums are rounded; it takes its ties along.
    differ = (got > 0) != (want > 0)
    assert float((got + want)[differ].sum()) < 1e-4 * got.shape[0]
    if not ties and batch != "wide":
        assert int(differ.sum()) <= 2
    torch.testing.assert_close(torch.where(differ, 0.0, got), torch.where(differ, 0.0, want), rtol=1e-4, atol=1e-9)
    torch.testing.assert_close(got.sum(-1), torch.ones_like(got[..., 0]), rtol=1e-5, atol=0)


@kernels
def test_a_row_does_not_depend_on_its_neighbours() -> None:
    from headstart.machine.gpu.kernels.sampling import nucleus

    x = logits(4, 3, 5000, False)
    share = torch.tensor([0.9, 0.5, 0.99, 1.0], device=DEVICE)
    together, _ = nucleus(x, top_p=share)
    alone = torch.cat([nucleus(x[i : i + 1].contiguous(), top_p=share[i : i + 1].clone())[0] for i in range(4)])
    assert torch.equal(together, alone)


@kernels
def test_broken_rows_are_nan_and_others_are_not() -> None:
    from headstart.machine.gpu.kernels.sampling import nucleus

    x = logits(4, 1, 5000, False)
    x[0, 0, 7] = torch.nan
    x[1] = -torch.inf
    x[2, 0, 9] = torch.inf
    p, _ = nucleus(x, top_p=torch.full((4,), 0.9, device=DEVICE), temperature=torch.full((4,), 0.5, device=DEVICE))
    assert bool(p[:3].isnan().all())
    assert bool(p[3].isfinite().all())


@kernels
@pytest.mark.parametrize("size", VOCABULARIES)
def test_races_and_argmax_pick_what_torch_picks(size: int) -> None:
    from headstart.machine.gpu.kernels.sampling import argmax, nucleus, race

    x = logits(8, 4, size, True)
    assert torch.equal(argmax(x), x.argmax(-1))
    share = torch.full((8,), 0.9, device=DEVICE)
    base = torch.arange(32, device=DEVICE).view(8, 4)
    keys = noise.keys(noise.seeds(range(8), DEVICE), base, 1, noise.DRAFT)
    p, tokens = nucleus(x, keys, top_p=share)
    assert torch.equal(tokens, race(p, keys))
    want = noise.race(p, keys)
    # The noise may differ in its last bit, so only a near tie may go the other way.
    score = p / noise.exponential(keys, size)
    chosen = score.gather(-1, torch.stack([tokens, want], -1))
    torch.testing.assert_close(chosen[..., 0], chosen[..., 1], rtol=1e-5, atol=0)
    assert int((tokens != want).sum()) <= 1
    x[3, 2, 17] = torch.nan
    assert int(argmax(x)[3, 2]) == 17


@kernels
def test_distributions_are_written_where_they_are_wanted() -> None:
    from headstart.machine.gpu.kernels.sampling import nucleus

    x = logits(3, 1, 211, False)[:, 0].contiguous()
    knob = {"top_p": torch.full((3,), 0.9, device=DEVICE)}
    keys = noise.keys(noise.seeds(range(3), DEVICE), torch.arange(3, device=DEVICE), 1, noise.DRAFT)
    wide = torch.full((4, 5, 211), -1.0, device=DEVICE)
    p, tokens = nucleus(x, keys, **knob)
    place = wide[:3, 2]
    found, same = nucleus(x, keys, into=place, **knob)
    assert found is place
    assert torch.equal(same, tokens)
    assert torch.equal(wide[:3, 2], p)
    wide[:3, 2] = -1
    assert bool((wide == -1).all())
