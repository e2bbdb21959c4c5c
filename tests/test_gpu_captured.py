"""Captured rounds on a GPU: the same tokens as the eager runner in float32, and the target's law when sampling."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from statistics_tools import chi_squared

from headstart import LLM, SamplingParams
from headstart.engine.overlap import OverlappedRounds
from headstart.engine.players import players
from headstart.machine import gpu
from headstart.machine.head import HeadConfig, HeadNet, save_head
from headstart.machine.runner import EagerRunner
from headstart.maths import noise
from headstart.maths.vocab_ops import PLAIN
from headstart.maths.warp import Warp
from headstart.testing import tiny_model

pytestmark = pytest.mark.gpu

# Sizes that the fused kernels take: head widths of 64, hidden sizes that are multiples of 64.
SIZE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
DEEP = SIZE | {"num_hidden_layers": 4}  # the first, one whose launches are noted, and two for which they are made again
PROMPTS = [[5, 6, 7, 8, 5, 6], [9, 9, 4], [3, 4, 5, 6, 7, 8, 9, 10, 11], [40, 41], [50, 3, 50, 3, 50]]
EVERYTHING = [
    SamplingParams(temperature=0, max_tokens=22, logprobs=3),
    SamplingParams(temperature=0, max_tokens=20, repetition_penalty=1.5, presence_penalty=0.3),
    SamplingParams(temperature=0.8, seed=1, max_tokens=24, frequency_penalty=0.9, verification="coupled", top_k=7),
    SamplingParams(temperature=0, max_tokens=16, speculate=False, logit_bias={7: 6.0, 9: -3.0}),
    SamplingParams(temperature=0.7, seed=3, max_tokens=26, min_tokens=20, verification="coupled", min_p=0.05),
]


def pair(architecture: str, sizes: dict[str, int] = SIZE, share: float = 0.15) -> tuple[Any, Any]:
    """A target, and a draft that is the target with noise on its weights."""
    dtype = torch.float32
    target = tiny_model(architecture, dtype=dtype, **sizes).to("cuda")
    draft = tiny_model(architecture, dtype=dtype, **sizes).to("cuda")
    generator = torch.Generator("cuda").manual_seed(1)
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.dim() > 1:
                step = torch.randn(parameter.shape, generator=generator, device="cuda")
                parameter.add_((step * share * parameter.std()).to(dtype))
    return target, draft


def eager(target: Any, params: list[SamplingParams]) -> list[tuple[int, ...]]:
    """One prompt at a time through the model's own modules, without speculation."""
    llm = LLM(target, None, max_model_len=128, max_rows=1, check=False)
    runner = EagerRunner(target, rows=1, max_len=128, probe=False)
    llm.engine.parts.runner, llm.engine.parts.captured = runner, None
    llm.engine._slab = llm.engine._scheduler._slab = runner.slab
    llm.engine.players = players(llm.engine.parts)
    return [llm.generate(p, s).token_ids for p, s in zip(PROMPTS, params, strict=True)]


def serve(target: Any, draft: Any, params: list[SamplingParams], rows: int, **settings: Any) -> tuple[Any, LLM]:
    """The answers, and the LLM that gave them: all from rounds that were captured at load."""
    told: list[str] = []
    llm = LLM(target, draft, max_rows=rows, max_model_len=128, check=False, progress=told.append, **settings)
    rounds = llm.engine.parts.captured
    assert rounds is not None
    count = told[-1].split()[-1]  # capturing rounds (5 of 5)
    assert told[-1] == f"capturing rounds ({count[:-1]} of {count}"
    before = rounds.captured_programs
    assert before > 5
    answers = [a.token_ids for a in llm.generate(PROMPTS, params)]
    assert rounds.captured_programs == before  # nothing is captured while serving
    return answers, llm


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_float32_equality_with_the_eager_runner(architecture: str, temperature: float) -> None:
    target, draft = pair(architecture, DEEP)
    params = [
        SamplingParams(temperature=temperature, top_p=0.9, seed=i, max_tokens=20 + 5 * i, verification="coupled")
        for i in range(5)
    ]
    expected = eager(target, params)
    for gamma, rows in ((3, 4), (8, 1)):
        answers, llm = serve(target, draft, params, rows, gamma=gamma, overlap=rows > 1)
        assert answers == expected, (gamma, rows)
        assert llm.stats.accepted > 10


