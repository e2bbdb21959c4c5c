"""Train the draft that ships with Headstart: one visit to a large GPU, everything inside a time limit.

    python benchmarks/ship_head.py --model MODEL --out DIR --seconds 570          # about ten minutes on an H200
    python benchmarks/ship_head.py --model MODEL --out DIR --seconds 300 --toy    # a rehearsal on a CPU

The target talks to itself (``distill.selfplay``), and a head and a shallow, narrow model of about as many weights are
trained on what it said, both on the same batches, and written to DIR as they get better. ``--start`` goes on from a
head, ``--prompts`` measures on prompts at the end. ``headstart distill`` does it for any target, without a clock.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from ship_measure import compare
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from headstart.distill.openers import OPENERS
from headstart.distill.selfplay import SelfPlay, chat_marks
from headstart.distill.shapes import draft_vocabulary, head_for, narrow_copy
from headstart.distill.shards import Corpus, Story, write_shard
from headstart.distill.students import Batch, HeadStudent, ModelStudent, Reading, Student, Teacher
from headstart.distill.train import Mark, Trainer, TrainSettings
from headstart.machine.head import HeadNet, load_head
from headstart.machine.load.loading import load
from headstart.maths.cost import CostModel
from headstart.maths.noise import derive

STARTED = time.perf_counter()
# Of the CPU it will be served on, roughly: only for the printed prediction.
COST = CostModel(c=0.025, v={2: 1.05, 4: 1.2, 6: 1.35, 8: 1.5, 12: 1.9}, overhead=0.02)
PART = 15 * 2**20  # files that come back are at most 16 MiB


def say(text: str) -> None:
    print(f"[{time.perf_counter() - STARTED:6.1f} s] {text}", flush=True)


def agreement(model: PreTrainedModel, stories: list[Story], device: torch.device) -> float:
    """Share of greedy answer tokens that are the argmax of the model's own modules: were the fused kernels right?"""
    greedy = [story for story in stories if story.temperature == 0][:16]
    tokens = torch.stack([torch.from_numpy(s.tokens).long() for s in greedy]).to(device)
    answer = torch.stack([torch.from_numpy(s.answer) for s in greedy]).to(device)
    with torch.no_grad():
        best = model(input_ids=tokens, use_cache=False).logits.argmax(-1)
    return float((best[:, :-1] == tokens[:, 1:])[answer[:, 1:]].float().mean())


