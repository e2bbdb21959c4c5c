"""One visit to a GPU: are the fused kernels right, and how near to the memory's speed are they?

    PYTHONPATH=src python benchmarks/gpu_kernels.py [--out FOLDER] [--only bandwidth,matmul,...]

Prints a table for each part and saves everything as JSON. A part that fails says so and the others go on.
Every time is the median of replays of a captured CUDA graph that walks over more memory than the L2 cache holds.
"""

from __future__ import annotations

import argparse
import statistics
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import as_json

from headstart.lab.grow import SHAPES, Shape
from headstart.machine.gpu.kernels import matmul as km
from headstart.machine.gpu.kernels import sampling as ks
from headstart.machine.gpu.kernels.attention import attend
from headstart.machine.gpu.kernels.heads import Heads
from headstart.machine.gpu.step import Step
from headstart.machine.gpu.tiles import AttentionTile, Tile, tile
from headstart.machine.quantize import Matrix
from headstart.maths import noise as draws

SMOL = Shape(layers=30, hidden=576, ffn=1536, heads=9, kv_heads=3, head_dim=64)
SIZES = {"8b": SHAPES["llama-3-8b"], "135m": SMOL, "32b": SHAPES["qwen2.5-32b"]}
VOCAB = 49152
BF16 = torch.bfloat16
EPS = 1e-5
RESULT: dict[str, Any] = {}
BANDWIDTH = 4.18e12  # bytes a second; replaced by what ``bandwidth`` measures


def say(text: str) -> None:
    print(text, flush=True)


def capture(body: Callable[[], object]) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        body()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    return graph


def seconds(body: Callable[[], object], *, replays: int = 15, captured: bool = True) -> float:
    """Median time of one run of ``body``."""
    run = capture(body).replay if captured else body
    for _ in range(3):
        run()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return statistics.median(times)


def noise(*shape: int, std: float = 1.0) -> torch.Tensor:
    return torch.empty(*shape, device="cuda", dtype=BF16).normal_(0, std)


# -- single kernels ---------------------------------------------------------------------------------------------------