@pytest.mark.parametrize("architecture", ["gemma3", "gpt2", "gpt-neox", "cohere2"])
def test_models_on_their_own_modules_are_captured_too(architecture: str) -> None:
    """Sliding windows and learned positions, with masks made from lengths that only the device knows."""
    target, draft = pair(architecture, {})
    params = [SamplingParams(temperature=0, max_tokens=20 + 5 * i, ignore_eos=True) for i in range(5)]
    answers, llm = serve(target, draft, params, 4, gamma=3)
    assert not hasattr(llm.engine.parts.runner, "fused")
    assert answers == eager(target, params)
    assert llm.stats.accepted > 10


def test_a_model_that_cannot_be_captured_is_served_step_by_step() -> None:
    target, draft = pair("mixtral", {})
    params = [SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)] * 5
    llm = LLM(target, draft, gamma=3, max_rows=4, max_model_len=128, check=False)
    assert [a.token_ids for a in llm.generate(PROMPTS, params)] == eager(target, params)


@pytest.mark.parametrize("rows", [1, 3])
def test_everything_a_request_can_ask_for(rows: int) -> None:
    """Penalties, bias, min_tokens, log-probabilities and switched-off speculation, all in the same captured round."""
    target, draft = pair("llama", DEEP)
    answers, llm = serve(target, draft, EVERYTHING, rows, gamma=3)
    assert answers == eager(target, EVERYTHING)
    assert llm.stats.accepted > 10


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("rule", ["coupled", "block"])
def test_overlap_gives_the_same_tokens(temperature: float, rule: str) -> None:
    target, draft = pair("llama", share=0.02)
    params = [
        SamplingParams(temperature=temperature, top_p=0.9, seed=i, max_tokens=40, ignore_eos=True, verification=rule)  # type: ignore[arg-type]
        for i in range(5)
    ]
    alone, _ = serve(target, draft, params, 1, gamma=3, overlap=False)
    beside, llm = serve(target, draft, params, 1, gamma=3, overlap=True)
    assert beside == alone
    rounds = llm.engine.parts.captured
    assert isinstance(rounds, OverlappedRounds)
    assert rounds.hits > 5


@pytest.mark.parametrize("rows", [1, 4])
def test_a_draft_that_is_the_target_is_always_accepted(rows: int) -> None:
    """Losslessness hides a draft that reads the wrong tokens; acceptance does not."""
    target, _ = pair("llama")
    draft = tiny_model("llama", **SIZE).to("cuda")
    params = [SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)] * 5
    _, llm = serve(target, draft, params, rows, gamma=4)
    assert llm.stats.acceptance_rate > 0.95


def test_lookup_is_judged_on_the_device() -> None:
    target, _ = pair("llama")
    params = [SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)] * 5
    answers, llm = serve(target, "lookup", params, 4, gamma="auto")
    assert answers == eager(target, params)
    assert llm.stats.accepted > 10


