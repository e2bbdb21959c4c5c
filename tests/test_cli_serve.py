"""The options of ``headstart serve``: on the command line and by environment variables."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer

from headstart.cli.commands import Command, Commands
from headstart.cli.environment import OTHERS, unknown
from headstart.cli.main import command
from headstart.cli.options import ModelOptions, spread
from headstart.cli.serve import ServerOptions
from headstart.errors import InvalidParameter

ROOT = Path(__file__).parents[1]


def started(*arguments: str, wrong: str = "") -> tuple[ModelOptions, ServerOptions]:
    """What a command with these records is given; ``wrong``: the field that it complains of."""
    found: list[Any] = []

    def serve(*, model: ModelOptions, server: ServerOptions) -> None:
        found.extend((model, server))
        if wrong:
            raise InvalidParameter(wrong, "must be something else")

    app = typer.Typer(cls=Commands, add_completion=False, rich_markup_mode=None)
    app.command(cls=Command)(spread(serve, env="HEADSTART_"))
    app.callback()(lambda: None)
    typer.main.get_command(app)(["serve", *arguments], standalone_mode=False)
    return found[0], found[1]


def test_every_option_is_a_variable_of_serve_and_of_no_other_command() -> None:
    group: Any = command()
    seen = set()
    for name, each in group.commands.items():
        for param in each.params:
            if name == "serve" and param.name != "help":
                assert param.envvar == f"HEADSTART_{param.name.upper()}"
                assert param.envvar not in OTHERS
                seen.add(param.name)
            else:
                assert not param.envvar, f"{name} {param.name} would change in silence"
    assert {"model", "draft", "gamma", "host", "port", "allowed_host", "max_rows", "statistics", "verbose"} <= seen
    page = (ROOT / "docs" / "cli.md").read_text()
    assert all(f"[HEADSTART_{name.upper()}]" in page for name in seen)


def test_variables_are_taken_and_the_command_line_counts_more(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {
        "MODEL": "some/model",
        "GAMMA": "3",
        "PORT": "8123",
        "HOST": "",  # as if it were not set
        "THREADS": "",
        "ALLOWED_HOST": "a.example  b.example",
        "STATISTICS": "true",
        "INVARIANT": "0",
        "DRAIN": "2.5",
    }.items():
        monkeypatch.setenv(f"HEADSTART_{name}", value)
    model, server = started("--gamma", "5")
    assert (model.model, model.gamma, model.threads, model.invariant) == ("some/model", "5", None, False)
    assert (server.port, server.host, server.drain, server.statistics) == (8123, "127.0.0.1", 2.5, True)
    assert list(server.allowed_host or ()) == ["a.example", "b.example"]
    told = capsys.readouterr().err
    assert "from the environment: " in told
    assert "HEADSTART_MODEL" in told
    assert "HEADSTART_GAMMA" not in told, "the command line said it"
    assert "HEADSTART_HOST" not in told


@pytest.mark.parametrize(("name", "value"), [("PORT", "tcp://10.0.0.1:80"), ("STATISTICS", "perhaps"), ("DRAIN", "x")])
def test_a_wrong_value_is_a_sentence_that_names_its_variable(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(f"HEADSTART_{name}", value)
    with pytest.raises(SystemExit) as ended:
        started()
    assert ended.value.code == 2
    told = capsys.readouterr().err.strip()
    assert told.startswith(f"error: Invalid value for HEADSTART_{name}: ")
    assert "\n" not in told
    with pytest.raises(SystemExit):
        started("--port", "x")  # this one is the command line's
    assert "--port" in capsys.readouterr().err or name != "PORT"


def test_so_is_one_that_is_found_to_be_wrong_later(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEADSTART_PORT", "70000")
    for field, told in (("port", "error: HEADSTART_PORT: port must be"), ("gamma", "error: gamma must be")):
        with pytest.raises(SystemExit):
            started(wrong=field)
        assert told in capsys.readouterr().err


def test_a_model_without_its_option_is_told_where_it_goes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        started("some/model")  # as vLLM's users write it
    assert "(some/model): the model is given by --model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--api-key", "x"], "No such option: --api-key: set HEADSTART_API_KEY, or give --api-key-file ("),
        (["--max-num-seqs", "4"], "No such option: --max-num-seqs: here it is --max-rows ("),
        (["--max-row", "4"], "No such option: --max-row (Possible options: "),
        (["--max-rows", "lots"], "Invalid value for '--max-rows': must be a whole number ("),
    ],
)
def test_what_others_call_an_option(given: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        started(*given)
    assert told in capsys.readouterr().err


def test_a_variable_that_nobody_reads_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("HEADSTART_MAX_ROW", "HEADSTART_COLOUR"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HEADSTART_PROT", "")  # as if it were not set
    group: Any = command()
    group([], standalone_mode=False)
    told = capsys.readouterr().err
    assert told.count("warning") == 1
    assert "HEADSTART_COLOUR, HEADSTART_MAX_ROW (did you mean HEADSTART_MAX_ROWS?)" in told
    assert "HEADSTART_PROT" not in told
    monkeypatch.delenv("HEADSTART_MAX_ROW")
    monkeypatch.delenv("HEADSTART_COLOUR")
    group([], standalone_mode=False)
    assert "warning" not in capsys.readouterr().err


def test_variables_of_kubernetes_and_of_others_are_none_of_ours() -> None:
    given = {
        "HEADSTART_SERVICE_HOST": "10.0.0.1",
        "HEADSTART_SERVICE_PORT_HTTP": "80",
        "HEADSTART_PORT_80_TCP_ADDR": "10.0.0.1",
        "HEADSTART_CANARY_PORT": "tcp://10.0.0.1:80",
        "PATH": "/bin",
    }
    assert unknown(given, []) is None
    assert "HEADSTART_CANARY_PORT" in (unknown({"HEADSTART_CANARY_PORT": "80"}, []) or "")
    assert "and 4 more" in (unknown({f"HEADSTART_X{i}": "1" for i in range(9)}, []) or "")


def test_every_variable_that_is_read_or_documented_is_known() -> None:
    options: Any = {param.envvar for each in command().commands.values() for param in each.params if param.envvar}
    pages = [*(ROOT / "src").rglob("*.py"), ROOT / "docs" / "reference.md", ROOT / "docs" / "serve.md"]
    named = {name for page in pages for name in re.findall(r"HEADSTART_[A-Z_]+[A-Z]", page.read_text())}
    assert named - OTHERS - options == {"HEADSTART_MAX_ROW"}, "the example of one that is misspelt"
    assert {name for name in OTHERS if "STRESS" not in name} <= named
