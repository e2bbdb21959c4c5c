"""Wrong verification rules, and proof that the checks catch each of them: a check that cannot fail proves nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from enumerate_rules import (
    RULES,
    SHAPES,
    NotLossless,
    Table,
    all_drafts,
    check_law,
    chi_squared,
    depths,
    own_law,
    random_table,
    round_law,
)
from torch import Tensor

from headstart.maths import noise, verify
from headstart.maths.tree import Topology
from headstart.maths.verify import CounterChance, Verdicts, block_rule, token_rule

# ---- exact: every outcome of one round -----------------------------------------------------------------------------


@contextmanager
def patched(owner: object, name: str, value: object) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, value)
        yield


def law_off(rule: Callable[..., Verdicts], shape: str, kind: str, told: str | None = None) -> None:
    """Raise NotLossless if the rule is wrong."""
    parents = SHAPES[shape]
    depth = max(depths(parents)) + 1
    target, draft = random_table(depth, 3, 1), random_table(depth, 3, 2)
    law, _ = round_law(rule, parents, all_drafts(parents, draft, kind), target, kind=told)
    check_law(law, target)


def test_the_check_itself_sees_a_wrong_law() -> None:
    target = random_table(2, 4, 0)
    check_law(own_law(target), target)
    with pytest.raises(NotLossless, match="off by"):
        check_law(own_law(target) + torch.linspace(-1e-11, 1e-11, 16, dtype=torch.float64), target)


def test_the_right_rules_pass_the_same_check() -> None:
    for rule in RULES.values():
        law_off(rule, "chain-2", "iid")
        law_off(rule, "uneven", "distinct")


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("shape", "kind"), [("chain-2", "iid"), ("chain-2", "point"), ("uneven", "distinct")])
def test_a_residual_drawn_from_p(rule: str, shape: str, kind: str) -> None:
    def from_p(self: verify._Draft, node: Tensor) -> Tensor:
        return verify._at(self.p, node)

    owner = verify._Chains if shape.startswith("chain") else verify._Trees
    with patched(owner, "last", from_p), pytest.raises(NotLossless):
        law_off(RULES[rule], shape, kind)


@pytest.mark.parametrize("rule", RULES)
def test_distinct_siblings_taken_for_iid_ones(rule: str) -> None:
    with pytest.raises(NotLossless):
        law_off(RULES[rule], "two-siblings", "distinct", told="iid")


@pytest.mark.parametrize("rule", RULES)
def test_iid_siblings_taken_for_distinct_ones(rule: str) -> None:
    with pytest.raises(NotLossless):
        law_off(RULES[rule], "two-siblings", "iid", told="distinct")


@pytest.mark.parametrize("rule", RULES)
def test_a_younger_sibling_that_meets_p_instead_of_the_residual(rule: str) -> None:
    with (
        patched(verify._Trees, "ratio", lambda self, node, parent: _plain_ratio(self, node, parent)),
        pytest.raises(NotLossless),
    ):
        law_off(RULES[rule], "two-siblings", "iid")


def _plain_ratio(self: verify._Draft, node: verify.Node, parent: verify.Node) -> Tensor:
    rows = torch.arange(len(self.p))
    return self.p[rows, parent, verify._at(self.tokens, node)] / verify._at(self.drawn, node)


@pytest.mark.parametrize("rule", RULES)
def test_a_deterministic_draft_that_claims_to_be_drawn_from_q(rule: str) -> None:
    target, draft = random_table(3, 3, 1), random_table(3, 3, 2)
    drafts = all_drafts(SHAPES["chain-2"], draft, "iid")
    best = draft[0].argmax(1)[0]
    second = draft[1][best].argmax()
    greedy = (drafts.tokens[:, 1] == best) & (drafts.tokens[:, 2] == second)
    drafts.weight = greedy.double()  # always the same tokens, whatever q says
    with pytest.raises(NotLossless):
        check_law(round_law(RULES[rule], SHAPES["chain-2"], drafts, target)[0], target)


@pytest.mark.parametrize("rule", RULES)
def test_q_from_before_the_drafts_temperature(rule: str) -> None:
    target, draft = random_table(3, 3, 1), random_table(3, 3, 2)
    sharp = [q**2 / (q**2).sum(1, keepdim=True) for q in draft]
    drafts = all_drafts(SHAPES["chain-2"], sharp, "iid")
    drafts.q = all_drafts(SHAPES["chain-2"], draft, "iid").q
    with pytest.raises(NotLossless):
        check_law(round_law(RULES[rule], SHAPES["chain-2"], drafts, target)[0], target)


@pytest.mark.parametrize("rule", RULES)
def test_a_controller_that_drops_a_token_because_of_its_value(rule: str) -> None:
    def dropping(p: Tensor, q: Tensor, tokens: Tensor, topology: Topology, *rest: object) -> Verdicts:
        unlikely = torch.zeros_like(topology.valid)
        unlikely[:, 2] = q[:, 1].gather(1, tokens[:, 2:3]).squeeze(1) < 0.3
        return RULES[rule](p, q, tokens, dataclasses.replace(topology, valid=topology.valid & ~unlikely), *rest)

    with pytest.raises(NotLossless):
        law_off(dropping, "chain-2", "iid")


def test_a_controller_that_stops_after_a_token_because_of_its_value_is_allowed() -> None:
    """The other side of the same trap: to draft no further after an unlikely token changes nothing."""

    def stopping(p: Tensor, q: Tensor, tokens: Tensor, topology: Topology, *rest: object) -> Verdicts:
        unlikely = torch.zeros_like(topology.valid)
        unlikely[:, 2] = q[:, 0].gather(1, tokens[:, 1:2]).squeeze(1) < 0.3
        return block_rule(p, q, tokens, dataclasses.replace(topology, valid=topology.valid & ~unlikely), *rest)

    law_off(stopping, "chain-2", "iid")


def early_exit(p: Tensor, q: Tensor, tokens: Tensor, topology: Topology, _: object, chance: verify.Chance) -> Verdicts:
    """Block verification that stops at the first node it does not keep."""
    rows, n, _size = q.shape
    r, keep = [p.new_ones(rows)], torch.zeros(rows, dtype=torch.int64)
    for i in range(1, n + 1):
        at = tokens[:, i : i + 1]
        r.append((r[-1] * (p[:, i - 1].gather(1, at) / q[:, i - 1].gather(1, at)).squeeze(1)).clamp_max(1))
    for i in range(1, n + 1):
        h = r[i]
        if i < n:
            mass = (r[i].unsqueeze(1) * p[:, i] - q[:, i]).clamp_min(0).sum(1)
            h = mass / (mass + 1 - r[i])
        going = keep == i - 1
        yes = chance.accept(torch.full_like(keep, i), torch.where(going, h, 0.0))
        keep = torch.where(yes & going, i, keep)
    at = torch.arange(rows)
    scale = torch.stack(r, 1)[at, keep].unsqueeze(1)
    rest = (scale * p[at, keep] - q[at, keep.clamp_max(n - 1)]).clamp_min(0)
    whole = ((keep == n) | (rest.sum(1) == 0)).unsqueeze(1)
    token = chance.draw(torch.where(whole, p[at, keep], rest))
    path, accepted = verify._path(keep, topology)
    return Verdicts(path, accepted, token, torch.ones(rows, dtype=torch.bool))


def test_block_with_an_early_exit() -> None:
    law_off(early_exit, "chain-1", "iid")  # with one token there is nothing to exit from: the two are the same
    with pytest.raises(NotLossless):
        law_off(early_exit, "chain-2", "iid")


@pytest.mark.parametrize("shape", ["chain-2", "uneven"])
def test_block_that_keeps_a_node_with_r_instead_of_h(shape: str) -> None:
    right = verify._Trees.reject

    def wrong(self: verify._Draft, node, parent, scale: Tensor, where: Tensor) -> Tensor:
        right(self, node, parent, scale, where)
        return scale  # r / (r + 1 - r) = r

    def wrong_chain(self: verify._Chains) -> Tensor:
        return self.scale[:, 1:-1]

    with (
        patched(verify._Trees, "reject", wrong),
        patched(verify._Chains, "masses", wrong_chain),
        pytest.raises(NotLossless),
    ):
        law_off(block_rule, shape, "iid")


@pytest.mark.parametrize("shape", ["chain-2", "uneven"])
def test_block_whose_residual_forgets_r(shape: str) -> None:
    owner = verify._Chains if shape.startswith("chain") else verify._Trees
    right = owner.rest

    def wrong(self: verify._Draft, weights: Tensor, node: verify.Node, scale: Tensor) -> Tensor:
        return right(self, weights, node, torch.ones_like(scale))

    with patched(owner, "rest", wrong), pytest.raises(NotLossless):
        law_off(block_rule, shape, "iid")


# ---- by simulation: whole texts of many seeds, drawn with the counter-based noise ----------------------------------

ROWS, TOKENS, GAMMA, SIZE = 60_000, 3, 2, 2
KeysOf = Callable[[Tensor, Tensor, int, int], noise.Keys]


def by_round(seed: Tensor, base: Tensor, node: int, stream: int) -> noise.Keys:
    return noise.keys(seed, base, node, stream)


def by_position(seed: Tensor, base: Tensor, node: int, stream: int) -> noise.Keys:
    return noise.keys(seed, base + node, 0, stream)


class KeyedChance(CounterChance):
    """CounterChance with another way to key the nodes of a round."""

    def __init__(self, seeds: Tensor, base: Tensor, keys_of: KeysOf) -> None:
        super().__init__(seeds, base, GAMMA + 1)
        self._uniform = torch.stack([noise.uniform(keys_of(seeds, base, i, noise.ACCEPT)) for i in range(GAMMA + 1)], 1)


def counter(seeds: Tensor, base: Tensor) -> CounterChance:
    return CounterChance(seeds, base, GAMMA + 1)


class OneStream(CounterChance):
    """The residual is drawn with the number that decided about its node."""

    def accept(self, node: Tensor, probability: Tensor) -> Tensor:
        yes = super().accept(node, probability)
        assert self._uniform is not None
        assert node.shape[1:] == (1,)
        self.last = self._uniform.gather(1, node)
        return yes

    def draw(self, weights: Tensor, drafted: Tensor | None = None) -> Tensor:
        below = (weights / weights.sum(1, keepdim=True)).cumsum(1)
        return (self.last.double() > below).sum(1).clamp_max(weights.shape[1] - 1)


def simulate(
    rule: Callable[..., Verdicts],
    target: Table,
    draft: Table,
    chance_of: Callable[[Tensor, Tensor], CounterChance],
    keys_of: KeysOf = by_round,
) -> float:
    """Decode TOKENS tokens for ROWS seeds, round by round; how far the joint law is from the target's (chi-squared)."""
    first = torch.tensor([sum(SIZE**e for e in range(d)) for d in range(len(target))])
    p_all, q_all = torch.cat(target), torch.cat(draft)
    seeds, where = torch.arange(ROWS) + 12345, torch.arange(ROWS)
    text = torch.zeros(ROWS, TOKENS + GAMMA + 1, dtype=torch.int64)
    length = torch.zeros(ROWS, dtype=torch.int64)
    topology = Topology.chain([GAMMA] * ROWS, "cpu")
    while bool((length < TOKENS).any()):
        length = length.clamp_max(TOKENS)
        code = torch.zeros(ROWS, dtype=torch.int64)
        for place in range(TOKENS):
            code = torch.where(place < length, code * SIZE + text[:, place], code)
        places, tokens = [first[length] + code], torch.zeros(ROWS, GAMMA + 1, dtype=torch.int64)
        for i in range(GAMMA):
            keys = keys_of(seeds, length, i + 1, noise.DRAFT)
            tokens[:, i + 1] = noise.race(q_all[places[-1]], keys)
            code = code * SIZE + tokens[:, i + 1]
            places.append(first[length + i + 1] + code)
        p, q = p_all[torch.stack(places, 1)], q_all[torch.stack(places[:-1], 1)]
        verdict = rule(p, q, tokens, topology, ["iid"] * ROWS, chance_of(seeds, length))
        for place in range(GAMMA + 1):
            new = tokens.gather(1, verdict.path[:, place : place + 1]).squeeze(1)
            new = torch.where(verdict.accepted == place, verdict.token, new)
            at = (length + place).clamp_max(TOKENS + GAMMA)
            text[where, at] = torch.where(place <= verdict.accepted, new, text[where, at])
        length = length + verdict.accepted + 1
    code = torch.zeros(ROWS, dtype=torch.int64)
    for place in range(TOKENS):
        code = code * SIZE + text[:, place]
    return chi_squared(code.bincount(minlength=SIZE**TOKENS), own_law(target[:TOKENS]) * ROWS)


