"""Point 3 of the lab: ``certify`` passes on sound code and fails on each of five planted bugs, in every implementation.

    python benchmarks/lab_planted.py                        # tensors and C++ kernels, on this CPU
    python benchmarks/lab_planted.py --device cuda          # captured rounds with Triton kernels, on this GPU
    python benchmarks/lab_planted.py --only "C++" --bug "stale keys"

A bug is a change of the sources. For each, the package is copied, changed there, and certified in a process of its own
(C++ is compiled anew, Triton kernels too). Models are small and random, with a draft that is the target plus noise:
what is tested are rules, processing and keys, and they do not know which model they serve. The self-test that models
pass at load is left out (``check=False``): it finds stale keys by itself, before any certificate is asked for.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from time import perf_counter
from typing import Any

from common import share_of_cores

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "src"))  # behind a changed copy, where there is one
RESULTS = ROOT / "benchmarks" / "results"
SETUPS = {"cpu": ("tensors", "C++", "C++, head"), "cuda": ("Triton", "captured tensors")}
Change = tuple[str, str, str]  # file, old text, new text

JUDGE, DECODER = "machine/cpu/csrc/judge.cpp", "machine/cpu/csrc/decoder.h"
_ACCEPT_CPP = (JUDGE, "node, ACCEPT)) < chance(node))", "node, ACCEPT)) < 1.6f * chance(node))")
_RESIDUAL_CPP = (JUDGE, "if (rest(last, scale[last], room.data()) > 0.0) weights = room.data();", "")
_PENALTY_CPP = (
    "machine/cpu/csrc/penalties.cpp",
    "if (node) meet(past->text[past->committed + node - 1], false);",
    "",
)
_STALE_CPP = (
    DECODER,
    "    for (int i = 0; i < tiles; i++)\n        if (to.floats)\n            store((float*)cache",
    "    if (key && (to.floats ? ((float*)cache)[first] != 0.0f : ((uint16_t*)cache)[first] != 0)) return;\n"
    "    for (int i = 0; i < tiles; i++)\n        if (to.floats)\n            store((float*)cache",
)
_HEAT_MODEL_CPP = (
    "machine/cpu/csrc/sampling.cpp",
    "            if (tokens) tokens[i] = race(to, nullptr, size, {low[i], high[i]});",
    "            if (tokens) tokens[i] = race(to, nullptr, size, {low[i], high[i]});\n"
    "            if (tokens && x) {\n"
    "                Knobs other{};\n"
    "                other.temperature = 1.0f, other.min_p = min_p ? min_p[r] : 0.0f;\n"
    "                other.top_p = top_p ? top_p[r] : 1.0f;\n"
    "                other.top_k = top_k ? top_k[r] : std::numeric_limits<int64_t>::max();\n"
    "                distribution(x + (size_t)i * size, size, other, to);\n"
    "            }",
)
_HEAT_HEAD_CPP = (
    "machine/cpu/csrc/draft_token.cpp",
    "    for (int i = 0; i < h.vocab; i++)\n        if (p[i] > 0.0f) q[h.ids[i]] = p[i];\n"
    "    return {(int)race(p, h.ids, h.vocab, noise), 0.2f + 0.65f * most};",
    "    const int drawn = (int)race(p, h.ids, h.vocab, noise);\n"
    "    Knobs other = *knobs;\n    other.temperature = 1.0f;\n"
    "    distribution(logits, h.vocab, other, p);\n"
    "    for (int i = 0; i < h.vocab; i++)\n        if (p[i] > 0.0f) q[h.ids[i]] = p[i];\n"
    "    return {drawn, 0.2f + 0.65f * most};",
)
_ACCEPT_TENSORS = (
    "maths/verify.py",
    "yes = chance.accept(node, torch.where(usable, chances, 0.0)) & usable",
    "yes = chance.accept(node, torch.where(usable, (1.6 * chances).clamp_max(1), 0.0)) & usable",
)
_RESIDUAL_TENSORS = (
    "maths/verify.py",
    "    def last(self, node: Tensor) -> Tensor:\n        weights = _at(self.p, node)\n",
    "    def last(self, node: Tensor) -> Tensor:\n        return _at(self.p, node)\n"
    "        weights = _at(self.p, node)\n",
)
_HEAT_TENSORS = (
    "drafters/draft_sampler.py",
    "    return vocab_ops.race(q, keys), q\n",
    "    tokens = vocab_ops.race(q, keys)\n"
    "    other = replace(warp, temperature=None)\n"
    "    return tokens, probabilities(logits[:, None], other, history=history, vocab_ops=vocab_ops)[:, 0]\n",
)
_PENALTY_TENSORS = (
    "maths/distribution.py",
    "    if nodes == 1:\n        return result\n",
    "    if nodes >= 1:\n        return result\n",
)
_STALE_TENSORS = (
    "machine/slab_layer.py",
    "            keys[:, :, slab.start : slab.live].copy_(key_states)\n",
    "            old = keys[:, :, slab.start : slab.live]\n"
    "            old.copy_(torch.where(old == 0, key_states, old))\n",
)
_STALE_TENSORS_RAGGED = (
    "machine/slab_layer.py",
    "            keys[row, :, slots] = key_states.transpose(1, 2)\n",
    "            old = keys[row, :, slots]\n"
    "            keys[row, :, slots] = torch.where(old == 0, key_states.transpose(1, 2), old)\n",
)
_ACCEPT_TRITON = (
    "machine/gpu/kernels/reject.py",
    "yes = (uniform < chance) & (e < usable)",
    "yes = (uniform < 1.6 * chance) & (e < usable)",
)
_RESIDUAL_TRITON = (
    "machine/gpu/kernels/reject.py",
    "    weight = tl.where(scale >= 0.0, _rest(weight, of_q, scale), weight)\n",
    "    weight = tl.where(scale >= 1e30, _rest(weight, of_q, scale), weight)\n",
)
_HEAT_TRITON = (
    "machine/gpu/sampling.py",
    "    p, tokens = _nucleus(x, warp, words, into)\n    assert tokens is not None\n",
    "    p, tokens = _nucleus(x, warp, words, into)\n    assert tokens is not None\n"
    "    from dataclasses import replace\n\n    p, _ = _nucleus(x, replace(warp, temperature=None), None, into)\n",
)
_PENALTY_CAPTURED = (
    "engine/programs.py",
    "kept = (node <= accepted[:, None]) & (s.advance[:rows, None] > 0)",
    "kept = (node == accepted[:, None]) & (s.advance[:rows, None] > 0)",
)
_STALE_TRITON = (
    "machine/gpu/kernels/heads.py",
    "        _store_pair(keys + at + (head - HEADS).to(tl.int64) * capacity * D, ca, cb, a, b, fits)\n",
    "        spot = keys + at + (head - HEADS).to(tl.int64) * capacity * D\n"
    "        old = tl.load(spot + ca[:, None], mask=fits, other=0.0).to(tl.float32)\n"
    "        _store_pair(spot, ca, cb, a, b, fits & (old == 0.0))\n",
)

BUGS: dict[str, dict[str, tuple[Change, ...]]] = {
    "accepts too often": {
        "tensors": (_ACCEPT_TENSORS,),
        "C++": (_ACCEPT_CPP,),
        "Triton": (_ACCEPT_TRITON,),
        "captured tensors": (
            _ACCEPT_TENSORS,
            ("engine/programs.py", 'if shape.kind == "rejected" and', "if False and"),
        ),
    },
    "residual drawn from p": {
        "tensors": (_RESIDUAL_TENSORS,),
        "C++": (_RESIDUAL_CPP,),
        "Triton": (_RESIDUAL_TRITON,),
        "captured tensors": (
            _RESIDUAL_TENSORS,
            ("engine/programs.py", 'if shape.kind == "rejected" and', "if False and"),
        ),
    },
    "q of another temperature": {
        "tensors": (_HEAT_TENSORS,),
        "C++": (_HEAT_MODEL_CPP,),
        "C++, head": (_HEAT_HEAD_CPP,),
        "Triton": (_HEAT_TRITON,),
    },
    "penalty ignored at drafted positions": {
        "tensors": (_PENALTY_TENSORS,),
        "C++": (_PENALTY_CPP,),
        "Triton": (_PENALTY_TENSORS,),  # of captured rounds, too
        "captured tensors": (_PENALTY_TENSORS,),
    },
    "accepted drafts not counted by penalties": {"Triton": (_PENALTY_CAPTURED,)},
    "stale keys after a rollback": {
        "tensors": (_STALE_TENSORS, _STALE_TENSORS_RAGGED),
        "C++": (_STALE_CPP,),
        "Triton": (_STALE_TRITON,),
    },
}


# -- one certificate, in a process of its own ------------------------------------------------------------------------


def noisy(model: Any, share: float) -> Any:
    import torch

    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                noise = torch.randn(parameter.shape, generator=generator) * share * parameter.float().std().cpu()
                parameter.add_(noise.to(parameter))
    return model


def options(setup: str, folder: Path) -> Any:
    """The pair of a setup."""
    import torch

    from headstart.lab.system import SystemOptions
    from headstart.testing import tiny_model, tiny_tokenizer

    if setup in SETUPS["cuda"]:
        sizes = {
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
        }
        target, draft = (tiny_model("llama", dtype=torch.bfloat16, **sizes).cuda() for _ in "ab")
        return SystemOptions(
            model=target, draft=noisy(draft, 0.15), tokenizer=tiny_tokenizer(), max_model_len=192, gamma=3, check=False
        )
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    }
    target, draft = tiny_model("qwen3", **sizes), noisy(tiny_model("qwen3", **sizes), 0.12)
    common = {
        "model": target,
        "tokenizer": tiny_tokenizer(),
        "max_model_len": 192,
        "gamma": 3,
        "check": False,
        "threads": 1,
    }
    if setup == "tensors":
        common.pop("threads")
        return SystemOptions(draft=draft, draft_quantization=None, **common)
    if setup == "C++":
        return SystemOptions(draft=draft, quantization="int8", draft_quantization="int8", **common)
    return SystemOptions(draft=_head(target, folder), quantization="int8", **common)


def _head(target: Any, folder: Path) -> str:
    """A head that learnt a little of the target from random text: what nobody ever accepts tests no q."""
    import torch
    from torch.nn.functional import kl_div

    from headstart.machine.head import HeadConfig, HeadNet, save_head

    config = HeadConfig(
        target_hidden=64, target_layers=2, target_vocab=target.config.vocab_size, watch=(0, 1), width=64, heads=2,
        kv_heads=1, head_dim=32, ffn=64, vocab=100,
    )  # fmt: skip
    torch.manual_seed(0)
    head, texts, states = HeadNet(config, list(range(3, 103))), torch.randint(3, 103, (64, 24)), []
    hooks = [layer.register_forward_hook(lambda _, __, out: states.append(out)) for layer in target.model.layers]
    with torch.no_grad():
        for matrix in (head.out, head.down):  # no attention and no hidden layer: two matrices learn in a second
            matrix.zero_()
        aim = target(texts).logits[:, 1:, 3:103].log_softmax(-1)
        words = target.get_input_embeddings()(texts[:, 1:])
    for hook in hooks:
        hook.remove()
    features = torch.cat([state[0] if isinstance(state, tuple) else state for state in states], -1)[:, :-1]
    learning = torch.optim.Adam([head.fuse, head.embed, head.head], lr=0.01)
    for _ in range(300):
        x = head.fused(features) + head.word(words)
        guessed = head.logits(head.finish(x, x.new_zeros(*x.shape[:-1], 64))).log_softmax(-1)
        loss = kl_div(guessed, aim, log_target=True, reduction="batchmean") / 23
        learning.zero_grad()
        loss.backward()
        learning.step()
    save_head(head, folder)
    return str(folder)


def one(setup: str) -> None:
    """Certify here and now; the certificate as JSON on standard output."""
    import torch

    from headstart.lab.certifying.certify import Effort, certify

    if setup not in SETUPS["cuda"]:
        torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        effort = Effort(
            prompts=6, longest=40, tokens=20, samples=2500 if setup in SETUPS["cuda"] else 600, texts=4, control=600
        )
        found = certify(options(setup, Path(folder)), seconds=None, effort=effort)
    print(json.dumps(found.to_json()))


# -- all of them ------------------------------------------------------------------------------------------------------


def changed(changes: tuple[Change, ...], folder: Path) -> Path:
    """A copy of the package with these changes; where it lies."""
    shutil.copytree(
        ROOT / "src" / "headstart",
        folder / "headstart",
        ignore=shutil.ignore_patterns("__pycache__", "drafts", "server", "cli"),
    )
    for name, old, new in changes:
        path = folder / "headstart" / name
        text = path.read_text(encoding="utf-8")
        if text.count(old) != 1:
            raise SystemExit(f"{name} has {text.count(old)} times what is to be changed: {old!r}")
        path.write_text(text.replace(old, new), encoding="utf-8")
    return folder


def certified(bug: str | None, setup: str, until: float, jobs: int) -> dict[str, Any]:
    """What a certificate says of the package with this bug."""
    begun = perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        source = changed(BUGS[bug][setup] if bug else (), Path(folder))
        cache = Path(tempfile.gettempdir()) / "headstart-planted"
        cache.mkdir(mode=0o700, exist_ok=True)
        path = os.pathsep.join([str(source), os.environ.get("PYTHONPATH", "")])
        around = share_of_cores(jobs) | {"PYTHONPATH": path, "HEADSTART_CACHE": str(cache)}
        around["PYTHONDONTWRITEBYTECODE"] = "1"
        try:
            done = subprocess.run(
                [sys.executable, __file__, "--one", setup],
                capture_output=True,
                text=True,
                env=around,
                cwd=folder,
                timeout=max(1.0, until - perf_counter()),
            )
        except subprocess.TimeoutExpired:
            return {"bug": bug, "implementation": setup, "crashed": "not done in time"}
    if done.returncode:
        said = done.stderr.strip().splitlines()
        return {"bug": bug, "implementation": setup, "crashed": said[-1] if said else "", "log": said[-12:]}
    results = json.loads(done.stdout.splitlines()[-1])["results"]
    wrong = [check for check in results["checks"] if not check["holds"]]
    caught = sorted(
        {
            f"{check['name']}, {check['rule']}" + (f" ({check['drafter']})" if check["p_value"] is not None else "")
            for check in wrong
        }
    )
    return {
        "bug": bug,
        "implementation": setup,
        "holds": results["holds"],
        "caught_by": caught,
        "failed_checks": len(wrong),
        "checks": len(results["checks"]),
        "controls_rejected": all(control["rejected"] for control in results["controls"] if control["needed"]),
        "faults": results["faults"][:4],
        "seconds": round(perf_counter() - begun, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=tuple(SETUPS), default="cpu")
    parser.add_argument("--only", help="this implementation alone")
    parser.add_argument("--bug", help="bugs whose names begin like this, and not the sound package; 'none': that alone")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--jobs", type=int, default=1, help="certificates at a time")
    parser.add_argument(
        "--limit", type=float, default=7200.0, help="seconds in all; what is not done by then is left out"
    )
    parser.add_argument("--go-on", action="store_true", help="leave out what is stored and was done")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    given = parser.parse_args()
    if given.one:
        one(given.one)
        return
    setups = [given.only] if given.only else list(SETUPS[given.device])
    wanted = [(None, setup) for setup in setups if given.bug in (None, "none")]
    wanted += [
        (bug, s) for bug in BUGS for s in setups if s in BUGS[bug] and (given.bug is None or bug.startswith(given.bug))
    ]
    path = given.out / f"certify-planted-{given.device}.json"
    if given.go_on and path.exists():
        stored = json.loads(path.read_text(encoding="utf-8"))["runs"]
        done = {(row["bug"], row["implementation"]) for row in stored if "crashed" not in row}
        wanted = [pair for pair in wanted if pair not in done]
    until = perf_counter() + given.limit
    with ThreadPoolExecutor(given.jobs) as pool:
        for done in as_completed([pool.submit(certified, *pair, until, given.jobs) for pair in wanted]):
            found = done.result()
            print(json.dumps(found), flush=True)
            write(path, found)


def write(path: Path, found: dict[str, Any]) -> None:
    """Into the file, in the place of an earlier run of the same."""
    from headstart.lab.machine_facts import machine
    from headstart.lab.report.store import as_json

    table = json.loads(path.read_text())["runs"] if path.exists() else []
    table = [row for row in table if (row["bug"], row["implementation"]) != (found["bug"], found["implementation"])]
    order = [None, *BUGS]
    table = sorted([*table, found], key=lambda row: (order.index(row["bug"]), row["implementation"]))
    path.write_text(as_json({"machine": machine(), "runs": table}), encoding="utf-8")


if __name__ == "__main__":
    main()
