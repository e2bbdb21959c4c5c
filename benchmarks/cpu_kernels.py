"""Products of packed matrices on the CPU kernels, by the time of a plain read of the same bytes by the same threads.

    python benchmarks/cpu_kernels.py --out benchmarks/results/cpu-kernels.json

A table of kind x tokens: time of the products over time of the read, how fast the read is, and which share of the
integer units' peak (dot-product instructions on registers, all threads) the widest products reach. Matrices are of a
1.5B model's shape and together too large for any cache. Peak, reads and products take turns; the best of all turns.
"""

from __future__ import annotations

import argparse
import ctypes
import os
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import torch
from common import as_json

from headstart.machine.cpu.formats import KINDS
from headstart.machine.cpu.library import MatrixRecord, instructions, kernels, pool
from headstart.machine.slab_layer import on_cache_line

TOKENS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)
GGUF = {"q4_k": (12, 144), "q5_k": (13, 176), "q6_k": (14, 210)}  # type, bytes of a block


class Weights(NamedTuple):
    records: list[MatrixRecord]
    memory: torch.Tensor


def weights(kind: str, outputs: int, inputs: int, total: int) -> Weights:
    """Matrices of random numbers, in one piece of memory of about ``total`` bytes."""
    size = int(kernels().hs_packed_bytes(KINDS[kind], outputs, inputs))
    count = max(1, total // size)
    memory = on_cache_line(size * count)
    kernels().hs_advise(memory.data_ptr(), size * count)
    order = torch.arange(outputs, dtype=torch.int32)
    if kind in GGUF:
        number, block = GGUF[kind]
        raw = torch.randint(
            0, 60, (outputs, inputs // 256 * block), dtype=torch.uint8
        )  # halves of below 60 * 256: small
        row = raw.shape[1]
        kernels().hs_pack_gguf(
            KINDS[kind], number, raw.data_ptr(), row, order.data_ptr(), outputs, inputs, memory.data_ptr()
        )
    else:
        plain = torch.randn(outputs, inputs)
        kernels().hs_pack(KINDS[kind], plain.data_ptr(), order.data_ptr(), outputs, inputs, memory.data_ptr())
    for i in range(1, count):
        memory[i * size : (i + 1) * size] = memory[:size]
    return Weights(
        [MatrixRecord(KINDS[kind], outputs, inputs, memory.data_ptr() + i * size, None) for i in range(count)], memory
    )


def peak(threads: int, seconds: float = 0.01) -> float:
    """Products of 8-bit numbers a second, in registers, on all threads; 0: not measured with these instructions."""
    rounds, workers, library = 1 << 14, pool(threads), kernels()
    while True:
        begun = perf_counter()
        done = int(library.hs_multiply(workers, rounds))
        took = perf_counter() - begun
        if not done or took >= seconds:
            return done / took
        rounds *= 2


def measure(kind: str, outputs: int, inputs: int, total: int, threads: int, turns: int) -> dict[str, float]:
    made, library, workers = weights(kind, outputs, inputs, total), kernels(), pool(threads)
    x, y = torch.randn(max(TOKENS), inputs), torch.empty(max(TOKENS), outputs)
    seconds: dict[int, list[float]] = {n: [] for n in (0, *TOKENS)}
    most = 0.0
    for _ in range(turns):
        most = max(most, peak(threads))
        for n in seconds:
            begun = perf_counter()
            if n == 0:
                library.hs_read(workers, made.memory.data_ptr(), made.memory.numel())
            else:
                for record in made.records:
                    library.hs_product(workers, ctypes.byref(record), x.data_ptr(), n, y.data_ptr())
            seconds[n].append(perf_counter() - begun)
    read = min(seconds[0])
    found = {str(n): round(min(seconds[n]) / read, 3) for n in TOKENS}
    found["read GB/s"] = round(made.memory.numel() / read / 1e9, 1)
    if most:
        for n in (8, max(TOKENS)):
            products = n * outputs * inputs * len(made.records) / min(seconds[n])
            found[f"share of the peak, {n} tokens"] = round(products / most, 3)
        found["peak, products/s"] = float(f"{most:.3g}")
    return found


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"


def keep(chosen: argparse.Namespace, found: dict[str, object]) -> None:
    if not chosen.out:
        return
    about = {"processor": processor(), "instructions": instructions(), "threads": chosen.threads}
    shape = {"outputs": chosen.outputs, "inputs": chosen.inputs, "MiB": chosen.mib}
    chosen.out.write_text(as_json({**about, **shape, **found}), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="*", default=["int8", "int4", "q4_k", "q5_k", "q6_k"])
    parser.add_argument("--outputs", type=int, default=17920)
    parser.add_argument("--inputs", type=int, default=1536)
    parser.add_argument("--mib", type=int, default=192, help="weights of a kind, in MiB")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    print(f"{processor()}, {instructions()}, {chosen.threads} threads, [{chosen.outputs}, {chosen.inputs}]")
    print("kind     " + "".join(f"{n:>7}" for n in TOKENS) + "   read GB/s   (time over a plain read, by tokens)")
    table = {}
    for kind in chosen.kinds:
        row = measure(kind, chosen.outputs, chosen.inputs, chosen.mib << 20, chosen.threads, chosen.turns)
        table[kind] = row
        print(f"{kind:<9}" + "".join(f"{row[str(n)]:7.2f}" for n in TOKENS) + f"{row['read GB/s']:9.1f}", end="")
        shares = [f"{share:.0%}" for name, share in row.items() if name.startswith("share")]
        print("   of the peak, 8 and 16 tokens: " + ", ".join(shares) if shares else "")
    keep(chosen, {"over a plain read": table})


if __name__ == "__main__":
    main()
