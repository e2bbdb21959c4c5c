"""A layer's launches, made again for the next layers: they are the ones that the layers themselves make.

Needs Triton, but no GPU: kernels are neither compiled nor run, only their launches are looked at.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")

from test_machine_gpu import CONFIGS, build  # noqa: E402
from triton_stand import forget, stand_in  # noqa: E402

from headstart.machine import gpu  # noqa: E402
from headstart.machine.gpu.compile.launching import Repeats, _Launches, launch  # noqa: E402
from headstart.machine.gpu.compile.precompile import _Zeros  # noqa: E402

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

    def compiled(*, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:  # Triton's hook and its names
        made = Compiled(f"{fn.jit_function.__name__} {key}", found)
        fn.jit_function.device_caches[compile["device"]][0][key] = made
        return True  # do not compile now: from the next launch on it is there

    stand_in(monkeypatch)
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", compiled)
    monkeypatch.setattr(gpu, "available", lambda: None)
    yield found
    from headstart.machine.gpu.kernels import attention as kernels_attention
    from headstart.machine.gpu.kernels import dequant as rounded
    from headstart.machine.gpu.kernels import draft as kernels_draft
    from headstart.machine.gpu.kernels import matmul as kernels_matmul
    from headstart.machine.gpu.kernels import pointwise as kernels_pointwise

    # What was never compiled must not be found.
    forget(kernels_attention, kernels_draft, kernels_matmul, kernels_matmul.stream, kernels_pointwise, rounded)


def fixed(model: Any) -> set[int]:
    """Where everything lies that a forward does not make anew."""
    tensors = [x for layer in model.weights.layers for x in (*layer.tensors, layer.input_norm)]
    tensors += [buffer[row] for pair in model.cache for buffer in pair for row in range(len(buffer))]
    return {x.data_ptr() for x in (*tensors, model.weights.norm)}


def launches(model: Any, log: list[Launch], rows: int, width: int, first: int) -> list[Launch]:
    """The launches of a forward."""
    tokens, lengths = torch.zeros(rows, width, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64)
    return launched(model, log, partial(model.forward, tokens, lengths, first_row=first))


@torch.inference_mode()
def launched(model: Any, log: list[Launch], work: Callable[[], Any]) -> list[Launch]:
    """What it launches, with a 0 in place of what it makes anew."""
    log.clear()
    known = fixed(model)
    with _Zeros():  # type: ignore[no-untyped-call]
        work()

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
    model = gpu.fuse(build(name, dtype=torch.bfloat16), rows=3, capacity=640, draft=True, quantization=rounding)
    shapes = [(1, 1, 0), (1, 1, 2), (1, 2, 1), (2, 9, 1), (3, 1, 0), (3, 8, 0)]
    for shape in shapes:
        launches(model, log, *shape)  # every kernel is there now
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


@pytest.mark.parametrize("rounding", [None, "int8", "int4"])
@pytest.mark.parametrize("name", ["llama-bias-llama3", "mistral", "qwen2", "qwen3"])
def test_between_a_prompts_products_they_are_the_layers_own(
    name: str, rounding: str | None, log: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one row, of several rows that are equally long, and of pieces of any rows."""
    model = gpu.fuse(build(name, dtype=torch.bfloat16), rows=3, capacity=640, quantization=rounding)
    works: list[Callable[[], list[Launch]]] = [
        partial(launches, model, log, *shape) for shape in ((1, 70, 2), (2, 20, 1))
    ]
    for pieces in ([(2, 4, [0] * 40), (0, 9, [0])], [(1, 0, [0] * 33)]):
        works.append(partial(launched, model, log, partial(model.read, pieces)))
    for work in works:
        work()  # every kernel is there now
    made_again: list[Any] = []
    again = _Launches.again
    monkeypatch.setattr(_Launches, "again", lambda *given: (made_again.append(given), again(*given))[1])
    repeated = [work() for work in works]
    # Of four layers: seven norms behind a sum, four times the heads (in kinds), four times the gates.
    between = 6 + 4 - len({layer.kind for layer in model.weights.layers}) + 3
    spelt_out = 0 if rounding is None else 4 * 2
    assert len(made_again) >= len(works) * (between + spelt_out)
    monkeypatch.setattr(Repeats, "do", lambda self, kind, work, own: work())
    own = [work() for work in works]
    assert repeated == own
    used = {x for _, values in own[2] for x in values}
    gains = {x.data_ptr() for layer in model.weights.layers for x in (layer.input_norm, layer.post_norm)}
    assert gains | {x.data_ptr() for pair in model.cache for x in pair} <= used


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("draft", [False, True])
@pytest.mark.parametrize(("name", "rounding"), [("smollm", None), ("qwen2", None), ("llama", "int8")])
def test_nothing_is_compiled_while_prompts_are_read(
    name: str, rounding: str | None, draft: bool, watched: bool, log: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    from headstart.engine.captured import CapturedRounds
    from headstart.engine.warm_up import rehearse
    from headstart.machine.gpu.runner import FusedRunner

    runner = FusedRunner(
        build(name, dtype=torch.bfloat16), rows=36, max_len=96, margin=40, draft=draft, quantization=rounding
    )
    if watched:
        runner.watch([0, 1])
    asked: list[str] = []
    compiled = triton.JITFunction._do_compile
    monkeypatch.setattr(
        triton.JITFunction, "_do_compile", lambda *given: (asked.append(given[0].__name__), compiled(*given))[1]
    )
    rounds = CapturedRounds(runner, None, vocab_size=211, lengths=(0,))
    with torch.inference_mode(), _Zeros():  # type: ignore[no-untyped-call]
        rehearse(rounds)
    assert "_attend_kernel" in asked
    assert runner.slab.lengths == [0] * 36
    asked.clear()
    random_ = random.Random(2)
    for count in (1, 1, 1, 2, 2, 3, 5, 8, 9, 16, 17, 32, 33, 36):
        for row in range(36):
            runner.slab.truncate(row, 0)
        for _ in range(2):  # behind nothing, and behind what the first read
            rows = random_.sample(range(36), count)
            with _Zeros():  # type: ignore[no-untyped-call]
                pieces = [(row, [0] * random_.choice((1, 2, random_.randint(3, 48)))) for row in rows]
                runner.read(pieces, logits=random_.random() < 0.5)  # a draft needs none
    for length in (33, 34, 40, 41, 48, 64, 79):  # one by itself, longer than the kernels that decode take
        runner.slab.truncate(0, 0)
        with _Zeros():  # type: ignore[no-untyped-call]
            runner.read([(0, [0] * length)], logits=bool(length % 2))
    assert asked == []


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
    stand_in(monkeypatch)
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
