"""What rounds cost where they really run: in the engine, with the drafter in use, by rows, width and draft length.

Knows: how to make an engine draft so many tokens for some rounds, and what to read off them. Does not know: how often
guesses hold, or what a figure is used for.

All systems that are measured take turns, a few rounds of each draft length at a time, and each turn is counted in plain
rounds of that very turn: what slows the machine down for a while falls on all alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from math import ceil, floor
from statistics import median
from time import perf_counter
from typing import Any

from ..control.controller import GreedyAndSampled
from ..drafters.base import Drafter
from ..maths.cost import CostModel, Point, by_width, slope, start_and_step, with_draft
from ..sampling import SamplingParams
from ..types import Request, Round
from .sweep import TINY, Sweep
from .system import System
from .turns import uncollected

__all__ = ["RoundCosts", "RowCosts", "measure_rounds"]

WARM = 2  # rounds of a block that are not counted: what changes between blocks takes time of its own
COUNTED = 5
ENOUGH = 0.6  # seconds of a block, where two of its rounds are counted
LEAST = 4  # draft lengths that are measured in any turn
LIKE_PLAIN = 1.02  # plain rounds that a round without a draft takes at the most
SPARE = 4  # tokens of an answer that no block takes: a row that ends in the middle of one spoils it
SHORT = 4  # requests that end soon, to see rounds that are not launched ahead
LENGTHS = (0, 1, 2, 3, 4, 6, 8, 10)


@dataclass(frozen=True)
class RowCosts:
    """Seconds of rounds with one number of rows."""

    forwards: tuple[Point, ...]  # a round less drafting: width, seconds, how often that was timed
    start: float = 0.0  # of any draft
    step: float = 0.0  # and for each of its tokens
    prefill: float = 0.0  # of the target, for a token of these rows' prompts, read together
    reading: float = 0.0  # of the drafter, for such a token, which it did not read yet
    gap: float = 0.0  # that a captured round takes longer if it is not launched before the last one is read
    scatter: tuple[float, ...] = (1.0,)  # of single rounds, in the order of time: what each took, over what is usual

    def forward(self, width: float) -> float:
        """``width``: tokens a row, in the mean where rows differ."""
        last, seconds, _ = self.forwards[-1]
        if width <= last:
            whole, known = floor(width), by_width(self.forwards, ceil(width))
            return known[whole - 1] + (known[-1] - known[whole - 1]) * (width - whole)
        more = slope(self.forwards) if len(self.forwards) > 1 else 0.0
        return seconds + max(0.0, more) * (width - last)


@dataclass(frozen=True)
class RoundCosts:
    """What rounds of one system cost."""

    rows: Mapping[int, RowCosts]
    reads_apart: bool = False  # that is counted apart from drafting (``Drafter.catch_up``)
    free: bool = False  # guesses cost nothing, but for those that say so (``Proposal.paid``)
    lengths: tuple[int, ...] | None = None  # a draft model in captured rounds: all rows draft together, so many tokens
    buckets: tuple[int, ...] | None = None  # captured rounds: other numbers of rows run as the next larger of these
    ragged: bool = False  # a forward takes no longer than its tokens (``ModelRunner.ragged``)

    def width(self, drafted: Sequence[int]) -> float:
        """Tokens a row that a forward takes as long as, in which rows verify so many guesses."""
        return 1 + (sum(drafted) / len(drafted) if self.ragged else max(drafted))

    def forward(self, rows: int, width: float) -> float:
        """Seconds of a round less drafting: between measured numbers of rows on a line, beyond them as at the last."""
        return self._between(rows, lambda costs: costs.forward(width))

    def draft(self, rows: int, length: int) -> float:
        return self._between(rows, lambda costs: costs.start + length * costs.step) if length else 0.0

    def prefill(self, rows: int) -> float:
        """Seconds of the target for a token of so many rows' prompts, read together."""
        return self._between(rows, lambda costs: costs.prefill)

    def reading(self, rows: int) -> float:
        """Of the drafter, for a token of so many rows that it did not read yet."""
        return self._between(rows, lambda costs: costs.reading)

    def gap(self, rows: int) -> float:
        """What a captured round takes longer that was not launched ahead: the device waits for the host."""
        return self._between(rows, lambda costs: costs.gap)

    def scatter(self, rows: int) -> tuple[float, ...]:
        """What single rounds took, over what is usual: of the measured number of rows nearest to this."""
        return self.rows[min(self.rows, key=lambda known: abs(known - rows))].scatter

    def plain(self, rows: int) -> float:
        return self.forward(rows, 1)

    def model(self, rows: int) -> CostModel:
        """The cost model of ``maths.cost`` for so many rows, in plain rounds: a draft's start counts as overhead."""
        plain, (start, step) = self.plain(rows), self._line(rows)
        v = {width: self.forward(rows, width) / plain for width in (1, 2, 3, 4, 5, 7, 9, 11)}
        return CostModel(c=step / plain, v=v, overhead=start / plain)

    def times(self, rows: int, most: int) -> list[float]:
        """Seconds of rounds by their draft length, 0 .. most, drafting included."""
        return with_draft([self.forward(rows, width) for width in range(1, most + 2)], *self._line(rows))

    def _line(self, rows: int) -> tuple[float, float]:
        step = self.draft(rows, 2) - (first := self.draft(rows, 1))
        return first - step, step

    def _between(self, rows: int, value: Callable[[RowCosts], float]) -> float:
        rows = next((n for n in self.buckets or () if n >= rows), rows)
        known = sorted(self.rows)
        below = max((r for r in known if r <= rows), default=known[0])
        above = min((r for r in known if r >= rows), default=known[-1])
        low, high = value(self.rows[below]), value(self.rows[above])
        return low if above == below else low + (high - low) * (rows - below) / (above - below)


