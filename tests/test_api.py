"""The library's door, on tiny models: the shapes of calls and answers, stops, logprobs, faults, warm prefixes."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from slab_tools import check_slab

from headstart import LLM, InvalidParameter, ModelRefused, PromptTooLong, SamplingParams, speculative_decode
from headstart.drafters.base import Drafter
from headstart.errors import GenerationFailed
from headstart.machine.load.loading import quiet
from headstart.progress import telling
from headstart.testing import TINY_VOCABULARY, ScriptedDrafter, tiny_model, tiny_tokenizer
from headstart.types import DraftView, Proposal

GREEDY = SamplingParams(temperature=0, max_tokens=12)
PROMPT = [5, 6, 7, 8, 5, 6]


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def llm(target: Any) -> LLM:
    return LLM(target, "lookup", max_model_len=64, max_rows=4)


def perfect(answer: list[int], prompt_length: int = len(PROMPT)) -> Drafter:
    """Drafts the very answer."""

    def guess(view: DraftView, budget: int) -> Proposal | None:
        at = len(view.tokens) - prompt_length
        tokens = answer[at : at + budget]
        return Proposal.chain(tokens) if tokens else None

    return ScriptedDrafter(guess)


def test_progress_is_told_what_loading_is_at(target: Any, capfd: pytest.CaptureFixture[str]) -> None:
    told: list[str] = []
    LLM(target, "lookup", max_model_len=64, progress=told.append)
    assert told == ["loading LlamaForCausalLM"]
    LLM(target, tiny_model("llama"), max_model_len=64, progress=told.append)
    assert told == ["loading LlamaForCausalLM"] * 3  # and a draft
    LLM(target, "lookup", max_model_len=64)
    assert capfd.readouterr() == ("", "")  # where there is no terminal, nothing is shown


def test_a_terminal_shows_what_loading_is_at(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # for rich, this is a terminal
    with telling(None) as tell:
        tell("loading [some/model]")
        print("what others print")
        tell("")  # what comes now shows itself
        tell("recording")
    out, err = capfd.readouterr()
    assert "loading [some/model]" in err
    assert "recording" in err
    assert err.endswith("\x1b[2K")  # the line is gone in the end
    assert out == "what others print\n"


def test_answers_have_what_they_promise(llm: LLM) -> None:
    out = llm.generate(PROMPT, GREEDY)
    assert len(out.token_ids) == 12
    assert out.finish_reason == "length"
    assert out.stats.tokens == 12
    assert out.stats.rounds <= 12
    assert 0 <= out.stats.acceptance_rate <= 1
    assert out.stats.acceptance_length == pytest.approx(12 / out.stats.rounds)
    assert len(out.choices[0].origins) == 12


def test_streaming_gives_the_same_tokens(llm: LLM) -> None:
    out = llm.generate(PROMPT, GREEDY)
    stream = llm.stream(PROMPT, GREEDY)
    pieces = list(stream)
    assert tuple(p.token_id for p in pieces) == out.token_ids
    assert pieces[-1].finish_reason == "length"
    assert stream.completion().token_ids == out.token_ids
    assert {p.origin for p in pieces} <= {"accepted", "correction", "bonus", "plain"}


def test_closing_a_stream_frees_its_row(llm: LLM) -> None:
    stream = llm.stream(PROMPT, GREEDY)
    next(stream)
    slab = llm.engine.parts.runner.slab
    assert slab.free_rows == slab.rows - 1
    stream.close()
    assert slab.free_rows == slab.rows
    assert stream.completion().finish_reason == "abort"


def test_two_streams_at_once(llm: LLM) -> None:
    first, second = llm.stream(PROMPT, GREEDY), llm.stream([9, 9, 4], GREEDY)
    expected = [llm.generate(p, GREEDY).token_ids for p in (PROMPT, [9, 9, 4])]
    got: tuple[list[Any], list[Any]] = ([], [])
    for a, b in zip(first, second, strict=True):
        got[0].append(a.token_id)
        got[1].append(b.token_id)
    assert [tuple(g) for g in got] == expected


def test_many_prompts_come_back_in_order(llm: LLM) -> None:
    prompts = [[i + 3, i + 4] for i in range(9)]
    params = [SamplingParams(temperature=0, max_tokens=1 + (7 * i) % 5) for i in range(9)]
    outs = llm.generate(prompts, params)
    assert [list(o.prompt_token_ids) for o in outs] == prompts
    assert [len(o.token_ids) for o in outs] == [p.max_tokens for p in params]
    assert [o.token_ids for o in outs] == [llm.generate(p, s).token_ids for p, s in zip(prompts, params, strict=True)]


def test_a_small_queue_does_not_lose_prompts(target: Any) -> None:
    llm = LLM(target, "lookup", max_model_len=64, max_rows=2, max_waiting=2, check=False)
    outs = llm.generate(
        [[i + 3, i + 4] for i in range(8)], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    )
    assert [len(o.token_ids) for o in outs] == [6] * 8


def test_n_choices_are_different_and_repeatable(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=4, max_tokens=8, verification="coupled")
    out = llm.generate(PROMPT, params)
    assert len({c.token_ids for c in out.choices}) == 3
    again = llm.generate(PROMPT, params)
    assert [c.token_ids for c in again.choices] == [c.token_ids for c in out.choices]
    # The first choice is what n=1 gives.
    assert llm.generate(PROMPT, replace(params, n=1)).token_ids == out.token_ids


def test_logprobs_are_the_targets_own(llm: LLM, target: Any) -> None:
    """Whatever was drafted and processed: the log-probability of a token under a plain forward of the target."""
    params = SamplingParams(
        temperature=0.9, seed=1, max_tokens=10, logprobs=2, repetition_penalty=1.3, verification="token"
    )
    out = llm.generate(PROMPT, params)
    assert out.logprobs is not None
    assert len(out.logprobs) == 10
    with torch.inference_mode():
        logits = target(torch.tensor([[*PROMPT, *out.token_ids]])).logits[0].log_softmax(-1)
    for i, (token, entry) in enumerate(zip(out.token_ids, out.logprobs, strict=True)):
        row = logits[len(PROMPT) + i - 1]
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert list(entry.top) == row.topk(2).indices.tolist()


def test_stop_token_in_the_middle_of_accepted_tokens(target: Any) -> None:
    """Ids, logprobs and cache are trimmed, and the reason is 'stop' even when max_tokens falls in the same round."""
    plain = LLM(target, None, max_model_len=64, check=False)
    answer = list(plain.generate(PROMPT, GREEDY).token_ids)
    at = next(i for i in range(2, 12) if answer[i] not in answer[:i])
    llm = LLM(target, perfect(answer), gamma=10, max_model_len=64, check=False)
    params = SamplingParams(temperature=0, max_tokens=at + 1, stop_token_ids=[answer[at]], logprobs=0)
    out = llm.generate(PROMPT, params)
    assert list(out.token_ids) == answer[: at + 1]
    assert out.finish_reason == "stop"
    assert out.logprobs is not None
    assert len(out.logprobs) == at + 1
    longer = SamplingParams(temperature=0, max_tokens=12, stop_token_ids=[answer[at]])
    assert list(llm.generate(PROMPT, longer).token_ids) == answer[: at + 1]
    slab = llm.engine.parts.runner.slab
    assert max(slab.lengths) == len(PROMPT) + at  # all but the last kept token


def test_min_tokens_holds_the_end_back(target: Any) -> None:
    plain = LLM(target, None, max_model_len=64, check=False)
    answer = list(plain.generate(PROMPT, GREEDY).token_ids)
    llm = LLM(target, perfect(answer), gamma=10, max_model_len=64, check=False)
    params = SamplingParams(temperature=0, max_tokens=12, stop_token_ids=[answer[1]], min_tokens=6)
    out = llm.generate(PROMPT, params)
    assert answer[1] not in out.token_ids[:6]
    assert len(out.token_ids) >= 6
    assert out.token_ids == plain.generate(PROMPT, params).token_ids


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, max_tokens=12, repetition_penalty=1.4),
        SamplingParams(temperature=0, max_tokens=12, presence_penalty=1.0, frequency_penalty=0.5),
        SamplingParams(temperature=0, max_tokens=12, logit_bias={7: 3.0, 9: -100.0}),
        SamplingParams(temperature=0.7, max_tokens=12, min_p=0.05, seed=3, verification="coupled", logprobs=1, n=2),
        SamplingParams(temperature=1.0, max_tokens=12, top_k=5, top_p=0.8, seed=3, verification="coupled"),
    ],
)
def test_every_control_works_with_speculation(target: Any, params: SamplingParams) -> None:
    """Exact, and never an error: the same ids as plain decoding."""
    plain = LLM(target, None, max_model_len=64, check=False).generate(PROMPT, params)
    fast_llm = LLM(target, tiny_model("llama"), gamma=4, max_model_len=64, check=False)
    fast = fast_llm.generate(PROMPT, params)
    assert [c.token_ids for c in fast.choices] == [c.token_ids for c in plain.choices]
    assert fast_llm.stats.accepted > 0


def test_padding_ids_are_never_emitted(target: Any) -> None:
    """The tokenizer is smaller than the head: ids past it are never drawn, whatever the logits say."""

    llm = LLM(target, "lookup", max_model_len=64, check=False)
    llm.engine.parts.vocab_size = 40
    out = llm.generate([3, 4, 5], SamplingParams(temperature=2.0, seed=0, max_tokens=50))
    assert max(out.token_ids) < 40


def test_a_warm_prefix_is_reused(target: Any) -> None:
    llm = LLM(target, None, max_model_len=64, max_rows=2, check=False)
    cold = llm.generate(PROMPT * 4, GREEDY)
    warm = llm.generate([*PROMPT * 4, *cold.token_ids[:4]], GREEDY)
    assert warm.stats.cached_tokens >= len(PROMPT) * 4
    fresh = LLM(target, None, max_model_len=64, check=False).generate([*PROMPT * 4, *cold.token_ids[:4]], GREEDY)
    assert warm.token_ids == fresh.token_ids


# -- faults


def test_bad_requests_name_their_field(llm: LLM) -> None:
    for prompt, params, field in (
        ([], GREEDY, "prompt"),
        ([TINY_VOCABULARY], GREEDY, "prompt"),
        ([-1], GREEDY, "prompt"),
        ([3] * 64, GREEDY, "prompt"),
        ([3] * 60, GREEDY, "max_tokens"),
        ([3], SamplingParams(max_tokens=12, logit_bias={TINY_VOCABULARY: 1.0}), "logit_bias"),
        ([3], SamplingParams(max_tokens=12, stop_token_ids=[TINY_VOCABULARY]), "stop_token_ids"),
        ([3], SamplingParams(min_tokens=1, max_tokens=2, stop_token_ids=range(TINY_VOCABULARY)), "min_tokens"),
    ):
        with pytest.raises(InvalidParameter) as caught:
            llm.generate([prompt], params) if not prompt else llm.generate(prompt, params)
        assert caught.value.field == field
    with pytest.raises(PromptTooLong, match="64"):
        llm.generate([3] * 70, GREEDY)
    with pytest.raises(InvalidParameter, match="prompt"):
        llm.generate("text without a tokenizer", GREEDY)
    with pytest.raises(InvalidParameter, match="params"):
        llm.generate([[3], [4]], [GREEDY])
    with pytest.raises(InvalidParameter, match="prompts must be"):
        llm.generate(5, GREEDY)  # type: ignore[call-overload]
    with pytest.raises(InvalidParameter, match="stop must be"):
        SamplingParams(stop=3)  # type: ignore[arg-type]
    assert SamplingParams(stop={"x"}).stop == ("x",)  # type: ignore[arg-type]  # anything that holds strings
    assert len(llm.generate(([n] for n in (3, 4)), GREEDY)) == 2  # type: ignore[call-overload]  # or prompts
    with pytest.raises(PromptTooLong) as caught:
        llm.generate([3] * 60, GREEDY)
    assert caught.value.room == 4
    assert llm.engine.idle


def test_nothing_that_is_no_model_gets_far(target: Any) -> None:
    for wrong in ({"model": 5}, {"model": target, "draft": 5}):
        with pytest.raises(InvalidParameter, match=r"(model|draft) must be"):
            LLM(**wrong, max_model_len=64)
    with pytest.raises(InvalidParameter, match="device"):
        LLM("some-model", device="foo")


def test_nan_fails_one_request_and_no_other(target: Any) -> None:
    fresh = LLM(target, None, max_model_len=64, check=False)
    expected = [fresh.generate(prompt, GREEDY).token_ids for prompt in (PROMPT, [7, 8])]
    poison = next(t for t in range(3, 99) if t not in {*expected[0], *expected[1], *PROMPT, 7, 8})
    llm = LLM(target, None, max_model_len=64, max_rows=3, check=False)
    runner = llm.engine.parts.runner
    right = runner.forward

    def poisoned(rows: slice, tokens: Any, *args: Any, **kwargs: Any) -> Any:
        logits = right(rows, tokens, *args, **kwargs).clone()
        logits[(tokens == poison).any(1)] = math.nan
        return logits

    runner.forward = poisoned  # type: ignore[method-assign]
    good, bad, also_good = llm.generate([PROMPT, [5, poison], [7, 8]], GREEDY)
    assert bad.finish_reason == "error"
    assert "NaN" in (bad.error or "")
    assert [good.token_ids, also_good.token_ids] == expected
    with pytest.raises(GenerationFailed, match="NaN"):
        llm.generate([5, poison], GREEDY)
    check_slab(runner.slab)
    assert runner.slab.free_rows == 3


def test_a_failing_forward_fails_its_requests_and_the_engine_lives(target: Any) -> None:
    llm = LLM(target, None, max_model_len=64, check=False)
    runner = llm.engine.parts.runner
    right, calls = runner.forward, [0]

    def failing(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == 3:
            raise torch.OutOfMemoryError("no memory left")
        return right(*args, **kwargs)

    runner.forward = failing  # type: ignore[method-assign]
    with pytest.raises(GenerationFailed, match="no memory left"):
        llm.generate(PROMPT, GREEDY)
    assert len(llm.generate(PROMPT, GREEDY).token_ids) == 12
    assert llm.stats.failed == 1


def test_a_failing_drafter_is_dropped_and_named(target: Any, caplog: pytest.LogCaptureFixture) -> None:
    expected = LLM(target, None, max_model_len=64, check=False).generate(PROMPT, GREEDY).token_ids

    def guess(view: DraftView, budget: int) -> Proposal | None:
        if len(view.tokens) > len(PROMPT) + 3:
            raise torch.OutOfMemoryError("the draft is out of memory")
        return Proposal.chain([1])

    llm = LLM(target, ScriptedDrafter(guess), gamma=2, max_model_len=64, check=False)
    assert llm.generate(PROMPT, GREEDY).token_ids == expected
    assert "out of memory" in (llm.engine.inactive_reason or "")


def test_a_draft_with_nan_does_no_harm(target: Any) -> None:
    broken = tiny_model("llama", seed=3)
    with torch.no_grad():
        broken.get_output_embeddings().weight.fill_(math.nan)
    expected = LLM(target, None, max_model_len=64, check=False).generate(PROMPT, GREEDY).token_ids
    llm = LLM(target, broken, gamma=3, max_model_len=64, check=False)
    assert llm.generate(PROMPT, GREEDY).token_ids == expected
    for rule in ("block", "coupled"):
        sampled = SamplingParams(seed=1, max_tokens=12, verification=rule)  # type: ignore[arg-type]
        assert len(llm.generate(PROMPT, sampled).token_ids) == 12


def test_a_hostile_prediction_changes_nothing(target: Any) -> None:
    plain = LLM(target, None, max_model_len=64, check=False).generate(PROMPT, GREEDY).token_ids
    llm = LLM(target, "lookup", max_model_len=64, check=False)
    from headstart.types import Request

    for prediction in ((3,) * 100_000, tuple(plain), tuple(reversed(plain))):
        handle = llm.engine.submit(Request("x", tuple(PROMPT), GREEDY, prediction))
        while not handle.done:
            llm.engine.step()
        assert handle.completion().token_ids == plain


def test_a_draft_of_another_vocabulary_is_refused(target: Any, tmp_path: Path) -> None:
    """Heads of other sizes are not: see test_padded_vocabularies.py."""
    with quiet():
        tiny_model("llama").save_pretrained(tmp_path)
        tiny_tokenizer(shuffle=4).save_pretrained(tmp_path)
    with pytest.raises(ModelRefused, match="they use different tokenizers"):
        LLM(target, tmp_path, tokenizer=tiny_tokenizer(), max_model_len=64, check=False)


def test_an_unknown_drafter_or_setting_is_an_error(target: Any) -> None:
    with pytest.raises(InvalidParameter, match="max_row"):
        LLM(target, None, max_row=3)
    with pytest.raises(InvalidParameter, match="max_model_len"):
        LLM(target, None, max_model_len=100_000)


def test_aborting_one_of_two_equal_requests(target: Any) -> None:
    llm = LLM(target, "lookup", max_model_len=64, check=False)
    expected = llm.generate(PROMPT, GREEDY).token_ids
    first, second = llm.stream(PROMPT, GREEDY), llm.stream(PROMPT, GREEDY)
    next(first)
    first.close()
    assert tuple(p.token_id for p in second) == expected


# -- plain tensors


def test_speculative_decode_on_plain_tensors(target: Any) -> None:
    draft = tiny_model("llama")
    ids = torch.tensor([PROMPT, PROMPT[::-1]])
    out = speculative_decode(target, draft, ids, gamma=3, max_tokens=10, temperature=0)
    assert out.ids.shape == (2, 16)
    assert torch.equal(out.ids[:, :6], ids)
    assert out.acceptance_rate > 0.9  # the draft is the target
    single, rate = speculative_decode(target, draft, ids[0], gamma=3, max_tokens=10, temperature=0)
    assert torch.equal(single[0], out.ids[0])
    assert rate > 0.9
    with pytest.raises(InvalidParameter, match="input_ids"):
        speculative_decode(target, draft, torch.zeros(0, dtype=torch.long))
