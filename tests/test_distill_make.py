"""The whole of distilling: a folder that can be served, a card, and going on after a crash."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizer_tools import smollm
from transformers import AutoModelForCausalLM, PreTrainedModel
from typer.testing import CliRunner

from headstart import LLM, InvalidParameter, SamplingParams
from headstart.cli.main import app
from headstart.distill import make
from headstart.distill.card import draw_curve
from headstart.distill.data import DataSettings, make_data
from headstart.distill.make import DistillSettings, distill
from headstart.distill.train import Mark, TrainSettings
from headstart.machine.load.loading import load
from headstart.testing import tiny_model

WORDS = 40
GREEDY = SamplingParams(temperature=0, max_tokens=16)


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    model = tiny_model("llama", vocab_size=WORDS, eos_token_id=None)
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                parameter.mul_(0.05)
        model.get_output_embeddings().weight.mul_(2.5)
    return model


def settings(kind: str, steps: int = 60) -> DistillSettings:
    return DistillSettings(
        kind=kind,  # type: ignore[arg-type]
        vocab=WORDS - 2,
        layers=1,
        ffn=48,
        length=32,
        proof_prompts=4,
        proof_tokens=16,
        gamma=3,
        data=DataSettings(sequences=80, shard=40, prompt_tokens=16, answer_tokens=24, rows=16),
        train=TrainSettings(
            steps=steps, rows=12, learning_rate=5e-3, unroll=3, evaluate_every=20, checkpoint_every=20, warmup=0.1
        ),
    )


@pytest.fixture(scope="module")
def text(target: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target's own text, made once for several drafts."""
    folder = tmp_path_factory.mktemp("text")
    make_data(load(target), folder / "training" / "data", settings("head").data)
    return folder


