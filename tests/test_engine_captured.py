"""Rounds on the device, played here without capturing: the same program, the same books, the same tokens.

The graphs themselves are tested on a GPU (tests marked ``gpu``); what is captured is what runs here.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from engines import DeviceTable, device_draft, device_engine, table, table_engine
from engines import run as answers
from slab_tools import check_slab
from statistics_tools import chi_squared
from test_drafters_head import SETTINGS, head
from test_drafters_head import target as head_target

from headstart import LLM, SamplingParams
from headstart.config import EngineConfig
from headstart.control.controller import FixedController
from headstart.drafters.head import HeadDrafter
from headstart.drafters.lookup import LookupDrafter
from headstart.drafters.model import ModelDrafter
from headstart.engine import programs
from headstart.engine.captured import CapturedRounds, draft_lengths
from headstart.engine.engine import Engine
from headstart.engine.overlap import OverlappedRounds
from headstart.engine.programs import Shape
from headstart.machine.runner import EagerRunner
from headstart.maths.chance import CounterChance
from headstart.maths.distribution import SERVED, probabilities
from headstart.maths.noise import race
from headstart.maths.tree import Topology
from headstart.maths.verify import chain_rules
from headstart.maths.vocab_ops import VocabOps
from headstart.testing import TINY_VOCABULARY, tiny_model
from headstart.types import Completion, Request


def noisy(model: Any, share: float = 0.15) -> Any:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * share * parameter.std())
    return model


def engine(
    gamma: int,
    rows: int,
    *,
    draft: bool = True,
    overlap: bool = False,
    architecture: str = "llama",
    share: float = 0.15,
) -> Engine:
    target = EagerRunner(tiny_model(architecture), rows=rows, max_len=96, margin=40)
    drafter = None
    if draft:
        runner = EagerRunner(noisy(tiny_model(architecture), share), rows=rows, max_len=96, margin=40)
        drafter = ModelDrafter(runner, vocab_size=TINY_VOCABULARY, width=TINY_VOCABULARY)
    kind = OverlappedRounds if overlap else CapturedRounds
    rounds = kind(target, drafter, vocab_size=TINY_VOCABULARY, lengths=(0, gamma))
    rounds.warm_up()
    return Engine(
        target,
        drafter,
        FixedController(gamma),
        EngineConfig(max_rows=rows, max_waiting=4000),
        vocab_size=TINY_VOCABULARY,
        eos=(2,),
        captured=rounds,
        max_gamma=gamma,
    )


PROMPTS = [[5, 6, 7, 8, 5, 6], [9, 9, 4], [3, 4, 5, 6, 7, 8, 9, 10, 11], [40, 41], [50, 3, 50, 3, 50]]


def run(made: Engine, params: list[SamplingParams]) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in complete(made, params)]


def complete(made: Engine, params: list[SamplingParams]) -> list[Completion]:
    rounds = made.parts.captured
    assert rounds is not None
    before = rounds.captured_programs
    handles = [made.submit(Request(str(i), tuple(p), s)) for i, (p, s) in enumerate(zip(PROMPTS, params, strict=True))]
    while not made.idle:
        made.step()
        check_slab(made.parts.runner.slab)
    assert not rounds.in_flight
    assert rounds.captured_programs == before  # nothing is captured while serving
    return [handle.completion() for handle in handles]


def watch(made: Engine) -> list[Shape]:
    """The shapes of the rounds that were played on the device, as they come."""
    rounds, played = made.parts.captured, []
    assert rounds is not None
    verify = rounds._programs.verify

    def counted(shape: Shape) -> None:
        played.append(shape)
        verify(shape)

    for name, shape in rounds._captured:
        if name == "verify":
            rounds._captured[name, shape] = partial(counted, shape)
    return played


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM(tiny_model("llama"), None, max_model_len=96, check=False)


_ANSWERED: dict[tuple[LLM, str], list[Completion]] = {}  # of this process, by what was asked for


def answered(plain: LLM, params: list[SamplingParams]) -> list[Completion]:
    """What each of ``PROMPTS`` is answered when it is alone; worked out once for all tests."""
    key = (plain, repr(params))
    if key not in _ANSWERED:
        _ANSWERED[key] = [plain.generate(prompt, each) for prompt, each in zip(PROMPTS, params, strict=True)]
    return _ANSWERED[key]


@pytest.mark.parametrize("rows", [1, 4])  # five come: one at a time, and four with one that waits
@pytest.mark.parametrize("gamma", [1, 3, 8])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("overlap", [False, True])
def test_the_same_tokens_as_plain_decoding(
    plain: LLM, gamma: int, rows: int, temperature: float, overlap: bool
) -> None:
    """Greedy, and coupled sampling; sequences of different lengths come and go while rounds are in flight."""
    params = [
        SamplingParams(temperature=temperature, top_p=0.9, seed=i, max_tokens=9 + 5 * i, verification="coupled")
        for i in range(5)
    ]
    expected = [c.token_ids for c in answered(plain, params)]
    made = engine(gamma, rows, overlap=overlap)
    played = watch(made)
    assert run(made, params) == expected
    assert made.stats.accepted > 10
    assert len(played) > 8


def test_without_a_draft(plain: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=9 + 5 * i) for i in range(5)]
    expected = [c.token_ids for c in answered(plain, params)]
    assert run(engine(1, 3, draft=False), params) == expected


EVERYTHING = [
    SamplingParams(temperature=0, max_tokens=22, logprobs=3),
    SamplingParams(temperature=0, max_tokens=20, repetition_penalty=1.5, presence_penalty=0.3),
    SamplingParams(temperature=0.8, seed=1, max_tokens=24, frequency_penalty=0.9, verification="coupled", top_k=7),
    SamplingParams(temperature=0, max_tokens=16, speculate=False, logit_bias={7: 6.0, 9: -3.0}),
    SamplingParams(temperature=0.7, seed=3, max_tokens=26, min_tokens=20, verification="coupled", min_p=0.05),
]


@pytest.mark.parametrize("rows", [1, 4])  # five come: one at a time, and four with one that waits
@pytest.mark.parametrize("gamma", [1, 4])
def test_everything_a_request_can_ask_for(plain: LLM, gamma: int, rows: int) -> None:
    """Penalties, bias, min_tokens, log-probabilities and switched-off speculation, all in the same rounds."""
    expected = answered(plain, EVERYTHING)
    made = engine(gamma, rows)
    played = watch(made)
    found = complete(made, EVERYTHING)
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    for ours, theirs in zip(found[0].choices[0].logprobs or (), expected[0].choices[0].logprobs or (), strict=True):
        assert ours.token_id == theirs.token_id
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert ours.top.keys() == theirs.top.keys()
    assert sum(shape.kind == "full" for shape in played) > 10
    assert found[3].choices[0].origins.count("plain") == 16


def test_rows_that_are_idle_keep_what_they_hold(plain: LLM) -> None:
    """Five sequences in a bucket of eight, one of them still being read in: nobody's keys are touched."""
    params = [SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)] * 5
    made = engine(3, 8)
    made.config = replace(made.config, prefill_chunk=2)  # prompts come in slowly, while the others decode
    played = watch(made)
    expected = [c.token_ids for c in answered(plain, params)]
    assert run(made, params) == expected
    assert {shape.rows for shape in played} >= {1, 2, 4, 8}
    assert run(made, params) == expected  # from warm rows, which were idle passengers before


