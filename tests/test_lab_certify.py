"""``certify``: it holds for sound engines, and each kind of check sees a planted fault.

Every bug in every implementation, C++ and Triton among them: ``benchmarks/lab_planted.py``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headstart.drafters import draft_sampler
from headstart.drafters.base import Drafter
from headstart.errors import InvalidParameter
from headstart.lab import System, SystemOptions, Text, certify, page_of, save
from headstart.lab.budget import Budget
from headstart.lab.certifying.audit import Answer, _race_gap, audited, tampered
from headstart.lab.certifying.certify import PROCESSED, SERVED, STRESSED, Certifier, Effort
from headstart.lab.certifying.checks import Examiner, Given
from headstart.lab.certifying.engines import Engines
from headstart.lab.certifying.evidence import Plan
from headstart.lab.certifying.laws import first_tokens, passed, places
from headstart.lab.certifying.running import Asked, answers
from headstart.lab.certifying.truth import Forwards, clocks, target_law, truth_of
from headstart.machine.slab_layer import SlabLayer
from headstart.maths import distribution, verify
from headstart.maths.chance import CounterChance
from headstart.testing import tiny_model, tiny_tokenizer
from headstart.types import SamplingParams, silent

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
PROMPTS = [(5, 9, 30, 5, 9, 30, 5), (40, 41, 42), (7, 8, 9, 60, 61, 62, 63)]
LEFT = Budget(None)


def noisy(share: float = 0.12) -> Any:
    model, generator = tiny_model("qwen3", **SIZES), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * share * parameter.std())
    return model


@pytest.fixture(scope="module")
def options() -> SystemOptions:
    return SystemOptions(
        model=tiny_model("qwen3", **SIZES),
        draft=noisy(),
        tokenizer=tiny_tokenizer(),
        draft_quantization=None,
        max_model_len=96,
        max_rows=16,
        gamma=3,
        check=False,
    )


@pytest.fixture(scope="module")
def system(options: SystemOptions) -> Iterator[System]:
    with System.open(options) as found:
        yield found


@pytest.fixture
def examiner(system: System) -> Examiner:
    return Examiner(Engines(system, 3), truth_of(system.engine, system.target, system.max_len), Plan(7), silent)


def asked(**settings: Any) -> list[Asked]:
    return [Asked(prompt, SamplingParams(max_tokens=16, **settings)) for prompt in PROMPTS]


def greedy(examiner: Examiner) -> list[Answer]:
    """What a sound engine answers."""
    return answers(examiner.engines.engine, asked(temperature=0, ignore_eos=True))[0]


# -- what sound engines get


def test_a_sound_pair_is_certified(options: SystemOptions, tmp_path: Path) -> None:
    told: list[str] = []
    effort = Effort(prompts=2, longest=12, tokens=8, samples=100, texts=2, control=400)
    found = certify(options, seconds=1.0, effort=effort, tell=told.append)
    assert found.holds, found.faults
    assert {check.rule for check in found.checks} == {"greedy", "coupled", "token", "block"}
    assert {check.company for check in found.checks} == {"alone", "together", "coming and going"}
    assert all(check.drafted for check in found.checks if check.drafter != "none")
    assert all(check.rejections for check in found.checks if check.p_value is not None)
    assert all(control.rejected for control in found.controls if control.needed)
    assert len([control for control in found.controls if control.needed]) == 3
    laws = [check for check in found.checks if check.p_value is not None]
    assert found.plan["tests"] == len(laws)
    assert all(0.1 < check.detectable < 0.7 for check in laws if check.name == "first tokens")  # type: ignore[operator]
    assert all(check.power["0.05"] < check.power["0.2"] for check in laws)
    assert any("first tokens" in text for text in told)
    paths = save(found, tmp_path)
    written = json.loads(paths[0].read_text())
    assert written["kind"] == "certify"
    assert written["results"]["holds"] is True
    page = paths[1].read_text()
    assert "It holds" in page
    assert "false-alarm rate of 0.0001" in page


def test_a_certificate_that_was_stopped_certifies_nothing(
    options: SystemOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Certifier, "_structured", stopped)
    with Certifier(options, effort=Effort(prompts=2, longest=12, tokens=8)) as certifier:
        assert not certifier.begun
        with pytest.raises(KeyboardInterrupt):
            certifier.run(1.0)
        assert certifier.begun
        found = certifier.result(stopped=True)
    assert all(check.holds for check in found.checks)
    assert not found.holds
    assert found.faults == ["it was stopped (Ctrl-C) before all checks were made"]
    assert f"It certifies nothing: it was stopped behind {len(found.checks)} checks" in page_of(found)


def test_nothing_to_certify(options: SystemOptions) -> None:
    with pytest.raises(InvalidParameter, match="nothing to certify"):
        certify(options.changed(gamma=0))


def test_a_drafter_that_fails_is_no_pass(examiner: Examiner) -> None:
    class Broken(Drafter):
        def propose(self, views: Any, budgets: Any) -> Any:
            raise RuntimeError("out of ideas")

    engine = examiner.engines.of(Broken())
    examiner.ids(Given("greedy ids", "", asked(temperature=0)), "together", engine)
    [check] = examiner.checks
    assert check.verdict == "not exercised"
    assert "out of ideas" in check.found[0]


def test_the_reference_agrees_with_the_maths_floor() -> None:
    """Two implementations of what settings make of logits."""
    source = np.random.default_rng(0)
    for params in (
        SamplingParams(temperature=0.7, top_k=9, top_p=0.8, min_p=0.02),
        SamplingParams(temperature=1.4, top_p=0.6),
        SamplingParams(temperature=0.9, min_p=0.1),
    ):
        logits = source.standard_normal(112) * 3
        warp = distribution.Warp.of([params], vocab_size=112, eos=None, device="cpu", dtype=torch.float64)
        other = distribution.probabilities(torch.tensor(logits)[None, None], warp)[0, 0].numpy()
        assert np.allclose(target_law(logits, params).p, other, atol=1e-12)


# -- planted faults, each seen by the check that is there for it


def accepts_too_often(monkeypatch: pytest.MonkeyPatch) -> None:
    right = CounterChance.accept
    monkeypatch.setattr(CounterChance, "accept", lambda self, node, p: right(self, node, (1.6 * p).clamp_max(1)))


def residual_from_p(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify._Chains, "last", lambda self, node: verify._at(self.p, node))


def other_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    right = draft_sampler.draw_tokens

    def wrong(logits: Any, warp: Any, keys: Any, **more: Any) -> Any:
        tokens, q = right(logits, warp, keys, **more)
        return tokens, None if q is None else right(logits, replace(warp, temperature=None), keys, **more)[1]

    monkeypatch.setattr(draft_sampler, "draw_tokens", wrong)


def no_penalty_for_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    right = distribution._penalties

    def wrong(x: Any, warp: Any, history: Any, tokens: Any, topology: Any) -> Any:
        if topology is not None:
            topology = replace(topology, ancestors=torch.zeros_like(topology.ancestors))
        return right(x, warp, history, tokens, topology)

    monkeypatch.setattr(distribution, "_penalties", wrong)


def stale_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    right = SlabLayer.update

    def wrong(self: Any, keys: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.is_initialized:
            return right(self, keys, values, *args, **kwargs)
        kept = self.keys.clone()
        found = right(self, keys, values, *args, **kwargs)
        self.keys.copy_(torch.where(kept != 0, kept, self.keys))
        return found

    monkeypatch.setattr(SlabLayer, "update", wrong)


@pytest.mark.parametrize("plant", [None, accepts_too_often, residual_from_p])
def test_first_tokens_of_a_drafter_that_is_often_wrong(plant: Any, examiner: Examiner, monkeypatch: Any) -> None:
    rule, name, params, branches = STRESSED[0]
    place = next(places(passed(examiner.truth, greedy(examiner)), params))
    law = first_tokens(examiner.truth, place.tokens, params, branches)
    if plant is not None:
        plant(monkeypatch)
    examiner.first_tokens(law, rule, name, LEFT, 300, own=False)
    [check] = examiner.checks
    assert check.verdict == ("holds" if plant is None else "fails"), check
    assert check.rejections > 50


@pytest.mark.parametrize("plant", [None, other_temperature])
def test_first_tokens_of_the_drafter_that_serves(plant: Any, examiner: Examiner, monkeypatch: Any) -> None:
    rule, name, params, branches = SERVED[1]
    candidates = list(places(passed(examiner.truth, greedy(examiner)), params))[:12]
    if plant is not None:
        plant(monkeypatch)
    place = examiner.disagreements(candidates, params)
    examiner.first_tokens(first_tokens(examiner.truth, place.tokens, params, branches), rule, name, LEFT, 400, own=True)
    [check] = examiner.checks
    assert check.verdict == ("holds" if plant is None else "fails"), check


@pytest.mark.parametrize(
    ("kind", "plant"),
    [
        *(("greedy", plant) for plant in (None, no_penalty_for_drafts, stale_keys)),
        ("coupled", None),
        ("coupled", stale_keys),
    ],
)
def test_tokens_that_follow(kind: str, plant: Any, examiner: Examiner, monkeypatch: Any) -> None:
    settings = PROCESSED | ({"temperature": 0} if kind == "greedy" else {"temperature": 0.9, "seed": 3})
    if plant is not None:
        plant(monkeypatch)
    examiner.ids(Given(f"{kind} ids", "", asked(ignore_eos=True, **settings)), "together")
    [check] = examiner.checks
    assert check.verdict == ("holds" if plant is None else "fails"), check
    assert check.rejections > 3


@pytest.mark.parametrize("cut", [{"top_k": 2}, {"top_p": 0.7}, {"min_p": 0.595}])
def test_a_tie_at_a_cut_is_a_tie(cut: dict[str, Any]) -> None:
    """Of two tokens that are as good as equal one is cut off; rounding says which. Others are held to their race."""
    chances = np.array([0.45, 0.27, 0.265, 0.015])
    params = SamplingParams(temperature=1.0, max_tokens=1, **cut)

    def gap(token: int, tie: float, winner: int) -> float:
        everyone = np.arange(4)
        seed = next(s for s in range(400) if (chances / clocks(4, s, 1, everyone))[:3].argmax() == winner)
        return _race_gap(np.log(chances), Answer((5,), params, (token,), seed), token, 0, tie)

    assert gap(1, 0.0, winner=1) == 0.0
    assert gap(2, 0.0, winner=2) == np.inf, "it is cut off"
    assert gap(2, 0.01, winner=2) == 0.0, "by less than rounding"
    assert gap(2, 0.004, winner=2) == np.inf, "by more than that"
    assert gap(0, 0.0, winner=1) > 0.0
    assert gap(0, 0.01, winner=1) == 0.0, "the winner may have been cut off"
    assert gap(1, 0.01, winner=0) > 0.0, "far from any cut there is no excuse"
    assert gap(3, 0.01, winner=2) == np.inf


def test_wrong_log_probabilities_and_a_wrong_token_are_seen(examiner: Examiner) -> None:
    [answer, *_] = answers(examiner.engines.engine, asked(temperature=0, ignore_eos=True, logprobs=2))[0]
    right = audited(answer, examiner.truth)
    assert (right.wrong, right.positions) == (0, 16)
    assert right.logprobs >= 32
    assert answer.logprobs is not None
    lie = replace(answer.logprobs[3], logprob=answer.logprobs[3].logprob + 0.05)
    assert audited(replace(answer, logprobs=(*answer.logprobs[:3], lie, *answer.logprobs[4:])), examiner.truth).wrong
    assert audited(tampered([answer], examiner.truth), examiner.truth).wrong
    assert "It does not hold" in page_of(replace(_certificate(examiner), checks=()))


def test_the_shapes_of_rounds_are_asked(options: SystemOptions) -> None:
    with Certifier(options, effort=Effort(prompts=2, tokens=8)) as certifier:
        assert certifier.truth.shapes == (Forwards(1, 1), Forwards(8, 1), Forwards(1, 4), Forwards(8, 4))


@pytest.mark.parametrize("plant", [None, stale_keys])
def test_forwards_of_any_shape_say_the_same(plant: Any, system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, on the engine's own rows, whatever ran there before, and whatever became of its keys."""
    truth = truth_of(system.engine, system.target, system.max_len)
    if plant is not None:
        plant(monkeypatch)
        answers(system.engine, asked(temperature=0, ignore_eos=True))
    text = [5 + 3 * i % 40 for i in range(14)]
    usual = truth.after(text, 6)
    for shape in (Forwards(1, 1), Forwards(4, 1), Forwards(1, 4), Forwards(4, 3)):
        assert np.allclose(truth.by_kernels(text, 6, shape), usual, atol=1e-4), shape


