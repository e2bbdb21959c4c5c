"""The head on the CPU kernels: what ``machine.head`` says in torch, whatever else is in the call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from headstart.config import EngineConfig
from headstart.control.controller import FixedController
from headstart.drafters.draft_sampler import DraftSampler
from headstart.drafters.head import HeadDrafter
from headstart.engine.engine import Engine
from headstart.machine.cpu.build import ISAS, load_kernels
from headstart.machine.cpu.head import HeadKernel, why_not
from headstart.machine.cpu.packed import pack_model
from headstart.machine.cpu.runner import CpuRunner
from headstart.machine.cpu.sampling import knobs_of
from headstart.machine.head import HeadConfig, HeadNet
from headstart.machine.kvcache import Slab
from headstart.machine.runner import EagerRunner
from headstart.maths.limits import AGREEMENT_TEMPERATURE
from headstart.maths.vocab_ops import Rule
from headstart.testing import TINY_VOCABULARY, tiny_model
from headstart.types import DraftView, Grammar, Proposal, Request, SamplingParams

pytestmark = pytest.mark.skipif(isinstance(load_kernels(), str), reason=str(load_kernels()))

CONFIG = HeadConfig(
    target_hidden=64,
    target_layers=4,
    target_vocab=200,
    watch=(0, 1, 3),
    width=96,
    heads=6,
    kv_heads=3,
    head_dim=32,
    ffn=160,
    vocab=72,  # not a multiple of 16
    window=24,
)


@dataclass
class View:
    tokens: list[int]
    params: SamplingParams
    seed: int
    id: str = "a"
    prompt_length: int = 0
    prediction: tuple[int, ...] = ()
    constraint: None = None


def net(config: HeadConfig = CONFIG) -> HeadNet:
    torch.manual_seed(1)
    made = HeadNet(config, torch.randperm(config.target_vocab)[: config.vocab].sort().values)
    return made.eval().requires_grad_(False)


def embedding() -> Tensor:
    return torch.randn(CONFIG.target_vocab, CONFIG.target_hidden, generator=torch.Generator().manual_seed(2))


def text(length: int, seed: int = 0) -> tuple[list[int], Tensor]:
    """Tokens, and the features of all but the last."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(CONFIG.target_vocab, (length,), generator=generator).tolist()
    return tokens, torch.randn(length - 1, CONFIG.features, generator=generator)


