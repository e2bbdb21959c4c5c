"""When clients for whom there is no place are told to come back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi")

from headstart.server import pace


class Line:
    """An engine's line of so many, told of endings by hand."""

    def __init__(self, waiting: int) -> None:
        self.waiting = waiting

    def listen(self, *, ended: Any) -> Any:
        self.ended = lambda n=1: ended(SimpleNamespace(request=SimpleNamespace(params=SimpleNamespace(n=n))))


@pytest.mark.parametrize(
    ("waiting", "seconds_each", "soonest", "latest"),
    [
        (64, 0.001, 1, 1),  # it moves on by a thousand a second
        (64, 1.0, 16, 32),  # half of it in 32 seconds
        (1024, 10.0, 30, 60),  # clients do not look further than a minute ahead
    ],
)
def test_when_half_of_the_line_will_have_moved_on(
    monkeypatch: pytest.MonkeyPatch, waiting: int, seconds_each: float, soonest: int, latest: int
) -> None:
    now = 100.0
    monkeypatch.setattr(pace, "monotonic", lambda: now)
    line: Any = Line(waiting)
    found = pace.Pace(line)
    assert found.retry_after() == 1, "nothing is known yet"
    for _ in range(200):
        now += seconds_each
        line.ended()
    told = {found.retry_after() for _ in range(500)}
    assert (min(told), max(told)) == (soonest, latest), "and not all at the same moment"
    slow = max(told)
    now += 3600  # nothing ends any more
    assert max(found.retry_after() for _ in range(100)) >= slow
