"""A model's own code runs only when it is trusted: never by default, and never because standard input said "y"."""

from __future__ import annotations

import ast
import io
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from transformers import dynamic_module_utils
from typer.testing import CliRunner

from headstart.api import LLM
from headstart.cli.main import app
from headstart.errors import ModelRefused
from headstart.machine.load.loading import load, quiet
from headstart.testing import tiny_model, tiny_tokenizer

ROOT = Path(__file__).parents[1]

CODE = """
from pathlib import Path

from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

Path({mark!r}).touch()


class OwnConfig(LlamaConfig):
    model_type = {kind!r}


class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig


class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


def write(folder: Path, part: str, mark: Path) -> Path:
    """A tiny Llama whose configuration, model or tokenizer needs the folder's own code, which leaves a mark."""
    with quiet():
        tiny_model("llama").save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
    kind = f"own_{part}"
    (folder / f"{kind}.py").write_text(CODE.format(mark=str(mark), kind=kind))
    name = "tokenizer_config.json" if part == "tokenizer" else "config.json"
    settings = json.loads((folder / name).read_text())
    if part == "config":
        auto = {"AutoConfig": f"{kind}.OwnConfig", "AutoModelForCausalLM": f"{kind}.OwnModel"}
        settings |= {"model_type": kind, "architectures": ["OwnModel"], "auto_map": auto}
    elif part == "model":  # a configuration that transformers knows, without a causal model of its own
        settings |= {"model_type": "siglip_text_model", "architectures": ["OwnModel"]}
        settings["auto_map"] = {"AutoModelForCausalLM": f"{kind}.OwnModel"}
    else:
        settings |= {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": [None, f"{kind}.OwnTokenizer"]}}
    (folder / name).write_text(json.dumps(settings))
    return folder


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers copies trusted code here before it runs it, instead of to the user's own cache."""
    place = tmp_path / "modules"
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(place))
    monkeypatch.syspath_prepend(str(place))


@pytest.fixture
def someone_says_yes(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    answers = io.StringIO("y\n" * 50)
    monkeypatch.setattr("sys.stdin", answers)
    return answers


@pytest.mark.parametrize("as_draft", [False, True], ids=["target", "draft"])
@pytest.mark.parametrize("part", ["config", "model", "tokenizer"])
def test_a_folders_code_does_not_run(
    part: str, as_draft: bool, tmp_path: Path, modules: None, someone_says_yes: io.StringIO
) -> None:
    mark = tmp_path / "mark"
    folder = write(tmp_path / "model", part, mark)
    models: tuple[Any, Any] = (tiny_model("llama"), folder) if as_draft else (folder, None)
    with pytest.raises(ModelRefused, match="trust_remote_code=True") as refusal:
        LLM(*models, max_model_len=64, max_rows=1)
    assert not mark.exists(), "the folder's code ran"
    assert someone_says_yes.tell() == 0, "nobody may be asked"
    assert "\n" not in str(refusal.value)


def test_the_command_line_cannot_be_answered_either(tmp_path: Path, modules: None) -> None:
    """``yes | headstart generate --model FOLDER``."""
    mark = tmp_path / "mark"
    folder = write(tmp_path / "model", "config", mark)
    result = CliRunner().invoke(app, ["generate", "--model", str(folder), "Hello"], input="y\n" * 50)
    assert result.exit_code == 2
    assert not mark.exists()
    assert "trust_remote_code=True" in " ".join(result.output.split())


@pytest.mark.parametrize("part", ["config", "tokenizer"])
def test_with_trust_it_runs_and_says_so(part: str, tmp_path: Path, modules: None) -> None:
    mark = tmp_path / "mark"
    folder = write(tmp_path / "model", part, mark)
    with pytest.warns(UserWarning, match="trust_remote_code is on"):
        loaded = load(folder, trust_remote_code=True)
    assert mark.exists()
    made = type(loaded.tokenizer if part == "tokenizer" else loaded.model)
    assert made.__module__.endswith(f"own_{part}")


def test_trust_is_asked_for_once_and_passed_to_the_draft(tmp_path: Path, modules: None) -> None:
    mark = tmp_path / "mark"
    folder = write(tmp_path / "model", "tokenizer", mark)
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        LLM(tiny_model("llama"), folder, trust_remote_code=True, max_model_len=64, max_rows=1)
    assert mark.exists()


# -- the same for every line that is yet to be written

TAKE_IT = {"from_pretrained", "from_config"}


def unsaid(source: str) -> list[int]:
    """The lines of calls that would leave trust to a question on standard input."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr not in TAKE_IT:
            continue
        if ast.unparse(node.func.value) == "GenerationConfig":  # reads numbers, and takes no such argument
            continue
        said = [keyword.arg for keyword in node.keywords]
        passed_on = [ast.unparse(k.value) for k in node.keywords if k.arg is None]
        if "trust_remote_code" not in said and "remote.options" not in passed_on:
            found.append(node.lineno)
    return found


def test_every_call_says_whether_code_is_trusted() -> None:
    assert unsaid("AutoConfig.from_pretrained(name)\nx.from_config(c, **more)") == [1, 2], "this test can fail"
    assert not unsaid("A.from_pretrained(n, trust_remote_code=False)\nA.from_pretrained(n, **remote.options)")
    sources = [*(ROOT / "src").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    calls = 0
    for path in sources:
        text = path.read_text()
        calls += text.count(".from_pretrained(")
        assert not unsaid(text), f"{path}: lines {unsaid(text)} do not pass trust_remote_code"
    assert calls > 5
