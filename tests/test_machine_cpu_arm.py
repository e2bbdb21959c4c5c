"""The kernels on ARM (cross-compiled, under qemu-user), and not a bit differs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from headstart.machine.cpu import build

PROGRAM = Path(__file__).with_name("kernels.cpp")
CROSS, QEMU = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
ARM = {"dot products": "-march=armv8.2-a+dotprod", "plain": "-march=armv8-a"}
SAID = {"dot products": "NEON with dot products", "plain": "NEON"}

pytestmark = pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not()))


def made(compiler: list[str], options: list[str], to: Path) -> Path:
    """The test program and the kernels in one unit, unoptimized: what takes time here is the compiler."""
    names = [build.SOURCES / f"{name}.cpp" for name in ("product", "pack", "attention", "decoder")]
    unit = to.with_suffix(".cpp")
    unit.write_text("".join(f'#include "{path}"\n' for path in (*names, PROGRAM)))
    shared = [option for option in build.OPTIONS if option not in ("-shared", "-fPIC")]
    command = [*compiler, *shared, *options, "-O0", "-I", build.SOURCES, unit, "-o", to]
    subprocess.run(list(map(str, command)), check=True)
    return to


def told(command: list[str]) -> tuple[list[str], str]:
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    return done.stdout.splitlines(), done.stderr.strip()


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    program = made(build._compiler() or [], list(build.ISAS["plain"]), tmp_path_factory.mktemp("here") / "kernels")
    return told([str(program)])[0]


def test_the_program_runs_here(here: list[str]) -> None:
    assert len(here) == 6 * 8 + 4
    assert not any("nan" in line or "not" in line or "refused" in line for line in here)


@pytest.mark.skipif(CROSS is None or QEMU is None, reason="needs g++-aarch64-linux-gnu and qemu-user")
@pytest.mark.parametrize("level", ["dot products", pytest.param("plain", marks=pytest.mark.slow)])
def test_arm_has_the_same_bits(level: str, here: list[str], tmp_path: Path) -> None:
    program = made([str(CROSS)], ["-static", ARM[level]], tmp_path / "kernels")
    found, instructions = told([str(QEMU), str(program)])
    assert instructions == SAID[level]
    assert found == here