def matrices(name: str) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of each matrix of a size."""
    s = SIZES[name]
    return {
        "qkv": ((s.heads + 2 * s.kv_heads) * s.head_dim, s.hidden),
        "o": (s.hidden, s.heads * s.head_dim),
        "gate_up": (2 * s.ffn, s.hidden),
        "down": (s.hidden, s.ffn),
        "head": (VOCAB, s.hidden),
    }


class Chain:
    """One kind of product over several different weight matrices, one after another, as the layers of a model do."""

    def __init__(self, size: str, kind: str, rows: int, copies: int | None = None) -> None:
        self.shape, self.kind, self.rows = SIZES[size], kind, rows
        n, k = matrices(size)[kind]
        # More than the L2 holds, and enough launches that the first one's start does not count.
        copies = copies or min(max(400_000_000 // (2 * n * k), 4), 200)
        self.weights = [Matrix(noise(n, k, std=k**-0.5)) for _ in range(copies)]
        self.bytes = 2 * n * k
        self.x = noise(rows, k)
        self.out = noise(rows, n if kind != "gate_up" else n // 2)
        self.logits = torch.empty(rows, n, device="cuda") if kind == "head" else None
        self.parts = torch.zeros(1, 1, device="cuda")
        self.scaled, self.gain = torch.empty_like(self.out), noise(n)
        s = self.shape
        self.cache = (noise(rows, s.kv_heads, 64, s.head_dim), noise(rows, s.kv_heads, 64, s.head_dim))
        self.lengths = torch.full((rows,), 20, device="cuda", dtype=torch.int32)
        self.rotary = (torch.rand(64, s.head_dim // 2, device="cuda"), torch.rand(64, s.head_dim // 2, device="cuda"))

    def launch(self, t: Tile, *, pdl: int = 3) -> None:
        squares = self.x.new_ones(self.rows, 32, dtype=torch.float32)
        parts = self.parts = torch.zeros(self.rows, -(-self.weights[0].shape[0] // t.rows), device="cuda")
        s = self.shape
        for w in self.weights:
            if self.kind == "qkv":
                query = self.out.view(-1)[: self.rows * s.heads * s.head_dim].view(self.rows, s.heads, s.head_dim)
                to = Heads(query, self.cache, (*self.rotary, s.head_dim // 2), Step(self.rows, 1, self.lengths))
                km.matmul_rotary(self.x, w, to, t, bias=None, squares=squares, eps=EPS, pdl=pdl)
            elif self.kind == "gate_up":
                km.matmul_swiglu(self.x, w, self.out, t, squares=squares, eps=EPS, pdl=pdl)
            elif self.kind == "head":
                km.matmul(self.x, w, self.logits, t, bias=None, squares=squares, eps=EPS, pdl=pdl)
            else:
                to = km.Residual(self.out, self.gain, self.scaled, parts)
                km.matmul_residual(self.x, w, to, t, bias=None, pdl=pdl)

    def library(self) -> None:
        for w in self.weights:
            F.linear(self.x, w.data)

    def time(self, t: Tile, **options: Any) -> float:
        return seconds(lambda: self.launch(t, **options)) / len(self.weights)


def plan_of(size: str, kind: str, rows: int, bits: int = 16) -> Tile:
    n, k = matrices(size)[kind]
    pair = {"qkv": SIZES[size].head_dim // 2, "gate_up": n // 2}.get(kind, 0)
    return tile(n, k, pair=pair, dtype=BF16, bits=bits, alone=rows == 1)


def bandwidth() -> dict[str, float]:
    """What a plain reduction and our longest product read from memory in a second."""
    global BANDWIDTH
    data = torch.ones(1 << 30, device="cuda", dtype=torch.float32).normal_()
    found = {"sum_TBps": data.numel() * 4 / seconds(lambda: data.sum()) / 1e12}
    chain = Chain("8b", "gate_up", 1, copies=8)
    found["product_TBps"] = chain.bytes / chain.time(plan_of("8b", "gate_up", 1)) / 1e12
    BANDWIDTH = max(found.values()) * 1e12
    say("\n".join(f"{k:>14}: {v:.3f}" for k, v in found.items()))
    return found


def gap(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm().clamp(min=1e-9))


def wanted(chain: Chain, old: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of (what the kernel wrote, what it should have written), the latter in float32 through torch."""
    s, w, x = chain.shape, chain.weights[0].data.float(), chain.x.float()
    product = x @ w.T
    if chain.kind in ("o", "down"):
        value = old.float() + product
        squares = chain.out.float().square().sum(1)
        return [(chain.out, value), (chain.scaled, value * chain.gain.float()), (chain.parts.sum(1), squares)]
    product = product / (32 / x.shape[1] + EPS) ** 0.5  # the parts of the squares are 32 ones
    if chain.kind == "head":
        assert chain.logits is not None
        return [(chain.logits, product)]
    if chain.kind == "gate_up":
        gate, up = product.chunk(2, dim=1)
        return [(chain.out, F.silu(gate) * up)]
    heads = product.view(chain.rows, -1, 2, s.head_dim // 2)
    cos, sin = (table[20] for table in chain.rotary)
    a, b = heads[:, : s.heads + s.kv_heads].unbind(2)
    turned = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
    query = chain.out.view(-1)[: chain.rows * s.heads * s.head_dim].view(chain.rows, s.heads, s.head_dim)
    values = heads[:, s.heads + s.kv_heads :].flatten(2)
    keys = turned[:, s.heads :]
    return [(query, turned[:, : s.heads]), (chain.cache[0][:, :, 20], keys), (chain.cache[1][:, :, 20], values)]


def check() -> dict[str, float]:
    """Every product against torch in float32, for awkward numbers of tokens."""
    found: dict[str, float] = {}
    for size in ("8b", "135m"):
        for kind in matrices(size):
            for rows in (1, 3, 9, 16, 32):
                for overlap in (0, 3):
                    chain = Chain(size, kind, rows, copies=1)
                    old = chain.out.clone()
                    chain.launch(plan_of(size, kind, rows), pdl=overlap)
                    worst = max(gap(got, want) for got, want in wanted(chain, old))
                    found[f"{size} {kind} {rows} {overlap}"] = worst
                    if not worst < 1e-2:
                        say(f"WRONG {size} {kind} {rows}: {worst}")
    say(f"largest difference {max(found.values()):.2g}")
    return found


def matmul() -> dict[str, Any]:
    """Each product against cuBLAS and against the time its weights need."""
    found: dict[str, Any] = {}
    columns = ("floor", *(f"{what}{rows}" for rows in (1, 9, 32) for what in ("cublas", "ours")))
    say(f"{'us a launch':>16} " + " ".join(f"{c:>8}" for c in columns))
    for size in ("8b", "135m"):
        for kind in matrices(size):
            line: dict[str, float] = {}
            for rows in (1, 9, 32):
                chain = Chain(size, kind, rows)
                line["floor"] = chain.bytes / BANDWIDTH * 1e6
                line[f"cublas{rows}"] = seconds(chain.library) / len(chain.weights) * 1e6
                line[f"ours{rows}"] = chain.time(plan_of(size, kind, rows), pdl=3 if size == "8b" else 2) * 1e6
                del chain
            found[f"{size} {kind}"] = line
            say(f"{size + ' ' + kind:>16} " + " ".join(f"{line[c]:8.1f}" for c in columns))
    return found


ATTENTION = {
    "8b": (
        (512, 64, 4, 3, 16, 0),
        (512, 64, 4, 3, 64, 0),
        (512, 128, 4, 2, 64, 0),
        (256, 128, 4, 2, 64, 0),
        (256, 64, 4, 3, 64, 0),
    ),
    "135m": (
        (1024, 64, 4, 3, 16, 0),
        (1024, 64, 8, 2, 16, 256),
        (1024, 64, 4, 2, 16, 128),
        (512, 64, 8, 2, 16, 256),
        (256, 64, 8, 2, 16, 256),
    ),
}


class Attention:
    """The attention of 16 layers, one after another."""

    def __init__(self, size: str, context: int, rows: int, width: int) -> None:
        self.shape, self.width, self.bound = SIZES[size], width, context + 128
        s = self.shape
        where = (rows, s.kv_heads, self.bound, s.head_dim)
        self.caches = [(noise(*where), noise(*where)) for _ in range(16)]
        self.lengths = torch.full((rows,), context, device="cuda", dtype=torch.int32)
        self.query = noise(rows * width, s.heads, s.head_dim)
        self.out = torch.empty_like(self.query)
        self.floor = 4 * rows * context * s.kv_heads * s.head_dim / BANDWIDTH

    def launch(self, chunk: int, keys: int, warps: int, stages: int, queries: int, one: int) -> None:
        t = AttentionTile(chunk, keys, warps, stages, stages, queries, max(queries, 64), one)
        s, splits = self.shape, -(-self.bound // t.chunk)
        part = torch.empty(self.query.shape[0], s.heads, splits, s.head_dim, device="cuda")
        stats = torch.empty(self.query.shape[0], s.heads, splits, 2, device="cuda")
        for cache in self.caches:
            work = (part, stats) if splits > 1 else None
            step = Step(len(self.lengths), self.width, self.lengths, bound=self.bound, work=work)
            attend(self.query, cache, self.out, step, window=None, t=t, pdl=2)


ATTENTION_CASES = [
    (size, context, rows, width)
    for size, contexts in (("8b", (256, 8192)), ("135m", (256, 1024)))
    for context in contexts
    for rows, width in ((1, 1), (1, 9), (32, 1))
    if rows * context <= 16384
]


def attention() -> dict[str, Any]:
    """us a layer, by the tile's numbers."""
    found: dict[str, Any] = {}
    for case in ATTENTION_CASES:
        chain = Attention(*case)
        line = {"floor": chain.floor * 1e6}
        for config in ATTENTION[case[0]]:
            try:
                line[str(config)] = seconds(lambda: chain.launch(*config)) / 16 * 1e6  # noqa: B023
            except Exception as error:
                say(f"{config}: {str(error)[:100]}")
        found[str(case)] = line
        say(f"{case}: " + "  ".join(f"{k}: {v:.1f}" for k, v in line.items()))
    return found


def sampling() -> dict[str, Any]:
    """us of one distribution, race and argmax, beside torch's; rows x nodes of one vocabulary."""
    found: dict[str, Any] = {}
    for size in (49152, 151936):
        for rows, nodes in ((1, 1), (1, 9), (8, 4), (32, 9)):
            x = torch.randn(rows, nodes, size, device="cuda") * 4
            knob = {name: torch.full((rows,), v, device="cuda") for name, v in (("temperature", 0.8), ("top_p", 0.95))}
            top_k = torch.full((rows,), 50, device="cuda")
            base = torch.arange(rows * nodes, device="cuda").view(rows, nodes)
            keys = draws.keys(draws.seeds(range(rows), "cuda"), base, 0, draws.DRAFT)
            cases: dict[str, Callable[[], object]] = {
                "top-p": lambda: ks.nucleus(x, **knob),  # noqa: B023
                "top-p and race": lambda: ks.nucleus(x, keys, **knob),  # noqa: B023
                "top-k and top-p": lambda: ks.nucleus(x, top_k=top_k, **knob),  # noqa: B023
                "temperature": lambda: ks.nucleus(x, temperature=knob["temperature"]),  # noqa: B023
                "race": lambda: ks.race(x, keys),  # noqa: B023
                "argmax": lambda: ks.argmax(x),  # noqa: B023
                "torch sort": lambda: x.sort(-1),  # noqa: B023
                "torch race": lambda: draws.race(x, keys),  # noqa: B023
                "torch argmax": lambda: x.argmax(-1),  # noqa: B023
            }
            line = {name: seconds(body) * 1e6 for name, body in cases.items()}
            found[f"{rows}x{nodes} of {size}"] = line
            say(f"{rows} x {nodes} of {size}: " + "  ".join(f"{k} {v:.1f}" for k, v in line.items()))
    return found


PARTS = {
    "check": check,
    "sampling": sampling,
    "bandwidth": bandwidth,
    "matmul": matmul,
    "attention": attention,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--only", default="check,bandwidth,matmul,attention,sampling")
    options = parser.parse_args()
    for name in options.only.split(","):
        started = time.time()
        say(f"== {name}")
        try:
            RESULT[name] = PARTS[name]()
        except Exception:
            traceback.print_exc()
            RESULT[name] = {"failed": traceback.format_exc()}
        torch.cuda.empty_cache()
        say(f"-- {name}: {time.time() - started:.0f} s")
        (options.out / "gpu_kernels.json").write_text(as_json(RESULT))


if __name__ == "__main__":
    main()