def test_rows_that_leave_cost_the_draft_model_no_forward(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft that is always right lacks two tokens behind every round: a captured draft reads both itself."""
    made, read = engine(3, 5, share=0.0), list[int]()
    drafter = made.parts.drafter
    assert isinstance(drafter, ModelDrafter)
    own = drafter.runner.read

    def counted(pieces: Any, **more: Any) -> Any:
        read.extend(row for row, _ in pieces)
        return own(pieces, **more)

    monkeypatch.setattr(drafter.runner, "read", counted)
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (7, 12, 18, 23, 40)]
    assert run(made, params) == [answer.token_ids for answer in answered(plain, params)]
    assert len(read) == len(PROMPTS), "each prompt once, and nothing when rows left and others moved"
    check_slab(drafter.runner.slab)


@pytest.mark.parametrize("architecture", ["gemma3", "gpt2", "llama4", "qwen2-mixed", "deepseek-v3"])
def test_any_model_that_the_slab_serves(architecture: str) -> None:
    """Windows, chunks and learned positions, told by lengths on the device."""
    params = [SamplingParams(temperature=0, max_tokens=9 + 5 * i, ignore_eos=True) for i in range(5)]
    plain = LLM(tiny_model(architecture), None, max_model_len=96, check=False)
    expected = [c.token_ids for c in answered(plain, params)]
    assert run(engine(3, 4, architecture=architecture), params) == expected


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("verification", ["coupled", "block"])
def test_overlap_gives_the_same_tokens(temperature: float, verification: str) -> None:
    params = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=40, ignore_eos=True, verification=verification)  # type: ignore[arg-type]
        for i in range(5)
    ]
    made = engine(3, 1, overlap=True, share=0.02)
    assert run(made, params) == run(engine(3, 1, share=0.02), params)
    assert 10 < made.parts.captured.hits < made.stats.rounds - 10  # type: ignore[union-attr]


def test_overlap_ends_where_drafts_are_rejected() -> None:
    params = [SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)] * 5
    made = engine(3, 1, overlap=True, share=0.6)
    rounds = made.parts.captured
    assert isinstance(rounds, OverlappedRounds)
    went_on: list[bool] = []
    start = rounds._start
    rounds._start = lambda *a, **k: (went_on.append(True), start(*a, **k))[1]  # type: ignore[assignment, method-assign]
    assert run(made, params) == run(engine(3, 1, share=0.6), params)
    assert 3 < len(went_on) < made.stats.rounds / 2


def test_drafts_from_the_host(plain: LLM) -> None:
    """Lookup's guesses are sent to the device and judged there."""
    target = EagerRunner(tiny_model("llama"), rows=3, max_len=96, margin=40)
    rounds = CapturedRounds(target, None, vocab_size=TINY_VOCABULARY, lengths=(0, 2, 5))
    made = Engine(
        target,
        LookupDrafter(),
        FixedController(4),
        EngineConfig(max_rows=3),
        vocab_size=TINY_VOCABULARY,
        eos=(2,),
        captured=rounds,
        max_gamma=4,
    )
    rounds.warm_up()
    played = watch(made)
    params = [SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)] * 4 + EVERYTHING[-1:]
    expected = [c.token_ids for c in answered(plain, params)]
    assert run(made, params) == expected
    assert made.stats.accepted > 5, "a guess is taken up a round late"
    assert {shape.gamma for shape in played} == {0, 2, 5}


