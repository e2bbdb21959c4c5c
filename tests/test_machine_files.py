"""Files that appear whole or not at all, whoever else writes, dies or looks on meanwhile."""

from __future__ import annotations

import os
import signal
import stat
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kernel_tools import ended, names, start
from test_portable import run as run_without_posix

from headstart.distill.shards import Story, check_plan, write_shard
from headstart.distill.students import ModelStudent
from headstart.errors import HeadstartWarning, ModelNotFound
from headstart.machine import cache as cache_module
from headstart.machine import files
from headstart.machine.cache import guarded_folders
from headstart.machine.cpu import build
from headstart.machine.cpu.packed import load_packed, pack_model, save_packed
from headstart.machine.cpu.thread_count import Timed, threads_for
from headstart.machine.files import (
    locked,
    new_folder,
    open_guarded,
    read_guarded,
    replacing,
    sweep,
    temporary,
    write_whole,
)
from headstart.machine.head import HeadConfig, HeadNet, save_head
from headstart.machine.load import embedded
from headstart.testing import tiny_model, tiny_tokenizer


@pytest.fixture
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# -- whole or not at all ----------------------------------------------------------------------------------------------


def test_many_threads_write_one_file(tmp_path: Path) -> None:
    path, texts = tmp_path / "here" / "x", [chr(97 + i) * 50_000 for i in range(8)]
    seen: set[str] = set()

    def work(text: str) -> None:
        for _ in range(20):
            write_whole(path, text)
            seen.add(path.read_text())

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, texts))
    assert seen <= set(texts)
    assert names(path.parent) == ["x"]


def test_many_processes_write_one_file(tmp_path: Path) -> None:
    """With equal process numbers, too, as in two containers on one volume."""
    code = """
import os
os.getpid = lambda: 1
path = Path(sys.argv[2])
for i in range(100):
    files.write_whole(path, sys.argv[3] * 50_000)
    assert len(set(path.read_text())) == 1
"""
    ended(*(start(code, str(tmp_path / "x"), text, cache=tmp_path) for text in "abcd"))
    assert names(tmp_path) == ["x"]


def test_what_fails_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("before")

    def broken() -> None:
        with replacing(path) as work:
            work.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        broken()
    assert path.read_text() == "before"

    def broken_folder() -> None:
        with new_folder(tmp_path / "folder") as work:
            (work / "x").write_text("half")
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        broken_folder()
    assert names(tmp_path) == ["x"]


def test_a_folder_that_is_there_stays(tmp_path: Path) -> None:
    for text in ("first", "second"):
        with new_folder(tmp_path / "folder") as work:
            (work / "x").write_text(text)
    assert (tmp_path / "folder" / "x").read_text() == "first"
    assert names(tmp_path) == ["folder"]


def test_what_killed_processes_left_goes(tmp_path: Path) -> None:
    code = "import os, time\nwork = files.temporary(Path(sys.argv[2])); work.mkdir(); (work / 'x').touch(); print(work)"
    ended(start(code, str(tmp_path / "dead"), cache=tmp_path))
    ours, foreign = temporary(tmp_path / "mine"), temporary(tmp_path / "foreign")
    foreign = foreign.with_name(foreign.name.replace(files._where(), "0123abcd").replace(f"-{os.getpid()}-", "-1-"))
    other = [tmp_path / name for name in (".hidden-1", "model-1", ".mine.lock", ".shard-1.45")]
    for path in (ours, foreign, *other):
        path.touch()
    sweep(tmp_path, before=r"\.shard-\d\.\d+")
    assert set(names(tmp_path)) == {path.name for path in (ours, foreign, *other)}
    for path in (ours, foreign, *other):
        os.utime(path, (1e9, 1e9))
    sweep(tmp_path)  # after a day, whoever it was; but nothing that may be somebody else's
    assert set(names(tmp_path)) == {path.name for path in other}
    sweep(tmp_path, before=r"\.shard-\d\.\d+")
    assert set(names(tmp_path)) == {path.name for path in other[:3]}


# -- one at a time ----------------------------------------------------------------------------------------------------


