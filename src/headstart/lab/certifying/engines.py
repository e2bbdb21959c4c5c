"""The engines that a certificate asks: the one that serves, and others over the same target for tests.

Knows: how engines are put together over one runner, and who decides about drafted tokens in them. Does not know: tests.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...config import DraftConfig
from ...control.controller import FixedController
from ...drafters.base import Drafter
from ...engine.captured import CapturedRounds
from ...engine.device_rows import PROGRAMS
from ...engine.engine import Engine
from ...engine.warm_up import open_captured
from ...machine.gpu import available
from ...machine.load.loading import eos_ids
from ...maths.asks import asks_of
from ...maths.vocab_ops import PLAIN, VocabOps
from ...maths.warp import UNTOUCHED
from ...types import SamplingParams, silent
from ..system import System

__all__ = ["Engines"]


class _ByTensors:
    """A runner whose logits are judged by tensors, whatever its own kernels could do."""

    vocab_ops: VocabOps = PLAIN

    def __init__(self, runner: Any) -> None:
        self._inner = runner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def on_device(self) -> None:
        """It is not captured either."""
        return


class Engines:
    """Engines over one system's target. They share its slab, so only one may run at a time; each run begins cold."""

    def __init__(self, system: System, gamma: int) -> None:
        self.system, self.gamma = system, gamma
        self.engine = system.engine
        self.drafter = self.engine.parts.drafter
        self._captured: dict[int, CapturedRounds | None] = {}  # by draft length, of drafters on the host

    @property
    def width(self) -> int:
        return self.engine.parts.runner.vocab_size

    def of(self, drafter: Drafter | None, *, gamma: int | None = None, by_tensors: bool = False) -> Engine:
        """An engine with another drafter; ``by_tensors``: and another judge."""
        parts, most = self.engine.parts, gamma or self.gamma
        runner: Any = _ByTensors(parts.runner) if by_tensors else parts.runner
        captured = None
        if not by_tensors and runner.device.type == "cuda":
            captured = self._rounds(drafter, most)
        engine = Engine(
            runner,
            drafter,
            FixedController(most),
            replace(self.engine.config, max_waiting=1024),
            vocab_size=parts.vocab_size,
            eos=eos_ids(self.system.target),
            captured=captured,
            max_gamma=most,
        )
        if drafter is not None:
            lengths = captured.lengths if captured is not None and captured.drafting else None
            engine.parts.controller.meet(free=drafter.free, ends_itself=drafter.ends_itself, lengths=lengths)
        return engine

    def _rounds(self, drafter: Drafter | None, gamma: int) -> CapturedRounds | None:
        """Captured rounds for guesses from the host; whose they are does not matter to them."""
        assert drafter is None or drafter.on_device() is None
        if gamma not in self._captured:
            parts, config = self.engine.parts, DraftConfig(gamma=gamma, overlap=False)
            named: dict[str, Any] = {
                "name": "the target",
                "masks": False,
            }  # none of the laws that these are held against has a grammar
            self._captured[gamma] = open_captured(parts.runner, drafter, config, parts.vocab_size, silent, **named)
        return self._captured[gamma]

    def backend(self, engine: Engine, params: SamplingParams) -> str:
        """Who decides about such requests' drafts in this engine: the same question that ``judge`` asks."""
        asks, parts = asks_of(params), engine.parts
        if parts.captured is not None and PROGRAMS["full"].takes([asks]):
            kernels = "Triton kernels" if available() is None else "tensors"
            return f"captured rounds ({kernels})"
        if parts.runner.device.type == "cpu" and UNTOUCHED.takes([asks]):
            return "argmax on the host"
        judges = parts.runner.vocab_ops.judges
        return "C++ kernels" if judges is not None and judges.takes([asks]) else "tensors"
