"""``headstart distill``: make a draft for a model, and show that it is better.

Knows: the options and how progress looks on a terminal. Does not know: how a draft is made.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from ..errors import InvalidParameter
from ..progress import Tell, silent, telling
from .options import TargetOptions, section
from .prompts import questions_in
from .screen import describe, notes, output, show_table

if TYPE_CHECKING:
    from ..distill.make import DistillSettings

__all__ = ["distill"]

_data, _draft, _training = map(section, ("Data", "The draft", "Training"))


@dataclass(frozen=True)
class DistillOptions:
    """Everything about the draft and its making."""

    kind: Annotated[
        str,
        _draft(of="KIND", help="head: a small head on the target's hidden states; model: a shallow language model."),
    ] = "head"
    vocab: Annotated[int, _draft(of="N", help="Words a head can say.")] = 8192
    layers: Annotated[int, _draft(of="N", help="Layers of a model draft.")] = 2
    width: Annotated[int | None, _draft(of="N", help="Width of the draft; without it: the target's.")] = None
    donor: Annotated[
        str | None, _draft(of="MODEL", help="Whose layers a model draft copies. Without it: the target's.")
    ] = None
    prompts: Annotated[
        str | None,
        _data(
            of="FILE", help="A prompt a line, or .jsonl with the field 'prompt'. Without it the target writes its own."
        ),
    ] = None
    sequences: Annotated[int, _data(of="N", help="Answers to learn from.")] = 2000
    temperatures: Annotated[
        str, _data(of="T,T", help="Temperatures that will be served, with commas; 0 is greedy.")
    ] = "0,0.7,1"
    answer_tokens: Annotated[int, _data(of="N", help="The most tokens of an answer.")] = 192
    rows: Annotated[int, _data(of="N", help="Answers written together.")] = 16
    steps: Annotated[int, _training(of="N", help="The most steps of training.")] = 2000
    batch: Annotated[int, _training(of="N", help="Sequences a step.")] = 16
    accumulate: Annotated[int, _training(of="N", help="Pieces a step is cut into, to save memory.")] = 1
    learning_rate: Annotated[float, _training(of="X", help="The highest learning rate.")] = 1.5e-3
    loss: Annotated[str, _training(of="LOSS", help="forward (KL), reverse (KL), tv (total variation) or mix.")] = "mix"
    optimizer: Annotated[
        str, _training(of="NAME", help="muon (for the matrices, with adamw for the rest) or adamw.")
    ] = "muon"
    patience: Annotated[
        int, _training(of="N", help="Stop after this many measurements without a better predicted speed-up; 0: never.")
    ] = 6
    seed: Annotated[int, _training(of="N", help="The same seed makes the same draft on the same machine.")] = 0

    def settings(self) -> DistillSettings:
        from ..distill.data import DataSettings
        from ..distill.make import DistillSettings
        from ..distill.train import TrainSettings

        def told(record: Any, **more: Any) -> Any:
            """What the options of the same names say, and more."""
            return record(**{f.name: getattr(self, f.name) for f in fields(record) if hasattr(self, f.name)} | more)

        every = max(1, min(100, self.steps // 10))
        data = told(DataSettings, shard=min(200, self.sequences), temperatures=_numbers(self.temperatures))
        train = told(TrainSettings, rows=self.batch, evaluate_every=every, checkpoint_every=every)
        settings: DistillSettings = told(DistillSettings, data=data, train=train)
        return settings


Out = Annotated[
    Path, _draft("--out", "-o", of="FOLDER", help="Where the draft goes; a run that was killed goes on there.")
]


def distill(*, out: Out, options: DistillOptions, target: TargetOptions) -> None:
    """Make a draft for a model, and prove that it is better.

    It learns from the model's own text. docs/distill.md tells how.
    """
    with target.loading() as tell:
        from ..distill.make import distill as make
        from ..machine.load.embedded import HUB_ID, embedded_folder
        from ..machine.load.loading import load

        settings = options.settings()
        asked = _prompts(options.prompts) if options.prompts is not None else None
        name = target.model if target.model is not None else HUB_ID
        source = target.model if target.model is not None else embedded_folder(tell)
        tell(f"loading {name}")
        loaded = load(
            source,
            dtype=target.dtype,
            device=target.device,
            revision=target.revision,
            trust_remote_code=target.trust_remote_code,
        )
    console = notes()
    console.print(f"[bold]Target[/] {describe(loaded.report)}")
    command = "headstart " + " ".join(sys.argv[1:])
    with _Screen(console, options.steps) as screen:
        before, after = make(
            loaded, out, settings, screen, name=name, donor=options.donor, prompts=asked, command=command
        )
    _show(before, after, out)


def _prompts(path: str) -> list[str]:
    """Each text once."""
    found = [question.prompt for question in questions_in(path, None)]
    texts = [prompt for prompt in found if isinstance(prompt, str)]
    if len(texts) < len(found):
        raise InvalidParameter("prompts", "must be texts here, under 'prompt', not conversations under 'messages'")
    return list(dict.fromkeys(texts))


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise InvalidParameter("temperatures", f"must be numbers with commas between, not {text!r}") from error


class _Screen:
    """How far it is: a bar for the data and one for training on a terminal, lines elsewhere; and all measurements."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console, self._steps = console, steps
        self._progress: Progress | None = None
        if console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._progress = Progress(*columns, console=console)
        self._bar: TaskID | None = None
        self._open = ExitStack()
        self._tell: Tell = silent

    def __enter__(self) -> _Screen:
        if self._progress is not None:
            self._open.enter_context(self._progress)
        else:
            self._tell = self._open.enter_context(telling(None))
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def stage(self, text: str) -> None:
        self._console.print(f"[bold]{text}[/]")
        self._tell("")
        self._bar = None

    def data(self, done: int, total: int) -> None:
        self._advance("shards", done, total)

    def training(self, mark: Any, step: int) -> None:
        self._advance("steps", step, self._steps)
        if mark is not None:
            loss = f"loss {mark.loss:.3f}  " if mark.step else ""
            self._console.print(
                f"  step {mark.step:5d}  {loss}alpha {mark.alpha[0]:.3f} (greedy {mark.greedy[0]:.3f})  "
                f"tau {mark.tau:.2f} (greedy {mark.tau_greedy:.2f})  predicted speed-up {mark.speedup:.2f}x"
            )

    def _advance(self, what: str, done: int, total: int) -> None:
        self._tell(f"{what}: {done} of {total}")
        if self._progress is None:
            return
        if self._bar is None:
            self._bar = self._progress.add_task(what, total=total)
        self._progress.update(self._bar, completed=done)


def _show(before: Any, after: Any, out: Path) -> None:
    from ..distill.proof import COLUMNS

    rows = [(name, *figures.cells()) for name, figures in (("before", before), ("after", after))]
    console = output()
    show_table(console, f"Held-out prompts, {after.gamma} tokens drafted a round", ("", *COLUMNS), rows)
    console.print(f"The draft is in {out}; use it with --draft {out}", markup=False)
