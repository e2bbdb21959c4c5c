"""advise: candidates, symptoms and the recommendation by hand; all of it on tiny models."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from gguf_files import write_gguf

from headstart.drafters.base import Drafter
from headstart.errors import InvalidParameter
from headstart.lab import advise, advising, confirming, page_of
from headstart.lab import candidates as room
from headstart.lab.advice_record import COLUMNS, AdviseSettings, Outlook
from headstart.lab.advising import Adviser
from headstart.lab.candidates import Candidate, candidates
from headstart.lab.catalogue import families, known_drafts
from headstart.lab.predict import Prediction
from headstart.lab.recommending import command_line, python_line, recommended, seen
from headstart.lab.statistics import Interval, Ratio
from headstart.lab.symptoms import Seen, long_prompts, memory_tight, symptoms
from headstart.lab.system import System, SystemOptions
from headstart.lab.texts import Text
from headstart.testing import tiny_model, tiny_tokenizer

# -- the catalogue ------------------------------------------------------------------------------------------------


def test_the_catalogue_is_in_order() -> None:
    found = families()
    assert len(found["families"]) >= 15
    for family in found["families"]:
        ids = [member["id"] for member in family["members"]]
        assert len(set(ids)) == len(ids)
        assert all(member["billions"] > 0 and "/" in member["id"] for member in family["members"])
        assert not family["verified"], "no tokenizers of this family were compared yet: say here where they were"
    assert {head["draft"] for head in found["heads"] if head["verified"]} == {"auto"}


def test_known_drafts_for_a_target() -> None:
    found = known_drafts("meta-llama/Llama-3.1-8B-Instruct")
    assert found[0].draft == "meta-llama/Llama-3.2-1B-Instruct", "tuned alike, and the smallest"
    heads = [known for known in found if known.kind == "eagle3"]
    assert heads
    assert not any(head.loadable for head in heads)
    assert all("cannot load it" in head.sentence and "unverified" in head.sentence for head in heads)
    assert known_drafts("somebody/unheard-of") == []
    cached = "/home/me/.cache/huggingface/hub/models--Qwen--Qwen2.5-32B-Instruct/snapshots/abc"
    assert known_drafts(cached)[0].draft == "Qwen/Qwen2.5-0.5B-Instruct"
    assert all(known.kind == "model" for known in known_drafts("Qwen/Qwen2.5-32B-Instruct"))


# -- candidates ---------------------------------------------------------------------------------------------------


def test_candidates_come_from_the_registry_and_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "registered_drafters", lambda: {"lookup": "a:B", "of-a-plug-in": "c:D"})
    found, _ = candidates("somebody/unheard-of", ["some/draft", "lookup"], device="cpu")
    names = [(one.name, one.quantization) for one in found]
    assert names == [
        *(("lookup", "auto"), ("of-a-plug-in", "auto")),
        *(("some/draft (int8)", "int8"), ("some/draft (int4)", "int4")),
    ]
    found, _ = candidates("somebody/unheard-of", ["some/draft"], device="cuda")
    assert [one.name for one in found][2:] == ["some/draft", "some/draft (int8)"]
    assert found[2].settings == {"draft_quantization": None}


def test_a_gguf_draft_is_a_candidate_with_its_own_bits(tmp_path: Path) -> None:
    """On a CPU, and first: so it runs where nothing is asked for. The line to run then names no quantization."""
    model = tiny_model("llama", hidden_size=64, intermediate_size=64)
    path = str(write_gguf(tmp_path / "d.gguf", model, kind="Q8_0"))

    def kinds(draft: str = path, device: str = "cpu", **more: Any) -> list[str]:
        return [one.quantization for one in candidates(None, [draft], device=device, **more)[0] if one.kind == "model"]

    assert kinds() == ["auto", "int8", "int4"]
    assert kinds(device="cuda") == ["none", "int8"]
    assert kinds(quantization="int8") == ["int8"]
    assert kinds(dtype="float32") == ["int8", "int4"]
    assert kinds(str(write_gguf(tmp_path / "f.gguf", model))) == ["int8", "int4"]
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    assert kinds(str(tmp_path / "broken.gguf")) == ["int8", "int4"]
    own = next(one for one in candidates(None, [path], device="cpu")[0] if one.kind == "model")
    assert own.name == "d.gguf"
    assert own.settings == {"draft_quantization": "auto"}
    found = recommended(SystemOptions(model="T"), {"d.gguf": own}, {"d.gguf": outlook("d.gguf", 1.5)}, 1, 0.0)
    assert found.command == f"headstart serve --model T --draft {path}"


def test_without_candidates_the_catalogue_proposes() -> None:
    found, proposals = candidates("meta-llama/Llama-3.1-8B-Instruct", None, device="cpu")
    assert [one.name for one in found] == ["lookup"], "nothing else lies on this machine"
    assert any("Llama-3.2-1B-Instruct" in line for line in proposals)
    assert any("EAGLE3" in line and "cannot load" in line for line in proposals)


def test_a_proposal_is_verified_by_a_tokenizer_that_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two drafts only the tokenizers lie in the hub's cache: one is the target's, the other is not."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    for size, tokenizer in (("0.5", tiny_tokenizer()), ("1.5", tiny_tokenizer(shuffle=4))):
        folder = tmp_path / f"models--Qwen--Qwen2.5-{size}B-Instruct"
        tokenizer.save_pretrained(folder / "snapshots" / "abc")
        tiny_model("llama").config.save_pretrained(folder / "snapshots" / "abc")
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text("abc")
    found, proposals = candidates("Qwen/Qwen2.5-7B-Instruct", None, device="cpu", tokenizer=tiny_tokenizer())
    assert [one.name for one in found] == ["lookup"], "without weights there is nothing to measure"
    same, other, *rest = proposals
    assert "0.5B-Instruct" in same
    assert same.endswith("the tokenizers are the same")
    assert "not for this target, though the catalogue says so: they use different tokenizers: token 3" in other
    assert rest
    assert all("unverified" in line for line in rest)


def test_the_shipped_head_is_a_candidate_of_the_embedded_model() -> None:
    found, _ = candidates(None, None, device="cpu")
    assert [one.name for one in found] == ["lookup", "auto"]


# -- symptoms -----------------------------------------------------------------------------------------------------

WELL = Seen("d", 1, 0.0, 1.8, alpha=0.8, step=0.1, wider=0.05)


@pytest.mark.parametrize(
    ("figures", "name"),
    [
        (WELL, None),
        (replace(WELL, alpha=0.4), "d: alpha under 0.5"),
        (replace(WELL, speedup=1.0, step=0.4), "d: alpha high and no speed-up"),
        (replace(WELL, rows=32, speedup=1.0, fewer=1.6, alpha=0.7, wider=0.3), "d: large batches"),
        (replace(WELL, temperature=1.0, greedy_alpha=0.95), "d: high temperature"),
    ],
)
def test_symptoms(figures: Seen, name: str | None) -> None:
    assert [symptom.name for symptom in symptoms(figures)] == ([name] if name else [])


def test_symptoms_say_figures() -> None:
    (slow,) = symptoms(replace(WELL, speedup=1.02, step=0.4))
    assert "40%" in slow.figures
    assert "too slow" in slow.advice
    (steep,) = symptoms(replace(WELL, speedup=1.02, wider=0.3))
    assert "wider forward" in steep.advice
    assert memory_tight(9 * 2**30, 10 * 2**30, 8, 4096) is not None
    assert memory_tight(5 * 2**30, 10 * 2**30, 8, 4096) is None
    assert "20%" in long_prompts(8000, {"target": 1e-4, "draft": 2e-5}).figures  # type: ignore[union-attr]
    assert long_prompts(100, {}) is None


# -- the recommendation -------------------------------------------------------------------------------------------

COSTS = {
    "1": {"forward_ms": {"1": 10.0, "2": 10.5}, "draft_start_ms": 1.0, "draft_step_ms": 1.0},
    "plain": {"1": {"forward_ms": {"1": 10.0}}},
}


def outlook(name: str, predicted: float, measured: float | None = None, alpha: float = 0.7) -> Outlook:
    sure = Interval(predicted * 0.9, predicted, predicted * 1.1)
    found = Prediction("auto", 1, 0.0, sure, 2.0, alpha, 0.2, None, {4: 1.0})
    ratio = None if measured is None else Ratio(measured, Interval(measured, measured, measured), None, 4)
    done = {(1, 0.0): ratio} if ratio is not None else {}
    return Outlook(name, "model", (), None, {"0": [alpha, alpha]}, COSTS, (found,), done)


def recommend(*outlooks: Outlook) -> object:
    known = {one.name: Candidate(one.name, "model", one.name, "int8") for one in outlooks}
    return recommended(SystemOptions(model="T"), known, {one.name: one for one in outlooks}, 1, 0.0)


def test_what_was_run_counts_more_than_what_was_predicted() -> None:
    found = recommend(outlook("a", 2.0, 1.3), outlook("b", 1.6, 1.5), outlook("c", 1.9))
    assert found.candidate == "b"  # type: ignore[attr-defined]
    assert found.confirmed  # type: ignore[attr-defined]
    assert found.command == "headstart serve --model T --draft b --draft-quantization int8"  # type: ignore[attr-defined]
    assert "1.50 times" in found.sentence  # type: ignore[attr-defined]
    assert recommend(outlook("a", 2.0), outlook("c", 1.9)).candidate == "a"  # type: ignore[attr-defined]


def ran(name: str, predicted: float, *sure: float) -> Outlook:
    """One that was run, with the interval of what came of it."""
    found = outlook(name, predicted, sure[1])
    return replace(found, measured={(1, 0.0): Ratio(sure[1], Interval(*sure), None, 4)})


def test_a_run_that_may_be_a_loss_does_not_beat_a_better_prediction() -> None:
    found = recommend(ran("lookup", 1.5, 0.80, 1.19, 1.77), outlook("small", 1.37))
    assert (found.candidate, found.confirmed) == ("small", False)  # type: ignore[attr-defined]
    assert "small was not run" in found.sentence  # type: ignore[attr-defined]
    assert "lookup was run (1.19 times; 90%: 0.80 to 1.77)" in found.sentence  # type: ignore[attr-defined]
    unsure = recommend(ran("lookup", 1.5, 0.80, 1.19, 1.77), outlook("small", 1.1))
    assert unsure.candidate == "lookup", "this prediction may be a loss, too"  # type: ignore[attr-defined]
    both = recommend(ran("a", 1.5, 0.8, 1.3, 1.8), ran("b", 1.5, 1.1, 1.2, 1.3), outlook("small", 1.4))
    assert (both.candidate, both.confirmed) == ("b", True), "a run that is a gain"  # type: ignore[attr-defined]
    assert "small, of which more is predicted (1.40 times; 90%: 1.26 to 1.54), was not run" in both.sentence  # type: ignore[attr-defined]
    assert recommend(ran("a", 1.2, 0.8, 0.9, 1.0), outlook("small", 1.4)).candidate == "small"  # type: ignore[attr-defined]


def test_what_was_not_run_is_said() -> None:
    assert "a was not run" in recommend(outlook("a", 2.0), outlook("c", 1.9)).sentence  # type: ignore[attr-defined]
    assert "not run" not in recommend(outlook("a", 2.0, 1.5), outlook("c", 1.4)).sentence  # type: ignore[attr-defined]
    assert recommend(outlook("a", 1.3, 1.02), outlook("c", 1.4)).candidate == "c"  # type: ignore[attr-defined]
    plain = recommend(outlook("a", 1.3, 0.98), outlook("c", 1.03))
    assert not plain.speculate  # type: ignore[attr-defined]
    assert "c, of which more is predicted" in plain.sentence  # type: ignore[attr-defined]


def test_where_nothing_pays_it_says_so_in_figures() -> None:
    found = recommend(outlook("a", 1.0, 0.97, alpha=0.2))
    assert not found.speculate  # type: ignore[attr-defined]
    assert found.sentence.startswith("Do not speculate with 1 row, because the best draft, a, gives 0.97x")  # type: ignore[attr-defined]
    assert "20% of its first guesses hold, and 25% must" in found.sentence  # type: ignore[attr-defined]
    assert "--draft none" in found.command  # type: ignore[attr-defined]
    refused = Outlook("x", "model", refused="another tokenizer")
    assert "another tokenizer" in recommend(refused).sentence  # type: ignore[attr-defined]


def test_lines_to_run_are_as_one_types_them() -> None:
    options = SystemOptions(model="my models/T", quantization="int8", max_model_len=512)
    settings = {"draft": "it's mine", "quantization": "int8", "max_model_len": 512}
    assert command_line(options, settings) == (
        "headstart serve --model 'my models/T' --draft 'it'\"'\"'s mine' --quantization int8 --max-model-len 512"
    )
    line = python_line(options, settings)
    compile(line, "line", "exec")
    assert 'LLM("my models/T", draft="it\'s mine", quantization="int8", max_model_len=512)' in line


def test_figures_of_a_candidate() -> None:
    found = seen(outlook("a", 1.5), 1, 0.0)
    assert found is not None
    assert (found.alpha, found.step) == (0.7, pytest.approx(0.2))
    assert found.wider == pytest.approx(0.05)


# -- all of it ----------------------------------------------------------------------------------------------------


@pytest.fixture
def short_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few draft lengths, once each: what rounds cost is nothing that these tests look at."""
    monkeypatch.setattr(advising, "LENGTHS", (0, 1, 3))
    monkeypatch.setattr(advising, "TURNS", 1)


