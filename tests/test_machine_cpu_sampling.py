"""Sampling on the CPU's kernels against the plain functions it stands for: maths.distribution, noise and verify."""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

import pytest
import torch
from engines import run, table, table_draft, table_engine
from statistics_tools import chi_squared
from torch import Tensor

from headstart.drafters.base import Drafter
from headstart.drafters.model import ModelDrafter
from headstart.engine.engine import Engine
from headstart.engine.judge import VerdictInputs, decide
from headstart.machine.cpu import build
from headstart.machine.cpu.sampling import vocab_ops_for
from headstart.maths import noise
from headstart.maths.distribution import History, probabilities, processed
from headstart.maths.tree import Topology
from headstart.maths.verify import Verdicts
from headstart.maths.vocab_ops import DraftedChain, Rule, VocabOps
from headstart.maths.warp import Warp
from headstart.testing import ScriptedDrafter
from headstart.types import DraftView, Proposal, Request, SamplingParams

pytestmark = pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not()))

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0},
    "warm": {"temperature": 1.6},
    "cold": {"temperature": 0.001, "top_p": 0.9},
    "frozen": {"temperature": 1e-30},
    "top_p": {"temperature": 0.8, "top_p": 0.95},
    "wide": {"temperature": 2.0, "top_p": 0.99999},
    "narrow": {"temperature": 1.0, "top_p": 0.0001},
    "top_k": {"temperature": 0.7, "top_k": 50},
    "top_1": {"temperature": 1.3, "top_k": 1},
    "min_p": {"temperature": 0.7, "min_p": 0.1},
    "all": {"temperature": 1.3, "top_k": 40, "top_p": 0.8, "min_p": 0.01},
    "more than there are": {"temperature": 1.0, "top_k": 100_000, "min_p": 0.9, "top_p": 0.5},
}


@pytest.fixture(params=["native", "avx2", "plain"])
def vocab_ops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> VocabOps:
    """The loops as each kind of processor runs them, with two threads."""
    if request.param != "plain" and "avx2" not in build._processor():
        pytest.skip("this processor has no AVX2")
    monkeypatch.setenv("HEADSTART_CPU_ISA", request.param)
    return vocab_ops_for(2)


def warp_of(settings: list[dict[str, Any]], size: int) -> Warp:
    params = [SamplingParams(**each) for each in settings]
    return Warp.of(params, vocab_size=size, eos=[()] * len(params), device="cpu")


def logits(*shape: int, ties: bool = False) -> Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(shape[-1])) * 3
    return (x * 2).round() / 2 if ties else x


def outputs(rows: int) -> Tensor:
    return torch.zeros(rows, dtype=torch.int64)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("size", [7, 211, 5003, 49152])
@pytest.mark.parametrize("name", SETTINGS)
def test_the_same_tokens_stay_with_the_same_probabilities(
    vocab_ops: VocabOps, name: str, size: int, ties: bool
) -> None:
    warp = warp_of([SETTINGS[name], {"temperature": 1.0, "top_p": 0.5}], size)
    x = logits(2, 3, size, ties=ties)
    want = probabilities(x, warp, outputs=outputs(2))
    got = probabilities(x, warp, outputs=outputs(2), vocab_ops=vocab_ops)
    differ = (got > 0) != (want > 0)
    # Sums are rounded, so the token at the very edge may fall on either side; equal ones stay or go together.
    assert (
        float((got + want)[differ & (want > 1e-37)].sum()) < 1e-5 if not ties else not (differ & (want > 1e-37)).any()
    )
    torch.testing.assert_close(torch.where(differ, 0.0, got), torch.where(differ, 0.0, want), rtol=2e-5, atol=1e-37)
    torch.testing.assert_close(got.sum(-1), torch.ones(2, 3), rtol=1e-5, atol=0)


