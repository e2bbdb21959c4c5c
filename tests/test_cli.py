"""The command line as a person uses it: real commands on a tiny model folder."""

from __future__ import annotations

import json
import re
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from gguf_files import write_gguf
from typer.models import OptionInfo
from typer.testing import CliRunner, Result

from headstart.cli.main import app
from headstart.cli.screen import closing_line
from headstart.errors import HeadstartWarning
from headstart.testing import tiny_model, tiny_tokenizer
from headstart.types import Stats

runner = CliRunner()


def run(*arguments: str, **more: Any) -> Result:
    return runner.invoke(app, list(arguments), **more)


def test_a_temperature_that_may_be_meant_as_threads_is_told_of(tiny_folder: str) -> None:
    for given in (["-t", "2"], ["--temperature", "8"]):
        result = run("generate", "--json", "-m", tiny_folder, "-n", "1", *given, "Hello")
        (line,) = [line for line in result.stderr.splitlines() if "temperature" in line and "threads" in line]
        assert line.startswith(f"warning: -t is --temperature, and {given[1]} makes")
        assert "-t is" not in result.stdout
    assert "--threads" not in run("generate", "-m", tiny_folder, "-n", "1", "-t", "1.9", "Hello").stderr
    assert "--threads sets threads" in run("advise", "-m", "./nothing", "-t", "0", "-t", "2").stderr


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("--predict 5", "No such option: --predict: here it is --max-tokens ("),
        ("--draft-max 5", "No such option: --draft-max: here it is --gamma ("),
        ("--temp 0", "No such option: --temp: here it is --temperature ("),
        ("--ctx-size 9", "No such option: --ctx-size: here it is --max-model-len ("),
        ("-c 4096", "No such option: -c: here it is --max-model-len ("),
        ("-p hi", "No such option: -p: the prompt is given without an option ("),
        ("-md D", "No such option: -md: here it is --draft ("),
        ("-hf some/model", "No such option: -hf: here it is --model ("),
        ("-np 2", "No such option: -np: here it is --max-rows ("),
        ("-ngl 0", "No such option: -ngl: here it is --device cpu or --device cuda ("),
        ("-m ./d --raw -ngl 0", "No such option: -ngl: here it is --device cpu or --device cuda ("),
        ("one two", "Got unexpected extra argument"),
    ],
)
def test_what_llama_cpp_calls_an_option(given: str, told: str) -> None:
    result = run("generate", *given.split())
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {told}"), result.stderr
    assert "given by --model" not in result.stderr


def test_a_letter_with_its_value_stays_one(tiny_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "d").symlink_to(tiny_folder)
    monkeypatch.chdir(tmp_path)
    assert run("generate", "-md", "-n1", "Hello").exit_code == 0
    assert run("generate", "-m", "d", "-n1", "--stop", "-ngl", "--", "-md").exit_code == 0


