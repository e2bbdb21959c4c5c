"""The pages are true: the first program runs, every file is listed once, and what they name or link to is there."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from headstart.config import DraftConfig, EngineConfig
from headstart.machine.runner import EagerRunner
from headstart.testing import tiny_model

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "headstart"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
README = (ROOT / "README.md").read_text(encoding="utf-8")
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")


def test_the_first_program_runs_as_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    section = README.split("## A first program")[1]
    code = re.search(r"```python\n(.*?)```", section, flags=re.S)
    assert code is not None
    names: dict[str, Any] = {}
    exec(compile(code[1], "README.md", "exec"), names)
    assert len(capsys.readouterr().out.split()) > 40
    assert len(names["outs"]) == 2
    assert names["out"].stats.tokens == 20
    assert names["llm"].stats.drafted > 0  # on a busy machine drafting may not pay for long


def without_code(path: Path) -> bool:
    """An ``__init__.py`` that holds nothing but its docstring."""
    if path.name != "__init__.py":
        return False
    body = ast.parse(path.read_text(encoding="utf-8")).body
    return all(isinstance(node, (ast.Expr, ast.AnnAssign)) for node in body)


def test_every_file_is_listed_once() -> None:
    listing = ARCHITECTURE.split("## Every file")[1]
    named = Counter(re.findall(r"^(\S+\.\w+|\S+/)  +\S", listing, flags=re.M))
    folders = tuple(name for name in named if name.endswith("/"))
    there = {
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and not without_code(path)
    }
    there = {name for name in there if not name.startswith(folders)}
    listed = {name for name in named if not name.endswith("/")}
    assert not there - listed, f"ARCHITECTURE.md does not list {sorted(there - listed)}"
    assert not listed - there, f"ARCHITECTURE.md lists what is not there: {sorted(listed - there)}"
    assert max(named.values()) == 1, [name for name, times in named.items() if times > 1]
    assert all((SOURCE / folder).is_dir() for folder in folders)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        found = (page.parent / name) if name else page
        assert found.exists(), f"{page.name} links to {target}"
        if anchor:
            titles = re.findall(r"^#+ (.+)$", found.read_text(encoding="utf-8"), flags=re.M)
            slugs = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
            assert anchor in slugs, f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_and_tests_that_are_named_are_there(page: Path) -> None:
    if page.name in ("CHANGELOG.md", "where.md"):  # of the past; ``test_docs_where`` reads the other
        return
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    for name, test in re.findall(r"`([\w./-]+/[\w.-]+\.(?:py|cpp|h|cu|cuh|md|json|txt))(?:::(\w+))?`", text):
        if name.startswith("DIR/"):
            continue
        found = next((path for path in (ROOT / name, SOURCE / name) if path.is_file()), None)
        assert found is not None, f"{page.name} names {name}"
        assert not test or re.search(rf"^def {test}\b", found.read_text(encoding="utf-8"), flags=re.M), test


def test_the_tests_for_other_pythons_are_there() -> None:
    listed = re.search(
        r"^LIGHT=\(tests/test_\{([\w,]+)\}\.py\)", (ROOT / ".ci" / "test-versions").read_text(), flags=re.M
    )
    assert listed is not None
    for name in listed[1].split(","):
        assert (ROOT / "tests" / f"test_{name}.py").is_file(), f".ci/test-versions names test_{name}.py"


def test_every_page_is_in_the_index() -> None:
    index = README.split("## Pages")[1] + ARCHITECTURE
    for page in PAGES:
        if page.name != "README.md":
            name = str(page.relative_to(ROOT))
            assert f"({name})" in index, f"README's list of pages lacks {name}"


def test_every_decider_of_the_table_is_held_against_the_rule() -> None:
    """Six of them, each with a test that exists (above) and names the rules of ``maths/verify.py`` or ``judge``."""
    table = ARCHITECTURE.split("## Who decides")[1].split("Captured rounds")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ") and "`tests/" in line]
    assert len(rows) == 6
    for row in rows:
        name = re.search(r"`(tests/[\w.]+\.py)", row)
        assert name is not None
        text = (ROOT / name[1]).read_text(encoding="utf-8")
        assert re.search(r"\b(verify|by_rule|decide|chain_rules|coupled_rule|Topology)\b", text), row


def test_the_settings_and_their_defaults() -> None:
    section = README.split("## Engine settings")[1].split("## ")[0]
    rows = re.findall(r"^\| (`[^|]+`) \| ([^|]+) \|", section, flags=re.M)
    settings = {
        name: default.strip()
        for names, defaults in rows
        for name, default in zip(re.findall(r"`(\w+)`", names), defaults.split(", ") * 9, strict=False)
    }
    engine, draft = EngineConfig(), DraftConfig()
    assert settings["max_rows"] == str(engine.max_rows)
    assert settings["prefill_chunk"] == str(engine.prefill_chunk)
    assert settings["max_waiting"] == str(engine.max_waiting)
    assert settings["gamma"] == '`"auto"`'
    assert settings["max_gamma"] == str(draft.max_gamma)
    assert set(settings) == set(engine.__dataclass_fields__) | set(draft.__dataclass_fields__)


def test_the_memory_of_a_row() -> None:
    """README's formula against what is allocated."""
    formula = re.search(r"```\n(2 \* layers .*?)\n```", README)
    assert formula is not None
    model = tiny_model("llama")
    config, length, max_gamma = model.config, 64, 10
    runner = EagerRunner(model, rows=3, max_len=length, margin=2 * (max_gamma + 1) + 2)
    head_dim = config.hidden_size // config.num_attention_heads
    values = {
        "layers": config.num_hidden_layers,
        "kv_heads": config.num_key_value_heads,
        "head_dim": getattr(config, "head_dim", None) or head_dim,
        "bytes": 4,
        "max_model_len": length,
        "max_gamma": max_gamma,
    }
    taken = sum(layer.keys.nbytes + layer.values.nbytes for layer in runner.slab.layers)
    assert taken == 3 * eval(formula[1], values)
    llama = values | {"layers": 32, "kv_heads": 8, "head_dim": 128, "bytes": 2, "max_model_len": 8192}
    assert f"{eval(formula[1], llama) / 1e9:.2f} GB a row of 8192 tokens" in README
