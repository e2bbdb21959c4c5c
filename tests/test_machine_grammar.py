"""JSON schemas, regexes, choices and grammars on tiny models: answers are what was asked for; drafts change none."""

from __future__ import annotations

import contextlib
import json
import re
import threading
from typing import Any

import pytest

pytest.importorskip("llguidance")

from grammar_tools import FORM, MODEL, TOKENIZER, grammars, llm
from interrupts import Interrupt, Interrupted

from headstart import SamplingParams, Structured
from headstart.engine import node_masks
from headstart.maths.bitmask import allows
from headstart.testing import TINY_VOCABULARY, tiny_model

PLAIN = llm()


def check_form(text: str) -> None:
    found = json.loads(text)
    assert list(found) == ["name", "age", "kind"]
    assert len(found["name"]) <= 4
    assert 0 <= found["age"] <= 120
    assert found["kind"] in ("cat", "dog", "camel")


@pytest.mark.parametrize("draft", ["lookup", "another model", "itself"])
def test_drafts_change_nothing(draft: str) -> None:
    drafts = {"lookup": "lookup", "another model": tiny_model("llama", seed=1), "itself": MODEL}
    drafted = llm(drafts[draft])
    asked = [
        SamplingParams(max_tokens=90, temperature=0, structured=Structured(json=FORM)),
        SamplingParams(max_tokens=90, seed=3, n=2, logprobs=2, structured=Structured(json=FORM)),
        SamplingParams(max_tokens=90, seed=4, top_p=0.9, presence_penalty=1.0, structured=Structured(json=FORM)),
        SamplingParams(max_tokens=40, seed=5, structured=Structured(regex="[a-f]{3,9}-[0-9]+"), stop=["7"]),
        SamplingParams(max_tokens=40, seed=6, structured=Structured(choice=["yes", "no", "not at all"])),
        SamplingParams(max_tokens=12, seed=7),
    ]
    together = drafted.generate([f"hello {i}" for i in range(6)], asked)
    for i, found in enumerate(together):
        alone = PLAIN.generate(f"hello {i}", asked[i])
        assert [c.text for c in found.choices] == [c.text for c in alone.choices]
        assert [c.token_ids for c in found.choices] == [c.token_ids for c in alone.choices]
        assert [c.finish_reason for c in found.choices] == [c.finish_reason for c in alone.choices]
        if alone.logprobs is not None and found.logprobs is not None:
            pairs = zip(found.logprobs, alone.logprobs, strict=True)
            assert all(a.logprob == pytest.approx(b.logprob, abs=1e-4) for a, b in pairs)
    for found in together[:3]:
        for choice in found.choices:
            check_form(choice.text)
            assert choice.finish_reason == "stop"
            assert choice.stats.forced
            assert choice.stats.rounds < choice.stats.tokens
    assert together[4].text in ("yes", "no", "not at all")
    assert drafted.engine.inactive_reason is None


@pytest.mark.parametrize("rule", ["token", "block"])
def test_rejection_sampling_gives_valid_answers(rule: Any) -> None:
    drafted = llm(tiny_model("llama", seed=1))
    params = SamplingParams(max_tokens=90, verification=rule, n=6, structured=Structured(json=FORM))
    for choice in drafted.generate("hello", params).choices:
        check_form(choice.text)
    assert 0.1 < drafted.stats.acceptance_rate < 1


