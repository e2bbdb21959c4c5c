"""The command line as a person uses it: real commands on a tiny model folder and on the embedded model."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headstart import LLM
from headstart.cli.main import app
from headstart.testing import tiny_model

runner = CliRunner()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, embedded: LLM) -> str:
    """A tiny Llama with the embedded model's tokenizer: real text in, nonsense out, quickly."""
    path = tmp_path_factory.mktemp("tiny")
    tokenizer = embedded.tokenizer
    assert tokenizer is not None
    tiny_model("llama", vocab_size=len(tokenizer), num_hidden_layers=1, eos_token_id=2).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def test_help_names_every_command() -> None:
    result = runner.invoke(app, ["--help"])
    assert result.exit_code == 0
    for command in ("generate", "chat", "demo"):
        assert command in result.output
        inner = runner.invoke(app, [command, "--help"], env={"COLUMNS": "200"})
        assert inner.exit_code == 0
        assert "--draft" in re.sub(r"\x1b\[[0-9;]*m", "", inner.output)


def test_generate_streams_text_and_closes_with_figures(folder: str) -> None:
    result = runner.invoke(app, ["generate", "-m", folder, "-n", "12", "Hello there"])
    assert result.exit_code == 0, result.output
    assert result.stdout.strip()
    assert "tau" in result.stderr
    assert "tok/s" in result.stderr


def test_json_holds_everything(folder: str) -> None:
    arguments = [
        "generate",
        "-m",
        folder,
        "-n",
        "8",
        "--json",
        "--logprobs",
        "2",
        "-t",
        "0.8",
        "--seed",
        "3",
        "Hi hi hi",
    ]
    first, second = (json.loads(runner.invoke(app, arguments).stdout) for _ in range(2))
    assert first["token_ids"] == second["token_ids"]
    assert len(first["token_ids"]) == len(first["origins"]) == len(first["logprobs"])
    assert first["finish_reason"] in ("stop", "length")
    assert set(first["stats"]) >= {"acceptance_rate", "acceptance_length", "drafted", "accepted", "rounds"}


def test_plain_and_speculative_agree(folder: str) -> None:
    base = ["generate", "-m", folder, "-n", "16", "--json", "one two three one two three one two"]
    fast, plain = (json.loads(runner.invoke(app, [*base, flag]).stdout) for flag in ("--speculate", "--plain"))
    assert fast["token_ids"] == plain["token_ids"]
    assert plain["stats"]["drafted"] == 0


def test_prompt_from_standard_input(folder: str) -> None:
    arguments = ["generate", "-m", folder, "-n", "4", "--json"]
    result = runner.invoke(app, arguments, input="from a pipe\n")  # as echo writes it
    assert result.exit_code == 0
    given = runner.invoke(app, [*arguments, "from a pipe"])
    told, same = (json.loads(r.stdout) for r in (result, given))
    assert told["token_ids"] == same["token_ids"]
    assert told["stats"]["prompt_tokens"] == same["stats"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["generate", "-m", "{folder}", "--top-p", "2", "x"], "top_p"),
        (["generate", "-m", "{folder}", "-t", "-1", "x"], "temperature"),
        (["generate", "-m", "{folder}", "--gamma", "fast", "x"], "gamma"),
        (["generate", "-m", "{folder}", "--verification", "magic", "x"], "verification"),
        (["generate", "-m", "{folder}", "   "], "prompt"),
        (["generate", "-m", "{folder}", "-n", "100000", "x"], "max_tokens"),
        (["generate", "-m", "/nowhere/at/all", "x"], "/nowhere/at/all"),
        (["generate", "-m", "{folder}", "--device", "foo", "x"], "device"),
        (["generate", "-m", "{folder}", "--logprobs", "2", "x"], "--json"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(folder: str, arguments: list[str], expected: str) -> None:
    result = runner.invoke(app, [a.format(folder=folder) for a in arguments])
    assert result.exit_code == 2
    assert "error:" in result.stderr
    assert expected in result.stderr.replace("\n", "")
    assert "Traceback" not in result.stderr


def test_chat_keeps_a_conversation(folder: str) -> None:
    result = runner.invoke(app, ["chat", "-m", folder, "-n", "6", "--seed", "1"], input="Hello\n/reset\n\nBye\n/quit\n")
    assert result.exit_code == 0, result.output
    assert result.stderr.count("tok/s") == 2
    assert "started anew" in result.stderr


def test_chat_answers_in_the_room_there_is(folder: str) -> None:
    result = runner.invoke(app, ["chat", "-m", folder, "--max-model-len", "90", "--seed", "1"], input="Hello\n/quit\n")
    assert result.exit_code == 0, result.output
    assert "too long" not in result.stderr
    assert result.stderr.count("tok/s") == 1


def test_demo_compares_plain_with_speculative(folder: str) -> None:
    result = runner.invoke(app, ["demo", "-m", folder, "-n", "6"], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    for name in ("question", "code edit", "summary", "speed-up"):
        assert name in result.stdout
    assert " NO " not in result.stdout


def test_readme_names_what_exists() -> None:
    """Public names in the README exist, and every public name is documented somewhere."""
    import headstart

    root = Path(__file__).parents[1]
    text = "".join((root / name).read_text() for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"))
    text += "".join(path.read_text() for path in (root / "docs").glob("*.md"))
    for name in headstart.__all__:
        assert hasattr(headstart, name)
        assert re.search(rf"\b{name}\b", text), f"{name} is public, but no page names it"
    for name in re.findall(r"from headstart import ([\w, ]+)", text):
        for each in name.split(","):
            assert each.strip() in headstart.__all__, f"{each} is in the docs but not public"
