"""Hidden states that fused models keep for a head, against those that the modules' own runner keeps."""

from __future__ import annotations

import pytest
import torch
from test_machine_gpu import DEVICE, build, draw, kernels

from headstart.errors import InvalidParameter
from headstart.machine.runner import EagerRunner
from headstart.maths.tree import Topology


@kernels
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral"])
def test_hidden_states_are_kept_for_a_head(name: str) -> None:
    """A prompt in two pieces (by cuBLAS and by the kernels for few tokens), two ragged rows, a tree."""
    from headstart.machine.gpu.runner import FusedRunner

    model = build(name, DEVICE, torch.float32)
    runners = [kind(model, rows=3, max_len=96) for kind in (EagerRunner, FusedRunner)]
    tree = Topology.of([(-1, -1, 0)] * 2, torch.device(DEVICE))
    first, second, drafts = draw(60, 1), draw(13, 2), draw(8, 3)
    found = []
    for runner in runners:
        runner.watch([0, 1])
        runner.prefill(1, first, chunk=48)
        runner.prefill(2, second)
        nodes = torch.tensor([drafts[:4], drafts[4:]], device=DEVICE)
        runner.forward(slice(1, 3), nodes, [60, 13], tree)
        found.append(torch.cat([runner.features(1, 0, 64), runner.features(2, 0, 17)]))
    eager, fast = found
    assert fast.shape == eager.shape
    assert float((fast - eager).norm() / eager.norm()) < 2e-5
    assert float(eager.std()) > 0.01
    with pytest.raises(ValueError, match="already watches"):
        runners[1].watch([0])


@kernels
def test_a_layer_that_is_not_there_is_refused() -> None:
    from headstart.machine.gpu.runner import FusedRunner

    runner = FusedRunner(build("llama", DEVICE, torch.float32), rows=1, max_len=64)
    with pytest.raises(InvalidParameter, match=r"0 \.\. 3"):
        runner.watch([4])