def generate(arguments: argparse.Namespace, loaded: Any, folder: Path, until: float) -> int:
    model, tokenizer = loaded.model, loaded.tokenizer
    device = next(model.parameters()).device
    opened = [tokenizer.encode(words, add_special_tokens=False) for words in OPENERS]
    options: dict[str, Any] = {
        "rows": arguments.rows,
        "length": arguments.length,
        "openers": opened + [[]] * (len(opened) * 2 // 3),
        "temperatures": (0.0, 0.0, 0.0, 0.0, 0.0, 0.7, 0.7, 1.0, 1.0),
        "longest_turns": (10, 12) if arguments.toy else (220, 200),
        "vocab_size": loaded.report.tokenizer_size,
    }
    player = SelfPlay(model, chat_marks(tokenizer), **options)
    spare = options | {"lowered": False}
    folder.mkdir(parents=True, exist_ok=True)
    number = 0
    while number == 0 or time.perf_counter() - STARTED < until:
        started = time.perf_counter()
        try:
            stories = player.play(derive(arguments.seed, number + 1))
        except Exception as error:
            if not player.captures:
                raise
            say(f"the fused kernels failed ({type(error).__name__}: {str(error)[:300]}): plain modules instead")
            player = SelfPlay(model, chat_marks(tokenizer), **spare)
            continue
        took = time.perf_counter() - started
        if number == 0:
            right = agreement(model, stories, device)
            kind = "captured" if player.captures else "plain"
            say(f"{kind} self-play: {right:.2%} of greedy tokens are the modules' own argmax")
            if right < 0.97 and player.captures:
                say("the fused kernels are not to be trusted here: plain modules instead")
                player = SelfPlay(model, chat_marks(tokenizer), **spare)
                continue
        write_shard(folder, number, stories)
        number += 1
        spoken = sum(int(story.answer.sum()) for story in stories)
        written = arguments.rows * arguments.length
        rate = f"{written / took:,.0f} tokens/s"
        say(f"shard {number}: {written / 1e6:.2f}M tokens, {spoken / 1e6:.2f}M in answers, {rate}")
    del player
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return number


class OneBatch(Corpus):
    """Hands the same batch to everybody who asks for the same step."""

    _last: tuple[tuple[int, int, int], Batch] | None = None

    def training_batch(self, step: int, rows: int, seed: int, device: torch.device) -> Batch:
        if self._last is None or self._last[0] != (step, rows, seed):
            self._last = (step, rows, seed), super().training_batch(step, rows, seed, device)
        return self._last[1]


class OneReading(Teacher):
    """Reads a batch once for all students: the target's forward is a third of a step."""

    _last: Reading | None = None

    def read(self, batch: Batch) -> Reading:
        if self._last is None or self._last.batch is not batch:
            self._last = None  # its memory first
            self._last = super().read(batch)
        return self._last


def wait(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def try_optimizers(student: Student, teacher: Teacher, corpus: Corpus, base: dict[str, Any], out: Path) -> str:
    """The one with which a short whole run ends better."""
    found = {}
    for name in ("adamw", "muon"):
        settings = TrainSettings(**base | {"steps": 100, "evaluate_every": 100, "optimizer": name})
        trainer = Trainer(copy.deepcopy(student), teacher, corpus, settings, COST, out / "none")
        trainer.checkpoint = lambda: None  # type: ignore[method-assign]
        found[name] = trainer.run()[-1]
        say(f"{name}: tau {found[name].tau:.3f}, greedy {found[name].tau_greedy:.3f}, loss {found[name].loss:.4f}")
    return max(found, key=lambda name: found[name].tau_greedy + found[name].tau)


def train(
    students: dict[str, tuple[Student, dict[str, Any]]], teacher: Teacher, corpus: Corpus, until: float, out: Path
) -> None:
    """All students on the same batches, step by step, until the time is up."""
    probes = [
        Trainer(copy.deepcopy(s), teacher, corpus, TrainSettings(**base), COST, out / "n")
        for s, base in students.values()
    ]
    started = 0.0
    for step in range(14):
        if step == 4:
            started = wait(probes[0].device)
        for probe in probes:
            probe._train_step()
    took = (wait(probes[0].device) - started) / 10
    del probes
    left = until - (time.perf_counter() - STARTED)
    steps = max(2, int(left / (took * 1.03)))
    rows = next(iter(students.values()))[1]["rows"]
    tokens = steps * rows * corpus.length
    say(f"{took * 1e3:.1f} ms a step, {steps} steps, {tokens / 1e6:.0f}M of {corpus.tokens / 1e6:.0f}M tokens")
    trainers = {}
    for name, (student, base) in students.items():
        settings = TrainSettings(
            **base | {"steps": steps, "evaluate_every": max(1, steps // 12), "checkpoint_every": 10**9}
        )
        trainers[name] = Trainer(student, teacher, corpus, settings, COST, out / "none")
    for step in range(steps + 1):
        for name, trainer in trainers.items():
            if step:
                trainer._train_step()
            if step % trainer.settings.evaluate_every == 0 or step == steps:
                trainer._measure(lambda mark, step, name=name: tell(name, mark, step))  # type: ignore[misc]
                put_away(name, trainer, out)


def tell(name: str, mark: Mark | None, step: int) -> None:
    assert mark is not None
    alpha, greedy = (" ".join(f"{a:.3f}" for a in line) for line in (mark.alpha, mark.greedy))
    say(
        f"{name} {step}: loss {mark.loss:.4f} alpha {alpha} tau {mark.tau:.3f} | "
        f"greedy {greedy} tau {mark.tau_greedy:.3f} | predicted {mark.speedup:.2f}x"
    )


def put_away(name: str, trainer: Trainer, out: Path) -> None:
    """A student as it is now, in pieces that are small enough to come back."""
    folder = Path("/tmp") / f"headstart-{name}"
    student = trainer.student
    if isinstance(student, ModelStudent):  # half the bytes, and training goes on with all of them
        student = ModelStudent(copy.deepcopy(student.module).to(torch.bfloat16), student.tokenizer)
    student.save(folder)
    weights = (folder / "model.safetensors").read_bytes()
    for number, at in enumerate(range(0, len(weights), PART)):
        (out / f"{name}.safetensors.{number}").write_bytes(weights[at : at + PART])
    log = {
        "config": json.loads((folder / "config.json").read_text()),
        "settings": asdict(trainer.settings),
        "marks": [asdict(mark) for mark in trainer.marks],
    }
    (out / f"{name}.json").write_text(json.dumps(log))


def open_target(arguments: argparse.Namespace) -> Any:
    cuda = torch.cuda.is_available()
    dtype = torch.bfloat16 if cuda else torch.float32
    if arguments.random:
        with torch.device("cuda" if cuda else "cpu"):
            model = AutoModelForCausalLM.from_config(
                AutoConfig.from_pretrained(arguments.random, trust_remote_code=False),
                dtype=dtype,
                trust_remote_code=False,
            )
        return load(model, tokenizer=arguments.random)
    return load(arguments.model, tokenizer=arguments.tokenizer, dtype=dtype)


def fresh_head(arguments: argparse.Namespace, loaded: Any, corpus: Corpus) -> HeadNet:
    counts = corpus.counts(loaded.report.vocab_size)
    shares = counts.sort(descending=True).values.cumsum(0) / counts.sum()
    sizes = [n for n in (4096, 6144, 8192, 10240, 12288, 16384) if n <= len(shares)]
    say("coverage " + ", ".join(f"{n}: {shares[n - 1]:.4f}" for n in sizes))
    if arguments.start:
        return load_head(arguments.start).train().requires_grad_(True)
    size = arguments.vocab or next((n for n in sizes[2:5] if shares[n - 1] >= 0.98), 12288)
    ids = draft_vocabulary(counts, size, [i for i in loaded.tokenizer.all_special_ids if i < len(counts)])
    return head_for(loaded.model, ids)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="the target")
    parser.add_argument("--tokenizer", help="a folder, if the target has none")
    parser.add_argument("--random", help="instead of a target: its config's folder, for a dry run with random weights")
    parser.add_argument("--start", type=Path, help="a head to go on from")
    parser.add_argument("--prompts", type=Path, help="JSON of {set: [[kind, ids], ..]} to measure on at the end")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path, default=Path("/tmp/headstart-data"))
    parser.add_argument("--seconds", type=float, default=570)
    parser.add_argument("--generate", type=float, default=0.25, help="share of the time for the data")
    parser.add_argument("--layers", type=int, default=4, help="of the narrow model")
    parser.add_argument("--width", type=int, default=192, help="of the narrow model")
    parser.add_argument("--ffn", type=int, default=512, help="of the narrow model")
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--batch", type=int, default=48)
    parser.add_argument("--unroll", type=int, default=5)
    parser.add_argument("--learning-rate", type=float, default=1.3e-3)
    parser.add_argument("--model-rate", type=float, default=2.5e-3)
    parser.add_argument("--vocab", type=int, default=0, help="words the head can say; 0: by coverage")
    parser.add_argument("--seed", type=int, default=21)
    parser.add_argument("--toy", action="store_true")
    arguments = parser.parse_args()
    if arguments.toy:
        arguments.rows, arguments.length, arguments.batch = 12, 64, 4
    torch.set_float32_matmul_precision("high")
    arguments.out.mkdir(parents=True, exist_ok=True)
    loaded = open_target(arguments)
    say(f"{loaded.report.architecture}, {loaded.report.parameters / 1e6:.0f}M weights, {loaded.report.device}")
    device = next(loaded.model.parameters()).device
    generate(arguments, loaded, arguments.data, arguments.seconds * arguments.generate)
    corpus = OneBatch(arguments.data, arguments.length)

    torch.manual_seed(arguments.seed)
    net = fresh_head(arguments, loaded, corpus).to(device)
    say(f"head: {net.config}, {sum(p.numel() for p in net.parameters()) / 1e6:.2f}M weights")
    narrow = narrow_copy(loaded.model, arguments.layers, arguments.width, arguments.ffn).to(device)
    say(f"model: {arguments.layers} layers, {sum(p.numel() for p in narrow.parameters()) / 1e6:.1f}M weights")
    about = {"target": "HuggingFaceTB/SmolLM2-135M-Instruct", "seed": arguments.seed}
    head, model = HeadStudent(net, loaded.model, about), ModelStudent(narrow, None)
    before = copy.deepcopy(head)
    teacher = OneReading(loaded.model, net.config.watch)
    base = {"rows": arguments.batch, "unroll": arguments.unroll, "seed": arguments.seed}
    base["learning_rate"] = arguments.learning_rate
    base["optimizer"] = try_optimizers(head, teacher, corpus, base, arguments.out)
    left = 15 if arguments.prompts else 5
    students: dict[str, tuple[Student, dict[str, Any]]] = {
        "head": (head, base),
        "model": (model, base | {"learning_rate": arguments.model_rate}),
    }
    train(students, teacher, corpus, arguments.seconds - left, arguments.out)
    if arguments.prompts:
        all_three = {"before": before, "head": head, "model": model}
        compare(all_three, loaded, teacher, arguments.prompts, arguments.out, say)
    say("done")


if __name__ == "__main__":
    main()
