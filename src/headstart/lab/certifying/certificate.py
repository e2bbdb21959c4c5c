"""What a certificate says: every check, what it compared with what, and whether it holds.

Knows: the records. Does not know: how any check is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ..record import Record

__all__ = ["Certificate", "Check", "Control", "Verdict"]

Verdict = Literal["holds", "fails", "not exercised"]


@dataclass(frozen=True)
class Check:
    """One question to the engine."""

    name: str  # "greedy ids", "first tokens" ...
    settings: str  # of the requests, in words
    rule: str  # greedy, coupled, token, block, or plain
    company: str  # alone, together, coming and going
    backend: str  # who decided about drafted tokens
    drafter: str
    verdict: Verdict
    compared: int  # tokens, or outcomes
    drafted: int = 0
    accepted: int = 0
    rejections: int = 0  # rounds that rolled back
    rows: int = 0  # in one forward, at the most
    ties: int = 0
    widest_tie: float = 0.0
    by_kernels: int = 0  # tokens and log-probabilities that only the engine's own kernels, in plain forwards, bear out
    p_value: float | None = None
    again: float | None = None  # the p-value of the repetition
    statistic: float | None = None
    degrees: int | None = None
    detectable: float | None = None  # a total variation that is noticed with probability 0.99, at least
    excused: float = 0.0  # the chi-squared distance between laws that rounding accounts for
    power: dict[str, float] = field(default_factory=dict)  # by total variation
    seconds: float = 0.0
    found: tuple[str, ...] = ()  # what is wrong, or why nothing was tested

    @property
    def holds(self) -> bool:
        return self.verdict == "holds"


@dataclass(frozen=True)
class Control:
    """A run that is wrong on purpose: the same test has to reject it."""

    name: str
    what: str  # is wrong
    test: str  # the check whose test it goes through
    rejected: bool
    needed: bool  # without it the certificate does not hold
    p_value: float | None = None
    samples: int = 0
    distance: float | None = None  # total variation from the target's law, where it is known
    note: str = ""


@dataclass(frozen=True)
class Certificate(Record):
    """Is this pair, on this machine, lossless as far as tests can tell?"""

    kind = "certify"

    runs: Mapping[str, Any]  # what ran: models, kernels, drafter
    reference: str
    exact: bool  # the engine's logits are to be the reference's bits
    false_alarms: float  # how often the certificate of a sound pair fails, at the most
    plan: Mapping[str, float]
    checks: tuple[Check, ...]
    controls: tuple[Control, ...]
    skipped: tuple[str, ...]  # what was not checked, and why
    seconds: float = 0.0
    complete: bool = True  # False: it was stopped before all checks were made

    @property
    def holds(self) -> bool:
        """Every check was made and holds, and every control that is needed was rejected."""
        return (
            self.complete
            and bool(self.checks)
            and all(c.holds for c in self.checks)
            and all(c.rejected for c in self.controls if c.needed)
        )

    @property
    def faults(self) -> list[str]:
        """What does not hold, a line each."""
        found = [] if self.complete else ["it was stopped (Ctrl-C) before all checks were made"]
        for check in self.checks:
            if not check.holds:
                why = "; ".join(check.found[:1]) or (f"p = {check.p_value:.2g}" if check.p_value is not None else "")
                title = ", ".join(filter(None, (check.name, check.settings, check.rule, check.company)))
                found.append(f"{title} ({check.backend}, drafter {check.drafter}): {check.verdict}: {why}")
        for control in self.controls:
            if control.needed and not control.rejected:
                found.append(f"the control {control.name!r} was not rejected: the test cannot tell")
        return found

    def results(self) -> dict[str, Any]:
        found = asdict(self)
        for name in ("machine", "settings"):
            found.pop(name)
        for check in found["checks"]:
            check["holds"] = check["verdict"] == "holds"
        return {"holds": self.holds, "faults": self.faults, **found}
