"""Counter-based noise: the right law, independent where it must be, and the same numbers whenever it is asked for."""

from __future__ import annotations

import math

import pytest
import torch
from enumerate_rules import chi_squared

from headstart.maths import noise
from headstart.maths.argmax import argmax

MANY = 200_000
STREAMS = [noise.ACCEPT, noise.RESIDUAL, noise.DRAFT, noise.COUPLED]


def many(stream: int = noise.ACCEPT, seed: int = 1, start: int = 0) -> noise.Keys:
    """Keys of one seed at MANY positions."""
    return noise.keys(torch.full((MANY,), seed), torch.arange(start, start + MANY), 0, stream)


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    """In standard deviations of what two independent samples show."""
    a, b = a.double() - a.double().mean(), b.double() - b.double().mean()
    return float((a * b).mean() / (a.std() * b.std())) * math.sqrt(len(a))


@pytest.mark.parametrize("stream", STREAMS)
def test_uniform_is_uniform(stream: int) -> None:
    u = noise.uniform(many(stream))
    assert u.dtype == torch.float32
    assert 0 < float(u.min()) < 1e-4
    assert 1 - 1e-4 < float(u.max()) < 1
    for cells in (16, 1000):
        assert abs(chi_squared((u * cells).long().bincount(minlength=cells), torch.full((cells,), MANY / cells))) < 4


def test_uniform_never_reaches_its_ends() -> None:
    ends = torch.tensor([0, -1, 1, 2**31 - 1, -(2**31)], dtype=torch.int32)
    u = noise.uniform((ends, ends))
    assert bool(((u > 0) & (u < 1)).all())