def test_a_model_given_as_the_prompt_is_told_where_it_goes(tiny_folder: str, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    for place in (tiny_folder, str(file)):
        result = run("generate", place, "hi")
        assert result.exit_code == 2
        assert f"(hi): the model ({place}) is given by --model (" in result.stderr


def test_none_is_named_as_it_is_given_here(tiny_folder: str) -> None:
    for option in ("--quantization", "--draft-quantization"):
        result = run("generate", "-m", tiny_folder, option, "int3", "Hello")
        assert result.exit_code == 2
        assert "must be 'auto', None ('none' on the command line), 'int8' or 'int4', not 'int3'" in result.stderr


def answers(*arguments: str, **more: Any) -> list[dict[str, Any]]:
    """The JSON lines of ``generate --json``."""
    result = run("generate", "--json", *arguments, **more)
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_help_names_every_command() -> None:
    result = run("--help")
    assert result.exit_code == 0
    assert run().stdout == result.stdout
    for command in ("generate", "chat", "demo", "distill"):
        assert command in result.stdout
        vocab_ops = run(command, "--help")
        assert vocab_ops.exit_code == 0
        assert "--model MODEL" in vocab_ops.stdout


def test_an_option_called_like_its_value_keeps_its_small_letters() -> None:
    """Typer 0.27 makes ``--DEVICE`` of an option without a name of its own whose value is called DEVICE."""
    found = 0
    for command in app.registered_commands:
        assert command.callback is not None
        for name, parameter in signature(command.callback).parameters.items():
            for option in getattr(parameter.annotation, "__metadata__", ()):
                if (getattr(option, "metavar", None) or "").lower() == name and isinstance(option, OptionInfo):
                    assert option.param_decls, name
                    found += 1
    assert found > 10


def test_help_tells_n_from_n() -> None:
    text = " ".join(run("generate", "--help").stdout.split())
    assert re.search(r"-n, --max-tokens N .*--n N .*-n, which is --max-tokens", text)


def test_generate_streams_text_and_closes_with_figures(tiny_folder: str) -> None:
    result = run("generate", "-m", tiny_folder, "-n", "12", "Hello there")
    assert result.exit_code == 0, result.output
    assert result.stdout.strip()
    assert "\x1b" not in result.output
    for figure in ("tau", "tok/s", "first token after", "float32 on cpu, torch; draft lookup"):
        assert figure in result.stderr


def test_json_holds_everything(tiny_folder: str) -> None:
    arguments = ("-m", tiny_folder, "-n", "8", "--logprobs", "2", "-t", "0.8", "--seed", "3", "--gamma", "2", "Hi hi")
    first, second = (answers(*arguments)[0] for _ in range(2))
    assert first["token_ids"] == second["token_ids"]
    assert len(first["token_ids"]) == len(first["origins"]) == len(first["logprobs"])
    assert first["finish_reason"] in ("stop", "length")
    assert set(first["stats"]) >= {"acceptance_rate", "acceptance_length", "drafted", "accepted", "rounds"}
    model = first["model"]
    assert (model["architecture"], model["dtype"], model["device"]) == ("LlamaForCausalLM", "float32", "cpu")
    assert (model["kernels"], model["draft"]) == ("torch", "lookup")


def test_json_carries_times(tiny_folder: str) -> None:
    stats = answers("-m", tiny_folder, "-n", "12", "Hello")[0]["stats"]
    assert 0 <= stats["waiting_seconds"] < stats["first_token_seconds"]
    assert stats["first_token_seconds"] - stats["waiting_seconds"] <= stats["seconds"] + 1e-3


def test_plain_and_speculative_agree(tiny_folder: str) -> None:
    base = ("-m", tiny_folder, "-n", "16", "one two three one two three one two")
    fast, plain = (answers(*base, flag)[0] for flag in ("--speculate", "--plain"))
    assert fast["token_ids"] == plain["token_ids"]
    assert plain["stats"]["drafted"] == 0


def test_prompt_from_standard_input(tiny_folder: str) -> None:
    arguments = ("-m", tiny_folder, "-n", "4")
    told, same = answers(*arguments, input="from a pipe\n"), answers(*arguments, "from a pipe")  # as echo writes it
    assert told[0]["token_ids"] == same[0]["token_ids"]
    assert told[0]["stats"]["prompt_tokens"] == same[0]["stats"]["prompt_tokens"]


def test_text_reaches_a_file_as_it_is(tiny_folder: str) -> None:
    """Nothing is wrapped or cut, however narrow the terminal is said to be."""
    result = run("generate", "-m", tiny_folder, "-n", "300", "Hello", env={"COLUMNS": "20"})
    assert result.stdout == answers("-m", tiny_folder, "-n", "300", "Hello")[0]["text"] + "\n"


def test_many_prompts_from_a_file(tiny_folder: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("one\n\ntwo\r\nthree")
    found = answers("-m", tiny_folder, "-n", "6", "--prompts", str(path), "--max-rows", "2")
    alone = [answers("-m", tiny_folder, "-n", "6", prompt)[0] for prompt in ("one", "two", "three")]
    assert [a["index"] for a in found] == [0, 1, 2]
    assert [a["token_ids"] for a in found] == [a["token_ids"] for a in alone]
    texts = run("generate", "-m", tiny_folder, "-n", "6", "--prompts", "-", input=path.read_text())
    assert re.search(r"tau \d\.\d\d   \d+\.\d tok/s, prompts included", texts.stderr)
    headings = (f"=== {i} of 3 ===\n{a['text']}\n" for i, a in enumerate(alone, start=1))
    assert texts.stdout == "".join(headings)
    assert "3 answers" in texts.stderr


def test_conversations_from_json_lines(tiny_folder: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    lines: list[dict[str, Any]] = [
        {"prompt": "one", "note": "other fields are fine"},
        {"messages": [{"role": "user", "content": "one"}]},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "one"}], "prediction": "ab"},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    same, again, other = answers("-m", tiny_folder, "-n", "6", "--prompts", str(path))
    assert same["token_ids"] == again["token_ids"] != other["token_ids"]


def test_one_bad_prompt_costs_the_others_nothing(tiny_folder: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("one\n" + "x" * 300 + "\nthree\n")
    arguments = ("-m", tiny_folder, "-n", "6", "--max-model-len", "100", "--prompts", str(path))
    result = run("generate", "--json", *arguments)
    assert result.exit_code == 2
    first, second, third = (json.loads(line) for line in result.stdout.splitlines())
    assert first["text"]
    assert third["text"]
    assert set(second) == {"index", "error"}
    assert "error: 1 of 3 prompts have no answer" in result.stderr
    texts = run("generate", *arguments)
    assert texts.exit_code == 2
    assert texts.stdout.count("===\n") == 3


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("nonsense\n", "line 1, is no JSON"),
        ('{"prompt": "a"}\n{"text": "b"}\n', "line 2, must be a JSON object with either"),
        ('{"prompt": "a", "messages": []}\n', "either"),
        ('{"prompt": ["a"]}\n', "no text"),
        ('{"messages": "a"}\n', "no list"),
        ('{"prompt": "a\\ud800"}\n', "not valid UTF-8"),
        ("[" * 100_000 + "\n", "no JSON"),
        ("\n\n", "hold nothing"),
    ],
)
def test_a_bad_file_is_refused_before_anything_is_loaded(tmp_path: Path, content: str, expected: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    result = run("generate", "-m", "/nowhere", "--prompts", str(path))
    assert result.exit_code == 2
    assert expected in result.stderr
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1


def test_several_answers_to_a_prompt(tiny_folder: str) -> None:
    arguments = ("-m", tiny_folder, "-n", "8", "--n", "3", "-t", "1", "--seed", "5", "--gamma", "2", "Hello")
    (found,) = answers(*arguments)
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2]
    assert len({tuple(choice["token_ids"]) for choice in found["choices"]}) == 3
    texts = run("generate", *arguments).stdout
    for number, choice in enumerate(found["choices"], start=1):
        assert f"=== answer {number} of 3 ===\n{choice['text']}\n" in texts