def test_settings_are_checked() -> None:
    for wrong in ({"rows": (0,)}, {"temperatures": ()}, {"gammas": (0,)}, {"tokens": 2}, {"confirm": -1}):
        with pytest.raises(InvalidParameter):
            AdviseSettings(**wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidParameter, match="gamma"):
        advise(gamma=3)


@pytest.mark.usefixtures("short_sweeps")
def test_advice_on_tiny_models() -> None:
    target, draft = (tiny_model("llama", max_position_embeddings=512) for _ in "td")
    other = tiny_model("llama", max_position_embeddings=64)  # too short a context: refused in a sentence
    texts = [Text("<b>task</b>", (f"the {i} quick brown foxes {i * 7}",)) for i in range(4)]
    found = advise(
        SystemOptions(
            model=target, tokenizer=tiny_tokenizer(), quantization=None, draft_quantization=None, check=False
        ),
        [draft, other],
        texts,
        AdviseSettings(
            rows=(2,), temperatures=(0.0, 1.0), gammas=(2,), tokens=12, ignore_eos=True, confirm=1, seconds=0.5
        ),
        max_model_len=256,
    )
    copies, good, refused = found.outlooks
    assert copies.name == "lookup"
    assert good.acceptance["0"][0] == 1.0, "the draft is the target"
    for outlook in (copies, good):
        for temperature in (0.0, 1.0):
            predicted = outlook.prediction(2, temperature)
            assert predicted is not None
            assert predicted.speedup.mid > 0
    assert "context" in str(refused.refused)
    assert copies.measured or good.measured, "something was run"
    assert good.row(2, 0.0)[:2] == (good.name, "100%")
    assert len(good.row(2, 0.0)) == len(COLUMNS)
    json.dumps(found.to_json())
    page = page_of(found)
    assert "<b>task</b>" not in page
    assert found.recommendation.sentence[:20] in page


