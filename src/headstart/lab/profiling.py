"""What a target's steps and a draft's steps cost here, by rows and context, and what memory they take.

Knows: which sizes are measured in the time there is. Does not know: how rounds are timed (``round_costs``), what the
cost model makes of it (``profile_record``), or how often guesses hold (``advise`` measures that).

Steps are timed as they are served: in the engine, captured where it captures. What verifying costs is measured with
guesses that cost nothing and mean nothing, beside the draft that was asked for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from ..types import Round, Tell, silent
from .budget import Budget
from .machine_facts import machine, memory
from .profile_record import ALPHAS, FASTER, Costs, Memory, Profile
from .round_costs import RoundCosts, measure_rounds
from .statistics import median
from .sweep import Filler
from .system import System, SystemOptions
from .texts import shipped

__all__ = ["SECONDS", "Profiler", "profile"]

SECONDS = 60.0
WIDEST = 16
LENGTHS = (0, 1, 2, 3, 4, 5, 7, 9, 11, 15)  # of drafts, where time is short
FEW = (0, 1, 3, 7, 15)  # and where rows are many
CONTEXTS = (64, 512, 2048)
TURNS, THOROUGH_TURNS = 3, 7
PLAIN, VERIFY, DRAFT = "plain", "verify", "draft"


def profile(
    options: SystemOptions | None = None,
    *,
    rows: int = 8,
    contexts: Sequence[int] = CONTEXTS,
    seconds: float | None = SECONDS,
    tell: Tell | None = None,
    **settings: Any,
) -> Profile:
    """Measure costs with 1 .. ``rows`` requests together, and behind texts of several lengths.

    ``seconds``: what measuring may take; None: no limit. ``settings``: fields of ``SystemOptions``.
    """
    options = (options or SystemOptions()).changed(**settings)
    with Profiler(options, rows, contexts, tell=tell or silent) as profiler:
        profiler.run(seconds)
        return profiler.result()


class Profiler:
    """A profile in the making: ``run`` may be interrupted, and ``result`` tells what there is by then."""

    def __init__(self, options: SystemOptions, rows: int, contexts: Sequence[int], *, tell: Tell = silent) -> None:
        self._tell, self._asked, self._rows = tell, options, max(1, rows)
        self.systems: dict[str, System] = {}
        self.costs: list[Costs] = []
        self.notes: list[str] = []
        self._spent = 0.0
        self._records: dict[str, list[list[Round]]] = defaultdict(list)
        self._open = ExitStack()
        try:
            self._load(options.changed(gamma="auto", max_gamma=WIDEST - 1, max_rows=self._rows))
        except BaseException:
            self.close()
            raise
        room = self.systems[PLAIN].max_len
        room -= min(512, room // 2)  # for what is written meanwhile
        self.contexts = [length for length in sorted(set(contexts)) if length <= room] or [max(8, room // 2)]

    def _load(self, options: SystemOptions) -> None:
        first = System.open(options.changed(draft=None), self._tell)
        first.options = options
        first.options = first.hold_threads()
        self.systems[PLAIN] = first
        if options.draft is not None:
            self.systems[DRAFT] = first.sibling(options.draft, self._tell)
        self.systems[VERIFY] = first.sibling(Filler(), self._tell)
        for name, system in self.systems.items():
            self._open.enter_context(system.listen(self._records[name].append))

    def __enter__(self) -> Profiler:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._open.close()
        for system in self.systems.values():
            system.close()
        self.systems = {}

    def run(self, seconds: float | None = SECONDS) -> None:
        """One row behind a short text first, then behind longer ones, then more rows."""
        budget = Budget(seconds)
        try:
            for number, (rows, context) in enumerate(self._sizes()):
                if number and budget.over:
                    self.notes.append(f"there was no time for {_count(rows, 'row')} behind {context} tokens")
                    continue
                self._tell(f"measuring {_count(rows, 'row')} behind {context} tokens")
                self._measure(rows, context, budget, thorough=seconds is None, first=not number)
        finally:
            self._spent = budget.spent

    def _sizes(self) -> Iterator[tuple[int, int]]:
        yield from ((1, context) for context in self.contexts)
        yield from ((rows, self.contexts[0]) for rows in sorted({min(8, self._rows), self._rows} - {1}))

    def _measure(self, rows: int, context: int, budget: Budget, *, thorough: bool, first: bool) -> None:
        for records in self._records.values():
            records.clear()
        share = budget.part(0.4 if first else 0.6)
        lengths = range(WIDEST) if thorough else LENGTHS if rows == 1 else FEW
        found = measure_rounds(
            self.systems,
            self._prompts(rows, context),
            rows=(rows,),
            lengths=self._captured(lengths),
            turns=THOROUGH_TURNS if thorough else TURNS,
            late=lambda: share.over,
            plain=PLAIN,
        )
        self.costs.append(self._costs(rows, context, found))

    def _captured(self, lengths: Sequence[int]) -> list[int]:
        """On a GPU, the lengths that rounds were captured for."""
        captured = self.systems[VERIFY].engine.parts.captured
        return list(lengths) if captured is None else sorted(captured.lengths)

    def _prompts(self, rows: int, context: int) -> list[list[int]]:
        """Real text of just this many tokens; another piece for each row and turn."""
        system = self.systems[PLAIN]
        known = min(system.engine.parts.vocab_size, system.engine.parts.runner.vocab_size)
        if system.target.tokenizer is None:
            stream = [(7 * i) % known for i in range(4099)]
        else:
            text = "\n\n".join(text.turns[0] for text in shipped())
            stream = [token for token in system.codec.encode(text) if token < known]
        count = rows * THOROUGH_TURNS
        starts = [(i * (context + 37)) % len(stream) for i in range(count)]
        return [[stream[(at + j) % len(stream)] for j in range(context)] for at in starts]

    def _costs(self, rows: int, context: int, found: dict[str, RoundCosts]) -> Costs:
        plain, verify = found[PLAIN].rows[rows], found[VERIFY].rows[rows]
        draft = found[DRAFT].rows[rows] if DRAFT in found else None
        step = plain.forwards[0][1]
        scale = step / verify.forwards[0][1] if verify.forwards[0][0] == 1 else 1.0
        rounds = {width: seconds * scale for width, seconds, _ in verify.forwards}
        rounds[1] = step
        forwards: dict[int, list[float]] = defaultdict(list)
        for records in (*self._records[VERIFY], *self._records[PLAIN]):
            if len(records) == rows and not records[0].prefill:
                forwards[records[0].width].append(records[0].verify_seconds)
        return Costs(
            rows=rows,
            context=context,
            target_step=step,
            rounds=dict(sorted(rounds.items())),
            forwards={width: median(seconds) for width, seconds in sorted(forwards.items())},
            draft_start=draft.start if draft is not None else 0.0,
            draft_step=draft.step if draft is not None else 0.0,
            prefill=1 / plain.prefill if plain.prefill > 0 else 0.0,
        )

    # -- what there is

    @property
    def begun(self) -> bool:
        return bool(self.costs)

    def result(self, *, stopped: bool = False) -> Profile:
        """What is measured by now; the first size must be."""
        system = self.systems.get(DRAFT, self.systems[PLAIN])
        drafter = self.systems[DRAFT].engine.parts.drafter if DRAFT in self.systems else None
        most = self._asked.max_gamma if self._asked.gamma == "auto" else self._asked.gamma
        found = Profile(
            machine=machine(),
            settings=self._asked.told() | {"rows": self._rows, "contexts": list(self.contexts)},
            about=system.facts(),
            costs=tuple(self.costs),
            memory=self._memory(),
            free=drafter is not None and drafter.free,
            most=max(1, most),
            seconds=self._spent,
            notes=(*self.notes, *(["it was stopped (Ctrl-C) before its time was over"] * stopped)),
        )
        return Profile(**{**vars(found), "warnings": tuple(_warnings(found, drafts=drafter is not None))})

    def _memory(self) -> Memory:
        system = self.systems.get(DRAFT, self.systems[PLAIN])
        slab, drafter = system.engine.parts.runner.slab, system.engine.parts.drafter
        about = memory(system.device)
        return Memory(
            target=system.report.bytes,
            draft=system.draft_report.bytes if system.draft_report is not None else 0,
            token=slab.token_bytes + (drafter.token_bytes if drafter is not None else 0),
            captured=_captured_bytes(system.device),
            rows=slab.rows,
            max_len=slab.max_len,
            total=about["total"],
            free=about["free"],
        )


def _captured_bytes(device: torch.device) -> int:
    """What lies in the memory pools of captured rounds."""
    if device.type != "cuda":
        return 0
    segments: list[dict[str, Any]] = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    return sum(s["total_size"] for s in segments if tuple(s.get("segment_pool_id", (0, 0))) != (0, 0))


def _warnings(found: Profile, *, drafts: bool) -> Iterator[str]:
    """What stands against speculation, with what the cost model says of it."""
    first = found.costs[0]
    if drafts and first.faster is not None and first.faster < FASTER:
        predicted = ", ".join(f"{first.best(a, found.most)[1]:.2f}x at alpha {a:g}" for a in ALPHAS[1::2])
        least = first.break_even(found.most)
        pays = f"it pays from alpha {least:.2f} on" if least is not None else "it pays at no alpha"
        yield (
            f"the draft's step is {first.faster:.1f} times faster than the target's, and five times is what one wants; "
            f"predicted at the best draft length: {predicted}; {pays}"
        )
    wide = first.verify(5)
    if wide > 2.0:
        yield (
            f"checking four drafted tokens takes {wide:.1f} times as long as a plain step: this target is not bound by "
            "memory here, so that long drafts pay only where most of them hold"
        )
    rows = max(found.costs, key=lambda c: c.rows)
    if rows.rows > 1 and rows.verify(5) > 1.5 * wide:
        yield (
            f"with {rows.rows} rows, checking four drafted tokens takes {rows.verify(5):.1f} plain steps instead of "
            f"{wide:.1f}: speculation wins less the more requests run together"
        )


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + "s" * (number != 1)