@pytest.mark.parametrize(
    "params", [SETTINGS["greedy"], SETTINGS["coupled"], SamplingParams(seed=4, max_tokens=20, verification="block")]
)
def test_a_heads_guesses_are_judged_on_the_device_too(params: SamplingParams) -> None:
    """The features that the head reads are written by the captured forward."""
    found = []
    for captured in (False, True):
        runner = EagerRunner(head_target(), rows=3, max_len=96, margin=40)
        drafter = HeadDrafter(head(), runner, vocab_size=TINY_VOCABULARY, min_chance_to_extend=0.0)
        rounds = CapturedRounds(runner, None, vocab_size=TINY_VOCABULARY, lengths=(0, 1, 2, 4)) if captured else None
        config = EngineConfig(max_rows=3)
        made = Engine(
            runner, drafter, FixedController(3), config, vocab_size=TINY_VOCABULARY, captured=rounds, max_gamma=4
        )
        handles = [made.submit(Request(str(i), tuple(p), params)) for i, p in enumerate(PROMPTS)]
        while not made.idle:
            made.step()
        assert made.stats.accepted > 5
        assert rounds is None or rounds.captured_programs > 0
        found.append(([h.completion().token_ids for h in handles], made.stats.accepted))
    assert found[0] == found[1]


def test_aborting_while_a_round_is_in_flight(plain: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=30)
    made = engine(3, 2)
    first, second = (made.submit(Request(str(i), tuple(PROMPTS[i]), params)) for i in range(2))
    for _ in range(4):
        made.step()
    made.abort("0")
    assert first.done
    while not made.idle:
        made.step()
    assert second.completion().token_ids == plain.generate(PROMPTS[1], params).token_ids


