"""The training loop: on-policy distillation of a student against the target's full distribution.

Knows: schedules, checkpoints, when to stop. Does not know: what the student is, or how the text came about.

Everything a step does follows from the settings and the step's number: the batch, the learning rate, the order. So a
run that was killed and goes on from its last checkpoint ends with the same weights as one that was not.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..errors import InvalidParameter
from ..machine.files import make_readable, sweep, temporary
from ..maths.cost import CostModel, conditional, round_tokens
from ..values import at_least_one
from .losses import Goal, Loss, acceptance, distance, draft_tau
from .shards import Corpus, refuse_change
from .students import Reading, Student, Teacher

__all__ = ["Mark", "Optimizer", "TrainSettings", "Trainer"]

Optimizer = Literal["adamw", "muon"]

_BEFORE = ".checkpoint-old"  # the last checkpoint, while a new one takes its place
_COOLEST = 0.5  # greedy text is learned at this temperature: the likeliest tokens count more, and logits still agree


@dataclass(frozen=True)
class TrainSettings:
    """How to train."""

    steps: int = 2000
    rows: int = 16  # sequences a step
    accumulate: int = 1  # pieces a step's rows are cut into, to save memory
    learning_rate: float = 1.5e-3
    warmup: float = 0.03  # share of the steps
    weight_decay: float = 0.01
    clip: float = 1.0
    loss: Loss = "mix"
    unroll: int = 5  # steps of a draft that are trained
    fade: float = 0.85  # how much less each further step of a draft counts
    optimizer: Optimizer = "muon"  # for the matrices; tables of words and norms are always left to adamw
    evaluate_every: int = 100
    checkpoint_every: int = 200
    patience: int = 0  # stop after this many measurements without a better predicted speed-up; 0: never
    max_gamma: int = 8  # for that prediction
    seed: int = 0

    def __post_init__(self) -> None:
        for name, known in (("loss", get_args(Loss)), ("optimizer", get_args(Optimizer))):
            if getattr(self, name) not in known:
                raise InvalidParameter(name, f"must be one of {', '.join(known)}, not {getattr(self, name)!r}")
        at_least_one(self, "steps", "rows", "accumulate", "unroll", "evaluate_every", "checkpoint_every")
        if self.rows % self.accumulate:
            raise InvalidParameter("accumulate", f"must divide the {self.rows} rows of a step")


@dataclass(frozen=True)
class Mark:
    """One measurement on the held-out text."""

    step: int
    loss: float  # of the training steps since the last mark
    alpha: tuple[float, ...]  # acceptance at temperature 1 of each step of a draft, given all before it held
    greedy: tuple[float, ...]  # the same for greedy decoding
    tau: float  # tokens a round, temperature 1, with a draft of as many tokens as were trained
    tau_greedy: float
    speedup: float  # predicted, greedy and sampled in the mean, at the best draft length


class Trainer:
    """Trains one student and keeps its checkpoints in ``folder``."""

    def __init__(
        self, student: Student, teacher: Teacher, corpus: Corpus, settings: TrainSettings, cost: CostModel, folder: Path
    ) -> None:
        self.student, self.teacher, self.corpus, self.settings, self.cost = student, teacher, corpus, settings, cost
        self.folder = folder
        self.marks: list[Mark] = []
        self.step = 0
        module = student.module
        self.device = next(module.parameters()).device
        cuda = self.device.type == "cuda"
        module.train()
        self._weights = [p for p in module.parameters() if p.requires_grad]
        self._optimizers = _optimizers(self._weights, student.tables, settings, cuda)
        self._depth = 1 if student.steady else settings.unroll  # steps of a draft that are looked at
        self._half = torch.autocast(self.device.type, torch.bfloat16, enabled=cuda)
        self._sum = torch.zeros((), device=self.device)
        self._since = 0
        sweep(folder, before=r"\.checkpoint-\d+")
        if not (folder / "checkpoint").exists() and (folder / _BEFORE).is_dir():
            (folder / _BEFORE).rename(folder / "checkpoint")  # killed while one took the other's place
        if (folder / "checkpoint").is_dir():
            self._restore(folder / "checkpoint")

    # -- the loop

    def run(self, report: Callable[[Mark | None, int], None] = lambda mark, step: None) -> list[Mark]:
        """Train to the end, or until it no longer pays. ``report`` is told of each step, and of measurements."""
        s = self.settings
        if not self.marks:
            self._measure(report)
        while self.step < s.steps and not self.stalled:
            self._train_step()
            report(None, self.step)
            if self.step % s.evaluate_every == 0 or self.step == s.steps:
                self._measure(report)
            if self.step % s.checkpoint_every == 0 or self.step == s.steps or self.stalled:
                self.checkpoint()
        return self.marks

    @property
    def stalled(self) -> bool:
        """The predicted speed-up has not risen for a while."""
        patience = self.settings.patience
        if not patience or len(self.marks) <= patience:
            return False
        before = max(mark.speedup for mark in self.marks[:-patience])
        return all(mark.speedup <= before for mark in self.marks[-patience:])

    def rate(self, step: int) -> float:
        """The learning rate of a step: linear up, then half a cosine down to a hundredth."""
        s = self.settings
        warm = max(1, round(s.warmup * s.steps))
        if step < warm:
            return s.learning_rate * (step + 1) / warm
        done = (step - warm) / max(1, s.steps - warm)
        return s.learning_rate * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done)))

    def _train_step(self) -> None:
        s = self.settings
        for group in (group for optimizer in self._optimizers for group in optimizer.param_groups):
            group["lr"] = self.rate(self.step)
        rows = s.rows // s.accumulate
        for part in range(s.accumulate):
            batch = self.corpus.training_batch(self.step * s.accumulate + part, rows, s.seed, self.device)
            loss = self.loss(self.teacher.read(batch))
            (loss / s.accumulate).backward()  # type: ignore[no-untyped-call]
            self._sum += loss.detach() / s.accumulate
        torch.nn.utils.clip_grad_norm_(self._weights, s.clip)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self._since += 1

    def loss(self, reading: Reading) -> Tensor:
        """The loss of one batch: all steps of a draft, later ones counting less."""
        s = self.settings
        chosen = _where(_guessed(reading, s.unroll), self.device)  # [M]
        if not len(chosen):  # no answer in these rows: nothing to learn
            return sum((w.sum() * 0 for w in self._weights), torch.zeros((), device=self.device))
        temperature = (
            reading.batch.temperature.clamp_min(_COOLEST)[:, None].expand(reading.batch.tokens.shape).flatten()
        )
        goal = Goal.of(reading.logits.flatten(0, 1)[chosen], self.student.ids, temperature[chosen])
        total, weights = torch.zeros((), device=self.device), 0.0
        with self._half:
            for step, states in enumerate(self.student.rollout(reading, self._depth)):
                loss, _ = distance(goal, self.student.logits(states.flatten(0, 1)[chosen]), s.loss)
                total = total + loss * s.fade**step
                weights += s.fade**step
        return total / weights

    # -- measuring

    @torch.no_grad()
    def _measure(self, report: Callable[[Mark | None, int], None]) -> None:
        self.student.module.eval()
        s = self.settings
        sums = torch.zeros(2, s.unroll + 1, dtype=torch.float64, device=self.device)
        held = self.corpus.held
        for at in range(0, len(held), s.rows):
            reading = self.teacher.read(self.corpus.batch(held[at : at + s.rows], self.device))
            sums += self._reach(reading)
        self.student.module.train()
        reach = (sums[:, :-1] / sums[:, -1:].clamp_min(1)).tolist()  # A_1 .. A_K of both kinds
        alpha, greedy = (tuple(conditional(line)) for line in reach)
        loss = float(self._sum) / max(1, self._since)
        self._sum.zero_()
        self._since = 0
        tau, tau_greedy = (round_tokens([line])[-1] for line in reach)
        best = [self.cost.best_speedup(s.max_gamma, a) for a in (alpha, greedy)]
        mark = Mark(self.step, loss, alpha, greedy, tau, tau_greedy, sum(best) / 2)
        self.marks.append(mark)
        report(mark, self.step)

    def _reach(self, reading: Reading) -> Tensor:
        """Sums of A_1 .. A_K over all drafts of a batch, and their number: [sampled and greedy, K + 1]."""
        s, shape = self.settings, reading.batch.tokens.shape
        guessed = _guessed(reading, 0)
        chosen = _where(guessed, self.device)
        temperature = torch.ones(len(chosen), device=self.device)
        goal = Goal.of(reading.logits.flatten(0, 1)[chosen], self.student.ids, temperature)
        rates = torch.zeros(2, s.unroll, shape.numel(), device=self.device)
        with self._half:
            for step, states in enumerate(self.student.rollout(reading, self._depth)):
                for kind, found in enumerate(acceptance(goal, self.student.logits(states.flatten(0, 1)[chosen]))):
                    rates[kind, step, chosen] = found.float()
        rates[:, self._depth :] = rates[:, :1]
        start = guessed.clone()  # a draft counts where the text goes on for as long as the draft
        for ahead in range(1, s.unroll):
            start[:, : shape[1] - ahead] &= guessed[:, ahead:]
            start[:, shape[1] - ahead :] = False
        start = start.to(self.device)
        return torch.stack([draft_tau(kind.view(s.unroll, *shape), start).double() for kind in rates])

    # -- checkpoints

    def _keeper(self, weight: Tensor) -> torch.optim.Optimizer:
        """The optimizer that moves a weight."""
        return next(o for o in self._optimizers if any(weight is w for g in o.param_groups for w in g["params"]))

    def checkpoint(self) -> None:
        """Write everything needed to go on, in one step."""
        work = temporary(self.folder / "checkpoint")
        work.mkdir(parents=True)
        tensors = {f"weight.{i}": w.detach() for i, w in enumerate(self._weights)}
        for i, weight in enumerate(self._weights):
            tensors |= {f"state.{i}.{name}": t for name, t in self._keeper(weight).state[weight].items()}
        tensors["sum"] = self._sum
        save_file({name: t.detach().to("cpu").contiguous() for name, t in tensors.items()}, work / "state.safetensors")
        state = {
            "step": self.step,
            "since": self._since,
            "settings": asdict(self.settings),
            "marks": [asdict(mark) for mark in self.marks],
        }
        (work / "state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")
        make_readable(work)
        final, old = self.folder / "checkpoint", self.folder / _BEFORE
        shutil.rmtree(old, ignore_errors=True)
        if final.exists():
            final.rename(old)
        work.rename(final)
        shutil.rmtree(old, ignore_errors=True)

    def _restore(self, folder: Path) -> None:
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        refuse_change(self.folder, state["settings"], asdict(self.settings))
        self.step, self._since = state["step"], state["since"]
        self.marks = [Mark(**m | {k: tuple(m[k]) for k in ("alpha", "greedy")}) for m in state["marks"]]
        tensors = load_file(folder / "state.safetensors", device=str(self.device))
        self._sum = tensors["sum"]
        with torch.no_grad():
            for i, weight in enumerate(self._weights):
                weight.copy_(tensors[f"weight.{i}"])
                prefix = f"state.{i}."
                self._keeper(weight).state[weight] = {
                    k[len(prefix) :]: t for k, t in tensors.items() if k.startswith(prefix)
                }


def _optimizers(
    weights: Sequence[Tensor], tables: Sequence[Tensor], settings: TrainSettings, cuda: bool
) -> list[torch.optim.Optimizer]:
    """One for all weights, or Muon for the matrices and AdamW for the rest."""
    rest, found = list(weights), list[torch.optim.Optimizer]()
    if settings.optimizer == "muon":
        words = {id(table) for table in tables}
        matrices = [w for w in weights if w.ndim == 2 and id(w) not in words]
        rest = [w for w in weights if w.ndim != 2 or id(w) in words]
        # Steps of the size AdamW makes, so that one learning rate serves both; every step sets it.
        found.append(torch.optim.Muon(matrices, weight_decay=settings.weight_decay, adjust_lr_fn="match_rms_adamw"))
    return [*found, torch.optim.AdamW(rest, betas=(0.9, 0.95), weight_decay=settings.weight_decay, fused=cuda)]


def _where(mask: Tensor, device: torch.device) -> Tensor:
    """Flat places [M] of a mask that lies on the CPU: found there, so that nobody waits for the device."""
    return mask.flatten().nonzero().squeeze(1).to(device, non_blocking=True)


def _guessed(reading: Reading, least: int) -> Tensor:
    """[B, T] bool, on the CPU: slots whose next token belongs to an answer, from slot ``least`` on."""
    answer = reading.batch.answer
    found = torch.zeros_like(answer)
    found[:, :-1] = answer[:, 1:]
    found[:, :least] = False
    return found
