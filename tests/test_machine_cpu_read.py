"""``CpuRunner.read``: one call for the tokens of several rows, and not a bit differs from reading each row alone."""

from __future__ import annotations

import random

import pytest
import torch
from test_machine_cpu import FAMILIES, SIZES, TEXT, runner
from torch import Tensor

from headstart.machine.cpu import build
from headstart.machine.cpu.packed import pack_model
from headstart.machine.cpu.runner import CpuRunner
from headstart.maths.tree import Topology
from headstart.testing import TINY_VOCABULARY, tiny_model

pytestmark = pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not()))

ROWS = 5


def drawn(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(TINY_VOCABULARY) for _ in range(count)]


def kept(r: CpuRunner, row: int) -> list[Tensor]:
    """All that the slab holds of a row's tokens: keys, values, features."""
    live = r.slab.lengths[row]
    return [buffer[row, :, :live] for layer in r.slab.layers for buffer in (layer.keys, layer.values)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["int8", "int4", "float32"])
def test_pieces_read_together_have_the_bits_of_each_alone(family: str, kind: str) -> None:
    """Pieces of all widths in rows of any order, behind what earlier ones left; the windows are 8 tokens wide."""
    rng = random.Random(f"{family} {kind}")
    together, alone = (runner(family, kind, rows=ROWS, max_len=96) for _ in range(2))
    for turn in range(6):
        together.threads = 1 + turn % 2
        rows = rng.sample(range(ROWS), rng.randint(1, ROWS))
        pieces = [(row, drawn(rng, rng.choice((1, 2, 7, 8, 9, 16)))) for row in rows]
        found = together.read(pieces)
        expected = torch.cat([alone.prefill(row, tokens, chunk=rng.choice((3, 512))) for row, tokens in pieces])[:, 0]
        assert torch.equal(found, expected)
        assert together.slab.tokens == alone.slab.tokens
    for row in range(ROWS):
        assert all(torch.equal(a, b) for a, b in zip(kept(together, row), kept(alone, row), strict=True))
        tokens = together.slab.tokens[row]
        if tokens:  # and of one pass over the row's whole text, by another way through the kernels
            fresh = alone.forward(slice(row, row + 1), torch.tensor([tokens]), [0], keep=1)[0]
            last = together.forward(slice(row, row + 1), torch.tensor([tokens[-1:]]), [len(tokens) - 1])[0]
            assert torch.equal(last, fresh)


@pytest.mark.parametrize(("wide", "window"), [(32, 0), (64, 0), (64, 50), (96, 20), (128, 0), (160, 0)])
@pytest.mark.parametrize("kind", ["int4", "float32"])
def test_a_long_prompt_has_the_bits_of_its_tokens_one_by_one(wide: int, window: int, kind: str) -> None:
    """Many queries share keys in another way than a few do, for heads of up to 128. The row is filled to its end."""
    sizes = {"hidden_size": 64, "num_attention_heads": 6, "num_key_value_heads": 2, "num_hidden_layers": 1}
    model = tiny_model("mistral", head_dim=wide, sliding_window=window or None, **SIZES | sizes)
    r = CpuRunner(pack_model(model, kind), model, rows=2, max_len=100)
    length = r.slab.capacity
    assert length % 16, "the last block of keys is not whole"
    text = drawn(random.Random(wide), length)
    ids = torch.tensor([text])
    r.threads = 1
    fresh = r.forward(slice(0, 1), ids, [0])[0]
    r.threads = 2
    assert torch.equal(r.forward(slice(1, 2), ids[:, :70], [0])[0], fresh[:70])
    assert torch.equal(r.forward(slice(1, 2), ids[:, 70:], [70])[0], fresh[70:])
    r.threads = 1
    for at in (*range(0, length, 7), length - 1):
        assert torch.equal(r.forward(slice(0, 1), ids[:, at : at + 1], [at])[0, 0], fresh[at]), at
    if kind == "float32":
        with torch.no_grad():
            expected = model(ids).logits[0]
        assert (fresh - expected).square().mean().sqrt() < 1e-5 * expected.std()


def test_drafts_and_trees_behind_what_was_read_together() -> None:
    r = runner("qwen3", "int4")
    fresh = r.forward(slice(0, 1), torch.tensor([TEXT]), [0])[0]
    found = r.read([(2, TEXT[:9]), (0, TEXT[:11])])
    assert torch.equal(found, fresh[[8, 10]])
    draft = r.forward(slice(2, 3), torch.tensor([[*TEXT[9:12], 77]]), [9])[0]
    assert torch.equal(draft[:3], fresh[9:12])
    tree = Topology.of([(-1, -1, 1, 0, 2)], r.device)
    nodes = torch.tensor([[TEXT[11], 77, TEXT[12], TEXT[13], 78, TEXT[14]]])
    branch = r.forward(slice(0, 1), nodes, [11], tree)[0]
    assert torch.equal(branch[[0, 2, 3, 5]], fresh[11:15])
    assert torch.equal(r.read([(1, TEXT[:3]), (2, TEXT[9:14])])[1], fresh[13]), "over a draft that was dropped"


def test_without_logits_only_the_head_is_left_out() -> None:
    together, alone = runner("llama", "int8"), runner("llama", "int8")
    pieces = [(2, TEXT[:9]), (0, TEXT[3:20])]
    assert together.read(pieces, logits=False).shape == (2, 0)
    alone.read(pieces)
    assert torch.equal(together.read([(0, [5]), (2, [6])]), alone.read([(0, [5]), (2, [6])]))


def test_features_stand_beside_their_tokens() -> None:
    together, alone = runner("llama", "int8"), runner("llama", "int8")
    for r in (together, alone):
        r.watch((1, 0))
    pieces = [(2, TEXT[:9]), (0, TEXT[9:24])]
    together.read(pieces)
    together.read([(1, TEXT[:4]), (2, TEXT[9:12])])
    for row, tokens in (*pieces, (1, TEXT[:4]), (2, TEXT[9:12])):
        alone.prefill(row, tokens)
    for row in range(3):
        length = alone.slab.lengths[row]
        assert torch.equal(together.features(row, 0, length), alone.features(row, 0, length))
        assert bool(alone.features(row, 0, length).abs().sum(-1).gt(0).all())


def test_what_cannot_be_read_leaves_everything_as_it_was() -> None:
    r = runner("llama", "int8")
    r.watch((0,))
    r.read([(1, TEXT[:10])])
    before = [buffer.clone() for layer in r.slab.layers for buffer in (layer.keys, layer.values)]
    refused = [
        ([(0, TEXT[:3]), (1, [5, TINY_VOCABULARY])], "vocabulary"),
        ([(0, TEXT[:3]), (1, [-1])], "vocabulary"),
        ([(0, TEXT[:3]), (1, [5] * 55)], "row 1 would hold 65 tokens of 64"),
        ([(0, TEXT[:3]), (2, [])], "nothing to read into row 2"),
        ([(0, TEXT[:3]), (0, [3])], "only once"),
        ([(0, TEXT[:3]), (3, [3])], "one of the slab's 3"),
    ]
    for pieces, message in refused:
        with pytest.raises(ValueError, match=message):
            r.read(pieces)
        assert r.slab.tokens == [[], TEXT[:10], []]
    after = [buffer for layer in r.slab.layers for buffer in (layer.keys, layer.values)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert r.read([]).shape == (0, TINY_VOCABULARY)
    assert r.read([(1, [5] * 54)]).shape == (1, TINY_VOCABULARY), "to the last slot"
