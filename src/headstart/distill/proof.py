"""What a draft is worth, measured with the engine it will be served by.

Knows: how to decode prompts with and without a draft in turn, and what to read off the rounds.
Does not know: how the draft was made, or where the figures are written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from ..config import EngineConfig
from ..control.controller import FixedController
from ..drafters.base import Drafter
from ..engine.engine import Engine
from ..engine.stats import Tally
from ..machine.load.loading import Loaded, eos_ids
from ..machine.runner import EagerRunner
from ..maths.cost import CostModel
from ..types import Choice, Request, Round, SamplingParams

__all__ = ["COLUMNS", "Figures", "MakeDrafter", "measure_cost", "prove"]

COLUMNS = ("alpha, greedy", "tau, greedy", "alpha, T = 1", "tau, T = 1", "speed-up, greedy")
MakeDrafter = Callable[[EagerRunner], Drafter]
_WIDTHS = (1, 3, 5, 8)  # draft lengths that are timed


@dataclass(frozen=True)
class Figures:
    """What a draft does for its target on some prompts."""

    prompts: int
    gamma: int
    alpha_greedy: float
    tau_greedy: float
    alpha: float  # at temperature 1, block rule
    tau: float
    speedup: float  # greedy: median over prompts of plain time a token over drafted time a token
    same_tokens: bool  # greedy texts with and without the draft are equal

    def cells(self) -> tuple[str, ...]:
        """For a table, under ``COLUMNS``."""
        return (
            *(f"{self.alpha_greedy:.3f}", f"{self.tau_greedy:.2f}", f"{self.alpha:.3f}", f"{self.tau:.2f}"),
            f"{self.speedup:.2f}x",
        )


class _Bench:
    """One engine, one prompt at a time."""

    def __init__(
        self, loaded: Loaded, make: MakeDrafter | None, gamma: int, prompts: Sequence[Sequence[int]], tokens: int
    ) -> None:
        longest = max(map(len, prompts)) + tokens + 1
        runner = EagerRunner(loaded.model, rows=1, max_len=longest, margin=gamma + 1, probe=False)
        size = loaded.report.tokenizer_size or runner.vocab_size
        drafter = make(runner) if make is not None else None
        self._engine = Engine(
            runner, drafter, FixedController(gamma), EngineConfig(max_rows=1), vocab_size=size, eos=eos_ids(loaded)
        )
        self._rounds: list[Round] = []
        self._engine.listen(self._rounds.extend)

    def decode(self, prompt: Sequence[int], params: SamplingParams) -> tuple[Choice, list[Round]]:
        """The answer, and its rounds but for the one that read the prompt."""
        self._rounds.clear()
        handle = self._engine.submit(Request("proof", tuple(prompt), params))
        while not self._engine.idle:
            self._engine.step()
        handle.raise_failure()
        return handle.completion().choices[0], [r for r in self._rounds if not r.prefill]


def measure_cost(loaded: Loaded, make: MakeDrafter, prompt: Sequence[int], tokens: int = 24) -> CostModel:
    """c, v and the overhead of this target and draft here and now; in plain steps."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    plain = _Bench(loaded, None, 1, [prompt], tokens)
    plain.decode(prompt, params)  # warm
    _, rounds = plain.decode(prompt, params)
    step = median(r.verify_seconds for r in rounds)
    rest = [r.round_seconds - r.verify_seconds for r in rounds]
    width: dict[int, float] = {}
    drafting: list[float] = []
    for gamma in _WIDTHS:
        _, rounds = _Bench(loaded, make, gamma, [prompt], tokens).decode(prompt, params)
        full = [r for r in rounds if r.drafted == gamma] or rounds
        width[full[0].width] = max(1.0, median(r.verify_seconds for r in full) / step)
        drafting += [r.draft_seconds / r.drafted / step for r in full if r.drafted]
    return CostModel(c=median(drafting) if drafting else 0.0, v=width, overhead=max(0.0, median(rest) / step))


def prove(
    loaded: Loaded,
    make: MakeDrafter,
    prompts: Sequence[Sequence[int]],
    *,
    gamma: int = 5,
    tokens: int = 64,
    seed: int = 0,
) -> Figures:
    """Decode every prompt plain and drafted in turn."""
    plain, drafted = (_Bench(loaded, way, gamma, prompts, tokens) for way in (None, make))
    greedy = SamplingParams(temperature=0, max_tokens=tokens)
    sure, drawn = Tally(0), Tally(0)
    ratios, same = [], True
    for i, prompt in enumerate(prompts):
        first, second = (plain, drafted) if i % 2 else (drafted, plain)  # who comes second profits from warm memory
        both = {bench: bench.decode(prompt, greedy) for bench in (first, second)}
        same = same and both[plain][0].token_ids == both[drafted][0].token_ids
        if both[plain][1] and both[drafted][1]:
            ratios.append(_speed(both[drafted][1]) / _speed(both[plain][1]))
        random = SamplingParams(temperature=1, max_tokens=tokens, seed=seed + i, verification="block")
        for tally, rounds in ((sure, both[drafted][1]), (drawn, drafted.decode(prompt, random)[1])):
            for each in rounds:
                tally.add(each)
    return Figures(
        prompts=len(prompts),
        gamma=gamma,
        alpha_greedy=sure.stats().acceptance_rate,
        tau_greedy=sure.stats().acceptance_length,
        alpha=drawn.stats().acceptance_rate,
        tau=drawn.stats().acceptance_length,
        speedup=median(ratios) if ratios else 1.0,
        same_tokens=same,
    )


def _speed(rounds: Sequence[Round]) -> float:
    """Tokens a second."""
    return sum(r.emitted for r in rounds) / max(1e-9, sum(r.round_seconds for r in rounds))
