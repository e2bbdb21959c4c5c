"""Point 3 of the lab, its first half: ``certify`` holds for every drafter that ships.

    python benchmarks/lab_certify.py                                  # the embedded model on this CPU
    python benchmarks/lab_certify.py --only lookup --seconds 60
    python benchmarks/lab_certify.py --device cuda --weights FOLDER   # in bfloat16 and int8 on this GPU

The draft model is the target's own first layers, untrained as a draft: it is often wrong, and so tests the more.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from time import perf_counter
from typing import Any

from common import share_of_cores

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "src"))
LAYERS = 4  # of the draft model
CASES = {
    "cpu": {
        "lookup": {"draft": "lookup"},
        "head": {"draft": "HEAD"},
        "portfolio": {"draft": "auto"},
        "draft model, int8": {"draft": "FEW", "draft_quantization": "int8"},
        "draft model, float32": {"draft": "FEW", "draft_quantization": None},
        "float32 target, lookup": {"draft": "lookup", "dtype": "float32"},
        "float32 target, int4 draft model": {"draft": "FEW", "draft_quantization": "int4", "dtype": "float32"},
    },
    "cuda": {
        "lookup": {"draft": "lookup"},
        "float32 target, lookup": {"draft": "lookup", "dtype": "float32"},
        "head": {"draft": "HEAD"},
        "draft model": {"draft": "FEW"},
        "draft model, not overlapped": {"draft": "FEW", "overlap": False},
        "int8 target, int8 draft model": {"draft": "FEW", "quantization": "int8", "draft_quantization": "int8"},
        "invariant, draft model": {"draft": "FEW", "invariant": True},
    },
}


def few_layers(source: str, folder: Path) -> str:
    """The first layers of a model, as a model of its own."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(source, trust_remote_code=False)
    model.model.layers = model.model.layers[:LAYERS]
    model.config.num_hidden_layers = LAYERS
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, trust_remote_code=False).save_pretrained(folder)
    return str(folder)


def certified(name: str, settings: dict[str, Any], asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One certificate, in short."""
    from headstart.lab import SystemOptions, certify
    from headstart.machine.load.embedded import embedded_draft, embedded_folder

    given, weights = settings | {"device": asked.device}, asked.weights
    if given["draft"] == "FEW":
        few = folder / "few"
        given["draft"] = str(few) if few.exists() else few_layers(weights or str(embedded_folder()), few)
    if given["draft"] == "HEAD":
        given["draft"] = str(embedded_draft())
    begun = perf_counter()
    found = certify(SystemOptions(model=weights, **given), seconds=asked.seconds)
    laws = [check for check in found.checks if check.p_value is not None]
    return {
        "case": name,
        "holds": found.holds,
        "faults": found.faults,
        "runs": dict(found.runs),
        "exact": found.exact,
        "checks": len(found.checks),
        "backends": sorted({check.backend for check in found.checks}),
        "tokens_compared": sum(check.compared for check in found.checks if check.p_value is None),
        "near_ties": sum(check.ties for check in found.checks),
        "widest_tie": max(check.widest_tie for check in found.checks),
        "samples": sum(check.compared for check in laws),
        "p_values": [check.p_value for check in laws],
        "notices": [check.detectable for check in laws],
        "excused": [check.excused for check in laws],
        "seconds_of_checks": [round(check.seconds, 1) for check in found.checks],
        "drafted": sum(check.drafted for check in found.checks),
        "accepted": sum(check.accepted for check in found.checks),
        "controls": [{"name": c.name, "rejected": c.rejected, "needed": c.needed} for c in found.controls],
        "skipped": list(found.skipped),
        "seconds": round(perf_counter() - begun, 1),
    }


def store(path: Path, row: dict[str, Any]) -> None:
    """Into the file, in the place of an earlier run of the same."""
    from headstart.lab.machine_facts import machine
    from headstart.lab.report.store import as_json

    table = json.loads(path.read_text(encoding="utf-8"))["runs"] if path.exists() else []
    table = [each for each in table if each["case"] != row["case"]] + [row]
    path.write_text(as_json({"machine": machine(), "runs": table}), encoding="utf-8")


def apart(given: argparse.Namespace, path: Path) -> None:
    """Each case in a process of its own."""
    until = perf_counter() + given.limit

    def one(name: str) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, __file__, "--device", given.device, "--only", name, "--out", folder]
            command += ["--seconds", str(given.seconds), *(["--weights", given.weights] if given.weights else [])]
            try:
                left = max(1.0, until - perf_counter())
                around = share_of_cores(given.jobs)
                done = subprocess.run(command, capture_output=True, text=True, timeout=left, env=around)
            except subprocess.TimeoutExpired:
                return {"case": name, "holds": None, "faults": ["not done in time"]}
            if done.returncode:
                return {"case": name, "holds": None, "faults": done.stderr.strip().splitlines()[-6:]}
            row: dict[str, Any] = json.loads((Path(folder) / path.name).read_text(encoding="utf-8"))["runs"][0]
            return row

    with ThreadPoolExecutor(given.jobs) as pool:
        for done in as_completed([pool.submit(one, name) for name in wanted(given, path)]):
            row = done.result()
            print(row["case"], "holds" if row["holds"] else row["faults"], row.get("seconds"), flush=True)
            store(path, row)


def wanted(given: argparse.Namespace, path: Path) -> list[str]:
    """Cases, in the order in which they were asked for."""
    names = given.only or list(CASES[given.device])
    if not given.go_on or not path.exists():
        return names
    stored = json.loads(path.read_text(encoding="utf-8"))["runs"]
    done = {row["case"] for row in stored if row["holds"] is not None}
    return [name for name in names if name not in done]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=tuple(CASES), default="cpu")
    parser.add_argument("--weights", help="a folder; without it: the embedded model")
    parser.add_argument("--only", nargs="+", metavar="CASE", help="these cases alone")
    parser.add_argument("--seconds", type=float, default=85.0, help="for the checks of each")
    parser.add_argument("--jobs", type=int, default=1, help="certificates at a time, in processes of their own")
    parser.add_argument("--limit", type=float, default=7200.0, help="seconds in all, with --jobs")
    parser.add_argument("--go-on", action="store_true", help="leave out what is stored and was done")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    given = parser.parse_args()
    path = given.out / f"certify-{given.device}.json"
    if given.jobs > 1:
        apart(given, path)
        return
    with tempfile.TemporaryDirectory() as folder:
        for name in wanted(given, path):
            row = certified(name, CASES[given.device][name], given, Path(folder))
            print(name, "holds" if row["holds"] else row["faults"], row["seconds"], flush=True)
            store(path, row)


if __name__ == "__main__":
    main()
