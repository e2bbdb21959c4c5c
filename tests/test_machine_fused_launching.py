"""A layer's launches, made again for the next layers: they are the ones that the layers themselves make.

Needs Triton, but no GPU: kernels are neither compiled nor run, only their launches are looked at.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")

from test_machine_fused import CONFIGS, build  # noqa: E402
from triton_stand import Driver, forget  # noqa: E402

from headstart.machine import fused  # noqa: E402
from headstart.machine.fused.ahead import _Zeros  # noqa: E402
from headstart.machine.fused.launching import Repeats, _Launches, launch  # noqa: E402

pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is launched"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="its driver would have to be another one"),
]

Launch = tuple[str, tuple[Any, ...]]


class Compiled:
    """What Triton has of a kernel once it is compiled. It notes with what it is run."""

    function, packed_metadata = 7, ()

    def __init__(self, name: str, log: list[Launch]) -> None:
        self.name, self._log = name, log

    def launch_metadata(self, *_: Any) -> None:
        return None

    def run(self, *values: Any) -> None:
        self._log.append((self.name, tuple(x.data_ptr() if isinstance(x, Tensor) else x for x in values)))

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *values: self.run(*grid, 0, self.function, self.packed_metadata, None, None, None, *values)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launch]]:
    """All launches: which kernel, and with what. A tensor is its address."""
    found: list[Launch] = []

    def compiled(self: Any, key: str, signature: Any, device: int, *_: Any) -> Compiled:
        made = Compiled(f"{self.__name__} {key}", found)
        self.device_caches[device][0][key] = made
        return made

    monkeypatch.setattr(triton.runtime.driver, "_active", Driver())
    monkeypatch.setattr(triton.JITFunction, "_do_compile", compiled)
    monkeypatch.setattr(fused, "available", lambda: None)
    yield found
    from headstart.machine.fused import kernels_attention, kernels_draft, kernels_matmul, kernels_pointwise

    # What was never compiled must not be found.
    forget(kernels_attention, kernels_draft, kernels_matmul, kernels_matmul.stream, kernels_pointwise)


def fixed(model: Any) -> set[int]:
    """Where everything lies that a forward does not make anew."""
    tensors = [x for layer in model.weights.layers for x in (*layer.tensors, layer.input_norm)]
    tensors += [buffer[row] for pair in model.cache for buffer in pair for row in range(len(buffer))]
    return {x.data_ptr() for x in (*tensors, model.weights.norm)}


@torch.inference_mode()
def launches(model: Any, log: list[Launch], rows: int, width: int, first: int) -> list[Launch]:
    """The launches of a forward, with a 0 in place of what it makes anew."""
    log.clear()
    known, tokens = fixed(model), torch.zeros(rows, width, dtype=torch.int64)
    with _Zeros():  # type: ignore[no-untyped-call]
        model.forward(tokens, torch.zeros(rows, dtype=torch.int64), first_row=first)

    def told(x: Any) -> Any:
        address = isinstance(x, int) and x > 1 << 24
        return 0 if address and x not in known else None if callable(x) else x

    return [(name, tuple(told(x) for x in values)) for name, values in log]


@pytest.mark.parametrize("rounding", [None, "int8", "int4"])
@pytest.mark.parametrize("name", list(CONFIGS))
def test_they_are_the_layers_own(
    name: str, rounding: str | None, log: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    if rounding == "int4" and CONFIGS[name].intermediate_size % 32:
        pytest.skip("4-bit weights come in groups of 32")
    model = fused.fuse(build(name, dtype=torch.bfloat16), rows=3, capacity=640, draft=True, quantization=rounding)
    shapes = [(1, 1, 0), (1, 1, 2), (1, 2, 1), (2, 9, 1), (3, 1, 0), (3, 8, 0)]
    made_again = []
    again = _Launches.again
    monkeypatch.setattr(_Launches, "again", lambda *given: (made_again.append(given), again(*given))[1])
    repeated = [launches(model, log, *shape) for shape in shapes]
    kinds = {layer.kind for layer in model.weights.layers[1:]}
    assert len(made_again) == (3 - len(kinds)) * len(shapes) > 0
    calls = []
    monkeypatch.setattr(Repeats, "do", lambda self, kind, work, own: (calls.append(kind), work()))
    own = [launches(model, log, *shape) for shape in shapes]
    assert repeated == own
    assert len(calls) == 3 * len(shapes)  # of four layers
    used = {x for one in own for _, values in one for x in values}
    weights = {x.data_ptr() for layer in model.weights.layers for x in layer.tensors}
    assert weights <= used  # else a wrong layer's weights would not be noticed


class Kernel:
    """Adds its arguments' addresses to a list."""

    arg_names = ("a", "b", "n", "SIZE")

    def __init__(self, log: list[Launch]) -> None:
        self.compiled: Any = Compiled("kernel", log)
        self.asked = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            self.asked += 1
            if self.compiled is not None:
                self.compiled[*grid, 1, 1](*args, options["SIZE"])
            return self.compiled

        return run


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> tuple[Kernel, list[Launch]]:
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver())
    log: list[Launch] = []
    return Kernel(log), log


def play(kernel: Kernel, layers: list[Tensor], shared: Tensor) -> None:
    repeats = Repeats()
    for layer in layers:
        repeats.do("layer", lambda layer=layer: launch(kernel, (5,), layer, shared, 3, SIZE=16, num_warps=4), [layer])


def test_other_tensors_stand_in_their_places(kernel: tuple[Kernel, list[Launch]]) -> None:
    made, log = kernel
    layers, shared = [torch.zeros(32) for _ in range(3)], torch.zeros(32)
    play(made, layers, shared)
    assert made.asked == 1
    assert [values[-4:] for _, values in log] == [(x.data_ptr(), shared.data_ptr(), 3, 16) for x in layers]
    assert {values[:-4] for _, values in log} == {(5, 1, 1, 0, 7, (), None, None, None)}


def test_what_lies_at_an_odd_address_is_launched_as_ever(kernel: tuple[Kernel, list[Launch]]) -> None:
    made, log = kernel
    memory = torch.zeros(64)
    layers = [torch.zeros(32), memory[1:33], torch.zeros(32)]
    play(made, layers, torch.zeros(32))
    assert made.asked == 2
    assert [values[9] for _, values in log] == [x.data_ptr() for x in layers]


def test_kernels_that_are_not_compiled_are_asked_for_each_time(kernel: tuple[Kernel, list[Launch]]) -> None:
    made, _ = kernel
    made.compiled = None
    play(made, [torch.zeros(32) for _ in range(3)], torch.zeros(32))
    assert made.asked == 3


def test_a_tensor_inside_another_is_not_taken_for_a_fixed_one(kernel: tuple[Kernel, list[Launch]]) -> None:
    made, log = kernel
    layers, repeats = [torch.zeros(64) for _ in range(2)], Repeats()
    for layer in layers:
        work = lambda layer=layer: launch(made, (5,), layer, layer[32:], 3, SIZE=16)  # noqa: E731
        repeats.do("layer", work, [layer])
    assert made.asked == 2
    assert [values[9:11] for _, values in log] == [(x.data_ptr(), x.data_ptr() + 128) for x in layers]
