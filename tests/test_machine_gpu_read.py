"""Prompts of several rows read in one forward by fused models, against Hugging Face's modules and one by one.

On a GPU: ``pytest -m gpu``. Without one: in Triton's interpreter (see ``test_machine_gpu``).
"""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from test_machine_gpu import CONFIGS, DEVICE, DTYPES, INTERPRETED, SIZES, build, build_from, draw, kernels, truth
from test_machine_gpu_quantized import KINDS, spelt_out
from transformers import LlamaConfig

from headstart.machine.gpu.ragged import pack
from headstart.machine.runner import EagerRunner

ROWS, LENGTH = 6, 64

# (row, how many tokens) of each piece, forward after forward
READS: list[list[tuple[int, int]]] = [
    [(3, 9), (0, 1), (1, 4)],
    [(1, 22), (3, 1), (2, 3)],  # behind 4, 9 and 0 keys
    [(4, 33)],  # alone, too long for the kernels that decode
    [(2, 5)],  # alone and short
    [(5, 1), (2, 1)],
]


def small(name: str, dtype: torch.dtype) -> Any:
    """A model of the suite's; where it is interpreted, only two layers of it."""
    config = copy.deepcopy(CONFIGS[name])
    if INTERPRETED:
        kinds = getattr(config, "layer_types", None)
        config.num_hidden_layers = 2
        if kinds:
            config.layer_types = kinds[1:3]  # Qwen2: one with a window, one without
    return build_from(config, sum(name.encode()), DEVICE, dtype)


def open_fused(model: Any, **options: Any) -> Any:
    from headstart.machine.gpu.runner import FusedRunner

    return FusedRunner(model, rows=ROWS, max_len=LENGTH, **options)


class Reader:
    """A runner, and the text that each of its rows is fed from."""

    def __init__(self, model: Any, wide: Any, own: Any, **options: Any) -> None:
        """``wide``, ``own``: modules that hold the same weights, in float32 and in the model's dtype."""
        self.runner = open_fused(model, **options)
        self.texts = [draw(LENGTH, row) for row in range(ROWS)]
        self.want = [truth(wide, text) for text in self.texts]
        gaps = [float((truth(own, t) - w).norm() / w.norm()) for t, w in zip(self.texts, self.want, strict=True)]
        self.limit = max(2e-5, 1.5 * max(gaps))

    def pieces(self, counts: list[tuple[int, int]]) -> list[tuple[int, list[int]]]:
        lengths = self.runner.slab.lengths
        return [(row, self.texts[row][lengths[row] : lengths[row] + count]) for row, count in counts]

    def check(self, counts: list[tuple[int, int]]) -> None:
        """Read; each piece's last token must have the logits of one fresh pass over the row's text."""
        got = self.runner.read(self.pieces(counts))
        assert (got.dtype, got.shape) == (torch.float32, (len(counts), self.runner.vocab_size))
        for (row, _), logits in zip(counts, got, strict=True):
            held = self.runner.slab.lengths[row]
            assert self.runner.slab.tokens[row] == self.texts[row][:held]
            want = self.want[row][held - 1]
            error = float((logits - want).norm() / want.norm())
            assert error < self.limit, (row, error, self.limit)


def plain_reader(name: str, dtype: torch.dtype, **options: Any) -> Reader:
    model = small(name, dtype)
    return Reader(model, copy.deepcopy(model).float(), model, **options)


@kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_architecture(name: str, dtype: torch.dtype) -> None:
    """Rows out of order, behind keys of all lengths, one token and many, one piece and all rows."""
    reader = plain_reader(name, dtype)
    for counts in READS:
        reader.check(counts)


@kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("draft", [False, True])
def test_random_pieces(draft: bool, dtype: torch.dtype) -> None:
    reader, random_ = plain_reader("qwen2", dtype, draft=draft), random.Random(4)
    slab = reader.runner.slab
    for _ in range(2 if INTERPRETED else 20):
        rows = random_.sample(range(ROWS), random_.randint(2, ROWS))
        for row in rows:
            slab.truncate(
                row, random_.randint(0, min(slab.lengths[row], LENGTH - 40))
            )  # what is behind is written over
        reader.check([(row, random_.choice((1, 2, random_.randint(3, 30)))) for row in rows])


@kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["llama-bias-llama3", "qwen3"])
def test_rounded_weights(name: str, kind: str, dtype: torch.dtype) -> None:
    model = small(name, dtype)
    own, wide = (spelt_out(model, kind, d) for d in (dtype, torch.float32))
    reader = Reader(model, wide, own, quantization=kind)
    for counts in READS[:1] if INTERPRETED else READS:
        reader.check(counts)


@kernels
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_keys_and_hidden_states_are_those_of_rows_read_one_by_one(name: str) -> None:
    model = small(name, torch.float32)
    together, alone = open_fused(model), EagerRunner(model, rows=ROWS, max_len=LENGTH)
    texts = [draw(LENGTH, row) for row in range(ROWS)]
    for runner in (together, alone):
        runner.watch([0, 1])
    for buffer in (x for layer in together.slab.layers for x in (layer.keys, layer.values)):
        buffer.fill_(7.0)
    for counts in READS[:2]:
        at = [(row, texts[row][together.slab.lengths[row] :][:count]) for row, count in counts]
        empty = together.read(at, logits=False)
        assert empty.shape == (len(counts), 0)
        for row, tokens in at:
            alone.forward(slice(row, row + 1), torch.tensor([tokens], device=DEVICE), [alone.slab.lengths[row]], keep=0)
            alone.slab.extend(row, tokens)
    assert together.slab.tokens == alone.slab.tokens
    for mine, theirs in zip(together.slab.layers, alone.slab.layers, strict=True):
        for a, b in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
            for row, held in enumerate(alone.slab.lengths):
                error = float((a[row, :, :held] - b[row, :, :held]).norm())
                assert error <= 2e-5 * float(b[row, :, :held].norm())
                assert bool((a[row, :, held:] == 7.0).all()), "written past the row's end, or into another row"


def attended(pieces: list[tuple[int, int, list[int]]], group: int, window: int | None) -> list[torch.Tensor]:
    """The attention of random queries over a random cache, piece by piece. A piece's queries follow from its tokens."""
    from headstart.machine.gpu.kernels.attention import attend
    from headstart.machine.gpu.step import Step
    from headstart.machine.gpu.tiles import attention_tile

    heads, kv, d = 2 * group, 2, 32
    t = attention_tile(d, torch.float32)
    generator = torch.Generator().manual_seed(1)
    cache = [torch.randn(ROWS, kv, 2 * LENGTH, d, generator=generator).to(DEVICE) for _ in range(2)]
    table = torch.randn(211, heads, d, generator=generator).to(DEVICE)
    packed = pack(pieces, t.packed(group)[1], torch.device(DEVICE))
    out = torch.full((len(packed.tokens), heads, d), 7.0, device=DEVICE)
    step = Step(len(pieces), 0, packed.places, packed=packed)
    attend(table[packed.tokens], (cache[0], cache[1]), out, step, window=window, t=t, pdl=0)
    return list(out.split([len(tokens) for _, _, tokens in pieces]))


@kernels
@pytest.mark.parametrize("window", [None, 13])
@pytest.mark.parametrize("group", [1, 3, 4])
def test_attention_is_the_same_to_the_bit_in_any_company(group: int, window: int | None) -> None:
    pieces = [(4, 60, draw(1, 1)), (1, 0, draw(50, 2)), (0, 31, draw(23, 3)), (5, 64, draw(64, 4))]
    together = attended(pieces, group, window)
    for order in ([2], [3, 0], [1, 3, 2]):
        for i, found in zip(order, attended([pieces[i] for i in order], group, window), strict=True):
            assert torch.equal(found, together[i])
    # Token by token: where a piece is cut changes no bit either.
    row, start, tokens = pieces[2]
    alone = [attended([(row, start + i, [token])], group, window)[0] for i, token in enumerate(tokens[:5])]
    assert torch.equal(torch.cat(alone), together[2][:5])


