"""Packed weights: the same numbers, used only where they may be, and never after the weights changed."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

from headstart.machine import packed_linear
from headstart.machine.packed_linear import LEAST_ROWS, MOST_ROWS, PackedLinear, lend_packed, pack
from headstart.machine.runner import EagerRunner
from headstart.testing import tiny_model

pytestmark = pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="packing is MKL's")


class Counter:
    """Counts packed products, so that a test knows which way was taken."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        real = packed_linear._product

        def product(*args):  # type: ignore[no-untyped-def]
            self.calls += 1
            return real(*args)

        monkeypatch.setattr(packed_linear, "_product", product)

    def during(self, layer: nn.Module, x: torch.Tensor) -> int:
        before = self.calls
        layer(x)
        return self.calls - before


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 200), nn.Linear(200, 17, bias=False))


@pytest.mark.parametrize("threads", [1, 2])
def test_packed_products_are_the_ordinary_ones(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = layers()
    ordinary = copy.deepcopy(model)
    assert pack(model, least_bytes=0, measure=False) == 2
    counter = Counter(monkeypatch)
    used = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode(), lend_packed():
            for rows in range(1, 2 * MOST_ROWS):
                for x in (torch.randn(rows, 48), torch.randn(48, rows).t(), torch.randn(1, rows, 48)):
                    before = counter.calls
                    torch.testing.assert_close(model(x), ordinary(x), atol=1e-5, rtol=1e-5)
                    assert (counter.calls > before) == (LEAST_ROWS <= rows <= MOST_ROWS)
    finally:
        torch.set_num_threads(used)


def test_they_are_used_only_where_they_are_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    model = layers()
    pack(model, least_bytes=0, measure=False)
    counter = Counter(monkeypatch)
    x = torch.randn(8, 48, requires_grad=True)
    assert counter.during(model, x) == 0
    model(x).sum().backward()  # outside a runner the model is an ordinary one, gradients included
    assert x.grad is not None
    with lend_packed(), torch.no_grad():
        assert counter.during(model, x) == 2


def test_changed_weights_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = Counter(monkeypatch)
    x = torch.randn(8, 48)
    changes = (
        lambda layer: layer.weight.mul_(2),
        lambda layer: layer.load_state_dict(nn.Linear(48, 200).state_dict()),
        lambda layer: setattr(layer, "weight", nn.Parameter(torch.randn(200, 48))),
    )
    for change in changes:
        model = layers()
        pack(model, least_bytes=0, measure=False)
        with torch.no_grad(), lend_packed():
            assert counter.during(model[0], x) == 1
            change(model[0])
            assert counter.during(model[0], x) == 0
            expected = nn.functional.linear(x, model[0].weight, model[0].bias)
            torch.testing.assert_close(model[0](x), expected)
        assert pack(model, least_bytes=0, measure=False) == 2
        with torch.no_grad(), lend_packed():
            assert counter.during(model[0], x) == 1, "packed anew"
            torch.testing.assert_close(model[0](x), expected, atol=1e-5, rtol=1e-5)


def test_packed_models_can_be_copied_pickled_and_saved(tmp_path: Path) -> None:
    model = layers()
    pack(model, least_bytes=0, measure=False)
    assert set(model.state_dict()) == {"0.weight", "0.bias", "1.weight"}
    x = torch.randn(8, 48)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad(), lend_packed():
            torch.testing.assert_close(other(x), model(x), atol=1e-5, rtol=1e-5)


def test_what_is_not_packed() -> None:
    assert pack(layers()) == 0, "too small to gain anything"
    assert pack(layers().double(), least_bytes=0, measure=False) == 0
    assert pack(layers().bfloat16(), least_bytes=0, measure=False) == 0
    assert pack(nn.Sequential(nn.ReLU()), least_bytes=0, measure=False) == 0
    assert pack(tiny_model("gpt2").transformer, least_bytes=0, measure=False) == 0, "Conv1D is no linear layer"

    class Own(nn.Linear):
        pass

    assert pack(Own(48, 48), least_bytes=0, measure=False) == 0
    with torch.inference_mode():
        frozen = nn.Linear(48, 48)
    assert pack(frozen, least_bytes=0, measure=False) == 0, "an inference tensor keeps no version"


def test_a_shape_that_disagrees_stays_ordinary(monkeypatch: pytest.MonkeyPatch) -> None:
    real = packed_linear._product

    def product(x, packed, weight, bias, rows):  # type: ignore[no-untyped-def]
        found = real(x, packed, weight, bias, rows)
        return found + 0.1 if weight.shape[0] == 17 and rows == 11 else found

    monkeypatch.setattr(packed_linear, "_product", product)
    model = layers()
    assert pack(model, least_bytes=0, measure=False) == 1
    assert type(model[0]) is PackedLinear
    assert type(model[1]) is nn.Linear


def test_a_packed_model_gives_the_same_logits_over_the_slab() -> None:
    model = tiny_model("llama")
    tokens = torch.randint(3, 100, (2, 5))
    expected = EagerRunner(model, rows=2, max_len=32).forward(slice(0, 2), tokens, [0, 0])
    assert pack(model, least_bytes=0, measure=False) == 15
    found = EagerRunner(model, rows=2, max_len=32).forward(slice(0, 2), tokens, [0, 0])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