class Broken(Drafter):
    """Fails while it is opened, or while it drafts."""

    def __init__(self, name: str, *, opening: bool) -> None:
        self.name, self._opening = name, opening

    def propose(self, views: Any, budgets: Any) -> Any:
        raise RuntimeError("no guess today")

    @property
    def token_bytes(self) -> int:
        if self._opening:
            raise MemoryError("too large")
        return 0


@pytest.mark.usefixtures("short_sweeps")
def test_a_candidate_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    sibling = System.sibling

    def opened(self: System, draft: Any, *rest: Any, **more: Any) -> System:
        if isinstance(draft, Broken):
            _ = draft.token_bytes
        return sibling(self, draft, *rest, **more)

    monkeypatch.setattr(System, "sibling", opened)
    options = SystemOptions(model=tiny_model("llama"), tokenizer=tiny_tokenizer(), quantization=None, check=False)
    texts = [Text("any", (f"the {i} quick brown foxes {i * 7}",)) for i in range(4)]
    settings = AdviseSettings(gammas=(), tokens=8, ignore_eos=True, confirm=0, seconds=0.2)
    given = [Broken("a", opening=True), Broken("b", opening=False)]
    found = advise(options.changed(max_model_len=128), given, texts, settings)
    copies, first, second = found.outlooks
    assert copies.predictions
    assert first.refused == "it failed: MemoryError: too large"
    assert "no guess today" in str(second.refused)
    assert not second.predictions


