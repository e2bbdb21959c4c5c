"""What the tests of controllers share: a row, a round, and rounds played with one."""

from __future__ import annotations

from dataclasses import dataclass, replace

from headstart.control.adaptive import AdaptiveController
from headstart.types import Round, SamplingParams


@dataclass
class View:
    id: str = "a"
    prompt_length: int = 1
    seed: int = 0
    prediction: tuple[int, ...] = ()
    constraint: None = None

    @property
    def tokens(self) -> list[int]:
        return [1]

    @property
    def params(self) -> SamplingParams:
        return SamplingParams()


ROUND = Round(
    sequence="a",
    drafted=0,
    accepted=0,
    emitted=1,
    rows=1,
    width=1,
    prefill=0,
    draft_seconds=0.0,
    verify_seconds=1.0,
    round_seconds=1.0,
)


def accepted(gamma: int, forward: float, drafting: float, sequence: str = "a") -> Round:
    """A round whose whole draft held."""
    return replace(
        ROUND,
        sequence=sequence,
        drafted=gamma,
        accepted=gamma,
        emitted=gamma + 1,
        width=gamma + 1,
        draft_seconds=drafting,
        verify_seconds=forward,
        round_seconds=forward + drafting,
        outcomes=(True,) * gamma,
    )


def play(
    controller: AdaptiveController, holds: float, cost: dict[int, float], rounds: int, step: float = 0.0
) -> list[int]:
    """Play rounds: a share ``holds`` of guesses is right, a forward of width w costs cost[w]. Returns the budgets."""
    chosen, debt = [], 0.0
    for _ in range(rounds):
        (gamma,) = controller.budgets([View()], [10])
        chosen.append(gamma)
        outcomes: list[bool] = []
        while len(outcomes) < gamma:
            debt += holds
            outcomes.append(debt >= 1)
            if not outcomes[-1]:
                break
            debt -= 1
        accepted = sum(outcomes)
        seconds = cost[gamma + 1]
        controller.observe(
            [
                replace(
                    ROUND,
                    drafted=gamma,
                    accepted=accepted,
                    emitted=accepted + 1,
                    width=gamma + 1,
                    draft_seconds=gamma * step,
                    verify_seconds=seconds,
                    round_seconds=seconds + gamma * step,
                    outcomes=tuple(outcomes),
                )
            ]
        )
    return chosen
