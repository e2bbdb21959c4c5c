"""A backend cannot forget a sampling parameter: it says yes or no to each, and a no sends the round elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, get_args

import pytest
import torch
from engines import table, table_draft, table_engine
from test_drafters_head import View
from test_engine_captured import engine as captured_engine
from test_engine_captured import run, watch

from headstart.drafters import draft_sampler, head_chains
from headstart.engine import device_rows, judge, programs
from headstart.engine.sequence import Sequence
from headstart.machine import gpu
from headstart.machine.cpu import sampling
from headstart.maths import distribution, noise, warp
from headstart.maths.asks import ASKS, DRAWING, Served, asks_of
from headstart.maths.vocab_ops import PLAIN, VocabOps
from headstart.maths.warp import Warp
from headstart.types import Request, SamplingParams, Structured, Verification

BACKENDS: list[Served] = [
    distribution.SERVED,
    warp.UNTOUCHED,
    warp.LIKELIEST,
    sampling.SERVED,
    sampling.SAMPLES,
    gpu.SAMPLES,
    draft_sampler.SERVED,
    head_chains.SERVED,
    *device_rows.PROGRAMS.values(),
]
FIELDS = [field.name for field in fields(SamplingParams)]
#: for each field, a value that asks for something by it, and settings under which it does
ASKING: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "top_p": {"top_p": 0.9},
    "top_k": {"top_k": 3},
    "min_p": {"min_p": 0.1},
    "token": {"verification": "token"},
    "block": {},
    "presence_penalty": {"presence_penalty": 0.5, "temperature": 0},
    "frequency_penalty": {"frequency_penalty": -0.5, "temperature": 0},
    "repetition_penalty": {"repetition_penalty": 1.2, "temperature": 0},
    "logit_bias": {"logit_bias": {1: 2.0}, "temperature": 0},
    "min_tokens": {"min_tokens": 2, "temperature": 0},
    "logprobs": {"logprobs": 0, "temperature": 0},
    "structured": {"structured": Structured(regex="a+"), "temperature": 0},
}
#: fields that no backend has to know: the engine deals with them
AROUND = {
    "prompt_logprobs",
    "seed",
    "stop",
    "stop_token_ids",
    "max_tokens",
    "ignore_eos",
    "n",
    "speculate",
    "skip_special_tokens",
}


def test_every_field_is_in_the_table() -> None:
    assert set(ASKS) == set(FIELDS), "write the new field into maths/asks.ASKS"
    assert set(FIELDS) - {"verification"} - AROUND <= set(ASKING), "say here how a request asks for it"
    for name, settings in ASKING.items():
        assert name in asks_of(SamplingParams(**settings)), name
    assert asks_of(SamplingParams(temperature=0)) == frozenset()
    assert set(get_args(Verification)) <= {"coupled", *ASKING}, "a rule is asked for by its name"
    assert asks_of(SamplingParams(seed=1)) == {"temperature"}, "coupled is no rule that a backend could lack"


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.by)
@pytest.mark.parametrize("field", sorted(ASKING))
def test_every_backend_says_yes_or_no(backend: Served, field: str) -> None:
    known = backend.serves | backend.declines
    assert field in known, f"{backend.by} has not said whether it serves {field}"
    assert known <= set(ASKING), f"{backend.by} speaks of {known - set(ASKING)}, by which nothing can be asked for"


def test_what_nobody_else_serves_the_tensors_do() -> None:
    assert distribution.SERVED.takes([frozenset(ASKING)])


def test_a_backend_that_has_not_heard_of_a_field_is_passed_by() -> None:
    assert not warp.UNTOUCHED.takes([frozenset({"unheard_of"})])
    assert not distribution.SERVED.takes([frozenset({"unheard_of"})])
    with pytest.raises(ValueError, match="both serves and declines"):
        Served("confused", frozenset({"top_p"}), frozenset({"top_p"}))


@pytest.mark.parametrize("field", ["presence_penalty", "repetition_penalty", "logit_bias", "min_tokens"])
def test_a_round_goes_where_its_settings_are_served(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy chains on a CPU have a way of their own, which heeds none of these."""
    seen: list[frozenset[str]] = []
    follow = judge.follow

    def noted(*args: Any) -> Any:
        seen.extend(s.asks for s in args[1].sequences)
        return follow(*args)

    monkeypatch.setattr(judge, "follow", noted)
    target = table(6).float()
    engine = table_engine(target, table_draft(target), eos=(2,))
    handle = engine.submit(Request("a", (1, 2), SamplingParams(max_tokens=8, **ASKING[field])))
    plain = engine.submit(Request("b", (1, 2), SamplingParams(max_tokens=8, temperature=0)))
    engine.drive(lambda: handle.done and plain.done)
    assert all(asks <= warp.UNTOUCHED.serves for asks in seen)
    assert seen, "the plain request goes that way once it is alone, or in its first round"


