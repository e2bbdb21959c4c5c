"""How good drafts are on prompts, the target's own answers given: acceptance and tokens a round, without an engine.

Used by ``ship_head.py``, where every second of a large GPU counts.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headstart.distill.losses import Goal, acceptance, draft_tau
from headstart.distill.shards import Story, batch_of
from headstart.distill.students import Reading, Student, Teacher
from headstart.machine.load.loading import eos_ids
from headstart.maths.cost import round_tokens


def answers(loaded: Any, prompts: list[list[int]], temperature: float, tokens: int) -> list[Story]:
    """The target's answers to prompts, all at once."""
    device = next(loaded.model.parameters()).device
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    ends = sorted(eos_ids(loaded))
    options: dict[str, Any] = {"do_sample": False}
    if temperature:
        options = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    torch.manual_seed(1)
    with torch.no_grad():
        texts = loaded.model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=tokens,
            eos_token_id=ends,
            pad_token_id=ends[0],
            **options,
        )
    stories = []
    for prompt, text in zip(prompts, texts[:, longest:].tolist(), strict=True):
        end = next((i + 1 for i, token in enumerate(text) if token in ends), len(text))
        line = [*prompt, *text[:end]]
        answer = np.arange(len(line)) >= len(prompt)
        stories.append(Story(np.array(line, dtype=np.int32), answer, temperature))
    return stories


@torch.no_grad()
def rates_on(student: Student, reading: Reading, gamma: int) -> torch.Tensor:
    """[sampled and greedy, gamma, B, T]: the chance that what a slot guesses at each step is accepted."""
    shape = reading.batch.tokens.shape
    goal = Goal.of(reading.logits.flatten(0, 1), student.ids, torch.ones(shape.numel(), device=reading.logits.device))
    found = torch.zeros(2, gamma, *shape)
    for step, states in enumerate(student.rollout(reading, gamma)):
        for kind, values in enumerate(acceptance(goal, student.logits(states.flatten(0, 1)))):
            found[kind, step] = values.float().view(shape).cpu()
    return found


def rounds(right: torch.Tensor, story: Story) -> tuple[int, int, int, int]:
    """Greedy rounds over one answer: rounds, tokens, drafted, accepted. ``right`` [gamma, T] 0 or 1.

    The first token of an answer comes from reading the prompt, so the first round drafts behind it.
    """
    at, last = int(story.answer.argmax()), len(story.tokens) - 1
    count = tokens = drafted = accepted = 0
    while at < last:
        width = min(len(right), last - at - 1)  # what is left, less the token the target adds
        good = next((i for i in range(width) if not right[i, at + i]), width)
        count, tokens, drafted, accepted = count + 1, tokens + good + 1, drafted + width, accepted + good
        at += good + 1
    return count, tokens, drafted, accepted


def on_prompts(
    student: Student, teacher: Teacher, stories: list[Story], kinds: list[str], gamma: int
) -> dict[str, Any]:
    """By kind of task: alpha and tau. Greedy by going through the rounds, sampled by expectation (rule "token")."""
    device = next(student.module.parameters()).device
    half = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
    student.module.eval()
    results: dict[str, Any] = {}
    for kind in dict.fromkeys(kinds):
        mine = [story for story, other in zip(stories, kinds, strict=True) if other == kind]
        with half:
            found = rates_on(
                student, teacher.read(batch_of(mine, max(len(story.tokens) for story in mine), device)), gamma
            )
        if mine[0].temperature == 0:
            sums = np.sum([rounds(found[1, :, row], story) for row, story in enumerate(mine)], axis=0)
            results[kind] = {"alpha": float(sums[3] / max(1, sums[2])), "tau": float(sums[1] / max(1, sums[0]))}
        else:
            start = torch.zeros(found.shape[2:], dtype=torch.bool)
            for row, story in enumerate(mine):
                start[row, int(story.answer.argmax()) : len(story.tokens) - gamma] = True
            reach = draft_tau(found[0], start)
            share = found[0, 0][start].mean()
            results[kind] = {"alpha": float(share), "tau": round_tokens([(reach[:-1] / reach[-1]).tolist()])[-1]}
    results["mean"] = {name: float(np.mean([r[name] for r in results.values()])) for name in ("alpha", "tau")}
    student.module.train()
    return results


def compare(
    students: dict[str, Student],
    loaded: Any,
    teacher: Teacher,
    path: Path,
    out: Path,
    say: Callable[[str], None],
    tokens: int = 96,
) -> None:
    """All students on the prompts in ``path``: {set: [[kind, ids], ..]}."""
    record: dict[str, Any] = {}
    for name, rows in json.loads(path.read_text()).items():
        for temperature in (0.0, 1.0):
            stories = answers(loaded, [ids for _, ids in rows], temperature, tokens)
            for who, student in students.items():
                found = on_prompts(student, teacher, stories, [kind for kind, _ in rows], 5)
                record.setdefault(name, {}).setdefault(who, {})[f"{temperature:g}"] = found
                cells = " ".join(f"{kind} {r['alpha']:.3f} {r['tau']:.3f}" for kind, r in found.items())
                say(f"{name}, T = {temperature:g}, {who}: {cells}")
    (out / "prompts.json").write_text(json.dumps(record))
