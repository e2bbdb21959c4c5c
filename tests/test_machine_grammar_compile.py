"""Grammars before an answer: bad ones are refused with the reason, slow ones after a deadline, good ones are kept."""

from __future__ import annotations

import re
import threading
from time import monotonic
from typing import Any

import pytest

pytest.importorskip("llguidance")

from grammar_tools import FORM, MODEL, grammars, llm
from tokenizer_tools import smollm
from tokenizers import Tokenizer, decoders
from transformers import PreTrainedTokenizerFast

from headstart import LLM, InvalidParameter, SamplingParams, Structured
from headstart.machine.grammar import Grammars
from headstart.maths.bitmask import allows

PLAIN = llm()


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"regex": "a(b"}, "regex parse error: unclosed group"),
        ({"regex": "a(?=b)"}, "look-around, including look-ahead"),
        ({"regex": r"[^\s\S]"}, "structured.regex"),
        ({"regex": "日"}, "structured.regex"),  # no token spells it
        ({"json": {"type": "objekt"}}, "Invalid type: objekt"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "minimum (5) is greater than maximum (3)"),
        ({"json": {"$ref": "#"}}, "structured.json"),
        ({"json": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}}, "refers to itself without an end"),
        ({"json": {"type": "string", "pattern": "^(?!x)"}}, "look-around, including look-ahead"),
        ({"json": {"not": {"type": "string"}}}, "Unimplemented keys"),
        ({"json": False}, "allows no answer"),
        ({"json": {"type": "object", "properties": {f"p{i}": {} for i in range(3000)}}}, "structured.json cannot be"),
        ({"grammar": "start: foo"}, "unknown name"),
        ({"grammar": 'root ::= "a" | "b"'}, "is in Lark's notation here"),
        ({"json": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}, "use anyOf"),
    ],
)
def test_bad_grammars_are_refused_with_the_reason(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidParameter, match=re.escape(said)) as error:
        PLAIN.request("a", SamplingParams(structured=Structured(**asked)))
    assert error.value.field.startswith("structured")
    assert len(str(error.value)) < 400


def test_a_grammar_that_fails_within_an_answer_is_named() -> None:
    """The tokenizer has no euro sign, which nobody finds out before an answer gets there."""
    for pattern in ("abc[a-z](d€|e€)", "abc[a-z](d€|dé)"):
        bad = SamplingParams(max_tokens=30, temperature=0, structured=Structured(regex=pattern))
        good = SamplingParams(max_tokens=30, temperature=0, structured=Structured(choice=["yes", "no"]))
        for draft in (None, "lookup"):
            failed, fine = llm(draft).generate(["a", "b"], [bad, good])
            assert (failed.finish_reason, failed.choices[0].error_field) == ("error", "structured.regex")
            assert str(failed.choices[0].error).endswith("this model has no token for what it wants")
            assert (fine.finish_reason, fine.choices[0].error_field) == ("stop", None)


def test_what_takes_long_is_refused_after_a_deadline_and_nobody_waits_for_it() -> None:
    slow = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(1500)}}
    made = grammars()
    made.compile(Structured(regex="a"))
    made._deadline = 0.01
    begun = threading.Event()

    def ask() -> None:
        begun.set()
        with pytest.raises(InvalidParameter, match=r"takes more than 0\.01 s to compile: make it smaller"):
            made.compile(Structured(json=slow))

    thread = threading.Thread(target=ask)
    thread.start()
    assert begun.wait(5)
    started = monotonic()
    while made._running and monotonic() < started + 60:
        made.compile(Structured(regex="a"))  # kept: no place is needed
    thread.join()


def test_compiled_grammars_are_kept_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstart.machine.grammar.KEPT", 2)
    made = grammars()
    one, two, three = (Structured(regex=text) for text in "abc")
    first = made.compile(one)
    assert made.compile(one) is first
    made.compile(two)
    made.compile(one)
    made.compile(three)
    assert list(made._kept) == [one, three]
    assert made.compile(one) is first


def converted(*steps: Any) -> Any:
    """The embedded model's tokenizer with other steps to decode, as other programs write them."""
    backend = Tokenizer.from_str(smollm().backend_tokenizer.to_str())
    backend.decoder = decoders.Sequence(list(steps))
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")


def test_bytes_of_tokenizers_that_decode_in_several_steps() -> None:
    """As transformers 5.17 makes them of GGUF files: llguidance took their tokens for other bytes, and answers failed
    behind the first space."""
    bytes_first = converted(
        decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " "), decoders.ByteLevel(add_prefix_space=False)
    )
    asked = Structured(json=FORM)
    states = [
        Grammars(one, width=len(one), eos=(one.eos_token_id,)).compile(asked).begin(endings=frozenset(), min_tokens=0)
        for one in (smollm(), bytes_first)
    ]
    for token in smollm()('{"name": "x", "age": 7,', add_special_tokens=False)["input_ids"]:
        first, second = (state.mask(()) for state in states)
        assert allows(first, token)
        assert (first == second).all()
        for state in states:
            state.take(token)


def test_a_tokenizer_that_llguidance_reads_otherwise_is_refused() -> None:
    shouting = converted(decoders.Fuse(), decoders.Replace("n", "N"), decoders.ByteLevel(add_prefix_space=False))
    with pytest.raises(InvalidParameter, match="takes them for others than its tokenizer does"):
        Grammars(shouting, width=len(shouting), eos=(0,)).prepare()


def test_without_a_tokenizer() -> None:
    bare = LLM(MODEL, None, check=False, max_model_len=64)
    with pytest.raises(InvalidParameter, match="needs a tokenizer, and this model was given without one"):
        bare.generate([1, 2], SamplingParams(structured=Structured(regex="a")))
