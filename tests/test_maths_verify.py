"""The rules are lossless: shown exactly, over every outcome of a round. test_maths_planted has the wrong rules."""

from __future__ import annotations

import pytest
import torch
from enumerate_rules import (
    RULES,
    SHAPES,
    Table,
    all_drafts,
    check_law,
    coupled_law,
    depths,
    random_table,
    round_law,
)
from torch import Tensor

from headstart.maths import noise
from headstart.maths.tree import Topology
from headstart.maths.verify import CounterChance, Verdicts, block_rule, coupled_rule, effective_q, token_rule
from headstart.types import Draw

THIRD = torch.tensor([1 / 3, 2 / 3], dtype=torch.float64)


def tables(shape: str, seed: int, zeros: bool = False) -> tuple[Table, Table]:
    """Target and draft conditionals. With zeros: some tokens impossible, but never too few for distinct siblings."""
    parents = SHAPES[shape]
    size = 4 if len(parents) <= 3 else 3
    depth = max(depths(parents)) + 1
    siblings = max(parents.count(parent) for parent in parents)
    target = random_table(depth, size, seed, 1 if zeros else None)
    return target, random_table(depth, size, seed + 1000, siblings if zeros else None)


@pytest.mark.parametrize("zeros", [False, True], ids=["full", "zeros"])
@pytest.mark.parametrize("kind", ["point", "iid", "distinct"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rule", RULES)
def test_every_outcome_together_gives_the_targets_law(rule: str, shape: str, kind: str, zeros: bool) -> None:
    for seed in range(1 if shape in ("two-by-two", "uneven") else 3):
        target, draft = tables(shape, seed, zeros)
        law, _ = round_law(RULES[rule], SHAPES[shape], all_drafts(SHAPES[shape], draft, kind, seed), target)
        check_law(law, target)


@pytest.mark.parametrize("rule", RULES)
def test_a_draft_equal_to_the_target_is_accepted_whole(rule: str) -> None:
    target, _ = tables("chain-3", 7)
    law, accepted = round_law(RULES[rule], SHAPES["chain-3"], all_drafts(SHAPES["chain-3"], target, "iid"), target)
    check_law(law, target)
    assert accepted == pytest.approx(3, abs=1e-12)


@pytest.mark.parametrize("rule", RULES)
def test_a_draft_that_shares_nothing_with_the_target_is_rejected_whole(rule: str) -> None:
    left = torch.tensor([0.4, 0.6, 0.0, 0.0], dtype=torch.float64)
    target, draft = ([law.repeat(4**d, 1) for d in range(4)] for law in (left, left.flip(0)))
    law, accepted = round_law(RULES[rule], SHAPES["chain-3"], all_drafts(SHAPES["chain-3"], draft, "iid"), target)
    check_law(law, target)
    assert accepted == 0


@pytest.mark.parametrize("shape", SHAPES)
def test_coupled_gives_the_targets_law_whatever_was_drafted(shape: str) -> None:
    target, _ = tables(shape, 3)
    gen = torch.Generator().manual_seed(5)
    for _ in range(5):
        tokens = torch.randint(target[0].shape[1], (len(SHAPES[shape]) + 1,), generator=gen)
        check_law(coupled_law(SHAPES[shape], tokens, target), target)


@pytest.mark.parametrize(("rule", "expected"), [("token", 10 / 9), ("block", 11 / 9)])
def test_the_known_example(rule: str, expected: float) -> None:
    target = [THIRD.repeat(2**d, 1) for d in range(3)]
    draft = [THIRD.flip(0).repeat(2**d, 1) for d in range(3)]
    drafts = all_drafts(SHAPES["chain-2"], draft, "iid")
    assert round_law(RULES[rule], SHAPES["chain-2"], drafts, target)[1] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("shape", ["chain-1", "chain-2", "chain-3"])
@pytest.mark.parametrize("kind", ["point", "iid"])
def test_block_never_accepts_less_than_token(shape: str, kind: str) -> None:
    gains = []
    for seed in range(8):
        target, draft = tables(shape, seed)
        drafts = all_drafts(SHAPES[shape], draft, kind, seed)
        token, block = (round_law(rule, SHAPES[shape], drafts, target)[1] for rule in (token_rule, block_rule))
        gains.append(block - token)
    assert min(gains) > -1e-12
    assert max(gains) > 0.01 or shape == "chain-1" or kind == "point"


def test_point_is_a_safe_way_to_see_any_draft() -> None:
    """A random draft may be judged as a point draft: that costs acceptance, never the law."""
    target, draft = tables("uneven", 2)
    drafts = all_drafts(SHAPES["uneven"], draft, "distinct")
    for rule in RULES.values():
        law, accepted = round_law(rule, SHAPES["uneven"], drafts, target, kind="point")
        check_law(law, target)
        assert accepted < round_law(rule, SHAPES["uneven"], drafts, target)[1]


# ---- batches -------------------------------------------------------------------------------------------------------


def mixed_batch(size: int = 7, dtype: torch.dtype = torch.float32):
    """Rows of different lengths, shapes and kinds, padded with rubbish."""
    shapes: list[tuple[int, ...]] = [(-1, 0, 1), (), (-1, -1, 0, 0, 2), (-1,), (-1, 0, -1, 1, 0), (-1, -1), (-1, 0)]
    kinds: list[Draw] = ["iid", "point", "distinct", "point", "iid", "distinct", "point"]
    gen = torch.Generator().manual_seed(11)
    width = max(map(len, shapes)) + 1
    p = torch.rand(len(shapes), width, size, generator=gen, dtype=dtype).pow(3)
    q = torch.rand(len(shapes), width - 1, size, generator=gen, dtype=dtype).pow(3)
    for row, parents in enumerate(shapes):
        for i, parent in enumerate(parents):  # siblings share one q
            q[row, i] = q[row, parents.index(parent)]
        q[row, len(parents) :] = torch.nan
        p[row, len(parents) + 1 :] = torch.nan
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    tokens = torch.stack(
        [torch.randperm(size, generator=gen)[:width] for _ in shapes]
    )  # distinct siblings are distinct
    for row, parents in enumerate(shapes):
        tokens[row, len(parents) + 1 :] = -7
    return p, q, tokens, shapes, kinds


def one_row(verdicts: Verdicts, row: int) -> tuple[list[int], int, int, bool]:
    accepted = int(verdicts.accepted[row])
    path = verdicts.path[row].tolist()
    assert path[accepted:] == [0] * (len(path) - accepted)
    return path[:accepted], accepted, int(verdicts.token[row]), bool(verdicts.ok[row])


@pytest.mark.parametrize("rule", [token_rule, block_rule])
@pytest.mark.parametrize("chains", [False, True])
def test_a_row_in_a_mixed_batch_gets_the_verdict_it_gets_alone(rule, chains: bool) -> None:
    p, q, tokens, shapes, kinds = mixed_batch(dtype=torch.float64)
    if chains:
        shapes = [tuple(range(-1, len(parents) - 1)) for parents in shapes]
    several = set()
    for trial in range(30):
        seeds, base = torch.arange(len(p)) * 1000 + trial, torch.arange(len(p)) + 5
        together = rule(p, q, tokens, Topology.of(shapes, "cpu"), kinds, CounterChance(seeds, base))
        for row, parents in enumerate(shapes):
            n = len(parents)
            topology = Topology.of([parents], "cpu")
            mine = (p[row : row + 1, : n + 1], q[row : row + 1, :n], tokens[row : row + 1, : n + 1])
            own_q = None if kinds[row] == "point" else mine[1]
            chance = CounterChance(seeds[row : row + 1], base[row : row + 1])
            alone = rule(mine[0], own_q, mine[2], topology, [kinds[row]], chance)
            assert one_row(together, row) == one_row(alone, 0)
            several.add(one_row(alone, 0)[1])
    assert several >= {0, 1, 2}  # the trials really reach different ends


def test_a_row_in_a_mixed_coupled_batch_gets_the_verdict_it_gets_alone() -> None:
    p, _, tokens, shapes, _ = mixed_batch()
    topology = Topology.of(shapes, "cpu")
    several = set()
    for trial in range(40):
        seeds, base = torch.arange(len(p)) * 1000 + trial, torch.arange(len(p)) + 5
        targets = CounterChance(seeds, base).targets(p, topology.depth)
        for row, parents in enumerate(shapes):  # a draft which the target agrees with now and then
            for i, parent in enumerate(parents):
                if (trial + i) % 3:
                    tokens[row, i + 1] = targets[row, parent + 1]
        together = coupled_rule(targets, tokens, topology)
        for row, parents in enumerate(shapes):
            n = len(parents) + 1
            own = Topology.of([parents], "cpu")
            chance = CounterChance(seeds[row : row + 1], base[row : row + 1])
            mine = chance.targets(p[row : row + 1, :n], own.depth)
            assert one_row(together, row) == one_row(coupled_rule(mine, tokens[row : row + 1, :n], own), 0)
            several.add(int(together.accepted[row]))
    assert several >= {0, 1, 2}


def test_coupled_emits_the_plain_sequence_of_its_seed() -> None:
    """Whatever is drafted, the tokens are those that one-by-one decoding draws for the same seed."""
    size, steps, rows = 5, 4, 50
    table = random_table(2 * steps, size, 1)
    seeds = torch.arange(rows)

    def plain(row: int) -> list[int]:
        found: list[int] = []
        for step in range(steps):
            code = int(sum(t * size ** (step - 1 - i) for i, t in enumerate(found)))
            chance = CounterChance(seeds[row : row + 1], torch.tensor([10 + step]))
            p = table[step][code][None, None]
            found.append(int(token_rule(p, None, torch.zeros(1, 1, dtype=torch.int64), PLAIN, ["point"], chance).token))
            assert found[-1] == int(chance.targets(p, torch.zeros(1, 1, dtype=torch.int64)))
        return found

    parents = (-1, -1, 0, 0, 1, 2)
    level = [0, *depths(parents)]
    topology = Topology.of([parents], "cpu")
    gen = torch.Generator().manual_seed(2)
    accepted = 0
    for row in range(rows):
        text = plain(row)
        tokens = torch.randint(size, (1, len(parents) + 1), generator=gen)
        if row % 2:  # half of the drafts hold the right branch
            tokens[0, [2, 5]] = torch.tensor(text[:2])
        codes = [0]
        for i, parent in enumerate(parents):
            codes.append(codes[parent + 1] * size + int(tokens[0, i + 1]))
        p = torch.stack([table[d][c] for d, c in zip(level, codes, strict=True)])[None]
        chance = CounterChance(seeds[row : row + 1], torch.tensor([10]))
        verdict = coupled_rule(chance.targets(p, topology.depth), tokens, topology)
        path, n, token, ok = one_row(verdict, 0)
        assert ok
        assert [*tokens[0, path].tolist(), token] == text[: n + 1]
        accepted += n
    assert accepted > rows // 2


PLAIN = Topology.chain([0], "cpu")


def test_coupled_takes_the_first_of_equal_siblings() -> None:
    topology = Topology.of([(-1, -1, 1)], "cpu")
    targets = torch.tensor([[4, 0, 6, 1]])
    verdict = coupled_rule(targets, torch.tensor([[9, 4, 4, 6]]), topology)
    assert one_row(verdict, 0) == ([1], 1, 0, True)


# ---- what is broken ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [token_rule, block_rule])
@pytest.mark.parametrize("parents", [(-1, 0, 1), (-1, -1, 0)], ids=["chain", "tree"])
def test_a_broken_row_fails_alone_and_only_where_its_text_goes(rule, parents: tuple[int, ...]) -> None:
    size, rows = 4, 400
    target = torch.full((rows, 4, size), 0.25)
    q = torch.full((rows, 3, size), 0.25)
    q[:, :, 0], q[:, :, 1] = 0.4, 0.1
    tokens = torch.randint(size, (rows, 4), generator=torch.Generator().manual_seed(0))
    topology = Topology.of([parents] * rows, "cpu")
    chance = CounterChance(torch.arange(rows), torch.full((rows,), 3))
    before = rule(target, q, tokens, topology, ["iid"] * rows, chance)
    target[::2, 1] = torch.nan  # the distribution after the first drafted token
    after = rule(target, q, tokens, topology, ["iid"] * rows, chance)
    for row in range(rows):
        if row % 2:
            assert one_row(before, row) == one_row(after, row)
        else:
            assert bool(after.ok[row]) == (one_row(after, row)[0] != [1])
    assert not bool(after.ok.all())
    assert bool(after.ok[::2].any())
    for bad in (torch.nan, 0.0, torch.inf):
        target[::2, 0] = bad
        verdict = rule(target, q, tokens, topology, ["iid"] * rows, chance)
        assert verdict.ok.tolist() == [bool(row % 2) for row in range(rows)]


@pytest.mark.parametrize("rule", ["token", "block"])
def test_a_broken_q_costs_speed_and_nothing_else(rule: str) -> None:
    """Its node is left out whatever its token is, so the law stays the target's."""
    target, draft = tables("chain-2", 1)
    drafts = all_drafts(SHAPES["chain-2"], draft, "iid")
    whole = round_law(RULES[rule], SHAPES["chain-2"], drafts, target)[1]
    for bad in (torch.nan, 0.5):  # not a number; not a distribution
        assert drafts.q is not None
        drafts.q[:, 1] = bad
        law, accepted = round_law(RULES[rule], SHAPES["chain-2"], drafts, target)
        check_law(law, target)
        assert 0 < accepted < whole


@pytest.mark.parametrize("parents", [(-1, 0), (-1, -1, 0)], ids=["chain", "tree"])
def test_an_unknown_token_is_never_accepted(parents: tuple[int, ...]) -> None:
    topology = Topology.of([parents] * 50, "cpu")
    p = torch.full((50, topology.width, 3), 1 / 3)
    tokens = torch.tensor([[0, 3, 1, 2][: topology.width]] * 50)
    chance = CounterChance(torch.arange(50), torch.arange(50))
    for rule in (token_rule, block_rule):
        for kind in ("point", "iid"):
            verdict = rule(p, p[:, 1:], tokens, topology, [kind] * 50, chance)
            assert not (verdict.path == 1).any()
            assert verdict.ok.all()


def test_broken_targets_end_a_coupled_row() -> None:
    topology = Topology.chain([2, 2, 2], "cpu")
    tokens = torch.tensor([[0, 1, 2]] * 3)
    targets = torch.tensor([[1, -1, 3], [1, 2, -1], [5, -1, -1]])
    verdict = coupled_rule(targets, tokens, topology)
    assert verdict.ok.tolist() == [False, False, True]
    p = torch.full((1, 2, 4), 0.25)
    p[0, 1] = torch.nan
    drawn = CounterChance(torch.tensor([1]), torch.tensor([1])).targets(p, torch.tensor([[0, 1]]))
    assert drawn[0, 0] >= 0
    assert drawn[0, 1] == -1


def test_an_empty_residual_falls_back_on_p() -> None:
    """By rounding alone p can lie under q everywhere; a rejection then must still draw a token, and an allowed one."""
    p = torch.tensor([[[0.5, 0.5 - 1e-7, 0.0]] * 2])
    q = torch.tensor([[[0.5, 0.5, 1e-7]]])
    tokens = torch.tensor([[0, 2]])
    for rule in (token_rule, block_rule):
        for seed in range(20):
            chance = CounterChance(torch.tensor([seed]), torch.tensor([0]))
            verdict = rule(p, q, tokens, Topology.chain([1], "cpu"), ["iid"], chance)
            assert one_row(verdict, 0)[1] == 0
            assert int(verdict.token) in (0, 1)
            assert bool(verdict.ok)


# ---- effective q, shapes, and no waiting ---------------------------------------------------------------------------


def test_effective_q_of_each_kind() -> None:
    q = torch.tensor([0.5, 0.3, 0.2]).repeat(3, 3, 1)
    tokens = torch.tensor([[0, 1, 0, 2]] * 3)
    topology = Topology.of([(-1, -1, 0)] * 3, "cpu")
    found = effective_q(q, tokens, topology, ["point", "iid", "distinct"])
    assert found is not None
    assert found[0].tolist() == [[0, 1, 0], [1, 0, 0], [0, 0, 1]]
    assert torch.equal(found[1], q[1])
    torch.testing.assert_close(found[2], torch.tensor([[0.5, 0.3, 0.2], [5 / 7, 0.0, 2 / 7], [0.5, 0.3, 0.2]]))
    assert q.min() > 0  # the caller's tensor is untouched
    assert effective_q(q, tokens, topology, ["iid"] * 3) is q  # and not copied without need
    assert effective_q(None, tokens, topology, ["point"] * 3) is None
    with pytest.raises(ValueError, match="need their q"):
        effective_q(None, tokens, topology, ["point", "iid", "point"])


def test_wrong_shapes_are_refused() -> None:
    p, tokens, topology = torch.full((1, 3, 4), 0.25), torch.zeros(1, 3, dtype=torch.int64), Topology.chain([2], "cpu")
    chance = CounterChance(torch.tensor([0]), torch.tensor([0]))
    with pytest.raises(ValueError, match="needs tokens and topology"):
        token_rule(p, None, tokens[:, 1:], topology, ["point"], chance)
    with pytest.raises(ValueError, match="q must be"):
        token_rule(p, p, tokens, topology, ["iid"], chance)


@pytest.mark.parametrize("parents", [(-1, 0, 1), (-1, -1, 0)], ids=["chain", "tree"])
@pytest.mark.parametrize("kinds", [["point"] * 2, ["iid"] * 2, ["point", "distinct"]])
def test_no_rule_waits_for_the_device(parents: tuple[int, ...], kinds: list[Draw]) -> None:
    """Meta tensors have no values: reading one, or branching on one, raises."""
    p = torch.empty(2, 4, 50, device="meta")
    tokens = torch.empty(2, 4, dtype=torch.int64, device="meta")
    topology = Topology.of([parents] * 2, "meta")
    seeds: Tensor = torch.empty(2, dtype=torch.int64, device="meta")
    chance = CounterChance(seeds, seeds)
    for rule in (token_rule, block_rule):
        verdict = rule(p, p[:, 1:], tokens, topology, kinds, chance)
        assert verdict.path.shape == (2, 4)
    assert coupled_rule(chance.targets(p, topology.depth), tokens, topology).token.shape == (2,)
    with pytest.raises(RuntimeError):
        bool(chance.draw(p[:, 0]).sum())  # the test can fail


def test_a_round_without_a_draft_uses_the_positions_own_noise() -> None:
    p = torch.softmax(torch.randn(6, 3, 30, generator=torch.Generator().manual_seed(3)), -1)
    tokens = torch.zeros(6, 3, dtype=torch.int64)
    chance = CounterChance(torch.arange(6), torch.arange(6) + 2)
    mixed = token_rule(p, None, tokens, Topology.chain([2, 0, 1, 0, 2, 0], "cpu"), ["point"] * 6, chance)
    expected = noise.race(p[:, 0], noise.keys(torch.arange(6), torch.arange(6) + 2, 0, noise.COUPLED))
    assert mixed.token[[1, 3, 5]].tolist() == expected[[1, 3, 5]].tolist()


@pytest.mark.gpu
@pytest.mark.parametrize("chains", [False, True])
def test_cuda_decides_what_the_cpu_decides_even_in_a_graph(chains: bool) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    p, q, tokens, shapes, kinds = mixed_batch(size=500)
    if chains:
        shapes = [tuple(range(-1, len(parents) - 1)) for parents in shapes]
    seeds, base = torch.arange(len(p)), torch.arange(len(p)) + 9
    here = Topology.of(shapes, "cpu")
    given = [x.cuda() for x in (p, q, tokens, seeds, base)]
    there = Topology.of(shapes, "cuda")

    def work(p: Tensor, q: Tensor, tokens: Tensor, seeds: Tensor, base: Tensor, topology: Topology) -> list[Verdicts]:
        chance = CounterChance(seeds, base)
        rules = [rule(p, q, tokens, topology, kinds, chance) for rule in (token_rule, block_rule)]
        return [*rules, coupled_rule(chance.targets(p, topology.depth), tokens, topology)]

    work(*given, there)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # a hidden wait for the device would end the capture with an error
        captured = work(*given, there)
    for trial in range(20):
        seeds += 100
        given[3].copy_(seeds)
        graph.replay()
        for one, other in zip(work(p, q, tokens, seeds, base, here), captured, strict=True):
            for name in ("path", "accepted", "token", "ok"):
                assert torch.equal(getattr(one, name), getattr(other, name).cpu()), (trial, name)