def test_options_reach_the_request(tiny_folder: str) -> None:
    def ids(*arguments: str) -> list[int]:
        found: list[int] = answers("-m", tiny_folder, *arguments, "Hello")[0]["token_ids"]
        return found

    assert ids("-n", "5", "--logit-bias", "50=100") == [50] * 5
    plain = ids("-n", "12")
    assert ids("-n", "12", "--stop-token-id", str(plain[3])) == plain[: plain.index(plain[3]) + 1]
    assert ids("-n", "12", "--stop-token-id", str(plain[0]), "--min-tokens", "4")[:4] != plain[:4]
    ending = ("-n", "5", "--logit-bias", "2=100")  # </s>
    assert ids(*ending) == [2]
    assert ids(*ending, "--ignore-eos") == [2] * 5
    tokenizer = tiny_tokenizer()
    text = tokenizer.decode(plain)
    result = answers("-m", tiny_folder, "-n", "12", "--prediction", text, "--raw", "Hello")[0]
    assert result["stats"]["drafted"] > 0


def test_a_seed_alone_leaves_the_rule_to_the_engine(tiny_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """--verification is passed on only when it was given."""
    seen: list[dict[str, Any]] = []
    from headstart.cli import options

    def recorded(**given: Any) -> Any:
        seen.append(given)
        raise KeyboardInterrupt

    monkeypatch.setattr(options, "SamplingParams", recorded)  # what is passed shows nowhere else
    for more in ((), ("--verification", "token")):
        run("generate", "-m", tiny_folder, "--seed", "1", *more, "Hello")
        run("chat", "-m", tiny_folder, "--seed", "1", *more)
    assert ["verification" in given for given in seen] == [False, False, True, True]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["generate", "-m", "{folder}", "--top-p", "2", "x"], "top_p"),
        (["generate", "-m", "{folder}", "-t", "-1", "x"], "temperature"),
        (
            ["generate", "-m", "{folder}", "--gamma", "fast", "x"],
            "gamma must be 'auto' or a whole number from 0 to 64",
        ),
        (["generate", "-m", "{folder}", "--verification", "magic", "x"], "verification"),
        (["generate", "-m", "{folder}", "   "], "prompt"),
        (["generate", "-m", "{folder}", "-n", "100000", "x"], "max_tokens"),
        (["generate", "-m", "/nowhere/at/all", "x"], "/nowhere/at/all"),
        (["generate", "-m", "{folder}", "--device", "foo", "x"], "device"),
        (["generate", "-m", "{folder}", "--logprobs", "2", "x"], "--json"),
        (["generate", "-m", "{folder}", "--logit-bias", "12", "x"], "logit_bias must be a token id and a number"),
        (["generate", "-m", "{folder}", "--logit-bias", "999999=1", "x"], "logit_bias"),
        (["generate", "-m", "{folder}", "--max-rows", "0", "x"], "max_rows"),
        (["generate", "-m", "{folder}", "--prompts", "/nowhere/p.txt"], "prompts cannot be read: No such file"),
        (["generate", "-m", "{folder}", "--prompts", "p.txt", "x"], "--prompts"),
        (["generate", "-m", "{folder}", "a\udcffb"], "prompt is not valid UTF-8"),
        (["generate", "-n", "many", "x"], "'--max-tokens' / '-n'"),
        (["generate", "--nonsense", "x"], "--nonsense"),
        (["distill"], "--out"),
        (["gennerate"], "gennerate"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tiny_folder: str, arguments: list[str], expected: str) -> None:
    result = run(*(a.format(folder=tiny_folder) for a in arguments))
    assert result.exit_code == 2
    assert expected in result.stderr
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_gamma_in_help_and_engine_is_the_same(tiny_folder: str) -> None:
    text = " ".join(run("generate", "--help").stdout.split())
    assert "--gamma N Tokens to draft a round: 1 to 64, 0 for none, or auto" in text
    for gamma, fine in (("0", True), ("1", True), ("64", True), ("65", False), ("-1", False)):
        result = run("generate", "-m", tiny_folder, "-n", "2", "--gamma", gamma, "x")
        assert result.exit_code == (0 if fine else 2)
        assert fine or "gamma must be 'auto' or a whole number from 0 to 64" in result.stderr
        assert ("gamma is 0" in result.stderr) is (gamma == "0")