def recomputed(head: HeadNet, tokens: Sequence[int], features: Tensor, count: int) -> tuple[list[int], Tensor]:
    """Draft ``count`` tokens the slow way, all slots anew each time. Returns them and their logits [count, vocab]."""
    c, line, found = head.config, list(tokens), []
    g = head.fused(torch.cat([torch.zeros(1, c.features), features]))
    for _ in range(count):
        n = len(line)
        x = (g + head.word(embedding()[line]))[None]
        q, k, v = head.queries_keys_values(x, head.rotary(n)[None])
        k, v = (t.repeat_interleave(c.heads // c.kv_heads, 2) for t in (k, v))
        at = torch.arange(n)
        seen = (at <= at[:, None]) & (at > at[:, None] - c.window)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        y = head.finish(x, mixed.transpose(1, 2).flatten(2))[0, -1:]
        found.append(head.logits(y)[0])
        line.append(int(head.ids[found[-1].argmax()]))
        g = torch.cat([g, y])
    return line[len(tokens) :], torch.stack(found)


def kernel(head: HeadNet, rows: int = 1, kind: str = "float32") -> HeadKernel:
    assert why_not(head) is None
    return HeadKernel(head, Slab(rows, 256), embedding(), threads=2, kind=kind)


@pytest.mark.parametrize("length", [2, 3, 17, 60])
@pytest.mark.parametrize(("kind", "error"), [("float32", 0.01), ("int8", 0.1)])
def test_slots_read_in_pieces_and_drafted_ones_say_what_torch_says(length: int, kind: str, error: float) -> None:
    head = net()
    tokens, features = text(length)
    expected, logits = recomputed(head, tokens, features, 4)
    for cut in sorted({0, 1, length // 2, length - 1}):
        served = kernel(head, kind=kind)
        if cut:
            served.remember(0, 0, tokens[:cut], features[: cut - 1] if cut > 1 else None)
        found = [served.read([cut], [tokens[cut:]], [features[max(cut - 1, 0) :]])[0].clone()]
        found += [served.step([length + i], [expected[i]])[0].clone() for i in range(3)]
        off = (torch.stack(found) - logits).norm(dim=1) / logits.norm(dim=1)
        assert float(off.max()) < error


def test_greedy_chains_are_the_argmaxes_and_end_where_hope_does() -> None:
    head = net()
    tokens, features = text(30)
    expected, logits = recomputed(head, tokens, features, 6)
    chances = (
        (logits.amax(1) / AGREEMENT_TEMPERATURE - (logits / AGREEMENT_TEMPERATURE).logsumexp(1))
        .exp()
        .cumprod(0)
        .tolist()
    )
    served = kernel(head)
    served.remember(0, 0, tokens[:20], features[:19])

    def drafted(budget: int, **hope: float) -> list[int]:
        return served.chains([20], [tokens[20:]], [features[19:]], [budget], temperature=AGREEMENT_TEMPERATURE, **hope)[
            0
        ]

    assert drafted(6) == expected
    assert drafted(2) == expected[:2]
    for end in (1, 3, 5):  # the token at ``end`` is reached with less than what is asked for
        between = (chances[end] + chances[end - 1]) / 2
        assert drafted(6, min_chance_to_extend=between) == expected[:end]
        assert drafted(6, least_next=between) == expected[: end + 1]
    assert drafted(6, least_next=1.1) == drafted(6, min_chance_to_extend=1.1) == expected[:1]
    assert drafted(6, least_first=1.1) == expected, "the likeliest first token of all stays"


@pytest.mark.parametrize("way", ["greedy", "drawn"])
def test_first_tokens_with_too_little_chance_are_left_out_but_for_the_likeliest(way: str) -> None:
    """Whatever they are: what decides is the distribution that they are drawn from."""
    head, rows = net(), 4
    lines = [text(30, seed) for seed in range(rows)]
    chances = []
    for tokens, features in lines:
        logits = recomputed(head, tokens, features, 1)[1] / AGREEMENT_TEMPERATURE
        chances.append(float(logits.softmax(1).amax()))
    order = sorted(chances)
    params = SamplingParams(verification="coupled", seed=3)
    knobs = [knobs_of(params, "coupled", seed=3, base=30)] * rows if way == "drawn" else []
    counts: list[int] = []
    for least in (0.0, (order[0] + order[1]) / 2, (order[2] + order[3]) / 2, 1.1):
        served = kernel(head, rows)
        given = ([0] * rows, [tokens for tokens, _ in lines], [features for _, features in lines], [3] * rows)
        found = served.chains(*given, temperature=AGREEMENT_TEMPERATURE, knobs=knobs, least_first=least)
        kept = [chance >= min(least, order[-1]) for chance in chances]
        if way == "greedy":
            assert [bool(chain) for chain in found] == kept
        counts.append(sum(map(bool, found)))
        assert [len(chain) for chain in found if chain] == [3] * counts[-1]
    assert counts[0] == rows
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] == 1


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7, "top_p": 0.8}, {"top_k": 5, "min_p": 0.01}])
def test_drawn_chains_are_the_pens(rule: Rule, settings: dict[str, Any]) -> None:
    """Tokens and q as ``DraftSampler`` has them of the same logits, with the request's noise."""
    head = net()
    (tokens, features), (others, theirs) = text(30), text(30, 1)
    served = kernel(head, 2)
    agreed, seen = 0, set()
    for seed in range(40):
        params = SamplingParams(verification=rule, seed=seed, **settings)
        knobs = [
            knobs_of(SamplingParams(temperature=0), "greedy", seed=seed, base=30),
            knobs_of(params, rule, seed=seed, base=30),
        ]
        q = torch.full((2, 3, CONFIG.target_vocab), -1.0)
        greedy, chain = served.chains(
            [0, 0], [others, tokens], [theirs, features], [2, 3], temperature=1.0, knobs=knobs, q=q
        )
        assert greedy == recomputed(head, others, theirs, 2)[0]
        view = View(tokens, params, seed)
        sampler = DraftSampler([view], CONFIG.target_vocab, CONFIG.target_vocab, torch.device("cpu"), head.ids)
        logits = served.read([0, 0], [others, tokens], [theirs, features])[1:].clone()
        for offset, token in enumerate(chain):
            agreed += int(sampler.draw(logits, offset)) == token
            logits = served.step([30 + offset] * 2, [greedy[0], token])[1:].clone()
            seen.add(token)
        if rule != "coupled":
            torch.testing.assert_close(q[1:], sampler.q(), rtol=1e-4, atol=1e-7)
    assert agreed >= 119, "but for a race that is all but even"
    assert len(seen) > 10


