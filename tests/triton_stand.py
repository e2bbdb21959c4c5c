"""A GPU that is not there: enough of one for Triton to compile for it. Import only where triton is installed."""

from __future__ import annotations

from types import ModuleType

import torch
from triton import JITFunction
from triton.backends.compiler import GPUTarget

from headstart.machine.fused import compiling


class Driver(compiling._Stand):
    def __init__(self) -> None:
        super().__init__(GPUTarget("cuda", 90, 32))

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def forget(*modules: ModuleType) -> None:
    """The kernels of these modules are no longer there."""
    for module in modules:
        for thing in vars(module).values():
            if isinstance(thing, JITFunction):
                thing.device_caches.clear()
