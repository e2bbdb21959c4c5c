"""Compiled CUDA kernels are kept like the CPU's: made once, nobody else's, and gone after a month without use.

NVRTC comes with torch for CUDA only, so a stand-in answers for it here; the real one is used in
``test_machine_gpu_one_kernel``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from kernel_tools import names

from headstart.errors import HeadstartWarning
from headstart.machine.gpu.compile import nvrtc


class StandIn:
    """What is called of NVRTC, in Python: it takes its time, and compiles to the text itself. Arguments by reference
    are ctypes' own, whose ``_obj`` is what they refer to."""

    def __init__(self, made: list[str]) -> None:
        self.made = made
        self._programs: dict[int, bytes] = {}
        self._numbers = count(1)

    def nvrtcVersion(self, major: Any, minor: Any) -> int:
        return 0

    def nvrtcCreateProgram(self, program: Any, text: bytes, name: bytes, *_: Any) -> int:
        program._obj.value = next(self._numbers)
        self._programs[program._obj.value] = text
        self.made.append(name.decode())
        return 0

    def nvrtcCompileProgram(self, program: Any, number: int, options: Any) -> int:
        time.sleep(0.1)
        return int(b"wrong" in self._programs[program.value])

    def nvrtcGetProgramLogSize(self, program: Any, size: Any) -> int:
        size._obj.value = 100
        return 0

    def nvrtcGetProgramLog(self, program: Any, told: Any) -> int:
        told.value = b"line 1: what is this?\nerror\nand more"
        return 0

    def nvrtcGetCUBINSize(self, program: Any, size: Any) -> int:
        size._obj.value = len(b"binary of ") + len(self._programs[program.value])
        return 0

    def nvrtcGetCUBIN(self, program: Any, made: Any) -> int:
        made.raw = b"binary of " + self._programs[program.value]
        return 0

    def nvrtcDestroyProgram(self, program: Any) -> int:
        del self._programs[program._obj.value]
        return 0


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, cold: Path) -> Iterator[list[str]]:
    """Names of what was compiled; ``cold``: an empty cache."""
    library = StandIn([])
    monkeypatch.setattr(nvrtc, "_nvrtc", lambda: library)  # the library is opened there, and nowhere else
    yield library.made
    assert not library._programs, "what NVRTC was given, it was told to free"


def test_many_threads_compile_once(made: list[str], cold: Path) -> None:
    with ThreadPoolExecutor(6) as pool:
        found = set(pool.map(lambda _: nvrtc.binary("one_kernel", "text", "sm_90"), range(12)))
    assert found == {b"binary of text"}
    assert made == ["one_kernel.cu"]
    (kept,) = cold.iterdir()
    assert kept.suffix == ".cubin"
    assert kept.stat().st_mode & 0o022 == 0
    nvrtc.binary("one_kernel", "other", "sm_90")
    nvrtc.binary("one_kernel", "text", "sm_80")
    assert len(names(cold)) == len(made) == 3


def test_what_others_can_write_is_not_taken(made: list[str], cold: Path) -> None:
    nvrtc.binary("one_kernel", "text", "sm_90")
    (kept,) = cold.iterdir()
    kept.write_bytes(b"somebody else's")
    assert nvrtc.binary("one_kernel", "text", "sm_90") == b"somebody else's", "so the test can fail"
    kept.chmod(0o666)
    assert nvrtc.binary("one_kernel", "text", "sm_90") == b"binary of text"
    kept.write_bytes(b"somebody else's")
    cold.chmod(0o777)
    with pytest.warns(HeadstartWarning, match="a private folder is used instead"):
        assert nvrtc.binary("one_kernel", "text", "sm_90") == b"binary of text"
    assert len(made) == 3


def test_what_nobody_used_for_a_month_goes(made: list[str], cold: Path) -> None:
    nvrtc.binary("one_kernel", "text", "sm_90")
    (kept,) = cold.iterdir()
    month = time.time() - 31 * 86400
    (cold / "older.cubin").write_bytes(b"x")
    for path in cold.iterdir():
        os.utime(path, (month, month))
    nvrtc.binary("one_kernel", "text", "sm_90")
    assert names(cold) == [kept.name]
    assert made == ["one_kernel.cu"]


def test_what_does_not_compile_is_said_and_not_kept(made: list[str], cold: Path) -> None:
    with pytest.raises(RuntimeError, match=r"one_kernel\.cu does not compile: line 1: what is this\? error$"):
        nvrtc.binary("one_kernel", "wrong", "sm_90")
    assert names(cold) == []
    assert nvrtc.binary("one_kernel", "text", "sm_90") == b"binary of text"
