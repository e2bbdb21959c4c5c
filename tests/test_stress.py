"""A short stress test: two processes on one cold cache, each with many threads that are interrupted at random."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from kernel_tools import Compiler, ended, start_warm

SECONDS = os.environ.get("HEADSTART_STRESS_SECONDS", "6")
CODE = "import faulthandler, stress; faulthandler.enable(); stress.main()"


@pytest.mark.slow
def test_everything_at_once(tmp_path: Path) -> None:
    cache, compiler = tmp_path / "cache", Compiler(tmp_path / "compiler", "sleep 0.5")
    arguments = [("--seconds", SECONDS, "--seed", seed) for seed in "12"]
    processes = [start_warm(CODE, *each, cache=cache, CXX=str(compiler.path)) for each in arguments]
    told = ended(*processes, seconds=600 + float(SECONDS))
    assert told[0] == told[1] != ""  # the same texts, whoever compiled
    assert compiler.count == 1
    left = [path for path in cache.rglob(".*") if path.is_file() and not path.name.endswith("lock")]
    assert not left, "temporary files were left behind"
