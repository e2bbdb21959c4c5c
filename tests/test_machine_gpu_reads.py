"""Captured reads of prompts, against Hugging Face's modules and against reads that are not captured.

On a GPU: ``pytest -m gpu``. Without one: in Triton's interpreter, where what would be captured is called (see
``test_machine_gpu``).
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from test_machine_gpu import CONFIGS, DEVICE, DTYPES, INTERPRETED, build, draw, kernels, truth
from test_machine_gpu_read import LENGTH, READS, ROWS, Reader, open_fused, small

NAMES = ["llama", "qwen2"] if INTERPRETED else list(CONFIGS)


def captured(model: Any, **options: Any) -> Any:
    runner = open_fused(model, **options)
    runner.capture_reads()
    return runner


def replays(runner: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes that are replayed from now on."""
    found: list[int] = []
    reads = runner._reads

    def counted(size: int, replay: Any) -> Any:
        def run() -> None:
            found.append(size)
            replay()

        return run

    monkeypatch.setattr(reads, "_replay", {size: counted(size, replay) for size, replay in reads._replay.items()})
    return found


@kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_every_architecture(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small(name, dtype)
    reader = Reader(model, copy.deepcopy(model).float(), model)
    reader.runner.capture_reads()
    sizes = replays(reader.runner, monkeypatch)
    for counts in READS:
        reader.check(counts)
    assert sizes == [32, 32, 64, 32], "a short piece alone, whose logits are wanted, is read by the kernels that decode"


@kernels
@pytest.mark.parametrize("draft", [False, True])
def test_nothing_is_written_but_what_is_read(draft: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small("qwen2", torch.float32)
    mine, theirs = captured(model, draft=draft), open_fused(model, draft=draft)
    sizes = replays(mine, monkeypatch)
    for layer in mine.slab.layers:
        layer.keys.fill_(7.0)
        layer.values.fill_(7.0)
    texts = [draw(LENGTH, row) for row in range(ROWS)]
    for counts in ([(3, 9), (5, 1)], [(3, 20), (0, 12), (1, 17)], [(2, 5)]):
        for runner in (mine, theirs):
            lengths = runner.slab.lengths
            got = runner.read([(r, texts[r][lengths[r] : lengths[r] + n]) for r, n in counts], logits=False)
            assert got.shape == (len(counts), 0)
    assert sizes == [32, 64, 32], "also a short piece alone, since nobody wants its logits"
    for a, b in zip(mine.slab.layers, theirs.slab.layers, strict=True):
        for ours, other in ((a.keys, b.keys), (a.values, b.values)):
            for row, held in enumerate(theirs.slab.lengths):
                error = float((ours[row, :, :held] - other[row, :, :held]).norm())
                assert error <= 2e-5 * float(other[row, :, :held].norm())
                assert bool((ours[row, :, held:] == 7.0).all()), "written past the row's end, or into another row"


@kernels
def test_the_end_of_a_prompt_with_guesses_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first round: logits of the last few tokens of one row."""
    model = small("llama", torch.float32)
    runner, text = captured(model), draw(50, 1)
    sizes = replays(runner, monkeypatch)
    runner.read([(4, text[:10])])
    tokens = torch.tensor([text[10:]], device=DEVICE)
    got = runner.forward(slice(4, 5), tokens, [10], keep=3)
    want = truth(model, text)[-3:]
    assert got.shape == (1, 3, runner.vocab_size)
    assert sizes == [64]
    assert float((got[0] - want).norm() / want.norm()) < 2e-5
    assert runner.forward(slice(4, 5), tokens, [10], keep=0).shape == (1, 0, runner.vocab_size)
    assert runner.forward(slice(4, 5), tokens, [10]).shape == (1, 40, runner.vocab_size), "all of them: not captured"


@kernels
def test_more_than_is_captured_is_read_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstart.machine.gpu.reads.SIZES", (32, 64))
    runner = captured(small("llama", torch.float32))
    sizes = replays(runner, monkeypatch)
    got = runner.read([(0, draw(40, 0)), (1, draw(25, 1))])
    for row, length in ((0, 40), (1, 25)):
        want = truth(runner.model, draw(length, row))[-1]
        assert float((got[row] - want).norm() / want.norm()) < 2e-5
    assert sizes == []


@kernels
def test_hidden_states_that_are_wanted_later_are_kept() -> None:
    model = small("llama", torch.float32)
    mine, theirs = captured(model), open_fused(model)
    for runner in (mine, theirs):
        runner.watch([0, 1])
        runner.read([(0, draw(9, 0)), (2, draw(30, 2))])
    a, b = mine.slab.layers[-1].keys, theirs.slab.layers[-1].keys
    assert torch.equal(a[0, :, :9], b[0, :, :9])
    assert torch.equal(a[2, :, :30], b[2, :, :30])
    mine.capture_reads()
    mine.slab.truncate(2, 0)
    a[2].zero_()
    mine.read([(2, draw(30, 2)), (3, [1])])
    assert float((a[2, :, :30] - b[2, :, :30]).norm() / b[2, :, :30].norm()) < 2e-5


@kernels
@pytest.mark.skipif(INTERPRETED, reason="sums of cuBLAS")
def test_a_captured_read_has_the_bits_of_one_as_wide() -> None:
    model = build("smollm", DEVICE, torch.bfloat16)
    mine, theirs = captured(model), open_fused(model)
    pieces = [(3, draw(30, 3)), (0, draw(34, 0))]  # 64, a size
    assert torch.equal(mine.read(pieces), theirs.read(pieces))


@kernels
def test_a_model_that_is_invariant_captures_none() -> None:
    runner = captured(small("llama", torch.float32), invariant=True)
    assert runner._reads is None
