"""Compiled CUDA kernels are kept like the CPU's: made once, nobody else's, and gone after a month without use.

NVRTC comes with torch for CUDA only, so a stand-in answers for it here; ``test_machine_fused_whole`` uses the real one.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from kernel_tools import names

from headstart.errors import HeadstartWarning
from headstart.machine.fused import nvrtc


class StandIn:
    """Has a version, and nothing else."""

    def nvrtcVersion(self, major: Any, minor: Any) -> int:
        return 0


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, cold: Path) -> list[str]:
    """Names of what was compiled; ``cold``: an empty cache."""
    compiled: list[str] = []

    def compile(text: bytes, name: str, options: Any) -> bytes:
        compiled.append(name)
        time.sleep(0.1)
        return b"binary of " + text

    monkeypatch.setattr(nvrtc, "_nvrtc", StandIn)
    monkeypatch.setattr(nvrtc, "_compile", compile)
    return compiled


def test_many_threads_compile_once(made: list[str], cold: Path) -> None:
    with ThreadPoolExecutor(6) as pool:
        found = set(pool.map(lambda _: nvrtc.binary("whole", "text", "sm_90"), range(12)))
    assert found == {b"binary of text"}
    assert made == ["whole.cu"]
    (kept,) = cold.iterdir()
    assert kept.suffix == ".cubin"
    assert kept.stat().st_mode & 0o022 == 0
    nvrtc.binary("whole", "other", "sm_90")
    nvrtc.binary("whole", "text", "sm_80")
    assert len(names(cold)) == len(made) == 3


def test_what_others_can_write_is_not_taken(made: list[str], cold: Path) -> None:
    nvrtc.binary("whole", "text", "sm_90")
    (kept,) = cold.iterdir()
    kept.write_bytes(b"somebody else's")
    assert nvrtc.binary("whole", "text", "sm_90") == b"somebody else's", "so the test can fail"
    kept.chmod(0o666)
    assert nvrtc.binary("whole", "text", "sm_90") == b"binary of text"
    kept.write_bytes(b"somebody else's")
    cold.chmod(0o777)
    with pytest.warns(HeadstartWarning, match="a private folder is used instead"):
        assert nvrtc.binary("whole", "text", "sm_90") == b"binary of text"
    assert len(made) == 3


def test_what_nobody_used_for_a_month_goes(made: list[str], cold: Path) -> None:
    nvrtc.binary("whole", "text", "sm_90")
    (kept,) = cold.iterdir()
    month = time.time() - 31 * 86400
    (cold / "older.cubin").write_bytes(b"x")
    for path in cold.iterdir():
        os.utime(path, (month, month))
    nvrtc.binary("whole", "text", "sm_90")
    assert names(cold) == [kept.name]
    assert made == ["whole.cu"]
