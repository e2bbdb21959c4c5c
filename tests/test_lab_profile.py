"""profile on tiny models: every size that was asked for, memory as it is, and warnings with figures."""

from __future__ import annotations

import json

import pytest

from headstart.lab import SystemOptions, page_of, profile
from headstart.lab.profile_record import Costs, Memory, Profile
from headstart.lab.profiling import Profiler, _warnings
from headstart.lab.report.store import envelope
from headstart.testing import tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def options() -> SystemOptions:
    target, draft = tiny_model("llama"), tiny_model("llama", num_hidden_layers=1)
    return SystemOptions(
        model=target, tokenizer=tiny_tokenizer(), draft=draft, max_model_len=256, check=False, draft_quantization=None
    )


def test_every_size_is_measured(options: SystemOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstart.lab.profiling.LENGTHS", (0, 1, 3))
    monkeypatch.setattr("headstart.lab.profiling.FEW", (0, 1))
    monkeypatch.setattr("headstart.lab.profiling.TURNS", 1)
    found = profile(options, rows=2, contexts=(8, 9999), seconds=60)
    assert [(c.rows, c.context) for c in found.costs] == [(1, 8), (2, 8)], "the longest does not fit, and is left out"
    first = found.costs[0]
    assert set(first.rounds) == {1, 2, 4}
    assert first.verify(1) == 1
    assert first.target_step > 0
    assert first.draft_step >= 0
    assert first.prefill > 0
    assert all(first.forwards[width] > 0 for width in first.rounds)
    # Two layers of the target and one of the draft: keys and values of 2 heads of 12, in float32.
    assert found.memory.token == 3 * 2 * 2 * 12 * 4
    assert found.memory.target == sum(p.numel() * 4 for p in options.model.parameters())  # type: ignore[union-attr]
    assert found.memory.held == found.memory.token * 2 * 256
    text = json.dumps(envelope(found))
    assert '"v": {"1": 1.0' in text
    assert "v(n)" in page_of(found)


def test_when_the_time_is_over_the_first_size_is_there(options: SystemOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstart.lab.profiling.LENGTHS", (0, 1))
    with Profiler(options, 2, (8,)) as profiler:
        profiler.run(1e-6)
        found = profiler.result(stopped=True)
    assert len(found.costs) == 1
    assert found.notes[0] == "there was no time for 2 rows behind 8 tokens"
    assert "Ctrl-C" in found.notes[1]


def costs(draft_step: float, wide: float = 1.3, rows: int = 1) -> Costs:
    rounds = {1: 0.010, 5: 0.010 * wide, 11: 0.010 * (1 + 2.5 * (wide - 1))}
    return Costs(rows, 64, 0.010, rounds, rounds, 0.0, draft_step, 1000.0)


def made(*each: Costs) -> Profile:
    memory = Memory(10**9, 10**8, 10**5, 0, 8, 4096, 16 * 10**9, 10**9)
    return Profile({}, {}, {"draft": "model"}, each, memory, False, 10, 1.0)


def test_a_slow_draft_is_warned_of_with_what_the_cost_model_says() -> None:
    assert not [*_warnings(made(costs(0.001)), drafts=True)], "ten times faster"
    (said,) = _warnings(made(costs(0.004)), drafts=True)
    assert "2.5 times faster" in said
    model = costs(0.004).model()
    best = max(model.speedup(gamma, 0.8) for gamma in range(1, 11))
    assert f"{best:.2f}x at alpha 0.8" in said
    assert "it pays from alpha 0." in said
    (said,) = _warnings(made(costs(0.02)), drafts=True)
    assert "it pays at no alpha" in said
    assert not [*_warnings(made(costs(0.004)), drafts=False)]


def test_targets_that_are_not_bound_by_memory_are_warned_of() -> None:
    (said,) = _warnings(made(costs(0.001, wide=3.0)), drafts=True)
    assert "takes 3.0 times as long" in said
    (said,) = _warnings(made(costs(0.001), costs(0.001, wide=2.2, rows=8)), drafts=True)
    assert "with 8 rows" in said
    assert "2.2 plain steps instead of 1.3" in said


def test_the_best_length_and_what_fits() -> None:
    cheap, dear = costs(0.0), costs(0.02)
    assert dear.best(0.9, 10) == (0, 1.0)
    gamma, speed = cheap.best(0.9, 10)
    assert gamma == 10
    assert speed == pytest.approx(sum(0.9**i for i in range(11)) / 1.75)
    assert made(cheap).at(7, 100) is not None
    assert made(cheap).memory.more_rows(4096) == int(0.9e9 / (1e5 * 4096))