def test_every_kind() -> None:
    def answer(asked: Structured, **settings: Any) -> str:
        found = PLAIN.generate("a", SamplingParams(**{"max_tokens": 60, "seed": 1, "structured": asked} | settings))
        assert found.error is None
        return found.text

    assert re.fullmatch("[ab]{5}(x|y)", answer(Structured(regex="[ab]{5}(x|y)")))
    odd = ['a "quoted" one', "back\\slash", "two\nlines", "ends /i", "%$#"]
    assert {answer(Structured(choice=odd), seed=i, temperature=5.0) for i in range(12)} <= set(odd)
    lark = 'start: "(" (start | DIGIT) ")"\nDIGIT: /[0-9]/'
    text = answer(Structured(grammar=lark), max_tokens=100)
    assert text.strip("()").isdigit()
    assert text.count("(") == text.count(")")
    inside = '{"enum": [{"a": [1, 2]}], "x-guidance": {"whitespace_flexible": false}}'
    assert answer(Structured(grammar=f'start: "x " %json {inside}')) == 'x {"a":[1,2]}'
    schema = {"enum": [{"a": [1, 2], "b": None}]}
    assert answer(Structured(json=schema)) == '{"a": [1, 2], "b": null}'
    assert answer(Structured(json=schema, disable_any_whitespace=True)) == '{"a":[1,2],"b":null}'
    loose = answer(Structured(json=schema, whitespace_pattern="[ \n]{0,3}"), temperature=5.0)
    assert json.loads(loose) == schema["enum"][0]
    assert answer(Structured(json_object=True)).startswith("{")
    assert answer(Structured(json=True))[:1] in '{["0123456789-tfn'


def test_as_many_choices_as_are_allowed() -> None:
    many = Structured(choice=[f"choice {i}" for i in range(4096)])
    found = PLAIN.generate("a", SamplingParams(max_tokens=30, seed=1, structured=many))
    assert found.text in many.choice  # type: ignore[operator]
    assert found.finish_reason == "stop"


def test_what_ends_a_text() -> None:
    def finished(**settings: Any) -> Any:
        given: dict[str, Any] = {"max_tokens": 50, "temperature": 0, "structured": Structured(regex="(ab)+")}
        return PLAIN.generate("a", SamplingParams(**given | settings))

    bias = {TOKENIZER.eos_token_id: 100.0}
    assert finished(logit_bias=bias).text == "ab"  # as soon as it may
    assert finished(logit_bias=bias, min_tokens=5).text == "ababab"
    assert finished(logit_bias=bias, ignore_eos=True).finish_reason == "stop"  # the grammar's end is the end
    ended = finished(logit_bias=bias, ignore_eos=True, skip_special_tokens=False)
    assert (ended.text, ended.finish_reason) == ("ab", "stop")
    assert finished(logit_bias=bias, ignore_eos=True, min_tokens=5).text == "ababab"
    spare = 100  # a token of the request's own ends a text where it may end, though the grammar has no such text
    assert finished(logit_bias={spare: 100.0}, stop_token_ids=[spare]).text == "ab"
    forced = finished(structured=Structured(choice=["yes"]), min_tokens=9)
    assert (forced.text, forced.finish_reason, len(forced.token_ids)) == ("yes", "stop", 3)
    assert finished(structured=Structured(choice=["yes"]), max_tokens=2).finish_reason == "length"
    assert finished(structured=Structured(choice=["yes"]), max_tokens=3).finish_reason == "stop"


def test_free_text_before_the_grammar() -> None:
    """Wherever a draft puts the end of it, the grammar begins behind it."""
    asked = Structured(choice=["yes", "no"], after="=>")
    bias = {TOKENIZER.convert_tokens_to_ids(c): 9.0 for c in "=>"}
    params = SamplingParams(max_tokens=80, seed=2, structured=asked, logit_bias=bias, n=4)
    expected = PLAIN.generate("a", params)
    for choice in expected.choices:
        _, mark, rest = choice.text.partition("=>")
        assert mark
        assert rest in ("yes", "no")
        assert choice.finish_reason == "stop"
    assert len({choice.text.partition("=>")[0] for choice in expected.choices}) > 1
    for draft in (MODEL, "lookup"):
        found = llm(draft).generate("a", params)
        assert [c.text for c in found.choices] == [c.text for c in expected.choices]
    never = SamplingParams(max_tokens=9, temperature=0, structured=Structured(choice=["yes"], after="never this"))
    plain = SamplingParams(max_tokens=9, temperature=0)
    assert PLAIN.generate("a", never).token_ids == PLAIN.generate("a", plain).token_ids


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("draft", [None, "lookup", "itself"])
def test_free_text_does_not_end_the_answer(draft: str | None, ignore_eos: bool) -> None:
    """A thought that ends by itself would leave out what was asked for."""
    ends = {TOKENIZER.eos_token_id: 100.0}
    drafted = llm(MODEL if draft == "itself" else draft)
    for rule in ("coupled", "block", "token"):
        given: dict[str, Any] = {"logit_bias": ends, "max_tokens": 12, "verification": rule, "ignore_eos": ignore_eos}
        never = Structured(choice=["yes"], after="never this")
        found = drafted.generate("a", SamplingParams(structured=never, seed=1, **given))
        assert (found.finish_reason, len(found.token_ids)) == ("length", 12)
        assert TOKENIZER.eos_token_id not in found.token_ids
        soon = {TOKENIZER.convert_tokens_to_ids("="): 99.0, **ends}
        params = SamplingParams(
            structured=Structured(choice=["yes"], after="="), seed=1, **given | {"logit_bias": soon}
        )
        assert (found := drafted.generate("a", params)).text.partition("=")[2] == "yes"
        assert found.finish_reason == "stop"
    own = SamplingParams(max_tokens=9, logit_bias={100: 100.0}, stop_token_ids=[100], structured=never)
    assert drafted.generate("a", own).finish_reason == "stop"  # its caller's word


