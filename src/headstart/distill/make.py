"""All of distilling in one call: data, shape, training, proof.

Knows: the order of the stages and what lies where in the output folder. Does not know: terminals, or how a stage works.

    DIR/               the draft, ready to be served, with README.md, card.json and curve.png
    DIR/training/      data/, checkpoint/, cost.json: needed to go on after a crash, not to serve
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import torch

from ..drafters.base import Drafter
from ..drafters.head import HeadDrafter
from ..drafters.model import ModelDrafter
from ..errors import InvalidParameter
from ..machine.load.loading import Loaded, eos_ids, load, same_tokenizer
from ..machine.runner import EagerRunner
from ..maths.cost import CostModel
from ..values import at_least_one
from .card import Card, draw_curve, write_card
from .data import DataSettings, make_data
from .proof import Figures, MakeDrafter, measure_cost, prove
from .shapes import draft_vocabulary, head_for, narrow_copy, shallow_copy
from .shards import Corpus
from .students import HeadStudent, ModelStudent, Student, Teacher
from .train import Mark, Trainer, TrainSettings

__all__ = ["DistillSettings", "Reporter", "distill"]

Kind = Literal["head", "model"]


@dataclass(frozen=True)
class DistillSettings:
    """Everything that shapes a draft."""

    kind: Kind = "head"
    vocab: int = 8192  # words a head can say
    layers: int = 2  # of a model
    width: int | None = None  # None: the target's
    ffn: int | None = None
    length: int = 512  # tokens of a training row
    proof_prompts: int = 12
    gamma: int = 5  # for the proof
    proof_tokens: int = 64
    data: DataSettings = field(default_factory=DataSettings)
    train: TrainSettings = field(default_factory=TrainSettings)

    def __post_init__(self) -> None:
        if self.kind not in ("head", "model"):
            raise InvalidParameter("kind", f"must be 'head' or 'model', not {self.kind!r}")
        at_least_one(self, "vocab", "layers", "length", "proof_prompts", "gamma", "proof_tokens")


class Reporter(Protocol):
    """Who is told how it goes."""

    def stage(self, text: str) -> None: ...
    def data(self, done: int, total: int, tokens: int) -> None: ...
    def training(self, mark: Mark | None, step: int) -> None: ...


class _Silent:
    def stage(self, text: str) -> None:
        pass

    def data(self, done: int, total: int, tokens: int) -> None:
        pass

    def training(self, mark: Mark | None, step: int) -> None:
        pass


def distill(
    target: Loaded,
    out: Path,
    settings: DistillSettings,
    *,
    name: str = "",
    donor: str | None = None,
    prompts: Sequence[str] | None = None,
    command: str = "",
    reporter: Reporter | None = None,
) -> tuple[Figures, Figures]:
    """Make a draft for ``target`` in ``out``; what it was worth before training and what it is worth now.

    ``name``: what the target is called on the card; ``donor``: where a model draft's layers come from (None: the
    target). Called again with the same settings after a crash, it goes on where it stopped.
    """
    tell = reporter or _Silent()
    work = out / "training"
    tell.stage("text: prompts, and what the target answers")
    make_data(target, work / "data", settings.data, prompts, tell.data)
    corpus = Corpus(work / "data", settings.length)

    torch.manual_seed(settings.train.seed)
    student = _student(target, corpus, settings, donor, name)
    device = next(target.model.parameters()).device
    student.module.to(device)
    held = _held_prompts(corpus, settings.proof_prompts)

    before_path = work / "before.json"
    if before_path.exists():
        before = Figures(**json.loads(before_path.read_text(encoding="utf-8")))
    else:
        tell.stage("the untrained draft, for comparison")
        before = _prove(target, student, held, settings)
        before_path.write_text(json.dumps(asdict(before)), encoding="utf-8")
    cost = _cost(target, student, held[0], work / "cost.json")

    tell.stage("training")
    teacher = Teacher(target.model, student.net.config.watch if isinstance(student, HeadStudent) else ())
    try:
        trainer = Trainer(student, teacher, corpus, settings.train, cost, work)
        marks = trainer.run(tell.training)
    finally:
        teacher.close()

    tell.stage("proof: held-out prompts with and without the draft")
    student.module.eval()
    student.save(out)
    after = _prove(target, student, held, settings)
    draw_curve(marks, out / "curve.png")
    write_card(_card(target, student, settings, corpus, marks, (before, after), cost, name, command), out)
    return before, after


def _student(target: Loaded, corpus: Corpus, settings: DistillSettings, donor: str | None, name: str) -> Student:
    if settings.kind == "head":
        counts = corpus.counts(target.report.vocab_size)[: target.report.tokenizer_size or None]
        ids = draft_vocabulary(counts, settings.vocab, eos_ids(target))
        net = head_for(target.model, ids, width=settings.width, ffn=settings.ffn)
        return HeadStudent(net, target.model, {"target": name})
    source = target
    if donor is not None:
        source = load(donor, dtype=torch.float32)
        difference = same_tokenizer(target, source)
        sizes = target.report.vocab_size, source.report.vocab_size
        if sizes[0] != sizes[1] and (target.tokenizer is None or source.tokenizer is None):
            difference = f"their vocabularies have {sizes[0]} and {sizes[1]} tokens, with no two tokenizers to compare"
        if difference is not None:
            raise InvalidParameter("donor", f"cannot lend its layers: {difference}")
    if settings.width is not None:
        return ModelStudent(narrow_copy(source.model, settings.layers, settings.width, settings.ffn), target.tokenizer)
    return ModelStudent(shallow_copy(source.model, settings.layers), target.tokenizer)


def _maker(target: Loaded, student: Student) -> MakeDrafter:
    """How to draft with a student as it is now."""
    size = target.report.tokenizer_size or target.report.vocab_size

    def make(runner: EagerRunner) -> Drafter:
        if isinstance(student, HeadStudent):
            return HeadDrafter(student.frozen(), runner, vocab_size=size, min_chance_to_extend=0.0)
        assert isinstance(student, ModelStudent)
        own = EagerRunner(student.model, rows=1, max_len=runner.max_len, margin=64, probe=False)
        return ModelDrafter(own, vocab_size=size, width=runner.vocab_size)

    return make


def _prove(target: Loaded, student: Student, held: list[list[int]], settings: DistillSettings) -> Figures:
    student.module.eval()
    figures = prove(
        target,
        _maker(target, student),
        held,
        gamma=settings.gamma,
        tokens=settings.proof_tokens,
        seed=settings.train.seed,
    )
    student.module.train()
    return figures


def _cost(target: Loaded, student: Student, prompt: list[int], path: Path) -> CostModel:
    """Measured once and kept: when training stops depends on it, and a resumed run must stop at the same step."""
    if path.exists():
        known = json.loads(path.read_text(encoding="utf-8"))
        return CostModel(known["c"], {int(width): v for width, v in known["v"].items()}, known["overhead"])
    student.module.eval()
    cost = measure_cost(target, _maker(target, student), prompt)
    student.module.train()
    path.write_text(json.dumps(asdict(cost)), encoding="utf-8")
    return cost


def _held_prompts(corpus: Corpus, count: int) -> list[list[int]]:
    """Prompts of held-out sequences, up to where the first answer begins."""
    return [corpus.question(int(index)) for index in corpus.held[:count]]


def _card(
    target: Loaded,
    student: Student,
    settings: DistillSettings,
    corpus: Corpus,
    marks: list[Mark],
    figures: tuple[Figures, Figures],
    cost: CostModel,
    name: str,
    command: str,
) -> Card:
    weights = sum(p.numel() for p in student.module.parameters())
    if isinstance(student, HeadStudent):
        c = student.net.config
        shape = (
            f"One decoder layer of width {c.width} on the target's hidden states behind layers "
            f"{', '.join(map(str, c.watch))}, with {c.vocab} output words; {weights / 1e6:.1f}M weights."
        )
    else:
        assert isinstance(student, ModelStudent)
        wide = student.model.get_input_embeddings().weight.shape[1]
        shape = f"A causal language model of {settings.layers} layers, {wide} wide, {weights / 1e6:.1f}M weights."
    trained = settings.train
    return Card(
        kind=settings.kind,
        target=name or target.report.architecture,
        weights=weights,
        shape=shape,
        data=(
            f"Trained on {corpus.tokens / 1e6:.2f}M tokens that the target wrote itself, at the temperatures "
            f"{', '.join(map(str, settings.data.temperatures))}, against the target's full distribution "
            f"(loss: {trained.loss}), for {marks[-1].step} of at most {trained.steps} steps."
        ),
        command=command,
        settings={**asdict(trained), **{f"data {k}": v for k, v in asdict(settings.data).items()}},
        marks=marks,
        before=figures[0],
        after=figures[1],
        cost=asdict(cost),
    )
