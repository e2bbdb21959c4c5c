"""A sequence of kernels, recorded once and replayed: what takes hundreds of launches then takes one.

Knows: CUDA graphs, their shared memory, and how to warm a function up before it is recorded.
Does not know: what is recorded. Without CUDA the function is simply called, so that everything around it is tested
everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["Recorder", "Recording"]


class Recording:
    """One recorded function. It works on tensors that were there before it was recorded."""

    def __init__(self, body: Callable[[], None], graph: torch.cuda.CUDAGraph | None) -> None:
        self._body = body
        self._graph = graph

    def replay(self) -> None:
        if self._graph is None:
            self._body()
        else:
            self._graph.replay()


class Recorder:
    """Records functions on one device. They share their scratch memory, so they must run one after another."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.enabled = device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if self.enabled else None

    def record(self, body: Callable[[], None], *, state: Sequence[Tensor] = ()) -> Recording:
        """Record ``body``, which must not look at a tensor's value. ``state``: what it changes; it is put back."""
        if not self.enabled:
            return Recording(body, None)
        kept = [tensor.clone() for tensor in state]
        side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            body()  # compiles kernels and chooses algorithms, which a recording may not
            for tensor, value in zip(state, kept, strict=True):
                tensor.copy_(value)
        torch.cuda.current_stream(self.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            body()
        return Recording(body, graph)