@pytest.mark.usefixtures("short_sweeps")
def test_where_there_is_no_time_answers_are_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confirming, "GRACE", 0.0)
    options = SystemOptions(model=tiny_model("llama"), tokenizer=tiny_tokenizer(), quantization=None, check=False)
    texts = [Text("any", (f"the {i} quick brown foxes {i * 7}",)) for i in range(4)]
    settings = AdviseSettings(gammas=(), tokens=36, ignore_eos=True, confirm=1, seconds=0.01)
    found = advise(options.changed(max_model_len=128), [], texts, settings)
    (copies,) = found.outlooks
    assert copies.measured[1, 0.0].blocks == 3, "the least that says anything"
    assert copies.ran[1, 0.0].tokens == 3 * 32
    assert found.notes == ("answers that confirm were cut to 32 tokens, for want of time",)


@pytest.mark.usefixtures("short_sweeps")
def test_ctrl_c_leaves_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the first candidate, and in the middle of confirming."""
    options = SystemOptions(model=tiny_model("llama"), tokenizer=tiny_tokenizer(), quantization=None, check=False)
    texts = [Text("any", (f"the {i} quick brown foxes {i * 7}",)) for i in range(4)]
    settings = AdviseSettings(gammas=(), tokens=8, ignore_eos=True, confirm=1)
    with Adviser(options.changed(max_model_len=128), [], texts, settings) as adviser:
        assert not adviser.begun
        run, left = confirming.in_turn, [3]

        def interrupted(runs: Any) -> Any:
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
            return run(runs)

        monkeypatch.setattr(confirming, "in_turn", interrupted)
        with pytest.raises(KeyboardInterrupt):
            adviser.run(30)
        assert adviser.begun
        found = adviser.result(stopped=True)
    (copies,) = found.outlooks
    assert copies.measured[1, 0.0].blocks == 2, "the first run is not counted"
    assert found.notes == ("it was stopped (Ctrl-C) before its time was over",)
