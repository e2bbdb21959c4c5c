"""bench on tiny models: counts are the engine's, figures come from its rounds, and time or Ctrl-C may end it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headstart.errors import HeadstartError, InvalidParameter, ModelRefused, PromptTooLong
from headstart.lab import BenchSettings, SystemOptions, Text, bench, page_of
from headstart.lab.bench_record import ALL, PLAIN
from headstart.lab.benching import Bencher
from headstart.lab.report.store import envelope
from headstart.testing import tiny_model, tiny_tokenizer

TEXTS = [Text("a", ("abc abc abc abc ab",)), Text("b", ("Hello there",)), Text("b", ("hello hello hello",))]


@pytest.fixture(scope="module")
def options() -> SystemOptions:
    """A tiny target whose own copy drafts for it: every guess holds."""
    model = tiny_model("llama")
    return SystemOptions(
        model=model, tokenizer=tiny_tokenizer(), draft=model, gamma=3, max_model_len=200, check=False,
        draft_quantization=None,
    )  # fmt: skip


def settings(**more: Any) -> BenchSettings:
    return BenchSettings(**{"tokens": 16, "turns": 2, "seconds": None, "ignore_eos": True, **more})


def test_counts_and_figures_are_the_engines(options: SystemOptions) -> None:
    found = bench(options, TEXTS, settings())
    plain, drafted = found.ways
    assert (plain.name, found.tasks, found.prompts, found.blocks) == (PLAIN, ("a", "b"), {"a": 1, "b": 2}, 6)
    for way in found.ways:
        assert way.figures[ALL].tokens == 6 * 16 == sum(way.figures[task].tokens for task in found.tasks)
        assert way.figures[ALL].answers == 6
        assert way.figures[ALL].ttft > 0
        assert way.figures[ALL].tpot > 0
    assert plain.figures[ALL].tau == 1
    assert plain.figures[ALL].alpha is None
    of = drafted.figures[ALL]
    assert of.alpha == 1, "its own copy is never wrong"
    assert of.acceptance == of.reached == (1.0, 1.0, 1.0)
    assert 3 < of.tau <= 4
    assert of.draft_seconds + of.verify_seconds + of.rest_seconds == pytest.approx(of.round_seconds)
    assert drafted.same == (6, 6)
    assert found.speedup is drafted.speedup[ALL]
    assert set(drafted.speedup) == set(drafted.end_to_end) == {ALL, "a", "b"}
    assert found.speedup.interval.holds(found.speedup.value)
    assert json.loads(json.dumps(envelope(found)))["results"]["ways"][1]["tasks"]["all"]["alpha"] == 1


def test_speed_up_is_plain_time_over_its_time(options: SystemOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that moves three seconds a round, and not between: rounds are all that counts."""
    clock = [0.0]
    monkeypatch.setattr("headstart.lab.turns.perf_counter", lambda: clock[0])
    with Bencher(options, TEXTS, settings()) as bencher:
        for system in bencher.systems.values():

            def count(records: object) -> None:
                clock[0] += 3

            system.listen(count)
        bencher.run(bencher.settings.seconds)
        found = bencher.result()
    of = found.ways[1].figures[ALL]
    assert found.speedup.value == pytest.approx(
        of.tau, rel=0.01
    )  # rounds that were stalled are told by their own clock
    assert found.ways[0].figures[ALL].tpot == pytest.approx(3)
    assert of.ttft == 3