def test_a_token_that_goes_on_behind_the_free_text() -> None:
    """The tokenizer has <spare0> .. <spare12>: its ">" ends the free text, or is followed by a digit too many."""
    state = grammars().compile(Structured(choice=["re1", "x"], after="spa")).begin(endings=frozenset({2}), min_tokens=0)
    row = state.mask(())
    assert row is not None
    spare = [TOKENIZER.convert_tokens_to_ids(f"<spare{i}>") for i in (0, 1, 2, 11)]
    assert [allows(row, token) for token in spare] == [False] * 4  # "re1>" is not how an answer goes on
    assert allows(row, TOKENIZER.convert_tokens_to_ids("a"))
    state = grammars().compile(Structured(regex="re1+>!", after="spa")).begin(endings=frozenset({2}), min_tokens=0)
    row = state.mask(())
    assert row is not None
    assert [allows(row, token) for token in spare] == [False, True, False, True]
    assert state.fits([spare[1], 4]) == 1
    state.take(spare[3])
    assert state.forced(9) == (TOKENIZER.convert_tokens_to_ids("!"),)


def test_asking_about_drafts_moves_nothing() -> None:
    state = grammars().compile(Structured(regex="a[bc]d")).begin(endings=frozenset({2}), min_tokens=0)
    a, b, c, d = TOKENIZER.convert_tokens_to_ids(list("abcd"))
    assert state.forced(5) == (a,)
    assert [state.fits(line) for line in ([a, b, d], [a, d], [b], [a, c, c])] == [3, 1, 0, 2]
    masks = [state.mask(path) for path in ((), (a,), (a, b), (a, c))]
    found = [[t for t in range(TINY_VOCABULARY) if allows(m, t)] for m in masks if m is not None]
    assert found == [[a], [b, c], [d], [d]]
    assert state.mask((a, b, d)) is None  # the end: nothing counts any more
    assert not state.over
    for token in (a, c, d):
        assert not state.over
        state.take(token)
    assert state.over
    assert state.forced(5) == ()
    assert state.mask(()) is None


def test_an_interruption_moves_nothing() -> None:
    """Ctrl-C wherever it strikes while drafts are asked about: what may follow is the same as before."""
    grammar = grammars().compile(Structured(regex="a[bc]d+e"))
    a, b, c, d = TOKENIZER.convert_tokens_to_ids(list("abcd"))

    def asked(state: Any) -> list[Any]:
        found = [state.mask(path) for path in ((), (a,), (a, b), (a, c, d), (a, b, d))]
        return [*(row.tolist() for row in found), state.fits([a, b, d, b]), state.forced(3)]

    expected = asked(grammar.begin(endings=frozenset({2}), min_tokens=3))
    with Interrupt() as chances:
        asked(grammar.begin(endings=frozenset({2}), min_tokens=3))
    assert chances.count > 50
    for at in range(1, chances.count + 1, 3):
        state = grammar.begin(endings=frozenset({2}), min_tokens=3)
        with contextlib.suppress(Interrupted), Interrupt(at):
            asked(state)
        assert asked(state) == expected


