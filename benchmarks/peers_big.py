"""Models of 0.5B and 1.5B on the CPU beside llama.cpp on the very same file, and bfloat16 beside vLLM: issue 16's rows.

Called by ``peers.py measure``, which says how. Every part runs by itself, takes a few minutes at most, and is
stored beside the others in results/cpu-big.json, with the machine that it ran on. Systems take turns; a figure is a
median of ratios within a turn.

    plain       decoding one token a step, 1.5B, and 1.5B with a vocabulary of 152,000; beside a plain read of the bytes
    prompt      a prompt of 2,000 tokens
    verify      forwards of 1 to 16 tokens, in forwards of one and as a share of the integer units' peak; the 1.5B and
                the embedded model
    drafted     with a draft of a third of the size, and with the embedded model; predicted beside measured
    load        seconds and peak memory of a load, the first time and again; after one that was killed
    rows        the first token on rows that were never used, and on used ones; embedded model
    chats       eight conversations together against one, plain and drafted; embedded model
    vllm        bfloat16 SmolLM2-135M, alone and eight together; vllm_float32: the same in float32
    perplexity  mean negative log-likelihood of our weights against the file's own in float32

Knows: what each row of the issue compares. Does not know: how any engine works.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import KINDS, RESULTS, as_json, log, machine, median, prompts
from cpu import timed
from cpu_kernels import peak
from peers import REST, Peer, Run, race, ratio, speeds, turns, wheel_gguf
from peers_load import loads
from verify_curve import BEHIND, WIDTHS, curve, curve_of_medians, largest_fall, medians, our_widths, products, shares

from headstart import LLM, SamplingParams
from headstart.machine.cpu.library import kernels, pool
from headstart.machine.load.embedded import embedded_folder
from headstart.maths.cost import CostModel, best_length
from headstart.types import Round

TARGET, DRAFT, WIDE_VOCABULARY = (f"grown-{name}-Q4_K_M.gguf" for name in ("1.5b", "0.5b", "1.5b-152k"))
ROWS = 8


class Bench:
    """What the parts share: the files, the other engines, and how ours is opened."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.runs: int = arguments.runs
        self.tokens: int = arguments.tokens
        self.threads: int = arguments.threads

    def file(self, name: str) -> Path:
        path = Path(self.arguments.models) / name
        if not path.exists():
            raise SystemExit(f"{path} is not there: python benchmarks/make_gguf.py {path.parent} --peers-python ...")
        return path

    def ours(self, model: Path, draft: Any = None, **settings: Any) -> LLM:
        options: dict[str, Any] = {"max_rows": 1, "max_model_len": 2304, "threads": self.threads}
        return LLM(model, draft, quantization=self.arguments.quantization, **options | settings)

    def llama(self, model: Path, engine: str = "llama") -> Peer:
        return Peer(self.arguments.peers_python, engine, model, threads=self.threads)

    def llamas(self, model: Path) -> dict[str, Peer]:
        """As it comes (weights are laid out anew at load), and without that. The faster one is compared with."""
        return {"llama.cpp": self.llama(model), "llama.cpp as stored": self.llama(model, "llama-as-stored")}

    def lines(self, llm: LLM, count: int) -> list[list[int]]:
        """Prompts as chats, one of each kind in turn."""
        texts = [text for turn in zip(*prompts().values(), strict=True) for text in turn]
        assert llm.tokenizer is not None
        return [
            list(
                llm.tokenizer.apply_chat_template(
                    [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
                )
            )
            for text in texts[:count]
        ]

    def race(self, systems: Mapping[str, Any], lines: Sequence[list[int]]) -> dict[str, dict[str, list[Run]]]:
        """All systems over the same prompts, each for ``--tokens`` tokens."""
        lengths = [self.tokens] * len(lines)
        found: dict[str, dict[str, list[Run]]] = race(
            systems, {KINDS[0]: list(lines)}, {KINDS[0]: lengths}, lambda _: None, {}
        )
        return found


def read_speed(llm: LLM, threads: int, repeats: int) -> float:
    """Bytes a second at which the kernels' threads read the weights where they lie, and do nothing with them."""
    packed, seconds = llm.engine.parts.runner.packed, []  # type: ignore[attr-defined]
    for _ in range(3 * repeats):
        started = time.perf_counter()
        kernels().hs_read(pool(threads), packed.data.data_ptr(), packed.bytes)
        seconds.append(time.perf_counter() - started)
    return float(packed.bytes / median(seconds))


def show(runs: Mapping[str, Mapping[str, list[Run]]], ours: str, theirs: str) -> dict[str, Any]:
    """Our decoding speed over theirs, and both in tokens a second."""
    table = speeds(runs, ours)
    mine, peer = ([run.decode for run in runs[name][KINDS[0]]] for name in (ours, theirs))
    return {
        "speed_over": theirs,
        "ours": ours,
        **ratio(peer, mine),
        "tokens_per_second": {name: 1 / median(times) for name, times in ((ours, mine), (theirs, peer))},
        "same_ids": table[theirs]["same_ids_as_ours"],
    }


# -- the parts ------------------------------------------------------------------------------------------------------


def plain(bench: Bench) -> dict[str, Any]:
    found = {}
    for name in (TARGET, WIDE_VOCABULARY):
        llm, peers = bench.ours(bench.file(name)), bench.llamas(bench.file(name))
        runs = bench.race({"headstart": timed(llm, speculate=False)} | peers, bench.lines(llm, max(5, bench.runs)))
        speed = {name: 1 / median(run.decode for run in runs[name][KINDS[0]]) for name in runs}
        found[name] = result = show(runs, "headstart", max(peers, key=lambda peer: speed[peer]))
        result["tokens_per_second"] = speed
        for peer in peers.values():
            peer.close()
        read = read_speed(llm, bench.threads, bench.runs)
        seconds = 1 / result["tokens_per_second"]["headstart"]
        result |= {
            "weights": llm.report.dtype,
            "kernels": llm.report.kernels,
            "version": peers["llama.cpp"].version,
            "step_bytes": llm.report.bytes,
            "file_bytes": bench.file(name).stat().st_size,
            "plain_read_gb_per_second": read / 1e9,
            "share_of_a_plain_read": llm.report.bytes / seconds / read,
        }
        log(f"plain {name}: {result['median']:.3f}x, {result['tokens_per_second']}, read {read / 1e9:.1f} GB/s")
    return found


def prompt(bench: Bench) -> dict[str, Any]:
    llm, peers = bench.ours(bench.file(TARGET)), bench.llamas(bench.file(TARGET))
    stream = [token for line in bench.lines(llm, 60) for token in line]
    length = min(bench.arguments.prompt, len(stream))
    starts = iter(range(10**6))

    def read(system: Any) -> float:
        at = next(starts) * 97 % len(stream)  # another prompt every time
        return float(system((stream[at:] + stream[:at])[:length], 1).seconds)

    systems: dict[str, Any] = {"headstart": timed(llm, speculate=False)} | peers
    for system in systems.values():
        system(stream[:64], 1)  # warm up
    seconds = turns({name: partial(read, system) for name, system in systems.items()}, bench.runs)
    for peer in peers.values():
        peer.close()
    best = min(peers, key=lambda name: median(seconds[name]))
    result = {"tokens": length, "speed_over": best, **ratio(seconds[best], seconds["headstart"]), "seconds": seconds}
    result["tokens_per_second"] = {name: length / median(times) for name, times in seconds.items()}
    log(f"prompt of {length}: {result['median']:.3f}x, {result['tokens_per_second']}")
    return result


def verify(bench: Bench) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, model in {TARGET: bench.file(TARGET), "embedded": embedded_folder()}.items():
        llm, peer = bench.ours(model), None
        if not bench.arguments.no_peers:
            peer = bench.llama(wheel_gguf() if name == "embedded" else model)
        runner: Any = llm.engine.parts.runner
        ids = [i % 1000 + 100 for i in range(BEHIND + WIDTHS[-1])]
        mine, theirs, peaks = [], [], []
        for turn in range(3 * bench.runs):
            time.sleep(REST)
            peaks.append(peak(bench.threads))
            mine.append(our_widths(runner))
            if peer and turn % 3 == 0:  # llama.cpp takes several times as long, and is here for comparison only
                time.sleep(REST)
                theirs.append(peer.ask("widths", ids=ids, behind=BEHIND, widths=WIDTHS)["seconds"])
        v, times = curve(mine[1:]), medians([turn.seconds for turn in mine[1:]])
        found[name] = {
            "kernels": llm.report.kernels,
            "one_token_seconds": times[1],
            "v": v,
            "largest_fall": largest_fall(v),
            "products_a_token": products(runner.packed.plan),
            "peak_products_per_second": {"most": max(peaks), "median": median(peaks)},
            "share_of_the_peak": shares(runner.packed.plan, times, max(peaks)),
        }
        if peer:
            peer.close()
            llama = {"one_token_seconds": medians(theirs)[1], "v": curve_of_medians(theirs), "turns": len(theirs)}
            found[name]["llama.cpp"] = llama
        part = found[name]["share_of_the_peak"] or dict.fromkeys(WIDTHS, 0.0)
        log(f"verify {name}: " + ", ".join(f"v({n}) {v[n]:.3f} ({part[n]:.0%} of the peak)" for n in (2, 4, 8, 16)))
    return found


def step_seconds(runner: Any, repeats: int) -> float:
    """One token of a runner's, the median."""
    ids = torch.arange(BEHIND + 1)[None] + 100
    runner.forward(slice(0, 1), ids[:, :BEHIND], [0], keep=1)
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        runner.forward(slice(0, 1), ids[:, BEHIND:], [BEHIND])
        seconds.append(time.perf_counter() - started)
    return median(seconds)


def count_verdicts(count: Counter[str], rounds: Sequence[Round]) -> None:
    """For alpha: drafted tokens that were accepted, and those looked at, up to the first rejected one."""
    for each in rounds:
        count["accepted"] += each.accepted
        count["judged"] += each.accepted + (each.accepted < each.drafted)


def drafted(bench: Bench) -> dict[str, Any]:
    target = bench.file(TARGET)
    llms = {
        "draft of a third": bench.ours(target, bench.file(DRAFT)),
        "135M draft": bench.ours(target, embedded_folder()),
    }
    counts = {name: Counter[str]() for name in llms}
    for name, llm in llms.items():
        llm.listen(partial(count_verdicts, counts[name]))
    first = next(iter(llms.values()))
    peer = bench.llama(target)
    systems = {"headstart plain": timed(first, speculate=False), "llama.cpp": peer}
    systems |= {name: timed(llm, counts[name]) for name, llm in llms.items()}
    runs = bench.race(systems, bench.lines(first, max(5, bench.runs)))
    peer.close()
    found: dict[str, Any] = {"headstart plain": show(runs, "headstart plain", "llama.cpp")}
    for name, llm in llms.items():
        runner = getattr(llm.engine.parts.drafter, "runner", None)  # None: nobody drafts any more
        alpha = counts[name]["accepted"] / max(1, counts[name]["judged"])
        v = curve([our_widths(llm.engine.parts.runner) for _ in range(6)][1:])
        one = step_seconds(llm.engine.parts.runner, 15)
        c = step_seconds(runner, 15) / one if runner is not None else 0.0
        cost = CostModel(c=c, v=v)
        predicted = [cost.speedup(gamma, alpha) for gamma in range(llm.config.draft.most + 1)]
        found[name] = show(runs, name, "llama.cpp") | {
            "over_headstart_plain": show(runs, name, "headstart plain")["median"],
            "predicted_over_headstart_plain": max(predicted),
            "predicted_gamma": best_length(predicted),
            "alpha": alpha if counts[name]["judged"] else None,  # None: it never drafted
            "tau": counts[name]["tokens"] / max(1, counts[name]["rounds"]),
            "c": c,
            "v": v,
            "drafts_weights": str(getattr(getattr(runner, "packed", None), "kind", "")) or None,
            "inactive_reason": llm.engine.inactive_reason,
        }
        log(
            f"drafted, {name}: {found[name]['median']:.2f}x llama.cpp, alpha {alpha:.3f}, "
            f"{found[name]['over_headstart_plain']:.2f}x plain (predicted {max(predicted):.2f}), c {c:.2f}"
        )
    return found


def load(bench: Bench) -> dict[str, Any]:
    result = loads(bench.file(TARGET), bench.arguments.quantization, bench.threads, bench.runs)
    result["llama.cpp_seconds"] = []
    for _ in range(bench.runs):
        peer = bench.llama(bench.file(TARGET))
        result["llama.cpp_seconds"].append(peer.load_seconds)
        peer.close()
    log(f"load: first {result['first_seconds']:.1f} s, again {result['again_seconds']:.1f} s")
    return result


def rows(bench: Bench) -> dict[str, Any]:
    """In a new engine every row is fresh; one request after the other, all rows in use at the end."""
    fresh, used = [], []
    for _ in range(max(2, -(-bench.runs // 2))):
        llm = LLM(max_rows=ROWS, threads=bench.threads)
        lines = bench.lines(llm, ROWS)
        llm.generate(lines[0][:8], SamplingParams(temperature=0, max_tokens=2))

        def firsts(llm: LLM = llm, lines: list[list[int]] = lines) -> list[float]:
            """Seconds to the first token of each prompt, while those before it go on in rows of their own."""
            found = []
            streams = []
            for line in lines:
                started = time.perf_counter()
                streams.append(llm.stream(line, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)))
                next(streams[-1])
                found.append(time.perf_counter() - started)
            for stream in streams:
                for _ in stream:
                    pass
            return found

        fresh.append(firsts())
        for _ in range(2):
            llm.cold()
            used.append(firsts())
    late = [median(line[i] for line in fresh) - median(line[i] for line in used) for i in range(1, ROWS)]
    log(f"rows: a fresh one is {1000 * median(late):.1f} ms later, at the most {1000 * max(late):.1f} ms")
    return {"fresh_seconds": fresh, "used_seconds": used, "later_median": median(late), "later_most": max(late)}


def chats(bench: Bench) -> dict[str, Any]:
    """Eight chats together, prompts and answers of ``--answer`` tokens: tokens a second over those of the first of them
    alone (issue 16.5), and over all eight one after the other: prompts differ in length and in what can be drafted."""
    seconds, answer = dict[str, list[float]](), bench.arguments.answer
    for _ in range(bench.runs):
        llm = LLM(max_rows=ROWS, threads=bench.threads)  # a new one: rows that were never used
        lines = bench.lines(llm, ROWS)
        for kind, speculate in (("plain", False), ("drafted", True)):
            params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True, speculate=speculate)
            ways = {"one": [lines[:1]], "eight": [lines], "in turn": [[line] for line in lines]}
            for name, groups in ways.items():
                taken = 0.0
                for group in groups:
                    llm.cold()
                    started = time.perf_counter()
                    llm.generate(group, params)
                    taken += time.perf_counter() - started
                seconds.setdefault(f"{kind} {name}", []).append(taken / sum(map(len, groups)))
    result: dict[str, Any] = {}
    for kind in ("plain", "drafted"):
        result[kind] = ratio(seconds[f"{kind} one"], seconds[f"{kind} eight"])
        result[f"{kind}, over the same eight in turn"] = ratio(seconds[f"{kind} in turn"], seconds[f"{kind} eight"])
    result |= {"prompt_tokens": list(map(len, lines)), "answer_tokens": answer}
    result["tokens_per_second"] = {name: answer / median(times) for name, times in seconds.items()}
    log("chats: eight over one: " + ", ".join(f"{kind} {result[kind]['median']:.2f}x" for kind in ("plain", "drafted")))
    return result


def vllm(bench: Bench, dtype: str = "bfloat16") -> dict[str, Any]:
    folder, asked = embedded_folder(), bench.arguments
    llm = LLM(folder, None, dtype=dtype, quantization=None, max_rows=ROWS, threads=bench.threads)
    lines = bench.lines(llm, ROWS)
    engine = "vllm" if dtype == "bfloat16" else f"vllm-{dtype}"
    peer = Peer(asked.vllm_python, engine, folder, threads=bench.threads, preload=asked.vllm_preload)
    params = SamplingParams(temperature=0, max_tokens=bench.tokens, ignore_eos=True)

    def ours(some: list[list[int]]) -> float:
        llm.cold()
        started = time.perf_counter()
        llm.generate(some, params)
        return time.perf_counter() - started

    def theirs(some: list[list[int]]) -> float:
        return float(peer.ask("together", lines=some, tokens=bench.tokens)["seconds"])

    found: dict[str, Any] = {"weights": llm.report.dtype, "kernels": llm.report.kernels, "version": peer.version}
    for name, some in (("alone", lines[:1]), ("eight", lines)):
        systems = {"headstart": partial(ours, some), "vllm": partial(theirs, some)}
        turns(systems, 1)  # warm up
        seconds = turns(systems, bench.runs)
        found[name] = ratio(seconds["vllm"], seconds["headstart"])
        found[name]["tokens_per_second"] = {n: len(some) * bench.tokens / median(times) for n, times in seconds.items()}
        log(f"{dtype} {name}: {found[name]['median']:.2f}x vLLM, {found[name]['tokens_per_second']}")
    peer.close()
    return found


def perplexity(bench: Bench) -> dict[str, Any]:
    from perplexity import negative_log_likelihoods

    result = negative_log_likelihoods(
        bench.file(TARGET), bench.ours(bench.file(TARGET)), bench.arguments.data, bench.arguments.text_tokens
    )
    log(f"perplexity: {result['perplexity_over_the_file']:.4f} of the file's own weights in float32")
    return result


PARTS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    part.__name__: part for part in (plain, prompt, verify, drafted, load, rows, chats, vllm, perplexity)
} | {"vllm_float32": partial(vllm, dtype="float32")}


def measure(arguments: argparse.Namespace) -> None:
    """Run the parts and store each as it is done, beside what earlier runs found for the others."""
    torch.set_num_threads(arguments.threads)
    bench, path = Bench(arguments), RESULTS / arguments.out
    names = ("threads", "runs", "tokens", "prompt", "quantization")
    settings = {name: getattr(arguments, name) for name in names}
    for name in arguments.parts:
        started = time.perf_counter()
        result = PARTS[name](bench)
        stored = json.loads(path.read_text()) if path.exists() else {}
        label = name if arguments.label is None else f"{name}-{arguments.label}"
        stored[label] = {
            "machine": machine() | {"threads": arguments.threads},
            "settings": settings,
            "seconds": time.perf_counter() - started,
            "result": result,
        }
        path.parent.mkdir(exist_ok=True)
        path.write_text(as_json(stored))