@pytest.mark.parametrize("draft", [True, False])
def test_what_even_the_full_program_declines_is_played_step_by_step(
    draft: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = device_rows.PROGRAMS["full"]
    params = [SamplingParams(temperature=0.8, top_k=3, seed=i, max_tokens=12, ignore_eos=True) for i in range(5)]
    expected = run(captured_engine(3, 5, draft=draft), params)
    less = Served("less", full.serves - {"top_k"}, full.declines | {"top_k"})
    monkeypatch.setitem(device_rows.PROGRAMS, "full", less)
    made = captured_engine(3, 5, draft=draft)
    played = watch(made)
    assert run(made, params) == expected
    assert not played
    assert run(made, [replace(p, top_k=0) for p in params]) != expected
    assert played


def forgetful(samples: Served) -> VocabOps:
    """Faster loops of a backend, which have never heard of top_k, in tensors."""

    def sampled(x: torch.Tensor, warp: Warp) -> torch.Tensor:
        assert warp.top_k is None, "they have never heard of top_k"
        shape = x.shape if x.dim() == 3 else (len(x), 1, -1)
        p = distribution.probabilities(x.view(shape), replace(warp, asks=frozenset()))
        return p.view(x.shape)

    def drawn(x: torch.Tensor, warp: Warp, words: noise.Keys, into: torch.Tensor | None = None) -> Any:
        q = sampled(x, warp)
        return q, noise.race(q, words)

    return replace(PLAIN, sampled=sampled, drawn=drawn, samples=samples)


@pytest.mark.parametrize("samples", [gpu.SAMPLES, sampling.SAMPLES], ids=lambda samples: samples.by)
def test_the_faster_loops_are_passed_by_where_they_decline(samples: Served) -> None:
    less = forgetful(Served("less", samples.serves - {"top_k"}, samples.declines | {"top_k"}))
    logits, outputs = torch.randn(1, 1, 9, generator=torch.Generator().manual_seed(0)), torch.zeros(1)
    warp = Warp.of([SamplingParams(top_k=3)], vocab_size=9, eos=[()], device="cpu")
    words = (torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32))
    for vocab_ops in (forgetful(samples), replace(less, samples=None), less):
        work = {"outputs": outputs, "vocab_ops": vocab_ops}
        if vocab_ops.samples is samples:
            with pytest.raises(AssertionError, match="top_k"):
                distribution.probabilities(logits, warp, **work)
            with pytest.raises(AssertionError, match="top_k"):
                draft_sampler.draw_tokens(logits[:, 0], warp, words, vocab_ops=vocab_ops)
            continue
        p = distribution.probabilities(logits, warp, **work)
        assert int((p > 0).sum()) == 3
        _, q = draft_sampler.draw_tokens(logits[:, 0], warp, words, vocab_ops=vocab_ops)
        assert q is not None
        assert torch.equal(q, p[:, 0])


