"""Results name no folder of the machine they were made on: those that are stored, and those that will be."""

from __future__ import annotations

import ast
import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from headstart.lab.report.store import FOLDERS

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
STORED = sorted(path for path in (BENCHMARKS / "results").iterdir() if path.suffix in (".json", ".txt"))
# Their own folders are for intermediate files, not for results.
NO_RESULTS = ("ship_head.py", "ship_measure.py", "gpu_quantized.py:write_text", "gpu_visit.py:note")


@pytest.fixture(scope="module")
def common() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmarks_common", BENCHMARKS / "common.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.name)
def test_no_stored_result_names_a_folder(path: Path, common: ModuleType) -> None:
    text = path.read_text(encoding="utf-8")
    assert not FOLDERS.findall(text)
    for folder in ("/tmp", "/work", "/root", "/home", "/Users", "/mnt", "/scratch"):
        assert f"{folder}/" not in text
        assert f'{folder}"' not in text


def test_what_is_stored_keeps_names_and_drops_folders(common: ModuleType) -> None:
    said = {
        "draft": Path("/tmp/lab/draft-model"),
        "model": "HuggingFaceTB/SmolLM2-135M",
        "text": "../shared/data",
        "failed": 'line one\n  File "/work/main/src/headstart/api.py", line 3\n~/x/y.gguf',
        "rate": [3.5, None, True, "29 / 30 tokens/s", "https://example.org/a/b"],
    }
    assert json.loads(common.as_json(said)) == {
        "draft": "draft-model",
        "model": "HuggingFaceTB/SmolLM2-135M",
        "text": "data",
        "failed": 'line one\n  File "api.py", line 3\ny.gguf',
        "rate": [3.5, None, True, "29 / 30 tokens/s", "https://example.org/a/b"],
    }


@pytest.mark.parametrize("path", sorted(BENCHMARKS.glob("*.py")), ids=lambda path: path.name)
def test_every_benchmark_stores_its_results_that_way(path: Path) -> None:
    for outer in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(outer, ast.FunctionDef) or {path.name, f"{path.name}:{outer.name}"} & set(NO_RESULTS):
            continue
        for node in ast.walk(outer):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "write_text":
                assert "json.dumps" not in ast.unparse(node), f"{path.name}:{node.lineno}: use common.as_json"
