"""Train the draft that ships with Headstart: one visit to a large GPU, everything inside a time limit.

    python benchmarks/ship_head.py --model MODEL --out DIR --seconds 570          # about ten minutes on an H200
    python benchmarks/ship_head.py --model MODEL --out DIR --seconds 300 --toy    # a rehearsal on a CPU

The target talks to itself (``distill.selfplay``), a head and, briefly, a shallow model are trained on what it said, and
the head is written to DIR as it gets better. Measuring on prompts comes afterwards, with the engine. ``headstart
distill`` does all of this for any target, without a clock.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from headstart.distill.openers import OPENERS
from headstart.distill.selfplay import SelfPlay, chat_marks
from headstart.distill.shapes import draft_vocabulary, head_for, shallow_copy
from headstart.distill.shards import Corpus, Story, read_shard, write_shard
from headstart.distill.students import HeadStudent, ModelStudent, Student, Teacher
from headstart.distill.train import Mark, Trainer, TrainSettings
from headstart.machine.loading import load
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
        "temperatures": (0.0, 0.0, 0.0, 0.0, 0.7, 0.7, 1.0, 1.0, 1.0),
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


def seconds_a_step(student: Student, teacher: Teacher, corpus: Corpus, settings: TrainSettings, folder: Path) -> float:
    """Measured on a copy that is thrown away."""
    spare = copy.copy(student)
    net = copy.deepcopy(student.module)
    setattr(spare, "net" if isinstance(student, HeadStudent) else "model", net)
    trainer = Trainer(spare, teacher, corpus, settings, COST, folder / "none")
    for _ in range(4):
        trainer._train_step()
    if trainer.device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(8):
        trainer._train_step()
    if trainer.device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - started) / 8


def train(
    student: Student, teacher: Teacher, corpus: Corpus, base: dict[str, Any], until: float, out: Path, name: str
) -> list[Mark]:
    probe = TrainSettings(**base)
    step = seconds_a_step(student, teacher, corpus, probe, out)
    left = until - (time.perf_counter() - STARTED)
    steps = max(2, int(left / (step * 1.04)))
    settings = TrainSettings(
        **base | {"steps": steps, "evaluate_every": max(1, steps // 12), "checkpoint_every": 10**9}
    )
    tokens = steps * settings.rows * corpus.length
    say(f"{name}: {step * 1e3:.1f} ms a step, {steps} steps, {tokens / 1e6:.0f}M tokens of {corpus.tokens / 1e6:.0f}M")
    trainer = Trainer(student, teacher, corpus, settings, COST, out / name)

    def report(mark: Mark | None, step: int) -> None:
        if mark is not None:
            alpha, greedy = (" ".join(f"{a:.3f}" for a in line) for line in (mark.alpha, mark.greedy))
            say(
                f"{name} {step}: loss {mark.loss:.4f} alpha {alpha} tau {mark.tau:.3f} | "
                f"greedy {greedy} tau {mark.tau_greedy:.3f} | predicted {mark.speedup:.2f}x"
            )
            if isinstance(student, HeadStudent):
                put_away(student, out, {"marks": [asdict(m) for m in trainer.marks], "settings": asdict(settings)})

    trainer.checkpoint = lambda: None  # type: ignore[method-assign]  # nothing resumes here
    return trainer.run(report)


def put_away(student: HeadStudent, out: Path, log: dict[str, Any]) -> None:
    """The head as it is now, in pieces that are small enough to come back."""
    folder = out / "work"
    student.save(folder)
    weights = (folder / "model.safetensors").read_bytes()
    for number, at in enumerate(range(0, len(weights), PART)):
        (out / f"model.safetensors.{number}").write_bytes(weights[at : at + PART])
    (out / "config.json").write_text((folder / "config.json").read_text())
    (out / "log.json").write_text(json.dumps(log))
    (folder / "model.safetensors").unlink()
    (folder / "config.json").unlink()
    folder.rmdir()


def keep_sample(folder: Path, out: Path) -> None:
    """Some of the text comes back too, for looking at it."""
    stories = read_shard(folder, 0)
    some = stories[: PART // (3 * len(stories[0].tokens))]
    np.savez(
        out / "sample.npz",
        tokens=np.stack([story.tokens for story in some]).astype(np.uint16),
        answer=np.packbits(np.stack([story.answer for story in some]), axis=1),
        temperature=np.array([story.temperature for story in some], dtype=np.float32),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="the target")
    parser.add_argument("--tokenizer", help="a folder, if the target has none")
    parser.add_argument("--random", help="instead of a target: its config's folder, for a dry run with random weights")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path, default=Path("/tmp/headstart-data"))
    parser.add_argument("--seconds", type=float, default=570)
    parser.add_argument("--generate", type=float, default=0.28, help="share of the time for the data")
    parser.add_argument("--compare", type=float, default=0.08, help="share of the time for the shallow model")
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--unroll", type=int, default=5)
    parser.add_argument("--learning-rate", type=float, default=1.5e-3)
    parser.add_argument("--vocab", type=int, default=0, help="words the head can say; 0: by coverage")
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--toy", action="store_true")
    arguments = parser.parse_args()
    if arguments.toy:
        arguments.rows, arguments.length, arguments.batch = 12, 64, 4
    torch.set_float32_matmul_precision("high")
    arguments.out.mkdir(parents=True, exist_ok=True)
    cuda = torch.cuda.is_available()
    dtype = torch.bfloat16 if cuda else torch.float32
    if arguments.random:
        with torch.device("cuda" if cuda else "cpu"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(arguments.random), dtype=dtype)
        loaded = load(model, tokenizer=arguments.random)
    else:
        loaded = load(arguments.model, tokenizer=arguments.tokenizer, dtype=dtype)
    say(f"{loaded.report.architecture}, {loaded.report.parameters / 1e6:.0f}M weights, {loaded.report.device}")
    device = next(loaded.model.parameters()).device
    generate(arguments, loaded, arguments.data, arguments.seconds * arguments.generate)
    corpus = Corpus(arguments.data, arguments.length)
    keep_sample(arguments.data, arguments.out)

    counts = corpus.counts(loaded.report.vocab_size)
    shares = counts.sort(descending=True).values.cumsum(0) / counts.sum()
    sizes = [n for n in (4096, 6144, 8192, 10240, 12288, 16384) if n <= len(shares)]
    say("coverage " + ", ".join(f"{n}: {shares[n - 1]:.4f}" for n in sizes))
    size = arguments.vocab or next((n for n in sizes[2:5] if shares[n - 1] >= 0.98), 12288)
    ids = draft_vocabulary(counts, size, [i for i in loaded.tokenizer.all_special_ids if i < len(counts)])

    base = {"rows": arguments.batch, "unroll": arguments.unroll, "seed": arguments.seed}
    torch.manual_seed(arguments.seed)
    if arguments.compare:
        shallow = shallow_copy(loaded.model, 2).to(device)
        say(f"shallow model: 2 layers, {sum(p.numel() for p in shallow.parameters()) / 1e6:.1f}M weights")
        until = arguments.seconds * (arguments.generate + arguments.compare)
        train(
            ModelStudent(shallow, None), Teacher(loaded.model), corpus, base | {"learning_rate": 4e-4}, until,
            arguments.out, "shallow",
        )  # fmt: skip
        del shallow
    net = head_for(loaded.model, ids).to(device)
    say(f"head: {net.config}, {sum(p.numel() for p in net.parameters()) / 1e6:.2f}M weights")
    about = {"target": "HuggingFaceTB/SmolLM2-135M-Instruct", "seed": arguments.seed}
    train(
        HeadStudent(net, loaded.model, about), Teacher(loaded.model, net.config.watch), corpus,
        base | {"learning_rate": arguments.learning_rate}, arguments.seconds - 8, arguments.out, "head",
    )  # fmt: skip
    say("done")


if __name__ == "__main__":
    main()
