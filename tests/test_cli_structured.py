"""Structured output on the command line: real commands on a tiny model folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_cli import answers, run

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}


def test_answers_are_what_was_asked_for(tiny_folder: str, tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA, indent=2))
    (tmp_path / "grammar.lark").write_text('start: "<" /[ab]{2}/ ">"\n')
    asked = ("-m", tiny_folder, "-n", "40", "--seed", "1", "-t", "1")
    long = SCHEMA | {"description": "more than a file's name can have: " + "x" * 300}
    for given in (str(tmp_path / "schema.json"), json.dumps(SCHEMA), json.dumps(long)):
        (found,) = answers(*asked, "--json-schema", given, "Hi")
        assert set(json.loads(found["text"])) == {"ok"}
        assert found["finish_reason"] == "stop"
    assert run("generate", *asked, "--choice", "yes", "--choice", "no", "Hi").stdout.strip() in ("yes", "no")
    assert len(run("generate", *asked, "--regex", "[0-9]{7}", "Hi").stdout.strip()) == 7
    assert run("generate", *asked, "--grammar", str(tmp_path / "grammar.lark"), "Hi").stdout.startswith("<")
    result = run("chat", *asked, "--choice", "perhaps", input="Hi\n")
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() == "perhaps"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--json-schema", "none.json"), "names the file 'none.json', which cannot be read: No such file"),
        (("--json-schema", "{"), "structured.json is not JSON"),
        (("--json-schema", '{"type": "objekt"}'), "Invalid type: objekt"),
        (("--regex", "a(b"), "structured.regex cannot be compiled"),
        (("--regex", "a", "--choice", "b"), "exactly one of"),
        (("--structured-after", "</think>"), "needs --json-schema, --regex, --choice or --grammar"),
    ],
)
def test_mistakes_are_one_line(tiny_folder: str, given: tuple[str, ...], said: str) -> None:
    result = run("generate", "-m", tiny_folder, *given, "Hi")
    assert result.exit_code not in (0, 1) or said in result.stderr
    assert said in " ".join(result.stderr.split())
    assert "Traceback" not in result.output