@kernels
@pytest.mark.skipif(INTERPRETED, reason="too large for the interpreter")
@pytest.mark.parametrize("kind", [None, "int8"])
def test_a_piece_has_the_same_bits_in_any_company_of_as_many_tokens(kind: str | None) -> None:
    """Products depend on how many tokens there are in all, and on nothing else; everything between does not."""
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    config = LlamaConfig(**SIZES | sizes | {"head_dim": 128, "num_hidden_layers": 3, "vocab_size": 32003})
    model = build_from(config, 3, DEVICE, torch.bfloat16)
    from headstart.machine.gpu.runner import FusedRunner

    runner = FusedRunner(model, rows=32, max_len=768, quantization=kind)
    slab, piece = runner.slab, draw(37, 1)

    def read(company: list[tuple[int, int, int]], at: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits, and keys of all layers, of the piece in row 7 behind 300 keys; company: (row, live keys, tokens)."""
        for row in range(32):
            slab.truncate(row, 0)
        runner.prefill(7, draw(300, 2))
        for row, live, _ in company:
            if live:
                runner.prefill(row, draw(live, row))
        pieces = [(row, draw(count, 100 + row)) for row, _, count in company]
        pieces.insert(at, (7, piece))
        logits = runner.read(pieces)
        keys = torch.stack([layer.keys[7, :, 300:337] for layer in slab.layers])
        return logits[at].clone(), keys.clone()

    companies = [
        ([(0, 0, 475)], 0),
        ([(0, 0, 475)], 1),
        ([(12, 200, 1), (3, 100, 470), (30, 0, 4)], 2),
        ([(row, 10 * row, 36 if row < 13 else 79) for row in range(1, 14) if row != 7], 5),
    ]
    for company, _ in companies:
        assert sum(count for *_, count in company) == 475
    first_logits, first_keys = read(*companies[0])
    assert bool(torch.isfinite(first_logits).all())
    for company in companies[1:] + companies[:1]:
        logits, keys = read(*company)
        assert torch.equal(keys, first_keys)
        assert torch.equal(logits, first_logits)


@kernels
@pytest.mark.skipif(INTERPRETED, reason="too large for the interpreter")
def test_more_pieces_than_decoding_has_rows() -> None:
    """More than 32 logits go through cuBLAS."""
    from headstart.machine.gpu.runner import FusedRunner

    model = build("smollm", DEVICE, torch.float32)
    runner = FusedRunner(model, rows=40, max_len=64)
    texts = [draw(1 + row % 5, row) for row in range(40)]
    got = runner.read(list(enumerate(texts)))
    for text, logits in zip(texts, got, strict=True):
        want = truth(model, text)[-1]
        assert float((logits - want).norm() / want.norm()) < 2e-5


def test_what_is_packed() -> None:
    packed = pack([(5, 7, [11, 12, 13]), (2, 0, [14])], 2, torch.device("cpu"))
    assert packed.tokens.tolist() == [11, 12, 13, 14]
    assert packed.places.tolist() == [[5, 7], [5, 8], [5, 9], [2, 0]]
    assert packed.tiles.tolist() == [[5, 7, 0, 2], [5, 9, 2, 1], [2, 0, 3, 1]]
    assert packed.last.tolist() == [2, 3]


@pytest.mark.parametrize("counts", [[1], [2, 1], [3, 7, 1], [33], [17, 16]])
def test_what_kernels_read_lies_where_they_expect_it(counts: list[int]) -> None:
    packed = pack([(row, 3, [1] * count) for row, count in enumerate(counts)], 16, torch.device("cpu"))
    assert [part.data_ptr() % 16 for part in packed] == [0] * 4
