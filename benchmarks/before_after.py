"""Two trees of this project against each other on one CPU, in turns: the default, plain and float32 decoding.

    python benchmarks/before_after.py --before OLD_TREE/src --after src --out benchmarks/results/before-after.json

``--forwards``: forwards a second of the default model instead (rows x tokens, 100 keys behind), the best of some.
Each measurement is a process of its own with one of the trees on its path; medians of the turns' ratios are reported.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from common import as_json

PROMPTS = (
    "Why is the sky blue? Answer in a short paragraph.",
    "Repeat this list three times: apples, pears, plums, cherries, figs.",
    "Write three sentences about a lighthouse.",
)

PROGRAM = """
import json, sys
from headstart import LLM, SamplingParams
prompts = json.loads(sys.argv[1])
def speed(llm, tokens, speculate):
    params = SamplingParams(temperature=0, max_tokens=tokens, speculate=speculate, ignore_eos=True)
    stats = [llm.chat([{"role": "user", "content": p}], params).stats for p in prompts]
    return sum(s.decode_tokens for s in stats) / sum(s.decode_seconds for s in stats)
llm = LLM(max_rows=1, max_model_len=1024)
speed(llm, 16, True)
found = {"default": max(speed(llm, 96, True) for _ in "ab"), "plain": max(speed(llm, 64, False) for _ in "ab")}
del llm
llm = LLM(dtype="float32", draft=None, max_rows=1, max_model_len=1024)
found["float32 plain"] = speed(llm, 24, False)
print(json.dumps(found))
"""

FORWARDS = """
import json, time, torch
from headstart import LLM
runner = LLM(max_rows=8, max_model_len=1024, draft=None).engine.parts.runner
for row in range(8):
    runner.forward(slice(row, row + 1), torch.arange(100)[None] + 100, [0], keep=1)
found = {}
for rows, width in ((1, 1), (1, 2), (1, 4), (1, 5), (1, 8), (1, 16), (1, 60), (1, 250), (8, 1), (8, 2), (8, 4)):
    ids, times = torch.arange(width)[None].repeat(rows, 1) + 300, []
    for _ in range(6 if width > 16 else 30):
        begun = time.perf_counter()
        runner.forward(slice(0, rows), ids, [100] * rows, keep=1)
        times.append(time.perf_counter() - begun)
    found[f"{rows} x {width}"] = 1 / min(times)
print(json.dumps(found))
"""


def measure(tree: str, program: str) -> dict[str, float]:
    """Each tree has a cache of its own, so that neither finds what the other has made."""
    cache = Path(tempfile.gettempdir()) / f"before-after-{hashlib.sha256(tree.encode()).hexdigest()[:8]}"
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(PROMPTS)],
        env=os.environ | {"PYTHONPATH": tree, "HEADSTART_CACHE": str(cache)},
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", required=True)
    parser.add_argument("--after", required=True)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--forwards", action="store_true")
    given = parser.parse_args()
    program = FORWARDS if given.forwards else PROGRAM
    turns = []
    for tree in (given.before, given.after):
        measure(tree, program)  # compiles and converts
    for turn in range(given.turns):
        order = (given.before, given.after) if turn % 2 == 0 else (given.after, given.before)
        found = {tree: measure(tree, program) for tree in order}
        turns.append({"before": found[given.before], "after": found[given.after]})
        print(json.dumps(turns[-1]), file=sys.stderr, flush=True)
    ratios = {name: median(t["after"][name] / t["before"][name] for t in turns) for name in turns[0]["after"]}
    processor = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
            if line.startswith("model name")
        ),
        "unknown",
    )
    result = {"processor": processor, "cores": os.cpu_count(), "after_over_before": ratios, "turns": turns}
    print(json.dumps(ratios))
    if given.out is not None:
        given.out.write_text(as_json(result), encoding="utf-8")


if __name__ == "__main__":
    main()