def test_rejection_sampling_needs_a_place_for_q() -> None:
    served, (tokens, features) = kernel(net()), text(5)
    knobs = [knobs_of(SamplingParams(), "block", seed=1, base=5)]
    for q in (None, torch.empty(1, 3, CONFIG.target_vocab)):
        with pytest.raises(ValueError, match="q"):
            served.chains([0], [tokens], [features], [2], temperature=1.0, knobs=knobs, q=q)


@pytest.mark.parametrize("kind", ["int8", "int4", "float32"])
def test_a_row_does_not_notice_the_others(kind: str) -> None:
    head = net()
    texts = [text(length, seed) for seed, length in enumerate((40, 6, 21))]
    starts = [37, 0, 2]  # one far behind, one new, one that reads much at once
    budgets = [5, 2, 6]
    many = kernel(head, 3, kind)
    feed = [tokens[start:] for (tokens, _), start in zip(texts, starts, strict=True)]
    features = [seen[max(start - 1, 0) :] for (_, seen), start in zip(texts, starts, strict=True)]
    alone = []
    for row, ((tokens, seen), start) in enumerate(zip(texts, starts, strict=True)):
        one = kernel(head, 1, kind)
        for served, at in ((many, row), (one, 0)):
            if start:
                served.remember(at, 0, tokens[:start], seen[: start - 1])
        alone.append(one.read([start], [feed[row]], [features[row]])[0].clone())
        chain = one.chains([start], [feed[row]], [features[row]], [budgets[row]], temperature=1.0)[0]
        assert len(chain) == budgets[row]
        alone[-1] = (alone[-1], chain)
    together = many.read(starts, feed, features).clone()
    assert all(torch.equal(logits, own[0]) for logits, own in zip(together, alone, strict=True))
    assert many.chains(starts, feed, features, budgets, temperature=1.0) == [own[1] for own in alone]
    # Rows that only come along change nothing, and keep what they have.
    lengths = [len(tokens) for tokens, _ in texts]
    passing = many.chains(
        [lengths[0], 0, lengths[2]], [[], feed[1], []], [None, features[1], None], [0, 2, 0], temperature=1.0
    )
    assert passing == [[], alone[1][1], []]
    assert many.chains(starts, feed, features, budgets, temperature=1.0) == [own[1] for own in alone]


def test_broken_numbers_end_a_chain_and_stay_in_their_row() -> None:
    head = net()
    (tokens, features), (others, theirs) = text(20), text(20, 1)
    served = kernel(head, 2)
    feed, broken = [tokens, others], features.clone()
    expected = served.chains([0, 0], feed, [features, theirs], [4, 4], temperature=1.0)
    broken[-1] = float("nan")
    assert served.chains([0, 0], feed, [broken, theirs], [4, 4], temperature=1.0) == [[], expected[1]]


def test_features_of_the_wrong_shape_are_refused() -> None:
    tokens, features = text(9)
    served = kernel(net())
    with pytest.raises(ValueError, match="need features"):
        served.read([0], [tokens], [features[1:]])
    with pytest.raises(ValueError, match="no features"):
        served.read([3], [tokens[3:]], [None])


def test_sizes_that_the_kernels_do_not_know_are_refused() -> None:
    odd = HeadConfig(**{**CONFIG.__dict__, "ffn": 40})
    assert "multiples of 32" in str(why_not(net(odd)))


