"""Distributions against transformers, and against the slow and obvious way, for ragged batches of trees."""

from __future__ import annotations

import random

import pytest
import torch
from slow_distribution import probabilities_slowly, processed_slowly
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from headstart.maths.distribution import History, Warp, argmaxes, probabilities, processed
from headstart.maths.tree import Topology
from headstart.types import SamplingParams

NONE = torch.zeros(1, dtype=torch.int64)


def warp_of(*params: SamplingParams, vocab: int, eos: list[list[int]] | None = None, dtype=torch.float32) -> Warp:
    return Warp.of(params, vocab_size=vocab, eos=eos or [[] for _ in params], device="cpu", dtype=dtype)


def one(logits: Tensor, params: SamplingParams, history: History | None = None) -> Tensor:
    """The distribution of one position: logits [V] -> [V]."""
    warp = warp_of(params, vocab=len(logits), dtype=torch.float64 if logits.dtype == torch.float64 else torch.float32)
    return probabilities(logits[None, None], warp, outputs=NONE, history=history)[0, 0]


def random_logits(*shape: int, seed: int = 0, scale: float = 3.0, dtype: torch.dtype = torch.float32) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# ---- against transformers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [40, 5000])
@pytest.mark.parametrize(
    ("params", "theirs"),
    [
        (SamplingParams(temperature=0.7), [TemperatureLogitsWarper(0.7)]),
        (SamplingParams(top_k=7), [TopKLogitsWarper(7)]),
        (SamplingParams(top_k=600), [TopKLogitsWarper(600)]),
        (SamplingParams(top_k=1), [TopKLogitsWarper(1)]),
        (SamplingParams(top_p=0.8), [TopPLogitsWarper(0.8)]),
        (SamplingParams(top_p=0.999), [TopPLogitsWarper(0.999)]),
        (SamplingParams(top_p=0.01), [TopPLogitsWarper(0.01)]),
        (SamplingParams(min_p=0.1), [MinPLogitsWarper(0.1)]),
        (SamplingParams(temperature=1.4, min_p=0.02), [TemperatureLogitsWarper(1.4), MinPLogitsWarper(0.02)]),
        (
            SamplingParams(temperature=0.9, top_k=30, top_p=0.7),
            [TemperatureLogitsWarper(0.9), TopKLogitsWarper(30), TopPLogitsWarper(0.7)],
        ),
    ],
)
def test_warpers_agree_with_transformers(params: SamplingParams, theirs: list, size: int) -> None:
    for seed in range(3):
        scores = random_logits(1, size, seed=seed, dtype=torch.float64)
        expected = scores
        for warper in theirs:
            expected = warper(None, expected)
        found = one(scores[0], params)
        torch.testing.assert_close(found, torch.softmax(expected[0], -1), rtol=1e-9, atol=1e-15)


def test_repetition_penalty_agrees_with_transformers() -> None:
    prompt, output, size = [3, 3, 9, 14], [7, 9, 1], 30
    scores = random_logits(1, size, dtype=torch.float64)
    theirs = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([prompt + output]), scores.clone())
    history = History.of([prompt], [output], size, "cpu")
    found = one(scores[0], SamplingParams(repetition_penalty=1.3), history)
    torch.testing.assert_close(found, torch.softmax(theirs[0], -1), rtol=1e-12, atol=0)


# ---- against the slow way ------------------------------------------------------------------------------------------

SIZE, VOCAB = 12, 10


def random_params(rng: random.Random) -> SamplingParams:
    def maybe(value: float, otherwise: float) -> float:
        return value if rng.random() < 0.5 else otherwise

    return SamplingParams(
        temperature=rng.choice([0.0, 0.3, 1.0, 1.7]),
        top_k=int(maybe(rng.randint(1, SIZE + 3), 0)),
        top_p=maybe(rng.uniform(0.05, 1.0), 1.0),
        min_p=maybe(rng.uniform(0.0, 0.5), 0.0),
        repetition_penalty=maybe(rng.uniform(0.5, 2.0), 1.0),
        frequency_penalty=maybe(rng.uniform(-2, 2), 0.0),
        presence_penalty=maybe(rng.uniform(-2, 2), 0.0),
        logit_bias={rng.randrange(VOCAB): rng.uniform(-5, 5) for _ in range(rng.randint(0, 3))} or None,
        min_tokens=rng.choice([0, 0, 3, 5]),
        max_tokens=10,
    )


