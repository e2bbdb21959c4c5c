"""``ModelRunner.read``: several rows' tokens by one call give what each row would have got alone."""

from __future__ import annotations

import random

import pytest
import torch
from slab_tools import check_slab
from test_machine_runner import TOLERANCE, Oracle

from headstart.machine.kvcache import Slab
from headstart.machine.model_runner import ModelRunner
from headstart.machine.pieces import batches
from headstart.machine.runner import EagerRunner
from headstart.testing import ARCHITECTURES, TINY_VOCABULARY, TableRunner, tiny_model

TABLE = torch.randn(7, 7, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_each_piece_gets_the_logits_of_a_fresh_pass(name: str, wide: bool) -> None:
    """Rows in any order, some behind keys that are there already; twice, so that the second finds the first's keys."""
    model = tiny_model(name)
    check_reads(Oracle(model, EagerRunner(model, rows=6, max_len=96)), TOLERANCE, wide)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_each_piece_gets_them_on_a_gpu(name: str) -> None:
    model = tiny_model(name).cuda()
    check_reads(Oracle(model, EagerRunner(model, rows=6, max_len=96)), 10 * TOLERANCE, True)


def check_reads(oracle: Oracle, tolerance: float, wide: bool) -> None:
    runner, truth = oracle.runner, {row: oracle.junk(length) for row, length in ((0, 13), (3, 9), (5, 2))}
    runner._wide = wide  # as on a GPU, which is not here
    for row, tokens in truth.items():
        runner.prefill(row, tokens)
    for rows, longest in (((4, 1, 3, 0), 12), ((0, 1, 5, 2, 4), 3)):
        pieces = [(row, oracle.junk(oracle.rng.randint(1, longest))) for row in rows]
        logits = runner.read(pieces)
        assert logits.shape == (len(rows), TINY_VOCABULARY)
        for (row, tokens), found in zip(pieces, logits, strict=True):
            truth[row] = [*truth.get(row, ()), *tokens]
            assert runner.slab.tokens[row] == truth[row]
            oracle.compare(found[None], truth[row])
    check_slab(runner.slab)
    assert oracle.worst < tolerance


@pytest.mark.parametrize("positions", [True, False])
def test_a_gpu_reads_neighbours_together(positions: bool) -> None:
    """Counted; with a model that takes the positions of the logits that are wanted, and with one that does not."""
    model = tiny_model("llama")
    oracle = Oracle(model, EagerRunner(model, rows=4, max_len=64))
    assert oracle.runner._accepts_positions
    oracle.runner._wide, oracle.runner._accepts_positions = True, positions
    seen: list[tuple[torch.Size, torch.Size]] = []
    model.register_forward_hook(
        lambda _, args, given, found: seen.append((given["input_ids"].shape, found.logits.shape)), with_kwargs=True
    )
    pieces = [(row, oracle.junk(length)) for row, length in ((3, 20), (1, 30), (0, 17), (2, 30))]
    logits = oracle.runner.read(pieces)
    assert seen == [((4, 30), (4, 3 if positions else 30, TINY_VOCABULARY))]
    for (_, tokens), found in zip(pieces, logits, strict=True):
        oracle.compare(found[None], tokens)
    assert oracle.worst < TOLERANCE


def test_which_pieces_go_together() -> None:
    slab = Slab(8, 100, margin=16)

    def chosen(widths: dict[int, int], wide: bool) -> list[list[int]]:
        found = batches(slab, [(row, [0] * width) for row, width in widths.items()], wide=wide)
        return [[list(widths)[i] for i in batch] for batch in found]

    assert chosen({2: 20, 0: 20, 1: 20}, True) == [[0, 1, 2]], "in any order"
    assert chosen({2: 20, 0: 20, 1: 20}, False) == [[0], [1], [2]], "a CPU takes as long for padding as for tokens"
    assert chosen({2: 3, 0: 5, 1: 2}, False) == [[0, 1, 2]], "but a few cost what one costs"
    assert chosen({0: 4, 1: 4, 2: 4, 3: 4, 4: 4}, False) == [[0, 1, 2, 3], [4]]
    assert chosen({0: 20, 2: 20, 3: 20}, True) == [[0], [2, 3]], "a batch is a slice of the slab"
    assert chosen({0: 60, 1: 20, 2: 20, 3: 20, 4: 20}, True) == [[0, 1, 2], [3, 4]], "less than half is padding"
    slab.lengths[1] = 90
    assert chosen({0: 40, 1: 10}, True) == [[0], [1]], "row 1 has no room for so much padding"
    slab.lengths[1] = 70
    assert chosen({0: 40, 1: 30}, True) == [[0, 1]]


def test_without_logits_the_keys_are_there_all_the_same() -> None:
    model = tiny_model("llama")
    oracle = Oracle(model, EagerRunner(model, rows=3, max_len=32))
    pieces = [(2, oracle.junk(5)), (1, oracle.junk(4))]
    assert oracle.runner.read(pieces, logits=False).shape == (2, 0)
    for row, tokens in pieces:
        oracle.compare(oracle.runner.read([(row, [9])]), [*tokens, 9])
    assert oracle.worst < TOLERANCE


def test_a_table_reads_what_it_would_read_piece_by_piece() -> None:
    rng = random.Random(3)
    together, alone = (TableRunner(TABLE, rows=4, max_len=40) for _ in range(2))
    for _ in range(5):
        pieces = [(row, [rng.randrange(7) for _ in range(rng.randint(1, 6))]) for row in rng.sample(range(4), 3)]
        expected = torch.cat([alone.prefill(row, tokens, chunk=2) for row, tokens in pieces])[:, 0]
        assert torch.equal(together.read(pieces), expected)
        assert together.slab.tokens == alone.slab.tokens


def runners() -> list[ModelRunner]:
    return [TableRunner(TABLE, rows=3, max_len=16), EagerRunner(tiny_model("llama"), rows=3, max_len=16)]


@pytest.mark.parametrize("kind", [0, 1])
def test_what_cannot_be_read_is_refused_before_anything_is(kind: int) -> None:
    runner = runners()[kind]
    runner.read([(1, [3] * 10)])
    refused = [
        ([(0, [1, 2]), (1, [3] * 7)], "row 1 would hold 17 tokens of 16"),
        ([(0, [1, 2]), (2, [])], "nothing to read into row 2"),
        ([(0, [1, 2]), (0, [3])], "only once"),
        ([(0, [1, 2]), (3, [3])], "one of the slab's 3"),
        ([(0, [1, 2]), (-1, [3])], "one of the slab's 3"),
    ]
    for pieces, message in refused:
        with pytest.raises(ValueError, match=message):
            runner.read(pieces)
        assert runner.slab.tokens == [[], [3] * 10, []]
    assert runner.read([]).shape == (0, runner.vocab_size)
    assert runner.read([], logits=False).shape == (0, 0)