def test_one_at_a_time(tmp_path: Path) -> None:
    path, inside, most = tmp_path / "x", 0, 0
    waited: list[str] = []
    guard = threading.Lock()

    def work(_: int) -> None:
        nonlocal inside, most
        with locked(path, lambda: waited.append("waited")):
            with guard:
                inside += 1
                most = max(most, inside)
            time.sleep(0.01)
            with guard:
                inside -= 1

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(24)))
    assert most == 1
    assert waited
    assert names(tmp_path) == []


def test_one_process_at_a_time(tmp_path: Path) -> None:
    """A counter that is read and written slowly."""
    code = """
import time
path = Path(sys.argv[2])
for _ in range(20):
    with files.locked(path):
        value = int(path.read_text())
        time.sleep(0.002)
        path.write_text(str(value + 1))
"""
    (tmp_path / "count").write_text("0")
    ended(*(start(code, str(tmp_path / "count"), cache=tmp_path) for _ in range(4)))
    assert (tmp_path / "count").read_text() == "80"
    assert names(tmp_path) == ["count"]


def test_a_killed_process_lets_go(tmp_path: Path) -> None:
    code = "import time\nwith files.locked(Path(sys.argv[2])):\n    print('locked', flush=True)\n    time.sleep(60)"
    run = start(code, str(tmp_path / "x"), cache=tmp_path)
    assert run.stdout is not None
    assert run.stdout.readline() == "locked\n"
    waited: list[bool] = []

    def kill() -> None:
        waited.append(True)
        os.killpg(run.pid, signal.SIGKILL)

    with locked(tmp_path / "x", kill):
        assert waited
    run.communicate()
    assert names(tmp_path) == []


def test_nobody_waits_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PATIENCE", 0.1)
    with locked(tmp_path / "x"), locked(tmp_path / "x"):
        pass
    monkeypatch.setattr(files, "_FCNTL", None)  # nor where there are no locks
    with locked(tmp_path / "x"), locked(tmp_path / "x"):
        pass
    assert names(tmp_path) == []


def test_without_posix(tmp_path: Path) -> None:
    code = """
import sys, warnings
from pathlib import Path
from headstart.machine import cache, files
warnings.simplefilter("error")
place = Path(sys.argv[1])
with files.locked(place / "x"), files.locked(place / "x"):
    files.write_whole(place / "x", "text", guarded=True)
assert files.read_guarded(place / "x") == b"text"
files.sweep(place)
assert next(cache.guarded_folders("kernels", make=True)) == place / "cache" / "kernels"
cache.clear_unused(place / "cache" / "kernels")
"""
    done = run_without_posix(code, str(tmp_path), cache=tmp_path / "cache")
    assert done.returncode == 0, done.stderr
    assert names(tmp_path) == ["cache", "x"]


# -- who may read and write it ----------------------------------------------------------------------------------------


def written(folder: Path) -> dict[str, Path]:
    """Every kind of weight file that we write."""
    check_plan(folder, {"a": 1})
    write_shard(folder, 0, [Story(np.zeros(3, np.int32), np.ones(3, np.bool_), 1.0)])
    config = HeadConfig(
        **{"target_hidden": 32, "target_layers": 2, "target_vocab": 50, "watch": (0,), "width": 32, "heads": 1},
        **{"kv_heads": 1, "head_dim": 32, "ffn": 32, "vocab": 20, "window": 8},
    )
    save_head(HeadNet(config, torch.arange(20)), folder / "head")
    ModelStudent(tiny_model("llama"), tiny_tokenizer()).save(folder / "model")
    found = {"shard": folder / "shard-00000.safetensors", "plan": folder / "plan.json"}
    for name in ("head", "model"):
        found |= {f"{name} {file.name}": file for file in (folder / name).iterdir()}
    return found


@pytest.mark.parametrize(("umask", "wanted"), [(0o022, 0o644), (0o027, 0o640), (0o002, 0o664)], indirect=["umask"])
def test_weights_are_for_whom_the_umask_says(umask: int, wanted: int, tmp_path: Path) -> None:
    found = written(tmp_path)
    assert {name: oct(mode(path)) for name, path in found.items()} == dict.fromkeys(found, oct(wanted))
    assert {"head model.safetensors", "model model.safetensors"} <= set(found)


@pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not()))
@pytest.mark.parametrize(("umask", "wanted"), [(0o022, 0o644), (0o077, 0o600), (0o000, 0o644)], indirect=["umask"])
def test_packed_weights_are_for_all_to_read_and_for_nobody_else_to_write(
    umask: int, wanted: int, tmp_path: Path
) -> None:
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "head_dim": 32}
    packed = pack_model(tiny_model("llama", **sizes, num_key_value_heads=1), "int8")
    path = tmp_path / "x.safetensors"
    save_packed(packed, path)
    assert oct(mode(path)) == oct(wanted)
    assert load_packed(path) is not None
    path.chmod(0o666)
    with pytest.raises(PermissionError, match="can be written by other users"):
        load_packed(path)


def test_what_is_opened(tmp_path: Path) -> None:
    path = tmp_path / "x"
    write_whole(path, "text", guarded=True)
    assert read_guarded(path) == b"text"
    link = tmp_path / "link"
    link.symlink_to(path)
    with pytest.raises(PermissionError, match="symbolic link"):
        open_guarded(link)
    tmp_path.chmod(0o770)
    with pytest.raises(PermissionError, match="can be written by other users"):
        open_guarded(path)
    tmp_path.chmod(0o700)
    with pytest.raises(FileNotFoundError):
        open_guarded(tmp_path / "none")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give files away")
def test_roots_files_are_everyones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_whole(tmp_path / "x", "text", guarded=True)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert read_guarded(tmp_path / "x") == b"text"
    monkeypatch.undo()
    os.chown(tmp_path / "x", 12345, 12345)
    with pytest.raises(PermissionError, match="belongs to another user"):
        read_guarded(tmp_path / "x")


def test_folders_that_are_safe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, apart = tmp_path / "cache", tmp_path / "apart"
    apart.mkdir()
    monkeypatch.setenv("HEADSTART_CACHE", str(cache))
    monkeypatch.setattr("tempfile.tempdir", str(apart))
    assert list(guarded_folders("packed")) == []
    assert next(guarded_folders("packed", make=True)) == cache / "packed"
    assert names(cache) == ["packed"], "no private one is made without need"
    assert list(guarded_folders("packed")) == [cache / "packed"]
    (cache / "packed").chmod(0o777)
    with pytest.warns(HeadstartWarning, match="chmod go-w"):
        (private,) = guarded_folders("packed", make=True)
    assert mode(private) == 0o700
    private.chmod(0o777)
    with pytest.warns(HeadstartWarning):
        (last,) = guarded_folders("packed", make=True, elsewhere=True)
    assert last.parent == apart
    assert mode(last) == 0o700


@pytest.mark.parametrize("how", ["a file", "in a file", "read-only"])
def test_a_cache_folder_that_cannot_be_used_is_told_once(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "cache"
    if how == "read-only":
        place.mkdir()
        able = os.access
        monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != place and able(path, mode))  # root can
        monkeypatch.setattr(Path, "mkdir", refused)
    else:
        place.write_text("")
    cache = place / "deeper" if how == "in a file" else place
    monkeypatch.setenv("HEADSTART_CACHE", str(cache))
    monkeypatch.setattr(cache_module, "_told", set())
    reason = f"{place} cannot be written" if how == "read-only" else f"{place} is a file, not a folder"
    with pytest.warns(HeadstartWarning) as said:
        assert list(guarded_folders("packed", make=True)) == []
    assert list(guarded_folders("kernels", make=True)) == []  # a second warning would be an error here
    (told,) = [str(each.message) for each in said]
    assert told.startswith(f"the cache folder {cache} cannot be used: {reason}. So nothing is remembered")
    assert "kernels are compiled again" in told
    assert "set HEADSTART_CACHE" in told
    monkeypatch.setattr(embedded, "_wheel_file", lambda: tmp_path / "model.gguf")
    monkeypatch.setattr(embedded, "find_spec", lambda name: name)
    with pytest.raises(ModelNotFound, match=f"{reason}; set HEADSTART_CACHE") as refusal:
        embedded.embedded_folder()
    assert "Errno" not in str(refusal.value)


def refused(*_: object, **__: object) -> None:
    raise PermissionError


def test_so_is_one_where_only_the_threads_would_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").write_text("")
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cache_module, "_told", set())
    monkeypatch.setattr("headstart.machine.cpu.thread_count.timed", lambda step, threads: Timed(1.0, threads, threads))
    with pytest.warns(HeadstartWarning, match="cache cannot be used: .* is a file, not a folder"):
        assert threads_for(lambda threads: None, {}, 2) == 1