def test_who_works_a_rows_numbers_out_does_not_depend_on_its_neighbours() -> None:
    """A row that the faster loops decline is judged apart from those that they serve."""
    less = forgetful(Served("less", sampling.SAMPLES.serves - {"top_k"}, frozenset({"top_k"})))
    sizes: list[int] = []
    loop = less.sampled
    assert loop is not None

    def counted(x: torch.Tensor, warp: Warp) -> torch.Tensor:
        sizes.append(len(x))
        return loop(x, warp)

    def sequence(name: str, **more: Any) -> Sequence:
        params = SamplingParams(temperature=0.7, seed=3, verification="coupled", **more)
        return Sequence(Request(name, (1, 2), params), 0, 3, eos=(), text=None, limit=64)

    rows = [sequence("a"), sequence("b", top_k=2), sequence("c", min_p=0.01)]
    batch = judge.Batch.of(rows, [None] * 3, torch.device("cpu"))
    logits = torch.randn(3, 1, 9, generator=torch.Generator().manual_seed(0))
    assert all(judge.by_rule(logits, batch, 9, replace(less, sampled=counted)))
    assert sizes == [2]


def test_a_request_that_asks_for_what_the_faster_loops_decline_goes_by_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured rounds, whose programs are made before anybody has asked for anything."""
    params = [SamplingParams(temperature=0.8, top_k=3, seed=i, max_tokens=4, ignore_eos=True) for i in range(5)]
    less = forgetful(Served("less", gpu.SAMPLES.serves - {"top_k"}, frozenset({"top_k"})))
    expected = run(captured_engine(1, 5), params)
    monkeypatch.setattr(programs, "vocab_ops_of", lambda device: less)
    assert run(captured_engine(1, 5), params) == expected


@pytest.mark.parametrize("draft", [True, False])
def test_greedy_requests_heed_a_field_that_was_just_added(draft: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Someone adds a field that changes logits as ``maths.asks`` says: into the table, and into ``processed``."""

    @dataclass(frozen=True)
    class Params(SamplingParams):
        suppress: tuple[int, ...] = ()

    target = table(6).float()
    plain = engine_tokens(target, SamplingParams(temperature=0, max_tokens=6), draft=draft)
    banned = plain[0]
    assert engine_tokens(target, Params(temperature=0, max_tokens=6, suppress=(banned,)), draft=draft) == plain
    monkeypatch.setitem(ASKS, "suppress", lambda p: bool(getattr(p, "suppress", ())))
    process = distribution.processed

    def processed(logits: torch.Tensor, given: warp.Warp, **nodes: Any) -> torch.Tensor:
        found = process(logits, given, **nodes).clone()
        if "suppress" in given.asks:
            found[..., banned] = -torch.inf
        return found

    monkeypatch.setattr(distribution, "processed", processed)
    params = Params(temperature=0, max_tokens=6, suppress=(banned,))
    assert banned not in engine_tokens(target, params, draft=draft)
    view = View("a", [1, 2], params=params)
    for chosen in (None, torch.arange(6)):  # a draft that knows all tokens, and one that knows a few by their numbers
        sampler = draft_sampler.DraftSampler([view], 6, 6, torch.device("cpu"), chosen)
        assert int(sampler.draw(torch.eye(6)[[banned]], 0)) != banned


def engine_tokens(target: torch.Tensor, params: SamplingParams, *, draft: bool) -> tuple[int, ...]:
    engine = table_engine(target, table_draft(target) if draft else None)
    handle = engine.submit(Request("a", (1, 2), params))
    engine.drive(lambda: handle.done)
    return handle.completion().token_ids


def test_a_new_rule_is_passed_by_until_a_backend_lists_it() -> None:
    drawing = DRAWING & {"temperature"}
    assert sampling.SERVED.takes([drawing | {"block"}])
    assert not sampling.SERVED.takes([drawing | {"recursive"}])
    assert not device_rows.PROGRAMS["full"].takes([drawing | {"recursive"}])
