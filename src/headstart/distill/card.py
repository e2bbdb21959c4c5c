"""The model card and the curve: what was made, from what, how good it is, and how to make it again.

Knows: how to write them down. Does not know: how anything in them was measured.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers

from .proof import COLUMNS, Figures
from .train import Mark

__all__ = ["Card", "draw_curve", "versions", "write_card"]


@dataclass(frozen=True)
class Card:
    """Everything a card says."""

    kind: str  # "head" or "model"
    target: str
    weights: int  # of the draft
    shape: str  # in words
    data: str  # in words
    command: str
    settings: Mapping[str, Any]
    marks: Sequence[Mark]
    before: Figures
    after: Figures
    cost: Mapping[str, Any]


def versions() -> dict[str, str]:
    """What it ran on."""
    found = {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__}
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def write_card(card: Card, folder: Path) -> None:
    """README.md for people and card.json for programs."""
    record = asdict(card) | {"versions": versions()}
    (folder / "card.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    use = f'LLM("{card.target}", draft="{folder.name}")'
    lines = [
        "---",
        "library_name: headstart",
        f"base_model: {card.target}",
        "tags: [speculative-decoding, draft]",
        "---",
        f"# A draft {card.kind} for {card.target}",
        "",
        f"Made by `headstart distill`. {card.shape}",
        "It guesses what its target will say next; the target checks every guess, so the text is the target's own. On",
        "its own it is of no use.",
        "",
        f"    from headstart import LLM\n    llm = {use}",
        "",
        "## How good it is",
        "",
        *_table(card),
        "",
        "alpha: share of drafted tokens that are accepted; tau: tokens for each forward of the target. Measured with",
        "the engine on prompts kept from training; the speed-up is over the same engine without a draft, same weights,",
        "one prompt at a time, on the machine it was trained on.",
        "",
        "## How it was made",
        "",
        card.data,
        "",
        f"    {card.command}",
        "",
        "| setting | value |",
        "| --- | --- |",
        *[f"| {name} | {value} |" for name, value in card.settings.items()],
        *[f"| {name} | {value} |" for name, value in versions().items()],
        "",
    ]
    (folder / "README.md").write_text("\n".join(lines), encoding="utf-8")


def _table(card: Card) -> list[str]:
    lines = [f"| | {' | '.join(COLUMNS)} |", "| --- | --- | --- | --- | --- | --- |"]
    for name, figures in (("before training", card.before), ("after", card.after)):
        lines.append(f"| {name} | {' | '.join(figures.cells())} |")
    last = card.marks[-1]
    return [
        *lines,
        "",
        f"{card.after.prompts} prompts, {card.after.gamma} tokens drafted a round.",
        "",
        f"On held-out text, position by position: alpha at T = 1 {_row(last.alpha)}, greedy {_row(last.greedy)}.",
    ]


def _row(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.3f}" for value in values)


def draw_curve(marks: Sequence[Mark], path: Path) -> bool:
    """Loss, held-out tau and predicted speed-up over the steps; False without matplotlib (extra ``plot``)."""
    if find_spec("matplotlib") is None or len(marks) < 2:
        return False
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    steps = [mark.step for mark in marks]
    lines: list[tuple[str, list[tuple[str, list[float]]]]] = [
        ("loss", [("training", [mark.loss for mark in marks])]),
        ("tau", [("greedy", [mark.tau_greedy for mark in marks]), ("T = 1", [mark.tau for mark in marks])]),
        ("speed-up, predicted", [("mean of both", [mark.speedup for mark in marks])]),
    ]
    for axes, (title, curves) in zip(figure.subplots(1, len(lines)), lines, strict=True):
        for label, values in curves:
            begin = 1 if title == "loss" else 0  # there is no loss before the first step
            axes.plot(steps[begin:], values[begin:], label=label)
        axes.set_title(title)
        axes.set_xlabel("step")
        axes.legend()
    figure.savefig(path, dpi=120)
    return True
