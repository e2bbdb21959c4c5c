"""A small world for the controller: what rounds cost and how drafts fare is said here, and nothing is timed.

A machine says what a forward of rows x width tokens takes, a step and a reading by the draft, and whether the next
round is launched before the last one is read (a GPU): changing between plain and drafted rounds then leaves a gap.
What the controller is told is noisy, with outliers as on a busy machine; what is counted is the truth. Seeded, so
repeatable.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from headstart.control.adaptive import AdaptiveController
from headstart.types import Proposal, Round, SamplingParams

PROMPT = 64

Alpha = Callable[[int, int], float]  # tokens written so far, place in the draft (0 is the first) -> acceptance


def curve(*points: tuple[int, float]) -> Callable[[int], float]:
    """Linear between points, and beyond them as between the last two."""

    def value(x: int) -> float:
        (a, low), (b, high) = next((pair for pair in pairwise(points) if x <= pair[1][0]), (points[-2], points[-1]))
        return low + (high - low) * (x - a) / (b - a)

    return value


@dataclass(frozen=True)
class Machine:
    """Milliseconds. ``ratio``: a draft step over a plain forward of one row."""

    forward: Callable[[int, int], float]  # rows, width
    ratio: float
    reading: tuple[
        float, float, float
    ]  # of the draft: of 512 tokens at most, in ms and in draft steps; a token's, in steps
    ahead: bool  # rounds are launched ahead
    gap: float = 0.0  # where nothing was
    noise: float = 0.02
    outliers: float = 0.04
    rows_cost: float = 0.7  # how much more a draft step takes with 32 rows
    ragged: bool = False  # a forward takes no longer than its tokens; else all rows are as wide as the widest

    def step(self, rows: int) -> float:
        return self.ratio * self.forward(1, 1) * (1 + self.rows_cost * (rows - 1) / 31)

    def read(self, tokens: int) -> float:
        fixed, steps, token = self.reading
        return (fixed + steps * self.step(1)) * -(-tokens // 512) + token * self.step(1) * tokens


_GPU = curve((1, 4.9), (32, 5.2), (128, 7.0), (256, 9.0))
_CPU = curve((1, 39), (2, 42), (3, 44), (4, 47), (5, 42), (7, 49), (8, 51), (16, 67))


def gpu(ratio: float = 0.35 / 4.9) -> Machine:
    """An H200 with an 8B target. A 135M draft reads 64 tokens in 1 ms, one of a third of the target 2,000 in 18 ms."""
    return Machine(lambda r, w: _GPU(r * w), ratio, (0.7, 1.0, 0.0025), ahead=True, gap=0.4, noise=0.01)


def cpu(ratio: float = 16 / 39) -> Machine:
    """Two cores with a 1.5B target in int4: five tokens cost less than four."""
    return Machine(lambda r, w: _CPU(r * w), ratio, (0.0, 1.0, 0.045), ahead=False, noise=0.03, rows_cost=1.5)


def ragged_cpu(ratio: float = 16 / 39) -> Machine:
    return replace(cpu(ratio), ragged=True)


@dataclass
class View:
    id: str
    tokens: list[int] = field(default_factory=lambda: [1] * PROMPT)
    prompt_length: int = PROMPT
    seed: int = 0
    prediction: tuple[int, ...] = ()
    constraint: None = None
    params: SamplingParams = field(default_factory=lambda: SamplingParams(max_tokens=4096))


@dataclass
class Played:
    """What came of it: the clock and the tokens of all rows, after each round."""

    times: list[float] = field(default_factory=lambda: [0.0])
    tokens: list[int] = field(default_factory=lambda: [0])
    gammas: list[int] = field(default_factory=list)

    def speed(self, start: float = 0.0, stop: float | None = None) -> float:
        """Tokens a millisecond, from the round after ``start`` tokens on."""
        first = next(i for i, n in enumerate(self.tokens) if n >= start)
        last = next((i for i, n in enumerate(self.tokens) if stop is not None and n >= stop), len(self.tokens) - 1)
        return (self.tokens[last] - self.tokens[first]) / (self.times[last] - self.times[first])


class World:
    """Plays rounds of a fixed number of rows as the engine would."""

    def __init__(
        self, machine: Machine, rows: int, alpha: Alpha, seed: int, *, lookup: float = 0.0, apart: float = 0.0
    ) -> None:
        """``lookup``: the share of rounds in which a row finds a match, instead of asking a draft model. ``apart``: the
        rows' acceptance lies evenly so far below and above ``alpha``."""
        self.machine, self.rows, self.alpha, self.lookup, self.apart = machine, rows, alpha, lookup, apart
        self.random = random.Random(seed)
        self.views = [View(str(i)) for i in range(rows)]
        self.last = max(1, rows - 1)
        self.behind = [PROMPT] * rows
        self.flight: int | None = None  # the draft length of the round that was launched ahead
        self.played = Played()

    def play(self, controller: AdaptiveController | None, tokens: int, gamma: int = 0) -> Played:
        """Until each row has written so many tokens on average; without a controller, with this draft length."""
        play = self._looked_up if self.lookup else self._drafted
        if controller is not None and not self.played.gammas:
            self._read_prompts(controller)
        while self.played.tokens[-1] < tokens * self.rows:
            play(controller, gamma)
        return self.played

    def milliseconds(self, controller: AdaptiveController | None, tokens: int, gamma: int = 0) -> float:
        """Until every row has written so many tokens; those that have leave."""
        if controller is not None:
            self._read_prompts(controller)
        while self.views:
            self._drafted(controller, gamma)
            left = [i for i, view in enumerate(self.views) if len(view.tokens) < PROMPT + tokens]
            if len(left) < self.rows:
                gone = [view.id for i, view in enumerate(self.views) if i not in left]
                self.views, self.behind = [self.views[i] for i in left], [self.behind[i] for i in left]
                self.rows, self.flight = len(left), None
                for name in gone if controller is not None else ():
                    controller.forget(name)
        return self.played.times[-1]

    def _read_prompts(self, controller: AdaptiveController) -> None:
        """As many at once as make 512 tokens. It takes plain decoding as long, so it is not counted."""
        for start in range(0, self.rows, 8):
            views = self.views[start : start + 8]
            seconds = self._noisy(self.machine.forward(1, PROMPT * len(views))) / 1e3
            controller.observe([Round(v.id, 0, 0, 1, len(views), 1, PROMPT - 1, 0.0, seconds, seconds) for v in views])

    # -- a draft model

    def _drafted(self, controller: AdaptiveController | None, gamma: int) -> None:
        machine, budgets = self.machine, [gamma] * self.rows
        if controller is not None:
            budgets = controller.budgets(self.views, [10] * self.rows)
            gamma = max(budgets)
        asked = [bool(gamma) if machine.ahead or controller is None else budget > 0 for budget in budgets]
        gap = caught_up = 0.0
        if self.flight is None:
            gap = machine.gap
            if gamma:
                caught_up = machine.read(sum(n for n, a in zip(self.behind, asked, strict=True) if a and n > 8))
            self.flight = gamma
        now, self.flight = self.flight, None
        if machine.ahead and bool(now) == bool(gamma):
            self.flight = gamma
        lengths = [now * (a or machine.ahead) for a in asked]
        outcomes = [self._outcomes(view, n) for view, n in zip(self.views, lengths, strict=True)]
        self.behind = [0 if n else b + 1 for n, b in zip(lengths, self.behind, strict=True)]
        self._end(controller, lengths, outcomes, gap, caught_up, now * machine.step(self.rows))

    # -- guesses that cost nothing

    def _looked_up(self, controller: AdaptiveController | None, gamma: int) -> None:
        guesses: list[Proposal | None] = [
            Proposal.chain([1] * 8, strength=self.random.choice((1, 1, 1, 2)))
            if self.random.random() < self.lookup
            else None
            for _ in self.views
        ]
        kept: Sequence[Proposal | None] = [None] * self.rows
        if controller is not None and any(guesses):
            controller.budgets(self.views, [10] * self.rows)
            kept = controller.trim(self.views, guesses)
        if self.machine.ahead and self.flight is not None:  # a plain round is under way; a guess comes a round late
            self.flight = None if any(kept) else 0
            return self._end(controller, [0] * self.rows, [()] * self.rows, 0.0, 0.0, 0.0)
        lengths = [len(p) if p is not None else 0 for p in kept]
        self.flight = 0 if self.machine.ahead and not any(lengths) else None
        outcomes = [self._outcomes(view, n) for view, n in zip(self.views, lengths, strict=True)]
        strengths = [p.strength if p is not None else 0 for p in kept]
        self._end(controller, lengths, outcomes, self.machine.gap, 0.0, 0.0, strengths)

    # -- the end of a round

    def _outcomes(self, view: View, gamma: int) -> tuple[bool, ...]:
        found: list[bool] = []
        while len(found) < gamma and all(found):
            alpha = self.alpha(len(view.tokens) - PROMPT, len(found))
            found.append(self.random.random() < alpha + self.apart * (2 * int(view.id) / self.last - 1))
        return tuple(found)

    def _noisy(self, seconds: float) -> float:
        slow = self.random.uniform(1.5, 4) if self.random.random() < self.machine.outliers else 1.0
        return seconds * slow * max(0.5, self.random.gauss(1, self.machine.noise))

    def _end(
        self,
        controller: AdaptiveController | None,
        lengths: Sequence[int],
        outcomes: Sequence[tuple[bool, ...]],
        gap: float,
        caught_up: float,
        drafting: float,
        strengths: Sequence[int] | None = None,
    ) -> None:
        width, tokens = max(lengths) + 1, (sum(lengths) + self.rows) * self.machine.ragged
        forward = self.machine.forward(1, tokens) if tokens else self.machine.forward(self.rows, width)
        emitted = [sum(held) + 1 for held in outcomes]
        for view, count in zip(self.views, emitted, strict=True):
            view.tokens += [1] * count
        self.played.times.append(self.played.times[-1] + gap + caught_up + drafting + forward)
        self.played.tokens.append(self.played.tokens[-1] + sum(emitted))
        self.played.gammas.append(width - 1)
        if controller is None:
            return
        measured, read, drafted = (self._noisy(s) / 1e3 for s in (forward + gap, caught_up, drafting))
        whole = measured + read + drafted
        lines = zip(self.views, lengths, outcomes, emitted, strengths or [0] * self.rows, strict=True)
        controller.observe(
            [
                Round(
                    view.id, n, sum(held), count, self.rows, width, 0, drafted, measured, whole,
                    outcomes=held, strength=strength, catch_up_seconds=read, tokens=tokens,
                )
                for view, n, held, count, strength in lines
            ]
        )  # fmt: skip


def same(alpha: float) -> Alpha:
    return lambda written, place: alpha


def played(
    machine: Machine, rows: int, alpha: Alpha, seed: int, tokens: int, *, lookup: float = 0.0, **told: object
) -> Played:
    """A cold controller in this world."""
    controller = AdaptiveController(10, free=bool(lookup))
    told = {"cost": machine.ratio / (2 if machine.ahead else 1)} | told
    if machine.ahead and not lookup:
        told = {"lengths": range(11)} | told
    controller.meet(free=bool(lookup), ends_itself=False, ragged=machine.ragged, **told)  # type: ignore[arg-type]
    return World(machine, rows, alpha, seed, lookup=lookup).play(controller, tokens)


def plain_speed(machine: Machine, rows: int) -> float:
    return World(machine, rows, same(0), 0).play(None, 256).speed()


def fixed_speed(machine: Machine, rows: int, alpha: Alpha, gamma: int, seeds: int, tokens: int, start: int) -> float:
    worlds = [World(machine, rows, alpha, seed).play(None, tokens, gamma) for seed in range(seeds)]
    return sum(world.speed(start * rows) for world in worlds) / seeds
