"""How people write prompts: every form that is taken comes to the same ids; every other one is a clear error."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BatchEncoding

from headstart import LLM, HeadstartError, InvalidParameter, PromptTooLong, SamplingParams
from headstart.prompts import is_conversation, read_prompt, read_prompts
from headstart.testing import tiny_model, tiny_tokenizer

IDS = [5, 6, 7, 8, 5, 6]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@lru_cache
def llm() -> LLM:
    return LLM(tiny_model("llama"), "lookup", tokenizer=tiny_tokenizer(), max_rows=4, max_model_len=128, check=False)


@lru_cache
def bare() -> LLM:
    return LLM(tiny_model("llama"), "lookup", max_model_len=64, check=False)


ONE: dict[str, Any] = {
    "list": IDS,
    "tuple": tuple(IDS),
    "iterator": IDS,  # made where it is used
    "int64 array": np.array(IDS),
    "uint16 array": np.array(IDS, dtype=np.uint16),
    "list of numpy numbers": list(np.array(IDS)),
    "list of tensors": list(torch.tensor(IDS)),
    "tensor [T]": torch.tensor(IDS),
    "int32 tensor [T]": torch.tensor(IDS, dtype=torch.int32),
    "tensor [1, T]": torch.tensor([IDS]),
    "array [1, T]": np.array([IDS]),
    "dict": {"prompt_token_ids": IDS},
    "dict of an array": {"prompt_token_ids": np.array(IDS)},
    "dict of a tensor [1, T]": {"prompt_token_ids": torch.tensor([IDS])},
    "dict with a None": {"prompt_token_ids": IDS, "prompt": None},
}


@pytest.mark.parametrize("form", ONE)
def test_every_form_of_ids_is_the_same_prompt(form: str) -> None:
    def value() -> Any:
        return iter(IDS) if form == "iterator" else ONE[form]

    found, single = read_prompts(value())
    assert (found, single) == ([IDS], True)
    assert all(type(token) is int for token in found[0])
    assert read_prompts([value(), [9]]) == ([IDS, [9]], False)
    assert read_prompt(value()) == IDS
    expected = llm().generate(IDS, GREEDY)
    out = llm().generate(value(), GREEDY)
    assert out.token_ids == expected.token_ids
    assert out.prompt_token_ids == tuple(IDS)
    assert all(type(token) is int for token in out.prompt_token_ids)
    assert llm().stream(value(), GREEDY)._handle.request.prompt == tuple(IDS)


def test_a_range_is_a_prompt() -> None:
    assert read_prompts(range(3, 7)) == ([[3, 4, 5, 6]], True)


MANY: dict[str, Any] = {
    "lists": [[5, 6, 7], [8, 9, 10]],
    "tuple of tuples": ((5, 6, 7), (8, 9, 10)),
    "array [B, T]": np.array([[5, 6, 7], [8, 9, 10]]),
    "tensor [B, T]": torch.tensor([[5, 6, 7], [8, 9, 10]]),
    "list of tensors": [torch.tensor([5, 6, 7]), torch.tensor([[8, 9, 10]])],
    "array of lists": np.array([[5, 6, 7], [8, 9, 10], None], dtype=object)[:2],
    "dicts": [{"prompt_token_ids": [5, 6, 7]}, {"prompt_token_ids": range(8, 11)}],
    "dict and list": [{"prompt_token_ids": [5, 6, 7]}, [8, 9, 10]],
}


@pytest.mark.parametrize("form", MANY)
def test_many_prompts_in_every_form(form: str) -> None:
    assert read_prompts(MANY[form]) == ([[5, 6, 7], [8, 9, 10]], False)
    outs = llm().generate(MANY[form], GREEDY)
    assert [o.token_ids for o in outs] == [llm().generate(line, GREEDY).token_ids for line in ([5, 6, 7], [8, 9, 10])]


def test_text_in_every_form() -> None:
    expected = llm().generate("abcabc", GREEDY).token_ids
    for form in ("abcabc", {"prompt": "abcabc"}, np.str_("abcabc")):
        assert llm().generate(form, GREEDY).token_ids == expected
        assert llm().generate([form, [5]], GREEDY)[0].token_ids == expected
    assert llm().generate(np.array(["abcabc", "x"]), GREEDY)[0].token_ids == expected
    assert tuple(p.token_id for p in llm().stream({"prompt": "abcabc"}, GREEDY)) == expected


def test_no_prompts_have_no_answers() -> None:
    for nothing in ([], (), iter(()), np.zeros((0, 4), dtype=np.int64)):
        assert llm().generate(nothing, GREEDY) == []


def test_ids_from_arrays_are_found_by_lookup() -> None:
    """A drafter compares ids; it must find those of a tensor in what the model writes."""
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    drafted = []
    for line in (IDS * 4, torch.tensor(IDS * 4), np.array([IDS * 4])):
        fresh = LLM(tiny_model("llama"), "lookup", gamma=4, max_model_len=128, check=False)
        drafted.append(fresh.generate(line, params).stats.drafted)
    assert drafted[0] > 0
    assert drafted == [drafted[0]] * 3


WRONG: list[tuple[Any, str]] = [
    (5, "prompts must be text"),
    (None, "prompts must be text"),
    (b"bytes", "prompts must be text"),
    ({5, 6}, "prompts must be text"),
    (torch.tensor(5), "of shape"),
    (torch.zeros(2, 2, 2, dtype=torch.long), "of shape"),
    (np.array([1.0, 2.0]), "must be whole numbers"),
    (torch.tensor([True, False]), "must be whole numbers"),
    ([1.5, 2], "whole numbers"),
    ([True, False], "whole numbers"),
    ([3, "a"], "not 'a' at 1"),
    (["a", 3], "prompt 1 must be"),
    (["a", b"b"], "prompt 1 must be"),
    ([["a"], ["b"]], "prompt 0 must be one prompt"),
    ([[[1]], [[2]]], "prompt 0 must be one prompt"),
    ([[3], None], "prompt 1 must be"),
    ([[3], []], "prompt 1 must hold at least one token"),
    (np.zeros(0, dtype=np.int64), "prompt must hold at least one token"),
    ({}, "needs one of the keys"),
    ({"prompt": "a", "prompt_token_ids": [3]}, "only one"),
    ({"prompt": [3]}, "must be text under the key 'prompt'"),
    ({"prompt_token_ids": "abc"}, "prompt_token_ids must be"),
    ({"prompt_token_ids": [[3]]}, "prompt_token_ids must hold whole numbers"),
    ({"prompt": "a", "multi_modal_data": {"image": 1}}, "'multi_modal_data'"),
    ([[3], {"prompt": "a", "cache_salt": "x"}], "prompt 1 takes the keys"),
    (BatchEncoding({"input_ids": [3], "attention_mask": [1]}), "'input_ids', 'attention_mask'"),
    ({"role": "user", "content": "a"}, "go to chat"),
    ([{"role": "user", "content": "a"}], "go to chat"),
]


@pytest.mark.parametrize(("value", "words"), WRONG, ids=[words for _, words in WRONG])
def test_every_other_form_is_a_clear_error(value: Any, words: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        llm().generate(value, GREEDY)
    assert words in str(caught.value)
    assert llm().engine.idle


# -- one of many is named


def test_one_of_many_is_named_by_its_index() -> None:
    for prompts, field, index, words in (
        ([[3], [4], [5] * 64], "prompt", 2, "prompt 2 has 64 tokens; max_model_len is 64"),
        (
            [[3], [4] * 60, [5]],
            "max_tokens",
            1,
            "max_model_len is 64, and 60 prompt tokens leave room for 4 (prompt 1)",
        ),
        ([[3], [4], [5], [900]], "prompt", 3, "prompt 3 holds token ids outside the vocabulary"),
        ([[3], "text"], "prompt", 1, "prompt 1 must be token ids: this model was given without a tokenizer"),
    ):
        with pytest.raises(InvalidParameter) as caught:
            bare().generate(prompts, GREEDY)
        assert words in str(caught.value)
        assert (caught.value.field, caught.value.index) == (field, index)
    assert bare().engine.idle
    assert bare().stats.rounds == 0, "nothing is computed before all prompts are known to be right"


def test_a_prompt_alone_has_no_number() -> None:
    with pytest.raises(PromptTooLong, match=r"^prompt has 64 tokens; max_model_len is 64") as caught:
        bare().generate([5] * 64, GREEDY)
    assert caught.value.index is None
    with pytest.raises(PromptTooLong, match=r"^prompt 0 has"):
        bare().generate([[5] * 64], GREEDY)


def test_one_of_many_conversations_is_named() -> None:
    good, long = [{"role": "user", "content": "Hi"}], [{"role": "user", "content": "Hi" * 90}]
    with pytest.raises(PromptTooLong, match=r"max_model_len is 128.* \(conversation 1\)"):
        llm().chat([good, long], GREEDY)
    with pytest.raises(InvalidParameter, match=r"\(message 1\) \(conversation 2\)"):
        llm().chat([good, good, [*good, {"role": "owner", "content": "Hi"}]], GREEDY)


# -- settings by two names, one for each


def test_sampling_params_is_another_name_of_params() -> None:
    expected = llm().generate(IDS, GREEDY).token_ids
    chat = [{"role": "user", "content": "Hi"}]
    assert llm().generate(IDS, sampling_params=GREEDY).token_ids == expected
    assert llm().generate([IDS, [5]], sampling_params=[GREEDY, GREEDY])[0].token_ids == expected
    assert tuple(p.token_id for p in llm().stream(IDS, sampling_params=GREEDY)) == expected
    assert llm().chat(chat, sampling_params=GREEDY) is not None
    for call in (llm().generate, llm().stream):
        with pytest.raises(InvalidParameter, match="another name of params"):
            call(IDS, GREEDY, sampling_params=GREEDY)  # type: ignore[operator]
    with pytest.raises(InvalidParameter, match="another name of params"):
        llm().chat(chat, GREEDY, sampling_params=GREEDY)


@pytest.mark.parametrize("params", [5, {"temperature": 0}, "greedy", [GREEDY, GREEDY], [5]])
def test_what_is_no_params_is_a_clear_error(params: Any) -> None:
    for call in (llm().generate, llm().stream, lambda _, p: llm().chat([{"role": "user", "content": "Hi"}], p)):
        with pytest.raises(InvalidParameter, match=r"^params "):
            call(IDS, params)  # type: ignore[operator]
    with pytest.raises(InvalidParameter, match=r"^prediction "):
        llm().generate(IDS, GREEDY, prediction=5)  # type: ignore[call-overload]


# -- conversations


def test_conversations_are_told_from_prompts() -> None:
    message = {"role": "user", "content": "Hi"}
    assert is_conversation([message])
    assert is_conversation((message, message))
    for other in ("Hi", message, [], [3], [[message]], [{"prompt": "Hi"}], {"prompt": "Hi"}):
        assert not is_conversation(other)
    answers = llm().chat([[message], (message,)], [GREEDY, GREEDY])
    single = llm().chat([message], GREEDY)
    assert [a.token_ids for a in answers] == [single.token_ids] * 2  # type: ignore[union-attr]
    assert llm().chat(iter([message]), GREEDY).token_ids == single.token_ids  # type: ignore[union-attr, arg-type]
    assert tuple(p.token_id for p in llm().stream([message], GREEDY)) == single.token_ids  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([], "must hold at least one message"),
        ([[]], "must hold at least one message"),
        ({"role": "user", "content": "Hi"}, "write [{'role'"),
        ("Hi", "must be a list of"),
        (None, "must be a list of"),
        (["Hi"], "must be a list of"),
        ([{"role": "user", "content": None}], "need a content"),
        ([{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}], "tool call"),
    ],
)
def test_what_is_no_conversation_is_a_clear_error(value: Any, words: str) -> None:
    with pytest.raises(InvalidParameter, match=r"^messages ") as caught:
        llm().chat(value, GREEDY)
    assert words in str(caught.value)


# -- a stream's answer


def test_an_answer_that_has_not_ended_says_so() -> None:
    stream = llm().stream(IDS, GREEDY)
    with pytest.raises(HeadstartError, match="has not ended yet"):
        stream.completion()
    next(stream)
    with pytest.raises(HeadstartError, match="has not ended yet"):
        stream.completion()
    assert len([*stream]) == 5
    assert stream.completion().token_ids == llm().generate(IDS, GREEDY).token_ids
