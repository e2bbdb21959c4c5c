"""What a head needs of the target, and whether it was made for this one.

Knows: the runner's side that a head reads, and the sizes that must agree. Does not know: how a head drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from ..errors import ModelRefused
from ..machine.head import HeadNet
from ..machine.kvcache import Slab
from ..maths.inner import Inner

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["WatchedRunner", "check_shapes"]


class WatchedRunner(Protocol):
    """What the head needs of the target's runner."""

    @property
    def model(self) -> PreTrainedModel: ...
    @property
    def slab(self) -> Slab: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def inner(self) -> Inner: ...
    def watch(self, layers: Sequence[int]) -> None: ...
    def features(self, row: int, start: int, stop: int) -> Tensor: ...


def check_shapes(net: HeadNet, target: WatchedRunner, vocab_size: int) -> None:
    """Refuse a head that was made for another target."""
    c = net.config
    config = target.model.config.get_text_config(decoder=True)
    mine = (c.target_hidden, c.target_layers, c.target_vocab)
    theirs = (int(config.hidden_size), int(config.num_hidden_layers), target.vocab_size)
    if mine != theirs:
        raise ModelRefused(
            "this draft head was trained for another target: one with hidden size {}, {} layers and {} tokens; this "
            "one has {}, {} and {}; train one with `headstart distill`, or use draft='lookup'".format(*mine, *theirs)
        )
    if int(net.ids.max()) >= vocab_size:
        raise ModelRefused(f"this draft head says token {int(net.ids.max())}, but the tokenizer has only {vocab_size}")
