"""One row near the end of its context: it drafts less, and the others go on as before.

Real models whose context really ends there, so a position, a slot or a length past the end cannot pass unnoticed.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import pytest
import torch
from slab_tools import check_slab
from test_drafters_head import head as trained_head
from test_drafters_head import target as head_target
from transformers import PreTrainedModel

from headstart import LLM, SamplingParams
from headstart.config import EngineConfig
from headstart.control.controller import FixedController
from headstart.drafters.base import Drafter
from headstart.drafters.head import HeadDrafter
from headstart.drafters.lookup import LookupDrafter
from headstart.drafters.model import ModelDrafter
from headstart.drafters.portfolio import PortfolioDrafter
from headstart.engine.captured import CapturedRounds
from headstart.engine.engine import Engine
from headstart.engine.overlap import OverlappedRounds
from headstart.machine.runner import EagerRunner
from headstart.testing import TINY_VOCABULARY, tiny_model
from headstart.types import Request, Round

LONGEST = 40
GAMMA = 5
# Prompt lengths of rows that run together: far from the end, near it, and one token before it.
TOGETHER = [(22, 36), (36, 22), (21, 39), (30, 37), (38, 22, 35), (24, 39, 39), (23, 33, 34, 36), (39, 38, 37, 22)]
POSITIONS = {"llama": "max_position_embeddings", "gpt2": "n_positions"}


@lru_cache
def model(architecture: str, seed: int = 0) -> PreTrainedModel:
    return tiny_model(architecture, seed=seed, **{POSITIONS[architecture]: LONGEST})


@cache
def undrafted(target: PreTrainedModel) -> LLM:
    return LLM(target, None, max_model_len=LONGEST, check=False)


def prompt(length: int, which: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(100 * which + length)
    return torch.randint(3, 30, (length,), generator=generator).tolist()


def to_the_end(length: int, **params: Any) -> SamplingParams:
    return SamplingParams(max_tokens=LONGEST - length, ignore_eos=True, **{"temperature": 0.0} | params)


def served_together(engine: Engine, plain: LLM, lengths: tuple[int, ...], **params: Any) -> list[Round]:
    """Run prompts of these lengths to the end of the context, together; every text must be the plain one."""
    seen: list[Round] = []
    engine.listen(seen.extend)
    asked = [(prompt(n, i), to_the_end(n, **params)) for i, n in enumerate(lengths)]
    handles = [engine.submit(Request(str(i), tuple(ids), p)) for i, (ids, p) in enumerate(asked)]
    while not engine.idle:
        engine.step()
        check_slab(engine.parts.runner.slab)
    assert engine.inactive_reason is None
    for handle, (ids, p) in zip(handles, asked, strict=True):
        handle.raise_failure()
        assert handle.completion().token_ids == alone(plain, tuple(ids), p), lengths
        assert handle.completion().finish_reason == "length"
    return seen


@cache
def alone(plain: LLM, ids: tuple[int, ...], params: SamplingParams) -> tuple[int, ...]:
    return plain.generate(list(ids), params).token_ids


def within_reach(seen: list[Round], lengths: tuple[int, ...]) -> None:
    """No row drafted past its own end, and a row with room drafted as far as it was told to."""
    held = {f"{i}/0": n for i, n in enumerate(lengths)}
    for record in seen:
        room = LONGEST - held[record.sequence]
        assert record.drafted <= max(0, room - 1)
        held[record.sequence] += record.emitted
    assert set(held.values()) == {LONGEST}


@pytest.mark.parametrize(("architecture", "gamma"), [("llama", 1), ("llama", GAMMA), ("llama", 12), ("gpt2", GAMMA)])
def test_a_draft_model_stays(architecture: str, gamma: int) -> None:
    target, draft = model(architecture), model(architecture, seed=3)
    plain = undrafted(target)
    llm = LLM(target, draft, gamma=gamma, max_rows=4, max_model_len=LONGEST, check=False)
    for i, lengths in enumerate(TOGETHER):
        params = {"temperature": 0.8, "seed": 4, "verification": "coupled"} if i % 2 else {}
        seen = served_together(llm.engine, plain, lengths, **params)
        within_reach(seen, lengths)
        if min(lengths) < 25:
            assert max(r.drafted for r in seen) == gamma


def test_the_two_prompts_of_the_report() -> None:
    """The short one goes on drafting with all five tokens when the long one is through."""
    llm = LLM(model("llama"), model("llama", seed=3), gamma=5, max_rows=2, max_model_len=LONGEST, check=False)
    seen: list[Round] = []
    llm.engine.listen(seen.extend)
    llm.generate([prompt(3), prompt(36)], [to_the_end(3), to_the_end(36)])
    assert llm.engine.inactive_reason is None
    assert llm.drafter_name == "model"
    longest = [r.drafted for r in seen if r.rows == 1 and not r.prefill]
    assert longest.count(5) > 5


def drafter(kind: str, runner: EagerRunner) -> Drafter:
    def made(branch: int = 1) -> HeadDrafter:
        return HeadDrafter(trained_head(), runner, vocab_size=TINY_VOCABULARY, min_chance_to_extend=0.0, branch=branch)

    if kind == "portfolio":
        return PortfolioDrafter(made(), lambda views, limits: [min(GAMMA, limit) for limit in limits])
    return {"lookup": LookupDrafter, "head": made, "tree": lambda: made(branch=3)}[kind]()


@pytest.mark.parametrize("kind", ["lookup", "head", "tree", "portfolio"])
@pytest.mark.parametrize("gamma", [1, GAMMA])
def test_every_other_drafter_stays_too(kind: str, gamma: int) -> None:
    plain = undrafted(head_target())
    runner = EagerRunner(head_target(), rows=4, max_len=LONGEST, margin=2 * gamma + 4, probe=False)
    config = EngineConfig(max_rows=4)
    engine = Engine(runner, drafter(kind, runner), FixedController(gamma), config, vocab_size=TINY_VOCABULARY)
    for lengths in TOGETHER:
        within_reach(served_together(engine, plain, lengths), lengths)
    assert engine.stats.drafted > 20


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("architecture", POSITIONS)
def test_rounds_on_the_device(architecture: str, overlap: bool) -> None:
    """Captured rounds draft the same number for every row; what is past a row's end is never taken in."""
    target, draft = model(architecture), model(architecture, seed=3)
    plain = undrafted(target)
    sizes: dict[str, Any] = {"rows": 4, "max_len": LONGEST, "margin": 2 * (GAMMA + 1) + 2, "probe": False}
    runner, own = EagerRunner(target, **sizes), EagerRunner(draft, **sizes)
    guesser = ModelDrafter(own, vocab_size=TINY_VOCABULARY, width=TINY_VOCABULARY)
    kind = OverlappedRounds if overlap else CapturedRounds
    rounds = kind(runner, guesser, vocab_size=TINY_VOCABULARY, lengths=(0, GAMMA))
    rounds.warm_up()
    engine = Engine(
        runner,
        guesser,
        FixedController(GAMMA),
        EngineConfig(max_rows=4),
        vocab_size=TINY_VOCABULARY,
        captured=rounds,
        max_gamma=GAMMA,
    )
    for lengths in TOGETHER:
        served_together(engine, plain, lengths)
        check_slab(own.slab)
    assert engine.parts.drafter is guesser
