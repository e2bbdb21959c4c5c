"""Drafts run beside plain decoding, to confirm what was predicted of them.

Knows: which prompts are answered how often in the time there is, and what becomes of the times. Does not know: what was
predicted, or what follows from it.

Prompts come in turns: the first takes as many as the time allows to be run twice, the next ones repeat them. Where even
a few answers take longer than there is time, fewer drafts are run, and then answers are shorter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from time import perf_counter

from ..types import SamplingParams, Tell, silent
from .budget import Budget
from .figures import Figures, Measured, figures
from .stalls import without_stalls
from .statistics import Block, Ratio, ratio
from .system import System
from .turns import Run, in_turn

__all__ = ["Confirmation"]

LEAST_BLOCKS = 3  # whatever the time
MOST_TURNS = 12
WARM_TOKENS = 24
GRACE = 15.0  # seconds that the least number of blocks may take, whatever is left: short answers mislead
LEAST_TOKENS = 32  # of an answer: short ones say more of how drafting begins than of how it goes
# Of the time, for prompts that were not answered yet. A GPU keeps its time, so that there other prompts say more than
# the same ones again.
FIRST = {"cuda": 0.9, "cpu": 0.45}


class Confirmation:
    """Some systems beside plain decoding, with one number of rows at one temperature. What was run stays known when it
    is interrupted."""

    def __init__(
        self,
        plain: System,
        systems: Mapping[str, System],
        lines: Sequence[Sequence[int]],
        *,
        rows: int,
        temperature: float,
        tokens: int,
        ignore_eos: bool = False,
    ) -> None:
        """``lines``: prompts. ``systems``: the most promising first."""
        self.plain, self.systems, self.rows, self.tokens = plain, dict(systems), rows, tokens
        self._wanted = tokens
        self._params = SamplingParams(
            temperature=temperature,
            max_tokens=tokens,
            ignore_eos=ignore_eos,
            **({"verification": "block"} if temperature else {}),  # type: ignore[arg-type]
        )
        self._units = [[lines[(i + j) % len(lines)] for j in range(rows)] for i in range(0, len(lines), rows)]
        self._base: list[tuple[int, Measured]] = []  # the unit, and plain decoding of it
        self._found: dict[str, list[Measured]] = {name: [] for name in systems}

    def run(self, budget: Budget, tell: Tell = silent) -> None:
        if not self._fit(self._warm_up(), budget):  # what is done first is slow: perhaps it was only that
            self._cut(self._warm_up(), budget)
        shown = ", ".join(self.systems)
        count, first = len(self._units), FIRST.get(self.plain.device.type, FIRST["cpu"])
        for turn in range(MOST_TURNS):
            for number in range(count):
                if len(self._base) >= LEAST_BLOCKS and budget.over:
                    return
                if not turn and number >= LEAST_BLOCKS and budget.spent > first * (budget.seconds or float("inf")):
                    count = number  # so that each is run more than once
                    break
                tell(f"confirming {shown}: turn {turn + 1}, prompt {number + 1}")
                self._block(number, turn)

    def _runs(self, number: int, turn: int, tokens: int, *, learnt: bool = True) -> dict[str, Run]:
        drawn = self._params.temperature > 0
        params = [
            replace(self._params, max_tokens=tokens, seed=1000 * turn + self.rows * number + i if drawn else None)
            for i in range(self.rows)
        ]
        everyone: dict[str, System] = {"": self.plain, **self.systems}
        return {name: Run(each.engine, self._units[number], params, learnt=learnt) for name, each in everyone.items()}

    def _warm_up(self) -> dict[str, float]:
        """Seconds of a full answer of each."""
        tokens = min(self.tokens, WARM_TOKENS)
        started = perf_counter()
        runs = self._runs(0, 0, tokens, learnt=False)
        in_turn(runs)
        spent, own = perf_counter() - started, sum(run.seconds for run in runs.values())
        return {name: run.seconds * self.tokens / tokens * max(1.0, spent / own) for name, run in runs.items()}

    def _needed(self, seconds: Mapping[str, float]) -> float:
        return LEAST_BLOCKS * (seconds[""] + sum(seconds[name] for name in self.systems))

    def _fit(self, seconds: Mapping[str, float], budget: Budget) -> bool:
        """Is there time for the least number of blocks?"""
        return self._needed(seconds) <= max(budget.left, GRACE)

    def _cut(self, seconds: Mapping[str, float], budget: Budget) -> None:
        """Fewer systems, and then shorter answers, until there is."""
        while len(self.systems) > 1 and not self._fit(seconds, budget):
            del self._found[self.systems.popitem()[0]]
        if not self._fit(seconds, budget):
            share = max(budget.left, GRACE) / self._needed(seconds)
            self.tokens = max(min(LEAST_TOKENS, self.tokens), int(share * self.tokens))

    def _block(self, number: int, turn: int) -> None:
        runs = self._runs(number, turn, self.tokens)
        in_turn(runs)
        self._base.append((number, runs[""].measured()))  # all of them, or none
        for name in self.systems:
            self._found[name].append(runs[name].measured())

    # -- what there is

    @property
    def blocks(self) -> int:
        return len(self._base)

    @property
    def cut(self) -> str | None:
        """What was left out to keep the time."""
        if self.tokens == self._wanted:
            return None
        return f"answers that confirm were cut to {self.tokens} tokens, for want of time"

    def ratio(self, name: str) -> Ratio | None:
        """The speed-up; None: nothing was run."""
        base, mine = [measured for _, measured in self._base], self._found.get(name, [])
        if self.plain.device.type == "cpu":  # on a GPU rounds that wait for the host are no accident
            base, mine = without_stalls(base), without_stalls(mine)
        return ratio(
            [
                Block(number, a.decode_tokens, a.decode_seconds, b.decode_tokens, b.decode_seconds)
                for (number, _), a, b in zip(self._base, base, mine, strict=False)
            ]
        )

    def figures(self, name: str) -> Figures | None:
        """What its rounds did."""
        found = self._found.get(name)
        return figures(found, self.rows) if found else None
