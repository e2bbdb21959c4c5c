"""Draws what benchmarks/traffic.py measured: python benchmarks/traffic_plot.py results/traffic-cpu.json -> a .png."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

PARTS = {
    "prefill": "tab:green",
    "draft": "tab:orange",
    "catch_up": "tab:purple",
    "verify": "tab:blue",
    "host": "tab:red",
    "idle": "lightgray",
}


def rates(axes: Any, results: dict[str, Any]) -> None:
    """Tokens a second when all requests come at once."""
    found = {name: run["tokens_per_second"] for name, run in results.get("closed", {}).items()}
    even = results.get("even", {})
    each = even.get("tokens_each")
    found |= {f"{name}, {each} each": run["tokens_per_second"] for name, run in even.get("modes", {}).items()}
    theirs = even.get("hugging_face", {}).get("tokens_per_second")
    if theirs:
        found[f"HF generate_batch, {each} each"] = theirs
    bars = axes.barh(list(found), list(found.values()), color=["tab:gray" if "HF" in n else "tab:blue" for n in found])
    axes.bar_label(bars, fmt="%.0f", padding=3)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.18 * max(found.values(), default=1.0))
    axes.set_xlabel("tokens a second, all requests at once")


def waits(axes: Any, results: dict[str, Any], key: str, label: str) -> None:
    """Medians as lines, the 99th percentile dashed, over the requests that arrive in a second."""
    loads = sorted(results.get("arrivals", {}).get("loads", []), key=lambda load: load["rate"])
    names = list(loads[0]["modes"]) if loads else []
    for index, name in enumerate(names):
        for share, style in (("median", "-"), ("p99", "--")):
            heights = [load["modes"][name][key].get(share) for load in loads]
            line = {"color": f"C{index}", "linestyle": style, "marker": "o", "markersize": 3}
            axes.plot([load["rate"] for load in loads], heights, label=name if share == "median" else None, **line)
    axes.set_yscale("log")
    axes.set_xlabel("requests a second (random arrivals)")
    axes.set_ylabel(f"{label}, ms (dashed: 99th percentile)")
    if names:
        axes.legend()


def spending(axes: Any, results: dict[str, Any]) -> None:
    """Where the time goes when all requests come at once."""
    closed = results.get("closed", {})
    bottoms = [0.0] * len(closed)
    for part, colour in PARTS.items():
        heights = [run["seconds"][part] for run in closed.values()]
        axes.bar(list(closed), heights, bottom=bottoms, label=part.replace("_", " "), color=colour)
        bottoms = [low + height for low, height in zip(bottoms, heights, strict=True)]
    axes.set_ylabel("seconds, all requests at once")
    axes.set_ylim(0, 1.2 * max(bottoms, default=1.0))
    axes.legend(ncols=len(PARTS), fontsize="small", loc="upper center")


def draw(path: Path) -> str:
    """The plot's name."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    results = json.loads(path.read_text())
    figure, ((rate, spent), (first, gap)) = plt.subplots(2, 2, figsize=(14, 9))
    rates(rate, results)
    spending(spent, results)
    waits(first, results, "first_token_ms", "time to first token")
    waits(gap, results, "gap_ms", "gap between two deliveries")
    about = results["settings"]
    on = results["machine"]["gpu"] if about["target"].startswith("gpu") else results["machine"]["processor"]
    figure.suptitle(f"{about['requests']} requests over {about['rows']} rows, {about['target']}, {on}")
    figure.tight_layout()
    figure.savefig(path.with_suffix(".png"), dpi=110)
    plt.close(figure)
    return path.with_suffix(".png").name


if __name__ == "__main__":
    print(draw(Path(sys.argv[1])))
