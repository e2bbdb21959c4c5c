"""A draft's weights get 4 bits or 8, as measures better beside its target; what is chosen is kept with the pair."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headstart import LLM, SamplingParams, assembly
from headstart.machine.cpu.build import why_not
from headstart.machine.cpu.open import open_packed
from headstart.machine.cpu.runner import CpuRunner
from headstart.machine.cpu.thread_count import Timed
from headstart.machine.load import pair_probe
from headstart.machine.load.loading import load
from headstart.machine.load.pair_probe import Figures, Promise, probe_text, recall, remember
from headstart.machine.load.pair_probe import measure as measured
from headstart.testing import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.skipif(why_not() is not None, reason="the CPU kernels are not here")

SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
SHAPE |= {"head_dim": 32, "max_position_embeddings": 512}


class Clock:
    """Says how long steps take: of the target, and of a draft by its bits. The work itself is done."""

    def __init__(self, target: float, int8: float, int4: float, *, busy: bool = False) -> None:
        self.seconds = {"target": target, "int8": int8, "int4": int4}
        self.busy = busy
        self.asked: list[str] = []

    def timed(self, step: Callable[[int], object], threads: int) -> Timed:
        step(threads)
        runner = step.args[0]  # type: ignore[attr-defined]
        kind = runner.packed.plan.kind if isinstance(runner, CpuRunner) else ""
        kind = kind if kind in self.seconds else "target"
        seconds = self.seconds[kind] * (pair_probe.STEPS if kind != "target" else 1)
        self.asked.append(kind)
        return Timed(seconds, seconds * threads * (0.5 if self.busy else 1.0), threads)


@pytest.fixture
def measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Clock]:
    """Tiny drafts are measured too, by a clock of the test's."""
    kernels = assembly.pair_file("x").parent.parent / "kernels"
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    if kernels.is_dir():  # compiling takes half a minute
        (tmp_path / "cache" / "kernels").symlink_to(kernels)
    monkeypatch.setattr(assembly, "LEAST_PARAMETERS", 0)

    def started(*seconds: float, busy: bool = False) -> Clock:
        clock = Clock(*seconds, busy=busy)
        monkeypatch.setattr(pair_probe, "timed", clock.timed)
        return clock

    return started


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A target and a draft on disk."""
    found = []
    for name, seed in (("target", 0), ("draft", 0)):
        path = tmp_path_factory.mktemp(name)
        tiny_model("llama", seed=seed, **SHAPE).save_pretrained(path)
        tiny_tokenizer().save_pretrained(path)
        found.append(str(path))
    return found[0], found[1]


def opened(folders: tuple[str, str], **settings: object) -> LLM:
    return LLM(*folders, max_rows=1, max_model_len=300, check=False, threads=1, **settings)  # type: ignore[arg-type]


def bits(llm: LLM) -> str:
    return str(llm.engine.parts.drafter.runner.packed.plan.kind)  # type: ignore[union-attr]


def kept() -> list[Path]:
    return list((pair_probe.cache_folder() / "drafts").glob("*.json"))


def test_the_faster_draft_is_chosen_and_kept_with_the_pair(
    measure: Callable[..., Clock], folders: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    clock = measure(10.0, 9.0, 0.5)
    with caplog.at_level(logging.INFO, pair_probe.__name__):
        llm = opened(folders)
    assert bits(llm) == "int4"
    assert len(kept()) == 1
    said = next(note for note in llm.report.notes if note.startswith("the draft's weights are int4"))
    assert [record.getMessage() for record in caplog.records] == [said]
    assert {"int8", "int4", "target"} == set(clock.asked)
    packed = [path.name for path in (pair_probe.cache_folder() / "packed").iterdir()]
    assert [("int4" in name, "int8" in name) for name in packed] == [(True, False)]  # only what runs is kept

    again = measure(10.0, 1.0, 9.0)  # would say otherwise, but is not asked
    llm = opened(folders)
    assert bits(llm) == "int4"
    assert not again.asked
    assert said in llm.report.notes
    text = llm.generate([5, 6, 7], SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)).token_ids
    plain = LLM(folders[0], None, max_rows=1, max_model_len=300, check=False, threads=1)
    assert plain.generate([5, 6, 7], SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)).token_ids == text


def test_where_four_bits_save_nothing_it_is_eight(measure: Callable[..., Clock], folders: tuple[str, str]) -> None:
    measure(10.0, 2.0, 2.5)
    assert bits(opened(folders)) == "int8"
    (note,) = (note for note in opened(folders).report.notes if "measured beside this target" in note)
    assert note.startswith("the draft's weights are int8")


def test_what_a_busy_machine_said_is_used_but_not_kept(measure: Callable[..., Clock], folders: tuple[str, str]) -> None:
    measure(10.0, 9.0, 0.5, busy=True)
    llm = opened(folders)
    assert bits(llm) == "int4"
    assert any("the next load measures again" in note for note in llm.report.notes)
    assert not kept()
    clock = measure(10.0, 2.0, 4.0)
    assert bits(opened(folders)) == "int8"
    assert clock.asked
    assert len(kept()) == 1


def test_another_target_is_another_pair(
    measure: Callable[..., Clock], folders: tuple[str, str], tmp_path: Path
) -> None:
    measure(10.0, 9.0, 0.5)
    assert bits(opened(folders)) == "int4"
    tiny_model("llama", seed=3, **SHAPE).save_pretrained(tmp_path / "other")
    tiny_tokenizer().save_pretrained(tmp_path / "other")
    clock = measure(10.0, 2.0, 4.0)
    assert bits(opened((str(tmp_path / "other"), folders[1]))) == "int8"
    assert clock.asked
    assert len(kept()) == 2


def test_live_models_are_measured_and_leave_no_trace(measure: Callable[..., Clock]) -> None:
    clock = measure(10.0, 9.0, 0.5)
    llm = LLM(tiny_model("llama", **SHAPE), tiny_model("llama", **SHAPE), max_rows=1, max_model_len=300, threads=1)
    assert bits(llm) == "int4"
    assert clock.asked
    assert not kept()


def test_bits_that_were_asked_for_stay(measure: Callable[..., Clock], folders: tuple[str, str]) -> None:
    clock = measure(10.0, 9.0, 0.5)
    llm = opened(folders, draft_quantization="int8")
    assert bits(llm) == "int8"
    assert "int4" not in clock.asked
    assert any(note.startswith("the draft, as measured beside this target") for note in llm.report.notes)
    assert bits(opened(folders)) == "int4"  # and are another matter


def test_a_tiny_draft_stays_int8(
    measure: Callable[..., Clock], folders: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = measure(10.0, 9.0, 0.5)
    monkeypatch.setattr(assembly, "LEAST_PARAMETERS", pair_probe.LEAST_PARAMETERS)
    assert bits(opened(folders)) == "int8"
    assert not clock.asked


def test_alpha_is_that_of_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worse guesses are seen, though their steps cost the same; a draft that is its target agrees always."""
    monkeypatch.setattr(pair_probe, "timed", Clock(10.0, 2.0, 2.0).timed)
    same, other = (load(tiny_model("llama", seed=seed, **SHAPE)) for seed in (0, 1))
    short = {"rows": 1, "max_len": 300, "margin": 1, "probe": False, "threads": 1}
    target = open_packed(same, "int8", **short)  # type: ignore[arg-type]
    twin = open_packed(same, "int8", **short)  # type: ignore[arg-type]
    stranger = open_packed(other, "int4", **short)  # type: ignore[arg-type]
    text = probe_text(target, None, target.vocab_size)
    assert len(text) == pair_probe.TOKENS
    found = measured(target, {"int8": twin, "int4": stranger}, text, 4)
    assert found is not None
    assert found.kind == "int8"
    assert found.figures["int8"].alpha == pytest.approx(1.0, abs=1e-5)
    line = torch.tensor([text])
    p, q = (runner.forward(slice(0, 1), line, [0])[0].softmax(-1) for runner in (target, stranger))
    assert found.figures["int4"].alpha == pytest.approx(float(torch.minimum(p, q).sum(-1).mean()), abs=1e-5)