@dataclass
class _Seen:
    """What was timed of one system at one number of rows: in plain rounds of the turn it was timed in."""

    forwards: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))  # by width, one a turn
    drafts: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))  # by length
    reading: list[float] = field(default_factory=list)  # of a token
    prefill: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    rounds: list[tuple[int, float]] = field(default_factory=list)  # width and seconds of each, in the order of time


def measure_rounds(
    systems: Mapping[str, System],
    prompts: Sequence[Sequence[int]],
    *,
    rows: Sequence[int] = (1,),
    lengths: Sequence[int] = LENGTHS,
    turns: int = 5,
    plain: str = "plain",
    late: Callable[[], bool] = lambda: False,
    tell: Callable[[str], None] = lambda text: None,
) -> dict[str, RoundCosts]:
    """The costs of each system. ``systems[plain]`` drafts nothing; the others are swept over draft lengths.

    Each turn takes other prompts, so that none is warm. ``late``: begin no further turn.
    """
    seen = {name: {n: _Seen() for n in rows} for name in systems}
    units: dict[int, list[float]] = defaultdict(list)
    for turn in range(turns):
        for count in rows:
            if turn and late():
                continue
            tell(f"measuring rounds of {count} row{'s' * (count > 1)}: turn {turn + 1} of {turns}")
            lines = [list(prompts[(turn * count + i) % len(prompts)]) for i in range(count)]
            _turn(systems, plain, lines, lengths, seen, units, count, late)
    return {name: _costs(systems[name], found, units) for name, found in seen.items()}


def _turn(
    systems: Mapping[str, System],
    plain: str,
    lines: Sequence[list[int]],
    lengths: Sequence[int],
    seen: Mapping[str, Mapping[int, _Seen]],
    units: dict[int, list[float]],
    rows: int,
    late: Callable[[], bool],
) -> None:
    blocks = {name: _Blocks(system, lines) for name, system in systems.items()}
    with uncollected(), ExitStack() as ends:
        for each in blocks.values():
            ends.callback(each.end)
            each.begin()
        # Draft lengths in turn, within each all systems, and plain rounds between all of them: each block is counted in
        # those before and behind it. They are as many, because an engine's first rounds behind another's are slow.
        rounds = blocks[plain].fitting(1 + len(lengths) * (len(systems) - 1))
        before = blocks[plain].block(0, *rounds)
        for number, length in enumerate(_telling_first(lengths)):
            if number >= LEAST and late():
                break
            for name, each in blocks.items():
                if name != plain:
                    found = each.block(length, *rounds)
                    behind = blocks[plain].block(0, *rounds)
                    _add(seen[name][rows], found, median([*before.seconds, *behind.seconds]))
                    before = behind
        for each in blocks.values():
            each.wait_for_host(min((n for n in lengths if n > 1), default=max(lengths)))
    unit = median(blocks[plain].plain)
    units[rows].append(unit)
    for name, each in blocks.items():
        mine = seen[name][rows]
        mine.reading += [seconds / unit / sum(map(len, lines)) for seconds in each.reading]
        mine.prefill += [seconds / unit for seconds in each.prefill]
        mine.gaps += [seconds / unit for seconds in each.gaps]
    seen[plain][rows].forwards[1].append(1.0)


