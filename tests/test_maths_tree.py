"""Topologies against a slow reading of the parents, and the refusal of what is no tree."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headstart.maths.tree import Topology


@st.composite
def forests(draw: st.DrawFn) -> list[tuple[int, ...]]:
    rows = draw(st.integers(1, 4))
    sizes = [draw(st.integers(0, 7)) for _ in range(rows)]
    return [tuple(draw(st.integers(-1, i - 1)) for i in range(size)) for size in sizes]


def line(parents: tuple[int, ...], node: int) -> list[int]:
    """The nodes from the root down to this one."""
    return [0] if node == 0 else [*line(parents, parents[node - 1] + 1), node]


def walk(parents: tuple[int, ...], node: int = 0) -> list[int]:
    """Depth-first, by recursion."""
    inside = [event for child, parent in enumerate(parents, 1) if parent + 1 == node for event in walk(parents, child)]
    return [node, *inside, -node] if node else inside


@given(forests())
@settings(deadline=None, max_examples=60)
def test_every_field_against_a_slow_reading(rows: list[tuple[int, ...]]) -> None:
    topology = Topology.of(rows, "cpu")
    width = max(map(len, rows)) + 1
    assert topology.width == width
    assert topology.ancestors.shape == (len(rows), width, width)
    assert topology.events.shape == (len(rows), 2 * (width - 1))
    assert topology.is_chain == all(parents == tuple(range(-1, len(parents) - 1)) for parents in rows)
    for row, parents in enumerate(rows):
        n = len(parents) + 1
        assert topology.valid[row].tolist() == [node < n for node in range(width)]
        assert topology.parent[row, :n].tolist() == [0, *(parent + 1 for parent in parents)]
        assert topology.depth[row, :n].tolist() == [len(line(parents, node)) - 1 for node in range(n)]
        for node in range(n):
            seen = topology.ancestors[row, node].nonzero().flatten().tolist()
            assert seen == line(parents, node)
        events = [event for event in topology.events[row].tolist() if event]
        assert events == walk(parents)


@pytest.mark.parametrize("lengths", [[0], [3], [1, 4, 0, 2], [2, 2]])
def test_a_chain_is_the_tree_with_one_branch(lengths: list[int]) -> None:
    chain = Topology.chain(lengths, "cpu")
    assert chain.is_chain
    assert chain.width == max(lengths) + 1
    for row, length in enumerate(lengths):
        n = length + 1
        assert chain.valid[row].tolist() == [node < n for node in range(chain.width)]
        assert chain.parent[row, :n].tolist() == [0, *range(length)]
        assert chain.depth[row, :n].tolist() == list(range(n))
        assert torch.equal(chain.ancestors[row, :n, :n], torch.ones(n, n).tril().bool())
        events = [event for event in chain.events[row].tolist() if event]
        assert events == walk(tuple(range(-1, length - 1)))


def test_shorter_chains_are_padded() -> None:
    chain = Topology.chain([1, 0, 3], "cpu")
    assert chain.width == 4
    assert chain.valid.tolist()[:2] == [[True, True, False, False], [True, False, False, False]]
    with pytest.raises(ValueError, match="negative"):
        Topology.chain([2, -1], "cpu")


@pytest.mark.parametrize("parents", [(0,), (-1, 1), (-2,), (-1, 0, 5)])
def test_a_parent_must_stand_before_its_child(parents: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="must stand before"):
        Topology.of([(-1,), parents], "cpu")


def test_deep_trees_do_not_exhaust_the_stack() -> None:
    parents = (*range(-1, 1199), -1)
    events = Topology.of([parents], "cpu").events[0].tolist()
    assert events[:2] == [1, 2]
    assert events[-3:] == [-1, 1201, -1201]
