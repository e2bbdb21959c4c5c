"""What threads change while another copies it: the copy is made again, and nobody is left out."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
from inbox_tools import EXPECTED, asked, ids, made

from headstart.engine.copies import undisturbed
from headstart.engine.inbox import Inbox


class _Finalizer:
    """In a cycle, so that the garbage collector finds it, and changes what is being copied."""

    def __init__(self, changed: dict[Any, Any], left: list[int]) -> None:
        self.itself, self._changed, self._left = self, changed, left

    def __del__(self) -> None:
        if self._left:
            self._changed[object()] = self._left.pop()


@pytest.fixture
def eager() -> Iterator[None]:
    """The garbage collector looks at every turn."""
    before = gc.get_threshold()
    gc.collect()
    gc.set_threshold(1)
    yield
    gc.set_threshold(*before)


def test_a_copy_that_a_finalizer_disturbs_is_made_again(eager: None) -> None:
    things: dict[Any, Any] = {n: n for n in range(50)}
    left = [1]
    _Finalizer(things, left)
    found = undisturbed(lambda: [(key, value) for key, value in things.items() if [key]])
    assert not left, "it came meanwhile"
    assert len(found) == 51


def test_what_goes_wrong_by_itself_is_raised() -> None:
    def broken() -> Any:
        raise RuntimeError("by itself")

    with pytest.raises(RuntimeError, match="by itself"):
        undisturbed(broken)
    assert undisturbed(lambda: tuple(deque([1, 2]))) == (1, 2)


class _Disturbed(dict[Any, Any]):
    """Another thread came between, some times."""

    times = 3

    def items(self) -> Any:
        if self.times:
            self.times -= 1
            raise RuntimeError("dictionary changed size during iteration")
        return super().items()


def test_readers_are_told_of_ends_though_others_come_meanwhile() -> None:
    with Inbox(made()) as inbox:
        inbox._readers = readers = _Disturbed()
        for i in range(4):
            assert ids(list(inbox.submit(asked(f"r{i}", i)))) == EXPECTED[i]
        assert not readers.times
