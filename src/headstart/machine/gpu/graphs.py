"""A sequence of kernels, captured once and replayed: what takes hundreds of launches then takes one.

Knows: CUDA graphs, their shared memory, and how to warm a function up before it is captured.
Does not know: what is captured. Without CUDA the function is simply called, so that everything around it is tested
everywhere.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

__all__ = ["Graphs"]


class Graphs:
    """Captures functions on one device. They share their scratch memory, so they must run one after another."""

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        """``priority``: -1 for what should get in between the kernels of others. Kernels keep it when replayed."""
        self.device = device
        self.enabled = device.type == "cuda"
        if self.enabled:
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]

    def capture(
        self, body: Callable[[], None], state: Sequence[Tensor], warm: Callable[[], None]
    ) -> Callable[[], None]:
        """Capture ``body``, which must not look at a tensor's value, and works on tensors that live as long as what
        comes back: to be called, it does the same. ``state``: what it changes; it is put back.

        ``warm``: a run, perhaps a shorter one, that launches every kernel the body launches.
        """
        if not self.enabled:
            return body
        kept = [tensor.clone() for tensor in state]
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            warm()  # compiles kernels and chooses algorithms, which may not be captured
            for tensor, value in zip(state, kept, strict=True):
                tensor.copy_(value)
            self._stream.synchronize()
            graph = self._graph_of(body)
        current.wait_stream(self._stream)
        return graph.replay

    def _graph_of(self, body: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Not ``torch.cuda.graph``: that collects garbage and empties the allocator each time, which takes longer."""
        graph = torch.cuda.CUDAGraph()
        collecting = gc.isenabled()
        gc.disable()  # what it frees of the device's memory would break the capture
        graph.capture_begin(pool=self._pool)
        try:
            body()
        except BaseException:
            with suppress(RuntimeError):  # it says that the capture broke, which is known
                graph.capture_end()
            raise
        finally:
            if collecting:
                gc.enable()
        graph.capture_end()
        return graph
