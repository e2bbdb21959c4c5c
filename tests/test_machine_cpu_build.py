"""Compiled kernels: made once, found again without a compiler, never silently missing."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest
from kernel_tools import Compiler, ended, names, start, use

from headstart.errors import InvalidParameter
from headstart.machine.cpu import build

pytestmark = pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not()))

OBTAIN = "print(build.compiled('native'))"


# -- found again ------------------------------------------------------------------------------------------------------


def test_a_library_that_is_there_needs_no_compiler(cold: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, Compiler(tmp_path / "one"))
    made = build.compiled("native")
    assert made.parent == cold
    note = json.loads(made.with_suffix(".json").read_text())
    assert note["version"] == "stand-in 1.0"
    use(monkeypatch, None)
    assert build.compiled("native") == made
    assert build.why_not() is None
    use(monkeypatch, Compiler(tmp_path / "two", "exit 1"))  # another compiler, even a broken one, changes nothing
    monkeypatch.setattr(subprocess, "run", lambda *args, **more: 1 / 0)  # nor does a machine that cannot start any
    assert build.compiled("native") == made


@pytest.mark.parametrize("damage", ["cut", "changed", "no note", "an empty note"])
def test_a_damaged_library_is_made_anew(
    cold: Path, damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = Compiler(tmp_path / "one")
    use(monkeypatch, compiler)
    made = build.compiled("native")
    whole, note = made.read_bytes(), made.with_suffix(".json")
    if damage in ("cut", "changed"):
        made.write_bytes(whole[:5000] if damage == "cut" else whole[:-1] + b"?")
    elif damage == "no note":
        note.unlink()
    else:
        note.write_text("[]")
    assert build.why_not() is None
    assert made.read_bytes() == whole
    assert compiler.count == 2


def test_a_library_for_another_c_library_is_made_anew(
    cold: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = tmp_path / "odd.so"
    odd.write_bytes(b"\x7fELF and nothing that could be loaded")
    use(monkeypatch, Compiler(tmp_path / "one", library=odd))
    build.compiled("native")
    use(monkeypatch, Compiler(tmp_path / "two"))
    assert build.why_not() is None


def test_what_a_library_is_named_by(cold: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = build._sources()
    assert {"core.h", "decoder.cpp"} <= set(sources)
    name = build._name("native", sources)
    assert build._name("plain", sources) != name
    assert build._name("native", sources | {"core.h": sources["core.h"] + b" "}) != name
    plain = build._name("plain", sources)
    monkeypatch.setattr(build, "_processor", lambda: "flags : none")
    assert build._name("native", sources) != name
    assert build._name("plain", sources) == plain, "it runs on every processor of the kind"
    monkeypatch.setattr(build, "OPTIONS", (*build.OPTIONS, "-g"))
    assert build._name("plain", sources) != plain


def test_what_is_compiled_is_what_it_is_named_by(cold: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is brought up to date while the compiler starts."""
    sources = tmp_path / "csrc"
    sources.mkdir()
    for name, content in build._sources().items():
        (sources / name).write_bytes(content)
    monkeypatch.setattr(build, "SOURCES", sources)
    seen, before = tmp_path / "seen.cpp", (sources / "draft_token.cpp").read_bytes()
    compiler = Compiler(tmp_path / "one")
    text = compiler.path.read_text()
    change = f"echo '// newer' >> '{sources}/draft_token.cpp'\n"  # at the first call, whatever it asks for
    keep = f'for one in "$@"; do case "$one" in *draft_token.cpp) cat "$one" > \'{seen}\';; esac; done\n'
    compiler.path.write_text(text.replace("#!/bin/sh\n", "#!/bin/sh\n" + change + keep))
    use(monkeypatch, compiler)
    build.compiled("native")
    assert seen.read_bytes() == before


# -- failures ---------------------------------------------------------------------------------------------------------


def test_without_a_compiler_the_reason_is_said_and_not_remembered(
    cold: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, None)
    assert "no C++ compiler found" in str(build.why_not())
    assert "pip install 'headstart[compiler]'" in str(build.why_not())
    assert names(cold) == []
    use(monkeypatch, Compiler(tmp_path / "one"))
    assert build.why_not() is None