def test_kept_sets_are_equal_over_many_rows(vocab_ops: VocabOps) -> None:
    x = logits(1, 300, 4096) * torch.linspace(0.2, 2.0, 300)[:, None]
    for name in ("top_p", "top_k", "min_p", "all"):
        warp = warp_of([SETTINGS[name]], 4096)
        want, got = (probabilities(x, warp, outputs=outputs(1), **more) for more in ({}, {"vocab_ops": vocab_ops}))
        assert int(((want > 0) != (got > 0)).sum()) == 0, name


def test_a_row_does_not_depend_on_its_company(vocab_ops: VocabOps) -> None:
    settings = [SETTINGS[name] for name in ("plain", "top_p", "all", "warm")]
    x = logits(4, 3, 5003)
    together = probabilities(x, warp_of(settings, 5003), outputs=outputs(4), vocab_ops=vocab_ops)
    for row, each in enumerate(settings):
        for node in range(3):
            alone = x[row : row + 1, node : node + 1]
            found = probabilities(alone, warp_of([each], 5003), outputs=outputs(1), vocab_ops=vocab_ops)
            assert torch.equal(found[0, 0], together[row, node])


def test_broken_rows_are_nan_and_others_are_not(vocab_ops: VocabOps) -> None:
    x = logits(5, 1, 5003)
    x[0, 0, 7] = torch.nan
    x[1] = -torch.inf
    x[2, 0, 9] = torch.inf
    x[3, 0, 10:] = -torch.inf
    for name in ("plain", "top_p", "all"):
        p = probabilities(x, warp_of([SETTINGS[name]] * 5, 5003), outputs=outputs(5), vocab_ops=vocab_ops)
        assert bool(p[:3].isnan().all())
        assert bool(p[3:].isfinite().all())
        assert float(p[3, 0, 10:].sum()) == 0


@pytest.mark.parametrize("size", [7, 211, 49152])
def test_races_and_keys_are_the_plain_ones(vocab_ops: VocabOps, size: int) -> None:
    nodes = 50 if size < 1000 else 5
    base = torch.arange(8 * nodes).view(8, nodes)
    seeds = noise.seeds([0, 1, -1, 2**63, 2**64 - 5, 12345, -(2**63), 77], "cpu")
    streams = torch.tensor([1, 2, 3, 4, 1, 2, 3, 4])
    for arguments in (
        (seeds, base, 0, noise.COUPLED),
        (seeds, base[:, 0], base, streams),
        (seeds, base[:, 0], 3, noise.DRAFT),
        (seeds, base, base % 7, noise.ACCEPT),
    ):
        for found, wanted in zip(vocab_ops.keys(*arguments), noise.keys(*arguments), strict=True):
            assert torch.equal(found, wanted)
    words = noise.keys(seeds, base, 0, noise.COUPLED)
    p = torch.softmax(logits(8, nodes, size), -1)
    p[:4] *= p[:4] > 1 / size  # few with mass, as behind top-p
    assert torch.equal(vocab_ops.race(p, words), noise.race(p, words))
    q, tokens = vocab_ops.drawn(
        p.log().flatten(0, 1), warp_of([SETTINGS["plain"]] * 8 * nodes, size), tuple(w.view(-1) for w in words)
    )
    assert torch.equal(tokens, noise.race(q.view_as(p), words).view(-1))
    p[0, 0] = 0
    p[1, 1, 3] = torch.nan
    p[1, 1, 5] = torch.nan
    found = vocab_ops.race(p, words)
    assert found[0, 0] == 0
    assert found[1, 1] == 3
    assert torch.equal(vocab_ops.race(p.double(), words), noise.race(p.double(), words))


# -- the verdict on a chain, against ``decide``