@pytest.mark.parametrize("rule", ["token", "block"])
def test_sampling_follows_the_target(rule: str) -> None:
    generator = torch.Generator().manual_seed(1)
    table = torch.randn(4, 4, 4, generator=generator) * 1.5
    other = table + torch.randn(4, 4, 4, generator=generator) * 1.2
    target = DeviceTable(table, rows=8, max_len=32, margin=40)
    drafter = ModelDrafter(DeviceTable(other, rows=8, max_len=32, margin=40), vocab_size=4, width=4)
    made = Engine(
        target,
        drafter,
        FixedController(3),
        EngineConfig(max_rows=8, max_waiting=4000),
        vocab_size=4,
        captured=CapturedRounds(target, drafter, vocab_size=4, lengths=(0, 3)),
        max_gamma=3,
    )
    handles = [
        made.submit(Request(str(i), (1, 3, 2), SamplingParams(max_tokens=5, seed=i, verification=rule)))  # type: ignore[arg-type]
        for i in range(400)
    ]
    while not made.idle:
        made.step()
    counts = Counter(h.completion().token_ids[1:4] for h in handles)
    whole = target.probabilities((1, 3, 2), 4)
    law: dict[tuple[int, ...], float] = {}
    for outcome, chance in whole.items():
        law[outcome[1:]] = law.get(outcome[1:], 0.0) + chance
    assert chi_squared(counts, law) > 1e-4
    assert 0.2 < made.stats.acceptance_rate < 0.95


@pytest.mark.parametrize("rows", [1, 4])
def test_a_machine_may_reject_and_draw_in_its_own_way(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a machine's own loops are told of the rows is enough to say what the rules say."""
    asked = Counter[str]()

    def rejected(p: Any, q: Any, tokens: Any, limits: Any, block: Any, seeds: Any, base: Any) -> Any:
        asked["rejected"] += 1
        chain = Topology.chain([p.shape[1] - 1] * len(p), p.device)
        topology = replace(chain, valid=chain.depth <= limits[:, None])
        chance = CounterChance(seeds, base, p.shape[1])
        found = chain_rules(p, q, tokens, topology, ["iid"] * len(p), chance, block > 0)
        return found.accepted, found.token, found.ok

    def drawn(x: Any, warp: Any, words: Any, into: Any = None) -> Any:
        asked["drawn"] += 1
        q = probabilities(x[:, None], warp, outputs=torch.zeros(len(x), dtype=torch.int64))[:, 0]
        return q if into is None else into.copy_(q), race(q, words)

    params = [
        SamplingParams(
            temperature=0.8, top_p=0.9, seed=i, max_tokens=20 + i, verification="block" if i % 2 else "token"
        )
        for i in range(5)
    ]
    plain = run(engine(4, rows), params)
    own = VocabOps(rejected=rejected, drawn=drawn, samples=SERVED)
    monkeypatch.setattr(programs, "vocab_ops_of", lambda device: own)
    assert run(engine(4, rows), params) == plain
    assert asked["rejected"] > 10
    assert asked["drawn"] > 10


def test_which_draft_lengths_are_captured() -> None:
    assert draft_lengths(8, fixed=True) == (0, 8)
    assert draft_lengths(5, fixed=False) == (0, 1, 2, 3, 4, 5)
    assert draft_lengths(10, fixed=False, few=True) == (0, 1, 3, 6, 10)


def test_without_a_gpu_nothing_is_captured() -> None:
    llm = LLM(tiny_model("llama"), noisy(tiny_model("llama")), max_model_len=96, check=False)
    assert llm.engine.parts.captured is None


@pytest.mark.parametrize("again", [{}, {"max_tokens": 9}, {"temperature": 0.9, "verification": "coupled"}])
@pytest.mark.parametrize("drafted", [False, True])
def test_an_id_that_comes_again_has_its_own_text(drafted: bool, again: dict[str, Any]) -> None:
    """Also where the device holds as many tokens of the request that had the id before."""
    for seed in range(8):
        target = table(6, seed=seed)
        draft = device_draft(target + 0.4 * table(6, seed=99), rows=1) if drafted else None
        engine = device_engine(target, draft, rows=1)
        params = SamplingParams(**{"temperature": 0, "max_tokens": 4, "seed": 3} | again)
        first, second = (Request("same", tuple((seed + i * i) % 6 for i in range(count)), params) for count in (5, 8))
        answers(engine, [first])
        (mine,), (plain,) = (answers(e, [second]) for e in (engine, table_engine(target, None, rows=1)))
        assert mine.token_ids == plain.token_ids
