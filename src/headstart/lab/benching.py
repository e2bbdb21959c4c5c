"""How much faster is speculation here? Plain and speculative decoding of the same prompts, side by side.

Knows: which prompts are measured how often in the time there is, and what becomes of the times. Does not know: how an
engine works (``system``), how turns are taken (``turns``), or how a report looks (``report``).

Every engine answers a prompt or two first, which is not counted, and one that chooses its draft length some more: its
controller has to find out what pays. Then prompts come in turns, the tasks mixed: the first turn takes as many prompts
as the time allows to be measured several times, and the next ones repeat them. What a controller learns stays, as it
does in service; no prompt is warm.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import HeadstartError, InvalidParameter, PromptTooLong
from ..types import Tell, silent
from .bench_record import ALL, PLAIN, SECONDS, Bench, BenchSettings, Way
from .budget import Budget
from .figures import Measured, figures
from .machine_facts import machine
from .peers import HuggingFace, open_peers
from .stalls import without_stalls
from .statistics import Block, Ratio, ratio
from .system import System, SystemOptions
from .texts import Text, by_task, choose, shipped
from .turns import Run, in_turn

__all__ = ["Bencher", "bench"]

Part = Callable[[Measured], tuple[int, float]]  # tokens and seconds

WARM_TOKENS = 24
TURNS = 4  # times that a prompt should be measured
MOST_TURNS = 20
THOROUGH_TURNS = 8
SETTLING = 0.1  # of the time, before anything is counted
DRAFTED = 0.1  # of an answer's rounds, from where on it counts as drafted


def bench(
    options: SystemOptions | None = None,
    texts: Sequence[Text] | None = None,
    settings: BenchSettings | None = None,
    *,
    tell: Tell | None = None,
    **given: Any,
) -> Bench:
    """Measure plain and speculative decoding. ``given``: fields of ``SystemOptions`` and ``BenchSettings``.

    ``texts``: None is our sixty prompts. ``tell`` hears how far it is.
    """
    names = BenchSettings.__dataclass_fields__
    settings = replace(settings or BenchSettings(), **{k: v for k, v in given.items() if k in names})
    options = (options or SystemOptions()).changed(**{k: v for k, v in given.items() if k not in names})
    with Bencher(options, texts, settings, tell=tell or silent) as bencher:
        bencher.run(settings.seconds)
        return bencher.result()


@dataclass(frozen=True)
class _Unit:
    """Texts that are answered together, at one turn of their conversations."""

    number: int
    group: int  # which texts
    texts: tuple[Text, ...]
    turn: int  # of the conversation

    @property
    def task(self) -> str:
        return self.texts[0].task


class Bencher:
    """A bench in the making: ``run`` may be interrupted, and ``result`` tells what there is by then."""

    def __init__(
        self, options: SystemOptions, texts: Sequence[Text] | None, settings: BenchSettings, *, tell: Tell = silent
    ) -> None:
        self.settings, self._tell = settings, tell
        self._texts = list(texts) if texts is not None else choose(shipped())
        if not self._texts:
            raise InvalidParameter("prompts", "hold nothing to measure on")
        options = options.changed(max_rows=max(options.max_rows, settings.rows))
        self.systems: dict[str, System] = {}
        self.peers: list[HuggingFace] = []
        self.notes: list[str] = []
        try:
            self._open(options)
        except BaseException:
            self.close()
            raise
        self._units = list(self._grouped())
        self._ids: dict[int, list[list[int]]] = {}  # of units
        self._long: dict[int, Text] = {}  # groups that are left out, and which of their texts has no room
        self._answers: dict[tuple[int, int], list[str]] = {}  # of a group, at a turn
        self._measured: dict[str, list[tuple[_Unit, Measured]]] = {}
        self._spent = 0.0

    def _open(self, options: SystemOptions) -> None:
        drafts = [options.draft, *self.settings.drafters]
        first = System.open(options.changed(draft=None), self._tell)
        self.systems[PLAIN] = first
        first.options = options  # what it is a sibling of
        first.options = first.hold_threads()
        for draft in drafts:
            if draft is None or options.gamma == 0:
                continue
            system = first.sibling(draft, self._tell)
            name = system.drafter_name if draft in ("auto", system.drafter_name) else _short(draft)
            while name in self.systems:
                name += "'"
            self.systems[name] = system
        self.peers, self.notes = open_peers(self.settings.peers, first, self.settings.rows, self._tell)

    def __enter__(self) -> Bencher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for system in self.systems.values():
            system.close()
        self.systems, self.peers = {}, []

    def _grouped(self) -> Iterator[_Unit]:
        """Texts of one task together, as many as there are rows; the tasks in turn."""
        rows, number = self.settings.rows, 0
        groups = {
            task: [tuple(texts[(i + j) % len(texts)] for j in range(rows)) for i in range(0, len(texts), rows)]
            for task, texts in by_task(self._texts).items()
        }
        together = [each[i] for i in range(max(map(len, groups.values()))) for each in groups.values() if i < len(each)]
        for group, texts in enumerate(together):
            for turn in range(max(1, *(len(text.turns) for text in texts))):
                yield _Unit(number, group, texts, turn)
                number += 1

    # -- measuring

    def run(self, limit: float | None = SECONDS) -> None:
        """Measure until the seconds are over (None: no limit) or every prompt was measured often enough."""
        self._prepare()
        budget = Budget(limit)
        if limit is not None:
            self._settle(budget.part(SETTLING))
        turns = self.settings.turns or (THOROUGH_TURNS if limit is None else MOST_TURNS)
        share = 1.0 / min(TURNS, turns)
        chosen: list[_Unit] = []
        tasks = len({unit.task for unit in self._units})
        try:
            for unit in filter(self._fits, self._units):
                spent = budget.spent
                enough = share * limit * (1 if len(chosen) >= tasks else 2) if limit is not None else spent
                if chosen and (budget.over or (self.settings.turns is None and spent > enough)):
                    break
                chosen.append(unit)
                self._block(unit, 0)
                self._say(len(chosen), 1, budget)
            for turn in range(1, turns):
                for done, unit in enumerate(chosen, 1):
                    if budget.over:
                        return
                    self._block(unit, turn)
                    self._say(done, turn + 1, budget, len(chosen))
        finally:
            self._spent = budget.spent

    def _say(self, done: int, turn: int, budget: Budget, of: int | None = None) -> None:
        whole = f" of {of}" if of is not None else ""
        left = f", {max(0.0, budget.left):.0f} s left" if budget.seconds is not None else ""
        found = ratio(self.pairs(list(self.systems)[1])) if len(self.systems) > 1 else None
        shown = f"; speed-up so far {found}" if found is not None else ""
        self._tell(f"measuring: turn {turn}, prompt {done}{whole}{left}{shown}")

    def _prepare(self) -> None:
        """Let every engine answer once: what is done first is slow."""
        self._tell("warming up")
        first = next(filter(self._fits, self._units), None)
        if first is None:
            raise PromptTooLong("prompts", f"have no room, not one of them: {self._left_out()}")
        params = replace(self.settings.params(0), max_tokens=min(WARM_TOKENS, self.settings.tokens))
        for each in self.systems.values():
            in_turn({"": Run(each.engine, self._prompt(first), params)})
        for peer in self.peers:
            peer.block(self._prompt(first), [params] * len(first.texts))

    def _settle(self, budget: Budget) -> None:
        """Let controllers that choose draft lengths find out what pays, as they have in service."""
        choosing = [each for name, each in self.systems.items() if name != PLAIN and each.options.gamma == "auto"]
        for number, unit in enumerate(filter(self._fits, self._units)):
            if not choosing or budget.over or unit.turn:
                return
            params = self.settings.params(number)
            in_turn(
                {str(i): Run(each.engine, self._prompt(unit), params, learnt=True) for i, each in enumerate(choosing)}
            )

    def _fits(self, unit: _Unit) -> bool:
        """Is there room for its prompts and their answers? Where there is none, it is left out, with the turns of the
        conversation behind it."""
        if unit.group in self._long:
            return False
        room = self.systems[PLAIN].max_len - self.settings.tokens
        try:
            long = [text for text, ids in zip(unit.texts, self._prompt(unit), strict=True) if len(ids) > room]
        except PromptTooLong:  # so long that it was not even tokenized
            long = [max(unit.texts, key=lambda text: len(str(text.conversation())))]
        if long:
            self._long[unit.group] = long[0]
        return not long

    def _left_out(self) -> str:
        which, most = next(iter(self._long.values())), self.systems[PLAIN].max_len
        return (
            f"with an answer of {self.settings.tokens} tokens a prompt may have {most - self.settings.tokens} "
            f"(--max-model-len is {most}), and this one has more: {which.beginning!r}"
        )

    def _prompt(self, unit: _Unit) -> list[list[int]]:
        if unit.number not in self._ids:
            system, found = self.systems[PLAIN], []
            before = [self._answers[unit.group, turn] for turn in range(unit.turn)]
            for row, text in enumerate(unit.texts):
                last = min(unit.turn, max(0, len(text.turns) - 1))
                try:
                    found.append(system.ids(text, [answers[row] for answers in before[:last]]))
                except PromptTooLong:
                    raise
                except InvalidParameter as error:
                    said = f"hold one that cannot be asked: {error} ({text.beginning!r})"
                    raise InvalidParameter("prompts", said) from error
            self._ids[unit.number] = found
        return self._ids[unit.number]

    def _block(self, unit: _Unit, turn: int) -> None:
        """All engines answer once; whoever comes first is another one each time."""
        prompts = self._prompt(unit)
        params = [self.settings.params(1000 * turn + row) for row in range(len(prompts))]
        names = list(self.systems)
        shift = (turn + unit.number) % len(names)
        runs = {
            name: Run(self.systems[name].engine, prompts, params, learnt=True) for name in names[shift:] + names[:shift]
        }
        found = in_turn(runs)
        measured = {name: run.measured() for name, run in runs.items()}
        if (unit.group, unit.turn) not in self._answers:
            self._answers[unit.group, unit.turn] = [answer.choice.text for answer in found[PLAIN]]
        for peer in self.peers:
            measured[peer.name] = peer.block(prompts, params)
        for name, each in measured.items():  # all of them, or none
            self._measured.setdefault(name, []).append((unit, each))

    # -- what there is

    @property
    def begun(self) -> bool:
        return self.blocks > 0

    @property
    def blocks(self) -> int:
        """Measured so far."""
        return len(self._measured.get(PLAIN, ()))

    def measured(self, name: str) -> list[Measured]:
        """The blocks of one way to decode, in the order of time, as they were measured."""
        return [measured for _, measured in self._measured.get(name, ())]

    def pairs(self, name: str, part: Part | None = None, task: str | None = None) -> list[Block]:
        """Blocks of plain decoding and of another way, in the order of time. ``part``: what of an answer counts; by
        default all but its first token."""
        part = part or _decoding
        units = [unit for unit, _ in self._measured.get(PLAIN, ())]
        both = zip(units, self._steady(PLAIN), self._steady(name), strict=True)
        chosen = [(unit, base, mine) for unit, base, mine in both if task in (None, unit.task)]
        return [Block(unit.number, *part(base), *part(mine), drafted=_drafted(mine)) for unit, base, mine in chosen]

    def _steady(self, name: str) -> list[Measured]:
        """Of one way, less what something else on the machine took of its time."""
        return without_stalls(self.measured(name))

    def _ratios(self, name: str, tasks: Sequence[str], part: Part) -> dict[str, Ratio]:
        found = {task: ratio(self.pairs(name, part, None if task == ALL else task)) for task in (ALL, *tasks)}
        return {task: each for task, each in found.items() if each is not None}

    def result(self, *, stopped: bool = False) -> Bench:
        """What is measured by now. Raises if that is nothing. ``stopped``: somebody did not want to wait."""
        if not self.blocks:
            raise HeadstartError("nothing was measured: the time was over before the first prompt was answered")
        measured = [unit for unit, _ in self._measured[PLAIN]]
        units = {unit.number: unit for unit in measured}
        tasks = list(dict.fromkeys(unit.task for unit in measured))
        asked = {(id(text), unit.turn): text.task for unit in units.values() for text in unit.texts}
        counts = {task: sum(each == task for each in asked.values()) for task in tasks}
        notes = [*self.notes, *(["it was stopped (Ctrl-C) before its time was over"] * stopped)]
        if self._long:
            notes.append(f"prompts were left out ({len(self._long)}): {self._left_out()}")
        if left := sorted({unit.task for unit in self._units if unit.group not in self._long} - set(tasks)):
            notes.append(f"there was no time for these tasks: {', '.join(left)}")
        notes += [said for name in self.systems if name != PLAIN for said in self._comes_and_goes(name)]
        if len(measured) < 2 * len(units):
            notes.append("there was no time to measure all prompts twice: the interval says little")
        return Bench(
            machine=machine(),
            settings=self._settings(),
            ways=tuple(self._way(name, tasks) for name in self._measured),
            prompts=counts,
            blocks=len(measured),
            turns=len(measured) / len(units),
            seconds=self._spent,
            notes=tuple(notes),
        )

    def _comes_and_goes(self, name: str) -> Iterator[str]:
        """Where the controller drafted an answer now and not the next time, a short bench sees too little of either."""
        drafted: dict[int, list[bool]] = defaultdict(list)
        for unit, block in self._measured[name]:
            drafted[unit.number].append(_drafted(block))
        both = sum(len(set(each)) > 1 for each in drafted.values())
        if both > max(1, len(drafted) // 4):
            yield (
                f"{name}: {both} of {len(drafted)} prompts were answered with drafts at one time, without at another: "
                "it hardly pays here, or has only just begun to; a longer bench (--seconds) says more, and --gamma N "
                "drafts always"
            )

    def _settings(self) -> dict[str, Any]:
        mine = {name: getattr(self.settings, name) for name in self.settings.__dataclass_fields__}
        default = BenchSettings()
        shown = {k: v for k, v in mine.items() if v != getattr(default, k) or k in ("tokens", "rows", "temperature")}
        return self.systems[PLAIN].options.told() | shown

    def _way(self, name: str, tasks: Sequence[str]) -> Way:
        found, plain = self._measured[name], self._measured[PLAIN]
        rows = self.settings.rows
        each = {ALL: figures([m for _, m in found], rows)}
        each |= {task: figures([m for unit, m in found if unit.task == task], rows) for task in tasks}
        pairs = [(a, b) for (_, x), (_, y) in zip(found, plain, strict=True) for a, b in zip(x.ids, y.ids, strict=True)]
        system = self.systems.get(name)
        about = system.facts() if system is not None else next(p.facts() for p in self.peers if p.name == name)
        return Way(
            name=name,
            about=about,
            figures=each,
            speedup=self._ratios(name, tasks, _decoding) if name != PLAIN else {},
            end_to_end=self._ratios(name, tasks, _whole) if name != PLAIN else {},
            same=(sum(a == b for a, b in pairs), len(pairs)),
            inactive=system.engine.inactive_reason if system is not None and name != PLAIN else None,
        )


def _decoding(block: Measured) -> tuple[int, float]:
    return block.decode_tokens, block.decode_seconds


def _whole(block: Measured) -> tuple[int, float]:
    return block.tokens, block.seconds


def _drafted(block: Measured) -> bool:
    return sum(record.drafted > 0 for record in block.rounds) > DRAFTED * len(block.rounds)


def _short(draft: object) -> str:
    """A draft's name without its folder."""
    text = str(draft) if isinstance(draft, str) or hasattr(draft, "parts") else type(draft).__name__
    return text.rstrip("/").rsplit("/", 1)[-1]
