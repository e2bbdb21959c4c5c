"""Rounded weights on the fused kernels, against Hugging Face modules that hold the same rounded weights as floats.

On a GPU: ``pytest -m gpu``. Without one: in Triton's interpreter (see ``test_machine_gpu``), and the rounding itself.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_machine_gpu import CONFIGS, DEVICE, DTYPES, INTERPRETED, SIZES, Rig, build, draw, kernels, truth
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from headstart.machine import gpu
from headstart.machine.gpu.compile.precompile import rehearsal
from headstart.machine.gpu.tiles import Tile
from headstart.machine.lower import lower, why_not
from headstart.machine.quantize import Matrix, rounded

KINDS = ["int8", "int4"]


def spelt_out(model: Any, kind: str, dtype: torch.dtype) -> Any:
    """A copy of the model whose own modules hold the rounded weights, as floats of ``dtype``."""
    copied = copy.deepcopy(model)
    head = rounded(copied.lm_head.weight.data, "int8").floats(dtype)
    for p in copied.parameters():
        p.data = p.data.to(dtype)
    for small, big in zip(lower(model, kind).layers, lower(copied).layers, strict=True):
        for name in ("qkv", "o", "gate_up", "down"):
            getattr(big, name).data.copy_(getattr(small, name).floats(dtype))
    copied.lm_head.weight = nn.Parameter(head)  # a tied one is tied no more
    return copied


class RoundedRig(Rig):
    """``played``: False if nothing is to be compared, and only the kernels are wanted."""

    def __init__(
        self, name: str, kind: str, dtype: torch.dtype, *, rows: int = 3, draft: bool = False, played: bool = True
    ) -> None:
        self.model = build(name, DEVICE, dtype)
        self.fused = gpu.fuse(self.model, rows=rows, capacity=160, draft=draft, quantization=kind)
        self.texts = [draw(160, row) for row in range(rows)]
        self.played = played
        if played:
            own, wide = (spelt_out(self.model, kind, d) for d in (dtype, torch.float32))
            self.want = [truth(wide, text) for text in self.texts]
            gaps = [float((truth(own, t) - w).norm() / w.norm()) for t, w in zip(self.texts, self.want, strict=True)]
            self.limit = max(2e-5, 1.5 * max(gaps))

    def check_rows(self, starts: list[int], width: int, **options: Any) -> None:
        if self.played:
            super().check_rows(starts, width, **options)
        else:
            self.feed(starts, width, **options)


def several(rig: RoundedRig) -> None:
    """The wide path, ragged steps of several tokens, and of one."""
    rig.check_rows([0, 0, 0], 20, keep=3)
    rig.check_rows([20, 13, 6], 9)
    rig.check_rows([25, 22, 15], 1)
    rig.check_rows([26], 5)


def drafting(rig: RoundedRig) -> None:
    """A draft's ways: steps of one token or two, alone and side by side."""
    rig.check_rows([0, 0, 0], 70, keep=1)
    rig.check_rows([70], 1, bound=128)
    rig.check_rows([71], 2, bound=128)
    rig.check_rows([71, 33, 64], 1)
    rig.small_chunks()
    rig.check_rows([73], 1)


def the_same_bits(rig: RoundedRig) -> None:
    rig.small_chunks()
    rig.feed([0, 0], 60, keep=0)
    together = rig.feed([60, 50], 8)  # 16 tokens
    for i in range(8):
        assert torch.equal(rig.feed([60 + i], 1)[0, 0], together[0, i])
    assert torch.equal(rig.feed([60, 50], 1)[:, 0], together[:, 0])


PLAYS: list[tuple[Callable[[RoundedRig], None], list[str], dict[str, Any]]] = [
    (several, ["smollm", "llama-bias-llama3", "qwen3", "phi3-partial"], {}),
    (drafting, ["smollm", "phi3", "mistral"], {"draft": True}),
    (the_same_bits, ["smollm"], {"rows": 2}),
]


@pytest.fixture(scope="module")
def compiled() -> None:
    """All kernels of the rigs below, compiled at once: most of the time on a GPU would be spent with that."""
    if INTERPRETED:
        return
    with torch.inference_mode(), rehearsal():
        for play, names, options in PLAYS:
            for name in names:
                for kind in KINDS:
                    for dtype in DTYPES:
                        play(RoundedRig(name, kind, dtype, played=False, **options))


