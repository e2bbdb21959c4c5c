"""What ``advise`` is told, and what it found.

Knows: settings, what was predicted and measured of each candidate, and the recommendation. Does not know: how.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import InvalidParameter
from .figures import Figures
from .predict import Gamma, Prediction
from .record import Record
from .statistics import Interval, Ratio
from .symptoms import Symptom

__all__ = ["COLUMNS", "SECONDS", "Advice", "AdviseSettings", "Outlook", "Recommendation"]

SECONDS = 80.0  # that measuring takes unless another time is given
GAMMAS: tuple[int, ...] = (1, 2, 3, 4, 6, 8)
COLUMNS = ("draft", "first guess", "tau", "predicted", "90%", "best gamma", "measured", "90%", "off")  # Outlook.row


@dataclass(frozen=True)
class AdviseSettings:
    """What is asked."""

    rows: tuple[int, ...] = (1,)  # batch sizes
    temperatures: tuple[float, ...] = (0.0,)
    gammas: tuple[int, ...] = GAMMAS  # fixed draft lengths, beside "auto"
    tokens: int = 64  # the most of an answer
    ignore_eos: bool = False
    confirm: int = 2  # candidates that are run to confirm
    seconds: float | None = SECONDS  # None: no limit

    def __post_init__(self) -> None:
        if not self.rows or min(self.rows) < 1:
            raise InvalidParameter("rows", f"must be numbers of at least 1, not {self.rows}")
        if not self.temperatures or min(self.temperatures) < 0:
            raise InvalidParameter("temperature", f"must be numbers of at least 0, not {self.temperatures}")
        if any(gamma < 1 for gamma in self.gammas):
            raise InvalidParameter("gamma", f"must be numbers of at least 1, not {self.gammas}")
        if self.tokens < 8:
            raise InvalidParameter("tokens", f"must be at least 8, not {self.tokens}: less says nothing of a draft")
        if self.confirm < 0:
            raise InvalidParameter("confirm", f"must be at least 0, not {self.confirm}")


@dataclass(frozen=True)
class Outlook:
    """What is known of one candidate."""

    name: str
    kind: str
    notes: tuple[str, ...] = ()
    refused: str | None = None
    acceptance: Mapping[str, list[float]] = field(default_factory=dict)  # by temperature: a_1, a_2, ...
    costs: Mapping[str, Any] = field(default_factory=dict)  # by rows, in milliseconds
    predictions: tuple[Prediction, ...] = ()
    measured: Mapping[tuple[int, float], Ratio] = field(default_factory=dict)  # gamma "auto", by rows and temperature
    ran: Mapping[tuple[int, float], Figures] = field(default_factory=dict)  # what its rounds did then

    def prediction(self, rows: int, temperature: float, gamma: Gamma = "auto") -> Prediction | None:
        wanted = (rows, temperature, gamma)
        return next((p for p in self.predictions if (p.rows, p.temperature, p.gamma) == wanted), None)

    def expected(self, rows: int, temperature: float) -> Interval | None:
        """As measured, or else as predicted."""
        ratio = self.measured.get((rows, temperature))
        if ratio is not None:
            return ratio.others or ratio.interval or Interval(ratio.value, ratio.value, ratio.value)
        found = self.prediction(rows, temperature)
        return found.speedup if found is not None else None

    def row(self, rows: int, temperature: float) -> tuple[str, ...]:
        """A line of a table; ``COLUMNS`` names its columns."""
        auto, ratio = self.prediction(rows, temperature), self.measured.get((rows, temperature))
        first = self.acceptance.get(f"{temperature:g}")
        fixed = [p for p in self.predictions if (p.rows, p.temperature) == (rows, temperature) and p.gamma != "auto"]
        best = max(fixed, key=lambda p: p.speedup.mid, default=None)
        sure = ratio.others or ratio.interval if ratio is not None else None
        return (
            self.name,
            f"{first[0]:.0%}" if first else "-",
            f"{auto.tau:.2f}" if auto is not None else "-",
            f"{auto.speedup.mid:.2f}x" if auto is not None else "-",
            f"{auto.speedup.low:.2f} to {auto.speedup.high:.2f}" if auto is not None else "-",
            f"{best.gamma} ({best.speedup.mid:.2f}x)" if best is not None else "-",
            f"{ratio.value:.2f}x" if ratio is not None else "-",
            f"{sure.low:.2f} to {sure.high:.2f}" if sure is not None else "-",
            f"{auto.speedup.mid / ratio.value - 1:+.0%}" if auto is not None and ratio is not None else "-",
        )

    def to_json(self) -> dict[str, Any]:
        measured = [
            {"rows": rows, "temperature": temperature}
            | ratio.to_json()
            | ({"rounds": self.ran[rows, temperature].to_json()} if (rows, temperature) in self.ran else {})
            for (rows, temperature), ratio in self.measured.items()
        ]
        return {
            "name": self.name,
            "kind": self.kind,
            "notes": list(self.notes),
            "refused": self.refused,
            "acceptance": dict(self.acceptance),
            "costs": dict(self.costs),
            "predicted": [prediction.to_json() for prediction in self.predictions],
            "measured": measured,
        }


@dataclass(frozen=True)
class Recommendation:
    """The one answer."""

    speculate: bool
    candidate: str | None
    sentence: str
    command: str
    python: str
    speedup: Interval | None
    confirmed: bool = False

    def to_json(self) -> dict[str, Any]:
        return {
            "speculate": self.speculate,
            "candidate": self.candidate,
            "sentence": self.sentence,
            "command": self.command,
            "python": self.python,
            "speedup": self.speedup.to_json() if self.speedup is not None else None,
            "confirmed": self.confirmed,
        }


@dataclass(frozen=True)
class Advice(Record):
    """What ``advise`` found."""

    kind = "advise"

    about: Mapping[str, Any]  # the target
    outlooks: tuple[Outlook, ...]
    recommendation: Recommendation
    symptoms: tuple[Symptom, ...] = ()
    proposals: tuple[str, ...] = ()
    texts: Mapping[str, int] = field(default_factory=dict)  # written, by task
    tokens: int = 0  # of them
    seconds: float = 0.0
    notes: tuple[str, ...] = ()

    def results(self) -> dict[str, Any]:
        return {
            "target": dict(self.about),
            "recommendation": self.recommendation.to_json(),
            "candidates": [outlook.to_json() for outlook in self.outlooks],
            "symptoms": [symptom.to_json() for symptom in self.symptoms],
            "proposals": list(self.proposals),
            "texts": dict(self.texts),
            "tokens": self.tokens,
            "seconds": self.seconds,
            "notes": list(self.notes),
        }
