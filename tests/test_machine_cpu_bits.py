"""One model, one text: the kernels give the same bits with every instruction set, whoever compiled them."""

from __future__ import annotations

import ctypes
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from test_machine_cpu import FAMILIES, TEXT, packed_matrix, product, runner
from test_machine_cpu_head import CONFIG, embedding, net, text
from test_machine_cpu_sampling import SETTINGS, logits, warp_of
from torch import Tensor

from headstart import LLM, SamplingParams
from headstart.machine.cpu import build
from headstart.machine.cpu.head import HeadKernel
from headstart.machine.cpu.library import declared, instructions
from headstart.machine.cpu.sampling import knobs_of, vocab_ops_for
from headstart.machine.kvcache import Slab
from headstart.maths import noise
from headstart.maths.tree import Topology
from headstart.maths.vocab_ops import DraftedChain
from headstart.testing import tiny_model

pytestmark = pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not()))

#: What is compared with ``native``. "plain" has no fused multiply-add of the processor's.
OTHERS = [level for level in build.ISAS if level != "native"]


@pytest.fixture(params=OTHERS)
def level(request: pytest.FixtureRequest) -> str:
    """Compiled when the first test needs it, not while tests are collected."""
    if (reason := build.why_not(request.param)) is not None:
        pytest.skip(reason)
    return str(request.param)