def contrary(depth: int) -> tuple[Table, Table]:
    """A draft that is often wrong, so that rounds are cut short."""
    target = [torch.tensor([0.35, 0.65], dtype=torch.float64).repeat(2**d, 1) for d in range(depth)]
    return target, [p.flip(1) for p in target]


CATCH, PASS = 8.0, 4.0  # standard deviations; a right rule is further off than 4 once in 30,000 times


@pytest.mark.parametrize("rule", RULES)
def test_counter_noise_gives_the_targets_law(rule: str) -> None:
    for target, draft in (contrary(6), (random_table(6, SIZE, 5), random_table(6, SIZE, 6))):
        assert abs(simulate(RULES[rule], target, draft, counter)) < PASS


def one_round(
    rule: Callable[..., Verdicts], chance_of: Callable[[Tensor, Tensor], CounterChance], stream: int
) -> float:
    """The first emitted token of many rounds with one drafted token, drawn with key (seed, base, 0, stream)."""
    target, draft = torch.full((4,), 0.25), torch.tensor([0.5, 0.3, 0.15, 0.05])
    seeds, base = torch.arange(ROWS), torch.full((ROWS,), 9)
    p, q = target.expand(ROWS, 2, -1), draft.expand(ROWS, 1, -1)
    tokens = torch.zeros(ROWS, 2, dtype=torch.int64)
    tokens[:, 1] = noise.race(q[:, 0], noise.keys(seeds, base, 0, stream))
    verdict = rule(p, q, tokens, Topology.chain([1] * ROWS, "cpu"), ["iid"] * ROWS, chance_of(seeds, base))
    out = torch.where(verdict.accepted == 1, tokens[:, 1], verdict.token)
    return chi_squared(out.bincount(minlength=4), target * ROWS)


@pytest.mark.parametrize("rule", RULES)
def test_one_noise_stream_for_two_things(rule: str) -> None:
    assert abs(one_round(RULES[rule], counter, noise.DRAFT)) < PASS
    assert (
        one_round(RULES[rule], lambda s, b: OneStream(s, b, GAMMA + 1), noise.DRAFT) > CATCH
    )  # acceptance and residual
    assert one_round(RULES[rule], counter, noise.RESIDUAL) > CATCH  # draft and residual


def test_block_with_noise_keyed_by_position() -> None:
    """The block rule looks at later drafts before it cuts a round; the next round must not meet their noise again."""
    target, draft = contrary(6)
    right = simulate(block_rule, target, draft, lambda s, b: KeyedChance(s, b, by_round), by_round)
    wrong = simulate(block_rule, target, draft, lambda s, b: KeyedChance(s, b, by_position), by_position)
    assert abs(right) < PASS
    assert wrong > CATCH


def test_token_with_noise_keyed_by_position_would_do() -> None:
    """The token rule never looks past the first rejection: for it, position-keyed noise is fresh noise."""
    target, draft = contrary(6)
    off = simulate(token_rule, target, draft, lambda s, b: KeyedChance(s, b, by_position), by_position)
    assert abs(off) < PASS
