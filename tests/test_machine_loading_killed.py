"""Killed in the middle of a first load, at any moment: the next start is as if nothing had been."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from gguf_files import write_gguf
from kernel_tools import Compiler, ended, start_warm

from headstart.machine.cpu import build
from headstart.testing import tiny_model

pytestmark = [
    pytest.mark.skipif(os.name != "posix", reason="processes are forked, and killed by signals"),
    pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not())),
]

SIZES = {"vocab_size": 128, "hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": 256}

# One process imports everything once and forks for each load: a load that dies, then one that must notice nothing.
CODE = """
import importlib, json, os, resource, signal
from contextlib import suppress
from pathlib import Path
from headstart import LLM, SamplingParams
from headstart.machine.cpu.library import kernels

_, *models = sys.argv
work = Path(os.environ["HEADSTART_CACHE"])
kernels()  # loaded, not yet run: no threads before a fork
known = set(sys.modules)

def forked(does):
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.write(write, json.dumps(does()).encode())
        os._exit(0)
    os.close(write)
    with open(read) as said:
        answer = said.read()
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return ended, json.loads(answer) if answer else None

def load(model, quantization, dies_at=0, size=0):
    steps = []
    def step(event, arguments):
        if event not in ("open", "os.mkdir", "os.rename", "os.chmod", "os.remove", "os.rmdir"):
            return
        if event == "open" and not (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR):
            return
        if str(arguments[0]).startswith(str(cache)):
            steps.append(event)
            if len(steps) == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
    if size:  # in the middle of a file that grows past so many bytes
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    sys.addaudithook(step)
    llm = LLM(model, None, quantization=quantization, threads=1, max_rows=1, max_model_len=64, check=False)
    answer = llm.generate([5, 6, 7], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    return [list(answer.token_ids), llm.report.dtype, len(steps), sorted(set(sys.modules) - known)]

def there():
    files = [path for path in cache.rglob("*") if path.is_file()]
    return sorted((str(path.relative_to(cache)), path.stat().st_size) for path in files)

def new_cache(name):
    global cache
    cache = work / name
    os.environ["HEADSTART_CACHE"] = str(cache)
    cache.mkdir(mode=0o700)

def tried(model, quantization, count):
    # A whole load; then, each in a cache of its own, loads that die at so many moments, and the next start.
    new_cache("whole-" + quantization)
    code, (ids, dtype, steps, modules) = forked(lambda: load(model, quantization))
    for name in modules:  # once for all that follow
        with suppress(Exception):
            importlib.import_module(name)
    whole = there()
    found = {"steps": steps, "kept": [name for name, _ in whole], "whole": [code, ids, dtype], "after": []}
    moments = [{"dies_at": 1 + i * (steps - 1) // (count - 1)} for i in range(count)]
    for number, moment in enumerate([*moments, {"size": max(size for _, size in whole) // 2}]):
        new_cache(f"{quantization}-{number}")
        killed, _ = forked(lambda: load(model, quantization, **moment))
        left = there()
        code, (again, kind, _, _) = forked(lambda: load(model, quantization))
        found["after"].append([moment, -killed, left, [code, again, kind], there() == whole])
    return found

print(json.dumps([tried(models[0], "int4", 4), tried(models[1], "auto", 2)]))
"""


def test_the_next_start_after_a_kill_is_clean(tmp_path: Path) -> None:
    """Before several of the steps on the disk, and in the middle of a file: what a killed load left is cleared away,
    and the next one answers, and keeps, what a whole one does. With a packed copy, and with a file's own bits."""
    model, cache = tiny_model("llama", **SIZES), tmp_path / "cache"
    paths = [str(write_gguf(tmp_path / f"{kind}.gguf", model, kind=kind, table=kind)) for kind in ("F16", "Q8_0")]
    cache.mkdir(mode=0o700)
    settings: dict[str, Any] = {"cache": cache, "CXX": str(Compiler(tmp_path / "compiler").path)}
    (said,) = ended(start_warm(CODE, *paths, **settings))
    for found, kept, moments in zip(json.loads(said), ("weights.safetensors", "outline.json"), (4, 2), strict=True):
        assert found["steps"] > 10
        assert any(name.endswith(kept) for name in found["kept"])
        assert not any(Path(name).name.startswith(".") for name in found["kept"])
        assert [killed for _, killed, *_ in found["after"]] == [9] * moments + [25]  # the last: the file grew too large
        assert any(left for _, _, left, *_ in found["after"]), "the test is about what is left"
        for moment, _, left, answered, same in found["after"]:
            assert answered == found["whole"], (moment, left)
            assert same, (moment, left)
