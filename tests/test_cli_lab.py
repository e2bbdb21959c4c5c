"""The commands of the lab as a person uses them: tables, JSON alone, reports, and mistakes in one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from headstart.cli.main import app
from headstart.lab.benching import Bencher
from headstart.testing import tiny_model, tiny_tokenizer

runner = CliRunner()


def run(*arguments: str, **more: Any) -> Result:
    return runner.invoke(app, list(arguments), **more)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "abc abc abc", "task": "<b>copy</b>"}\n{"prompt": "Hello", "task": "talk"}\n')
    return str(path)


QUICK = ("-n", "8", "--turns", "2", "--seconds", "30")


def test_bench_shows_tables_and_writes_a_report(here: Path, tiny_folder: str, prompts: str) -> None:
    result = run("bench", "-m", tiny_folder, "--prompts", prompts, *QUICK)
    assert result.exit_code == 0, result.output
    for said in ("Over 2 prompts of 2 tasks, 2.0 times each", "lookup, by task", "<b>copy</b>", "speed-up", "tau"):
        assert said in result.stdout
    page, record = sorted((here / "headstart-reports").iterdir())
    assert f"report: headstart-reports/{page.name} (and {record.name})" in result.stderr
    text = page.read_text(encoding="utf-8")
    assert "&lt;b&gt;copy&lt;/b&gt;" in text
    assert "<b>copy" not in text
    assert str(here) not in text
    assert tiny_folder not in text
    assert tiny_folder not in record.read_text(encoding="utf-8")


def test_json_alone_on_standard_output(here: Path, tiny_folder: str, prompts: str) -> None:
    result = run("bench", "-m", tiny_folder, "--prompts", prompts, "--json", *QUICK)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["kind"], found["settings"]["tokens"], found["settings"]["temperature"]) == ("bench", 8, 0.0)
    assert [way["name"] for way in found["results"]["ways"]] == ["plain", "lookup"]
    assert not (here / "headstart-reports").exists()
    again = run("bench", "-m", tiny_folder, "--prompts", prompts, "--json", "--out", "named", *QUICK)
    assert json.loads(again.stdout)["kind"] == "bench"
    assert sorted(path.name for path in (here / "named").iterdir()) == ["bench.html", "bench.json"]


def test_profile_shows_tables(here: Path, tiny_folder: str) -> None:
    result = run("profile", "-m", tiny_folder, "--rows", "1", "--context", "8", "--seconds", "0.01", "--out", "o")
    assert result.exit_code == 0, result.output
    for said in ("Steps", "v(n): checking n tokens at once", "alpha 0.5", "Memory", "keys and values a token"):
        assert said in result.stdout
    assert json.loads((here / "o" / "profile.json").read_text())["results"]["costs"][0]["v"]["1"] == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("bench", "--prompts", "missing.txt"), "prompts cannot be read: No such file or directory (missing.txt)"),
        (("bench", "--prompts", "empty.txt"), "prompts hold nothing: empty.txt is empty"),
        (("bench", "--task", "poetry"), "tasks must be among dialogue, translation, summary"),
        (("bench", "--peers", "vllm"), "peers must be among hf, not vllm"),
        (("bench", "--seconds", "0"), "seconds must be more than 0"),
        (("bench", "--seconds", "5", "--thorough"), "thorough takes as long as it takes"),
        (("bench", "--tokens", "1"), "tokens must be at least 2"),
        (("bench", "--rows", "0"), "rows must be at least 1"),
        (("bench", "--temperature", "-1"), "temperature must"),
        (("bench", "--per-task", "0"), "per_task must be at least 1"),
        (("bench", "--gamma", "99"), "gamma must be"),
        (("bench", "--out", "empty.txt"), "out must be a folder, and"),
        (("bench", "--out", "empty.txt/below"), "out must be a folder, and"),
        (("profile", "--rows", "0"), "rows must be at least 1"),
        (("profile", "--context", "0"), "context must be at least 1"),
        (("profile", "--model", "no/such/folder"), "no/such/folder"),
        (("advise", "--prompts", "missing.txt"), "prompts cannot be read: No such file or directory (missing.txt)"),
        (
            ("advise", "--prompts", "keys.jsonl"),
            "keys.jsonl, line 1, must be a JSON object with one of 'prompt', 'messages' and 'turns'",
        ),
        (("advise", "--gamma", "3"), "gamma is not for this command"),
        (("advise", "--out", "empty.txt"), "out must be a folder, and"),
        (("certify", "--prompts", "empty.txt"), "prompts hold nothing: empty.txt is empty"),
        (("certify", "--gamma", "0"), "there is nothing to certify"),
        (("certify", "--out", "empty.txt"), "out must be a folder, and"),
        (("whatif", "--shape", "gpt-9"), "shape must be one of llama-3-8b, mistral-7b"),
        (("whatif", "--alpha", "2"), "alpha must be between 0 and 1"),
        (("whatif", "--out", "empty.txt"), "out must be a folder, and"),
        (("doctor", "--out", "empty.txt"), "out must be a folder, and"),
    ],
)
def test_mistakes_are_one_sentence(here: Path, arguments: tuple[str, ...], said: str) -> None:
    (here / "empty.txt").write_text("\n")
    (here / "keys.jsonl").write_text('{"text": "hello"}\n')
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    (line,) = (line for line in result.stderr.splitlines() if line.startswith("error:"))
    assert said in line
    assert not result.stdout
    assert sorted(path.name for path in here.iterdir()) == ["empty.txt", "keys.jsonl"], "nothing is left"


def test_a_draft_with_another_tokenizer_is_one_sentence(here: Path, tiny_folder: str) -> None:
    tiny_model("llama", max_position_embeddings=4096).save_pretrained(here / "other")
    tiny_tokenizer(shuffle=3).save_pretrained(here / "other")
    for command in ("bench", "profile"):
        result = run(command, "-m", tiny_folder, "--draft", "other")
        assert result.exit_code == 2, result.output
        assert "error: the draft cannot guess for this target" in result.stderr


def test_ctrl_c_writes_what_there_is(
    here: Path, tiny_folder: str, prompts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    block, after = Bencher._block, [3]

    def interrupted(self: Bencher, *arguments: Any) -> None:
        if not after[0]:
            raise KeyboardInterrupt
        after[0] -= 1
        block(self, *arguments)

    monkeypatch.setattr(Bencher, "_block", interrupted)
    result = run("bench", "-m", tiny_folder, "--prompts", prompts, "--out", "o", *QUICK)
    assert result.exit_code == 130, result.output
    found = json.loads((here / "o" / "bench.json").read_text())["results"]
    assert found["blocks"] == 3
    assert "it was stopped (Ctrl-C) before its time was over" in found["notes"]
    after[0] = 0
    result = run("bench", "-m", tiny_folder, "--prompts", prompts, "--out", "p", *QUICK)
    assert result.exit_code == 130
    assert not (here / "p").exists(), "nothing was measured: nothing is written"
