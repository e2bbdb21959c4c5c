"""Two drafts for the embedded model that lab_advise.py compares with the one that ships: a small model, distilled in
minutes, and the shipped head with noise on its weights.

Knows: how both are made, and where they go. Does not know: what they are worth.

    python benchmarks/lab_drafts.py model --out DIR [--steps 60] [--device cuda]     goes on where it was stopped
    python benchmarks/lab_drafts.py worse --out DIR [--noise 0.6]
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from common import log, prompts

from headstart.distill.data import DataSettings
from headstart.distill.make import DistillSettings, distill
from headstart.distill.train import Mark, TrainSettings
from headstart.machine.head import load_head, save_head
from headstart.machine.load.embedded import HUB_ID, embedded_draft, embedded_folder
from headstart.machine.load.loading import load


class _Told:
    """Progress as lines."""

    def stage(self, text: str) -> None:
        log(text)

    def data(self, done: int, total: int) -> None:
        log(f"data: {done} of {total}")

    def training(self, mark: Mark | None, step: int) -> None:
        if mark is not None:
            log(f"step {step}: {mark}")


def model(out: Path, given: argparse.Namespace) -> None:
    """A small model, taught by a little of the target's own text. On a GPU the target asks itself, in bulk."""
    cuda = given.device == "cuda"
    data = DataSettings(
        sequences=given.sequences,
        shard=200 if cuda else 8,
        temperatures=(0.0, 1.0),
        answer_tokens=128 if cuda else 64,
        rows=16 if cuda else 8,
    )
    every = max(1, given.steps // 5)
    train = TrainSettings(
        steps=given.steps, rows=16 if cuda else 4, evaluate_every=every, checkpoint_every=every, patience=0
    )
    settings = DistillSettings(
        kind="model",
        layers=given.layers,
        width=given.width,
        length=320 if cuda else 192,
        proof_prompts=2,
        proof_tokens=24,
        data=data,
        train=train,
    )
    dtype = torch.bfloat16 if cuda else torch.float32  # the kernels that write in bulk take half precision
    target = load(embedded_folder(), dtype=dtype, device=given.device)
    asked = [text for kind in prompts().values() for text in kind]  # not those that lab_advise.py measures on
    command = f"python benchmarks/lab_drafts.py model --steps {given.steps} --sequences {given.sequences}"
    distill(target, out, settings, _Told(), name=HUB_ID, prompts=None if cuda else asked, command=command)


def worse(out: Path, noise: float) -> None:
    """The head that ships, each matrix with noise of so many of its own standard deviations."""
    shipped = embedded_draft()
    assert shipped is not None
    net = load_head(shipped)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for matrix in net.parameters():
            said = torch.randn(matrix.shape, generator=generator) * matrix.float().std()
            matrix.add_((noise * said).to(matrix))
    shutil.rmtree(out, ignore_errors=True)
    save_head(net, out, {"made_by": f"benchmarks/lab_drafts.py worse --noise {noise}"}, torch.bfloat16)
    log(f"{out.name}: the shipped head with noise {noise}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("model", "worse"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--sequences", type=int, default=24)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--noise", type=float, default=0.6)
    parser.add_argument("--threads", type=int, default=1, help="torch's; two collapse on a busy machine")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if given.kind == "model":
        model(given.out, given)
    else:
        worse(given.out, given.noise)


if __name__ == "__main__":
    main()