def test_no_later_answer_is_wrong_wherever_ctrl_c_strikes() -> None:
    drafted, asked = llm("lookup"), SamplingParams(max_tokens=90, temperature=0, structured=Structured(json=FORM))
    expected = PLAIN.generate("hello", asked).text
    within = ("node_masks", "grammar_state", "draft_masks", "judge", "drafting", "sequence")
    with Interrupt(within=within) as chances:
        assert drafted.generate("hello", asked).text == expected
    assert chances.count > 500
    struck = 0
    for at in range(7, chances.count, chances.count // 12):  # a warm row, or another draft, may leave fewer chances
        with contextlib.suppress(Interrupted), Interrupt(at, within=within) as strike:
            drafted.generate("hello", asked)
        struck += bool(strike.where)
        assert drafted.generate("hello", asked).text == expected, strike.where
    assert struck > 6
    assert drafted.engine.idle


@pytest.mark.parametrize("min_tokens", [0, 6])
@pytest.mark.parametrize(
    "asked",
    [
        Structured(json=FORM),
        Structured(regex="(ab)+"),
        Structured(choice=["yes", "yes and no"], after="=>"),
    ],
    ids=["form", "regex", "after"],
)
def test_one_token_is_allowed_where_the_mask_has_its_bit(asked: Structured, min_tokens: int) -> None:
    """Every token, at every place of a text: behind committed tokens, and behind drafted ones."""
    grammar = grammars().compile(asked)
    texts = {"json": '{"name": "abc", "age": 17, "kind": "camel"}', "regex": "ababab", "choice": "a=b=>yes and no"}
    line = tuple(TOKENIZER(texts[asked.kind], add_special_tokens=False)["input_ids"])
    made: dict[str, Any] = {"endings": frozenset({2, 100}), "min_tokens": min_tokens}
    masked, committed = grammar.begin(**made), grammar.begin(**made)
    for place in range(len(line) + 1):
        row, drafted = masked.mask(()), grammar.begin(**made)
        chained = grammar.begin(**made)
        for token in range(TINY_VOCABULARY + 3):
            bit = row is None or allows(row, token)
            assert drafted.allows(line[:place], token) == bit, (place, token)
            assert committed.allows((), token) == bit, (place, token)
            if place and token == line[place - 1]:  # as a drafted chain is followed
                assert all(chained.allows(line[:before], line[before]) for before in range(place))
                assert chained.forced(9, line[:place]) == masked.forced(9)
        for state in (masked, committed):
            if place < len(line):
                state.take(line[place])
    assert masked.over or masked.fault is None


def test_threads_share_a_grammar() -> None:
    """One compiled grammar, many texts that stand at different places of it."""
    drafted = llm("lookup")
    asked = [SamplingParams(max_tokens=90, seed=i, structured=Structured(json=FORM)) for i in range(6)]
    expected = [PLAIN.generate("hello", params).text for params in asked]
    found: list[str] = [""] * len(asked)

    def answer(place: int) -> None:
        found[place] = drafted.generate("hello", asked[place]).text

    threads = [threading.Thread(target=answer, args=(place,)) for place in range(len(asked))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == expected
    assert len(set(expected)) > 1


def test_masks_that_take_long_are_worked_out_beside_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = SamplingParams(max_tokens=90, seed=1, structured=Structured(json=FORM))
    expected = PLAIN.generate("hello", asked).text
    monkeypatch.setattr(node_masks, "WORTH_A_THREAD", -1.0)
    names: set[str] = set()
    right = node_masks.node_masks

    def noted(*given: Any) -> Any:
        names.add(threading.current_thread().name)
        return right(*given)

    monkeypatch.setattr(node_masks, "node_masks", noted)
    assert llm("lookup").generate("hello", asked).text == expected
    assert names == {"headstart-masks"}
