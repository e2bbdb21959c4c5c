"""The benchmarks of traffic and of drafts that do not pay: they run on tiny models, and measure what they say."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest

from headstart import LLM
from headstart.control.controller import FixedController
from headstart.testing import tiny_model

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)


@pytest.fixture
def traffic(benchmarks: None) -> ModuleType:
    import traffic

    return traffic


def test_the_load_is_the_one_that_figures_were_given_for(traffic: ModuleType) -> None:
    load = traffic.Load.of(96, 20, 200, traffic.WRITES)
    assert sum(load.tokens) == 8208
    assert abs(sum(load.lengths) - 7507) < 10
    assert all(20 <= length <= 200 for length in load.lengths)
    assert set(load.tokens) == {24, 64, 160}
    times = load.arrivals(12.0)
    assert times == sorted(times) == load.arrivals(12.0)
    assert times[-1] == pytest.approx(96 / 12.0, rel=0.25)


def test_a_request_that_is_not_due_waits_and_its_clock_starts_when_it_is(traffic: ModuleType) -> None:
    llm = LLM(tiny_model("llama"), None, check=False, max_rows=1, max_model_len=64, quantization=None)
    found = traffic.drive(llm, [[5, 6, 7], [8, 9]], [4, 3], [0.0, 0.5])
    assert (found["tokens"], found["requests"]) == (7, 2)
    assert found["wall_seconds"] >= 0.5
    assert found["first_token_ms"]["max"] <= 1e3 * found["wall_seconds"]
    assert (found["tau"], found["alpha"], found["rows_in_use"]) == (1.0, None, pytest.approx(1.0))
    spent = found["seconds"]
    assert sum(spent.values()) == pytest.approx(found["wall_seconds"], rel=1e-6)
    assert 0 < spent["idle"] < 0.6
    assert min(spent["prefill"], spent["verify"]) > 0


def test_traffic_runs_and_is_drawn(traffic: ModuleType, tmp_path: Path) -> None:
    small = ["--requests", "4", "--rows", "2", "--repeats", "1", "--shares", "1"]
    traffic.main(["--quick", "--modes", "plain", "auto", *small, "--out", str(tmp_path)])
    found = json.loads((tmp_path / "traffic-quick.json").read_text())
    assert found["machine"]["torch"]
    assert found["settings"]["requests"] == 4
    assert set(found["closed"]) == {"plain", "auto"}
    [load] = found["arrivals"]["loads"]
    assert load["rate"] == found["arrivals"]["capacity"] == found["closed"]["plain"]["requests_per_second"]
    assert all(run["gap_ms"]["p99"] >= run["gap_ms"]["median"] > 0 for run in load["modes"].values())
    assert found["even"]["modes"]["plain"]["tokens"] == 4 * 8
    assert (tmp_path / "traffic-quick.png").stat().st_size > 10_000


def test_never_slower_and_near_best_run(benchmarks: None, tmp_path: Path) -> None:
    import never_slower

    cases = ["--batches", "2", "--temperatures", "1.5", "--turns", "2", "--tokens", "8"]
    best = ["--alphas", "0.75", "--gammas", "1", "3"]
    never_slower.main(["--quick", "--parts", "slower", "best", *cases, *best, "--out", str(tmp_path)])
    found = json.loads((tmp_path / "never-slower-quick.json").read_text())
    assert [case["draft"] for case in found["slower"]] == ["useless", "as large", "lookup", "off"]
    for case in found["slower"]:
        assert case["turns"] == 2
        assert case["interval"][0] <= case["over_plain"] <= case["interval"][1]
    assert found["slower"][-1]["drafted_per_round"] == 0  # off: no request wants a draft
    [case] = found["best"]
    assert case["agreement"] == pytest.approx(0.75, abs=0.1)
    assert set(case["one_run_tokens_per_second"]) == {"0", "1", "3"}
    assert case["best_gamma"] in (1, 3)


def test_a_fixed_draft_length_is_given_back_and_no_prompt_is_warm(benchmarks: None) -> None:
    from near_best import Contest

    target, draft = tiny_model("llama"), tiny_model("llama")
    llm = LLM(target, draft, check=False, max_rows=1, max_model_len=64, quantization=None, draft_quantization=None)
    own = llm.engine.parts.controller
    contest = Contest(llm, llm, lambda turn: [[5, 6, 7, 8]], 6)
    drafted, read = [0], [0]
    for gamma in (2, 0):
        contest.run(llm, 0, gamma)
        drafted.append(llm.stats.drafted)
        read.append(llm.stats.prefill_tokens)
    assert 0 < drafted[1] == drafted[2]
    assert llm.engine.parts.controller is own
    assert not isinstance(own, FixedController)
    assert 0 < read[1] == read[2] - read[1]


def test_intervals_and_quantiles(benchmarks: None) -> None:
    from common import interval, quantile

    assert interval(range(9)) == (1, 7)  # 96% by the binomial law
    assert interval([3, 1, 2]) == (1, 3)
    assert quantile(range(1, 101), 0.99) == 99
    assert quantile([5], 0.99) == 5