def test_standard_input_that_is_no_text() -> None:
    result = run("generate", "-m", "/nowhere", input=b"a\xffb")
    assert result.exit_code == 2
    assert result.stderr == "error: standard input is not valid UTF-8 (byte 1 is 0xff)\n"
    piped = run("generate", "-m", "/nowhere", "--prompts", "-", input=b"fine\n\xc3(\n")
    assert piped.exit_code == 2
    assert piped.stderr == "error: standard input is not valid UTF-8 (byte 5 is 0xc3)\n"


def test_trusting_code_warns(tiny_folder: str) -> None:
    result = run("generate", "-m", tiny_folder, "-n", "2", "--trust-remote-code", "x")
    assert result.exit_code == 0
    assert result.stderr.startswith("warning: --trust-remote-code")
    assert result.stderr.count("trust") == 1


@pytest.mark.parametrize("place", ["before", "behind"])
def test_verbose_tells_what_runs(tiny_folder: str, place: str) -> None:
    arguments = ["generate", "-m", tiny_folder, "-n", "2", "x"]
    arguments.insert(0 if place == "before" else 1, "--verbose")
    told = run(*arguments).stderr
    assert re.search(r"architecture LlamaForCausalLM, .*dtype float32, device cpu, kernels torch, draft lookup", told)
    assert "architecture" not in run("generate", "-m", tiny_folder, "-n", "2", "x").stderr


def test_verbose_tells_the_notes_of_the_report(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"))
    result = run("generate", "--verbose", "-m", str(path), "-n", "2", "x")
    assert "the file's weights are F32" in result.stderr
    assert re.search(r"^loaded in \d+\.\d s$", result.stderr, re.MULTILINE)


def test_a_draft_model_is_named_with_its_size_and_numbers(tiny_folder: str) -> None:
    arguments = ("-m", tiny_folder, "-d", tiny_folder, "-n", "4", "--gamma", "2", "x")
    assert re.search(r"torch; draft model of \d+M parameters, float32, torch\n", run("generate", *arguments).stderr)
    model = answers(*arguments)[0]["model"]
    assert (model["draft"], model["draft_dtype"], model["draft_kernels"]) == ("model", "float32", "torch")
    assert model["draft_parameters"] == model["parameters"]


def test_a_draft_model_that_was_given_up_says_why() -> None:
    tried = Stats(drafted=9, accepted=1, rounds=20, tokens=21)
    lines = closing_line(tried, "drafting does not pay now", model=True).plain.splitlines()
    assert lines[1] == "  speculation inactive by the end: drafting does not pay now"
    assert "\n" not in closing_line(tried, "drafting does not pay now").plain, "what costs nothing to try is no news"


def test_threads_that_do_nothing_are_told(tiny_folder: str) -> None:
    with pytest.warns(HeadstartWarning, match="threads=2 does nothing: LlamaForCausalLM runs on torch, with "):
        assert run("generate", "-m", tiny_folder, "-n", "2", "--threads", "2", "x").exit_code == 0


def test_demo_compares_plain_with_speculative(tiny_folder: str) -> None:
    result = run("demo", "-m", tiny_folder, "-n", "6", env={"COLUMNS": "200"})
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
