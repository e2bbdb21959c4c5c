"""How long a model file takes to load, and how much memory: each load is a process of its own, in a cache of its own.

    python benchmarks/peers_load.py MODEL.gguf auto 2        # one load: a line of JSON

Knows: how a load is timed and its memory watched. Does not know: what loading does.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
WATCH = 0.01  # seconds between two looks at the memory


def memory(name: str) -> int:
    """A line of this process's status, in bytes: VmHWM (the most it ever had), RssAnon (without mapped files)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    return 0


def one_load(model: str, quantization: str, threads: int) -> dict[str, Any]:
    """Load the model here, write four tokens, and say what that took."""
    from headstart import LLM, SamplingParams

    before, most, done = memory("RssAnon"), 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(WATCH):
            most = max(most, memory("RssAnon"))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    started = time.perf_counter()
    chosen: Any = None if quantization == "none" else quantization
    llm = LLM(model, None, quantization=chosen, threads=threads, max_rows=1, max_model_len=2304)
    seconds = time.perf_counter() - started
    done.set()
    watcher.join()
    answer = llm.generate([100, 200, 300], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    return {
        "seconds": seconds,
        "peak_bytes": memory("VmHWM"),
        "peak_anonymous_bytes": most - before,
        "weights_bytes": llm.report.bytes,
        "weights": llm.report.dtype,
        "ids": list(answer.token_ids),
    }


def _load(model: Path, quantization: str | None, threads: int, cache: Path, kill_after: float | None = None) -> Any:
    """One load in a process of its own; None where it was killed after so many seconds."""
    command = [sys.executable, __file__, str(model), quantization or "none", str(threads)]
    environment = os.environ | {"HEADSTART_CACHE": str(cache)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        out, _ = process.communicate(timeout=kill_after)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.communicate()
        return None
    if process.returncode:
        raise RuntimeError(f"loading {model.name} ended with status {process.returncode}")
    return json.loads(out.splitlines()[-1])


def loads(model: Path, quantization: str | None, threads: int, repeats: int) -> dict[str, Any]:
    """Loads the first time and again, in turn; then one that is killed half way, and the next start."""
    from common import median

    from headstart.machine.load.embedded import cache_folder

    first, again = [], []
    with tempfile.TemporaryDirectory(prefix="headstart-loads-") as folder:
        for number in range(repeats + 1):
            cache = Path(folder) / str(number)
            cache.mkdir(mode=0o700)
            if (cache_folder() / "kernels").exists():  # compiling them is no part of reading a file
                shutil.copytree(cache_folder() / "kernels", cache / "kernels")
            killed = number == repeats
            if killed:
                half = median(load["seconds"] for load in first) / 2
                _load(model, quantization, threads, cache, kill_after=half + 3)  # 3: the imports
            found = _load(model, quantization, threads, cache)
            if not killed:
                first.append(found)
                again.append(_load(model, quantization, threads, cache))
                shutil.rmtree(cache)
        after = found
        left = [path.name for path in cache.rglob("*") if path.is_file() and path.suffix in (".part", ".tmp")]
    largest = largest_tensor(model)
    return {
        "first_seconds": median(load["seconds"] for load in first),
        "again_seconds": median(load["seconds"] for load in again),
        "first": first,
        "again": again,
        "peak_anonymous_over_bound": max(load["peak_anonymous_bytes"] for load in first)
        / (2 * first[0]["weights_bytes"] + largest),
        "largest_tensor_bytes": largest,
        "after_a_kill": after | {"same_ids": after["ids"] == first[0]["ids"], "left_over": left},
    }


def largest_tensor(model: Path) -> int:
    """Bytes of the largest tensor in float32."""
    from gguf import GGUFReader

    return max(4 * int(tensor.n_elements) for tensor in GGUFReader(model).tensors)


if __name__ == "__main__":
    print(json.dumps(one_load(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
