"""Draws what benchmarks/gpu.py measured: python benchmarks/gpu_plot.py results/gpu-llama-3-8b.json -> a .png beside."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

RATES = {
    "HF eager": ("hf_eager",),
    "HF assisted, 8": ("hf_assisted_8",),
    "HF prompt lookup": ("hf_prompt_lookup",),
    "HF static + compile": ("hf_static_compiled",),
    "HF modules, captured": ("modules", "plain"),
    "HF modules, draft 8": ("modules", "speculative_8"),
    "plain": ("plain",),
    "lookup": ("lookup",),
    "draft 4": ("speculative_4",),
    "draft 8": ("speculative_8",),
    "draft 12": ("speculative_12",),
    "draft 8, sampled": ("sampled_8",),
    "draft, gamma auto": ("adaptive",),
    "draft 8, overlap": ("overlap_8", "greedy"),
    "draft 8, sampled, overlap": ("overlap_8", "sampled"),
}


def find(results: dict[str, Any], path: tuple[str, ...], key: str) -> Any:
    for step in path:
        results = results.get(step) or {}
    return results.get(key)


def rates(axes: Any, results: dict[str, Any]) -> None:
    """Tokens a second, batch 1, ours in another colour than theirs."""
    found = {name: find(results, path, "tokens_per_second") for name, path in RATES.items()}
    known = {name: rate for name, rate in found.items() if rate}
    colours = ["tab:gray" if name.startswith("HF") and "modules" not in name else "tab:blue" for name in known]
    bars = axes.barh(list(known), list(known.values()), color=colours)
    axes.bar_label(bars, fmt="%.0f", padding=3)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.15 * max(known.values()))
    axes.set_xlabel("tokens a second, batch 1 (gray: Hugging Face, blue: Headstart)")


def rounds(axes: Any, results: dict[str, Any]) -> None:
    """Where the time of a round goes."""
    names = [n for n in ("plain", "speculative_4", "speculative_8", "sampled_8", "speculative_12") if n in results]
    names = [n for n in names if "round_ms" in results[n]]
    bottoms = [0.0] * len(names)
    for label, colour in (("draft", "tab:orange"), ("verify", "tab:blue"), ("neither", "tab:red")):
        heights = []
        for name in names:
            r = results[name]
            neither = r["neither_forward"] * r["round_ms"]
            parts = {"verify": r["verify_ms"], "neither": max(0.0, neither)}
            heights.append(parts.get(label, r["round_ms"] - neither - r["verify_ms"]))
        axes.bar(names, heights, bottom=bottoms, label=label, color=colour)
        bottoms = [low + height for low, height in zip(bottoms, heights, strict=True)]
    floor = (results.get("grow") or {}).get("target_floor_ms")
    if floor:
        axes.axhline(floor, linestyle="--", color="black", linewidth=1, label="target's bandwidth floor")
    axes.set_ylim(0, 1.08 * max(bottoms, default=1.0))
    axes.set_ylabel("milliseconds a round")
    axes.tick_params(axis="x", rotation=20)
    axes.legend()


def main() -> None:
    path = Path(sys.argv[1])
    results = json.loads(path.read_text())
    figure, (left, right) = plt.subplots(1, 2, figsize=(14, 6))
    rates(left, results)
    rounds(right, results)
    gpu = (results.get("machine") or {}).get("gpu")
    figure.suptitle(f"{results['shape']} in bfloat16, draft SmolLM2-135M, {gpu}")
    figure.tight_layout()
    figure.savefig(path.with_suffix(".png"), dpi=110)
    print(path.with_suffix(".png"))


if __name__ == "__main__":
    main()
