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

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Watch", "check_layers", "decoder_layers", "newly_watched"]


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


def check_layers(layers: Sequence[int], count: int) -> None:
    """Refuse layers that a stack of ``count`` does not have, and none at all."""
    if not layers or not all(0 <= layer < count for layer in layers):
        raise InvalidParameter("layers", f"must lie in 0 .. {count - 1}, not {list(layers)}")


def newly_watched(layers: Sequence[int], watched: tuple[int, ...]) -> tuple[int, ...] | None:
    """The layers that a runner is to watch from now on; None if it does. It cannot change what it watches."""
    wanted = tuple(layers)
    if watched and watched != wanted:
        raise ValueError(f"this runner already watches layers {watched}")
    return None if watched == wanted else wanted


class Watch:
    """Listens to the outputs of some decoder layers (0 is the first); side by side they are a token's *features*."""

    def __init__(self, model: PreTrainedModel, layers: Sequence[int]) -> None:
        stack = decoder_layers(model)
        self.layers = tuple(layers)
        check_layers(self.layers, len(stack))
        self._caught: dict[int, Tensor] = {}
        self._hooks = [stack[layer].register_forward_hook(partial(self._catch, layer)) for layer in set(self.layers)]

    def _catch(self, layer: int, module: nn.Module, arguments: Any, output: Any) -> None:
        self._caught[layer] = output[0] if isinstance(output, tuple) else output

    def take(self) -> Tensor:
        """The features [R, N, F] of the forward that just ran; they are handed out once."""
        parts = [self._caught[layer] for layer in self.layers]
        self._caught.clear()
        device = parts[-1].device  # layers may lie on several devices
        return torch.cat([part.to(device) for part in parts], dim=-1)

    def stop(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._caught.clear()
