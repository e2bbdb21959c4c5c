"""Processes that begin with torch, transformers and headstart imported, which takes seconds: forked from one that has.

Knows: how to start code in a process of its own and how it ended. Does not know: what is tested. A process is a real
one: it has its own memory and locks, may be killed, and ends as Python ends. What it must not be used for is a test
of what happens while modules are imported.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

#: Reads commands, one a line. A child leaves the loop with its code, and runs it behind, as the main program.
_PARENT = """
import json, os, sys, tempfile, time
import torch, transformers
from transformers import GPT2LMHeadModel, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3ForCausalLM
import headstart.assembly, headstart.testing, headstart.machine.cpu.open, headstart.machine.load.embedded

def code_of_a_child():
    for line in sys.stdin:
        command = json.loads(line)
        if "pid" in command:
            code, until = None, time.monotonic() + command["seconds"]
            while code is None and time.monotonic() < until:
                ended, status = os.waitpid(command["pid"], os.WNOHANG)
                code = os.waitstatus_to_exitcode(status) if ended else time.sleep(0.01)
            print(json.dumps(code), flush=True)
            continue
        child = os.fork()
        if not child:
            os.setsid()
            for number, path in enumerate(["/dev/null", *command["files"]]):
                os.dup2(os.open(path, os.O_RDWR), number)
            os.environ.clear()
            os.environ.update(command["environment"])
            tempfile.tempdir = None
            sys.argv = ["-c", *command["arguments"]]
            return command["code"]
        print(child, flush=True)

code = code_of_a_child()
if code is not None:
    exec(compile(code, "<code>", "exec"), {"__name__": "__main__", "sys": sys})
"""


@cache
def _parent() -> subprocess.Popen[str]:
    sources = os.pathsep.join(path for path in sys.path if path)
    around = os.environ | {"PYTHONPATH": sources, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", _PARENT]
    parent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=around)
    atexit.register(parent.communicate)  # at the end of its input it ends
    return parent


def _told(command: dict[str, object]) -> int | None:
    parent = _parent()
    assert parent.stdin is not None
    assert parent.stdout is not None
    parent.stdin.write(json.dumps(command) + "\n")
    parent.stdin.flush()
    answer: int | None = json.loads(parent.stdout.readline())
    return answer


class WarmProcess:
    """Code in a process of its own, in a session of its own. It has what the tests need of ``subprocess.Popen``."""

    def __init__(self, code: str, *arguments: str, environment: dict[str, str]) -> None:
        self._files: list[Path] = []
        for _ in range(2):
            file, path = tempfile.mkstemp()
            os.close(file)
            self._files.append(Path(path))
        given = {"code": code, "arguments": arguments, "environment": environment, "files": [*map(str, self._files)]}
        pid = _told(given)
        assert pid is not None
        self.pid, self.returncode = pid, None

    def communicate(self, timeout: float = 60) -> tuple[str, str]:
        """What it wrote to its two outputs, when it has ended."""
        if self.returncode is None:
            self.returncode: int | None = _told({"pid": self.pid, "seconds": timeout})
        if self.returncode is None:
            os.killpg(self.pid, signal.SIGKILL)
            raise subprocess.TimeoutExpired("<code>", timeout, *(path.read_text() for path in self._files))
        said = [path.read_text() if path.exists() else "" for path in self._files]
        for path in self._files:
            path.unlink(missing_ok=True)
        return said[0], said[1]
