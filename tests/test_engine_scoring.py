"""``prompt_logprobs``: how likely the prompt's own tokens were, whoever shares the forward or was there before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engines import device_draft, device_engine, table_engine

from headstart import LLM, Completion, GenerationFailed, InvalidParameter, SamplingParams
from headstart.engine import scoring
from headstart.errors import PromptTooLong
from headstart.testing import TINY_VOCABULARY, TableRunner, tiny_model
from headstart.types import Request

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
PROMPT = [3 + (7 * i * i) % 90 for i in range(40)]


def made(model: Any = None, **settings: Any) -> LLM:
    """By default on the CPU's own kernels, where bits do not depend on company."""
    target = model if model is not None else tiny_model("llama", **SIZES)
    given = {"draft": "lookup", "max_rows": 4, "prefill_chunk": 16, "check": False, "quantization": "int8"} | settings
    return LLM(target, **given)


def asked(top: int = 3, **more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 6, "ignore_eos": True, "prompt_logprobs": top} | more)


def truth(model: Any, prompt: list[int]) -> torch.Tensor:
    """Log-probabilities [P, V] behind each token, by one fresh pass of the model's own modules."""
    with torch.inference_mode():
        return model(input_ids=torch.tensor([prompt])).logits[0].float().log_softmax(-1)


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2-mixed"])
def test_they_are_those_of_a_fresh_pass(name: str) -> None:
    model = tiny_model(name)
    llm = made(model, quantization=None)
    expected = truth(model, PROMPT)
    answer = llm.generate(PROMPT, asked())
    found = answer.prompt_logprobs
    assert found is not None
    assert found[0] is None
    assert [each.token_id for each in found[1:]] == PROMPT[1:]
    assert [each.logprob for each in found[1:]] == pytest.approx(
        [float(expected[i, token]) for i, token in enumerate(PROMPT[1:])], abs=1e-4
    )
    for i, each in enumerate(found[1:]):
        best = expected[i].topk(3)
        assert list(each.top.values()) == pytest.approx(best.values.tolist(), abs=1e-4)
        assert list(each.top.values()) == sorted(each.top.values(), reverse=True)
        assert len(each.top) == 3
    assert (
        answer.token_ids == llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)).token_ids
    )


def test_the_same_bits_cold_and_warm_alone_and_in_company_drafted_and_plain() -> None:
    llm = made()
    ways: dict[str, Completion] = {"cold": llm.generate(PROMPT, asked())}
    ways["warm"] = llm.generate(PROMPT, asked())
    assert llm.generate(PROMPT, asked(prompt_logprobs=None)).stats.cached_tokens == len(PROMPT) - 1, "the row is warm"
    ways["plain"] = llm.generate(PROMPT, asked(speculate=False))
    ways["one token"] = llm.generate(PROMPT, asked(max_tokens=1))
    ways["none"] = llm.generate(PROMPT, asked(max_tokens=0))
    others = [PROMPT[:i] + [5, 6, 7] * 4 for i in (1, 9, 33)]
    for where in range(3):  # some ask for scores themselves, some do not, and all share a beginning with it
        params = [asked(prompt_logprobs=i if i % 2 else None, speculate=bool(i)) for i in range(3)]
        prompts: list[list[int]] = [*others[:where], PROMPT, *others[where:]]
        answers = llm.generate(prompts, [*params[:where], asked(n=2), *params[where:]])
        ways[f"place {where}"] = answers[where]
    ways["chunk"] = made(prefill_chunk=7).generate(PROMPT, asked())
    ways["no draft"] = made(draft=None).generate(PROMPT, asked())
    expected = ways["cold"].prompt_logprobs
    assert expected is not None
    assert len(expected) == len(PROMPT)
    for way, found in ways.items():
        assert found.prompt_logprobs == expected, way
        assert found.token_ids == ways["cold"].token_ids[: len(found.token_ids)], way


def test_the_logits_of_a_whole_prompt_are_never_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "_MOST", 5 * TINY_VOCABULARY)
    llm = made(prefill_chunk=64)
    runner, seen = llm.engine.parts.runner, []
    read_all = runner.read_all
    monkeypatch.setattr(runner, "read_all", lambda pieces: seen.append([len(t) for _, t in pieces]) or read_all(pieces))
    found = llm.generate([PROMPT, PROMPT[:7], PROMPT[20:]], asked())
    assert max(map(sum, seen)) == 5
    assert any(len(widths) > 1 for widths in seen), "prompts share forwards"
    monkeypatch.undo()
    assert [a.prompt_logprobs for a in found] == [
        a.prompt_logprobs for a in made().generate([PROMPT, PROMPT[:7], PROMPT[20:]], asked())
    ]