@pytest.mark.parametrize("size", [2, 5, 1000])
def test_exponential_is_exponential(size: int) -> None:
    e = noise.exponential(tuple(k[: MANY // size] for k in many()), size)
    assert e.shape == (MANY // size, size)
    assert bool((e > 0).all())
    assert bool(e.isfinite().all())
    cells = ((1 - torch.exp(-e.double())) * 200).long().reshape(-1)  # its own distribution function makes it uniform
    assert abs(chi_squared(cells.bincount(minlength=200), torch.full((200,), len(cells) / 200))) < 4


def test_exponential_is_fine_grained_near_zero() -> None:
    """Rare tokens win by small numbers: those must not be rounded to a grid."""
    e = noise.exponential(tuple(k[:200] for k in many()), 49152).double().reshape(-1)
    for bound in (1e-3, 1e-5, 1e-6):
        expected = len(e) * bound
        assert abs(int((e < bound).sum()) - expected) < 5 * math.sqrt(expected)
    assert len(e[e < 1e-4].unique()) > 0.99 * int((e < 1e-4).sum())


def test_the_largest_and_smallest_words_stay_finite() -> None:
    words = torch.tensor([0, -1, 1, 2**31 - 1, -(2**31)], dtype=torch.int32)
    for low in words:
        e = noise.exponential((low.expand(5), words), 70_000)
        assert bool(((e > 0) & e.isfinite()).all())


@pytest.mark.parametrize("size", [2, 3, 17, 300])
def test_draws_follow_p_over_positions(size: int) -> None:
    p = torch.rand(size, generator=torch.Generator().manual_seed(size)).pow(3)
    drawn = noise.race(p.expand(MANY, -1), many(noise.COUPLED))
    assert abs(chi_squared(drawn.bincount(minlength=size), p * MANY)) < 4


def test_draws_follow_p_over_seeds_with_a_large_vocabulary() -> None:
    size, rows = 49152, 2000
    p = torch.softmax(4 * torch.randn(size, generator=torch.Generator().manual_seed(0)), -1)
    keys = noise.keys(torch.arange(rows), torch.full((rows,), 77), 0, noise.RESIDUAL)
    drawn = noise.race(p.expand(rows, -1), keys)
    order = p.argsort(descending=True)
    edges = torch.linspace(0, 1, 21)[1:-1]
    cell = torch.empty(size, dtype=torch.int64)
    cell[order] = torch.searchsorted(edges, p[order].cumsum(0))  # twenty groups of about the same mass
    expected = torch.zeros(20).index_add_(0, cell, p) * rows
    assert abs(chi_squared(cell[drawn].bincount(minlength=20), expected)) < 4


def test_a_token_without_mass_is_never_drawn() -> None:
    p = torch.tensor([0.0, 1e-7, 0.0, 1.0, 0.0])
    drawn = noise.race(p.expand(MANY, -1), many())
    assert set(drawn.tolist()) <= {1, 3}
    unnormalised = noise.race((p * 1e-12).expand(1000, -1), tuple(k[:1000] for k in many()))
    assert set(unnormalised.tolist()) <= {1, 3}


@pytest.mark.parametrize(
    ("other", "name"),
    [
        (many(start=1), "the next position"),
        (many(start=2**40), "a far position"),
        (many(seed=2), "the next seed"),
        (many(seed=-1), "another seed"),
        *[(many(stream), f"stream {stream}") for stream in STREAMS[1:]],
        (noise.keys(torch.full((MANY,), 1), torch.arange(MANY), torch.ones(MANY, 1).long(), noise.ACCEPT), "a node"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_independence(other: noise.Keys, name: str) -> None:
    a, b = noise.uniform(many()), noise.uniform(other).reshape(-1)
    assert abs(correlation(a, b)) < 4
    assert abs(correlation((a - 0.5).abs(), (b - 0.5).abs())) < 4
    cells = (a * 8).long() * 8 + (b * 8).long()
    assert abs(chi_squared(cells.bincount(minlength=64), torch.full((64,), MANY / 64))) < 4
    p = torch.tensor([0.2, 0.5, 0.3])
    pair = noise.race(p.expand(MANY, -1), many()) * 3 + noise.race(
        p.expand(MANY, -1), tuple(k.reshape(-1) for k in other)
    )
    assert abs(chi_squared(pair.bincount(minlength=9), torch.outer(p, p).reshape(-1) * MANY)) < 4


def test_the_independence_test_can_fail() -> None:
    a = noise.uniform(many())
    assert abs(correlation(a, a)) > 100
    assert abs(correlation(a, (a + 0.05 * noise.uniform(many(2))) % 1)) > 10


def test_tokens_of_one_field_are_independent() -> None:
    e = noise.exponential(tuple(k[:2000] for k in many()), 64)
    for shift in (1, 2, 7, 32):
        assert abs(correlation(e[:, shift:].reshape(-1), e[:, :-shift].reshape(-1))) < 4
    assert abs(correlation(e[:-1].reshape(-1), e[1:].reshape(-1))) < 4


def test_base_and_offset_do_not_stand_for_each_other() -> None:
    """(base 5, node 1) must not be (base 6, node 0): the block rule's rounds would be correlated."""
    seed = torch.tensor([3])
    seen = set()
    for base in range(64):
        for stream in STREAMS:
            low, high = noise.keys(seed, torch.tensor([base]), torch.arange(64)[None], stream)
            seen.update(zip(low[0].tolist(), high[0].tolist(), strict=True))
    assert len(seen) == 64 * 64 * 4


def test_the_same_numbers_when_asked_again_and_in_any_batch() -> None:
    seeds, base = noise.seeds([5, -3, 2**64 - 1, 2**63], "cpu"), torch.tensor([1, 10, 100, 1000])
    depth = torch.arange(6).expand(4, -1)
    keys = noise.keys(seeds, base.unsqueeze(1) + depth, 0, noise.COUPLED)
    p = torch.softmax(torch.randn(4, 6, 3000, generator=torch.Generator().manual_seed(1)), -1)
    whole = noise.race(p, keys)
    assert torch.equal(whole, noise.race(p, noise.keys(seeds, base.unsqueeze(1) + depth, 0, noise.COUPLED)))
    assert torch.equal(whole, noise.draw(p, noise.exponential(keys, 3000)))
    for row in range(4):
        for place in range(6):
            key = noise.keys(seeds[row : row + 1], base[row : row + 1] + place, 0, noise.COUPLED)
            assert int(noise.race(p[row, place][None], key)) == int(whole[row, place])
    nodes = torch.arange(6).expand(4, -1)
    together = noise.uniform(noise.keys(seeds, base, nodes, noise.ACCEPT))
    for place in range(6):
        assert torch.equal(together[:, place], noise.uniform(noise.keys(seeds, base, place, noise.ACCEPT)))


def test_known_numbers() -> None:
    """Pinned, so that a seed gives the same text tomorrow. To change them is to break every seeded user."""
    low, high = noise.keys(torch.tensor([42]), torch.tensor([7]), 3, noise.ACCEPT)
    assert (int(low), int(high)) == PINNED_KEY
    drawn = noise.race(
        torch.full((1, 50_000), 1.0), noise.keys(torch.tensor([42]), torch.tensor([7]), 0, noise.COUPLED)
    )
    assert int(drawn) == PINNED_TOKEN
    assert noise.derive(42, 1) == PINNED_SEED


PINNED_KEY, PINNED_TOKEN, PINNED_SEED = (951070258, 2140668103), 17450, 6332618229526065668


def reference_key(seed: int, base: int, offset: int, stream: int) -> tuple[int, int]:
    """The same in Python's own integers."""
    word = 2**64 - 1

    def mix(x: int) -> int:
        x &= word
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & word
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & word
        return x ^ (x >> 31)

    x = mix(seed + 0x9E3779B97F4A7C15)
    x = mix(x + base * 0xD1B54A32D192ED03)
    x = mix(x + offset * 0x8CB92BA72F3D8DD7 + stream * 0x9E3779B97F4A7C15)
    return x & 0xFFFFFFFF, x >> 32


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63, 2**64 - 1, -(2**63)])
def test_the_integers_are_exactly_splitmix(seed: int) -> None:
    for base, offset, stream in ((0, 0, 1), (5, 3, 2), (2**31 + 7, 40, 4)):
        low, high = noise.keys(noise.seeds([seed], "cpu"), torch.tensor([base]), offset, stream)
        assert (int(low) % 2**32, int(high) % 2**32) == reference_key(seed, base, offset, stream)


def test_derived_seeds() -> None:
    assert noise.derive(7, 0) == 7
    assert noise.derive(2**64 - 1, 0) == -1  # the same 64 bits
    many_seeds = [noise.derive(seed, index) for seed in (-1, 0, 1, 2, 2**63, 2**64 - 2) for index in range(64)]
    assert len(set(many_seeds)) == len(many_seeds)
    assert all(-(2**63) <= seed < 2**63 for seed in many_seeds)
    assert noise.seeds(many_seeds, "cpu").tolist() == many_seeds


@pytest.mark.parametrize("size", [1, 5, 2047, 2048, 2049, 4096, 5000])
def test_argmax_finds_the_first_of_the_largest(size: int) -> None:
    gen = torch.Generator().manual_seed(size)
    for levels in (1, 3, 10**6):  # few levels: many ties
        x = torch.randint(levels, (4, 3, size), generator=gen).float()
        found = argmax(x)
        for row in x.reshape(-1, size):
            largest = row.max()
            assert int(found.reshape(-1)[0]) == row.tolist().index(largest)
            found = found.reshape(-1)[1:]
    x = torch.zeros(2, size)
    x[1, size // 2] = torch.nan
    x[1, 0] = 5.0 if size > 1 else torch.nan
    assert argmax(x).tolist() == [0, size // 2]
    assert int(argmax(torch.full((size,), -torch.inf))) == 0
    wide = torch.cat([x, torch.full((2, 300), 9.0)], 1)[:, :size]  # a slice of a padded vocabulary
    assert argmax(wide).tolist() == [0, size // 2]


@pytest.mark.gpu
def test_cuda_draws_what_the_cpu_draws() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    seeds, base = noise.seeds(range(64), "cpu"), torch.arange(64) + 100
    p = torch.softmax(3 * torch.randn(64, 49152, generator=torch.Generator().manual_seed(0)), -1)
    here = noise.keys(seeds, base, 0, noise.COUPLED)
    there = noise.keys(seeds.cuda(), base.cuda(), 0, noise.COUPLED)
    assert all(torch.equal(a, b.cpu()) for a, b in zip(here, there, strict=True))
    assert torch.equal(noise.uniform(here), noise.uniform(there).cpu())
    torch.testing.assert_close(noise.exponential(here, 49152), noise.exponential(there, 49152).cpu(), rtol=1e-5, atol=0)
    assert torch.equal(noise.race(p, here), noise.race(p.cuda(), there).cpu())


def test_a_race_of_few_is_the_race_of_all() -> None:
    """Where few tokens have mass only those are given noise; the winner must be the one that all of them would give."""
    generator = torch.Generator().manual_seed(5)
    size, rows = 1 << 13, 60
    p = torch.rand(rows, size, generator=generator)
    p[torch.rand(rows, size, generator=generator) > 0.01] = 0.0
    p[0] = 0.0  # nobody runs
    p[1, 77] = torch.nan
    keys = noise.keys(noise.seeds(list(range(rows)), "cpu"), torch.arange(rows), 0, noise.COUPLED)
    everyone = noise.draw(p, noise.exponential(keys, size))
    alone = [noise.race(p[i : i + 1], (keys[0][i : i + 1], keys[1][i : i + 1])) for i in range(rows)]
    assert torch.cat(alone).tolist() == everyone.tolist()
    assert len(set(everyone.tolist())) > rows // 2