def case(number: int, rule: Rule, draw: Literal["iid", "point"], size: int) -> dict[str, Any]:
    """A target, and a draft near it that was drawn with its own noise."""
    g = torch.Generator().manual_seed(number)
    n = number % 5
    names = sorted(SETTINGS)
    params = SamplingParams(verification=rule, **SETTINGS[names[number % len(names)]]) if rule != "greedy" else None
    params = params or SamplingParams(temperature=0)
    x = torch.randn(n + 1, size, generator=g) * 2
    near = x[:n] + torch.randn(n, size, generator=g) * float(torch.rand(1, generator=g))
    warp = Warp.of([params], vocab_size=size, eos=[()], device="cpu")
    q = probabilities(near[None], warp, outputs=outputs(1))[0] if n else None
    tokens: list[int] = []
    if q is not None:
        words = noise.keys(noise.seeds([number * 7], "cpu"), torch.tensor([40]), torch.arange(1, n + 1)[None], 3)
        tokens = noise.race(q[None], words)[0].tolist()
        if draw == "point":
            tokens = (q.argmax(-1) if number % 2 else x[:n].argmax(-1)).tolist()
    if number % 11 == 0 and n > 1:  # numbers that broke down, in the target, in the draft; and no such token
        kind = number // 11 % 4
        if kind == 0:
            x[n // 2] = torch.nan
        elif kind == 1 and q is not None:
            q[n // 2] = torch.nan
        elif kind == 2:
            tokens[n // 2] = -1
        else:
            x[0] = -torch.inf
    return {"params": params, "x": x, "warp": warp, "q": q if draw == "iid" else None, "tokens": tokens, "seed": number}


def ruled(c: dict[str, Any], rule: Rule, warp: Warp) -> Verdicts:
    """What the rule says of a case."""
    given = VerdictInputs(
        warp,
        torch.tensor([[0, *c["tokens"]]]),
        Topology.chain([len(c["tokens"])], torch.device("cpu")),
        outputs=outputs(1),
        history=None,
        seeds=noise.seeds([c["seed"]], "cpu"),
        base=torch.tensor([40]),
        q=c["q"][None] if c["q"] is not None and rule in ("token", "block") else None,
        kinds=["point" if c["q"] is None else "iid"],
    )
    plain: Rule = "greedy" if rule == "greedy" else "coupled"
    return decide(rule if c["tokens"] else plain, c["x"][None], given)


@pytest.mark.parametrize("draw", ["iid", "point"])
@pytest.mark.parametrize("rule", ["token", "block", "coupled", "greedy"])
def test_verdicts_are_those_of_the_rules(vocab_ops: VocabOps, rule: Rule, draw: Literal["iid", "point"]) -> None:
    lengths: set[int] = set()
    for number in range(300):
        c = case(number, rule, draw, size=83)
        n = len(c["tokens"])
        want = ruled(c, rule, c["warp"])
        assert vocab_ops.judged is not None
        wide = torch.nn.functional.pad(c["x"], (0, 5), value=9.0)[:, :83]  # rows further apart than they are long
        chain = DraftedChain(c["params"], rule, c["seed"], [0] * 40, 3, c["tokens"], c["q"] if n else None)
        got = vocab_ops.judged(wide, chain)
        if not bool(want.ok[0]):
            assert got[1] == -1, number
            continue
        assert got == (int(want.accepted[0]), int(want.token[0])), (number, c["params"])
        lengths.add(got[0])
    assert lengths == {0, 1, 2, 3, 4}


# -- the engine as a whole, on a model with known probabilities (see test_engine_lossless)

V, LENGTH, SAMPLES = 4, 3, 500
TARGET, DRAFT = table(V, seed=1), table(V, seed=1) + 0.8 * table(V, seed=2)
PROMPT = (1, 3, 2)


def drawn(drafter: Drafter | None, rule: str, rows: int = 16, **params: Any) -> tuple[Engine, Counter[tuple[int, ...]]]:
    """What the engine emits when its rounds are judged by the kernels."""
    engine = table_engine(TARGET, drafter, gamma=3, rows=rows, max_waiting=SAMPLES)
    engine.parts.runner.vocab_ops = vocab_ops_for(1)  # type: ignore[misc]
    if isinstance(drafter, ModelDrafter):
        drafter.runner.vocab_ops = vocab_ops_for(1)  # type: ignore[misc]
    requests = [
        Request(str(seed), PROMPT, SamplingParams(max_tokens=LENGTH + 1, seed=seed, verification=rule, **params))  # type: ignore[arg-type]
        for seed in range(SAMPLES)
    ]
    return engine, Counter(c.token_ids[:LENGTH] for c in run(engine, requests))


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
@pytest.mark.parametrize("kind", ["plain", "model", "ending itself"])
def test_the_engine_follows_the_target(kind: str, rule: str) -> None:
    rows = 1 if kind == "ending itself" else 16
    hope = (lambda: 0.6) if kind == "ending itself" else None
    engine, counts = drawn(
        None if kind == "plain" else table_draft(DRAFT, rows=rows, min_chance_to_extend=hope), rule, rows
    )
    assert chi_squared(counts, engine.parts.runner.probabilities(PROMPT, LENGTH)) > 1e-4  # type: ignore[attr-defined]
    assert kind == "plain" or 0.2 < engine.stats.acceptance_rate < 0.98


def test_penalties_and_bias_are_the_plain_ones() -> None:
    """Same seeds, same settings: the same tokens as without the kernels."""
    params: Any = {"temperature": 0.8, "repetition_penalty": 1.4, "presence_penalty": 0.5, "logit_bias": {0: 0.7}}
    params["verification"] = "block"
    found = []
    for loops in (None, vocab_ops_for(1)):
        engine = table_engine(TARGET, table_draft(DRAFT, rows=16), gamma=3, rows=16, max_waiting=SAMPLES)
        if loops is not None:
            engine.parts.runner.vocab_ops = loops  # type: ignore[misc]
        settings = [SamplingParams(max_tokens=12, min_tokens=4, seed=seed, **params) for seed in range(40)]
        requests = [Request(str(seed), PROMPT, each) for seed, each in enumerate(settings)]
        found.append([c.token_ids for c in run(engine, requests)])
    assert found[0] == found[1]


def test_a_draft_that_lies_about_q_is_caught() -> None:
    """The same chi-squared must fail where it should: tokens by argmax, q spread out."""

    def guess(view: DraftView, budget: int) -> Proposal | None:
        tokens, rows = list(view.tokens), []
        for _ in range(budget):
            rows.append(DRAFT[tokens[-2], tokens[-1]].softmax(-1))
            tokens.append(int(rows[-1].argmax()))
        return Proposal.chain(tokens[len(view.tokens) :], torch.stack(rows)) if rows else None

    for rule in ("token", "block"):
        engine, counts = drawn(ScriptedDrafter(guess), rule)
        law = engine.parts.runner.probabilities(PROMPT, LENGTH)  # type: ignore[attr-defined]
        assert chi_squared(counts, law) < 1e-6


def test_bias_and_penalties_at_the_edges_of_the_vocabulary() -> None:
    """Only tokens that something is known of are touched: against all of them, ids past the tokenizer's included."""
    size, vocab = 40, 33
    x = logits(4, size)
    params = SamplingParams(
        repetition_penalty=1.3,
        frequency_penalty=0.4,
        presence_penalty=-0.2,
        logit_bias={0: 2.0, 32: -5.0, 35: 9.0},
        min_tokens=6,
    )
    endings, drafted = [3, 36, 7, 38], [5, 11, 32]
    warp = Warp.of([params], vocab_size=vocab, eos=[endings], device="cpu")
    want = processed(
        x[None],
        warp,
        outputs=torch.tensor([3]),
        tokens=torch.tensor([[5, *drafted]]),
        topology=Topology.chain([3], torch.device("cpu")),
        history=History.of([[1, 2, 2, 30]], [[2, 5, 5]], size, "cpu"),
    )
    before = x.clone()
    process = vocab_ops_for(1).processed
    assert process is not None
    for _ in range(2):  # what it knows of one text is forgotten before the next
        text = [1, 2, 2, 30, 2, 5, 5]
        got = process(x[:, :vocab], DraftedChain(params, "block", 0, text, 4, drafted, endings=frozenset(endings)))
    torch.testing.assert_close(got, want[0, :, :vocab])
    assert torch.equal(x, before), "the caller's logits stay as they are"
    assert bool((got[:3, [3, 7]] == -torch.inf).all())
    assert bool(got[3].isfinite().all())
