"""Import and float32 generation need nothing of Linux; Windows and macOS users get them, if slower, and are told so.

What can be seen without running it is in ``make check``: mypy reads src once more as on Windows.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import without_posix

SOURCE = Path(__file__).parents[1] / "src" / "headstart"
MODEL = Path(__file__).parent / "data" / "written-by-0.1.0" / "target"  # one that the kernels could run
KERNELS = sorted((SOURCE / "machine" / "cpu" / "csrc").iterdir())

# Of C++17. What no standard has must stand behind a question which system, compiler or processor this is.
_STANDARD = """
algorithm array atomic bit cassert cfloat chrono climits cmath condition_variable cstddef cstdint cstdio cstdlib
cstring exception functional initializer_list iterator limits map memory mutex new numeric optional queue random set
stdexcept string system_error thread tuple type_traits unordered_map utility vector
"""


def run(code: str, *arguments: str, cache: Path, text: str = "") -> subprocess.CompletedProcess[str]:
    """Run code in a Python that has nothing of POSIX for headstart."""
    place = {"HEADSTART_CACHE": str(cache), "PYTHONPATH": str(SOURCE.parent), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, without_posix.__file__, code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, input=text, timeout=300, env=os.environ | place)


GENERATE = """
import json, sys
from headstart import LLM, ModelRefused, SamplingParams

said = []
params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
for draft in (None, "lookup", sys.argv[1]):
    llm = LLM(sys.argv[1], draft, max_model_len=96)
    assert llm.report.dtype == "float32"
    said.append(llm.generate("one two one two one", params).token_ids)
    sampled = SamplingParams(max_tokens=12, seed=1, ignore_eos=True)
    assert "".join(piece.text for piece in llm.stream("one two", sampled))
print(json.dumps(said))
try:
    LLM(sys.argv[1], None, quantization="int8")
except ModelRefused as error:
    print(error)
"""


COMMANDS = """
import sys
from headstart.cli.main import app
app(["generate", "-m", sys.argv[1], "-n", "6", "--json", "Hello"], standalone_mode=False)
print()
app(["chat", "-m", sys.argv[1], "-n", "6", "--seed", "1"], standalone_mode=False)
"""


# But for what stands on Triton, which is for Linux.
IMPORT = """
import importlib
for name in sys.argv[2:]:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        print(name, "needs triton")
"""


@pytest.mark.slow
def test_generation_the_command_line_and_every_module_need_nothing_of_posix(tmp_path: Path) -> None:
    """In one process, because torch and transformers take seconds to import."""
    names = [".".join(path.relative_to(SOURCE.parent).with_suffix("").parts) for path in SOURCE.rglob("*.py")]
    code = "print('----')".join((GENERATE, COMMANDS, IMPORT))
    done = run(code, str(MODEL), *sorted(names), cache=tmp_path, text="Hello\n/quit\n")
    assert done.returncode == 0, done.stderr
    generated, commands, imported = done.stdout.split("----\n")

    answers, refusal = generated.splitlines()
    plain, lookup, drafted = json.loads(answers)
    assert plain == lookup == drafted
    assert len(plain) == 12
    assert "compiler" in refusal, "what was asked for"
    assert re.search(r"HeadstartWarning: .*draft model runs in float32.*compiler", done.stderr), "what would be faster"

    answer, _ = json.JSONDecoder().raw_decode(commands)
    assert len(answer["token_ids"]) <= 6
    assert done.stderr.count("tok/s") == 1, "chat's closing line"

    missing = {line.removesuffix(" needs triton") for line in imported.splitlines()}
    assert missing < set(names), "all else was imported"


PLANTED = """
code = "import os, signal, sys; from pathlib import Path; "
for line in sys.argv[1:]:
    try:
        exec(compile(code + line, "x", "exec"), {"__name__": "headstart.x"})
    except (ImportError, AttributeError, OSError):
        continue
    print(line)
"""


def test_the_poorer_python_would_show_each_of_these(tmp_path: Path) -> None:
    lines = ["import fcntl", "import readline", "os.getuid()", "os.sched_getaffinity(0)", "signal.SIGKILL"]
    lines += ["from os import fork", "Path('/proc/cpuinfo').read_text()", "open('/proc/self/status')"]
    done = run("import sys" + PLANTED, *lines, cache=tmp_path)
    assert (done.returncode, done.stdout) == (0, ""), done


def test_no_module_imports_what_only_posix_has_at_its_top() -> None:
    for path in SOURCE.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            bad = [name for name in names if name.partition(".")[0] in without_posix.MODULES]
            assert not bad, f"{path.name}:{node.lineno} imports {bad}: behind a try, or where it is needed"


def test_text_files_are_utf8_whatever_the_system_says() -> None:
    """Windows reads and writes them in a code page of its own, unless it is told."""
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                name, given = node.func.attr, {keyword.arg for keyword in node.keywords}
                bad = name in ("read_text", "write_text") and "encoding" not in given
                bad |= "text" in given and ast.unparse(node.func).startswith("subprocess.") and "encoding" not in given
                assert not bad, f"{path.name}:{node.lineno}: {name} without encoding="


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.name)
def test_kernels_include_what_every_system_has(path: Path) -> None:
    depth = 0
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if re.match(r"\s*#\s*if", line):
            depth += 1
        elif re.match(r"\s*#\s*endif", line):
            depth -= 1
        found = re.match(r"\s*#\s*include\s*<([^>]+)>", line)
        if found and depth == 0:
            assert found[1] in _STANDARD.split(), (
                f"{path.name}:{number}: <{found[1]}> is not everywhere; put it behind #if defined(..)"
            )
