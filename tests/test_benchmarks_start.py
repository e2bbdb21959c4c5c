"""Every benchmark starts: what it imports is there, and it says how it is called."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SOURCES = BENCHMARKS.parent / "src"
SCRIPTS = sorted(path.name for path in BENCHMARKS.glob("*.py"))
ELSEWHERE = {"triton", "matplotlib", "gguf"}  # optional: not on every machine


@pytest.mark.parametrize("file", SCRIPTS)
def test_a_benchmark_says_how_it_is_called(
    file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As ``python benchmarks/FILE --help``, but in this process: torch is imported once for all."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr(sys, "argv", [file, "--help"])
    try:
        module = importlib.import_module(Path(file).stem)
    except ModuleNotFoundError as missing:
        if missing.name not in ELSEWHERE:
            raise
        pytest.skip(f"{missing.name} is not installed")
    if hasattr(module, "main") and "parse" in (BENCHMARKS / file).read_text(encoding="utf-8"):
        with pytest.raises(SystemExit) as ended:
            module.main()
        assert ended.value.code == 0
        assert f"usage: {file}" in capsys.readouterr().out


def names_of(path: Path) -> set[str]:
    """What a module has at its top, and in its conditions and attempts there."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case ast.alias(name=name, asname=other):
                found.add(other or name)
    return found


@pytest.mark.parametrize("file", SCRIPTS)
def test_what_a_benchmark_imports_from_us_is_there(file: str) -> None:
    """Also inside functions, and where Triton or a GPU is missing."""
    for node in ast.walk(ast.parse((BENCHMARKS / file).read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom) or node.module is None:
            continue
        folder = SOURCES if node.module.split(".")[0] == "headstart" else BENCHMARKS
        inside = folder.joinpath(*node.module.split("."))
        source = inside / "__init__.py" if inside.is_dir() else inside.with_suffix(".py")
        if folder == BENCHMARKS and not source.exists():
            continue  # another package's
        known = names_of(source) | {path.stem for path in inside.glob("*")}
        if node.module == "headstart":
            import headstart

            known |= set(headstart.__all__)
        missing = {alias.name for alias in node.names} - known
        assert not missing, f"{file} imports {missing} from {node.module}"