def test_a_head_reads_what_captured_rounds_keep(tmp_path: Path) -> None:
    """An untrained head: its guesses are noise, but it is asked, and the tokens are the target's own."""
    target, _ = pair("llama")
    c = target.config
    config = HeadConfig(
        target_hidden=c.hidden_size,
        target_layers=c.num_hidden_layers,
        target_vocab=c.vocab_size,
        watch=(0, c.num_hidden_layers - 1),
        width=64,
        heads=2,
        kv_heads=1,
        head_dim=32,
        ffn=64,
        vocab=40,
    )
    torch.manual_seed(0)
    save_head(HeadNet(config, list(range(3, 43))), tmp_path)
    params = [SamplingParams(temperature=0, max_tokens=20)] * 5
    answers, llm = serve(target, str(tmp_path), params, 2, gamma=2)
    assert answers == eager(target, params)
    assert llm.stats.drafted > 20
    assert llm.engine.parts.runner.fused.kept  # type: ignore[union-attr]  # by the fused kernels


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
@pytest.mark.parametrize("warp", [{"top_k": 3}, {"top_p": 0.45}], ids=["top_k", "top_p"])
def test_the_captured_sampler_follows_the_target(rule: str, warp: dict[str, Any]) -> None:
    """The joint law of three tokens, against the target's own probabilities."""
    target, draft = pair("llama")
    prompt, samples = [5, 6, 7, 8], 1200
    with torch.no_grad():
        target.lm_head.weight.mul_(2)  # a sharper law, so that a nucleus is small
        draft.lm_head.weight.mul_(2)
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer = {}
        for prefix, mass in law.items():
            with torch.inference_mode():
                logits = target(torch.tensor([[*prompt, *prefix]], device="cuda")).logits[0, -1].double()
            best = logits.softmax(-1).sort(descending=True)
            kept = warp.get("top_k") or int((best.values.cumsum(0) < warp["top_p"]).sum()) + 1
            chances = best.values[:kept] / best.values[:kept].sum()
            for token, chance in zip(best.indices[:kept].tolist(), chances.tolist(), strict=True):
                longer[(*prefix, token)] = mass * chance
        law = longer
    llm = LLM(target, draft, gamma=3, max_rows=32, max_model_len=64, max_waiting=5000, check=False)
    params = [
        SamplingParams(seed=i, max_tokens=6, ignore_eos=True, verification=rule, **warp)  # type: ignore[arg-type]
        for i in range(samples)
    ]
    answers = llm.generate([prompt] * samples, params)
    assert 0.05 < llm.stats.acceptance_rate < 0.98  # both happen: a draft is kept, and is not
    assert chi_squared(Counter(a.token_ids[:3] for a in answers), law) > 1e-4


@pytest.mark.parametrize("size", [112, 49152, 151936])
def test_the_kernels_of_the_inner_loops(size: int) -> None:
    """Keys bit for bit, and the same tokens and distributions as the plain loops."""
    vocab_ops = gpu.vocab_ops_of(torch.device("cuda"))
    assert vocab_ops is not PLAIN
    generator = torch.Generator("cuda").manual_seed(size)
    logits = torch.randn(4, 5, size, device="cuda", generator=generator) * 3
    seeds, base = torch.tensor([1, -7, 1 << 62, 0], device="cuda"), torch.tensor([4, 900, 3, 2], device="cuda")
    offset = torch.arange(5, device="cuda").expand(4, 5)
    stream = torch.tensor([1, 2, 3, 4], device="cuda")
    for asked in ((seeds, base, 0, 2), (seeds, base, offset, stream), (seeds, base[:, None] + offset, 0, 4)):
        for ours, plain in zip(vocab_ops.keys(*asked), noise.keys(*asked), strict=True):
            assert torch.equal(ours, plain)
    params = [
        SamplingParams(top_p=0.95),
        SamplingParams(temperature=0.6, top_p=0.5, min_p=0.01),
        SamplingParams(temperature=1.3),
        SamplingParams(min_p=0.1, top_k=40),
    ]
    warp = Warp.of(params, vocab_size=size, eos=[()] * 4, device="cuda")
    assert vocab_ops.sampled is not None
    from headstart.maths.distribution import probabilities

    outputs = torch.zeros(4, dtype=torch.int64, device="cuda")
    ours = probabilities(logits, warp, outputs=outputs, vocab_ops=vocab_ops)
    plain = probabilities(logits, warp, outputs=outputs)
    assert torch.allclose(ours, plain, atol=1e-6)
    assert int(((ours > 0) != (plain > 0)).sum()) <= 4  # a token on the very edge may fall either way by rounding
    keys = noise.keys(seeds, base[:, None] + offset, 0, noise.COUPLED)
    assert torch.equal(vocab_ops.race(plain, keys), noise.race(plain, keys))
    assert torch.equal(vocab_ops.argmax(logits), logits.argmax(-1))
