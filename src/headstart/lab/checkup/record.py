"""What a check-up found.

Knows: the records. Does not know: how anything was found out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ..record import Record

__all__ = ["Checkup", "Finding", "Level", "Place"]

Level = Literal["fine", "note", "slow", "wrong"]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    about: str  # "compiler", "cache" ...
    level: Level  # slow: it works, but not as fast as it could; wrong: something will not work
    text: str
    advice: str = ""


@dataclass(frozen=True)
class Place:
    """Something that was kept, and whether it may go."""

    name: str  # of a folder in a cache, or of a cache
    what: str
    bytes: int
    deletable: str  # what happens if it is deleted


@dataclass(frozen=True)
class Checkup(Record):
    """A machine as it is."""

    kind = "doctor"

    versions: Mapping[str, str | None]
    devices: tuple[Mapping[str, Any], ...]
    findings: tuple[Finding, ...]
    places: tuple[Place, ...]
    pair: Mapping[str, Any] | None = None
    seconds: float = 0.0

    @property
    def well(self) -> bool:
        """Nothing is wrong; something may be slow."""
        return all(finding.level != "wrong" for finding in self.findings)

    def of(self, level: Level) -> list[Finding]:
        return [finding for finding in self.findings if finding.level == level]

    def results(self) -> dict[str, Any]:
        found = asdict(self)
        for name in ("machine", "settings"):
            found.pop(name)
        return {"well": self.well, **found}
