"""How the command begins and ends, in processes of their own: imports, Ctrl-C, closed pipes, full disks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from terminal_tools import environment

from headstart.cli.exits import one_line_errors
from headstart.cli.main import app
from headstart.errors import ModelRefused

# What started the tests may ignore Ctrl-C (a shell does so in the background), and that would be inherited.
_HEARS_CTRL_C = (
    "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
)


def started(*arguments: str, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _HEARS_CTRL_C, sys.executable, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(**variables),
    )


def test_help_and_mistakes_import_no_torch() -> None:
    code = """
import sys
from headstart.cli.main import app
for arguments in (["generate", "--help"], ["generate", "--gamma", "65", "x"], ["generate", "-t", "-1", "x"]):
    try:
        app(arguments)
    except SystemExit:
        pass
import headstart
headstart.SamplingParams, headstart.HeadstartError, headstart.Proposal
heavy = {"torch", "transformers", "numpy"} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr


def test_every_public_name_is_found_where_it_is_said_to_be() -> None:
    import headstart

    assert set(headstart._HOMES) == set(headstart.__all__) <= set(dir(headstart))
    assert headstart.LLM is headstart.api.LLM  # rooms are reachable without importing each
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        headstart.nothing_of_the_kind  # noqa: B018


def test_ctrl_c_while_modules_are_imported(tmp_path: Path) -> None:
    """Packages that catch any exception on their way must not swallow it, nor show a traceback of their own."""
    (tmp_path / "torch.py").write_text(
        "import os, sys, time\n"
        "print('importing', flush=True)\n"
        "for _ in range(600):\n"
        "    try:\n"
        "        time.sleep(0.1)\n"
        "    except BaseException:\n"
        "        pass\n"
    )
    paths = os.pathsep.join((str(tmp_path), environment()["PYTHONPATH"]))
    process = started("-m", "headstart", "generate", "-m", "/nowhere", "x", PYTHONPATH=paths)
    assert process.stdout is not None
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert (out, errors.splitlines()[-1]) == ("", "stopped")
    assert "Traceback" not in errors


def test_ctrl_c_while_text_is_written(tiny_folder: str) -> None:
    process = started("-m", "headstart", "generate", "-m", tiny_folder, "-n", "4000", "--ignore-eos", "--raw", "Hello")
    assert process.stdout is not None
    begun = process.stdout.read(5)
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert len(begun + rest) < 4000
    assert rest.endswith("\n")
    assert errors.splitlines()[-1] == "stopped"
    assert "Traceback" not in errors


def test_without_standard_input() -> None:
    command = 'exec "$0" -m headstart generate <&-'
    done = subprocess.run(["sh", "-c", command, sys.executable], capture_output=True, text=True, env=environment())
    assert done.returncode == 2
    assert done.stderr == "error: prompt is empty\n"


@pytest.mark.parametrize("arguments", [["-n", "400"], ["--json", "-n", "4"]])
def test_a_closed_pipe_ends_quietly(
    tiny_folder: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as file:
        monkeypatch.setattr(sys, "stdout", file)
        with pytest.raises(SystemExit) as ended:
            app(["generate", "-m", tiny_folder, *arguments, "Hello"])
    assert ended.value.code == 141
    assert capfd.readouterr().err == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_line(
    tiny_folder: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w") as file:
        monkeypatch.setattr(sys, "stdout", file)
        with pytest.raises(SystemExit) as ended:
            app(["generate", "-m", tiny_folder, "-n", "4", "Hello"])
    assert ended.value.code == 2
    assert capfd.readouterr().err == "error: No space left on device\n"


class ForeignError(Exception):
    """As a library in another language reports a disk that is full."""


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ModelRefused("it is\n  no good"), "error: it is no good"),
        (PermissionError(13, "Permission denied", "/there"), "error: Permission denied: /there"),
        (OSError("We couldn't connect\nto the hub"), "error: We couldn't connect to the hub"),
        (ForeignError("I/O error: No space left on device (os error 28)"), "error: I/O error: No space left on device"),
        (MemoryError(), "error: out of memory"),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
            "error: out of memory; a sm",
        ),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes. Error code 12"),
            "error: out of memory (4096 bytes were wanted at once); a smaller --max-model-len or fewer --max-rows need",
        ),
        (
            RuntimeError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has"),
            "error: out of memory (2.50 GiB were wanted at once); a smaller --max-model-len or fewer --max-rows need",
        ),
    ],
)
def test_what_people_can_mend_is_one_line(error: Exception, line: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended, one_line_errors():
        raise error
    assert ended.value.code == 2
    shown = capfd.readouterr().err
    assert shown.startswith(line)
    assert "--quantization" not in shown
    assert shown.count("\n") == 1


def test_a_bug_shows_itself() -> None:
    with pytest.raises(ZeroDivisionError), one_line_errors():
        raise ZeroDivisionError


def test_our_warnings_are_lines_and_no_character_is_a_reason_to_stop() -> None:
    code = """
import sys, warnings
sys.argv = ["headstart", "--version"]
from headstart.__main__ import main
try:
    main()
except SystemExit:
    pass
import headstart.cli.screen
warnings.warn_explicit("ours", UserWarning, headstart.cli.screen.__file__, 1)
warnings.warn_explicit("ours, too", headstart.errors.HeadstartWarning, "/elsewhere/module.py", 1)
warnings.warn_explicit("theirs", UserWarning, "/elsewhere/module.py", 1)
print("na\\xefve")
"""
    more = {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(**more))
    assert done.returncode == 0, done.stderr
    assert done.stderr == "warning: ours\nwarning: ours, too\n"
    assert done.stdout.endswith("na?ve\n")
