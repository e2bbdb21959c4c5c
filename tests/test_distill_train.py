"""Training at toy scale: alpha rises, a wrong loss does not get there, and a killed run ends as a whole one does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from headstart import InvalidParameter
from headstart.distill import train
from headstart.distill.data import DataSettings, make_data
from headstart.distill.losses import Goal
from headstart.distill.shapes import draft_vocabulary, head_for, shallow_copy, watched_layers
from headstart.distill.shards import Corpus
from headstart.distill.students import HeadStudent, ModelStudent, Student, Teacher
from headstart.distill.train import Mark, Trainer, TrainSettings
from headstart.machine.load.loading import load
from headstart.maths.cost import CostModel
from headstart.testing import tiny_model

WORDS = 40
COST = CostModel(c=0.05, v={4: 1.2, 9: 1.6})
TOY = TrainSettings(
    steps=120, rows=12, learning_rate=5e-3, unroll=3, evaluate_every=40, checkpoint_every=30, warmup=0.1, seed=3
)


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    """Says mostly what follows from its last token, and says it clearly: something a toy can learn in seconds."""
    model = tiny_model("llama", vocab_size=WORDS, eos_token_id=None)
    model.generation_config.eos_token_id = None  # so that answers have their full length
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                parameter.mul_(0.05)
        model.get_output_embeddings().weight.mul_(2.5)
    return model


@pytest.fixture(scope="module")
def corpus(target: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    folder = tmp_path_factory.mktemp("data")
    settings = DataSettings(
        sequences=160, shard=80, prompt_tokens=16, answer_tokens=28, temperatures=(0.0, 1.0), rows=16, seed=1
    )
    make_data(load(target), folder, settings)
    return Corpus(folder, length=32)


def student(target: PreTrainedModel, kind: str = "head") -> Student:
    torch.manual_seed(0)
    if kind == "head":
        return HeadStudent(head_for(target, torch.arange(WORDS - 2), ffn=48), target)
    return ModelStudent(shallow_copy(target, 1), None)


def trained(
    target: PreTrainedModel, corpus: Corpus, folder: Path, settings: TrainSettings = TOY, kind: str = "head"
) -> Trainer:
    made = student(target, kind)
    teacher = Teacher(target, made.watch)
    try:
        trainer = Trainer(made, teacher, corpus, settings, COST, folder)
        trainer.run()
    finally:
        teacher.close()
    return trainer


def test_alpha_rises_and_a_wrong_loss_does_not_get_there(
    target: PreTrainedModel, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marks = trained(target, corpus, tmp_path / "right").marks
    assert marks[0].alpha[0] < 0.25
    assert min(marks[-1].alpha) > 0.55, marks[-1]
    assert min(marks[-1].greedy) > 0.5
    assert marks[-1].speedup > marks[0].speedup + 0.2
    assert marks[-1].tau_greedy > 2

    class Shuffled:
        """Every position is told what the target says somewhere else."""

        @staticmethod
        def of(logits: Tensor, ids: Tensor | None, temperature: Tensor) -> Goal:
            if not bool((temperature == 1).all()):  # in training; measuring stays honest
                logits = logits.roll(7, 0)
            return Goal.of(logits, ids, temperature)

    monkeypatch.setattr(train, "Goal", Shuffled)
    wrong = trained(target, corpus, tmp_path / "wrong").marks
    assert max(max(mark.alpha) for mark in wrong) < 0.45, wrong[-1]


@pytest.mark.parametrize("loss", ["forward", "reverse", "tv"])
def test_the_other_losses_learn_too(loss: str, target: PreTrainedModel, corpus: Corpus, tmp_path: Path) -> None:
    settings = TrainSettings(**vars(TOY) | {"loss": loss, "steps": 60, "evaluate_every": 60})
    marks = trained(target, corpus, tmp_path, settings).marks
    assert marks[-1].alpha[0] > marks[0].alpha[0] + 0.12


def test_a_model_draft_learns(target: PreTrainedModel, corpus: Corpus, tmp_path: Path) -> None:
    settings = TrainSettings(**vars(TOY) | {"steps": 40, "evaluate_every": 40, "learning_rate": 3e-3})
    marks = trained(target, corpus, tmp_path, settings, "model").marks
    assert marks[-1].alpha[0] > max(0.7, marks[0].alpha[0])


@pytest.mark.parametrize(("kind", "optimizer"), [("head", "muon"), ("head", "adamw"), ("model", "muon")])
def test_a_killed_run_ends_where_a_whole_one_does(
    kind: str, optimizer: str, target: PreTrainedModel, corpus: Corpus, tmp_path: Path
) -> None:
    short = {"steps": 24, "evaluate_every": 9, "checkpoint_every": 6, "rows": 6, "optimizer": optimizer}
    settings = TrainSettings(**vars(TOY) | short)
    whole = trained(target, corpus, tmp_path / "whole", settings, kind)

    class Killed(Exception):
        pass

    def kill(mark: Mark | None, step: int) -> None:
        if step == 17:
            raise Killed

    made = student(target, kind)
    teacher = Teacher(target, made.watch)
    with pytest.raises(Killed):
        Trainer(made, teacher, corpus, settings, COST, tmp_path / "cut").run(kill)
    teacher.close()
    resumed = trained(target, corpus, tmp_path / "cut", settings, kind)
    assert resumed.step == whole.step == 24
    assert resumed.marks == whole.marks
    for mine, other in zip(
        resumed.student.module.state_dict().values(), whole.student.module.state_dict().values(), strict=True
    ):
        assert torch.equal(mine, other)
    with pytest.raises(InvalidParameter, match="another learning_rate"):
        trained(target, corpus, tmp_path / "cut", TrainSettings(**vars(settings) | {"learning_rate": 1.0}), kind)


def test_killed_between_two_checkpoints(target: PreTrainedModel, corpus: Corpus, tmp_path: Path) -> None:
    """The old one is set aside, the new one not yet in its place, and half of another lies about."""
    settings = TrainSettings(**vars(TOY) | {"steps": 4, "evaluate_every": 4, "checkpoint_every": 2, "rows": 4})
    trained(target, corpus, tmp_path, settings)
    assert {path.stat().st_mode & 0o444 for path in (tmp_path / "checkpoint").iterdir()} == {0o444 & ~umask()}
    (tmp_path / "checkpoint").rename(tmp_path / ".checkpoint-old")
    left = tmp_path / ".checkpoint-123"
    left.mkdir()
    os.utime(left, (1e9, 1e9))
    made = student(target)
    teacher = Teacher(target, made.watch)
    assert Trainer(made, teacher, corpus, settings, COST, tmp_path).step == 4
    teacher.close()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def umask() -> int:
    before = os.umask(0)
    os.umask(before)
    return before


def test_muon_moves_the_matrices_and_adamw_the_rest(target: PreTrainedModel, corpus: Corpus, tmp_path: Path) -> None:
    made = student(target, "model")
    trainer = Trainer(made, Teacher(target), corpus, TOY, COST, tmp_path)
    names = {id(w): name for name, w in made.module.named_parameters()}
    muon, adamw = ({names[id(w)] for g in o.param_groups for w in g["params"]} for o in trainer._optimizers)
    assert "model.layers.0.mlp.up_proj.weight" in muon
    assert {"model.embed_tokens.weight", "model.norm.weight"} <= adamw
    assert muon | adamw == set(names.values())
    assert not muon & adamw
    with pytest.raises(InvalidParameter, match="optimizer"):
        TrainSettings(optimizer="sgd")  # type: ignore[arg-type]


def test_pieces_of_a_step_add_up(target: PreTrainedModel, corpus: Corpus, tmp_path: Path) -> None:
    """Accumulating gives the same schedule over the same rows; the mean is over pieces, so weights agree closely."""
    short = {"steps": 3, "evaluate_every": 3, "rows": 12}
    whole = trained(target, corpus, tmp_path / "a", TrainSettings(**vars(TOY) | short))
    pieces = trained(target, corpus, tmp_path / "b", TrainSettings(**vars(TOY) | short | {"accumulate": 3}))
    assert pieces.marks[-1].alpha == pytest.approx(whole.marks[-1].alpha, abs=0.05)
    with pytest.raises(InvalidParameter, match="accumulate"):
        TrainSettings(rows=4, accumulate=3)


def test_it_stops_when_the_predicted_speed_up_no_longer_rises(
    target: PreTrainedModel, corpus: Corpus, tmp_path: Path
) -> None:
    settings = TrainSettings(
        **vars(TOY) | {"steps": 200, "evaluate_every": 2, "patience": 3, "learning_rate": 0.0, "rows": 2}
    )
    trainer = trained(target, corpus, tmp_path, settings)
    assert trainer.step == 6, "three measurements after the first one, all alike"
    assert (tmp_path / "checkpoint" / "state.json").exists()


def test_the_rate_goes_up_and_comes_down() -> None:
    trainer = object.__new__(Trainer)
    trainer.settings = TrainSettings(steps=100, learning_rate=1.0, warmup=0.1)
    rates = [trainer.rate(step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == pytest.approx(1.0)
    assert max(rates) == rates[10] == pytest.approx(1.0)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] < 0.02


def test_a_draft_vocabulary_holds_the_frequent_words_and_the_end_marks() -> None:
    counts = torch.tensor([5, 0, 0, 9, 1, 0, 0])
    assert draft_vocabulary(counts, 4, [6]).tolist() == [0, 3, 4, 6]
    assert draft_vocabulary(counts, 5).tolist() == [0, 1, 2, 3, 4]
    assert draft_vocabulary(counts, 50).tolist() == list(range(7))
    assert watched_layers(30) == (2, 15, 28)
    assert watched_layers(2) == (0, 1)


def test_shallow_copies_keep_the_donors_layers(target: PreTrainedModel) -> None:
    deep = tiny_model("gemma2")
    draft = shallow_copy(deep, [2, 0])
    assert draft.config.num_hidden_layers == 2
    assert draft.config.layer_types == [deep.config.layer_types[2], deep.config.layer_types[0]]
    mine, theirs = draft.state_dict(), deep.state_dict()
    assert torch.equal(mine["model.layers.0.mlp.up_proj.weight"], theirs["model.layers.2.mlp.up_proj.weight"])
    assert torch.equal(mine["model.embed_tokens.weight"], theirs["model.embed_tokens.weight"])
    whole, last = shallow_copy(target, 2), shallow_copy(target, [1])
    ids = torch.arange(9)[None]
    with torch.no_grad():
        torch.testing.assert_close(whole(ids).logits, target(ids).logits)
        del whole.model.layers[0]
        whole.model.layers[0].self_attn.layer_idx, whole.config.num_hidden_layers = 0, 1
        assert torch.equal(last(ids).logits, whole(ids).logits), "the very model without its first layer"
    narrow = shallow_copy(target, 1, hidden_size=24, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1)
    assert narrow.get_input_embeddings().weight.shape[1] == 24
    vocab_ops, outer = (m.get_input_embeddings().weight.detach() for m in (narrow, target))
    near = torch.nn.functional.cosine_similarity(
        (vocab_ops @ vocab_ops.T).flatten(), (outer @ outer.T).flatten(), dim=0
    )
    assert near > 0.7, "words that are alike in the donor are alike in the copy"
    with pytest.raises(InvalidParameter, match=r"1 \.\. 2"):
        shallow_copy(target, 3)
    with pytest.raises(InvalidParameter, match="not a setting"):
        shallow_copy(target, 1, hiddn_size=3)
