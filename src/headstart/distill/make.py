"""All of distilling in one call: data, shape, training, proof.

Knows: the order of the stages and what lies where in the output folder. Does not know: terminals, or how a stage works.

    DIR/               the draft, ready to be served, with README.md, card.json and curve.png
    DIR/training/      data/, checkpoint/, cost.json: needed to go on after a crash, not to serve
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from ..errors import InvalidParameter
from ..machine.load.loading import Loaded, eos_ids, load, same_tokenizer
from ..maths.cost import CostModel
from ..values import at_least_one
from .card import Card, draw_curve, write_card
from .data import DataSettings, make_data
from .proof import Figures, measure_cost, prove
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
    def data(self, done: int, total: int) -> None: ...
    def training(self, mark: Mark | None, step: int) -> None: ...


def distill(
    target: Loaded,
    out: Path,
    settings: DistillSettings,
    tell: Reporter,
    *,
    name: str = "",
    donor: str | None = None,
    prompts: Sequence[str] | None = None,
    command: str = "",
) -> tuple[Figures, Figures]:
    """Make a draft for ``target`` in ``out``; what it was worth before training and what it is worth now.

    ``name``: what the target is called on the card; ``donor``: where a model draft's layers come from (None: the
    target). Called again with the same settings after a crash, it goes on where it stopped.
    """
    work = out / "training"
    tell.stage("text: prompts, and what the target answers")
    make_data(target, work / "data", settings.data, prompts, tell.data)
    corpus = Corpus(work / "data", settings.length)

    torch.manual_seed(settings.train.seed)
    student = _student(target, corpus, settings, donor, name)
    device = next(target.model.parameters()).device
    student.module.to(device)
    student.module.eval()
    held = [corpus.stories[index].question for index in corpus.held[: settings.proof_prompts]]
    make = partial(student.drafter, vocab_size=target.report.tokenizer_size or target.report.vocab_size)
    bench = partial(
        prove, target, make, held, gamma=settings.gamma, tokens=settings.proof_tokens, seed=settings.train.seed
    )

    if not (work / "before.json").exists():
        tell.stage("the untrained draft, for comparison")
    before = Figures(**_kept(work / "before.json", bench))
    known = _kept(work / "cost.json", lambda: measure_cost(target, make, held[0]))
    cost = CostModel(known["c"], {int(width): v for width, v in known["v"].items()}, known["overhead"])

    tell.stage("training")
    teacher = Teacher(target.model, student.watch)
    try:
        trainer = Trainer(student, teacher, corpus, settings.train, cost, work)
        marks = trainer.run(tell.training)
    finally:
        teacher.close()

    tell.stage("proof: held-out prompts with and without the draft")
    student.module.eval()
    student.save(out)
    after = bench()
    draw_curve(marks, out / "curve.png")
    figures = {"before": before, "after": after, "cost": asdict(cost)}
    card = _card(
        student, settings, corpus, marks, target=name or target.report.architecture, command=command, **figures
    )
    write_card(card, out)
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


def _kept(path: Path, measure: Callable[[], Any]) -> dict[str, Any]:
    """The fields of what is measured once: a resumed run must stop training at the same step, which depends on it."""
    if not path.exists():
        path.write_text(json.dumps(asdict(measure())), encoding="utf-8")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _card(student: Student, settings: DistillSettings, corpus: Corpus, marks: Sequence[Mark], **rest: Any) -> Card:
    trained = settings.train
    return Card(
        kind=settings.kind,
        weights=student.weights,
        shape=student.shape,
        data=(
            f"Trained on {corpus.tokens / 1e6:.2f}M tokens that the target wrote itself, at the temperatures "
            f"{', '.join(map(str, settings.data.temperatures))}, against the target's full distribution "
            f"(loss: {trained.loss}), for {marks[-1].step} of at most {trained.steps} steps."
        ),
        settings={**asdict(trained), **{f"data {k}": v for k, v in asdict(settings.data).items()}},
        marks=marks,
        **rest,
    )