def test_a_compiler_that_fails_is_asked_once_for_a_start_up_and_again_for_the_next(
    cold: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = Compiler(tmp_path / "one", '[ "$tries" -lt 2 ] && { echo out of order >&2; exit 1; }')
    use(monkeypatch, compiler)
    assert "out of order" in str(build.why_not())
    assert "out of order" in str(build.why_not())
    assert compiler.count == 1
    monkeypatch.setattr(build, "REMEMBERED", 0.0)
    assert build.why_not() is None
    assert compiler.count == 2


@pytest.mark.parametrize("how", ["kill -9 $$", "echo 'c++: fatal error: Killed signal terminated program' >&2; exit 1"])
def test_a_compiler_that_was_killed_is_tried_again(
    cold: Path, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = Compiler(tmp_path / "one", f'[ "$tries" -lt 3 ] && {{ {how}; }}')
    use(monkeypatch, compiler)
    assert build.why_not() is None
    assert compiler.count == 3
    use(monkeypatch, Compiler(tmp_path / "two", how))
    monkeypatch.setattr(build, "_libraries", {})
    next(cold.glob("*.so")).unlink()
    assert "ignal" in str(build.why_not())


def test_a_process_that_cannot_be_started_is_tried_again(
    cold: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, Compiler(tmp_path / "one"))
    real, failures = subprocess.run, [errno.EAGAIN, errno.ENOMEM]

    def start(*args: object, **more: object) -> object:
        if failures:
            number = failures.pop()
            raise OSError(number, os.strerror(number))
        return real(*args, **more)  # type: ignore[call-overload]

    monkeypatch.setattr(subprocess, "run", start)
    assert build.why_not() is None
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    monkeypatch.setattr(build, "_libraries", {})
    next(cold.glob("*.so")).unlink()
    assert "cannot be run: No such file" in str(build.why_not())


def test_a_full_disk_is_told_in_one_sentence(cold: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Compiler(tmp_path / "one", 'cat "$0" > /dev/full || exit 1')
    use(monkeypatch, compiler)
    reason = str(build.why_not())
    assert reason.endswith(f"{cold} cannot be written (No space left on device)")
    assert len(reason.splitlines()) == 1
    assert compiler.count == 1, "other folders on the same disk are as full"


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="there is no second disk")
def test_a_full_disk_is_left_for_another(cold: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers, from another place: the kernels are compiled among the temporary files."""
    other = Path("/dev/shm") / f"headstart-{os.getpid()}"
    if other.parent.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("/dev/shm is on the same disk")
    other.mkdir()
    try:
        monkeypatch.setenv("HEADSTART_CACHE", str(other))
        use(monkeypatch, Compiler(tmp_path / "one", 'case "$out" in /dev/shm/*) cat "$0" > /dev/full || exit 1;; esac'))
        made = build.compiled("native")
        assert made.is_relative_to(tmp_path / "temporary")
        use(monkeypatch, None)
        assert build.compiled("native") == made, "found again"
    finally:
        subprocess.run(["rm", "-rf", str(other)], check=True)


def test_an_unknown_instruction_set_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADSTART_CPU_ISA", "avx3")
    with pytest.raises(InvalidParameter, match="HEADSTART_CPU_ISA must be native, avx2, plain or not set, not 'avx3'"):
        build.why_not()
    monkeypatch.setenv("HEADSTART_CPU_ISA", "")
    assert build.isa() == "native"


def test_instructions_that_the_processor_has_not_are_not_run(cold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_processor", lambda: "flags : sse2 avx")
    assert "this processor has no avx2, fma" in str(build.why_not("avx2"))


# -- many at once -----------------------------------------------------------------------------------------------------


def test_many_threads_compile_once(cold: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Compiler(tmp_path / "one", "sleep 0.3")
    use(monkeypatch, compiler)
    said: list[str] = []
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: build.compiled("native", said.append), range(16)))
        loaded = list(pool.map(lambda _: build.load_kernels(), range(16)))
    assert len(set(found)) == 1
    assert compiler.count == 1
    assert len(set(map(id, loaded))) == 1
    assert not isinstance(loaded[0], str)
    assert "compiling the CPU kernels (once, some seconds)" in said
    assert "waiting for another process that compiles the CPU kernels" in said
    assert len(names(cold)) == 2


def test_many_processes_compile_once(cold: Path, tmp_path: Path) -> None:
    compiler = Compiler(tmp_path / "one", "sleep 0.5")
    code = (
        "kernels = build.load_kernels('native', lambda text: print(text, file=sys.stderr)); assert kernels.hs_forward\n"
    )
    runs = [start(code + OBTAIN, cache=cold.parent, CXX=str(compiler.path)) for _ in range(6)]
    assert len(set(ended(*runs))) == 1
    assert compiler.count == 1
    assert len(names(cold)) == 2


def test_two_threads_of_the_compiler_itself(cold: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a disk has no locks, everyone compiles for himself, and nobody takes another's files away."""
    compiler = Compiler(tmp_path / "one", "sleep 0.3")
    use(monkeypatch, compiler)
    monkeypatch.setattr("headstart.machine.files._FCNTL", None)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: build.compiled("native"), range(4)))
    assert len(set(found)) == 1
    assert compiler.count > 1
    assert len(names(cold)) == 2


def test_killed_while_compiling(cold: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Compiler(tmp_path / "one", 'echo half > "$out"; sleep 60')
    run = start(OBTAIN, cache=cold.parent, CXX=str(compiler.path))
    until = time.monotonic() + 60
    while not list(cold.glob(".*/kernels.so")) and time.monotonic() < until:
        time.sleep(0.05)
    os.killpg(run.pid, signal.SIGKILL)
    run.communicate()
    assert any(name.startswith(".") for name in names(cold)), "the test is about what it left"
    use(monkeypatch, Compiler(tmp_path / "two"))
    assert build.why_not() is None
    assert len(names(cold)) == 2


# -- compilers --------------------------------------------------------------------------------------------------------


def test_which_compiler_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The one that is named, the system's, or the one that pip can install."""
    own = tmp_path / "clang++"
    own.write_text("#!/bin/sh\n")
    own.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(build, "find_spec", lambda name: name == "ziglang" or None)
    monkeypatch.setenv("CXX", "ccache g++")
    assert build._compiler() == ["ccache", "g++"]
    monkeypatch.delenv("CXX")
    assert build._compiler() == [str(own)]
    own.unlink()
    assert build._compiler() == [sys.executable, "-m", "ziglang", "c++"]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ziglang") is None, reason="ziglang is not installed")
def test_ziglang_compiles_the_kernels(cold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(build, "COMPILERS", ())
    assert build.why_not() is None
