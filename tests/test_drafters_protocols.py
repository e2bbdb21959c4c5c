"""What runners and drafters say of themselves: who can draft on the device, who needs torch's threads."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from engines import Request, SamplingParams, run, table, table_draft, table_engine
from torch import Tensor

from headstart.config import EngineConfig
from headstart.control.controller import FixedController
from headstart.drafters.base import DeviceDrafter, Drafter
from headstart.drafters.lookup import LookupDrafter
from headstart.drafters.model import ModelDrafter
from headstart.engine.captured import CapturedRounds
from headstart.engine.engine import Engine
from headstart.machine.model_runner import DeviceRunner
from headstart.machine.runner import EagerRunner
from headstart.testing import TableRunner, tiny_model
from headstart.types import DraftView, Proposal

V = 6
TARGET, DRAFT = table(V, seed=1), table(V, seed=1) + 0.3 * table(V, seed=2)
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
REQUESTS = [Request(str(i), (1 + i, 3, 2), GREEDY) for i in range(3)]


class HostOnly(TableRunner):
    def on_device(self) -> DeviceRunner | None:
        return None


def test_a_draft_model_drafts_on_the_device_where_its_runner_can() -> None:
    on_device, on_host = (ModelDrafter(kind(DRAFT), vocab_size=V, width=V) for kind in (TableRunner, HostOnly))
    assert on_device.on_device() is on_device
    assert on_host.on_device() is None
    assert LookupDrafter().on_device() is None


def test_a_model_on_several_devices_is_not_captured() -> None:
    runner = EagerRunner(tiny_model("llama"), probe=False)
    assert runner.on_device() is runner
    runner.model.hf_device_map = {"model.embed_tokens": 0, "model.layers.0": 0}  # type: ignore[assignment]
    assert runner.on_device() is runner
    runner.model.hf_device_map = {"model.embed_tokens": 0, "model.layers.0": 1}  # type: ignore[assignment]
    assert runner.on_device() is None


class Foreign(Drafter):
    """Somebody else's drafter with a model on the device: all that a captured round may use of it, and nothing more."""

    def __init__(self, own: ModelDrafter) -> None:
        self._own = own
        self.aligned = 0

    def propose(self, views: Sequence[DraftView], budgets: Sequence[int]) -> list[Proposal | None]:
        return self._own.propose(views, budgets)

    def release(self, sequence_id: str) -> None:
        self._own.release(sequence_id)

    def on_device(self) -> DeviceDrafter:
        return self

    @property
    def device_runner(self) -> DeviceRunner:
        return self._own.device_runner

    def align(self, views: Sequence[DraftView]) -> None:
        self.aligned += 1
        self._own.align(views)

    def adopt(self, view: DraftView, accepted: Sequence[int]) -> None:
        self._own.adopt(view, accepted)

    def fit(self, logits: Tensor) -> Tensor:
        return self._own.fit(logits)

    def readable(self, tokens: Tensor) -> Tensor:
        return self._own.readable(tokens)


def test_captured_rounds_draft_with_any_device_drafter() -> None:
    target = TableRunner(TARGET, rows=4, max_len=64, margin=24)
    drafter = Foreign(table_draft(DRAFT))
    rounds = CapturedRounds(target, drafter.on_device(), vocab_size=V, lengths=(0, 3))
    rounds.warm_up()
    config = EngineConfig(max_rows=4)
    engine = Engine(target, drafter, FixedController(3), config, vocab_size=V, captured=rounds, max_gamma=3)
    found = run(engine, REQUESTS)
    assert [c.token_ids for c in found] == [c.token_ids for c in run(table_engine(TARGET, None), REQUESTS)]
    assert engine.inactive_reason is None
    assert drafter.aligned > 0
    assert sum(c.stats.accepted for c in found) > 0


class OwnThreads(TableRunner):
    """Stands for a model on kernels with threads of their own, and looks how many torch has meanwhile."""

    own_threads = True
    seen: set[int]

    def forward(self, *args: object, **kwargs: object) -> Tensor:
        self.__dict__.setdefault("seen", set()).add(torch.get_num_threads())
        return super().forward(*args, **kwargs)  # type: ignore[arg-type]


class OnTorch(LookupDrafter):
    needs_torch = True


@pytest.fixture
def two_threads() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(
    ("drafter", "threads"),
    [
        (lambda: None, 1),
        (LookupDrafter, 1),
        (OnTorch, 2),
        (lambda: table_draft(DRAFT), 2),
        (lambda: ModelDrafter(OwnThreads(DRAFT, rows=4), vocab_size=V, width=V), 1),
    ],
    ids=["none", "lookup", "on torch", "a model on torch", "a model with threads of its own"],
)
def test_torch_keeps_its_threads_only_where_it_runs_a_model(drafter: object, threads: int) -> None:
    runner = OwnThreads(TARGET, rows=4, margin=24)
    made = drafter() if callable(drafter) else None
    engine = Engine(runner, made, FixedController(3), EngineConfig(max_rows=4), vocab_size=V)
    run(engine, REQUESTS)
    assert runner.seen == {threads}
