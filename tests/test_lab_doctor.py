"""``doctor``: what is slow or wrong is said, with its reason; and it works on a machine where little else does."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gguf_files import write_gguf

from headstart.errors import ModelNotFound
from headstart.lab.checkup import doctor as room
from headstart.lab.checkup import looks
from headstart.lab.checkup.doctor import Asked, doctor
from headstart.lab.checkup.pair import examined, outline
from headstart.lab.checkup.record import Checkup, Finding
from headstart.lab.report.doctor import page
from headstart.machine.cpu import build
from headstart.machine.load.faults import check_folder
from headstart.testing import tiny_model, tiny_tokenizer

WELL = {"version": "2", "cuda_build": None, "threads": 1, "capability": "AVX2", "devices": []}
GPU = {"name": "H200", "capability": [9, 0], "free": 10 << 30, "total": 140 << 30}


def said(found: Any, level: str) -> str:
    return " | ".join(f"{each.about}: {each.text} {each.advice}" for each in found if each.level == level)


# -- torch


def test_a_torch_that_fails_or_ends_its_process_is_one_sentence() -> None:
    told = looks.asked_torch("raise ImportError('libcudart.so.12: cannot open shared object file')")
    assert "libcudart.so.12" in said(looks.torch(told, True), "wrong")
    told = looks.asked_torch("import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    assert "signal 4" in said(looks.torch(told, True), "wrong")


def test_threads_beyond_the_quota_are_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looks, "processors", lambda: 2)
    assert "16 threads" in said(looks.torch(WELL | {"threads": 16}, True), "slow")
    assert not said(looks.torch(WELL | {"threads": 2}, True), "slow")


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    old = GPU | {"name": "T4", "capability": [7, 5]}
    assert "7.5" in said(looks.torch(WELL | {"devices": [old]}, True), "slow")
    monkeypatch.setattr(looks.shutil, "which", lambda name: "nvidia-smi" if name == "nvidia-smi" else None)
    assert "without CUDA" in said(looks.torch(WELL, True), "slow")


# -- machine


def test_no_compiler_and_no_kernels(cold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cold.mkdir(parents=True)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(build, "_compiler", lambda: None)
    assert "ziglang" in said(looks.compilers(), "slow")
    monkeypatch.setattr(build, "_compiler", lambda: ["no-such-c++"])
    assert "cannot be found" in said(looks.compilers(), "slow")
    monkeypatch.setattr(build, "_compiler", lambda: [sys.executable])
    assert "at first use" in said(looks.compilers(), "note")
    (cold / build.library_name(build.isa())).write_bytes(b"")
    assert "are compiled" in said(looks.compilers(), "fine")


def test_processor_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looks.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(looks, "flags", lambda: frozenset({"sse2"}))
    monkeypatch.setattr(looks, "load_average", lambda: 99.0)
    monkeypatch.setattr(looks, "allowed_cores", lambda: 0)
    monkeypatch.setattr(looks, "host_memory", lambda: {"total": 4 << 30, "free": 1 << 30})
    monkeypatch.setenv("HEADSTART_CPU_ISA", "plain")
    slow = said(looks.work(), "slow")
    assert "no AVX2" in slow
    assert "busy" in slow
    assert "HEADSTART_CPU_ISA=plain" in slow
    assert "1.07 GB" in said(looks.memory(), "slow")


def test_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cache"
    monkeypatch.setenv("HEADSTART_CACHE", str(folder))
    assert said(looks.cache(), "fine")
    (folder / "kernels").mkdir(parents=True)
    (folder / "kernels" / "x.so").write_bytes(b"0" * 1000)
    (folder / "strange").mkdir()
    kept = {place.name: place for place in looks.kept()}
    assert kept["kernels"].bytes == 1000
    assert "anew" in kept["kernels"].deletable
    assert "not made by this version" in kept["strange"].what
    folder.chmod(0o777)
    assert "can be written by other users" in said(looks.cache(), "slow")
    monkeypatch.setattr(looks.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 5 << 20})())
    assert "only 5.2 MB left" in said(looks.cache(), "slow")
    monkeypatch.setattr(looks.os, "access", lambda path, how: False)
    assert "cannot be written" in said(looks.cache(), "slow")


def test_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("HEADSTART_CACHE", raising=False)
    monkeypatch.setattr(Path, "home", none)
    assert "HEADSTART_CACHE" in said(looks.cache(), "slow")
    assert [place for place in looks.kept() if place.name == "kernels"] == []


def test_missing_packages() -> None:
    known = looks.versions() | {"transformers": None, "llguidance": None}
    assert "transformers is not installed" in said(looks.extras(known), "wrong")
    assert "headstart[structured]" in said(looks.extras(known), "note")


# -- pairs


def test_a_pair_by_its_files(tmp_path: Path) -> None:
    tiny_model("llama", num_hidden_layers=4, hidden_size=64).save_pretrained(tmp_path / "big")
    tiny_model("gpt2").save_pretrained(tmp_path / "small")
    big = outline(str(tmp_path / "big"))
    assert not isinstance(big, str)
    weights = sum(p.numel() for p in tiny_model("llama", num_hidden_layers=4, hidden_size=64).parameters())
    assert (big.parameters, big.layers, big.kv_width, big.fused) == (weights, 4, 32, True)
    pair = Asked(str(tmp_path / "big"), str(tmp_path / "small"), rows=4, max_model_len=100)
    facts, found = examined(pair, 1 << 30, gpu=False)
    assert facts["target"]["kind"] == "bfloat16"
    assert facts["target"]["keys"] == 2 * 4 * 32 * 4 * 100 * 4
    assert "it fits" in said(found, "fine")
    assert "do not run this architecture" in said(found, "slow")
    assert "it does not fit" in said(examined(pair, 1000, gpu=False)[1], "wrong")
    assert facts["draft"]["kind"] == "float32"


def test_a_gguf_draft_runs_with_its_own_bits(tmp_path: Path) -> None:
    model = tiny_model("llama", hidden_size=64, intermediate_size=64)
    path = str(write_gguf(tmp_path / "d.gguf", model, kind="Q8_0"))
    facts, found = examined(Asked(path, path), None, gpu=False)
    assert facts["draft"]["kind"] == "Q8_0"
    assert facts["draft"]["weights"] == facts["draft"]["bytes"]
    assert said(found, "fine").count("runs as Q8_0") == 2
    assert examined(Asked(path, path, dtype="float32"), None, gpu=False)[0]["draft"]["kind"] == "int8"
    assert examined(Asked(path, path, draft_quantization="int4"), None, gpu=False)[0]["draft"]["kind"] == "int4"


def test_tokens_are_compared(tmp_path: Path) -> None:
    """Not sizes: models of one tokenizer are padded to several, and of several tokenizers to one."""
    model = tiny_model("llama", hidden_size=64, intermediate_size=64)
    target = str(write_gguf(tmp_path / "t.gguf", model))
    other = str(write_gguf(tmp_path / "o.gguf", model, special=("<other>",)))
    wide = tiny_model("llama", hidden_size=64, intermediate_size=64, vocab_size=model.config.vocab_size + 2000)
    padded = str(write_gguf(tmp_path / "p.gguf", wide, filling=2000))
    for draft, level, words in (
        (other, "wrong", "token 95 is '<spare0>' in the one and '<other>' in the other"),
        (padded, "fine", "the same tokens"),
        (target, "fine", "the same tokens"),
    ):
        found = examined(Asked(target, draft), None, gpu=False)[1]
        assert words in said(found, level)
        assert bool(said(found, "wrong")) == (level == "wrong")
    tiny_model("llama").save_pretrained(tmp_path / "bare")
    bare = str(tmp_path / "bare")
    assert "not compared: bare has no tokenizer" in said(examined(Asked(bare, bare), None, gpu=False)[1], "note")
    tiny_tokenizer().save_pretrained(bare)
    assert "the same tokens" in said(examined(Asked(bare, bare), None, gpu=False)[1], "fine")
    broken = examined(Asked(target, padded), None, gpu=False, torch_works=False)[1]
    assert "not compared: reading tokenizers needs a torch" in said(broken, "wrong")
    assert "not compared: the target is the embedded" in said(examined(Asked(None, bare), None, gpu=False)[1], "note")


def test_files_that_say_nothing(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{")
    (broken / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 60))
    for source in (str(tmp_path / "nowhere"), str(tmp_path / "no.gguf")):
        assert "cannot be read" in said(examined(Asked(source, None), None, gpu=False)[1], "wrong")
    assert "is damaged" in said(examined(Asked(str(broken), None), None, gpu=False)[1], "wrong")
    broken_too = examined(Asked(str(broken), None), None, gpu=False, torch_works=False)[1]
    assert "broken cannot be read" in said(broken_too, "wrong")
    assert "fetched from the hub" in said(examined(Asked("someone/unheard-of", None), None, gpu=False)[1], "note")


def test_a_folder_without_a_model_is_refused_as_loading_refuses_it(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound) as refused:
        check_folder(tmp_path)
    for pair in (Asked(str(tmp_path), None), Asked(None, str(tmp_path))):
        [found] = examined(pair, None, gpu=False)[1]
        assert (found.level, found.text) == ("wrong", str(refused.value))
    [found] = examined(Asked(str(tmp_path), None), None, gpu=False, torch_works=False)[1]
    assert "holds no model (no config.json)" in found.text


# -- the whole


def test_one_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looks, "asked_torch", lambda: WELL | {"devices": [GPU]})

    def broken() -> Any:
        raise OSError("no such thing as /proc")
        yield

    monkeypatch.setattr(room.looks, "work", broken)
    found = doctor(Asked("someone/unheard-of"), environment="nobody reads HEADSTART_ROW")
    assert found.well
    assert "could not be looked at" in said(found.findings, "note")
    assert "HEADSTART_ROW" in said(found.findings, "note")
    assert found.pair is not None
    assert found.pair["device"] == "GPU"
    assert json.dumps(found.to_json())
    worse = Checkup({"memory": 1}, {}, {}, (), (Finding("x", "wrong", "<b>bad</b>"),), ())
    assert not worse.well
    assert "&lt;b&gt;bad" in page(worse)


def test_the_command_on_a_broken_machine(tmp_path: Path) -> None:
    """No torch that works, no home, a cache that cannot be made, no compiler: a report, no traceback, status 3."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libtorch.so: wrong ELF class')")
    (tmp_path / "file").write_text("")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    around = {"PYTHONPATH": path, "HEADSTART_CACHE": str(tmp_path / "file" / "cache"), "HEADSTART_ROWZ": "3"}
    done = subprocess.run(
        [sys.executable, "-m", "headstart", "doctor", "--json"],
        capture_output=True,
        text=True,
        env=around,
        cwd=tmp_path,
    )
    assert done.returncode == 3, done.stderr
    assert "Traceback" not in done.stderr
    results = json.loads(done.stdout)["results"]
    told = " ".join(each["text"] for each in results["findings"])
    for words in ("wrong ELF class", "cannot be written", "HEADSTART_ROWZ"):
        assert words in told
    assert not results["well"]
