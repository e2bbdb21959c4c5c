"""What the tests of grammars share: a form, tiny engines, and grammars of their tokenizer."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("llguidance")

from headstart import LLM
from headstart.machine.grammar import Grammars
from headstart.testing import TINY_VOCABULARY, tiny_model, tiny_tokenizer

FORM: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["cat", "dog", "camel"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
TOKENIZER = tiny_tokenizer()
MODEL = tiny_model("llama")


def llm(draft: Any = None, **settings: Any) -> LLM:
    return LLM(MODEL, draft, tokenizer=TOKENIZER, check=False, **{"max_model_len": 192, "gamma": 4} | settings)


def grammars() -> Grammars:
    return Grammars(TOKENIZER, width=TINY_VOCABULARY, eos=(2,))
