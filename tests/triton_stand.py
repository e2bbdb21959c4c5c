"""A GPU that is not there: enough of one for Triton to compile for it. Import only where triton is installed.

What is touched of Triton here, and why there is no other way:

    driver._active   ``set_active`` puts a driver in, but only ``reset_active`` takes it out, which looks for a GPU
    device_caches    where Triton keeps what it has compiled: nothing else makes it forget, or take what we give it

All else goes by its own hooks (``triton.knobs``).
"""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
import triton
from triton import JITFunction
from triton.backends.compiler import GPUTarget

from headstart.machine.gpu.compile import compiling


class Driver(compiling._Stand):
    def __init__(self) -> None:
        super().__init__(GPUTarget("cuda", 90, 32))

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the time of a test, Triton believes in that GPU."""
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver())


def forget(*modules: ModuleType) -> None:
    """The kernels of these modules are no longer there."""
    for module in modules:
        for thing in vars(module).values():
            if isinstance(thing, JITFunction):
                thing.device_caches.clear()
