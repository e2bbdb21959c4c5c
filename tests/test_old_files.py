"""Files that an earlier version wrote still load, and give the numbers they gave: heads and packed copies.

``data/written-by-0.1.0/make.py`` says how they were made. A later version's files get a folder of their own beside it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError

from headstart import LLM, HeadstartError
from headstart.machine.cpu import build
from headstart.machine.head import load_head

OLD = Path(__file__).parent / "data" / "written-by-0.1.0"
EXPECTED: dict[str, Any] = json.loads((OLD / "expected.json").read_text())

spec = importlib.util.spec_from_file_location("old_make", OLD / "make.py")
assert spec is not None
assert spec.loader is not None
make = importlib.util.module_from_spec(spec)
spec.loader.exec_module(make)

with_kernels = pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not()))


def same(answer: dict[str, Any], expected: dict[str, Any]) -> None:
    assert answer["token_ids"] == expected["token_ids"]
    assert answer["logprobs"] == pytest.approx(expected["logprobs"], abs=1e-4)


def test_a_head_gives_the_same_numbers() -> None:
    assert make.head_logits(load_head(OLD / "head")) == pytest.approx(EXPECTED["head_logits"], abs=1e-5)


def test_a_head_drafts_for_its_target() -> None:
    llm = LLM(OLD / "target", OLD / "head", gamma=3)
    same(make.answer(llm), EXPECTED["float32"])
    assert llm.drafter_name == "head"
    assert llm.stats.drafted > 0


@with_kernels
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_packed_copy_is_taken(kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "cache"))  # the kernels are loaded already
    folder = Path(shutil.copytree(OLD / "target", tmp_path / "target"))
    same(make.answer(LLM(folder, None, quantization=kind)), EXPECTED[kind])
    (made,) = (tmp_path / "cache").rglob("weights.safetensors")  # where this version looks for a copy of this model
    shutil.rmtree(made.parent)
    weights, times = folder / "model.safetensors", (folder / "model.safetensors").stat()
    weights.write_bytes(bytes(times.st_size))  # so that the copy alone can say what comes now
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises((HeadstartError, SafetensorError)):
        LLM(folder, None, quantization=kind)
    shutil.copytree(OLD / f"packed-{kind}", made.parent)
    for path in (made.parent, *made.parent.iterdir()):  # where this checkout's umask lets others write, none is taken
        path.chmod(path.stat().st_mode & ~0o022)
    same(make.answer(LLM(folder, None, quantization=kind)), EXPECTED[kind])