def test_nothing_is_written_where_no_token_is_wanted() -> None:
    llm = made(max_model_len=64)
    longest = [3 + i % 90 for i in range(64)]
    for prompt in (PROMPT[:1], longest, PROMPT):
        for params in (asked(max_tokens=0), asked(max_tokens=0, prompt_logprobs=None), asked(max_tokens=0, n=3)):
            answer = llm.generate(prompt, params)
            assert [(c.text, c.token_ids, c.finish_reason) for c in answer.choices] == [("", (), "length")] * params.n
            assert len(answer.prompt_logprobs or ()) == (len(prompt) if params.prompt_logprobs is not None else 0)
    assert llm.engine.idle
    assert llm.generate(PROMPT, asked(prompt_logprobs=None)).stats.cached_tokens == len(PROMPT) - 1, (
        "its row stays warm"
    )
    with pytest.raises(PromptTooLong):
        llm.generate(longest, asked(max_tokens=1))
    with pytest.raises(InvalidParameter, match="max_tokens"):
        SamplingParams(max_tokens=-1)
    pieces = list(llm.stream(PROMPT, asked(max_tokens=0)))
    assert [(p.token_id, p.finish_reason) for p in pieces] == [(None, "length")]


def test_a_stream_has_them_with_its_first_piece() -> None:
    llm = made()
    stream = llm.stream(PROMPT, asked())
    next(stream)
    assert stream.prompt_logprobs == llm.generate(PROMPT, asked()).prompt_logprobs
    assert len(stream.prompt_logprobs or ()) == len(PROMPT)
    stream.close()


def test_broken_numbers_end_the_request_and_nobody_else() -> None:
    table = torch.randn(6, 6, 6, generator=torch.Generator().manual_seed(1))
    table[2, 3, 0] = float("nan")
    engine = table_engine(table, None)
    assert isinstance(engine.parts.runner, TableRunner)
    broken = engine.submit(Request("a", (1, 2, 3, 4, 5), asked(max_tokens=2)))
    fine = engine.submit(Request("b", (1, 2, 4, 5), asked(max_tokens=2)))
    engine.drive(lambda: broken.done and fine.done)
    with pytest.raises(GenerationFailed, match="broke down in the prompt"):
        broken.raise_failure()
    assert len(fine.completion().prompt_logprobs or ()) == 4
    assert fine.completion().finish_reason == "length"


def test_an_interruption_in_the_middle_of_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = made(prefill_chunk=8)
    expected = llm.generate(PROMPT, asked())
    llm.cold()
    runner, calls = llm.engine.parts.runner, [0]
    read_all = runner.read_all

    def struck(pieces: Any) -> Any:
        calls[0] += 1
        if calls[0] == 3:
            raise KeyboardInterrupt
        return read_all(pieces)

    monkeypatch.setattr(runner, "read_all", struck)
    stream = llm.submit(PROMPT, asked())
    with pytest.raises(KeyboardInterrupt):
        llm.engine.drive(lambda: False)
    answer = stream.result()
    assert calls[0] > 3
    assert answer.prompt_logprobs == expected.prompt_logprobs
    assert answer.token_ids == expected.token_ids


@pytest.mark.parametrize("overlap", [None, False, True])
def test_captured_rounds_go_on_behind_them(overlap: bool | None) -> None:
    """A prompt is scored while other rows have a round in flight, and its own rounds are captured afterwards."""
    table = torch.randn(8, 8, 8, generator=torch.Generator().manual_seed(2))
    draft = device_draft(table + 0.3 * torch.randn(8, 8, 8, generator=torch.Generator().manual_seed(3)))
    engine = table_engine(table, None) if overlap is None else device_engine(table, draft, overlap=overlap)
    first = engine.submit(Request("a", (1, 2, 3, 4), asked(max_tokens=40, prompt_logprobs=None)))
    for _ in range(4):
        engine.step()
    prompt = tuple(i * i % 8 for i in range(21))
    second = engine.submit(Request("b", prompt, asked(max_tokens=12, n=2)))
    engine.drive(lambda: first.done and second.done)
    expected = [table[before, token].log_softmax(-1) for before, token in zip((0, *prompt), prompt, strict=False)]
    found = second.completion().prompt_logprobs or ()
    assert [each.logprob for each in found[1:] if each] == pytest.approx(
        [float(expected[i][token]) for i, token in enumerate(prompt[1:])], abs=1e-5
    )
    for handle in (first, second):
        alone = table_engine(table, None)
        plain = alone.submit(handle.request)
        alone.drive(lambda plain=plain: plain.done)
        assert [c.token_ids for c in handle.completion().choices] == [c.token_ids for c in plain.completion().choices]
        assert plain.completion().prompt_logprobs == handle.completion().prompt_logprobs
