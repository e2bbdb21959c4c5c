"""The worked examples in CONTRIBUTING.md run as they are printed, and change nothing but the speed."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import draft_context

from headstart import LLM, DraftContext, Drafter, InvalidParameter, SamplingParams
from headstart.drafters import base
from headstart.machine.runner import EagerRunner
from headstart.testing import ScriptedDrafter, tiny_model

PROMPT = [5, 6, 7, 8] * 4
PARAMS = SamplingParams(temperature=0, max_tokens=40)


def printed(name: str) -> str:
    """The code that has this class."""
    text = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.S)
    return next(block for block in blocks if f"class {name}" in block)


def bigram() -> Any:
    names: dict[str, Any] = {}
    exec(compile(printed("BigramDrafter"), "CONTRIBUTING.md", "exec"), names)
    return names["BigramDrafter"]


def plain() -> tuple[int, ...]:
    return LLM(tiny_model("llama"), None, max_model_len=96, check=False).generate(PROMPT, PARAMS).token_ids


def test_the_example_drafter_is_lossless_and_gets_something_right() -> None:
    drafter = bigram()()
    llm = LLM(tiny_model("llama"), drafter, gamma=3, max_model_len=96, check=False)
    assert llm.generate(PROMPT, PARAMS).token_ids == plain()
    assert llm.stats.drafted > 0
    assert not drafter.read


@pytest.fixture
def my_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Both examples in a package of their own, as pip would leave it."""
    package = tmp_path / "my_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "bigram.py").write_text(printed("BigramDrafter"))
    (package / "echo.py").write_text(printed("EchoDrafter"))
    metadata = tmp_path / "my_package-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    lines = ("[headstart.drafters]", "bigram = my_package.bigram:BigramDrafter", "echo = my_package.echo:EchoDrafter")
    (metadata / "entry_points.txt").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_package"]:
        del sys.modules[name]


@pytest.mark.parametrize("name", ["bigram", "echo"])
@pytest.mark.usefixtures("my_package")
def test_the_examples_are_built_by_name(name: str) -> None:
    llm = LLM(tiny_model("llama"), name, gamma=3, max_model_len=96, check=False)
    assert llm.drafter_name == name
    assert llm.generate(PROMPT, PARAMS).token_ids == plain()
    assert llm.engine.inactive_reason is None
    assert llm.stats.accepted > 0


class Given(ScriptedDrafter):
    """Remembers what it was built with."""

    context: DraftContext

    @classmethod
    def for_target(cls, context: DraftContext) -> Drafter:
        made = cls(lambda view, budget: None)
        made.context = context
        return made


class Point:
    def __init__(self, name: str, found: Any) -> None:
        self.name, self.value, self._found = name, f"my_package:{name}", found

    def load(self) -> Any:
        return self._found


@pytest.fixture
def points(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [Point("bigram", bigram()), Point("made", lambda: bigram()()), Point("given", Given), Point("wrong", dict)]
    monkeypatch.setattr(base, "entry_points", lambda group: found if group == "headstart.drafters" else [])


@pytest.mark.usefixtures("points")
def test_drafters_are_found_by_entry_point() -> None:
    context = draft_context(EagerRunner(tiny_model("llama"), probe=False))
    assert base.drafter_named("bigram", context).name == "bigram"
    assert base.drafter_named("made", context).name == "bigram", "a function without arguments will do"
    assert base.drafter_named("lookup", context).name == "lookup"
    given = base.drafter_named("given", context)
    assert isinstance(given, Given)
    assert given.context is context
    assert set(base.registered_drafters()) >= {"bigram", "lookup"}
    with pytest.raises(InvalidParameter, match="nobody"):
        base.drafter_named("nobody", context)
    with pytest.raises(InvalidParameter, match="not a headstart"):
        base.drafter_named("wrong", context)


@pytest.mark.usefixtures("points")
def test_what_a_drafter_is_given() -> None:
    """Through the front door: the target itself, the controller's word, and other models to be had."""
    model = tiny_model("llama")
    llm = LLM(model, "given", max_model_len=96, max_rows=3, prefill_chunk=32, check=False)
    drafter = llm.engine.parts.drafter
    assert isinstance(drafter, Given)
    context, target = drafter.context, drafter.context.target
    assert target is llm.engine.parts.runner
    config = model.config
    assert (target.depth, target.hidden_size) == (config.num_hidden_layers, config.hidden_size)
    assert context.vocab_size == target.vocab_size == config.vocab_size
    assert context.advice is llm.engine.parts.controller
    assert (context.source, context.prefill_chunk) == ("given", 32)
    own = context.open_model(tiny_model("llama", seed=1))
    assert (own.slab.rows, own.max_len) == (3, 96)
    assert own is not target