def random_batch(seed: int, ties: bool):
    """Rows with their own parameters, histories and trees; padding nodes hold rubbish."""
    rng = random.Random(seed)
    rows = rng.randint(1, 5)
    params = [random_params(rng) for _ in range(rows)]
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 4))] for _ in range(rows)]
    outputs = [[rng.randrange(VOCAB) for _ in range(rng.randint(0, 4))] for _ in range(rows)]
    eos = [rng.sample(range(VOCAB), rng.randint(0, 3)) for _ in range(rows)]
    parents = [tuple(rng.randint(-1, i - 1) for i in range(rng.randint(0, 6))) for _ in range(rows)]
    width = max(map(len, parents)) + 1
    root = [(prompt + output)[-1] for prompt, output in zip(prompts, outputs, strict=True)]
    tokens = torch.tensor([[first, *(rng.randrange(VOCAB) for _ in range(width - 1))] for first in root])
    logits = random_logits(rows, width, SIZE, seed=seed, dtype=torch.float64)
    if ties:
        logits = logits.round()
    return params, prompts, outputs, eos, parents, tokens, logits


@pytest.mark.parametrize("ties", [False, True], ids=["", "ties"])
@pytest.mark.parametrize("seed", range(40))
def test_ragged_batches_of_trees_against_the_slow_way(seed: int, ties: bool) -> None:
    params, prompts, outputs, eos, parents, tokens, logits = random_batch(seed, ties)
    topology = Topology.of(parents, "cpu")
    warp = warp_of(*params, vocab=VOCAB, eos=eos, dtype=torch.float64)
    given = {
        "outputs": torch.tensor([len(output) for output in outputs]),
        "tokens": tokens,
        "topology": topology,
        "history": History.of(prompts, outputs, SIZE, "cpu"),
    }
    before = logits.clone()
    raw, p, best = (work(logits, warp, **given) for work in (processed, probabilities, argmaxes))
    assert torch.equal(logits, before)  # the caller's logits are untouched
    for row, own in enumerate(parents):
        for node in range(len(own) + 1):
            drafted, at = [], node
            while at:
                drafted, at = [int(tokens[row, at]), *drafted], own[at - 1] + 1
            known = (prompts[row], [*outputs[row], *drafted], VOCAB, eos[row])
            slow = processed_slowly(logits[row, node].tolist(), params[row], *known)
            torch.testing.assert_close(raw[row, node], torch.tensor(slow, dtype=torch.float64), rtol=1e-12, atol=1e-12)
            slow_p = probabilities_slowly(logits[row, node].tolist(), params[row], *known)
            torch.testing.assert_close(p[row, node], torch.tensor(slow_p, dtype=torch.float64), rtol=1e-9, atol=1e-12)
            assert float(p[row, node, VOCAB:].sum()) == 0
            if params[row].greedy:
                assert int(best[row, node]) == int(p[row, node].argmax()) == slow.index(max(slow))


