"""From the start of the process to the first token: ``headstart demo``, as a person sees it.

    python benchmarks/first_token.py            # five times, after one run that fills the caches

Each run is a process of its own. The clock starts before the process does, and stops when the first character of the
first answer comes out of it. Nothing else may run meanwhile.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from typing import Any

from common import machine, median, save

COMMAND = [sys.executable, "-c", "from headstart.cli.main import app; app()", "demo", "--max-tokens", "16"]
SIGN = b"question"  # the line before the first answer begins with this


def seconds_to_first_token() -> tuple[float, float]:
    """Seconds to the first character of the first answer, and to the end of the process."""
    started = time.perf_counter()
    environment = os.environ | {"COLUMNS": "200", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(COMMAND, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment)
    assert process.stdout is not None
    seen = b""
    first = 0.0
    while byte := process.stdout.read(1):
        seen += byte
        _, sign, rest = seen.partition(SIGN)
        if sign and rest.partition(b"\n")[2].strip():  # something on the line after
            first = time.perf_counter() - started
            break
    process.stdout.read()
    if process.wait() or not first:
        raise SystemExit(f"the demo failed: {seen.decode(errors='replace')}")
    return first, time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", default="first-token.json")
    arguments = parser.parse_args()
    found: dict[str, Any] = {"first_run": seconds_to_first_token(), "runs": []}
    for _ in range(arguments.runs):
        found["runs"].append(seconds_to_first_token())
        print("first token {:.2f} s, whole demo {:.2f} s".format(*found["runs"][-1]), flush=True)
    firsts = [first for first, _ in found["runs"]]
    found |= {"median_seconds_to_first_token": median(firsts), "longest": max(firsts)}
    save(arguments.out, {"machine": machine(), "command": COMMAND[3:], "results": found})
    print(f"median {found['median_seconds_to_first_token']:.2f} s, longest {found['longest']:.2f} s")


if __name__ == "__main__":
    main()
