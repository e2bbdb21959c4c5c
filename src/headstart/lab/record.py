"""What every report is: measured on a machine, with settings, and with results.

Knows: the form that reports share. Does not know: what any of them found, or where it goes (``report.store``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

__all__ = ["Record"]


@dataclass(frozen=True)
class Record(ABC):
    """What a command of the lab returns."""

    kind: ClassVar[str]  # the command's name

    machine: Mapping[str, Any]
    settings: Mapping[str, Any]

    @abstractmethod
    def results(self) -> dict[str, Any]:
        """What was found, of plain values."""

    def to_json(self) -> dict[str, Any]:
        return {"machine": dict(self.machine), "settings": dict(self.settings), "results": self.results()}
