"""Hidden states of chosen decoder layers, caught while the model runs.

Knows: where a Hugging Face causal LM keeps its decoder layers, and how to listen to some of them.
Does not know: who reads what was caught.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..errors import InvalidParameter, ModelRefused
from .kvcache import Slab

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Watch", "Watched", "decoder_layers"]


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The stack of decoder layers, the first of which reads the embeddings."""
    count = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count and count:
            return module
    raise ModelRefused(
        f"{type(model).__name__} keeps its decoder layers in no place known here, so no head can read them; "
        "use a small model or draft='lookup' instead"
    )


def _check_layers(layers: Sequence[int], count: int) -> None:
    """Refuse layers that a stack of ``count`` does not have, and none at all."""
    if not layers or not all(0 <= layer < count for layer in layers):
        raise InvalidParameter("layers", f"must lie in 0 .. {count - 1}, not {list(layers)}")


class Watched:
    """A runner's side of it: what was caught is kept beside every token's keys, for drafters that read it.

    It is stored as one layer more of the slab, so rollback, trees, row swaps and warm prefixes carry it along.
    """

    slab: Slab
    depth: int  # decoder layers
    watched: tuple[int, ...] = ()

    def watch(self, layers: Sequence[int]) -> None:
        """From now on keep the hidden states behind these decoder layers. That cannot be changed afterwards."""
        wanted = tuple(layers)
        if self.watched and self.watched != wanted:
            raise ValueError(f"this runner already watches layers {self.watched}")
        _check_layers(wanted, self.depth)
        if not self.watched:
            self._keep_from_now_on(wanted)
            self.watched = wanted

    def _keep_from_now_on(self, layers: tuple[int, ...]) -> None:
        raise NotImplementedError

    def features(self, row: int, start: int, stop: int) -> Tensor:
        """What ``watch`` kept of the tokens in a row's slots start .. stop - 1: [stop - start, F], a view."""
        return self.slab.layers[self.depth].keys[row, 0, start:stop]  # type: ignore[no-any-return]


class Watch:
    """Listens to the outputs of some decoder layers (0 is the first); side by side they are a token's *features*."""

    def __init__(self, model: PreTrainedModel, layers: Sequence[int]) -> None:
        stack = decoder_layers(model)
        self.layers = tuple(layers)
        _check_layers(self.layers, len(stack))
        self._caught: dict[int, Tensor] = {}
        self._hooks = [stack[layer].register_forward_hook(partial(self._catch, layer)) for layer in set(self.layers)]

    def _catch(self, layer: int, module: nn.Module, arguments: Any, output: Any) -> None:
        self._caught[layer] = output[0] if isinstance(output, tuple) else output

    def take(self, device: torch.device) -> Tensor:
        """The features [R, N, F] of the forward that just ran, on ``device``: layers may lie on several. They are
        handed out once."""
        parts = [self._caught[layer] for layer in self.layers]
        self._caught.clear()
        return torch.cat([part.to(device) for part in parts], dim=-1)

    def stop(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._caught.clear()