def test_a_draft_loop_sees_what_the_target_sees() -> None:
    """One step at a time, with a history that grows, is the same as a chain of nodes."""
    params = SamplingParams(
        temperature=0.8, repetition_penalty=1.4, frequency_penalty=0.5, presence_penalty=0.2, min_tokens=3, top_k=5
    )
    tokens, eos = torch.tensor([[4, 1, 1, 2], [0, 2, 2, 2]]), [[1, 2], [5]]
    prompts, outputs = [[3, 4], [0]], [[4], []]
    logits = random_logits(2, 4, SIZE)
    warp = warp_of(params, params, vocab=VOCAB, eos=eos)
    count = torch.tensor([1, 0])
    together = probabilities(
        logits,
        warp,
        outputs=count,
        tokens=tokens,
        topology=Topology.chain([3, 3], "cpu"),
        history=History.of(prompts, outputs, SIZE, "cpu"),
    )
    history = History.of(prompts, outputs, SIZE, "cpu")
    for step in range(4):
        if step:
            history.add(tokens[:, step])
        alone = probabilities(logits[:, step : step + 1], warp, outputs=count + step, history=history)
        torch.testing.assert_close(alone[:, 0], together[:, step], rtol=1e-6, atol=0)


def test_a_chain_of_nodes_without_topology_counts_its_depth() -> None:
    warp = warp_of(SamplingParams(min_tokens=2), vocab=SIZE, eos=[[0]])
    p = probabilities(torch.zeros(1, 4, SIZE), warp, outputs=NONE)
    assert (p[0, :, 0] > 0).tolist() == [False, False, True, True]
    penal, history = warp_of(SamplingParams(presence_penalty=1), vocab=SIZE), History.of([[1]], [[]], SIZE, "cpu")
    with pytest.raises(ValueError, match="tokens and their topology"):
        probabilities(torch.zeros(1, 4, SIZE), penal, outputs=NONE, history=history)


# ---- corners -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [300, 49152])
@pytest.mark.parametrize("scale", [0.0, 0.3, 2.0, 8.0, 60.0])
def test_the_nucleus_is_right_however_large_it_is(size: int, scale: float) -> None:
    """512 candidates are tried first; a flat distribution needs more, up to all of them."""
    logits = random_logits(3, 1, size, seed=4, scale=scale)
    params = [SamplingParams(top_p=0.9), SamplingParams(top_p=0.5, top_k=700), SamplingParams(top_p=0.99, min_p=1e-4)]
    p = probabilities(logits, warp_of(*params, vocab=size), outputs=NONE.expand(3))
    for row, own in enumerate(params):
        full = torch.softmax(logits[row, 0].double(), -1)
        kept = p[row, 0] > 0
        assert abs(float(p[row, 0].double().sum()) - 1) < 1e-5
        torch.testing.assert_close(p[row, 0][kept].double(), full[kept] / full[kept].sum(), rtol=1e-4, atol=0)
        base = full * (full >= own.min_p * full.max())
        if own.top_k and size > own.top_k:
            base = base * (base >= base.sort(descending=True).values[own.top_k - 1])
        base = base / base.sum()
        assert float(base[kept].sum()) >= own.top_p - 1e-5
        smallest = base[kept].min()
        assert float(base[kept].sum() - smallest * (base == smallest).sum()) < own.top_p + 1e-5
        assert not kept.all() or scale == 0


def test_ties_stay_or_go_together() -> None:
    logits = torch.tensor([2.0, 1.0, 1.0, 1.0, 0.0])
    assert (one(logits, SamplingParams(top_k=2)) > 0).tolist() == [True, True, True, True, False]
    assert (one(logits, SamplingParams(top_p=0.5)) > 0).tolist() == [True, True, True, True, False]


def test_greedy_takes_the_first_of_equals_and_all_the_mass() -> None:
    logits = torch.zeros(1, 1, 5000)
    logits[0, 0, [700, 4000]] = 3.0
    warp = warp_of(SamplingParams(temperature=0), vocab=5000)
    p = probabilities(logits, warp, outputs=NONE)
    assert p[0, 0].nonzero().flatten().tolist() == [700]
    assert float(p.sum()) == 1
    assert argmaxes(logits, warp, outputs=NONE).tolist() == [[700]]
    mixed = warp_of(SamplingParams(temperature=0), SamplingParams(), vocab=5000)
    p = probabilities(logits.expand(2, 1, -1), mixed, outputs=NONE.expand(2))
    assert p[0, 0].nonzero().flatten().tolist() == [700]
    torch.testing.assert_close(p[1, 0], torch.softmax(logits[0, 0], -1))


