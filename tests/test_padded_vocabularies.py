"""Heads of different sizes: a draft and a target may be padded differently, and each may know ids the other lacks.

Whatever is drafted, the text is the target's own. A draft never guesses an id that the target lacks; an id that only
the target has may be written all the same, and the draft reads another token in its place.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import run, table, table_engine
from statistics_tools import chi_squared

from headstart import LLM, SamplingParams
from headstart.config import EngineConfig
from headstart.control.controller import FixedController
from headstart.drafters.model import ModelDrafter
from headstart.engine.captured import CapturedRounds
from headstart.engine.engine import Engine
from headstart.engine.overlap import OverlappedRounds
from headstart.machine.cpu.build import why_not as no_kernels
from headstart.machine.load.loading import quiet
from headstart.machine.runner import EagerRunner
from headstart.testing import TableRunner, tiny_model, tiny_tokenizer
from headstart.types import Request

WIDE, NARROW = 512, 300
SIZES = [(WIDE, NARROW), (NARROW, WIDE)]
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "coupled": {"temperature": 1.0, "seed": 7, "verification": "coupled"},
    "block": {"temperature": 1.0, "seed": 7, "verification": "block"},
}


def alike(rows: int, like: Any | None = None, *, architecture: str = "llama", **overrides: Any) -> Any:
    """A tiny model with a head of so many rows; its weights are those of ``like`` wherever both have them."""
    model = tiny_model(architecture, vocab_size=rows, tie_word_embeddings=False, **overrides)
    if like is not None:
        theirs = like.state_dict()
        with torch.no_grad():
            for name, weight in model.state_dict().items():
                shared = min(len(weight), len(theirs[name]))
                weight[:shared] = theirs[name][:shared]
    return model


def answers(llm: LLM, prompts: list[list[int]], **params: Any) -> list[tuple[int, ...]]:
    found = llm.generate(prompts, [SamplingParams(max_tokens=40, ignore_eos=True, **params)] * len(prompts))
    return [answer.token_ids for answer in found]


def prompts(most: int) -> list[list[int]]:
    """Some of them with the largest ids that the target has."""
    return [[5, 6, 7, 8], [most - 1, 3, most - 2, 9, 11], [20, 21, most // 2]]


def still_drafting(llm: LLM) -> bool:
    return llm.drafter_name == "model" and llm.stats.drafted > 0 and llm.stats.accepted > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("target_rows", "draft_rows"), SIZES)
def test_loaded_objects_of_different_sizes(target_rows: int, draft_rows: int, kind: str) -> None:
    target = alike(target_rows)
    sizes: dict[str, Any] = {"max_model_len": 96, "max_rows": 3, "device": "cpu"}
    llm = LLM(target, alike(draft_rows, target), gamma=3, **sizes)
    found = answers(llm, prompts(target_rows), **KINDS[kind])
    assert still_drafting(llm), llm.engine.inactive_reason
    if target_rows > draft_rows:
        assert any(token >= draft_rows for ids in found for token in ids), "the target writes ids the draft lacks"
    if kind == "block":  # other noise, so other ids; their law is tested below
        assert found == answers(llm, prompts(target_rows), **KINDS[kind])
    else:
        assert found == answers(LLM(target, None, **sizes), prompts(target_rows), **KINDS[kind])
    note = llm.report.notes[-1]
    assert note.startswith(f"the target has {target_rows} tokens and the draft {draft_rows}")
    assert f"the first {NARROW} are taken to be the same" in note


@pytest.mark.parametrize(("target_rows", "draft_rows"), SIZES)
def test_with_a_tokenizer_for_the_target_only(target_rows: int, draft_rows: int) -> None:
    target, tokenizer = alike(target_rows), tiny_tokenizer(NARROW - 20)
    sizes: dict[str, Any] = {"max_model_len": 96, "max_rows": 3, "device": "cpu", "tokenizer": tokenizer}
    llm = LLM(target, alike(draft_rows, target), gamma=3, **sizes)
    found = answers(llm, prompts(NARROW - 20), temperature=0.0)
    assert still_drafting(llm), llm.engine.inactive_reason
    assert found == answers(LLM(target, None, **sizes), prompts(NARROW - 20), temperature=0.0)
    assert all(token < NARROW - 20 for ids in found for token in ids)


def test_folders_with_one_tokenizer_say_nothing(tmp_path: Path) -> None:
    target = alike(WIDE)
    with quiet():
        for name, model in (("target", target), ("draft", alike(NARROW, target))):
            model.save_pretrained(tmp_path / name)
            tiny_tokenizer(NARROW - 20).save_pretrained(tmp_path / name)
    llm = LLM(tmp_path / "target", tmp_path / "draft", gamma=3, max_model_len=96, max_rows=3, device="cpu")
    assert not any("taken to be the same" in note for note in llm.report.notes)
    found = answers(llm, prompts(NARROW - 20), temperature=0.0)
    assert still_drafting(llm)
    assert found == answers(
        LLM(target, None, tokenizer=tiny_tokenizer(NARROW - 20)), prompts(NARROW - 20), temperature=0.0
    )


@pytest.mark.parametrize("rows", [WIDE, NARROW])
def test_heads_of_one_size_say_nothing(rows: int) -> None:
    target = alike(rows)
    llm = LLM(target, alike(rows, target), gamma=3, max_model_len=96, max_rows=3, device="cpu")
    assert llm.report.notes == ("no tokenizer: prompts must be token ids",)


@pytest.mark.skipif(no_kernels() is not None, reason=str(no_kernels()))
def test_a_draft_on_our_kernels_reads_no_id_that_it_lacks() -> None:
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    target = alike(WIDE, **shape)
    sizes: dict[str, Any] = {"max_model_len": 96, "max_rows": 3, "device": "cpu"}
    llm = LLM(target, alike(NARROW, target, **shape), draft_quantization="int8", gamma=3, **sizes)
    found = answers(llm, prompts(WIDE), temperature=0.0)
    assert still_drafting(llm), llm.engine.inactive_reason
    assert found == answers(LLM(target, None, **sizes), prompts(WIDE), temperature=0.0)


# -- rounds on the device, played here without capturing


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("target_rows", "draft_rows"), SIZES)
def test_rounds_on_the_device(target_rows: int, draft_rows: int, overlap: bool) -> None:
    model, rows, gamma = alike(target_rows), 1 if overlap else 3, 3

    def engine(drafting: bool) -> Engine:
        runner = EagerRunner(model, rows=rows, max_len=96, margin=40)
        drafter = None
        if drafting:
            own = EagerRunner(alike(draft_rows, model), rows=rows, max_len=96, margin=40)
            drafter = ModelDrafter(own, vocab_size=target_rows, width=target_rows)
        kind = OverlappedRounds if overlap else CapturedRounds
        rounds = kind(runner, drafter, vocab_size=target_rows, lengths=(0, gamma)) if drafting else None
        if rounds is not None:
            rounds.warm_up()
        config = EngineConfig(max_rows=rows)
        return Engine(
            runner, drafter, FixedController(gamma), config, vocab_size=target_rows, captured=rounds, max_gamma=gamma
        )

    def ids(made: Engine) -> list[tuple[int, ...]]:
        params = SamplingParams(temperature=0.0, max_tokens=40)
        asked = [Request(str(i), tuple(prompt), params) for i, prompt in enumerate(prompts(target_rows))]
        return [completion.token_ids for completion in run(made, asked)]

    drafted = engine(True)
    found = ids(drafted)
    assert found == ids(engine(False))
    assert drafted.parts.drafter is not None, drafted.inactive_reason
    assert drafted.stats.accepted > 0
    if target_rows > draft_rows:
        assert any(token >= draft_rows for ids in found for token in ids)


@pytest.mark.gpu
@pytest.mark.parametrize(("target_rows", "draft_rows"), SIZES)
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_recorded_rounds(architecture: str, target_rows: int, draft_rows: int) -> None:
    """On fused kernels, which look at no id before they read a row for it, and through a model's own modules."""
    fused = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    shape = fused if architecture == "llama" else {}
    target = alike(target_rows, architecture=architecture, **shape).to("cuda")
    draft = alike(draft_rows, target, architecture=architecture, **shape).to("cuda")
    llm = LLM(target, draft, gamma=3, max_model_len=96, max_rows=3)
    assert llm.engine.parts.captured is not None
    found = answers(llm, prompts(target_rows), temperature=0.0)
    assert still_drafting(llm), llm.engine.inactive_reason
    if target_rows > draft_rows:
        assert any(token >= draft_rows for ids in found for token in ids)
    assert found == answers(LLM(target, None, max_model_len=96, max_rows=3), prompts(target_rows), temperature=0.0)


# -- the law, where ids alone cannot tell


@pytest.mark.parametrize(("target_rows", "draft_rows"), [(5, 3), (3, 5)])
def test_the_law_is_the_targets(target_rows: int, draft_rows: int) -> None:
    both = table(5, seed=1)
    runner = TableRunner(both[:draft_rows, :draft_rows, :draft_rows] + 0.8 * table(draft_rows, seed=2), rows=16)
    drafter = ModelDrafter(runner, vocab_size=target_rows, width=target_rows)
    target = both[:target_rows, :target_rows, :target_rows]
    engine = table_engine(target, drafter, gamma=2, rows=16, max_waiting=400)
    prompt = (1, target_rows - 1, 2)
    asked = [Request(str(i), prompt, SamplingParams(max_tokens=3, seed=i, verification="block")) for i in range(400)]
    counts = Counter(completion.token_ids[:2] for completion in run(engine, asked))
    law = engine.parts.runner.probabilities(prompt, 2)  # type: ignore[attr-defined]
    assert chi_squared(counts, law) > 1e-4
    assert engine.parts.drafter is drafter, engine.inactive_reason
    assert engine.stats.accepted > 100