class Told:
    """Hears how it goes."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.steps = 0

    def stage(self, text: str) -> None:
        self.stages.append(text.partition(":")[0])

    def data(self, done: int, total: int) -> None:
        assert 1 <= done <= total

    def training(self, mark: Any, step: int) -> None:
        self.steps = max(self.steps, step)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["head", "model"])
def test_a_draft_is_made_served_and_described(
    kind: str, target: PreTrainedModel, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    told = Told()
    if kind == "model":
        shutil.copytree(request.getfixturevalue("text"), tmp_path, dirs_exist_ok=True)
    before, after = distill(load(target), tmp_path, settings(kind), told, name="tiny", command="headstart distill ...")
    assert told.stages == ["text", "the untrained draft, for comparison", "training", "proof"]
    assert told.steps == 60
    assert after.same_tokens
    assert before.same_tokens
    assert after.tau_greedy > max(1.5, before.tau_greedy if kind == "head" else 0)
    card = (tmp_path / "README.md").read_text()
    for part in (
        f"draft {kind} for tiny",
        "| after |",
        "headstart distill ...",
        "| torch |",
        f"{after.tau_greedy:.2f}",
    ):
        assert part in card
    record = json.loads((tmp_path / "card.json").read_text())
    assert record["after"]["tau"] == after.tau
    assert record["marks"][-1]["step"] == 60
    plain = LLM(target, None, max_model_len=64, check=False)
    llm = LLM(target, str(tmp_path), gamma=3, max_model_len=64, check=False)
    prompt = [5, 9, 3]
    assert llm.generate(prompt, GREEDY).token_ids == plain.generate(prompt, GREEDY).token_ids
    assert llm.stats.accepted > 3
    if kind == "model":
        served = AutoModelForCausalLM.from_pretrained(tmp_path)
        ids = torch.tensor([prompt])
        out = target.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            assistant_model=served,
            do_sample=False,
            max_new_tokens=16,
            pad_token_id=0,
        )
        assert tuple(out[0, 3:].tolist()) == plain.generate(prompt, GREEDY).token_ids


def test_a_narrow_model_directory_loads_in_plain_transformers(
    target: PreTrainedModel, text: Path, tmp_path: Path
) -> None:
    shutil.copytree(text, tmp_path, dirs_exist_ok=True)
    narrow = replace(settings("model", 100), layers=2, width=24, ffn=None)
    before, after = distill(load(target), tmp_path, narrow, Told())
    assert after.tau_greedy > before.tau_greedy + 0.2
    served = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert served.config.hidden_size == 24
    ids = torch.tensor([[5, 9, 3]])
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 16, "pad_token_id": 0}
    plain = target.generate(ids, **options)  # type: ignore[operator]
    assisted = target.generate(ids, assistant_model=served, **options)  # type: ignore[operator]
    assert torch.equal(plain, assisted)
    with pytest.raises(InvalidParameter, match="width must be a multiple of 12"):
        distill(load(target), tmp_path / "odd", replace(settings("model"), width=30), Told())


def test_a_crash_between_the_stages_costs_nothing(target: PreTrainedModel, text: Path, tmp_path: Path) -> None:
    """The proof blows up after training; the second call finds everything done and gives the same draft."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    shutil.copytree(text, whole)
    distill(load(target), whole, settings("head", 20), Told())
    shutil.copytree(whole / "training", cut / "training")
    shutil.rmtree(cut / "training" / "checkpoint")
    distill(load(target), cut, settings("head", 20), Told())
    assert (cut / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert (cut / "training" / "cost.json").read_bytes() == (whole / "training" / "cost.json").read_bytes()


def test_a_donor_must_share_the_tokenizer(target: PreTrainedModel, tmp_path: Path) -> None:
    tiny_model("llama", vocab_size=50).save_pretrained(tmp_path / "donor")
    with pytest.raises(InvalidParameter, match="donor cannot lend"):
        distill(load(target), tmp_path / "out", settings("model"), Told(), donor=str(tmp_path / "donor"))
    with pytest.raises(InvalidParameter, match="kind"):
        settings("tree")


def test_the_curve(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    marks = [
        Mark(i * 10, 1.0 / (i + 1), (0.1 * i,), (0.1 * i,), 1 + 0.1 * i, 1 + 0.2 * i, 1 + 0.1 * i) for i in range(4)
    ]
    assert draw_curve(marks, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 1000
    assert not draw_curve(marks[:1], tmp_path / "none.png")


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a real tokenizer and its chat template, from the first word to a draft that opens by its folder's name."""
    whole = make.prove  # over texts of 64 tokens; here they are short
    monkeypatch.setattr(make, "prove", lambda *given, **more: whole(*given, **more | {"tokens": 16}))
    tokenizer = smollm()
    folder, prompts = tmp_path / "target", tmp_path / "prompts.txt"
    tiny_model("llama", vocab_size=len(tokenizer), num_hidden_layers=1).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    prompts.write_text("\n".join(f"What is {i} and {i}?" for i in range(8)))
    arguments = ["--model", str(folder), "--prompts", str(prompts), "--sequences", "8", "--answer-tokens", "8"]
    arguments += ["--steps", "2", "--batch", "2", "--vocab", "64", "--rows", "4"]
    result = CliRunner().invoke(app, ["distill", "--out", str(tmp_path / "draft"), *arguments])
    assert result.exit_code == 0, result.output
    assert "after" in result.stdout
    assert "predicted speed-up" in result.stderr
    again = CliRunner().invoke(app, ["distill", "--out", str(tmp_path / "draft"), *arguments])
    assert again.exit_code == 0, again.output
    out = CliRunner().invoke(app, ["generate", "-m", str(folder), "-d", str(tmp_path / "draft"), "-n", "8", "Hello"])
    assert out.exit_code == 0, out.output
    wrong = CliRunner().invoke(app, ["distill", "--out", str(tmp_path / "draft"), *arguments, "--temperatures", "hot"])
    assert wrong.exit_code == 2
    assert "temperatures" in wrong.stderr