def _telling_first(lengths: Sequence[int]) -> list[int]:
    """The same lengths, so that the first few of them say the most: none, the shortest, the middle, the longest."""
    few = [lengths[i] for i in dict.fromkeys((0, min(1, len(lengths) - 1), len(lengths) // 2, len(lengths) - 1))]
    return [*few, *(length for length in lengths if length not in few)]


def _add(seen: _Seen, block: _Block, unit: float) -> None:
    if block.seconds:
        seen.forwards[block.width].append(median(block.seconds) / unit)
        seen.rounds += [(block.width, seconds) for seconds in block.seconds]
    if block.drafting:
        seen.drafts[block.width - 1].append(median(block.drafting) / unit)


@dataclass
class _Block:
    """Some rounds of one draft length, all as wide as that."""

    width: int
    seconds: list[float] = field(default_factory=list)  # less drafting
    drafting: list[float] = field(default_factory=list)


class _Blocks:
    """One system, its rows busy, some rounds of one draft length at a time."""

    LONG = 4096  # tokens of an answer: the rows never end by themselves

    def __init__(self, system: System, lines: Sequence[list[int]]) -> None:
        self.system, self.lines = system, lines
        self.plain: list[float] = []
        self.reading: list[float] = []
        self.prefill: list[float] = []
        self.gaps: list[float] = []
        self._sweep = Sweep()
        self._records: list[list[Round]] = []
        self._drafted = False
        self._open = ExitStack()
        self._room = 0  # tokens of an answer

    def begin(self) -> None:
        system, engine = self.system, self.system.engine
        system.cold()
        controller = engine.parts.controller
        assert isinstance(controller, GreedyAndSampled), "costs are measured of systems that choose their draft length"
        self._open.enter_context(controller.replaced(self._sweep))
        self._open.enter_context(system.listen(self._records.append))
        self._room = min(self.LONG, system.max_len - max(map(len, self.lines)) - 1)
        params = SamplingParams(temperature=0, max_tokens=self._room, ignore_eos=True)
        started = perf_counter()
        for i, line in enumerate(self.lines):
            engine.submit(Request(f"rounds-{i}", tuple(line), params))
        while not self._records or len(self._records[-1]) < len(self.lines) or self._records[-1][0].prefill:
            engine.step()
        read = [records for records in self._records if records[0].prefill]
        seconds = sum(records[0].round_seconds for records in read) or perf_counter() - started
        self.prefill.append(seconds / sum(map(len, self.lines)))

    def fitting(self, blocks: int) -> tuple[int, int]:
        """Rounds of each of so many plain blocks that are not counted, and that are: as many as there is room for."""
        fit = (self._room - SPARE) // blocks
        return (WARM, COUNTED) if fit >= WARM + COUNTED else (1, max(1, fit - 1))

    def block(self, gamma: int, warm: int = WARM, counted: int = COUNTED) -> _Block:
        """Rounds with drafts of ``gamma`` tokens. A drafter that catches up does so in the first."""
        engine, self._sweep.gamma, found = self.system.engine, gamma, _Block(gamma + 1)
        begun = perf_counter()
        for number in range(warm + counted):
            if len(found.seconds) > 1 and perf_counter() - begun > ENOUGH:
                break
            self._records.clear()
            started = perf_counter()
            engine.step()
            seconds = perf_counter() - started
            if len(self._records) == 1 and len(self._records[0]) == len(self.lines):
                self._count(self._records[0], seconds, found, counted=number >= warm)
        if not gamma:
            self.plain += found.seconds
        return found

    def wait_for_host(self, gamma: int) -> None:
        """Time captured rounds that are not launched ahead, as when some row is near its end: short requests take the
        place of a row."""
        engine, captured = self.system.engine, self.system.engine.parts.captured
        if captured is None:
            return
        gamma = gamma if captured.drafting else 0
        usual = self.block(gamma).seconds
        engine.abort("rounds-0")
        # It does not draft: a token a round, so that it is near its end for some rounds.
        short = SamplingParams(temperature=0, max_tokens=gamma + 2, ignore_eos=True, speculate=False)
        for number in range(SHORT):
            handle = engine.submit(Request(f"short-{number}", tuple(self.lines[0]), short))
            while engine.running(handle) is not None:
                waited = not captured.in_flight
                self._records.clear()
                started = perf_counter()
                engine.step()
                seconds = perf_counter() - started
                [records, *more] = self._records or [[]]
                if usual and waited and not more and len(records) == len(self.lines) and not records[0].prefill:
                    drafted = records[0].draft_seconds * (records[0].width > 1) + records[0].catch_up_seconds
                    self.gaps.append(seconds - drafted - median(usual))

    def _count(self, records: Sequence[Round], seconds: float, found: _Block, *, counted: bool) -> None:
        first, longest = records[0], max(record.drafted for record in records)
        if counted and first.width == found.width and first.tokens in (0, len(records) * first.width):
            found.seconds.append(max(seconds - first.draft_seconds * (longest > 0) - first.catch_up_seconds, TINY))
            if longest:
                found.drafting.append(first.draft_seconds)
        elif longest and not self._drafted:
            # The first draft: the prompts were read for it, by ``catch_up`` or within the draft.
            self.reading.append(first.draft_seconds + first.catch_up_seconds)
        self._drafted |= longest > 0

    def end(self) -> None:
        engine = self.system.engine
        self._open.close()
        for i in range(len(self.lines)):
            engine.abort(f"rounds-{i}")
        self.system.cold()


def _sound(width: int, plain_rounds: float) -> float:
    """It does what a plain round does, and without a draft little beside: the rest is noise of few turns."""
    return max(1.0, plain_rounds if width > 1 else min(plain_rounds, LIKE_PLAIN))


def _costs(system: System, found: Mapping[int, _Seen], units: Mapping[int, Sequence[float]]) -> RoundCosts:
    drafter, captured = system.engine.parts.drafter, system.engine.parts.captured
    each = {}
    for count, seen in found.items():
        unit = median(units[count])
        points = tuple(
            (w, unit * _sound(w, median(values)), len(values)) for w, values in sorted(seen.forwards.items())
        )
        lines = [(n, unit * median(values), len(values)) for n, values in sorted(seen.drafts.items())]
        start, step = start_and_step(lines)
        reading, prefill, gap = (unit * median(each or [0.0]) for each in (seen.reading, seen.prefill, seen.gaps))
        usual = {width: seconds for width, seconds, _ in points}
        scatter = tuple(seconds / usual[width] for width, seconds in seen.rounds) or (1.0,)
        each[count] = RowCosts(points, start, step, prefill, reading, max(0.0, gap), scatter)
    on_device = captured is not None and captured.drafting
    return RoundCosts(
        each,
        reads_apart=drafter is not None and type(drafter).catch_up is not Drafter.catch_up,
        free=drafter is not None and drafter.free,
        lengths=captured.lengths if captured is not None and on_device else None,
        buckets=captured.buckets if captured is not None else None,
        ragged=system.engine.parts.runner.ragged,
    )


def with_widths(costs: RoundCosts, other: RoundCosts) -> RoundCosts:
    """These costs, with another system's widths where this one was not seen as wide (``lookup`` seldom guesses)."""

    def joined(own: RowCosts, more: RowCosts) -> RowCosts:
        plain, theirs = own.forwards[0][1], more.forwards[0][1]
        known = {width for width, _, _ in own.forwards}
        extra = [(w, seconds * plain / theirs, n) for w, seconds, n in more.forwards if w not in known]
        return replace(own, forwards=tuple(sorted([*own.forwards, *extra])))

    return replace(
        costs, rows={n: joined(own, other.rows[n]) if n in other.rows else own for n, own in costs.rows.items()}
    )


def told(costs: RoundCosts) -> dict[str, Any]:
    """For a report: in milliseconds."""
    return {
        str(rows): {
            "forward_ms": {str(width): seconds * 1e3 for width, seconds, _ in each.forwards},
            "draft_start_ms": each.start * 1e3,
            "draft_step_ms": each.step * 1e3,
            "prefill_token_ms": each.prefill * 1e3,
            "draft_reads_token_ms": each.reading * 1e3,
            "not_ahead_ms": each.gap * 1e3,
        }
        for rows, each in costs.rows.items()
    }