@pytest.mark.parametrize("temperature", [1e-2, 1e-4, 1e-12, 1e-30])
def test_temperatures_close_to_zero_do_not_overflow(temperature: float) -> None:
    logits = torch.tensor([900.0, 899.0, -900.0, 0.0])
    p = one(logits, SamplingParams(temperature=temperature))
    torch.testing.assert_close(p, torch.tensor([1.0, 0.0, 0.0, 0.0]))


ALL = SamplingParams(
    temperature=0.7, top_k=4, top_p=0.9, min_p=0.01, repetition_penalty=1.2, presence_penalty=0.1, logit_bias={1: 1.0}
)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0),
        SamplingParams(temperature=1e-4),
        SamplingParams(top_k=3),
        SamplingParams(top_p=0.5),
        SamplingParams(min_p=0.2),
        SamplingParams(repetition_penalty=1.5),
        ALL,
    ],
)
@pytest.mark.parametrize("bad", ["one nan", "all nan", "all -inf", "one inf"])
@pytest.mark.parametrize("size", [12, 3000])
def test_broken_logits_stay_visible_and_stay_in_their_row(params: SamplingParams, bad: str, size: int) -> None:
    logits = random_logits(3, 2, size)
    logits[1, 1] = {"all nan": torch.nan, "all -inf": -torch.inf}.get(bad, logits[1, 1])
    if bad.startswith("one"):
        logits[1, 1, size // 2] = torch.nan if "nan" in bad else torch.inf
    given = {
        "outputs": NONE.expand(3),
        "tokens": torch.ones(3, 2, dtype=torch.int64),
        "topology": Topology.chain([1, 1, 1], "cpu"),
        "history": History.of([[1]] * 3, [[2]] * 3, size, "cpu"),
    }
    for own in ([params] * 3, [params, params, SamplingParams(temperature=0)], [SamplingParams(), params, params]):
        warp = warp_of(*own, vocab=size)
        p = probabilities(logits, warp, **given)
        whole = ((p.sum(-1) - 1).abs() < 1e-4).tolist()
        assert whole == [[True, True], [True, False], [True, True]]
        best = argmaxes(logits, warp, **given)
        assert (best >= 0).tolist() == whole


def test_padding_ids_are_masked_whatever_their_logits() -> None:
    logits = torch.zeros(1, 1, 6)
    logits[0, 0, 4:] = torch.tensor([50.0, torch.nan])
    for params in (SamplingParams(), SamplingParams(temperature=0), SamplingParams(top_p=0.9, top_k=5)):
        warp = warp_of(params, vocab=4)
        p = probabilities(logits, warp, outputs=NONE)
        assert p[0, 0, 4:].tolist() == [0, 0]
        assert float(p.sum()) == pytest.approx(1)
        assert argmaxes(logits, warp, outputs=NONE).tolist() == [[0]]


def test_ids_past_the_vocabulary_are_ignored() -> None:
    """A draft with a smaller vocabulary gets the request's parameters as they are."""
    warp = warp_of(SamplingParams(logit_bias={99: 5.0, 1: 1.0}, min_tokens=1), vocab=4, eos=[[88, 0]])
    p = probabilities(torch.zeros(1, 1, 4), warp, outputs=NONE)
    assert p[0, 0, 0] == 0
    assert p[0, 0, 1] > p[0, 0, 2]
    history = History.of([[99, 1]], [[77, 2, 2]], 4, "cpu")
    assert history.prompt.tolist() == [[False, True, False, False]]
    assert history.counts.tolist() == [[0, 0, 2, 0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_worked_on_in_float32(dtype: torch.dtype) -> None:
    logits = random_logits(2, 3, 4000).to(dtype)
    params = [SamplingParams(temperature=0.8, top_p=0.9), SamplingParams(temperature=0)]
    warp = warp_of(*params, vocab=3990)
    p = probabilities(logits, warp, outputs=NONE.expand(2))
    assert p.dtype == torch.float32
    assert torch.equal(p, probabilities(logits.float(), warp, outputs=NONE.expand(2)))
    assert argmaxes(logits, warp, outputs=NONE.expand(2))[1].tolist() == p[1].argmax(-1).tolist()


def test_unused_features_are_free_and_asked_ones_are_needed() -> None:
    plain = warp_of(SamplingParams(), vocab=5)
    features = ("temperature", "min_p", "top_k", "top_p", "bias", "early_eos", "repetition", "frequency", "presence")
    assert all(getattr(plain, name) is None for name in features)
    assert not plain.needs_history
    assert not plain.all_greedy
    assert warp_of(SamplingParams(temperature=0, top_p=0.5, top_k=3, min_p=0.1), vocab=5).top_p is None
    penal = warp_of(SamplingParams(), SamplingParams(frequency_penalty=1), vocab=5)
    assert penal.needs_history
    with pytest.raises(ValueError, match="history is needed"):
        probabilities(torch.zeros(2, 1, 5), penal, outputs=NONE.expand(2))


def test_rows_give_in_a_batch_what_they_give_alone() -> None:
    params = [ALL, SamplingParams(temperature=0), SamplingParams(min_tokens=2), SamplingParams(top_p=0.6)]
    ends = [[1], [2], [3, 4], []]
    warp = warp_of(*params, vocab=VOCAB, eos=ends)
    logits, history = random_logits(4, 1, SIZE), History.of([[1], [2], [3], [4]], [[5]] * 4, SIZE, "cpu")
    whole = probabilities(logits, warp, outputs=NONE.expand(4), history=history)
    for rows in ([2], [3, 0], [1], [1, 1, 2]):
        index = torch.tensor(rows)
        part = warp_of(*(params[row] for row in rows), vocab=VOCAB, eos=[ends[row] for row in rows])
        assert part.all_greedy == all(params[row].greedy for row in rows)
        own = History(history.prompt[index], history.counts[index])
        found = probabilities(logits[index], part, outputs=NONE.expand(len(index)), history=own)
        torch.testing.assert_close(found, whole[index])


@pytest.mark.parametrize("params", [SamplingParams(), ALL, SamplingParams(temperature=0), SamplingParams(min_tokens=2)])
def test_nothing_waits_for_the_device(params: SamplingParams) -> None:
    """Meta tensors have no values: reading one, or branching on one, raises. They take the GPU's code path."""
    warp = Warp.of([params, SamplingParams()], vocab_size=90, eos=[[1], [2]], device="meta")
    empty = torch.empty(2, 3, dtype=torch.int64, device="meta")
    given = {
        "outputs": empty[:, 0],
        "tokens": empty,
        "topology": Topology.of([(-1, -1)] * 2, "meta"),
        "history": History(empty[:, :1].expand(2, 100) > 0, torch.empty(2, 100, device="meta")),
    }
    logits = torch.empty(2, 3, 100, device="meta")
    assert probabilities(logits, warp, **given).shape == (2, 3, 100)
    assert argmaxes(logits, warp, **given).shape == (2, 3)


@pytest.mark.gpu
def test_cuda_gives_what_the_cpu_gives() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    logits = random_logits(3, 4, 5000)
    params = [ALL, SamplingParams(temperature=0), SamplingParams(top_p=0.95, min_tokens=2)]
    results = []
    for device in ("cpu", "cuda"):
        warp = Warp.of(params, vocab_size=4990, eos=[[3]] * 3, device=device)
        p = probabilities(
            logits.to(device),
            warp,
            outputs=torch.zeros(3, dtype=torch.int64, device=device),
            tokens=torch.arange(12, device=device).view(3, 4),
            topology=Topology.of([(-1, -1, 0)] * 3, device),
            history=History.of([[5, 6]] * 3, [[7]] * 3, 5000, device),
        )
        results.append(p.cpu())
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-7)