@pytest.fixture
def on(level: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs something on ``native``, and again with the other instruction set."""

    def both(work: Any) -> tuple[Any, Any]:
        found = []
        for name in ("native", level):
            monkeypatch.setenv("HEADSTART_CPU_ISA", name)
            found.append(work())
        return found[0], found[1]

    return both


def same(a: Tensor, b: Tensor) -> bool:
    """To the last bit; zero and minus zero differ."""
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


def test_the_sets_are_different_code(level: str) -> None:
    assert instructions(level) in {"plain": ("plain", "NEON"), "avx2": ("AVX2",)}[level]


@pytest.mark.parametrize("kind", ["int8", "int4", "float32", "bfloat16", "float16"])
def test_products(kind: str, level: str) -> None:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(80, 256, generator=generator) * torch.logspace(-12, 3, 80)[:, None]
    x = torch.randn(13, 256, generator=generator) * torch.logspace(-9, 9, 13)[:, None]
    (native, memory), (other, other_memory) = (packed_matrix(weight, kind, name) for name in ("native", level))
    assert torch.equal(memory, other_memory), "packed alike"
    assert same(product(native, x, "native"), product(other, x, level))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["int8", "int4", "float32"])
def test_logits_of_chains_and_trees(family: str, kind: str, on: Any) -> None:
    def work() -> Tensor:
        r = runner(family, kind)
        parts = [r.forward(slice(0, 1), torch.tensor([TEXT[:17]]), [0])]
        tree = Topology.of([(-1, -1, 1, 0, 2)], r.device)
        parts.append(r.forward(slice(0, 1), torch.tensor([[TEXT[17], 77, *TEXT[18:20], 78, 3]]), [17], tree))
        parts += [r.forward(slice(0, 1), torch.tensor([[token]]), [17 + i]) for i, token in enumerate(TEXT[17:])]
        return torch.cat(parts, dim=1)

    assert same(*on(work))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["int8", "int4", "float32"])
def test_logits_of_rows_read_together(family: str, kind: str, on: Any) -> None:
    def work() -> Tensor:
        r = runner(family, kind)
        parts = [r.read([(2, TEXT[:17]), (0, TEXT[5:14])]), r.read([(1, TEXT[:1]), (0, TEXT[14:]), (2, TEXT[17:20])])]
        parts.append(r.read([(1, TEXT + TEXT[::-1])]))  # long enough for its queries to share keys
        return torch.cat(parts)

    assert same(*on(work))


@pytest.mark.parametrize("kind", ["int8", "float32"])
def test_drafts_of_a_head(kind: str, on: Any) -> None:
    tokens, features = text(40)
    params = [SamplingParams(temperature=0.9, top_p=0.9), SamplingParams(temperature=1.3, top_k=20)]

    def work() -> tuple[Any, Tensor, Tensor, Tensor]:
        served = HeadKernel(net(), Slab(3, 256), embedding(), threads=2, kind=kind)
        for row in range(3):
            served.remember(row, 0, tokens[: 20 + row], features[: 19 + row])
        read = served.read([20, 21, 22], [tokens[20:], tokens[21:], tokens[22:]], [features[i:] for i in (19, 20, 21)])
        kept = read.clone()
        q = torch.zeros(3, 5, CONFIG.target_vocab)
        rules = ("block", "token", "coupled")
        knobs = [knobs_of(params[i % 2], rule, seed=5 + i, base=40) for i, rule in enumerate(rules)]
        feed = [tokens[20:], tokens[21:], tokens[22:]]
        chains = served.chains(
            [20, 21, 22], feed, [features[i:] for i in (19, 20, 21)], [5, 5, 5], temperature=1.1, knobs=knobs, q=q
        )
        return chains, kept, served.step([40] * 3, [chain[0] for chain in chains]).clone(), q

    native, other = on(work)
    assert native[0] == other[0]
    assert all(same(a, b) for a, b in zip(native[1:], other[1:], strict=True))


@pytest.mark.parametrize("size", [211, 5003])
def test_distributions_and_draws(size: int, on: Any) -> None:
    settings = [SETTINGS[name] for name in SETTINGS]
    rows = len(settings)
    x = logits(rows, size)
    words = noise.keys(noise.seeds(list(range(rows)), "cpu"), torch.arange(rows), 0, noise.COUPLED)

    def work() -> tuple[Tensor, Tensor]:
        return vocab_ops_for(2).drawn(x, warp_of(settings, size), words)

    native, other = on(work)
    assert same(native[0], other[0])
    assert torch.equal(native[1], other[1])


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
def test_verdicts(rule: Any, on: Any) -> None:
    x, near = logits(5, 997), logits(4, 997) + 0.3 * logits(4, 998)[:, :997]
    q = near.softmax(-1)

    def work() -> list[tuple[int, int]]:
        judged, found = vocab_ops_for(2).judged, []
        assert judged is not None
        for seed in range(200):
            words = noise.keys(noise.seeds([seed], "cpu"), torch.tensor([9]), torch.arange(1, 5)[None], noise.DRAFT)
            tokens = noise.race(q[None], words)[0].tolist()
            params = SamplingParams(temperature=0.7, top_p=0.95, verification=rule)
            found.append(judged(x, DraftedChain(params, rule, seed, [0] * 9, 9, tokens, q)))
        return found

    native, other = on(work)
    assert native == other
    assert len(set(native)) > 20


def test_texts(on: Any) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    target, draft = (tiny_model("qwen3", head_dim=32, **sizes, num_hidden_layers=n) for n in (3, 1))
    base: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True}
    params = [
        SamplingParams(temperature=0, **base),
        SamplingParams(seed=4, **base),
        SamplingParams(seed=4, verification="coupled", top_p=0.9, **base),
    ]

    def work() -> list[Any]:
        llm = LLM(target, draft, gamma=3, max_rows=3, max_model_len=64, quantization="int4")
        return [c.token_ids for c in llm.generate([[5, 6, 7]] * 3, params)]

    native, other = on(work)
    assert native == other


def test_rounding_once_without_the_instruction(tmp_path: Path) -> None:
    """fma(a, b, c) by way of doubles against the C library's: numbers of all sizes, near cancellation, broken ones."""
    source = tmp_path / "once.cpp"
    source.write_text(
        '#include "core.h"\n'
        "HS_API void once(const float* a, const float* b, const float* c, float* to, int n) {\n"
        "    for (int i = 0; i < n; i += hs::LANES)\n"
        "        hs::store(to + i, hs::fma(hs::load(a + i), hs::load(b + i), hs::load(c + i)));\n"
        "}\n"
        "HS_API void wanted(const float* a, const float* b, const float* c, float* to, int n) {\n"
        "    for (int i = 0; i < n; i++) to[i] = __builtin_fmaf(a[i], b[i], c[i]);\n"
        "}\n"
    )
    made = tmp_path / "once.so"
    command = [*(build._compiler() or []), *build.OPTIONS, "-I", str(build.SOURCES), str(source), "-o", str(made)]
    assert os.spawnvp(os.P_WAIT, command[0], command) == 0
    library, n = ctypes.CDLL(str(made)), 1 << 20
    generator = torch.Generator().manual_seed(5)
    bits = torch.randint(-(2**31), 2**31, (3, n), generator=generator, dtype=torch.int64).to(torch.int32)
    near = torch.randn(3, n, generator=generator)
    near[2] = -(near[0] * near[1]) * (1 + torch.randn(n, generator=generator) * 1e-7)
    for a, b, c in (bits.view(torch.float32), near, near * 1e-20, torch.cat([near[:2] * 1e-10, near[2:] * 1e-30])):
        found, wanted = torch.empty(n), torch.empty(n)
        for name, to in (("once", found), ("wanted", wanted)):
            pointers = [ctypes.c_void_p(t.contiguous().data_ptr()) for t in (a, b, c, to)]
            getattr(library, name)(*pointers, n)
        broken = wanted.isnan()
        assert bool(found[broken].isnan().all())
        assert same(found[~broken], wanted[~broken])


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ziglang") is None, reason="ziglang is not installed")
@pytest.mark.parametrize("level", ["native", "plain"])
def test_another_compiler_gives_the_same_bits(level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADSTART_CPU_ISA", level)
    r, pieces = runner("qwen3", "int4"), [(2, TEXT[:17]), (1, TEXT[3:9])]
    expected = torch.cat([r.forward(slice(0, 1), torch.tensor([TEXT]), [0])[0], r.read(pieces)])
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(build, "COMPILERS", ())
    library = ctypes.CDLL(str(build.compiled(level)))
    for name in ("headstart.machine.cpu.runner.kernels", "headstart.machine.cpu.packed.kernels"):
        monkeypatch.setattr(name, lambda: declared(library))
    r = runner("qwen3", "int4")
    assert same(torch.cat([r.forward(slice(0, 1), torch.tensor([TEXT]), [0])[0], r.read(pieces)]), expected)
