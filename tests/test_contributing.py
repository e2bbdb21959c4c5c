"""The worked example in CONTRIBUTING.md runs as it is printed, and changes nothing but the speed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from headstart import LLM, InvalidParameter, SamplingParams
from headstart.drafters import base
from headstart.testing import tiny_model


def bigram() -> Any:
    text = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.S)
    code = next(block for block in blocks if "class BigramDrafter" in block)
    names: dict[str, Any] = {}
    exec(compile(code, "CONTRIBUTING.md", "exec"), names)
    return names["BigramDrafter"]


def test_the_example_drafter_is_lossless_and_gets_something_right() -> None:
    model = tiny_model("llama")
    prompt = [5, 6, 7, 8] * 4
    params = SamplingParams(temperature=0, max_tokens=40)
    plain = LLM(model, None, max_model_len=96, check=False).generate(prompt, params)
    drafter = bigram()()
    llm = LLM(model, drafter, gamma=3, max_model_len=96, check=False)
    assert llm.generate(prompt, params).token_ids == plain.token_ids
    assert llm.stats.drafted > 0
    assert not drafter.read


def test_drafters_are_found_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    class Point:
        name, value = "bigram", "my_package.bigram:BigramDrafter"

        def load(self) -> Any:
            return bigram()

    class Wrong(Point):
        name = "wrong"

        def load(self) -> Any:
            return dict

    monkeypatch.setattr(base, "entry_points", lambda group: [Point(), Wrong()] if group == "headstart.drafters" else [])
    assert base.drafter_named("bigram").name == "bigram"
    assert base.drafter_named("lookup").name == "lookup"
    assert set(base.registered_drafters()) >= {"bigram", "lookup"}
    with pytest.raises(InvalidParameter, match="nobody"):
        base.drafter_named("nobody")
    with pytest.raises(InvalidParameter, match="not a headstart"):
        base.drafter_named("wrong")