def test_prompts_that_cannot_be_read_in_are_left_out(options: SystemOptions) -> None:
    long = Text("a", ("x" * 100_000,))
    with Certifier(options, [long, Text("b", ("Hello",)), long], effort=Effort(tokens=8)) as certifier:
        assert len(certifier._asked_for) == 1
    with pytest.raises(InvalidParameter, match=r"prompts are longer than max_model_len \(96\), all of them"):
        Certifier(options, [long, long], effort=Effort(tokens=8))


def test_a_slow_machine_asks_fewer_prompts_and_says_so(options: SystemOptions, examiner: Examiner) -> None:
    """The first check takes a twentieth of the time: ten like it would take more than the tests leave."""
    examiner.ids(Given("plain decoding", "", asked(temperature=0, speculate=False)), "together", drafts=False)
    [check] = examiner.checks
    with Certifier(options, effort=Effort(tokens=8)) as certifier:
        prompts, certifier.budget = certifier._asked_for, Budget(20.0)
        certifier.examiner.checks = [replace(check, seconds=0.7)]
        assert certifier._affordable(prompts) == prompts
        assert not certifier.skipped
        certifier.examiner.checks = [replace(check, seconds=1.0)]
        assert certifier._affordable(prompts) == prompts[:4]
        certifier.examiner.checks = [replace(check, seconds=9.0)]
        assert certifier._affordable(prompts) == prompts[:3], "never fewer"
        assert certifier.result().skipped[0].startswith("2 of 6 prompts: checks of tokens would have taken too long")


def _certificate(examiner: Examiner) -> Any:
    from headstart.lab import Certificate

    return Certificate({}, {}, {}, "", True, 1e-4, {**dict.fromkeys(("tests", "fails_under", "repeated_under"), 1.0),
                       "times_the_samples": 3.0, "then_fails_under": 1.0}, (), (), ())  # fmt: skip
