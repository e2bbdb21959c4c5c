"""Perplexity of the embedded model: the GGUF file's weights in float32 by Hugging Face, against our CPU kernels.

    python benchmarks/perplexity.py --tokens 20000 --data ../shared/data

Text: the prompts in ``--data`` (*.jsonl), taken in turn from each file, then our own sixty. It is cut into windows of
512 tokens, each read from its beginning, and every token but a window's first is counted. The same windows go to
every system in the same run. Written to results/perplexity.json.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from common import as_json, machine, prompts, save
from torch.nn.functional import cross_entropy

from headstart import LLM
from headstart.machine.cpu.packed import pack_model
from headstart.machine.cpu.runner import CpuRunner
from headstart.machine.load.embedded import _wheel_file, embedded_folder
from headstart.machine.load.loading import load, read_gguf

WINDOW = 512


def text(data: Path) -> str:
    files = [
        [json.loads(line)["prompt"] for line in path.read_text().splitlines() if line.strip()]
        for path in sorted(data.glob("*.jsonl"))
    ]
    lines = [line for turn in zip_longest(*files) for line in turn if line]
    return "\n\n".join([*lines, *(line for own in prompts().values() for line in own)])


def losses(logits: Callable[[torch.Tensor], torch.Tensor], windows: Sequence[Sequence[int]]) -> list[float]:
    """Negative log-likelihood of every token but each window's first. ``logits``: of a window [1, n], as [n, V]."""
    found: list[float] = []
    for window in windows:
        x = torch.tensor([window])
        with torch.inference_mode():
            found += cross_entropy(logits(x)[:-1].float(), x[0, 1:], reduction="none").tolist()
    return found


def negative_log_likelihoods(file: Path, llm: LLM, data: Path, tokens: int) -> dict[str, Any]:
    """A GGUF file as our kernels run it, against its own weights spelt out as float32 by Hugging Face.

    The second takes long and never changes, so it is kept beside the file.
    """
    assert llm.tokenizer is not None
    ids = llm.tokenizer(text(data)).input_ids[:tokens]
    windows = [ids[at : at + WINDOW] for at in range(0, len(ids) - 1, WINDOW)]
    runner = llm.engine.parts.runner
    ours = losses(lambda x: runner.forward(slice(0, 1), x, [0])[0], windows)
    kept, about = file.with_suffix(".float32.json"), [file.stat().st_size, ids]
    known = json.loads(kept.read_text()) if kept.exists() else {}
    if known.get("about") != about:
        model = read_gguf(file)[0].eval()
        known = {"about": about, "losses": losses(lambda x: model(x).logits[0], windows)}
        kept.write_text(as_json(known))
    exact = known["losses"]
    mine, theirs = (sum(found) / len(found) for found in (ours, exact))
    return {
        "tokens": len(exact),
        "window": WINDOW,
        "weights": llm.report.dtype,
        "mean_negative_log_likelihood": mine,
        "of_the_file_in_float32": theirs,
        "perplexity_over_the_file": math.exp(mine - theirs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    arguments = parser.parse_args()
    gguf = _wheel_file()
    if gguf is not None:
        model, tokenizer = read_gguf(gguf)
        source = gguf.name
    else:
        loaded = load(embedded_folder(), dtype="float32")
        model, tokenizer, source = loaded.model, loaded.tokenizer, "the converted folder"
    ids = tokenizer(text(arguments.data)).input_ids[: arguments.tokens]
    if len(ids) < arguments.tokens:
        raise SystemExit(f"only {len(ids)} tokens of text")
    windows = [ids[at : at + WINDOW] for at in range(0, len(ids) - 1, WINDOW)]
    systems: dict[str, Any] = {f"float32 ({source}, Hugging Face)": lambda x: model.eval()(x).logits[0]}
    for kind in ("int4", "int8", "float32"):
        runner = CpuRunner(pack_model(model, kind), model, max_len=WINDOW, threads=torch.get_num_threads())
        systems[f"{kind} (our kernels)"] = lambda x, r=runner: r.forward(slice(0, 1), x, [0])[0]
    found: dict[str, Any] = {}
    for name, logits in systems.items():
        begun, loss = time.perf_counter(), losses(logits, windows)
        mean, seconds = sum(loss) / len(loss), time.perf_counter() - begun
        found[name] = {"perplexity": math.exp(mean), "tokens": len(loss), "seconds": seconds}
        first = next(iter(found.values()))["perplexity"]
        found[name]["against_float32"] = found[name]["perplexity"] / first
        print(f"{name}: {found[name]['perplexity']:.4f} ({found[name]['against_float32']:.4f}x)", flush=True)
        save(
            "perplexity.json", {"machine": machine(), "window": WINDOW, "text": arguments.data.name, "systems": found}
        )  # after each: a long run may be cut short


if __name__ == "__main__":
    main()
