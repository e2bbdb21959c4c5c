"""Grouped attention without copies: the one piece of a Hugging Face model that the eager runner replaces.

Knows: how to attend with fewer key heads than query heads under a mask. Does not know: what the mask means.

With a mask, transformers repeats every key and value once per query head before each attention call, because some
GPU kernels want that. On the CPU the kernel takes grouped heads as they are, bit for bit the same and three to
four times faster: with 256 tokens of context and 8 rows the copies cost more than half of a step.

The replacement is lent to the model for the length of one forward, so that the model behaves as before for
everybody else.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

__all__ = ["GROUPED", "evaluating", "grouped_attention", "lend", "lock_of", "wants_grouped"]

GROUPED = "headstart_grouped"


def grouped_attention(
    module: torch.nn.Module,
    query: Tensor,  # [R, heads, N, dim]
    key: Tensor,  # [R, kv_heads, live, dim]
    value: Tensor,
    attention_mask: Tensor | None,  # [R, 1, N, live]
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls for each layer; returns [R, N, heads, dim]."""
    if kwargs.get("softcap") is not None or kwargs.get("position_bias") is not None:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        found: tuple[Tensor, None] = ALL_ATTENTION_FUNCTIONS["sdpa"](
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return found
    attended = torch.nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        dropout_p=dropout,
        scale=scaling,
        is_causal=attention_mask is None and query.shape[2] > 1,
        enable_gqa=True,
    )
    return attended.transpose(1, 2).contiguous(), None


def wants_grouped(config: Any, device: torch.device) -> bool:
    """Is there anything to win: grouped heads, on the CPU, in a model that would use SDPA?"""
    heads = getattr(config, "num_attention_heads", None)
    groups = getattr(config, "num_key_value_heads", None)
    wanted = config._attn_implementation == "sdpa" and device.type == "cpu" and bool(groups) and groups != heads
    if wanted:
        _register()
    return wanted


_locks: WeakKeyDictionary[torch.nn.Module, Lock] = WeakKeyDictionary()  # of models that runners may share
_over_locks = Lock()


def lock_of(model: torch.nn.Module) -> Lock:
    """One lock a model: what a forward lends to the model must not meet another thread's forward."""
    with _over_locks:
        return _locks.setdefault(model, Lock())


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Without dropout: a model that its owner trains meanwhile is put into evaluation mode, and back afterwards."""
    if not model.training:
        yield
        return
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def lend(config: Any) -> Iterator[None]:
    """Let the model with this (text) config attend with ``grouped_attention``, and give it back its own afterwards."""
    # The field behind the property: the property's setter also walks through all sub-configs, 30 us a forward.
    config._attn_implementation_internal = GROUPED
    try:
        yield
    finally:
        config._attn_implementation_internal = "sdpa"  # what ``wants_grouped`` found; by name, so that nothing sticks


@cache
def _register() -> None:
    """Make the name known to transformers. Not at import: this part of it takes seconds to import."""
    from transformers import AttentionInterface

    # No mask function is registered beside it: without a mask from us, transformers then passes None on, which is
    # what the runner means by it.
    AttentionInterface.register(GROUPED, grouped_attention)