@kernels
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("play", "name", "options"),
    [pytest.param(p, name, options, id=f"{p.__name__}-{name}") for p, names, options in PLAYS for name in names],
)
def test_rounded_models(
    play: Callable[[RoundedRig], None], name: str, options: dict[str, Any], kind: str, dtype: torch.dtype
) -> None:
    play(RoundedRig(name, kind, dtype, **options))


@kernels
@pytest.mark.parametrize("kind", [None, *KINDS])
def test_tiles_that_share_their_inputs_change_no_bit(kind: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """One, three or five tiles at a time, for one tile or several a program, past the last row too."""
    from headstart.machine.gpu.kernels import matmul as kernels_matmul

    monkeypatch.setattr(kernels_matmul, "PROGRAMS", 2)
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(100, 256, generator=generator) / 16
    matrix = Matrix(weight.to(DEVICE)) if kind is None else rounded(weight.to(DEVICE), kind)
    x, gain = (torch.randn(n, generator=generator).to(DEVICE) for n in (3 * 256, 100))
    x, first = x.view(3, 256), torch.randn(3, 100, generator=generator).to(DEVICE)
    squares = x.square().sum(1, keepdim=True)
    product = x @ matrix.floats(torch.float32).T
    normed = product / x.square().mean(1, keepdim=True).sqrt()
    want = [normed, first + product, torch.nn.functional.silu(normed[:, :50]) * normed[:, 50:]]
    tile = Tile(rows=8, depth=128 if kind == "int4" else 64, slices=4, warps=4, stages=2, prefetch=0)
    found = []
    for together in (1, 3, 5):
        t = replace(tile, together=together)
        out, residual, scaled, hidden = torch.zeros_like(first), first.clone(), first.clone(), first[:, :50].clone()
        parts = torch.zeros(3, 13, device=DEVICE)
        kernels_matmul.matmul(x, matrix, out, t, bias=None, squares=squares, eps=0.0, pdl=0)
        to = kernels_matmul.Residual(residual, gain, scaled, parts)
        kernels_matmul.matmul_residual(x, matrix, to, t, bias=None, pdl=0)
        kernels_matmul.matmul_swiglu(x, matrix, hidden, t, squares=squares, eps=0.0, pdl=0)
        found.append([out, residual, hidden, scaled, parts])
    for a, b in zip(found[0], want, strict=False):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@kernels
@pytest.mark.skipif(INTERPRETED, reason="too large for the interpreter")
@pytest.mark.parametrize("kind", KINDS)
def test_large_matrices_are_streamed_to_the_same_bits_again_and_again(kind: str) -> None:
    sizes = {"hidden_size": 2560, "intermediate_size": 6912, "num_attention_heads": 20, "num_key_value_heads": 4}
    torch.manual_seed(0)
    with torch.device(DEVICE):
        config = LlamaConfig(**SIZES | sizes | {"head_dim": 128, "num_hidden_layers": 4, "vocab_size": 30011})
        model = AutoModelForCausalLM.from_config(config).eval()
    for p in model.parameters():
        p.data = p.data.to(torch.bfloat16)
    own, wide = (spelt_out(model, kind, d) for d in (torch.bfloat16, torch.float32))
    twin = gpu.fuse(model, rows=32, capacity=320, quantization=kind)
    text = draw(273, 5)
    start, tokens = torch.tensor([256], device=DEVICE), torch.tensor([text], device=DEVICE)
    twin.forward(tokens[:, :256], start - 256, keep=0)
    together = twin.forward(tokens[:, 256:272], start).clone()
    want = truth(wide, text[:272])[256:]
    limit = 1.5 * float((truth(own, text[:272])[256:] - want).norm() / want.norm())
    assert float((together[0] - want).norm() / want.norm()) < limit
    for _ in range(8):
        for width in (1, 2, 8, 9, 16):
            assert torch.equal(twin.forward(tokens[:, 256 : 256 + width], start)[0], together[0, :width])
    many = twin.forward(tokens[:, 256:257].expand(32, 1).contiguous(), start.expand(32).contiguous())
    assert float((many[0] - want[:1]).norm() / want[:1].norm()) < 2 * limit


@kernels
@pytest.mark.parametrize("kind", KINDS)
def test_a_rounded_runner(kind: str) -> None:
    """Over the slab, with its modules' weights given back; hidden states for a head are there all the same."""
    from headstart.machine.gpu.runner import FusedRunner

    model = build("smollm", DEVICE, torch.float32)
    text = draw(40, 3)
    want = truth(spelt_out(model, kind, torch.float32), text)
    runner = FusedRunner(model, rows=2, max_len=64, quantization=kind, release=True)
    last = runner.prefill(0, text[:35])
    assert float((last[0, 0] - want[34]).norm() / want[34].norm()) < 2e-5
    got = runner.forward(slice(0, 1), torch.tensor([text[35:]], device=DEVICE), [35])
    assert float((got[0] - want[35:]).norm() / want[35:].norm()) < 2e-5
    runner.slab.truncate(0, 0)
    runner.watch([0])
    runner.prefill(0, text[:35])
    assert float(runner.features(0, 0, 35).norm()) > 0


# -- the rounding itself, without a GPU -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "step"), [("int8", 2 / 254), ("int4", 2 / 15)])
def test_no_weight_moves_by_more_than_half_a_step(kind: str, step: float, dtype: torch.dtype) -> None:
    weight = (torch.rand(9000, 64, generator=torch.Generator().manual_seed(0)) * 2 - 1).to(dtype)
    weight[5] = 0
    matrix = rounded(weight, kind)
    assert matrix.shape == weight.shape
    loss = (matrix.floats(torch.float32) - weight.float()).abs()
    assert float(loss.max()) < step / 2 * (1.01 if dtype == torch.float32 or kind == "int8" else 1.15)
    assert float(loss[5].max()) == 0
    assert matrix.bytes < weight.numel() * (1.1 if kind == "int8" else 0.76)


def test_weights_of_q4_1_blocks_are_these_blocks_again() -> None:
    generator = torch.Generator().manual_seed(1)
    q = torch.randint(0, 16, (50, 4, 32), generator=generator)
    q[..., 0], q[..., 9] = 0, 15  # a block that llama.cpp makes uses its whole range
    scale, minimum = torch.rand(50, 4, 1, generator=generator).half(), -torch.rand(50, 4, 1, generator=generator).half()
    weight = (q * scale.float() + minimum.float()).view(50, 128)
    matrix = rounded(weight, "int4")
    assert torch.allclose(matrix.floats(torch.float32), weight, rtol=0, atol=3e-7)
    low = matrix.data.view(50, 4, 16) & 15
    assert torch.equal(torch.cat([low, matrix.data.view(50, 4, 16) >> 4], dim=2), q.to(torch.uint8))


@pytest.mark.parametrize("name", ["smollm", "phi3", "qwen2"])
@pytest.mark.parametrize("kind", KINDS)
def test_lowering_to_few_bits_gives_memory_back(name: str, kind: str) -> None:
    model = build(name)
    whole = lower(copy.deepcopy(model))
    kept = lower(model, kind)
    assert truth(model, draw(9, 1)).isfinite().all()  # the modules are as they were
    small = lower(model, kind, release=True)
    assert small.step_bytes < whole.step_bytes * (0.28 if kind == "int8" else 0.27)  # against float32
    assert sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear)) == 0
    assert torch.equal(small.embedding, whole.embedding)
    assert torch.equal(small.layers[1].down.floats(torch.float32), kept.layers[1].down.floats(torch.float32))
    assert (small.head.bits, small.layers[0].o.bits) == (8, int(kind[3:]))
    assert small.bytes == small.step_bytes + 4 * small.embedding.numel()


def test_floats_are_no_rounded_matrix() -> None:
    weight = torch.randn(4, 32)
    assert Matrix(weight).bits == 16
    assert torch.equal(Matrix(weight).floats(torch.float32), weight)
    assert Matrix(weight).bytes == 4 * 32 * 4


def test_widths_that_do_not_divide_into_groups_are_refused() -> None:
    model = build("llama-no-groups")  # 176 feed-forward units
    assert why_not(model, "int8") is None
    assert "groups of 32" in str(why_not(model, "int4"))
    assert set(CONFIGS) - {n for n in CONFIGS if why_not(build(n), "int4") is None} == {"llama-no-groups"}
