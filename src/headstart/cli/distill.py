"""``headstart distill``: make a draft for a model, and show that it is better.

Knows: the options and how progress looks on a terminal. Does not know: how a draft is made.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ..errors import InvalidParameter
from . import common

__all__ = ["distill"]

Out = Annotated[Path, typer.Option("--out", "-o", help="Folder for the draft; a run that was killed goes on there.")]
Kind = Annotated[
    str, typer.Option(help="head: a small head on the target's hidden states; model: a shallow language model.")
]
Prompts = Annotated[
    Path | None,
    typer.Option(help="A prompt a line, or .jsonl with the field 'prompt'. Without it the target writes its own."),
]
Temperatures = Annotated[str, typer.Option(help="Temperatures that will be served, with commas; 0 is greedy.")]


def distill(
    out: Out,
    model: common.ModelName = None,
    kind: Kind = "head",
    prompts: Prompts = None,
    donor: Annotated[
        str | None, typer.Option(help="Whose layers a model draft copies. Without it: the target's.")
    ] = None,
    sequences: Annotated[int, typer.Option(help="Answers to learn from.")] = 2000,
    temperatures: Temperatures = "0,0.7,1",
    answer_tokens: Annotated[int, typer.Option(help="The most tokens of an answer.")] = 192,
    rows: Annotated[int, typer.Option(help="Answers written together.")] = 16,
    steps: Annotated[int, typer.Option(help="The most steps of training.")] = 2000,
    batch: Annotated[int, typer.Option(help="Sequences a step.")] = 16,
    accumulate: Annotated[int, typer.Option(help="Pieces a step is cut into, to save memory.")] = 1,
    learning_rate: Annotated[float, typer.Option(help="At its highest.")] = 1.5e-3,
    loss: Annotated[str, typer.Option(help="forward, reverse, tv or mix.")] = "mix",
    patience: Annotated[
        int, typer.Option(help="Stop after this many measurements without a better predicted speed-up; 0: never.")
    ] = 6,
    vocab: Annotated[int, typer.Option(help="Words a head can say.")] = 8192,
    layers: Annotated[int, typer.Option(help="Layers of a model draft.")] = 2,
    width: Annotated[int | None, typer.Option(help="Width of the draft; without it: the target's.")] = None,
    optimizer: Annotated[str, typer.Option(help="muon (for the matrices, with adamw for the rest) or adamw.")] = "muon",
    seed: Annotated[int, typer.Option(help="The same seed makes the same draft on the same machine.")] = 0,
    dtype: common.Dtype = "auto",
    device: common.Device = None,
) -> None:
    """Make a draft for a model from the model's own text, and prove that it is better."""
    from ..distill.data import DataSettings, read_prompts
    from ..distill.losses import check_loss
    from ..distill.make import DistillSettings
    from ..distill.make import distill as make
    from ..distill.train import TrainSettings
    from ..machine.embedded import HUB_ID, embedded_folder
    from ..machine.loading import load

    every = max(1, min(100, steps // 10))
    settings = DistillSettings(
        kind=kind,  # type: ignore[arg-type]  # checked there
        vocab=vocab,
        layers=layers,
        width=width,
        data=DataSettings(
            sequences=sequences,
            shard=min(200, sequences),
            temperatures=_numbers(temperatures),
            answer_tokens=answer_tokens,
            rows=rows,
            seed=seed,
        ),
        train=TrainSettings(
            steps=steps,
            rows=batch,
            accumulate=accumulate,
            learning_rate=learning_rate,
            loss=check_loss(loss),
            optimizer=optimizer,  # type: ignore[arg-type]  # checked there
            patience=patience,
            evaluate_every=every,
            checkpoint_every=every,
            seed=seed,
        ),
    )
    asked = read_prompts(prompts) if prompts is not None else None
    console = common.errors_console()
    with console.status(f"loading {model or HUB_ID} ..."):
        target = load(model if model is not None else embedded_folder(), dtype=dtype, device=device)
    console.print(f"[bold]Target[/] {common.describe(target.report)}")
    command = "headstart " + " ".join(sys.argv[1:])
    with _Screen(console, steps) as screen:
        before, after = make(
            target, out, settings, name=model or HUB_ID, donor=donor, prompts=asked, command=command, reporter=screen
        )
    _show(before, after, out)


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise InvalidParameter("temperatures", f"must be numbers with commas between, not {text!r}") from error


class _Screen:
    """One bar for the data, one for training, and a line for each measurement."""

    def __init__(self, console: Console, steps: int) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._console = console
        self._progress = Progress(*columns, console=console, transient=False)
        self._steps = steps
        self._bar: Any = None

    def __enter__(self) -> _Screen:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def stage(self, text: str) -> None:
        self._console.print(f"[bold]{text}[/]")
        self._bar = None

    def data(self, done: int, total: int, tokens: int) -> None:
        if self._bar is None:
            self._bar = self._progress.add_task("shards", total=total)
        self._progress.update(self._bar, completed=done)

    def training(self, mark: Any, step: int) -> None:
        if self._bar is None:
            self._bar = self._progress.add_task("steps", total=self._steps)
        self._progress.update(self._bar, completed=step)
        if mark is not None:
            loss = f"loss {mark.loss:.3f}  " if mark.step else ""
            self._console.print(
                f"  step {mark.step:5d}  {loss}alpha {mark.alpha[0]:.3f} (greedy {mark.greedy[0]:.3f})  "
                f"tau {mark.tau:.2f} (greedy {mark.tau_greedy:.2f})  predicted speed-up {mark.speedup:.2f}x"
            )


def _show(before: Any, after: Any, out: Path) -> None:
    table = Table(title=f"Held-out prompts, {after.gamma} tokens drafted a round", title_justify="left")
    for name in ("", "alpha, greedy", "tau, greedy", "alpha, T = 1", "tau, T = 1", "speed-up, greedy"):
        table.add_column(name, justify="right" if name else "left")
    for name, f in (("before", before), ("after", after)):
        cells = (f"{f.alpha_greedy:.3f}", f"{f.tau_greedy:.2f}", f"{f.alpha:.3f}", f"{f.tau:.2f}", f"{f.speedup:.2f}x")
        table.add_row(name, *cells)
    console = Console()
    console.print(table)
    console.print(f"The draft is in {out}; use it with --draft {out}", highlight=False)
