"""Random requests over a real socket: the same answers with speculation and without, alone and in company, streamed
and whole. ``benchmarks/serve_equal.py`` does the same with the embedded model."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from headstart.testing import tiny_tokenizer


@pytest.fixture
def equal(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    import serve_equal

    return serve_equal


TEXTS = ["one two three four five six one two three seven", "The quick brown fox. The quick red fox."]


def drawn(equal: ModuleType, count: int, seed: int = 17) -> list[Any]:
    return equal.Draw(seed, TEXTS, tiny_tokenizer().encode, 16).requests(count)


@pytest.mark.parametrize("draft", ["lookup", "a model"])
def test_the_bytes_of_choices_are_the_same_in_every_way(equal: ModuleType, draft: str) -> None:
    llm = equal.tiny(draft=equal.small(seed=3) if draft == "a model" else draft, gamma=3)
    asked = drawn(equal, 40 if draft == "lookup" else 24, seed=17 if draft == "lookup" else 18)
    found = equal.compared(llm, asked, tuple(equal.WAYS), ids=False)
    assert len(found) == 5
    for way, told in found.items():
        assert told["different"] == [], way
        assert told["same"] == len(asked), way
        assert (told["drafted_tokens"] > 0) == way.startswith("drafted"), way


def test_every_option_is_drawn_and_a_difference_is_seen(
    equal: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = drawn(equal, 200)
    assert asked == drawn(equal, 200)
    assert asked != drawn(equal, 200, seed=18)
    fields = {name for one in asked for name in one.body}
    assert fields >= {"echo", "best_of", "logprobs", "n", "stop", "prediction", "prompt_logprobs", "min_p", "seed"}
    assert all(one.body["temperature"] == 0 or "seed" in one.body for one in asked), "else answers may differ"
    assert {one.path for one in asked} == {equal.CHAT, equal.TEXT}
    # Without its seed a sampled answer is another one each time: that must be seen.
    sent = equal.Asked.sent
    monkeypatch.setattr(equal.Asked, "sent", lambda one, way: {k: v for k, v in sent(one, way).items() if k != "seed"})
    monkeypatch.setattr(equal, "WAYS", dict(list(equal.WAYS.items())[:2]))
    with pytest.raises(SystemExit, match="differ"):
        equal.main(["--quick", "--requests", "12", "--out", str(tmp_path / "found.json")])
    told = json.loads((tmp_path / "found.json").read_text())["the same bytes of choices, gamma auto"]
    assert told["machine"]["torch"]
    assert told["ways"]["drafted, alone, whole"]["same"] < 12
