"""A short stress test: two processes on one cold cache, each with many threads that are interrupted at random."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SECONDS = os.environ.get("HEADSTART_STRESS_SECONDS", "10")


@pytest.mark.slow
def test_everything_at_once(tmp_path: Path) -> None:
    environment = os.environ | {
        "HEADSTART_CACHE": str(tmp_path / "cache"),
        "PYTHONPATH": str(HERE.parent / "src"),
        "HEADSTART_CPU_ISA": "plain",  # compiles quickly, and by one of the two
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-X", "faulthandler", str(HERE / "stress.py"), "--seconds", SECONDS, "--seed", str(seed)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for seed in (1, 2)
    ]
    told = []
    try:
        for process in processes:
            out, errors = process.communicate(timeout=600)
            assert process.returncode == 0, errors[-4000:]
            told.append(out)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert told[0] == told[1] != ""  # the same texts, whoever compiled
    left = [path for path in (tmp_path / "cache").rglob(".*") if path.is_file() and not path.name.endswith("lock")]
    assert not left, "temporary files were left behind"