@pytest.mark.parametrize("level", [level for level in ISAS if level != "native"])
def test_every_instruction_set_drafts_alike(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    head = net()
    tokens, features = text(25)
    logits = recomputed(head, tokens, features, 1)[1]
    monkeypatch.setenv("HEADSTART_CPU_ISA", level)
    found = kernel(head, kind="int8").read([0], [tokens], [features])
    assert float((found - logits).norm() / logits.norm()) < 0.1


# -- as a drafter


class Recorder(HeadDrafter):
    """Remembers what it proposed."""

    def propose(self, views: Sequence[DraftView], budgets: Sequence[int]) -> list[Proposal | None]:
        found = super().propose(views, budgets)
        self.log = getattr(self, "log", []) + [
            (view.id, len(view.tokens), p.tokens) for view, p in zip(views, found, strict=True) if p is not None
        ]
        return found


def drafted(
    settings: SamplingParams,
    *,
    quantized: bool = False,
    kernel: bool = True,
    rows: int,
    grammar: Grammar | None = None,
    needed: float = 0.0,
) -> tuple[object, ...]:
    """The texts of four prompts, and all that was proposed on the way."""
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = tiny_model("llama", **shape, head_dim=32)
    runner: EagerRunner | CpuRunner = EagerRunner(model, rows=rows, max_len=96, margin=10)
    if quantized:
        runner = CpuRunner(pack_model(model, "int8"), model, rows=rows, max_len=96)
    layers = model.config.num_hidden_layers
    config = HeadConfig(
        target_hidden=64,
        target_layers=layers,
        target_vocab=runner.vocab_size,
        watch=(0, layers - 1),
        width=64,
        heads=2,
        kv_heads=1,
        head_dim=32,
        ffn=64,
        vocab=TINY_VOCABULARY - 20,
    )
    torch.manual_seed(4)
    head = HeadNet(config, range(TINY_VOCABULARY - 20)).eval().requires_grad_(False)
    drafter = Recorder(head, runner, vocab_size=TINY_VOCABULARY, min_chance_to_extend=0.0)
    assert not kernel or drafter.use_kernel("float32")
    if needed:
        runner.ragged, drafter._min_chances = True, lambda: (needed, 0.0)
    engine = Engine(
        runner, drafter, FixedController(3), EngineConfig(max_rows=rows), vocab_size=TINY_VOCABULARY, eos=()
    )
    generator = torch.Generator().manual_seed(3)
    lines = [torch.randint(3, TINY_VOCABULARY, (3 + 9 * i,), generator=generator).tolist() for i in range(4)]
    handles = [engine.submit(Request(f"r{i}", tuple(line), settings, (), grammar)) for i, line in enumerate(lines)]
    while not engine.idle:
        engine.step()
    assert engine.parts.inactive is None, engine.parts.inactive
    assert engine.stats.drafted > 100
    return [handle.completion().token_ids for handle in handles], drafter.log


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    "settings",
    [
        SamplingParams(temperature=0, max_tokens=24),
        SamplingParams(temperature=0.9, top_p=0.9, seed=5, max_tokens=24, verification="coupled"),
    ],
    ids=["greedy", "coupled"],
)
def test_the_drafter_guesses_the_same_on_the_kernel(settings: SamplingParams, rows: int) -> None:
    assert drafted(settings, rows=rows) == drafted(settings, kernel=False, rows=rows)


def test_rows_with_poor_first_guesses_are_left_out_on_the_kernel_and_without_it() -> None:
    settings = SamplingParams(temperature=0, max_tokens=60)
    (texts, everyone), (same, few) = (drafted(settings, rows=3, needed=needed) for needed in (1e-6, 0.4))
    assert drafted(settings, kernel=False, rows=3, needed=0.4) == (same, few)
    assert same == texts
    assert 0 < len(few) < len(everyone)


def test_guesses_that_disregard_penalties_change_no_text() -> None:
    settings = SamplingParams(temperature=0, presence_penalty=0.5, max_tokens=24)
    texts, guesses = drafted(settings, rows=3)
    plain_texts, plain_guesses = drafted(settings, kernel=False, rows=3)
    assert texts == plain_texts
    assert guesses != plain_guesses


def test_it_reads_a_packed_target() -> None:
    settings = SamplingParams(temperature=0, max_tokens=24)
    texts, log = drafted(settings, quantized=True, rows=1)
    other_texts, other_log = drafted(settings, quantized=True, rows=3)
    assert texts == other_texts
    assert sorted(log) == sorted(other_log)