def test_a_controller_that_drafts_now_and_then_is_told_of(
    options: SystemOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Bencher(options, TEXTS[:2], settings(tokens=8)) as bencher:
        drafted, block = list(bencher.systems)[1], Bencher._block
        controller = bencher.systems[drafted].engine.parts.controller

        def fickle(self: Bencher, unit: Any, turn: int) -> None:
            monkeypatch.setattr(controller, "gamma", 0 if turn else 3)
            block(self, unit, turn)

        bencher.run(None)
        assert not any("drafts at one time" in said for said in bencher.result().notes)
        monkeypatch.setattr(Bencher, "_block", fickle)
        bencher.run(None)
        [said] = [note for note in bencher.result().notes if "drafts at one time" in note]
    assert said.startswith(f"{drafted}: 2 of 2 prompts were answered with drafts at one time, without at another")


def test_conversations_are_taken_as_they_stand(options: SystemOptions) -> None:
    messages = ({"role": "system", "content": "Short."}, {"role": "user", "content": "Why?"})
    found = bench(options, [Text("chat", messages=messages), *TEXTS[:1]], settings(turns=1))
    assert found.prompts == {"chat": 1, "a": 1}
    assert found.ways[1].same == (2, 2)


def test_several_rows_and_drawn_tokens(options: SystemOptions) -> None:
    found = bench(options, TEXTS, settings(rows=2, temperature=1.0, turns=1))
    of = found.ways[1].figures[ALL]
    assert (found.prompts, found.turns, of.answers, of.tokens) == ({"a": 1, "b": 2}, 1, 4, 64)
    assert of.alpha == 1


def test_the_second_turn_of_a_conversation_sees_the_first_answer(options: SystemOptions) -> None:
    with Bencher(options, [Text("chat", ("One?", "Two?"))], settings(turns=1)) as bencher:
        bencher.run(bencher.settings.seconds)
        assert bencher.blocks == 2
        first, second = bencher._units
        said = bencher._answers[first.group, 0][0]
        asked = bencher.systems[PLAIN].codec.decode(bencher._prompt(second)[0])
        assert "One?" in asked
        assert said.strip() in asked
        assert asked.index("Two?") > asked.index("One?")
        assert all(bencher.systems[name].engine.stats.finished == 3 for name in bencher.systems), "warm-up and two"


def test_when_the_time_is_over_there_is_what_there_is(options: SystemOptions) -> None:
    found = bench(options, TEXTS, settings(seconds=1e-6, turns=None))
    assert found.blocks == 1
    assert any("no time for these tasks: b" in said for said in found.notes)
    assert any("twice" in said for said in found.notes)
    assert found.speedup.interval is None
    assert "measured on 1 prompt, " in page_of(found)


def test_stopped_in_the_middle_nothing_is_half(options: SystemOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    with Bencher(options, TEXTS, settings(turns=3)) as bencher:
        with pytest.raises(HeadstartError, match="nothing was measured"):
            bencher.result()
        block, calls = Bencher._block, []

        def interrupted(self: Bencher, *arguments: Any) -> None:
            calls.append(arguments)
            if len(calls) == 5:
                engine = self.systems[PLAIN].engine
                step = engine.step

                def stop() -> None:
                    raise KeyboardInterrupt

                engine.step = stop  # type: ignore[method-assign]
                try:
                    block(self, *arguments)
                finally:
                    engine.step = step  # type: ignore[method-assign]
            block(self, *arguments)

        monkeypatch.setattr(Bencher, "_block", interrupted)
        with pytest.raises(KeyboardInterrupt):
            bencher.run(bencher.settings.seconds)
        found = bencher.result(stopped=True)
    assert found.blocks == 4
    assert len({way.figures[ALL].answers for way in found.ways}) == 1, "every way has as many answers"
    assert any("Ctrl-C" in said for said in found.notes)


def test_transformers_as_a_peer(options: SystemOptions) -> None:
    other = options.changed(draft=tiny_model("llama", num_hidden_layers=1))
    found = bench(other, TEXTS[:1], settings(peers=("hf",), turns=1, ignore_eos=False))
    names = [way.name for way in found.ways]
    assert names[2:] == ["hf generate", "hf prompt lookup", "hf assistant_model"]
    for way in found.ways[1:]:
        assert way.same == (1, 1), f"{way.name}: float32, so the text is the same"
        assert way.figures[ALL].tokens == found.ways[0].figures[ALL].tokens
    with pytest.raises(InvalidParameter, match="peers must be among hf, not vllm"):
        bench(options, TEXTS[:1], settings(peers=("vllm",)))


def test_a_draft_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    for name, shuffle in (("target", 0), ("draft", 5)):
        tiny_model("llama").save_pretrained(tmp_path / name)
        tiny_tokenizer(shuffle=shuffle).save_pretrained(tmp_path / name)
    pair = SystemOptions(model=str(tmp_path / "target"), draft=str(tmp_path / "draft"), check=False)
    with pytest.raises(ModelRefused, match="the draft cannot guess for this target"):
        bench(pair, TEXTS, settings())


@pytest.mark.parametrize(
    ("more", "said"),
    [({"tokens": 1}, "tokens must be at least 2"), ({"rows": 0}, "rows must"), ({"turns": 0}, "turns must")],
)
def test_bad_settings(more: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidParameter, match=said):
        settings(**more)


def test_prompts_that_do_not_fit_are_left_out_and_named(options: SystemOptions) -> None:
    """Also a later turn, which nobody can know of before the first one is answered."""
    long = Text("b", ("x" * 190,))
    endless = Text("b", ("y" * 100_000,))
    grows = Text("c", ("One?", "z" * 150))
    found = bench(options, [long, TEXTS[0], endless, grows], settings(turns=2))
    assert found.prompts == {"a": 1, "c": 1}
    assert found.blocks == 4
    [said] = [note for note in found.notes if "left out" in note]
    assert said.startswith("prompts were left out (3): with an answer of 16 tokens a prompt may have 184")
    assert "xxx" in said
    assert not any("no time" in note for note in found.notes)


def test_where_no_prompt_fits_that_is_the_error(options: SystemOptions) -> None:
    with pytest.raises(
        PromptTooLong, match=r"prompts have no room, not one .* an answer of 190 .* 'abc abc abc abc ab'"
    ):
        bench(options, TEXTS, settings(tokens=190))
    with pytest.raises(InvalidParameter, match="hold nothing"):
        bench(options, [], settings())


def test_a_conversation_that_cannot_be_asked_is_named(options: SystemOptions) -> None:
    odd = Text("chat", messages=({"role": "user", "content": "Hear this:"}, {"role": "nobody", "content": "x"}))
    with pytest.raises(InvalidParameter, match=r"prompts hold one that cannot be asked: .*role.* \('x'\)"):
        bench(options, [odd], settings())