def test_nothing_to_compare_chooses_nothing() -> None:
    """Too little text, or a model that says no numbers."""
    short = {"rows": 1, "max_len": 64, "margin": 1, "probe": False, "threads": 1}
    model = tiny_model("llama", **SHAPE)
    runner = open_packed(load(model), "int8", **short)  # type: ignore[arg-type]
    assert measured(runner, {"int8": runner}, [1] * (pair_probe.FEWEST - 1), 4) is None
    with torch.no_grad():
        model.model.norm.weight[3] = float("nan")
    broken = open_packed(load(model), "int8", **short)  # type: ignore[arg-type]
    assert measured(runner, {"int8": broken}, [1] * pair_probe.FEWEST, 4) is None
    assert len(probe_text(broken, None, 100)) < pair_probe.FEWEST


def test_what_cannot_be_read_is_measured_again(tmp_path: Path) -> None:
    figures = {"int8": Figures(0.8, 0.7, 0.004), "int4": Figures(0.8, 0.69, 0.003)}
    promise = Promise(0.04, {1: 1.0, 5: 1.2}, figures, 8)
    assert promise.kind == "int4"
    remember(tmp_path / "a.json", promise)
    assert recall(tmp_path / "a.json") == promise
    remember(tmp_path / "doubted.json", replace(promise, sure=False))
    assert not (tmp_path / "doubted.json").exists()
    whole = (tmp_path / "a.json").read_text()
    broken = [whole.replace(a, b) for a, b in (("0.7", '"x"'), ('"v"', '"w"'), ("0.04,", "0,"), ("0.69,", ""))]
    assert all(text != whole for text in broken)
    broken += [whole.replace("0.04,", odd) for odd in ("NaN,", "-0.04,", "Infinity,")]
    for text in ("", "[]", "[" * 100_000, whole[:-5], *broken):
        (tmp_path / "b.json").write_text(text)
        assert recall(tmp_path / "b.json") is None, text[:300]
    assert recall(None) is None


def test_a_draft_of_fixed_bits_is_told_without_their_name() -> None:
    promise = Promise(0.04, {1: 1.0, 9: 1.2}, {"own": Figures(0.7, 0.75, 0.004)}, 4)
    assert str(promise).startswith("the draft, as measured beside this target; expected over plain decoding: 2.")
