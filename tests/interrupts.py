"""An interruption at a chosen instruction of our own code, as Ctrl-C might bring it."""

from __future__ import annotations

import dis
import sys
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Self

SOURCES = str(Path(__file__).parents[1] / "src" / "headstart")


class Interrupted(BaseException):
    """Not an ``Exception``, as KeyboardInterrupt is none."""


class Interrupt:
    """Inside, this thread's n-th chance to be interrupted in ``src/headstart`` is taken: it raises ``Interrupted``.
    ``within``: only files whose name ends like this count.

    A chance is where the interpreter itself looks for signals: behind a call, at a function's start, and where a loop
    turns back. Without ``at`` nothing is raised, and ``count`` says how many chances there were.
    """

    def __init__(self, at: int | None = None, within: tuple[str, ...] = ("",)) -> None:
        self.at, self.within = at, within
        self.count = 0
        self.where = ""
        self._last: dict[FrameType, int] = {}  # the instruction before this one

    def __enter__(self) -> Self:
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        self._last.clear()

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(SOURCES) or not name.removesuffix(".py").endswith(self.within):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._instruction

    def _instruction(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "return":
            self._last.pop(frame, None)
        elif event == "opcode":
            before = self._last.get(frame)
            self._last[frame] = frame.f_lasti
            if before is not None and _looks(frame.f_code, before, frame.f_lasti):
                self.count += 1
                if self.count == self.at:
                    sys.settrace(None)
                    self._last.clear()
                    self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                    raise Interrupted(self.where)
        return self._instruction


@cache
def _looks(code: CodeType, before: int, now: int) -> bool:
    """Does the interpreter look for signals between these two instructions? What catches an exception must be the same
    for both, because it would be raised by the first and is raised here by the second."""
    name = dis.opname[code.co_code[before]]
    if not name.startswith(("CALL", "RESUME", "JUMP_BACKWARD")):
        return False
    return _handler(code, before) == _handler(code, now)


def _handler(code: CodeType, offset: int) -> int | None:
    table = dis._parse_exception_table(code)  # type: ignore[attr-defined]  # the only way to see it
    return next((entry.target for entry in table if entry.start <= offset < entry.end), None)
