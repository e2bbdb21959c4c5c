"""What the commands of the lab share: where reports go, how long they may take, and how a system is named.

Knows: the options and the end of every such command. Does not know: what any of them measures.
"""

from __future__ import annotations

import json as json_module
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypeVar

from rich.console import Console

from ..errors import InvalidParameter
from ..lab.budget import Budget
from ..progress import Tell, silent
from .options import ModelOptions, _gamma, section
from .screen import note, output

if TYPE_CHECKING:
    from ..lab.record import Record
    from ..lab.system import SystemOptions
    from ..lab.texts import Text

__all__ = ["Prompts", "ReportOptions", "Rows", "TextOptions", "measure", "measuring", "section", "system_options"]

_report, _texts, _size = map(section, ("Report", "Prompts", "Size"))

SECONDS = 100.0  # that a command takes unless another time is given
LEAST = 0.3  # of them for measuring, however long loading took
REPORT = 5.0  # for tables and pages in the end

Rows = Annotated[int, _size("--rows", of="N", help="Requests answered together (the batch size).")]


@dataclass(frozen=True)
class ReportOptions:
    """How long it may take, and where what was found goes."""

    seconds: Annotated[
        float | None,
        _report(
            of="S", help="Take about S seconds in all, loading included, with what there is by then. Without it: 100."
        ),
    ] = None
    thorough: Annotated[bool, _report("--thorough", help="Take as long as it takes, for narrower intervals.")] = False
    json: Annotated[
        bool, _report("--json", help="Print JSON alone on standard output; files are written only with --out.")
    ] = False
    out: Annotated[
        str | None,
        _report(
            "--out",
            "-o",
            of="FOLDER",
            help="Where the report goes, as JSON and as a page. Without it: headstart-reports, with the time in the "
            "names.",
        ),
    ] = None

    def begin(self) -> Budget:
        """Refuse what cannot work, before anything is loaded; and the time of the whole command, from now on."""
        if self.seconds is not None and not self.seconds > 0:
            raise InvalidParameter("seconds", f"must be more than 0, not {self.seconds:g}")
        if self.seconds is not None and self.thorough:
            raise InvalidParameter("thorough", "takes as long as it takes: leave --seconds out")
        if self.out is not None or not self.json:
            from ..lab.report.store import FOLDER, check_out

            check_out(self.out if self.out is not None else FOLDER)
        return Budget(None if self.thorough else self.seconds or SECONDS)

    def finish(self, record: Record, show: Callable[[Console], None], tell: Tell = silent) -> None:
        """Print what was found, and write it."""
        from ..lab.report.store import envelope, save

        if self.json:
            print(json_module.dumps(envelope(record), indent=1), flush=True)
        else:
            show(output())
        if self.out is not None or not self.json:
            tell("drawing the page")
            paths = save(record, self.out)
            tell("")
            note(f"  report: {paths[1]} (and {paths[0].name})")


Prompts = Annotated[
    str | None,
    _texts(
        "--prompts",
        of="FILE",
        help="Prompts to measure on: one a line, or JSON lines (or one list) with 'prompt' or 'messages' (and 'task'), "
        "or Spec-Bench's question.jsonl; - is standard input. Without it: sixty of our own, of six tasks.",
    ),
]


@dataclass(frozen=True)
class TextOptions:
    """Which prompts."""

    prompts: Prompts = None
    tasks: Annotated[
        list[str] | None, _texts("--task", of="TASK", help="Only prompts of this task. May be repeated.")
    ] = None
    per_task: Annotated[
        int | None, _texts("--per-task", of="N", help="At most N prompts of each task. Without it: what time allows.")
    ] = None
    raw: Annotated[bool, _texts("--raw", help="Take prompts as they are, without the model's chat template.")] = False

    def read(self) -> list[Text]:
        """The prompts, tasks in turn."""
        from ..lab.texts import choose, read_texts, shipped

        if self.per_task is not None and self.per_task < 1:
            raise InvalidParameter("per_task", f"must be at least 1, not {self.per_task}")
        found = shipped() if self.prompts is None else read_texts(self.prompts, raw=self.raw)
        return choose(found, self.per_task, self.tasks)


R_co = TypeVar("R_co", bound="Record", covariant=True)


class Measurer(Protocol[R_co]):
    """A measurement that is loaded and has not begun: what the commands have in common."""

    def run(self, seconds: float | None, /) -> None:
        """Measure for about so long; None: no limit. May be interrupted."""

    @property
    def begun(self) -> bool:
        """There is something to tell by now."""

    def result(self, *, stopped: bool) -> R_co:
        """What there is by now."""


def measure(
    measurer: Measurer[R_co], time: Budget, report: ReportOptions, tell: Tell, show: Callable[[Console, R_co], None]
) -> R_co:
    """Measure in what is left of the time, and report. Ctrl-C reports what there is by then, and then has its way."""
    stopped = False
    try:
        measurer.run(None if time.seconds is None else max(LEAST * time.seconds, time.left - REPORT))
    except KeyboardInterrupt:
        if not measurer.begun:
            note("  nothing was measured yet: there is no report")
            raise
        stopped = True
    found = measurer.result(stopped=stopped)
    tell("")
    report.finish(found, lambda console: show(console, found), tell)
    if stopped:
        raise KeyboardInterrupt
    return found


def system_options(model: ModelOptions, **settings: Any) -> SystemOptions:
    """What ``ModelOptions.open`` gives an ``LLM``, for a system of the lab; ``settings``: more of it."""
    from ..lab.system import SystemOptions

    given = {f.name: getattr(model, f.name) for f in fields(model) if f.name != "verbose"}
    given |= {name: None for name in ("draft", "quantization", "draft_quantization") if given[name] == "none"}
    given |= {"gamma": _gamma(model.gamma)}
    options = SystemOptions(**given).changed(**settings)
    options.config()  # refuses before anything is loaded
    return options


@contextmanager
def measuring(model: ModelOptions) -> Iterator[Tell]:
    """Around loading and measuring: tells on standard error what is going on."""
    with model.loading() as tell:
        yield tell
